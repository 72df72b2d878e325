"""Ways to compute attention over packed rows, and the registry of them.

To add one: write a function `(query, key, value, layout, scale, window)` here, register it at its place in the order of
preference, and add its name to model.attention in settings/. tests/test_attention.py tests every packed kernel that
runs on a CPU against the dense rule; add a test where yours does not. `model.attention=auto` then tries it wherever its
devices and dtypes fit, and uses it if it scores as the model itself does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import private_apis
from modeling.block_masks import BLOCK
from modeling.packed_layout import PackedLayout, Piece, Sequences


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention.

    Attributes:
        name: what model.attention calls it. Kernels of one name are one choice: the first that can do a call does it.
        layout: "packed" (one row of prefix trees) or "padded" (one response a row).
        devices: kinds of device it runs on; empty for all.
        dtypes: of queries, keys and values; empty for all.
        lacks: features of attention that it cannot compute, out of FEATURES.
        automatic: whether model.attention=auto may choose it.
        row_multiple: packed rows are filled up to a multiple of so many tokens.
        function: (query [1, H, T, D], key [1, H_kv, T, D], value [1, H_kv, T, D_v], layout, scale, window)
            -> [1, T, H, D_v], with softcap=... and sinks=... where a model has them and the kernel does not lack them;
            None for the model's own attention, which padded rows go through.
    """

    name: str
    layout: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    lacks: tuple[str, ...]
    automatic: bool
    row_multiple: int
    function: Callable | None

    def runs_on(self, device: str, dtype: torch.dtype) -> bool:
        return (not self.devices or device in self.devices) and (not self.dtypes or dtype in self.dtypes)


FEATURES = ("softcap", "sinks", "value width")  # the last: values of another width than queries and keys
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KERNELS: list[Kernel] = []  # in order of preference


def register_kernel(
    name: str,
    *,
    layout: str,
    devices: tuple[str, ...] = (),
    dtypes: tuple[torch.dtype, ...] = (),
    lacks: tuple[str, ...] = (),
    automatic: bool = True,
    row_multiple: int = 1,
):
    """Register the decorated function as an attention kernel, after those registered before. See `Kernel`."""
    assert layout in ("packed", "padded") and set(lacks) <= set(FEATURES), (name, layout, lacks)

    def register(function):
        KERNELS.append(Kernel(name, layout, devices, dtypes, lacks, automatic, row_multiple, function))
        return function

    return register


def kernel_names() -> list[str]:
    """Names of all kernels in order of preference."""
    return list(dict.fromkeys(kernel.name for kernel in KERNELS))


def candidates(device: str, dtype: torch.dtype) -> list[str]:
    """Names of the packed kernels that model.attention=auto tries on a kind of device, in order of preference."""
    fitting = [k.name for k in KERNELS if k.layout == "packed" and k.automatic and k.runs_on(device, dtype)]
    return list(dict.fromkeys(fitting))


def is_packed(name: str) -> bool:
    """Whether a kernel reads packed rows."""
    return any(kernel.layout == "packed" for kernel in KERNELS if kernel.name == name)


def row_multiple(name: str) -> int:
    """What the length of packed rows for a kernel is a multiple of."""
    return max(kernel.row_multiple for kernel in KERNELS if kernel.name == name)


def kernel_for(name: str, device: str, dtype: torch.dtype, needs: tuple[str, ...]) -> Kernel:
    """The packed kernel that computes one call: the first of this name that can, else the first of another name (under
    flex a layer with soft-capping, say).
    """
    packed = [kernel for kernel in KERNELS if kernel.layout == "packed" and kernel.runs_on(device, dtype)]
    for kernel in [k for k in packed if k.name == name] + [k for k in packed if k.name != name]:
        if not any(feature in kernel.lacks for feature in needs):
            return kernel
    raise NotImplementedError(f"no attention kernel computes {', '.join(needs)} on {device}")


# ---------------------------------------------------------------------------------------------------------------------
# FlexAttention: one call with a block mask

_compiled_flex = None
FLEX_LACKS = ("softcap", "sinks")
# Two blocks of the mask at least: a dimension of size one is compiled for itself.
FLEX_ROWS = 2 * BLOCK


@register_kernel("flex", layout="packed", devices=("cuda",), dtypes=FLOATS, lacks=FLEX_LACKS, row_multiple=FLEX_ROWS)
def flex(query, key, value, layout: PackedLayout, scale: float, window: int | None) -> torch.Tensor:
    """FlexAttention, compiled: the whole row in one call."""
    global _compiled_flex
    from torch.nn.attention.flex_attention import flex_attention

    if _compiled_flex is None:
        _compiled_flex = torch.compile(flex_attention, dynamic=True)
    return _call_flex(_compiled_flex, query, key, value, layout, scale, window)


@register_kernel("flex", layout="packed", devices=("cpu",), lacks=FLEX_LACKS, automatic=False, row_multiple=FLEX_ROWS)
def flex_uncompiled(query, key, value, layout: PackedLayout, scale: float, window: int | None) -> torch.Tensor:
    """FlexAttention as plain operations: for checking the rule, not for speed."""
    from torch.nn.attention.flex_attention import flex_attention

    return _call_flex(flex_attention, query, key, value, layout, scale, window)


def _call_flex(function, query, key, value, layout, scale, window):
    output = function(
        query,
        key,
        value,
        block_mask=layout.block_mask(window),
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
        # Below 128 tokens torch chooses flex-decoding, which has no configuration for grouped heads of so many rows.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return output.transpose(1, 2).contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# Flash attention over sequences of any length: each piece is one, with its prompt's keys copied before its own


@register_kernel("varlen", layout="packed", devices=("cuda",), dtypes=(torch.bfloat16, torch.float16), lacks=FEATURES)
@torch.compiler.disable  # its sequences are lists of the host
def varlen(query, key, value, layout: PackedLayout, scale: float, window: int | None) -> torch.Tensor:
    """Flash attention (arXiv 2307.08691) in one call of torch's `varlen_attn`, for cards and shapes that FlexAttention
    does not compile for.

    Queries are aligned with the last of their sequence's keys, so that a response sees its whole prompt, and a window
    counts from there. The copies of the prompts' keys and values are all that this costs over two calls merged by their
    log-sum-exp, which windows rule out: they would need another width for each response.
    """
    plan = layout.sequences
    keys, values = (_CopyPrompts.apply(tensor[0].transpose(0, 1), plan) for tensor in (key, value))
    output = varlen_attention(query[0].transpose(0, 1).contiguous(), keys, values, plan, scale, window)
    return output[None]


def varlen_attention(query, key, value, plan: Sequences, scale: float, window: int | None) -> torch.Tensor:
    """[T, H, D] queries, [K, H_kv, D] keys and values of the plan's sequences -> [T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    # Releases before the option group heads by themselves.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return varlen_attn(
        query,
        key,
        value,
        plan.query_starts,
        plan.key_starts,
        plan.most_queries,
        plan.most_keys,
        scale=scale,
        # (keys to the left, keys to the right) of the query's own; -1 is all.
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )


class _CopyPrompts(torch.autograd.Function):
    """[T, H, D] of the row -> [K, H, D] of the sequences. Its gradient gathers a token's copies one by one, summed in
    fp32: index_add would add them in an order of its own each time, and in the tensor's precision.
    """

    @staticmethod
    def forward(ctx, tensor, plan):
        ctx.plan = plan
        return tensor[plan.copied]

    @staticmethod
    def backward(ctx, upstream):
        wide = torch.promote_types(upstream.dtype, torch.float32)
        padded = torch.cat([upstream, upstream.new_zeros(1, *upstream.shape[1:])])
        first, *others = ctx.plan.copies
        total = padded[first].to(wide)
        for places in others:
            total += padded[places]
        return total.to(upstream.dtype), None


# ---------------------------------------------------------------------------------------------------------------------
# Exact pieces: each prompt attends to itself, each response to its prompt and itself


@register_kernel("packed_sdpa", layout="packed", devices=("cpu",), dtypes=FLOATS, lacks=FEATURES)
@torch.compiler.disable  # the pieces differ from row to row: a compiled block would be compiled anew for each
def packed_sdpa_cpu(query, key, value, layout: PackedLayout, scale: float, window: int | None) -> torch.Tensor:
    """`packed_sdpa` with the CPU's fused kernel called directly, for less memory: see `_CpuPieces`."""
    if private_apis.cpu_flash_attention() is None:
        return packed_sdpa(query, key, value, layout, scale, window)
    return _CpuPieces.apply(query, key, value, layout, scale, window)


class _CpuPieces(torch.autograd.Function):
    """For `packed_sdpa` autograd keeps a copy of its prompt's keys and values for each response, and repeated heads: a
    fifth of all activations. Here each piece is cut out again when its turn comes in the backward pass.

    query [1, H, T, D]; key, value [1, H_kv, T, D] -> [1, T, H, D].
    """

    @staticmethod
    def forward(ctx, query, key, value, layout, scale, window):
        attend, _ = private_apis.cpu_flash_attention()
        _, heads, length, width = query.shape
        output = query.new_empty(1, length, heads, width)
        normalizers = query.new_empty(1, heads, length, dtype=torch.float32)
        for piece in layout.pieces:
            rows, prompt = piece.rows, layout.prompt_rows(piece)
            mask = layout.bias(piece, window, query.dtype)
            found, normalizer = attend(
                query[:, :, rows],
                _behind_prompt(key, prompt, rows),
                _behind_prompt(value, prompt, rows),
                0.0,
                mask is None,
                attn_mask=mask,
                scale=scale,
            )
            output[:, rows] = found.transpose(1, 2)
            normalizers[:, :, rows] = normalizer
        ctx.save_for_backward(query, key, value, output, normalizers)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
        return output

    @staticmethod
    def backward(ctx, upstream):
        _, attend_backward = private_apis.cpu_flash_attention()
        query, key, value, output, normalizers = ctx.saved_tensors
        upstream, output = upstream.transpose(1, 2), output.transpose(1, 2)
        grad_query = torch.empty_like(query)
        # A prompt's keys gather a share from each response: summed in fp32, as autograd's own sum would not be.
        grad_key, grad_value = (torch.empty_like(tensor, dtype=torch.float32) for tensor in (key, value))
        for piece in ctx.layout.pieces:
            rows, prompt = piece.rows, ctx.layout.prompt_rows(piece)
            mask = ctx.layout.bias(piece, ctx.window, query.dtype)
            of_query, *of_keys = attend_backward(
                upstream[:, :, rows],
                query[:, :, rows],
                _behind_prompt(key, prompt, rows),
                _behind_prompt(value, prompt, rows),
                output[:, :, rows],
                normalizers[:, :, rows],
                0.0,
                mask is None,
                attn_mask=mask,
                scale=ctx.scale,
            )
            grad_query[:, :, rows] = of_query
            shared = 0 if prompt is None else prompt.stop - prompt.start
            for total, share in zip((grad_key, grad_value), of_keys):
                total[:, :, rows] = share[:, :, shared:]
                if shared:
                    total[:, :, prompt] += share[:, :, :shared]
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _behind_prompt(tensor, prompt: slice | None, rows: slice):
    """Rows of [1, H, T, D], behind those of their prompt if they have one."""
    own = tensor[:, :, rows]
    return own if prompt is None else torch.cat([tensor[:, :, prompt], own], dim=2)


@register_kernel("packed_sdpa", layout="packed")
@torch.compiler.disable  # see packed_sdpa_cpu
def packed_sdpa(
    query, key, value, layout: PackedLayout, scale: float, window: int | None, softcap=None, sinks=None
) -> torch.Tensor:
    """One `scaled_dot_product_attention` a piece."""
    key, value = repeat_heads(query, key, value)
    # One split each, so that the backward pass is one concatenation and not a full-size zero tensor a slice.
    queries, keys, values = (tensor.split(layout.sizes, dim=2) for tensor in (query, key, value))

    def attend_piece(number: int, piece: Piece):
        own_key, own_value = keys[number], values[number]
        if piece.prompt is not None:
            own_key = torch.cat([keys[piece.prompt], own_key], dim=2)
            own_value = torch.cat([values[piece.prompt], own_value], dim=2)
        return attend(queries[number], own_key, own_value, layout.mask(piece, window), scale, softcap, sinks)

    outputs = [attend_piece(number, piece) for number, piece in enumerate(layout.pieces)]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def attend(query, key, value, mask, scale: float, softcap: float | None, sinks) -> torch.Tensor:
    """Attention of [1, H, Q, D] queries to [1, H, K, D] keys; `mask` None is causal. Returns [1, H, Q, D]."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    # No fused kernel knows soft-capping or attention sinks; the pieces are small enough to write it out.
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        # While generating, the queries are the last of the keys' positions.
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = ones.tril(scores.shape[-1] - scores.shape[-2])
    # The least number and not -inf: a padding row that sees nothing must not become NaN and spread.
    scores = scores.float().masked_fill(~mask, torch.finfo(torch.float32).min)
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1).to(value.dtype)
    return weights[..., : key.shape[-2]] @ value


def repeat_heads(query, key, value):
    """Keys and values [1, H_kv, T, D] with each head repeated for the query heads that share it, [1, H, T, D]."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# One response a row, padded, under the attention that the model comes with

register_kernel("plain", layout="padded")(None)
