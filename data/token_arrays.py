"""The arrays of a tokenised data set, whether a folder of the token cache has them or the memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data import token_cache
from data.examples import examples_lacking, examples_of_kind, own_examples, preferences_of
from data.truncation import TokenGroup

ARRAYS = {
    "tokens": (np.int32, ()),
    "segment_starts": (np.int64, ()),
    "group_starts": (np.int64, ()),
    "examples": (np.int32, (3,)),
    "rows": (np.int64, ()),
    "truncated": (np.bool_, ()),
    "scores": (np.float32, ()),
    "weights": (np.float32, ()),
    "unscored": (np.int64, (2,)),
}

USUAL = {"scores": math.nan, "weights": 1.0}  # of what rows say nothing about


class TokenizedDataset:
    """The prompt groups of one data set's split, as tokens.

    A group's trees lie one after another: its prompt, then its responses.
        tokens          int32 [n_tokens]
        segment_starts  int64 [n_segments + 1]  where each segment's tokens start
        group_starts    int64 [n_groups + 1]    the segment that is each group's prompt
        examples        int32 [n_examples, 3]   (group, first, second): response numbers inside the group, by kind of
                                                example; on disk pairs (group, chosen, rejected), SFT (group, n, -1)
        rows            int64 [n_groups]        the source row, for messages
        truncated       bool  [n_responses]     cut at max_length, so without an EOS
        scores          float32 [n_responses]   how the rows rate each, NaN where they do not
        weights         float32 [examples on disk]  what their losses are multiplied by
        unscored        int64 [n, 2]            (start, stop) in tokens of what is not scored within responses: turns of
                                                others in an answer of several turns
    key: a digest of all tokens and the structure. counts: what was read, kept, cut and dropped. notices: what the user
    should see once.
    """

    tokens: np.ndarray
    segment_starts: np.ndarray
    group_starts: np.ndarray
    examples: np.ndarray
    rows: np.ndarray
    truncated: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    unscored: np.ndarray

    def __init__(self, name: str, split: str, arrays: Mapping[str, np.ndarray], key: str, counts: dict[str, int]):
        self.name, self.split, self.key, self.counts = name, split, key, counts
        self.folder: Path | None = None  # of the token cache
        self.notices: list[str] = []
        self.short_name = name  # in metrics
        self.own_test_split = ""  # why data.test_fraction has no effect on it
        for array_name in ARRAYS:
            setattr(self, array_name, arrays[array_name])
        self._pairs, self._example_weights = self.examples, self.weights
        self.mismatched = False  # whether a response of another prompt is scored after each

    @classmethod
    def of_folder(cls, folder: Path, name: str, split: str) -> TokenizedDataset:
        """One that the token cache keeps."""
        manifest = token_cache.read_manifest(folder)
        arrays = {array_name: token_cache.open_array(folder, f"{array_name}.npy") for array_name in ARRAYS}
        dataset = cls(name, split, arrays, manifest["content"], manifest["counts"])
        dataset.notices, dataset.folder = list(manifest["notices"]), folder
        return dataset

    @classmethod
    def of_groups(cls, name: str, split: str, groups: list[TokenGroup], key: str) -> TokenizedDataset:
        """One in memory."""
        columns = {array_name: Column(*declared) for array_name, declared in ARRAYS.items()}
        append_groups(columns, groups)
        close_segments(columns)
        return cls(name, split, {array_name: column.array() for array_name, column in columns.items()}, key, {})

    def of_kind(self, kind: str) -> TokenizedDataset:
        """This data set with examples of a kind (examples.py), made out of its pairs."""
        self.examples, example, row = examples_of_kind(self._pairs, kind)
        # Of an example made of several rows the mean of theirs.
        total = np.bincount(example, self.weights[row], len(self.examples))
        self._example_weights = total / np.maximum(np.bincount(example, minlength=len(self.examples)), 1)
        self.mismatched = kind == "unpaired_mismatched"
        if self.mismatched and self.n_groups < 2:
            raise ValueError(
                f"data set {self.name} has a single {self.split} prompt: this loss estimates the KL divergence with "
                "responses of other prompts. Give more data, or choose a loss that does without (bco, dpo)."
            )
        return self

    def mismatched_response(self, group: int) -> np.ndarray:
        """int32 [n]: the first response of the next prompt, to be scored after this one's; cut where the row would be
        longer than any other of the data set. Its number is n_responses + group.
        """
        other = self.response((group + 1) % self.n_groups, 0)
        return other[: self._longest_row - len(self.prompt(group))]

    @cached_property
    def _longest_row(self) -> int:
        return int(self.row_lengths().max())

    @property
    def n_scored(self) -> int:
        """How many responses a reference gives a log-prob: one more a prompt where others' are scored, too."""
        return self.n_responses + (self.n_groups if self.mismatched else 0)

    def preferences(self, group: int) -> np.ndarray:
        """int32 [P, 2]: the pairs (chosen, rejected) of a prompt group."""
        return preferences_of(self._pairs, group)

    def examples_lacking(self, known: np.ndarray) -> np.ndarray:
        """Which examples have a response that is not known (bool [n_scored]): bool [n_examples]."""
        first_response = self.group_starts[:-1] - np.arange(self.n_groups)
        found = examples_lacking(self.examples, self._pairs, first_response, known)
        return found | ~known[self.n_responses + self.examples[:, 0]] if self.mismatched else found

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def n_examples(self) -> int:
        return len(self.examples)

    @property
    def n_groups(self) -> int:
        return len(self.group_starts) - 1

    @property
    def n_responses(self) -> int:
        return len(self.segment_starts) - 1 - self.n_groups

    def row_lengths(self) -> np.ndarray:
        """int64 [n_groups]: tokens of each prompt with its longest response."""
        lengths = np.diff(self.segment_starts)
        first = self.group_starts[:-1]
        prompts = lengths[first]
        lengths[first] = 0
        return prompts + np.maximum.reduceat(lengths, first) if len(first) else prompts

    def n_group_responses(self, group: int) -> int:
        return int(self.group_starts[group + 1] - self.group_starts[group]) - 1

    def _segment(self, segment: int) -> np.ndarray:
        return self.tokens[self.segment_starts[segment] : self.segment_starts[segment + 1]]

    def prompt(self, group: int) -> np.ndarray:
        """int32 [n]: the prompt's tokens, never empty."""
        return self._segment(int(self.group_starts[group]))

    def response(self, group: int, index: int) -> np.ndarray:
        """int32 [n]: the tokens of a response, never empty."""
        assert 0 <= index < self.n_group_responses(group)
        return self._segment(int(self.group_starts[group]) + 1 + index)

    @property
    def partly_scored(self) -> bool:
        """Whether some responses have tokens that are not scored."""
        return len(self.unscored) > 0

    def scored(self, group: int, index: int) -> np.ndarray:
        """bool [n]: which tokens of a response are scored, the first one among them."""
        start, stop = self.segment_starts[int(self.group_starts[group]) + 1 + index :][:2]
        mask: np.ndarray = np.ones(int(stop - start), dtype=bool)
        first = int(np.searchsorted(self.unscored[:, 0], start))
        for low, high in self.unscored[first:]:
            if low >= stop:
                break
            mask[low - start : high - start] = False
        return mask

    def mismatched_scored(self, group: int) -> np.ndarray:
        """`scored` of `mismatched_response`."""
        return self.scored((group + 1) % self.n_groups, 0)[: len(self.mismatched_response(group))]

    def response_id(self, group: int, index: int) -> int:
        """The number of a response in the whole data set, 0 .. n_responses - 1."""
        return int(self.group_starts[group]) - group + index

    def score(self, group: int, index: int) -> float:
        """How the data rate a response; NaN where they do not."""
        return float(self.scores[self.response_id(group, index)])

    def weight(self, example: int) -> float:
        """What the loss of an example is multiplied by."""
        return float(self._example_weights[example])


class Column:
    """An array that grows by appending, in memory. row: the shape of one entry, () for a scalar."""

    def __init__(self, dtype, row: tuple = ()):
        self.dtype, self.row, self.length = np.dtype(dtype), row, 0
        self._parts: list[np.ndarray] = []

    def append(self, values) -> None:
        self._parts.append(np.ascontiguousarray(values, self.dtype).reshape((-1, *self.row)))
        self.length += len(self._parts[-1])

    def array(self) -> np.ndarray:
        return np.concatenate([np.empty((0, *self.row), self.dtype), *self._parts])


def close_segments(files: Mapping[str, Any]) -> None:
    """Add where the last segment and the last group end."""
    files["segment_starts"].append([files["tokens"].length])
    files["group_starts"].append([files["segment_starts"].length - 1])


def append_groups(files: Mapping[str, Any], groups: list[TokenGroup]) -> None:
    """Add groups to the arrays of a data set.

    files: array name -> something with `length` and `append`, an ArrayFile or a Column.
    """
    tokens, lengths, sizes, examples, unscored = array("i"), [], [], [], []
    before = files["tokens"].length
    first_group = files["group_starts"].length
    for number, group in enumerate(groups, first_group):
        for number_of_segment, segment in enumerate((group.prompt, *group.responses)):
            spans = group.unscored[number_of_segment - 1] if number_of_segment and group.unscored else ()
            unscored += [(before + len(tokens) + start, before + len(tokens) + stop) for start, stop in spans]
            tokens.extend(segment)
            lengths.append(len(segment))
        sizes.append(1 + len(group.responses))
        examples += [(number, *example) for example in own_examples(len(group.responses), group.pairs)]
    starts = files["tokens"].length + np.concatenate(([0], np.cumsum(lengths)))[:-1] if lengths else []
    group_starts = files["segment_starts"].length + np.concatenate(([0], np.cumsum(sizes)))[:-1] if sizes else []
    files["tokens"].append(np.frombuffer(tokens, np.int32) if tokens else [])
    files["segment_starts"].append(starts)
    files["group_starts"].append(group_starts)
    files["examples"].append(examples)
    files["unscored"].append(unscored)
    files["rows"].append([group.row for group in groups])
    files["truncated"].append([cut for group in groups for cut in group.truncated])
    files["scores"].append([score for group in groups for score in group.scores])
    files["weights"].append([weight for group in groups for weight in group.weights])
