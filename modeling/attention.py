"""Attention of the run's model: the function that the model library calls in place of its own.

The kernels themselves are in attention_kernels.py; which one a model can use is found out in scoring_check.py.
"""

from __future__ import annotations

import types

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from modeling.attention_kernels import attend, is_packed, kernel_for, repeat_heads
from modeling.rotary import separate_rows
from modeling.scoring import response_logps, token_collisions, token_distributions, token_divergence, token_logps

ATTENTION_NAME = "packed_prompt_groups"
# What models pass beside the documented arguments and packed rows need not read: padding-free batches, switches for
# outputs, and positions, which the layout has.
UNREAD = ("position_ids", "output_attentions", "output_hidden_states", "use_cache", "cache_position", "layer_idx")


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
        kwargs: whatever else a model's code passes. What would change the scores (a bias, a choice of keys) is noted in
            the layout as its `unread`, and `token_logps` refuses the pass.
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
    if not torch.compiler.is_compiling():
        # Compiled, this would be a graph for each layer. The start's try, which nothing is compiled in, has looked.
        layout.readers.add(module)
        layout.unread = layout.unread or unread_input(module, attention_mask, sliding_window, kwargs)
    needs = (*features, *(["value width"] if query.shape[-1] != value.shape[-1] else []))
    kernel = kernel_for(layout.kernel, query.device.type, query.dtype, needs)
    assert kernel.function is not None, f"{kernel.name} is registered for packed rows without a function"
    return kernel.function(query, key, value, layout, scaling, sliding_window, **features), None


def unread_input(module, attention_mask, sliding_window, others: dict) -> str | None:
    """What a model's code passes to packed attention that packed rows would leave out, in words; None if nothing.

    Judged by the arguments alone: a term that is near zero in a new model changes no score that could be compared.
    """
    # token_logps passes a mask of one element. One that has grown holds something of the model's own, as Doge's does.
    if attention_mask is not None and attention_mask.numel() != 1:
        return "its attention adds a mask of its own"
    if others.get("is_causal") is False:
        return "its attention is not causal"
    for name, value in others.items():
        if name not in UNREAD and value is not None and not isinstance(value, (bool, str)):
            return f"its attention takes {name}"
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    number = getattr(module, "layer_idx", None)
    if kinds and number is not None and number < len(kinds):
        if "chunk" in kinds[number] or ("sliding" in kinds[number] and sliding_window is None):
            return f"its attention does not pass on the size of its {kinds[number]}"
    return None


AttentionInterface.register(ATTENTION_NAME, packed_attention)
# Without a layout (generation) masks are made as for SDPA.
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def use_attention(model, kernel: str, full_forward: bool = False, windows: tuple[int | None, ...] = ()) -> None:
    """Prepare a model for `response_logps`.

    Args:
        kernel: name of an attention kernel; "plain" is for padded rows and leaves the model its own attention.
        windows: those of the model's layers, as a try of the kernel found them (`PackedLayout.windows`).
        full_forward: score through the model's own forward and logits, for heads that modeling/head.py does not know.
    """
    if is_packed(kernel):
        model.set_attn_implementation(ATTENTION_NAME)
    model.attention_kernel = kernel
    model.full_forward = full_forward
    model.attention_windows = windows
    separate_rows(model)
    for method in (response_logps, token_logps, token_collisions, token_distributions, token_divergence):
        setattr(model, method.__name__, types.MethodType(method, model))
        if isinstance(model, FSDPModule):
            # Gathers the root's parameters before, and frees them after the backward pass.
            register_fsdp_forward_method(model, method.__name__)
