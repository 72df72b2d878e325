"""Training data that are read while a run trains: `data.streaming=true`, for sources larger than the disk.

Prompt groups are read in the order of the sources and tokenised in the background, a window ahead. A window is the
examples of `data.shuffle_window` and more, in whole chunks of groups and not beyond the end of an epoch, and what is
left of the window before: less than a step. Its examples are shuffled. So an example moves within two windows at most,
where the token cache shuffles the whole epoch. After its last row a source begins anew.

All processes read and tokenise the same stream, so that they need no word between them to make the same steps. A
checkpoint keeps where its window starts and what was left over; a resumed run reads the rows before that once more, but
does not tokenise them.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from atomic_files import checksum
from data.dataset_names import short_names
from data.examples import rows_of
from data.options import DataOptions, mixture_weights
from data.sampler import BatchSampler, DatasetMixture, Step
from data.sources import Source, open_stream
from data.text_encoding import TextEncoder
from data.token_arrays import TokenizedDataset
from data.tokenization import CHUNK, limits_of, tokenized_chunks
from data.truncation import TokenGroup


@dataclass
class Window:
    """The examples of a window, the place of the next one, and what was found in the data up to here; `ends`: an epoch
    of a source does, so that its counts are whole."""

    mixture: DatasetMixture
    following: Place
    found: list[tuple[str, dict[str, int], list[str]]]
    ends: bool


@dataclass
class Place:
    """Where a window starts.

    Attributes:
        window: its number; chunks: of each source that come before it, over all epochs; left: of each source, the
            groups that the window before has left over, as plain values.
    """

    window: int = 0
    chunks: list[int] = field(default_factory=list)
    left: list[list[dict[str, Any]]] = field(default_factory=list)


class TokenStream:
    """The tokenised groups of a run's training data, in an order that never changes.

    Raises:
        ValueError: a data set cannot be found or streamed.
    """

    def __init__(self, config: DataOptions, tokenizer, kind: str):
        self.config, self.kind = config, kind
        self.encoder = TextEncoder.of_options(tokenizer, config.data)
        opened = [open_stream(name, config, kind) for name in config.datasets]
        self.sources = [source for source, _ in opened]
        self.has_test_split = [separate for _, separate in opened]
        self.short_names = short_names(config.datasets, config.data.paths)
        self.weights = mixture_weights(config)
        # Of each source, what was read and what of it was tokenised in the present epoch.
        self.counts: list[tuple[Counter, Counter]] = [(Counter(), Counter()) for _ in self.sources]
        limits = dataclasses.asdict(limits_of(self.sources[0], config))
        parts = [[source.fingerprint for source in self.sources], self.encoder.digest(), rows_of(kind), limits]
        self.key = checksum(repr([*parts, self.weights, config.data.shuffle_window]).encode())
        self._running: list[tuple[int, Iterator[tuple[list[TokenGroup], bool]]]] = []

    def window(self, place: Place, stopped: Callable[[], bool]) -> tuple[list[list[TokenGroup]], list[int], bool]:
        """(the groups of each source that a window holds, chunks of each source before the next window, whether it ends
        with an epoch of a source).

        Raises:
            ValueError: a row cannot be read, or a source has no example.
        """
        chunks = list(place.chunks) or [0] * len(self.sources)
        groups = [[TokenGroup(**values) for values in left] for left in place.left] or [[] for _ in self.sources]
        found, wanted, ends = 0, self.config.data.shuffle_window, False
        while found < wanted and not ends and not stopped():
            # The source that is furthest behind what its weight asks for; the first one where several are.
            index = min(range(len(chunks)), key=lambda i: (chunks[i] / self.weights[i], i))
            chunk, ends = self._chunk(index, chunks[index])
            chunks[index] += 1
            groups[index] += chunk
            found += sum(n_examples(group) for group in chunk)
        return groups, chunks, ends

    def found(self) -> list[tuple[str, dict[str, int], list[str]]]:
        """Of each source: its name, the counts of the present epoch so far, and what the user should see once."""
        return [
            (source.name, dict(read + tokenised), [*source.notices, *source.findings(read)])
            for source, (read, tokenised) in zip(self.sources, self.counts, strict=True)
        ]

    def _chunk(self, index: int, number: int) -> tuple[list[TokenGroup], bool]:
        """Chunk `number` of a source, counted over all epochs, and whether it is the last of an epoch."""
        while len(self._running) <= index:
            self._running.append((0, iter(())))
        at, running = self._running[index]
        if at != number or number == 0:
            running = self._from(index, number)
        found = next(running)
        self._running[index] = number + 1, running
        return found

    def _from(self, index: int, number: int) -> Iterator[tuple[list[TokenGroup], bool]]:
        """Chunks from `number` on, epoch after epoch. Groups before it are read again, but not tokenised."""
        source, skip = self.sources[index], number
        while True:
            counts: Counter = Counter()
            self.counts[index] = source.counts, counts
            started = _Skipping(source, skip * CHUNK)
            limits = limits_of(source, self.config)
            any_example, last = False, None
            for chunk in tokenized_chunks(
                started.source(), self.encoder, limits, self.kind, counts, workers=self.config.data.num_workers
            ):
                any_example |= bool(chunk)
                if last is not None:
                    yield last, False
                last = chunk
            if last is not None:
                yield last, True
            read = math.ceil(started.seen / CHUNK)
            if read == 0 or (skip == 0 and not any_example):
                shown = ", ".join(f"{reason} {count}" for reason, count in (source.counts + counts).items() if count)
                raise ValueError(f"data set {source.name}: its rows hold no example to train on ({shown or 'no rows'})")
            # Beyond the end of the first epochs, what is left to skip is of later ones.
            skip = max(0, skip - read)


class _Skipping:
    """A source whose first groups are read and passed over; `seen` counts all that were read."""

    def __init__(self, source: Source, skip: int):
        self.whole, self.skip, self.seen = source, skip, 0

    def source(self) -> Source:
        return replace(self.whole, reader=self._groups)

    def _groups(self, counts: Counter):
        for group in self.whole.reader(counts):
            self.seen += 1
            if self.seen > self.skip:
                yield group


def n_examples(group: TokenGroup) -> int:
    return len(group.pairs) or len(group.responses)


class StreamSampler:
    """The steps of a streamed run, in the manner of BatchSampler. Every step but the run's last has `batch_size`
    examples, so that a step's number says how many came before it."""

    def __init__(self, stream: TokenStream, batch_size: int, n_examples: int, seed: int, shuffle: str):
        self.stream, self.batch_size, self.n_examples = stream, batch_size, n_examples
        self.seed, self.shuffle = seed, shuffle
        self.layout: dict[str, Any] = {}  # further arguments of BatchSampler, set before the first step
        # Called with what was found in the data of a source: its name, counts (None until they are whole) and notices.
        self.report: Callable[[str, dict[str, int] | None, list[str]], None] = lambda *_: None
        self.n_steps = -(-n_examples // batch_size)
        self.place, self.next_place = Place(), Place()
        self.first_step = 0  # of the present window
        self._inner: BatchSampler | None = None
        self._stopped = threading.Event()
        self._first = self._window(self.place)
        self.datasets: list[TokenizedDataset] = list(self.mixture.datasets)  # of the present window, for messages

    @property
    def mixture(self) -> DatasetMixture:
        """The examples of the present window, of the first one before the first step."""
        return self._inner.mixture if self._inner else self._first.mixture

    @property
    def budget(self) -> int:
        return self.layout["budget"]

    @budget.setter
    def budget(self, value: int) -> None:
        self.layout["budget"] = value
        if self._inner is not None:
            self._inner.budget = value

    def examples_before(self, step: int) -> int:
        return min(step * self.batch_size, self.n_examples)

    def step(self, number: int) -> Step:
        """A step of the present window once more, for a pass that ran out of memory."""
        assert self._inner is not None
        return replace(self._inner.step(number - self.first_step), number=number)

    def saved(self, step: int) -> dict[str, Any]:
        """What a checkpoint before step `step` keeps."""
        after = self.first_step + self._inner.n_steps if self._inner is not None else None
        if after is not None and step >= after:
            return dataclasses.asdict(self.next_place) | {"first_step": after}
        return dataclasses.asdict(self.place) | {"first_step": self.first_step}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Go on from a checkpoint."""
        if saved:
            content = dict(saved)
            self.first_step = content.pop("first_step")
            self.place = Place(**content)
            self._first = self._window(self.place)

    def steps(self, start: int = 0) -> Iterator[Step]:
        """Steps from `start` on, which lies in the first window or in the one that was restored."""
        with ThreadPoolExecutor(1, thread_name_prefix="stream") as worker:
            window = self._first
            try:
                while True:
                    mixture, self.next_place = window.mixture, window.following
                    self._report(window, window.ends)
                    left = self.n_examples - self.examples_before(self.first_step)
                    whole = mixture.epoch_size() // self.batch_size * self.batch_size
                    ahead = worker.submit(self._window, self.next_place) if left > whole else None
                    self._inner = BatchSampler(
                        mixture,
                        self.batch_size,
                        seed=self._seed(self.place.window),
                        shuffle=self.shuffle,
                        n_examples=min(left, whole),
                        **self.layout,
                    )
                    self.datasets[:] = mixture.datasets
                    for step in self._inner.steps(start - self.first_step):
                        yield replace(step, number=self.first_step + step.number)
                    start = self.first_step + self._inner.n_steps
                    if ahead is None:
                        return
                    self.first_step, self.place = start, self.next_place
                    window = ahead.result()
            finally:
                self._stopped.set()  # what is being tokenised ahead ends at its next chunk
                self._report(window, True)

    def _report(self, window: Window, whole: bool) -> None:
        for name, counts, notices in window.found:
            self.report(name, counts if whole else None, notices)

    def _seed(self, window: int) -> int:
        return int(np.random.SeedSequence([self.seed, window]).generate_state(1, np.uint32)[0])

    def _window(self, place: Place) -> Window:
        groups, chunks, ends = self.stream.window(place, self._stopped.is_set)
        mixture = DatasetMixture(self._datasets(groups))
        # A step takes more than a small window has.
        while not self._stopped.is_set() and mixture.epoch_size() < self.batch_size:
            more = Place(place.window, chunks, [[dataclasses.asdict(group) for group in of] for of in groups])
            groups, chunks, ends = self.stream.window(more, self._stopped.is_set)
            mixture = DatasetMixture(self._datasets(groups))
        order = mixture.epoch_permutation(self._seed(place.window), 0, self.shuffle)
        over = order[len(order) // self.batch_size * self.batch_size :]
        left: list[list[dict[str, Any]]] = [[] for _ in groups]
        for example in over.tolist():
            index, local = mixture.locate(example)
            number, first, second = mixture.datasets[index].examples[local].tolist()
            left[index].append(dataclasses.asdict(only_example(groups[index][number], first, second)))
        return Window(mixture, Place(place.window + 1, chunks, left), self.stream.found(), ends)

    def _datasets(self, groups: list[list[TokenGroup]]) -> list[TokenizedDataset]:
        datasets = []
        for source, short_name, of in zip(self.stream.sources, self.stream.short_names, groups, strict=True):
            dataset = TokenizedDataset.of_groups(source.name, "train", of, self.stream.key)
            dataset.short_name = short_name
            datasets.append(dataset.of_kind(self.stream.kind) if of else dataset)
        return datasets


def only_example(group: TokenGroup, first: int, second: int) -> TokenGroup:
    """A group with a single one of its examples; a whole group stays as it is."""
    if first < 0 and second < 0:
        return group
    used = [number for number in (first, second) if number >= 0]
    renumbered = {number: index for index, number in enumerate(used)} | {-1: -1}
    pairs = [] if not group.pairs else [(renumbered[first], renumbered[second])]
    weight = 1.0
    if group.pairs:
        weights = [w for pair, w in zip(group.pairs, group.weights) if set(used) <= set(pair)]
        weight = sum(weights) / len(weights) if weights else 1.0
    return TokenGroup(
        group.prompt,
        [group.responses[number] for number in used],
        pairs,
        [group.truncated[number] for number in used],
        group.row,
        [group.scores[number] for number in used],
        [weight],
        [group.unscored[number] for number in used] if group.unscored else [],
    )
