"""Figures of scored preference pairs: accuracy and margins with intervals, calibration, and two policies compared.

Pairs of one prompt share it, and mostly a response, so they are no independent trials. All intervals allow for that:
their variance is that of sums over prompts (Liang and Zeger, Biometrika 73, 1986, the independence working model).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Z = 1.959964  # of a 95% interval
BINS = 10  # of the calibration, from a confidence of 1/2 to 1
BUCKETS = 4  # of lengths


@dataclass
class ScoredPairs:
    """P pairs with the log-probs (nats) of their responses, summed over tokens.

    Attributes:
        names: of the data sets. dataset: int [P], index into names; prompt: int [P], equal for pairs of one prompt;
            row: int [P], the source row.
        chosen, rejected: float [P], of the policy; reference_chosen, reference_rejected: of the reference, or None.
        chosen_lengths, rejected_lengths: int [P], tokens.
        beta: what log-ratios are multiplied by to give rewards.
    """

    names: list[str]
    dataset: np.ndarray
    prompt: np.ndarray
    row: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    reference_chosen: np.ndarray | None
    reference_rejected: np.ndarray | None
    chosen_lengths: np.ndarray
    rejected_lengths: np.ndarray
    beta: float

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def margins(self) -> np.ndarray:
        """Float [P], nats: rewards of the chosen less those of the rejected responses (DPO, arXiv 2305.18290, section
        4: beta times the log-ratio to the reference). Without a reference: beta times the difference of log-probs."""
        difference = self.chosen - self.rejected
        if self.reference_chosen is not None and self.reference_rejected is not None:
            difference = difference - (self.reference_chosen - self.reference_rejected)
        return self.beta * difference

    @property
    def right(self) -> np.ndarray:
        """Float [P]: 1 where the chosen response has the higher reward, one half for a tie."""
        return (self.margins > 0) + 0.5 * (self.margins == 0)

    @property
    def length(self) -> np.ndarray:
        """Float [P], tokens: the mean of the two responses'."""
        return (self.chosen_lengths + self.rejected_lengths) / 2


def mean_and_error(values: np.ndarray, clusters: np.ndarray) -> tuple[float, float]:
    """(mean, its standard error); values that share a number in `clusters` depend on each other."""
    mean = float(values.mean())
    _, index = np.unique(clusters, return_inverse=True)
    sums = np.bincount(index, weights=values - mean)
    count = len(sums)
    # One prompt tells nothing about others.
    error = math.inf if count < 2 else math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(values)
    return mean, error


def share(values: np.ndarray, clusters: np.ndarray) -> dict[str, float | int]:
    """A share of N trials with its 95% interval: Wilson's (JASA 22, 1927), with as many trials as independent ones
    would have to be for the same variance.
    """
    mean, error = mean_and_error(values, clusters)
    n = float(len(np.unique(clusters)))
    if 0 < mean < 1 and 0 < error < math.inf:
        n = min(float(len(values)), mean * (1 - mean) / error**2)
    center = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    return {"value": mean, "low": max(0.0, center - half), "high": min(1.0, center + half), "n": len(values)}


def average(values: np.ndarray, clusters: np.ndarray) -> dict[str, float | int | None]:
    """A mean with its 95% interval (normal); null where one prompt gives none."""
    mean, error = mean_and_error(values, clusters)
    known = math.isfinite(error)
    return {
        "value": mean,
        "low": mean - Z * error if known else None,
        "high": mean + Z * error if known else None,
        "n": len(values),
    }


def figures(pairs: ScoredPairs, of: np.ndarray | None = None) -> dict:
    """Accuracy, margin and lengths of the pairs that `of` (bool [P]) marks, of all where it is None."""
    of = np.ones(len(pairs), dtype=bool) if of is None else of
    found: dict = {
        "accuracy": share(pairs.right[of], pairs.prompt[of]),
        "margin": average(pairs.margins[of], pairs.prompt[of]),
        "chosen_tokens": float(pairs.chosen_lengths[of].mean()),
        "rejected_tokens": float(pairs.rejected_lengths[of].mean()),
    }
    if pairs.reference_chosen is not None and pairs.reference_rejected is not None:
        for name, policy, reference in (
            ("chosen_reward", pairs.chosen, pairs.reference_chosen),
            ("rejected_reward", pairs.rejected, pairs.reference_rejected),
        ):
            found[name] = average(pairs.beta * (policy - reference)[of], pairs.prompt[of])
    return found


def by_dataset(pairs: ScoredPairs) -> dict[str, dict]:
    return {name: figures(pairs, pairs.dataset == index) for index, name in enumerate(pairs.names)
            if (pairs.dataset == index).any()}  # fmt: skip


def by_length(pairs: ScoredPairs) -> dict[str, dict]:
    """By quarters of the mean length of the two responses, and by which of the two is longer."""
    edges = np.unique(np.quantile(pairs.length, np.linspace(0, 1, BUCKETS + 1)))
    found = {}
    for low, high in zip(edges, edges[1:]):
        last = high == edges[-1]
        within = (pairs.length >= low) & ((pairs.length <= high) if last else (pairs.length < high))
        if within.any():
            found[f"{low:g} to {high:g} tokens"] = figures(pairs, within)
    for name, within in (
        ("chosen longer", pairs.chosen_lengths > pairs.rejected_lengths),
        ("as long", pairs.chosen_lengths == pairs.rejected_lengths),
        ("chosen shorter", pairs.chosen_lengths < pairs.rejected_lengths),
    ):
        if within.any():
            found[name] = figures(pairs, within)
    return found


def calibration(pairs: ScoredPairs) -> dict:
    """How often pairs are right that the policy is so sure of: its probability for the response that it prefers is the
    logistic function of the margin's size (Bradley-Terry), which lies between 1/2 and 1.

    Returns: bins of equal width with their mean confidence, share of right ones and count; and their expected
    calibration error, the mean |confidence - accuracy| weighted by counts (Guo et al., arXiv 1706.04599, eq. 3).
    """
    sure = np.where(np.abs(pairs.margins) > 700, 1.0, 1 / (1 + np.exp(-np.minimum(np.abs(pairs.margins), 700))))
    number = np.minimum(((sure - 0.5) * 2 * BINS).astype(int), BINS - 1)
    bins = []
    for index in range(BINS):
        of = number == index
        if of.any():
            bins.append(
                {
                    "confidence": float(sure[of].mean()),
                    "accuracy": float(pairs.right[of].mean()),
                    "pairs": int(of.sum()),
                }
            )
    error = sum(one["pairs"] * abs(one["confidence"] - one["accuracy"]) for one in bins) / len(pairs)
    return {"error": error, "bins": bins}


def comparison(pairs: ScoredPairs, other: ScoredPairs) -> dict:
    """Two policies on the same pairs: the difference (first less other) of accuracy and margin, paired, and the exact
    two-sided sign test over the prompts of which one is right more often (McNemar's where prompts have one pair).
    """
    assert (pairs.prompt == other.prompt).all()
    difference = pairs.right - other.right
    _, index = np.unique(pairs.prompt, return_inverse=True)
    by_prompt = np.bincount(index, weights=difference)
    better, worse = int((by_prompt > 1e-9).sum()), int((by_prompt < -1e-9).sum())
    return {
        "accuracy": average(difference, pairs.prompt),
        "margin": average(pairs.margins - other.margins, pairs.prompt),
        "better_prompts": better,
        "worse_prompts": worse,
        "p_value": sign_test(better, worse),
    }


def sign_test(better: int, worse: int) -> float:
    """Exact two-sided p-value of `better` against `worse` outcomes if both were equally likely."""
    n, fewer = better + worse, min(better, worse)
    if n == 0:
        return 1.0
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(fewer + 1)]
    return min(1.0, 2 * math.fsum(math.exp(each - n * math.log(2)) for each in logs))


def most_telling(pairs: ScoredPairs, n: int) -> dict[str, list[int]]:
    """Numbers of the wrong pairs that the policy is surest of, and of those that it is least sure of."""
    wrong = np.flatnonzero(pairs.margins < 0)
    ordered = wrong[np.argsort(pairs.margins[wrong], kind="stable")]
    return {"surest": ordered[:n].tolist(), "least sure": ordered[::-1][:n].tolist() if len(ordered) > n else []}
