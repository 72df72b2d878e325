"""What an example is: the kinds of losses/inputs.py, made out of tokenised responses and preference pairs.

An example is a row (group, first, second) of response numbers inside its prompt group:

    responses   (group, response, -1)                                    SFT: one response
    pairs       (group, chosen, rejected)                                a preference
    unpaired    (group, response, -1) good, (group, -1, response) bad    one labelled response
    group       (group, -1, -1)                                          a prompt with all responses of its pairs
    unpaired_mismatched   as unpaired; with each prompt comes the response of another one
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

KINDS = ("responses", "pairs", "unpaired", "unpaired_mismatched", "group")
# An example of each kind, as (first, second), of a prompt with a single response.
ONE_RESPONSE = {
    "responses": (0, -1),
    "pairs": (0, 0),
    "unpaired": (0, -1),
    "unpaired_mismatched": (0, -1),
    "group": (-1, -1),
}


def rows_of(kind: str) -> str:
    """What rows are read for: "responses" (SFT), "unpaired" (rows with a label too) or "pairs". Kinds of one such share
    their tokens."""
    return kind if kind == "responses" else "unpaired" if kind.startswith("unpaired") else "pairs"


def own_examples(n_responses: int, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first, second) of the examples that a prompt group is stored with: its pairs and labelled responses, or else its
    responses."""
    return list(pairs) or [(response, -1) for response in range(n_responses)]


def examples_of_kind(rows: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Examples of a kind, and what rows they come from.

    Args:
        rows: int32 [n, 3], the data set's own examples: its pairs and labelled responses or, for the kind "responses",
            its responses.
    Returns: int32 [m, 3], in the order in which they first appear in `rows`; and pairs (example, row), as two arrays:
        every row that an example is in, for a response may be in several pairs.
    """
    assert kind in KINDS, kind
    if kind in ("responses", "pairs"):
        return rows, np.arange(len(rows)), np.arange(len(rows))
    if kind == "group":
        found, source = np.stack([rows[:, 0], *[np.full(len(rows), -1)] * 2], axis=1), np.arange(len(rows))
    else:
        # A response that several pairs call good is one good example; one that is called both is an example of each.
        found, source = np.repeat(rows, 2, axis=0), np.repeat(np.arange(len(rows)), 2)
        found[0::2, 2] = -1
        found[1::2, 1] = -1
        there = found[:, 1:].max(axis=1) >= 0  # a labelled response is one example, not two
        found, source = found[there], source[there]
    _, first, example = np.unique(found, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return np.ascontiguousarray(found[first[order]], dtype=rows.dtype), place[example.reshape(-1)], source


def preferences_of(pairs: np.ndarray, group: int) -> np.ndarray:
    """The pairs of one prompt group: int32 [P, 2], (chosen, rejected).

    Args:
        pairs: int32 [n, 3], (group, chosen, rejected), in ascending order of groups.
    """
    start, stop = (int(np.searchsorted(pairs[:, 0], number)) for number in (group, group + 1))
    return pairs[start:stop, 1:]


def examples_lacking(
    examples: np.ndarray, pairs: np.ndarray, first_response: np.ndarray, known: np.ndarray
) -> np.ndarray:
    """Which examples have a response that is not known: bool [n].

    Args:
        examples: int32 [n, 3]; pairs: int32 [p, 3], those of the data set, of which the kind "group" is made.
        first_response: [n_groups], number in the data set of each group's first response.
        known: bool [n_responses].
    """

    def lacking(rows):
        found: np.ndarray = np.zeros(len(rows), dtype=bool)
        for column in (1, 2):
            there = np.flatnonzero(rows[:, column] >= 0)
            found[there] |= ~known[first_response[rows[there, 0]] + rows[there, column]]
        return found

    found = lacking(examples)
    of_group: np.ndarray = np.zeros(len(first_response), dtype=bool)
    of_group[pairs[lacking(pairs), 0]] = True
    whole = (examples[:, 1:] < 0).all(axis=1)
    found[whole] = of_group[examples[whole, 0]]
    return found
