"""Attention of the run's model: the function that the model library calls in place of its own, and how one is chosen.

The kernels themselves are in attention_kernels.py. Models that cannot share a prompt between responses (ALiBi,
recurrent, code with attention of its own) are scored one response a row; `choose_attention` finds out by scoring a
prompt both ways.
"""

from __future__ import annotations

import inspect
import types

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import private_apis
from data.batching import PromptUnit, pack, pad
from modeling.attention_kernels import attend, candidates, is_packed, kernel_for, repeat_heads
from modeling.scoring import response_logps, token_logps

ATTENTION_NAME = "packed_prompt_groups"


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
    """Attention over packed rows, called by the model library in every layer.

    Args:
        query: [1, H, T, D]; key, value: [1, H_kv, T, D].
        layout: the row's PackedLayout; without one (generation, padded rows) this is SDPA under `attention_mask`.
        sliding_window: positions that a query looks back, itself counted; None is all.
        softcap, s_aux: logit soft-capping and attention sinks of the models that have them.
    Returns: [1, T, H, D] and None, as the library expects.
    """
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    features = {}
    if softcap is not None:
        features["softcap"] = softcap
    if s_aux is not None:
        features["sinks"] = s_aux
    if layout is None:
        if not features:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        key, value = repeat_heads(query, key, value)
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            attention_mask = attention_mask == 0
        return attend(query, key, value, attention_mask, scaling, softcap, s_aux).transpose(1, 2).contiguous(), None
    layout.used = True
    needs = (*features, *(["value width"] if query.shape[-1] != value.shape[-1] else []))
    kernel = kernel_for(layout.kernel, query.device.type, query.dtype, needs)
    assert kernel.function is not None, f"{kernel.name} is registered for packed rows without a function"
    return kernel.function(query, key, value, layout, scaling, sliding_window, **features), None


AttentionInterface.register(ATTENTION_NAME, packed_attention)
# Without a layout (generation) masks are made as for SDPA.
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def use_attention(model, kernel: str, full_forward: bool = False) -> None:
    """Prepare a model for `response_logps`.

    Args:
        kernel: name of an attention kernel; "plain" is for padded rows and leaves the model its own attention.
        full_forward: score through the model's own forward and logits, for heads that modeling/head.py does not know.
    """
    if is_packed(kernel):
        model.set_attn_implementation(ATTENTION_NAME)
    model.attention_kernel = kernel
    model.full_forward = full_forward
    model.takes_position_ids = "position_ids" in inspect.signature(model.base_model.forward).parameters
    model.response_logps = types.MethodType(response_logps, model)
    if isinstance(model, FSDPModule):  # gathers the root's parameters before it and frees them after its backward pass
        register_fsdp_forward_method(model, "response_logps")


@torch.no_grad()
def choose_attention(model, unit: PromptUnit, wanted: str, pad_token_id: int, device) -> tuple[str, bool, str | None]:
    """Score a prompt's responses in every way there is; the first kernel in order of preference that is right wins.

    The measure is the model's own forward on padded rows, one response each, under its own attention.

    Args:
        unit: a prompt with (if possible) several responses.
        wanted: model.attention of the config: a kernel's name, or "auto" for all that fit the device and the dtype.
    Returns: (kernel, full_forward, notice): the notice says why prompts are not shared, None if they are.
    Raises:
        ValueError: `wanted` names a packed kernel that this model cannot use.
    """
    own = private_apis.attention_of(model.config)
    dtype = next(model.parameters()).dtype
    plain, packed = pad([unit], pad_token_id), pack([unit])
    assert plain is not None and packed is not None
    plain, packed = plain.to(device), packed.to(device)
    use_attention(model, "plain", full_forward=True)
    truth = token_logps(model, plain)
    # By token, so that errors of opposite sign cannot hide in a sum. In half precision, two right ways of computing
    # differ by some 1% of a token's log-prob, and one that misplaces or leaks context by 10% and more.
    allowed = 2e-4 if dtype == torch.float32 else 5e-2

    def error(kernel, full_forward):
        try:
            use_attention(model, kernel, full_forward)
            found = token_logps(model, packed if is_packed(kernel) else plain)
            difference = ((found - truth).norm() / truth.norm().clamp(min=1.0)).item()
            if not difference < allowed:
                return f"log-probs differ by {difference:.1e}"
        except (ValueError, TypeError, RuntimeError, AttributeError, NotImplementedError, KeyError) as problem:
            return f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}" if str(problem) else repr(problem)
        finally:
            if is_packed(kernel) and private_apis.attention_of(model.config) != own:
                model.set_attn_implementation(own)
        return None

    if wanted == "auto":
        kernels = candidates(torch.device(device).type, dtype)
    else:
        kernels = [wanted] if is_packed(wanted) else []
    reasons = []
    for kernel in kernels:
        problem = error(kernel, False)
        if problem is None:
            use_attention(model, kernel)
            return kernel, False, None
        reasons.append(f"{kernel}: {problem}")
    if reasons and wanted != "auto":
        raise ValueError(
            f"model.attention={wanted} does not work for {type(model).__name__} ({reasons[0]}). "
            "Use model.attention=auto."
        )
    full_forward = error("plain", False) is not None
    use_attention(model, "plain", full_forward)
    notice = None
    if reasons:
        notice = (
            f"{type(model).__name__} cannot share a prompt between responses ({'; '.join(reasons)}): "
            "scoring one response a row, which is right but slower."
        )
    return "plain", full_forward, notice
