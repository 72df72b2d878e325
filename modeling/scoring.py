"""One forward pass: a micro-batch of packed rows in, log-probabilities of its responses out.

Three ideas make this cheap, and each is exact:

* A prompt is computed once for all its responses. The packed row holds trees (a prompt, then its responses, whose
  positions restart after it); attention is causal inside the prompt, and inside prompt + response for each response.
* The language-model head runs on the positions that predict response tokens only, a part of the vocabulary at a time,
  and each part's logits are recomputed in the backward pass, so full logits never exist.
* There is no padding: all linear layers see one long row.

The packed attention is a function that the model library calls in place of its own. Models that cannot be served so
(ALiBi, recurrent, code with attention of its own) are scored one response a row; `choose_attention` finds out by
scoring a group both ways.
"""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from data.batching import MicroBatch, PrefixTree, PromptUnit, pack, pad

ATTENTION_NAME = "packed_prompt_groups"
# Bytes of fp32 logits that may exist at once. On a CPU they should stay in its cache.
HEAD_BYTES = {"cpu": 2 << 20, "cuda": 512 << 20, "mps": 256 << 20}


# ---------------------------------------------------------------------------------------------------------------------
# Attention over packed trees


class PackedLayout:
    """How attention reads one packed row: the pieces it is cut into, and which pieces see which.

    Args:
        trees: the row's trees in order.
        positions: int64 [T], position of each token in its own prompt + response.
        kernel: "sdpa" (exact pieces, any device) or "flex" (one FlexAttention call with a block mask, CUDA).
    """

    def __init__(self, trees: list[PrefixTree], positions: torch.Tensor, kernel: str = "sdpa"):
        self.trees, self.positions, self.kernel = trees, positions, kernel
        self.sizes = [n for tree in trees for n in (tree.prompt, *tree.responses)]
        self.used = False  # whether any layer's attention read it
        self._masks: dict[tuple, torch.Tensor | None] = {}
        self._biases: dict[tuple, torch.Tensor | None] = {}
        self._block_masks: dict[int | None, object] = {}

    def mask(self, n_queries: int, n_keys: int, window: int | None) -> torch.Tensor | None:
        """Boolean [n_queries, n_keys]: the queries are the last of the keys' positions. None: plain causal will do."""
        key = (n_queries, n_keys, window)
        if key not in self._masks:
            if n_queries == n_keys and (window is None or n_keys <= window):
                self._masks[key] = None
            else:
                device = self.positions.device
                queries = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
                keys = torch.arange(n_keys, device=device)[None]
                self._masks[key] = (keys <= queries) & (queries - keys < (window or n_keys + 1))
        return self._masks[key]

    def pieces(self, window: int | None, dtype: torch.dtype):
        """(rows of a piece, rows of its prompt or None, additive mask or None for plain causal) of each piece in order,
        as slices; a prompt before its responses."""
        start = 0
        for tree in self.trees:
            prompt = slice(start, start + tree.prompt)
            for index, n in enumerate((tree.prompt, *tree.responses)):
                if n:
                    behind = prompt if index and tree.prompt else None
                    yield slice(start, start + n), behind, self._bias(n, tree.prompt + n if index else n, window, dtype)
                start += n

    def _bias(self, n_queries: int, n_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """`mask` as numbers to add to the scores, 0 or -inf."""
        key = (n_queries, n_keys, window, dtype)
        if key not in self._biases:
            mask = self.mask(n_queries, n_keys, window)
            self._biases[key] = (
                None if mask is None else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
            )
        return self._biases[key]

    def mask_mod(self, window: int | None) -> Callable:
        """The same rule as a FlexAttention mask function over the whole row."""
        device = self.positions.device
        trees, branches = [], []
        for tree, tree in enumerate(self.trees):
            for branch, n in enumerate((tree.prompt, *tree.responses)):
                trees += [tree] * n
                branches += [branch] * n
        tree_of = torch.tensor(trees, device=device)
        branch_of = torch.tensor(branches, device=device)
        positions = self.positions

        def visible(batch, head, query, key):
            same_path = (tree_of[query] == tree_of[key]) & (
                (branch_of[key] == 0) | (branch_of[key] == branch_of[query])
            )
            near = positions[query] - positions[key] < (window or len(trees) + 1)
            return same_path & (key <= query) & near

        return visible

    def block_mask(self, window: int | None):
        """FlexAttention's block mask of the row, made once a micro-batch and window."""
        if window not in self._block_masks:
            from torch.nn.attention.flex_attention import create_block_mask

            n = len(self.positions)
            self._block_masks[window] = create_block_mask(
                self.mask_mod(window), None, None, n, n, device=self.positions.device
            )
        return self._block_masks[window]


def _attend(query, key, value, mask, scale, softcap, sinks) -> torch.Tensor:
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


_compiled_flex = None


def _flex(query, key, value, layout: PackedLayout, scale, window) -> torch.Tensor:
    global _compiled_flex
    from torch.nn.attention.flex_attention import flex_attention

    if query.device.type == "cpu":
        function = flex_attention  # uncompiled: for checking the rule, not for speed
    else:
        if _compiled_flex is None:
            _compiled_flex = torch.compile(flex_attention, dynamic=True)
        function = _compiled_flex
    gqa = key.shape[1] != query.shape[1]
    return function(query, key, value, block_mask=layout.block_mask(window), scale=scale, enable_gqa=gqa)


def packed_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    *,
    layout=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    **kwargs,
):
    """Attention over packed trees, called by the model library in every layer.

    Args:
        query: [1, H, T, D]; key, value: [1, H_kv, T, D].
        layout: the row's PackedLayout. Without one (generation, padded rows) this is ordinary SDPA under `attention_mask`.
        sliding_window: positions that a query looks back, itself counted; None is all.
        softcap, s_aux: logit soft-capping and attention sinks of the models that have them.
    Returns: [1, T, H, D] and None, as the library expects.
    """
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if layout is None:
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        key, value = _repeat_heads(query, key, value)
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            attention_mask = attention_mask == 0
        return _attend(query, key, value, attention_mask, scaling, softcap, s_aux).transpose(1, 2).contiguous(), None
    layout.used = True
    if layout.kernel == "flex" and softcap is None and s_aux is None:
        return _flex(query, key, value, layout, scaling, sliding_window).transpose(1, 2).contiguous(), None

    return _attend_trees(query, key, value, layout, scaling, sliding_window, softcap, s_aux), None


# Its pieces differ from row to row: a compiled block would be compiled anew for each, so it steps out of the graph here.
@torch.compiler.disable
def _attend_trees(query, key, value, layout, scaling, sliding_window, softcap, s_aux) -> torch.Tensor:
    """Attention of each prompt to itself and of each response to its prompt and itself; [1, T, H, D]."""
    if query.device.type == "cpu" and softcap is None and s_aux is None and query.shape[-1] == value.shape[-1]:
        return _CpuPrefixTreeAttention.apply(query, key, value, layout, scaling, sliding_window)
    key, value = _repeat_heads(query, key, value)
    # One split each, so that the backward pass is one concatenation and not a full-size zero tensor a slice.
    queries, keys, values = (tensor.split(layout.sizes, dim=2) for tensor in (query, key, value))
    outputs, piece = [], 0
    for tree in layout.trees:
        prompt_key, prompt_value = keys[piece], values[piece]
        mask = layout.mask(tree.prompt, tree.prompt, sliding_window)
        outputs.append(_attend(queries[piece], prompt_key, prompt_value, mask, scaling, softcap, s_aux))
        for index, n in enumerate(tree.responses, start=piece + 1):
            mask = layout.mask(n, tree.prompt + n, sliding_window)
            outputs.append(
                _attend(
                    queries[index],
                    torch.cat([prompt_key, keys[index]], dim=2),
                    torch.cat([prompt_value, values[index]], dim=2),
                    mask,
                    scaling,
                    softcap,
                    s_aux,
                )
            )
        piece += 1 + len(tree.responses)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


class _CpuPrefixTreeAttention(torch.autograd.Function):
    """The same pieces with the CPU's fused kernel, for which autograd would keep a copy of its prompt's keys and values
    for each response, and repeated heads: a fifth of all activations. Here each piece is cut out again when its turn
    comes in the backward pass.

    query [1, H, T, D]; key, value [1, H_kv, T, D] -> [1, T, H, D].
    """

    @staticmethod
    def forward(ctx, query, key, value, layout, scale, window):
        _, heads, length, width = query.shape
        output = query.new_empty(1, length, heads, width)
        normalisers = query.new_empty(1, heads, length, dtype=torch.float32)
        for rows, prompt, mask in layout.pieces(window, query.dtype):
            found, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, rows],
                _with_prompt(key, prompt, rows),
                _with_prompt(value, prompt, rows),
                0.0,
                mask is None,
                attn_mask=mask,
                scale=scale,
            )
            output[:, rows] = found.transpose(1, 2)
            normalisers[:, :, rows] = normaliser
        ctx.save_for_backward(query, key, value, output, normalisers)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
        return output

    @staticmethod
    def backward(ctx, upstream):
        query, key, value, output, normalisers = ctx.saved_tensors
        upstream, output = upstream.transpose(1, 2), output.transpose(1, 2)
        grad_query = torch.empty_like(query)
        # A prompt's keys gather a share from each response: summed in fp32, as autograd's own sum would not be.
        grad_key, grad_value = (torch.empty_like(tensor, dtype=torch.float32) for tensor in (key, value))
        for rows, prompt, mask in ctx.layout.pieces(ctx.window, query.dtype):
            of_query, *of_keys = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                upstream[:, :, rows],
                query[:, :, rows],
                _with_prompt(key, prompt, rows),
                _with_prompt(value, prompt, rows),
                output[:, :, rows],
                normalisers[:, :, rows],
                0.0,
                mask is None,
                attn_mask=mask,
                scale=ctx.scale,
            )
            grad_query[:, :, rows] = of_query
            for total, share in zip((grad_key, grad_value), of_keys):
                shared = 0 if prompt is None else prompt.stop - prompt.start
                total[:, :, rows] = share[:, :, shared:]
                if shared:
                    total[:, :, prompt] += share[:, :, :shared]
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _with_prompt(tensor, prompt, rows):
    """Rows of [1, H, T, D], behind those of their prompt if they have one."""
    own = tensor[:, :, rows]
    return own if prompt is None else torch.cat([tensor[:, :, prompt], own], dim=2)


def _repeat_heads(query, key, value):
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
# Without a layout (generation) masks are made as for SDPA.
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


# ---------------------------------------------------------------------------------------------------------------------
# Log-probs of target tokens without full logits


class _LinearLogps(torch.autograd.Function):
    """log softmax(softcap(scale * (h W^T + b)))[target], over a few columns of the vocabulary at a time.

    hidden [N, d], weight [V, d], bias [V] or None, targets int64 [N] -> float32 [N]; `columns` logits a row are alive at
    once. The backward pass recomputes them and turns them into the gradient in place. Cut along the vocabulary and not
    along the rows, each part of the weight is read once and its gradient written once, in one product over all rows.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, softcap, columns):
        normalisers = torch.full((len(hidden),), -torch.inf, dtype=torch.float32, device=hidden.device)
        chosen = torch.zeros_like(normalisers)
        for part, local, inside in _LinearLogps.parts(weight, targets, columns):
            logits, _ = _LinearLogps.logits(hidden, weight, bias, part, scale, softcap)
            normalisers = torch.logaddexp(normalisers, logits.logsumexp(-1))
            chosen = torch.where(inside, logits.gather(1, local[:, None]).squeeze(1), chosen)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers)
        ctx.scale, ctx.softcap, ctx.columns = scale, softcap, columns
        return chosen - normalisers

    @staticmethod
    def parts(weight, targets, columns):
        """(slice of the vocabulary, targets counted from its start, which targets lie in it [N]) of each part."""
        for start in range(0, len(weight), columns):
            stop = min(start + columns, len(weight))
            yield (
                slice(start, stop),
                (targets - start).clamp(0, stop - start - 1),
                (targets >= start) & (targets < stop),
            )

    @staticmethod
    def logits(hidden, weight, bias, part, scale, softcap):
        """float32 logits [N, columns], and the soft-cap's slope [N, columns] (None without one)."""
        logits = F.linear(hidden, weight[part], None if bias is None else bias[part]).float()
        if scale != 1.0:
            logits.mul_(scale)
        if softcap is None:
            return logits, None
        bounded = logits.div_(softcap).tanh_()
        slope = 1 - bounded * bounded
        return bounded.mul_(softcap), slope

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, bias, targets, normalisers = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # The parts' shares of a row are summed in fp32, whatever the weight's own precision.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for part, local, inside in _LinearLogps.parts(weight, targets, ctx.columns):
            grad, slope = _LinearLogps.logits(hidden, weight, bias, part, ctx.scale, ctx.softcap)
            # d log p[target] / d logits = onehot(target) - softmax(logits)
            grad.sub_(normalisers[:, None]).exp_().mul_(-upstream[:, None])
            grad.scatter_add_(1, local[:, None], torch.where(inside, upstream, 0.0)[:, None].to(grad.dtype))
            if slope is not None:
                grad.mul_(slope)
            if ctx.scale != 1.0:
                grad.mul_(ctx.scale)
            if needs_bias:
                grad_bias[part] = grad.sum(0)
            grad = grad.to(weight.dtype)
            if needs_hidden:
                if weight.dtype == torch.float32:
                    grad_hidden.addmm_(grad, weight[part])
                else:
                    grad_hidden += grad @ weight[part]
            if needs_weight:
                torch.mm(grad.T, hidden, out=grad_weight[part])
        if needs_hidden:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def target_logps(
    head: torch.nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    n_bytes: int | None = None,
) -> torch.Tensor:
    """Log-probs of given tokens under a language-model head.

    Args:
        head: output embeddings; hidden: [N, d]; targets: int64 [N].
        scale: factor on the logits; softcap: bound c of c * tanh(logits / c).
        n_bytes: of fp32 logits that may exist at once; None is the device's HEAD_BYTES.
    Returns: float32 [N].
    """
    if n_bytes is None:
        n_bytes = head_bytes(hidden.device.type)
    if type(head) is torch.nn.Linear and not hasattr(head.weight, "placements") and not head._forward_pre_hooks:
        return _LinearLogps.apply(
            hidden, head.weight, head.bias, targets, scale, softcap, head_columns(len(hidden), n_bytes)
        )

    # A head with hooks or a class of its own (tensor parallelism, adapters) is called as the module it is, on a few rows.
    def chunk_logps(rows, wanted):
        logits = head(rows).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits.log_softmax(-1).gather(1, wanted[:, None]).squeeze(1)

    vocabulary = getattr(head, "out_features", None) or head.weight.shape[0]
    chunk = max(16, n_bytes // (4 * vocabulary))
    parts = [
        checkpoint(chunk_logps, rows, wanted, use_reentrant=False)
        for rows, wanted in zip(hidden.split(chunk), targets.split(chunk))
    ]
    return torch.cat(parts)


def head_bytes(kind: str) -> int:
    """HEAD_BYTES of a kind of device."""
    return HEAD_BYTES.get(kind, HEAD_BYTES["cuda"])


def head_columns(rows: int, n_bytes: int) -> int:
    """Columns of the vocabulary whose fp32 logits for all rows fit n_bytes; enough for an efficient product."""
    return max(256, n_bytes // (4 * max(1, rows)))


def head_scaling(model) -> tuple[float, float | None]:
    """(scale, softcap) that a model applies to its logits after the head (Cohere, Granite, Gemma 2 and their kin)."""
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    if getattr(config, "logits_scaling", None):
        scale /= float(config.logits_scaling)
    return scale, getattr(config, "final_logit_softcapping", None)


# ---------------------------------------------------------------------------------------------------------------------
# The forward pass


def response_logps(model, batch: MicroBatch) -> torch.Tensor:
    """Summed log-prob of each response of a micro-batch.

    Bound to the model as `model.response_logps(batch)` by `use_attention`, so that a sharded model can treat it as a
    forward method of its own.

    Returns: float32 [K], in the batch's response order, differentiable.
    """
    return torch.stack([part.sum() for part in token_logps(model, batch).split(batch.lengths_list)])


def token_logps(model, batch: MicroBatch) -> torch.Tensor:
    """Log-prob of every scored token, float32 [N], in the order of `batch.targets`."""
    arguments = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
    if batch.trees is not None:
        layout = PackedLayout(batch.trees, batch.position_ids[0], model.attention_kernel)
        arguments["layout"] = layout
        # A ready 4-D mask stops the library from making one; the packed attention never reads it.
        arguments["attention_mask"] = batch.input_ids.new_ones((1, 1, 1, 1), dtype=torch.bool)
    else:
        arguments["attention_mask"] = batch.attention_mask
        if not model.takes_position_ids:
            del arguments["position_ids"]
    if model.full_forward:
        logits = model(**arguments).logits
        assert batch.trees is None, "packed rows are scored without the whole logits"
        rows = logits.reshape(-1, logits.shape[-1])[batch.predictors].float()
        return rows.log_softmax(-1).gather(1, batch.targets[:, None]).squeeze(1)
    hidden = model.base_model(**arguments).last_hidden_state
    if batch.trees is not None and not layout.used:
        # Code with attention of its own drops the layout without a word and scores something else.
        raise NotImplementedError("its attention is not replaceable")
    hidden = hidden.reshape(-1, hidden.shape[-1])[batch.predictors]
    return target_logps(model.get_output_embeddings(), hidden, batch.targets, *head_scaling(model))


def use_attention(model, kernel: str, full_forward: bool = False) -> None:
    """Prepare a model for `response_logps`.

    Args:
        kernel: "packed_sdpa" or "flex" (packed rows), or "plain" (padded rows, the model's own attention).
        full_forward: score through the model's own forward and logits, for heads this file does not know.
    """
    import inspect

    if kernel != "plain":
        model.set_attn_implementation(ATTENTION_NAME)
    model.attention_kernel = "flex" if kernel == "flex" else "sdpa"
    model.full_forward = full_forward
    model.takes_position_ids = "position_ids" in inspect.signature(model.base_model.forward).parameters
    model.response_logps = types.MethodType(response_logps, model)
    if isinstance(model, FSDPModule):  # gathers the root's parameters before it and frees them after its backward pass
        register_fsdp_forward_method(model, "response_logps")


@torch.no_grad()
def choose_attention(model, unit: PromptUnit, wanted: str, pad_token_id: int, device) -> tuple[str, bool, str | None]:
    """Score one prompt group every way there is and settle on the fastest one that is right.

    The measure is the model's own forward on padded rows, one response each, under its own attention.

    Args:
        unit: a group of (if possible) several responses; wanted: model.attention of the config ("auto" tries all).
    Returns: (kernel, full_forward, notice): the notice says why prompts are not shared, None if they are.
    Raises:
        ValueError: `wanted` names a packed kernel that this model cannot use.
    """
    own = model.config._attn_implementation
    plain = pad([unit], pad_token_id).to(device)
    packed = pack([unit]).to(device)
    use_attention(model, "plain", full_forward=True)
    truth = token_logps(model, plain)
    # By token, so that errors of opposite sign cannot hide in a sum. In half precision, two right ways of computing
    # differ by some 1% of a token's log-prob, and one that misplaces or leaks context by 10% and more.
    allowed = 2e-4 if next(model.parameters()).dtype == torch.float32 else 5e-2

    def error(kernel, whole):
        try:
            use_attention(model, kernel, whole)
            found = token_logps(model, plain if kernel == "plain" else packed)
            difference = ((found - truth).norm() / truth.norm().clamp(min=1.0)).item()
            if not difference < allowed:
                return f"log-probs differ by {difference:.1e}"
        except (ValueError, TypeError, RuntimeError, AttributeError, NotImplementedError, KeyError) as problem:
            return f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}" if str(problem) else repr(problem)
        finally:
            if kernel != "plain" and model.config._attn_implementation != own:
                model.set_attn_implementation(own)
        return None

    kernels = {"auto": ["flex", "packed_sdpa"] if str(device).startswith("cuda") else ["packed_sdpa"], "plain": []}.get(
        wanted, [wanted]
    )
    reasons = []
    for kernel in kernels:
        problem = error(kernel, False)
        if problem is None:
            use_attention(model, kernel)
            return kernel, False, None
        reasons.append(f"{kernel}: {problem}")
    if wanted not in ("auto", "plain"):
        raise ValueError(
            f"model.attention={wanted} does not work for {type(model).__name__} ({reasons[0]}). "
            "Use model.attention=auto."
        )
    whole = error("plain", False) is not None
    use_attention(model, "plain", whole)
    notice = None
    if reasons:
        notice = (
            f"{type(model).__name__} cannot share a prompt between responses ({'; '.join(reasons)}): "
            "scoring one response a row, which is right but slower."
        )
    return "plain", whole, notice
