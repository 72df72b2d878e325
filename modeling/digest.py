"""Fingerprint of a model's weights, which the reference cache is kept under."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

import private_apis
from utils import all_reduce_sum


def weights_digest(model: torch.nn.Module, world=None) -> str:
    """Fingerprint of a model's weights, the same however they are sharded.

    Each weight's bits are read as an integer and summed, once as they are and once multiplied by their position;
    integer sums do not depend on order, so shards can be summed apart and then together.
    """
    names, sums = [], []
    for name, parameter in sorted(model.named_parameters()):
        local, offsets = _local_part(parameter)
        bits = local.detach().contiguous().view({4: torch.int32, 2: torch.int16, 8: torch.int64}[local.element_size()])
        # A rank's part may be empty, so no dimension is left to be inferred.
        rows = bits.reshape(len(bits), math.prod(bits.shape[1:])) if bits.ndim else bits.reshape(1, 1)
        # sum over (i, j) of bits[i, j] * (i * 1,000,003 + j), counted from 1 in the whole weight, out of the sums of
        # rows and of columns. A few rows at a time: as int64 the whole weight would take twice its memory.
        row_place, column_place = (
            torch.arange(n, device=rows.device) + offset + 1 for n, offset in zip(rows.shape, offsets)
        )
        total = torch.zeros(2, dtype=torch.int64, device=rows.device)
        at_once = max(1, (1 << 19) // max(1, rows.shape[1]))
        for part, place in zip(rows.split(at_once), row_place.split(at_once)):
            wide = part.to(torch.int64)
            of_rows = wide.sum(1)
            total += torch.stack(
                [of_rows.sum(), 1_000_003 * (of_rows * place).sum() + (wide.sum(0) * column_place).sum()]
            )
        # A part held by several ranks (replicas) counts once.
        sums.append(total if _counts_here(parameter) else torch.zeros_like(total))
        names.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}")
    totals = torch.stack(sums)
    if world is not None:
        totals = all_reduce_sum(totals, world)
    text = "\n".join(f"{name} {pair}" for name, pair in zip(names, totals.tolist()))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _local_part(parameter) -> tuple[torch.Tensor, tuple[int, int]]:
    """This rank's part of a parameter, and where it starts in dimensions 0 and 1."""
    if not hasattr(parameter, "placements"):
        return parameter, (0, 0)
    _, offset = private_apis.local_shape_and_offset(parameter)
    assert not any(offset[2:]), "weights are sharded in their first two dimensions only"
    first, second = (*offset, 0, 0)[:2]
    # Trailing dimensions are flattened into one, so a step in dimension 1 is as long as what follows it.
    return parameter.to_local(), (first, second * int(np.prod(parameter.shape[2:])))


def _counts_here(parameter) -> bool:
    if not hasattr(parameter, "placements"):
        import torch.distributed as dist

        return not dist.is_initialized() or dist.get_rank() == 0
    coordinate = parameter.device_mesh.get_coordinate()
    return all(place == 0 for place, placement in zip(coordinate, parameter.placements) if placement.is_replicate())
