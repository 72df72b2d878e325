"""Figures of tokenised data that show what is wrong with them: lengths, duplicates, overlap of training and held-out
data, and how far length alone tells the better response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from atomic_files import hasher
from data.tokenization import TokenizedDataset

PERCENTILES = (0, 5, 50, 95, 100)


@dataclass(frozen=True)
class SetFigures:
    """Of one split of a data set.

    lengths: what -> tokens at PERCENTILES. cut: responses that max_length cut. repeated: examples that equal an earlier
    one token by token. longer: how often the better response is the longer one, ties half, of `compared` comparisons:
    pairs or, where responses are labelled one by one, all good with all bad ones; None without any.
    """

    dataset: str
    split: str
    examples: int
    prompts: int
    responses: int
    tokens: int
    lengths: dict[str, list[int]]
    cut: int
    repeated: int
    longer: float | None
    compared: int
    counts: dict[str, int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Overlap:
    """Held-out prompts, and whole examples, that training has, too. first: source rows of some of these examples, else
    of some of these prompts."""

    prompts: int
    of_prompts: int
    examples: int
    of_examples: int
    first: list[tuple[str, int]]


def figures(dataset: TokenizedDataset) -> SetFigures:
    sizes = np.diff(dataset.segment_starts)
    prompts = sizes[dataset.group_starts[:-1]]
    rows = dataset.examples
    columns = {"prompt": prompts}
    better, worse = (_lengths(dataset, sizes, rows, column) for column in (1, 2))
    pairs = (rows[:, 1] >= 0) & (rows[:, 2] >= 0)
    if pairs.any():
        columns |= {"chosen": better, "rejected": worse}
    elif len(worse):
        columns |= {"good": better, "bad": worse}
    elif len(better):
        columns["response"] = better
    else:
        responses: np.ndarray = np.ones(len(sizes), dtype=bool)
        responses[dataset.group_starts[:-1]] = False
        columns["response"] = sizes[responses]
    columns["prompt and longest response"] = dataset.row_lengths()
    longer, compared = _longer_wins(better, worse, bool(pairs.any()))
    return SetFigures(
        dataset.short_name,
        dataset.split,
        dataset.n_examples,
        dataset.n_groups,
        dataset.n_responses,
        int(sizes.sum()),
        {what: np.percentile(of, PERCENTILES).round().astype(int).tolist() for what, of in columns.items() if len(of)},
        int(np.sum(dataset.truncated)),
        sum(number - 1 for number in Counter(example_digests(dataset)).values()),
        longer,
        compared,
        dict(dataset.counts),
        list(dataset.notices),
    )


def _lengths(dataset: TokenizedDataset, sizes: np.ndarray, rows: np.ndarray, column: int) -> np.ndarray:
    """Tokens of the responses that a column of the examples names."""
    there = rows[:, column] >= 0
    return sizes[dataset.group_starts[rows[there, 0]] + 1 + rows[there, column]]


def _longer_wins(better: np.ndarray, worse: np.ndarray, paired: bool) -> tuple[float | None, int]:
    """(share of comparisons that the longer response wins, number of comparisons)."""
    if not len(better) or not len(worse):
        return None, 0
    if paired:
        return float(np.mean((better > worse) + 0.5 * (better == worse))), len(better)
    ordered = np.sort(worse)
    shorter, not_longer = (np.searchsorted(ordered, better, side) for side in ("left", "right"))
    return float(np.mean((shorter + not_longer) / 2) / len(worse)), len(better) * len(worse)


def _digest(*parts: np.ndarray) -> bytes:
    digest = hasher()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(part).data)
    return digest.digest()


def prompt_digests(dataset: TokenizedDataset) -> list[bytes]:
    return [_digest(dataset.prompt(group)) for group in range(dataset.n_groups)]


def example_digests(dataset: TokenizedDataset) -> Iterable[bytes]:
    """Equal for examples of the same tokens: the prompt's and the responses' in their places."""
    for group, first, second in dataset.examples.tolist():
        numbers = range(dataset.n_group_responses(group)) if first < 0 and second < 0 else (first, second)
        nothing = dataset.tokens[:0]
        yield _digest(dataset.prompt(group), *(dataset.response(group, n) if n >= 0 else nothing for n in numbers))


def overlap(train: list[TokenizedDataset], held_out: list[TokenizedDataset], most: int = 5) -> Overlap:
    """What is in both splits, over all data sets."""
    known_prompts = {digest for dataset in train for digest in prompt_digests(dataset)}
    known_examples = {digest for dataset in train for digest in example_digests(dataset)}
    prompts, examples = [], []
    for dataset in held_out:
        in_train = [group for group, digest in enumerate(prompt_digests(dataset)) if digest in known_prompts]
        prompts += [(dataset.short_name, int(dataset.rows[group])) for group in in_train]
        groups = dataset.examples[:, 0]
        examples += [
            (dataset.short_name, int(dataset.rows[groups[number]]))
            for number, digest in enumerate(example_digests(dataset))
            if digest in known_examples
        ]
    return Overlap(
        len(prompts),
        sum(dataset.n_groups for dataset in held_out),
        len(examples),
        sum(dataset.n_examples for dataset in held_out),
        (examples or prompts)[:most],
    )
