"""What a sharded model (FSDP2) asks of those who compute with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule


def resharding_groups(model: torch.nn.Module) -> list[FSDPModule]:
    """Modules whose parameters are gathered in each forward pass and given back after it (parallel/fsdp.py)."""
    return [module for module in model.modules() if getattr(module, "reshards_after_forward", False)]


@contextmanager
def gathered_once(model: torch.nn.Module) -> Iterator[None]:
    """In this context parameters stay whole from the first forward pass to the end: many passes gather them once.

    For passes without a backward pass, by all ranks together. Afterwards the model is as it was.
    """
    groups = resharding_groups(model)
    for group in groups:
        group.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for group in groups:
            group.set_reshard_after_forward(True, recurse=False)
        reshard_after_eval(model)


def reshard_after_eval(model: torch.nn.Module) -> None:
    """Free what FSDP2 gathered: after a forward without gradients the root, and every block under SHARD_GRAD_OP, holds
    full plain tensors."""
    for module in model.modules():
        if callable(getattr(module, "reshard", None)):  # not recursive in FSDP2
            module.reshard()
