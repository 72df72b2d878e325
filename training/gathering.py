"""Whether a sharded model may be whole on every device for a while."""

from __future__ import annotations

import torch

import private_apis
from modeling.sharded import resharding_groups
from parallel.placement import Placement
from planning.token_budget import free_memory
from utils import gather_objects, processes_on_node

# Of the free memory, the part that parameters, keys and values may take; activations and logits have the rest.
SHARE = 0.75


def cache_bytes(model_config, rows: int, tokens: int, size: int) -> int:
    """Bytes of the keys and values of texts.

    Args:
        model_config: the transformers configuration; size: bytes of a number.
    """
    text = model_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * width * rows * tokens * size


def fits_whole(model, placement: Placement, dtype: torch.dtype | None, rows: int, tokens: int) -> bool:
    """Whether every rank has memory for all parameters of a model at once, and for the keys and values of `rows` texts
    of `tokens` tokens. All ranks call it together.

    False where there is nothing to gain: the model is not sharded, or stays whole between passes in any case.

    Args:
        dtype: that the model computes in; None is that of its parameters.
    """
    if not resharding_groups(model):
        return False
    parameters = list(model.parameters())
    size = (dtype or parameters[0].dtype).itemsize
    # What FSDP2 puts together: under tensor parallelism each rank keeps its part of a matrix.
    count = placement.layout.shards * sum(private_apis.local_tensor(each).numel() for each in parameters)
    needed = count * size + cache_bytes(model.config, rows, tokens, size)
    device = placement.device
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the allocator keeps for the next training step counts as taken
    free = free_memory(device)
    if free is not None and device.type == "cpu":
        free //= processes_on_node(placement.world.size)
    fits = free is not None and needed <= SHARE * free
    return all(gather_objects(fits, placement.world))
