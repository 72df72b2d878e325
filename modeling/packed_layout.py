"""How attention reads one packed row: the pieces it is cut into, and which positions see which.

A row holds prefix trees: a prompt, then its responses, whose positions restart after it. Attention is causal inside the
prompt, and inside prompt + response for each response; trees do not see each other, nor do responses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from data.batching import PrefixTree


@dataclass(frozen=True)
class Piece:
    """A prompt or a response of the row.

    Attributes:
        rows: its positions in the row.
        prompt: number of the piece that holds its prompt; None where it has none, or is one.
    """

    rows: slice
    prompt: int | None

    @property
    def n_tokens(self) -> int:
        return self.rows.stop - self.rows.start


class PackedLayout:
    """One packed row as attention sees it. Masks are made when first asked for, and kept for the other layers.

    Args:
        trees: the row's trees in order.
        positions: int64 [T], position of each token in its own prompt + response.
        kernel: name of the attention kernel that reads it (attention_kernels.py).
    Attributes:
        pieces: the pieces of one token or more in the row's order, a prompt before its responses.
        used: whether any layer's attention has read it.
        readers: the attention modules that have read it outside of compiled code.
        unread: what one of them takes and packed rows leave out, in words; None if nothing.
    """

    def __init__(self, trees: list[PrefixTree], positions: torch.Tensor, kernel: str = "packed_sdpa"):
        self.trees, self.positions, self.kernel = trees, positions, kernel
        self.used = False
        self.readers: set[torch.nn.Module] = set()
        self.unread: str | None = None
        self.pieces: list[Piece] = []
        start = 0
        for tree in trees:
            prompt = len(self.pieces) if tree.prompt else None
            for index, n in enumerate((tree.prompt, *tree.responses)):
                if n:
                    self.pieces.append(Piece(slice(start, start + n), prompt if index else None))
                start += n
        self.sizes = [piece.n_tokens for piece in self.pieces]
        self._masks: dict[tuple, torch.Tensor | None] = {}
        self._block_masks: dict[int | None, object] = {}

    def prompt_rows(self, piece: Piece) -> slice | None:
        """Positions in the row of a response's prompt; None for a piece without one."""
        return None if piece.prompt is None else self.pieces[piece.prompt].rows

    def mask(self, piece: Piece, window: int | None) -> torch.Tensor | None:
        """Boolean [Q, K], which of its prompt's and its own K tokens each of a piece's Q tokens sees.

        None: plain causal attention will do.
        """
        return self._mask(*self._extent(piece), window)

    def bias(self, piece: Piece, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """`mask` as numbers to add to the scores, 0 or -inf."""
        key = (*self._extent(piece), window, dtype)
        if key not in self._masks:
            mask = self.mask(piece, window)
            self._masks[key] = (
                None if mask is None else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
            )
        return self._masks[key]

    def _extent(self, piece: Piece) -> tuple[int, int]:
        """Tokens of a piece, and of its prompt and the piece together."""
        behind = 0 if piece.prompt is None else self.pieces[piece.prompt].n_tokens
        return piece.n_tokens, behind + piece.n_tokens

    def _mask(self, n_queries: int, n_keys: int, window: int | None) -> torch.Tensor | None:
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

    def mask_mod(self, window: int | None) -> Callable:
        """The same rule as a FlexAttention mask function over the whole row."""
        device = self.positions.device
        trees, branches = [], []
        for number, tree in enumerate(self.trees):
            for branch, n in enumerate((tree.prompt, *tree.responses)):
                trees += [number] * n
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
