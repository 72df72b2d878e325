"""FlexAttention's rule and block mask of one packed row, made on the host in time and memory linear in its blocks.

torch's own `create_block_mask` evaluates the rule for each query and key, ten bytes each: 43 GB for a row of 65,536
tokens. Here each pair of blocks is decided from where the row's pieces start and end. The rule captures tensors only,
so that one compiled kernel serves rows of every length: a Python number in it would be compiled anew for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from data.batching import to_device

BLOCK = 128  # rows and columns of a block; FlexAttention's own default
# (a piece's positions in the row, those of its prompt; empty without one) of each piece, in the row's order.
Pieces = Sequence[tuple[slice, slice]]


def make_rule(pieces: Pieces, positions: torch.Tensor, window: int | None) -> Callable:
    """Which keys a query sees, as a FlexAttention mask function (batch, head, query, key) -> bool.

    Args:
        positions: int64 [T], of each token in its own prompt + response; the captured tensors lie on its device.
    """
    bounds: np.ndarray = np.empty((3, len(positions)), dtype=np.int32)
    for rows, prompt in pieces:
        bounds[:, rows] = [[prompt.start], [prompt.stop], [rows.start]]
    # Tensors of their own each: dynamo also guards on the shape of what a view is part of.
    prompt_start, prompt_end, own_start = (to_device(torch.tensor(part), positions.device) for part in bounds)

    def visible(batch, head, query, key):
        in_prompt = (key >= prompt_start[query]) & (key < prompt_end[query])
        return (key <= query) & (in_prompt | (key >= own_start[query]))

    if window is None:
        return visible
    places = positions.to(torch.int32)

    def near(batch, head, query, key):
        return visible(batch, head, query, key) & (places[query] - places[key] < window)

    return near


def make_block_mask(pieces: Pieces, positions: torch.Tensor, window: int | None):
    """The row's `BlockMask`: which blocks of keys each block of queries skips, sees in part, and sees whole."""
    from torch.nn.attention.flex_attention import BlockMask

    device, length = positions.device, len(positions)
    seen, whole = seen_blocks(pieces, length, window)
    tensors = []
    for chosen in (seen & ~whole, whole):  # as counts and, chosen ones first, indices
        counts = chosen.sum(-1, dtype=np.int32)
        order = np.argsort(~chosen, axis=-1, kind="stable").astype(np.int32)
        tensors += [to_device(torch.from_numpy(part[None, None]), device) for part in (counts, order)]
    return BlockMask.from_kv_blocks(
        *tensors, BLOCK_SIZE=BLOCK, mask_mod=make_rule(pieces, positions, window), seq_lengths=(length, length)
    )


def seen_blocks(pieces: Pieces, length: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(seen, whole), bool [n, n] over n blocks of queries and of keys: whether any query of the one sees any key of the
    other, and whether each query sees each key.
    """
    n = -(-length // BLOCK)
    low: np.ndarray = np.arange(n) * BLOCK
    reach = window or length + 1
    seen: np.ndarray = np.zeros((n, n), dtype=bool)
    seeing: np.ndarray = np.zeros((n, n), dtype=np.int64)  # queries of a block that see all keys of the other

    def overlap(start: int, stop: int) -> np.ndarray:
        """Keys of each block inside [start, stop)."""
        return np.clip(np.minimum(stop, low + BLOCK) - np.maximum(start, low), 0, None)

    for rows, prompt in pieces:
        start, stop = rows.start, rows.stop
        # Position of the query at index i is i - shift in terms of its prompt's indices.
        shift = start - prompt.stop
        for block in range(start // BLOCK, (stop - 1) // BLOCK + 1):
            first, last = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK) - 1
            seen[block] |= overlap(max(prompt.start, first - shift - reach + 1), prompt.stop) > 0
            seen[block] |= overlap(max(start, first - reach + 1), last + 1) > 0
            by_all = overlap(max(prompt.start, last - shift - reach + 1), prompt.stop)
            by_all = by_all + overlap(max(start, last - reach + 1), first + 1)
            seeing[block] += np.where(by_all == BLOCK, last + 1 - first, 0)
    return seen, seeing == BLOCK
