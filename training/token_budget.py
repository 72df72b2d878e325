"""Tokens that a pass may hold on one device."""

from __future__ import annotations

import torch

from data.sampler import cpu_token_budget
from settings import Settings


def token_budget(config: Settings, model, device: torch.device) -> int:
    """`tokens_per_microbatch`, or what the device's memory suggests where that is "auto"."""
    wanted = config.tokens_per_microbatch
    if wanted != "auto":
        return int(wanted)
    if device.type == "cpu":
        return cpu_token_budget(torch.get_num_threads())
    # Some 18 hidden-sized and 3 MLP-sized activations a token and layer; half of what is free, as a start.
    settings = model.config.get_text_config()
    layers = 1 if config.activation_checkpointing else settings.num_hidden_layers
    width = 18 * settings.hidden_size + 3 * (getattr(settings, "intermediate_size", None) or 4 * settings.hidden_size)
    size = 2 if config.model.fsdp_policy_mp or config.model.policy_dtype != "float32" else 4
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 << 30
    budget = int(0.5 * free / (layers * width * size))
    return max(1024, min(budget, 65536) // 256 * 256)
