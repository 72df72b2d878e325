"""Prompts with their responses as the tensors of a micro-batch: packed into one row, or padded, one response a row.

A `PromptUnit` is one prompt with the responses that a step needs of it, each once. Units are the indivisible piece of
work: a micro-batch is a list of units, which `pack` or `pad` turns into tensors. sampler.py chooses the units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class PromptUnit:
    """One prompt and the responses that a step needs of it.

    Attributes:
        dataset: index of the data set within the mixture.
        group: index of the prompt group within its data set.
        prompt: int32 array [P] of token ids.
        responses: int32 arrays [R_k], each response once, however many pairs use it.
        response_ids: number of each response within its data set; the key of the reference cache.
        pairs: one entry an example, as in examples.py, but of indices into `responses`.
        preferences: of the kind "group": (preferred, other) indices into `responses`.
        mismatched: of the kind "unpaired_mismatched": index into `responses` of one that belongs to another prompt.
        scores: of each response, as its row rates it; NaN where that is not known.
        weights: of each example, by which its loss is multiplied.
        scored: bool arrays [R_k], which tokens of each response are scored: not those of the user's turns in one of
            several turns. Empty: all are.
    """

    dataset: int
    group: int
    prompt: np.ndarray
    responses: list[np.ndarray] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    preferences: list[tuple[int, int]] = field(default_factory=list)
    mismatched: int | None = None
    scores: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    scored: list[np.ndarray] = field(default_factory=list)

    def scored_of(self, index: int) -> np.ndarray:
        """bool [R_k] of a response."""
        return self.scored[index] if self.scored else np.ones(len(self.responses[index]), dtype=bool)

    def cost(self, share_prefix: bool = True) -> int:
        """Tokens that a forward pass over this unit computes."""
        prompts = 1 if share_prefix else len(self.responses)
        return prompts * len(self.prompt) + sum(len(response) for response in self.responses)


@dataclass(frozen=True)
class PrefixTree:
    """A tree of the packed row: where its prompt lies and how long each response after it is (in tokens)."""

    prompt: int
    responses: tuple[int, ...]


@dataclass
class MicroBatch:
    """Packed tensors of a few units, ready for `scoring.response_logps`.

    T: tokens in the row(s); N: scored tokens; K: responses; E: examples.

    Attributes:
        input_ids, position_ids: int64 [1, T]; [K, L] with `attention_mask` [K, L] for plain batches (a response a row).
        trees: trees in row order (packed batches); None for plain ones.
        predictors: int64 [N], flat positions whose hidden state predicts a response token.
        targets: int64 [N], the token predicted there.
        response_of: int64 [N], the response (0..K-1) which that token belongs to.
        lengths: float32 [K], scored tokens a response; scores: float32 [K], NaN where a row rates none.
        pairs: int64 [E, 2], responses of each example as in examples.py, -1 where it has none.
        weights: float32 [E], by which the loss of each example is multiplied.
        group: int64 [K], the prompt unit of each response.
        preferences: int64 [P, 2], (preferred, other) responses of the kind "group"; empty for other kinds.
        mismatched: int64 [M], responses that belong to another prompt, of the kind "unpaired_mismatched".
        datasets: int64 [E], data set of each example.
        keys: (data set, response id) of each response, for the reference cache.
        units: what it was made of, to name examples in an error.
        padding: tokens at the end of a packed row that belong to no unit.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    trees: list[PrefixTree] | None
    predictors: torch.Tensor
    targets: torch.Tensor
    response_of: torch.Tensor
    lengths: torch.Tensor
    scores: torch.Tensor
    pairs: torch.Tensor
    weights: torch.Tensor
    group: torch.Tensor
    preferences: torch.Tensor
    mismatched: torch.Tensor
    datasets: torch.Tensor
    keys: list[tuple[int, int]]
    units: list[PromptUnit]
    padding: int = 0

    def to(self, device: torch.device | str) -> MicroBatch:
        """Copy of this batch with its tensors on `device`; to a GPU without waiting for what runs there."""
        device = torch.device(device)
        moved = {
            name: to_device(value, device) if isinstance(value, torch.Tensor) else value
            for name, value in vars(self).items()
        }
        return MicroBatch(**moved)

    @property
    def lengths_list(self) -> list[int]:
        """`lengths` as integers on the host, without a device sync."""
        return [int(unit.scored_of(index).sum()) for unit in self.units for index in range(len(unit.responses))]

    @property
    def n_tokens(self) -> int:
        """Tokens that carry information, padding not counted."""
        if self.attention_mask is None:
            return self.input_ids.numel() - self.padding
        return sum(unit.cost(share_prefix=False) for unit in self.units)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`; on a GPU without waiting for what runs there, which pinned memory allows."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def pack(units: list[PromptUnit], share_prefix: bool = True, multiple: int = 1) -> MicroBatch | None:
    """Lay units out as one packed row (see `MicroBatch`); None for no units.

    Each unit is a tree: the prompt once, then its responses, whose positions restart after the prompt. Without prefix
    sharing every response is a tree of its own. A row is filled up to a multiple of `multiple` tokens with a last tree
    that nothing is scored in: some kernels are compiled for, and memory is kept for, rows of few sizes.
    """
    if not units:
        return None
    tokens, positions, trees = [], [], []
    predictors, response_of = [], []
    cursor = n_responses = 0
    for unit in units:
        n_prompt = len(unit.prompt)
        every = list(range(len(unit.responses)))
        for numbers in [every] if share_prefix else [[number] for number in every]:
            responses = [unit.responses[number] for number in numbers]
            start = cursor
            tokens.append(unit.prompt)
            positions.append(np.arange(n_prompt))
            cursor += n_prompt
            for number, response in zip(numbers, responses):
                n, scored = len(response), unit.scored_of(number)
                tokens.append(response)
                positions.append(np.arange(n_prompt, n_prompt + n))
                # The first response token is predicted by the prompt's last one, wherever the response itself lies.
                before = np.concatenate([[start + n_prompt - 1], np.arange(cursor, cursor + n - 1)])
                predictors.append(before[scored])
                response_of.append(np.full(scored.sum(), n_responses))
                cursor += n
                n_responses += 1
            trees.append(PrefixTree(n_prompt, tuple(len(response) for response in responses)))
    padding = -cursor % multiple
    if padding:
        tokens.append(np.zeros(padding, dtype=np.int32))
        positions.append(np.arange(padding))
        trees.append(PrefixTree(padding, ()))
    return MicroBatch(
        input_ids=_int64(tokens)[None],
        position_ids=_int64(positions)[None],
        attention_mask=None,
        trees=trees,
        predictors=_int64(predictors),
        response_of=_int64(response_of),
        padding=padding,
        **_examples(units),
    )


def pad(units: list[PromptUnit], pad_token_id: int) -> MicroBatch | None:
    """Lay units out one response a row, right-padded: for models that cannot share a prefix. None for no units."""
    if not units:
        return None
    rows = [np.concatenate([unit.prompt, response]) for unit in units for response in unit.responses]
    prompts = [len(unit.prompt) for unit in units for _ in unit.responses]
    kept = [unit.scored_of(index) for unit in units for index in range(len(unit.responses))]
    longest = max(map(len, rows))
    input_ids: np.ndarray = np.full((len(rows), longest), pad_token_id, dtype=np.int64)
    mask: np.ndarray = np.zeros((len(rows), longest), dtype=np.int64)
    predictors: list[np.ndarray] = []
    response_of: list[np.ndarray] = []
    for index, (row, n_prompt, scored) in enumerate(zip(rows, prompts, kept)):
        input_ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
        predictors.append(index * longest + np.arange(n_prompt - 1, len(row) - 1)[scored])
        response_of.append(np.full(scored.sum(), index))
    positions = np.broadcast_to(np.arange(longest), mask.shape) * mask
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions.copy()),
        attention_mask=torch.from_numpy(mask),
        trees=None,
        predictors=_int64(predictors),
        response_of=_int64(response_of),
        **_examples(units),
    )


def _int64(arrays: list) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64))


def _examples(units: list[PromptUnit]) -> dict:
    """The fields of a MicroBatch that do not depend on its layout."""
    pairs, preferences, mismatched, offset = [], [], [], 0
    for unit in units:
        assert len(unit.prompt) and all(map(len, unit.responses)), "a response's first token needs one before it"
        pairs += [tuple(k + offset if k >= 0 else -1 for k in pair) for pair in unit.pairs]
        preferences += [(preferred + offset, other + offset) for preferred, other in unit.preferences]
        mismatched += [] if unit.mismatched is None else [unit.mismatched + offset]
        offset += len(unit.responses)
    scored = [response[unit.scored_of(index)] for unit in units for index, response in enumerate(unit.responses)]
    return {
        "targets": _int64(scored),
        "lengths": torch.tensor([len(tokens) for tokens in scored], dtype=torch.float32),
        "scores": torch.tensor(_each(units, "scores", "responses", math.nan), dtype=torch.float32),
        "pairs": torch.tensor(pairs, dtype=torch.int64),
        "weights": torch.tensor(_each(units, "weights", "pairs", 1.0), dtype=torch.float32),
        "group": torch.tensor([index for index, unit in enumerate(units) for _ in unit.responses], dtype=torch.int64),
        "preferences": torch.tensor(preferences, dtype=torch.int64).reshape(-1, 2),
        "mismatched": torch.tensor(mismatched, dtype=torch.int64),
        "datasets": torch.tensor([unit.dataset for unit in units for _ in unit.pairs], dtype=torch.int64),
        "keys": [(unit.dataset, i) for unit in units for i in unit.response_ids],
        "units": units,
    }


def _each(units: list[PromptUnit], name: str, of: str, missing: float) -> list[float]:
    """The numbers that units have, one for each of their responses or pairs; `missing` for a unit without any."""
    return [number for unit in units for number in getattr(unit, name) or [missing] * len(getattr(unit, of))]
