"""How attention reads one packed row: the pieces it is cut into, and which positions see which.

A row holds prefix trees: a prompt, then its responses, whose positions restart after it. Attention is causal inside the
prompt, and inside prompt + response for each response; trees do not see each other, nor do responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from data.batching import PrefixTree, to_device
from modeling.block_masks import make_block_mask

NO_PROMPT = slice(0, 0)


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


@dataclass(frozen=True)
class Sequences:
    """The row's pieces as sequences of queries and keys, for kernels that take sequences of any length. Tensors lie on
    the device of the row; K: keys in all, a prompt's once for itself and once for each of its responses.

    Attributes:
        query_starts, key_starts: int32 [pieces + 1], where each sequence starts, and the end of the last.
        most_queries, most_keys: of any sequence.
        copied: int64 [K], the token of the row that each key is of.
        copies: int64 [T] each: the first, second, ... key of each token; K where it has no more.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    most_queries: int
    most_keys: int
    copied: torch.Tensor
    copies: tuple[torch.Tensor, ...]


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

    @cached_property
    def sequences(self) -> Sequences:
        """See `Sequences`."""
        parts = []
        for piece in self.pieces:
            prompt = self.prompt_rows(piece) or NO_PROMPT
            parts.append(
                np.concatenate([np.arange(prompt.start, prompt.stop), np.arange(piece.rows.start, piece.rows.stop)])
            )
        copied = np.concatenate(parts)
        # The k-th key of each token: keys sorted by token, without a change of order among those of one token.
        order = np.argsort(copied, kind="stable")
        counts = np.bincount(copied, minlength=len(self.positions))
        rank = np.arange(len(copied)) - np.repeat(np.cumsum(counts) - counts, counts)
        copies: np.ndarray = np.full((counts.max(), len(self.positions)), len(copied), dtype=np.int64)
        copies[rank, copied[order]] = order

        def on_device(array: np.ndarray) -> torch.Tensor:
            return to_device(torch.from_numpy(array), self.positions.device)

        def starts(sizes: list[int]) -> torch.Tensor:
            return on_device(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))

        n_keys = [len(part) for part in parts]
        return Sequences(
            starts(self.sizes),
            starts(n_keys),
            max(self.sizes),
            max(n_keys),
            on_device(copied),
            tuple(on_device(row) for row in copies),
        )

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

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows whose block masks have been asked for: those of the model's layers, after a forward pass."""
        return tuple(self._block_masks)

    def block_mask(self, window: int | None):
        """FlexAttention's block mask of the row, made once a micro-batch and window (block_masks.py)."""
        if window not in self._block_masks:
            pieces = [(piece.rows, self.prompt_rows(piece) or NO_PROMPT) for piece in self.pieces]
            self._block_masks[window] = make_block_mask(pieces, self.positions, window)
        return self._block_masks[window]
