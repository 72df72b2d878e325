"""Tokenised data sets in memory."""

import itertools

import numpy as np


class Data:
    """A tokenised data set in memory: `groups` is [(prompt length, [response lengths], [(chosen, rejected)])]."""

    def __init__(self, groups, seed=0):
        rng = np.random.default_rng(seed)
        draw = lambda n: rng.integers(1, 1000, n).astype(np.int32)  # noqa: E731
        self.prompts = [draw(prompt) for prompt, _, _ in groups]
        self.answers = [[draw(n) for n in lengths] for _, lengths, _ in groups]
        self.examples = np.array(
            [(g, *pair) for g, (_, _, pairs) in enumerate(groups) for pair in pairs], dtype=np.int32
        ).reshape(-1, 3)
        self.first = np.cumsum([0] + [len(lengths) for _, lengths, _ in groups])
        self.n_responses = int(self.first[-1])

    def prompt(self, group):
        return self.prompts[group]

    def response(self, group, index):
        return self.answers[group][index]

    mismatched = False
    partly_scored = False

    def score(self, group, index):
        return np.nan

    def weight(self, example):
        return 1.0

    def response_id(self, group, index):
        return int(self.first[group] + index)


def pairs_data(n_groups, seed=0):
    """Groups of 2 to 4 responses with every pair of them."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(n_groups):
        count = int(rng.integers(2, 5))
        groups.append(
            (
                int(rng.integers(1, 30)),
                rng.integers(1, 30, count).tolist(),
                list(itertools.combinations(range(count), 2)),
            )
        )
    return Data(groups, seed)


def flat(lists):
    return [x for part in lists for x in part]
