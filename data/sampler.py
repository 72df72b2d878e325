"""From tokenised data sets to optimizer steps: epochs of examples, cut into steps, cut into balanced micro-batches.

An *example* is what the loss takes: a pair, a response or a prompt (examples.py). A step takes `batch_size` examples
over all ranks and groups them by prompt into `PromptUnit`s, which are dealt out to micro-batches and ranks.

Everything here is a pure function of (data, seed, epoch, world size, budget). Nothing touches a device, and every rank
computes all micro-batches and takes its own share, so ranks never have to talk about data.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from data.batching import MicroBatch, PromptUnit


class DatasetMixture:
    """Several tokenised data sets seen as one list of examples.

    Args:
        datasets: `TokenizedDataset`s (see tokenization.py).
        weights: how often each data set's examples are seen in an epoch: 1 is once, 0.5 a different half each epoch,
            2 twice. One number a data set; None means 1 for all. Where an epoch's share is no whole number, epochs
            differ by an example, so that over epochs the frequency is right.
    """

    def __init__(self, datasets: Sequence, weights: Sequence[float] | None = None):
        self.datasets = list(datasets)
        self.weights = [1.0] * len(self.datasets) if weights is None else [float(w) for w in weights]
        self.offsets = np.cumsum([0] + [len(d.examples) for d in self.datasets])

        self.shares = [weight * len(d.examples) for weight, d in zip(self.weights, self.datasets, strict=True)]

    def drawn_before(self, index: int, epoch: int) -> int:
        """Examples of a data set in all epochs before `epoch`."""
        return int(round(self.shares[index] * epoch))

    def examples_before(self, epoch: int) -> int:
        """Examples in all epochs before `epoch`."""
        return sum(self.drawn_before(index, epoch) for index in range(len(self.datasets)))

    def epoch_size(self, epoch: int = 0) -> int:
        """Examples in one epoch."""
        return self.examples_before(epoch + 1) - self.examples_before(epoch)

    def datasets_of(self, example_indices: np.ndarray) -> list[int]:
        """Indices of the data sets that have an example among these, in ascending order."""
        return np.unique(np.searchsorted(self.offsets, example_indices, side="right") - 1).tolist()

    def epochs(self, n_epochs: int | None, n_examples: int | None) -> int:
        """Epochs that a run begins which ends at whichever comes first; one may be None."""
        if n_examples is None or not sum(self.shares):
            return n_epochs or 0
        needed = max(0, int((n_examples - len(self.shares)) / sum(self.shares)))
        while self.examples_before(needed) < n_examples:
            needed += 1
        return needed if n_epochs is None else min(needed, n_epochs)

    def never_drawn(self, n_epochs: int) -> list[int]:
        """The data sets with examples of which so many epochs draw none, because their weights are too small."""
        indices = range(len(self.datasets))
        return [index for index in indices if self.shares[index] and not self.drawn_before(index, n_epochs)]

    def epoch_permutation(self, seed: int, epoch: int, shuffle: str | None = "pairs") -> np.ndarray:
        """Example indices of one epoch, in training order: a function of (seed, epoch) alone (Law 3).

        Args:
            shuffle: "pairs" permutes examples; "prompts" permutes prompts and keeps a prompt's pairs together; None
                leaves the source's order.
        Returns: int64 [epoch_size].
        """
        chosen = []
        for index, dataset in enumerate(self.datasets):
            count, start = len(dataset.examples), self.drawn_before(index, epoch)
            whole, rest = divmod(self.drawn_before(index, epoch + 1) - start, count) if count else (0, 0)
            parts = [np.arange(count)] * whole
            if rest:
                # A fractional weight walks round one permutation, epoch by epoch, so that all are seen equally often.
                walk = np.random.default_rng([seed, index, 1]).permutation(count)
                parts.append(np.sort(walk[(start + np.arange(rest)) % count]))
            if parts:
                chosen.append(np.concatenate(parts) + self.offsets[index])
        example_indices = np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int64)
        rng = np.random.default_rng([seed, epoch])
        if shuffle == "pairs":
            return rng.permutation(example_indices)
        if shuffle == "prompts":
            # One number a prompt, unique over data sets.
            prompts = np.concatenate(
                [dataset.examples[:, 0].astype(np.int64) + (index << 32) for index, dataset in enumerate(self.datasets)]
            )
            first = np.unique(prompts, return_inverse=True)[1][example_indices]
            rank = rng.permutation(first.max(initial=-1) + 1)
            return example_indices[np.argsort(rank[first], kind="stable")]
        assert shuffle is None, shuffle
        return example_indices

    def longest_row(self) -> int:
        """Tokens of the longest prompt + response; 0 without examples."""
        return max((int(dataset.row_lengths().max(initial=0)) for dataset in self.datasets), default=0)

    def longest_example(self) -> int:
        """Index of an example of the prompt group with the longest row."""
        lengths = [dataset.row_lengths()[dataset.examples[:, 0]] for dataset in self.datasets]
        return int(np.concatenate(lengths).argmax())

    def examples_lacking(self, known: Sequence[np.ndarray]) -> np.ndarray:
        """Which examples have a response that is not known: bool, by example index.

        Args:
            known: a data set's responses that are, bool [n_responses].
        """
        return np.concatenate([dataset.examples_lacking(of) for dataset, of in zip(self.datasets, known)])

    def locate(self, example_index: int) -> tuple[int, int]:
        """(data set, index of the example within it)."""
        index = int(np.searchsorted(self.offsets, example_index, side="right")) - 1
        return index, int(example_index - self.offsets[index])

    def units(self, example_indices: np.ndarray) -> list[PromptUnit]:
        """Group examples by prompt, each response once."""
        units: dict[tuple[int, int, int], PromptUnit] = {}
        for example_index in example_indices:
            index, local = self.locate(int(example_index))
            dataset = self.datasets[index]
            group, first, second = (int(x) for x in dataset.examples[local])
            whole = first < 0 and second < 0
            # A prompt that a weight above 1 brings twice into a step is two examples, each with all its responses.
            key = index, group, 0
            while whole and key in units:
                key = index, group, key[2] + 1
            unit = units.get(key)
            if unit is None:
                unit = units[key] = PromptUnit(index, group, dataset.prompt(group))
                if dataset.mismatched:
                    unit.mismatched, found = 0, dataset.mismatched_response(group)
                    unit.responses, unit.response_ids = [found], [dataset.n_responses + group]
                    unit.scored = [dataset.mismatched_scored(group)] if dataset.partly_scored else []
                    unit.scores = [math.nan]
            if whole:
                for preferred, other in dataset.preferences(group).tolist():
                    unit.preferences.append((_place(unit, dataset, preferred), _place(unit, dataset, other)))
            unit.pairs.append((_place(unit, dataset, first), _place(unit, dataset, second)))
            unit.weights.append(dataset.weight(local))
        return list(units.values())


def _place(unit: PromptUnit, dataset, response: int) -> int:
    """Index of a response of the unit's prompt within the unit, which then has it; -1 of none (-1)."""
    if response < 0:
        return -1
    response_id = dataset.response_id(unit.group, response)
    if response_id not in unit.response_ids:
        unit.responses.append(dataset.response(unit.group, response))
        if dataset.partly_scored:
            unit.scored.append(dataset.scored(unit.group, response))
        unit.response_ids.append(response_id)
        unit.scores.append(dataset.score(unit.group, response))
    return unit.response_ids.index(response_id)


@dataclass
class Step:
    """One optimizer step: this rank's micro-batches (None where it has no units) and the step's size over all ranks."""

    number: int
    epoch: int
    n_examples: int
    micro_batches: list[MicroBatch | None]


class BatchSampler:
    """The steps of a run, or of an evaluation, addressable by number so that a resumed run starts in the middle.

    Args:
        mixture: where examples come from.
        batch_size: examples a step over all ranks.
        n_epochs, n_examples: the run ends at whichever comes first; one may be None.
        make_batch: units -> MicroBatch or None (`pack` or `pad` with their options bound).
        share_prefix: how units' costs are counted.
        budget: tokens a micro-batch; may be lowered while training (out of memory).
    """

    def __init__(
        self,
        mixture: DatasetMixture,
        batch_size: int,
        *,
        seed: int,
        shuffle: str | None,
        make_batch,
        rank: int = 0,
        n_ranks: int = 1,
        budget: int = 2048,
        min_micro_batches: int = 1,
        share_prefix: bool = True,
        n_epochs: int | None = 1,
        n_examples: int | None = None,
    ):
        assert n_epochs is not None or n_examples is not None
        self.mixture, self.batch_size, self.seed, self.shuffle = mixture, batch_size, seed, shuffle
        self.make_batch, self.rank, self.n_ranks = make_batch, rank, n_ranks
        self.budget, self.min_micro_batches, self.share_prefix = budget, min_micro_batches, share_prefix
        epochs = mixture.epochs(n_epochs, n_examples)
        in_epochs = mixture.examples_before(epochs)
        if not in_epochs:
            raise ValueError("There is no example to make steps of; look at datasets and data.weights.")
        self.n_examples = in_epochs if n_examples is None else min(in_epochs, n_examples)
        self._permutation: tuple[int, np.ndarray] | None = None  # (epoch, its epoch_permutation)
        # A step never crosses an epoch: the last one of an epoch is smaller instead, so that no example is dropped.
        # Epochs repeat their sizes after `_period` of them.
        self._period = 1 if all(share == round(share) for share in mixture.shares) else epochs
        steps = [-(-mixture.epoch_size(epoch) // batch_size) for epoch in range(self._period)]
        self._steps_before = [0, *itertools.accumulate(steps)]  # of the epochs of a period, and of a whole one
        self.steps_per_epoch = steps[0]
        last = epochs - 1
        rest = self.n_examples - mixture.examples_before(last)
        self.n_steps = self._first_step(last) + -(-rest // batch_size)

    def _first_step(self, epoch: int) -> int:
        """The number of the first step of an epoch."""
        periods, inside = divmod(epoch, self._period)
        return periods * self._steps_before[-1] + self._steps_before[inside]

    def _epoch_of(self, step: int) -> tuple[int, int]:
        """(epoch, number of the step in it); a run's end is the start of an epoch after it."""
        periods, inside = divmod(step, self._steps_before[-1])
        epoch = bisect.bisect_right(self._steps_before, inside) - 1
        return periods * self._period + epoch, inside - self._steps_before[epoch]

    def examples_before(self, step: int) -> int:
        """Examples seen before step `step` (0-based) starts."""
        epoch, index = self._epoch_of(step)
        return min(self.mixture.examples_before(epoch) + index * self.batch_size, self.n_examples)

    def example_indices(self, step: int) -> np.ndarray:
        """Example indices of a step."""
        epoch, index = self._epoch_of(step)
        permutation = self._permutation  # read once: another thread may prepare the next epoch's first step
        if permutation is None or permutation[0] != epoch:
            permutation = (epoch, self.mixture.epoch_permutation(self.seed, epoch, self.shuffle))
            self._permutation = permutation
        left = self.n_examples - self.examples_before(step)
        start = index * self.batch_size
        return permutation[1][start : start + min(self.batch_size, left)]

    def saved(self, step: int) -> None:
        """What a checkpoint keeps beside the number of its next step: nothing, for that says it all."""

    def restore(self, saved: None) -> None:
        """Go on from a checkpoint."""

    def steps_with(self, wanted: np.ndarray) -> list[int]:
        """The first steps that together hold every wanted example (bool, by example index) which the run sees."""
        left, numbers = wanted.copy(), list[int]()
        # After the first epoch there are new examples only where a data set is seen in part.
        whole = all(weight % 1 == 0 for weight in self.mixture.weights)
        for epoch in range(1) if whole else itertools.count():
            first_step = self._first_step(epoch)
            if first_step >= self.n_steps or not left.any():
                break
            order = self.mixture.epoch_permutation(self.seed, epoch, self.shuffle)
            order = order[: self.n_examples - self.mixture.examples_before(epoch)]
            places = np.flatnonzero(left[order])
            first = np.unique(order[places], return_index=True)[1]  # a weight above 1 brings an example twice
            numbers += (first_step + np.unique(places[first] // self.batch_size)).tolist()
            left[order] = False
        return numbers

    def step(self, number: int) -> Step:
        """This rank's share of step `number`."""
        example_indices = self.example_indices(number)
        slots = make_micro_batches(
            self.mixture.units(example_indices), self.n_ranks, self.budget, self.min_micro_batches, self.share_prefix
        )
        batches = [self.make_batch(slot[self.rank]) for slot in slots]
        return Step(number, self._epoch_of(number)[0], len(example_indices), batches)

    def steps(self, start: int = 0, stop: int | None = None) -> Iterator[Step]:
        """Steps start..stop-1, each prepared in a background thread while the one before it runs."""
        stop = self.n_steps if stop is None else stop
        if start >= stop:
            return
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as worker:
            ahead = worker.submit(self.step, start)
            for number in range(start, stop):
                step = ahead.result()
                if number + 1 < stop:
                    ahead = worker.submit(self.step, number + 1)
                yield step


def make_micro_batches(
    units: list[PromptUnit], n_ranks: int, budget: int, min_micro_batches: int = 1, share_prefix: bool = True
) -> list[list[list[PromptUnit]]]:
    """Cut a step into micro-batches and balance each over the ranks.

    Units are sorted by cost, so that a micro-batch holds units of like length; each goes to the rank with the least
    work. Every rank gets the same number of micro-batches (some may be empty), so that collectives always match.

    Args:
        budget: tokens a micro-batch on one rank; a unit larger than that runs alone.
        min_micro_batches: gradient_accumulation_steps: at least this many, where there are units enough.
    Returns: units[micro_batch][rank].
    """
    ordered = sorted(units, key=lambda unit: (-unit.cost(share_prefix), unit.dataset, unit.group))
    left, most_units = len(ordered), len(ordered)
    slots: list[list[list[PromptUnit]]] = []
    loads: list[int] = []
    for unit in ordered:
        cost = unit.cost(share_prefix)
        rank = min(range(n_ranks), key=loads.__getitem__) if slots else 0
        full = not slots or sum(map(len, slots[-1])) >= most_units or (loads[rank] and loads[rank] + cost > budget)
        if full:
            # What is left must do for the micro-batches that are still due.
            most_units = -(-left // max(1, min_micro_batches - len(slots)))
            slots.append([[] for _ in range(n_ranks)])
            loads = [0] * n_ranks
            rank = 0
        slots[-1][rank].append(unit)
        left -= 1
        loads[rank] += cost
    return slots


def longest_unit(mixture: DatasetMixture) -> PromptUnit:
    """The prompt group with the longest row, for trying out how a model can be scored: what depends on length (an
    attention window, say) shows in it if it does in any row.
    """
    example = mixture.longest_example()
    index, local = mixture.locate(example)
    examples = mixture.datasets[index].examples
    group = np.flatnonzero(examples[:, 0] == examples[local, 0]) + mixture.offsets[index]
    unit = mixture.units(group)[0]
    if len(unit.responses) == 1 and mixture.offsets[-1] > 1:
        # SFT has one response a prompt; another prompt's answer does for a second branch.
        other = mixture.units(np.array([(example + 1) % mixture.offsets[-1]]))[0]
        unit = PromptUnit(
            unit.dataset, unit.group, unit.prompt, [unit.responses[0], other.responses[0]], [0, 1], [(0, 1)]
        )
    return unit
