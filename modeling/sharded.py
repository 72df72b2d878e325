"""What a sharded model (FSDP2) asks of those who compute with it."""

from __future__ import annotations

import torch


def reshard_after_eval(model: torch.nn.Module) -> None:
    """Free what FSDP2 gathered: after a forward without gradients the root, and every block under SHARD_GRAD_OP, holds
    full plain tensors."""
    for module in model.modules():
        if callable(getattr(module, "reshard", None)):  # not recursive in FSDP2
            module.reshard()
