"""Prompt groups (text) -> TokenizedDataset: token ids in memory-mapped arrays, made once and cached by content.

The rules (each has a test):
- prompt + response is encoded whole and split where the prompt ends. Where the tokenizer merges across that boundary,
  the prompt is the longest token prefix that the prompt alone and every prompt + response share.
- at most one BOS, where the tokenizer itself would add one; exactly one EOS at a response's end (in a conversation, the
  chat template's own end-of-turn token). Text that looks like a control token is text, unless
  data.allow_control_tokens lets it be one in texts that no template lays out.
- a group whose prompt + longest response exceeds max_length has its prompt cut to max_prompt_length (its end or its
  start stays; BOS and the assistant's header always do), then each response gets all the rest of max_length. A response
  that was cut has no EOS.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from array import array
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from atomic_files import checksum
from data import token_cache
from data.examples import examples_lacking, examples_of_kind, own_examples, preferences_of, rows_of
from data.options import DataOptions
from data.row_formats import PromptGroup
from data.sources import Source, cache_folder, open_source
from data.text_encoding import TextEncoder, tokenizer_threads
from data.token_cache import ArrayFile, CacheWriteError
from data.truncation import Limits, TokenGroup, fit_group
from data.workers import ordered_map, worker_count

FORMAT = 6  # of the cache folder and of the rules above; raised whenever the same input gives other arrays
CHUNK = 256  # groups that are encoded in one call
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

    def __init__(self, folder, name: str, split: str):
        self.folder, self.name, self.split = Path(folder), name, split
        self.short_name = name  # in metrics
        self.own_test_split = ""  # why data.test_fraction has no effect on it
        manifest = token_cache.read_manifest(self.folder)
        self.key: str = manifest["content"]
        self.counts: dict[str, int] = manifest["counts"]
        self.notices: list[str] = list(manifest["notices"])
        for array_name in ARRAYS:
            setattr(self, array_name, token_cache.open_array(self.folder, f"{array_name}.npy"))
        self._pairs, self._example_weights = self.examples, self.weights
        self.mismatched = False  # whether a response of another prompt is scored after each

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


def load_tokenized(
    name: str, split: str, tokenizer, config: DataOptions, kind: str = "pairs", progress=None
) -> TokenizedDataset:
    """The split of a data set as tokens: from the cache when nothing that matters changed, else made and cached.

    kind: of the examples, see examples.py; kinds that are made of the same rows share one cache.
    progress: Reporter.progress or anything alike, called as progress(total, description, unit) for a context manager
    with update(n).
    Raises ValueError for data that cannot be read or of which no example is left.
    """
    source = open_source(name, split, config, kind)
    limits = limits_of(source, config)
    encoder = TextEncoder.of_options(tokenizer, config.data)
    identity = [FORMAT, source.fingerprint, encoder.digest(), rows_of(kind), vars(limits)]
    key = checksum(json.dumps(identity, sort_keys=True).encode())
    parent = cache_folder(config)
    label = re.sub(r"[^\w.-]+", "_", name).strip("._")[-40:] or "data"
    final = parent / f"{label}-{split}-{key}"
    problem = token_cache.why_unusable(final, {"format": FORMAT, "key": key})
    if problem is None:
        dataset = _opened(final, name, split)
        dataset.own_test_split = source.own_test_split
        return dataset.of_kind(kind)
    notice = [f"the token cache {final} is not usable, so it is made again: {problem}"] if problem else []

    def make(folder: Path) -> Path:
        return _write(source, encoder, limits, kind, key, folder, final.name, progress, config.data.num_workers)

    try:
        folder = make(parent)
    except CacheWriteError as error:
        notice.append(
            f"the token cache {parent} cannot be written ({error.strerror or error}): tokens go into a "
            f"temporary folder for this run; data.cache_dir names another"
        )
        temporary = Path(tempfile.mkdtemp(prefix="tokens-"))
        try:
            folder = make(temporary)
        except CacheWriteError as second:
            raise ValueError(
                f"tokens can be written neither to {parent} ({error}) nor to {temporary} ({second}); free "
                f"some space, or name a folder with data.cache_dir"
            ) from second
        dataset = _opened(folder, name, split)
        # The arrays are mapped already; without its name the folder goes with this process, however that ends.
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        dataset = _opened(folder, name, split)
    dataset.notices = notice + dataset.notices
    dataset.own_test_split = source.own_test_split
    return dataset.of_kind(kind)


def limits_of(source: Source, config: DataOptions) -> Limits:
    """How much of its groups the settings let stay."""
    return Limits(config.max_length, config.max_prompt_length, source.truncation, config.data.on_overlong)


def _opened(folder: Path, name: str, split: str) -> TokenizedDataset:
    dataset = TokenizedDataset(folder, name, split)
    if not len(dataset):
        shown = ", ".join(f"{reason} {number}" for reason, number in dataset.counts.items() if number)
        message = f"data set {name}: no example is left in the {split} split ({shown or 'no rows'})"
        if split == "train":
            raise ValueError(message)
        dataset.notices.append(message)
    return dataset


def _write(source: Source, encoder, limits, kind, key, parent: Path, label, progress, workers) -> Path:
    """Tokenises a source into a new folder of `parent`; returns the published folder."""
    folder = token_cache.new_folder(parent, label)
    files: dict[str, ArrayFile] = {}
    try:
        for name, (dtype, row) in ARRAYS.items():
            files[name] = ArrayFile(folder / f"{name}.npy", dtype, row)
        counts: Counter = Counter()
        for chunk in tokenized_chunks(source, encoder, limits, kind, counts, progress, workers):
            _append(files, chunk)
        files["segment_starts"].append([files["tokens"].length])
        files["group_starts"].append([files["segment_starts"].length - 1])
        manifest_files = {f"{name}.npy": file.close() for name, file in files.items()}
        # What rates nothing is no part of the content: runs of versions that knew no ratings can be resumed.
        unsaid = [
            f"{name}.npy"
            for name, usual in USUAL.items()
            if np.array_equal(
                token_cache.open_array(folder, f"{name}.npy"), np.full(files[name].length, usual), equal_nan=True
            )
        ]
        if not files["unscored"].length:
            unsaid.append("unscored.npy")
        content = checksum(
            json.dumps(
                [
                    [name, entry["digest"], entry["shape"]]
                    for name, entry in sorted(manifest_files.items())
                    if name not in ("rows.npy", "truncated.npy", *unsaid)
                ]
            ).encode()
        )
        counts.update(source.counts)
        counts["pairs" if rows_of(kind) == "pairs" else "examples"] = files["examples"].length
        counts["tokens"] = files["tokens"].length
        token_cache.write_manifest(
            folder,
            {
                "format": FORMAT,
                "key": key,
                "content": content,
                "name": source.name,
                "split": source.split,
                "counts": {name: int(number) for name, number in sorted(counts.items()) if number},
                "notices": encoder.renderer.notices + source.notices,
                "files": manifest_files,
            },
        )
        return token_cache.publish(folder, parent / label)
    except BaseException:
        for file in files.values():
            file.abandon()
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _append(files: dict[str, ArrayFile], groups: list[TokenGroup]):
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


def tokenized_chunks(
    source: Source,
    encoder: TextEncoder,
    limits: Limits,
    kind: str,
    counts: Counter,
    progress=None,
    workers: int | None = None,
):
    """Yields lists of TokenGroup in the source's order; fills counts.

    One thread reads and renders the next chunk while the tokenizer, which needs no Python, works on the last one.
    """
    bar = progress(None, f"tokenising {source.name} {source.split}", "prompts") if progress else nullcontext()
    encoder.renderer.counts.clear()
    groups = source.groups()
    work: deque = deque()  # what each chunk of texts that is being encoded belongs to

    def rendered_chunks():
        while chunk := list(islice(groups, CHUNK)):
            kept = [rendered_group(group, encoder, kind, source, counts) for group in chunk]
            kept = [each for each in kept if each]
            work.append((len(chunk), kept))
            yield [rendered for _, rendered, _, _ in kept]

    with tokenizer_threads(workers), bar as shown:
        if encoder.is_fast:
            encoded = _one_ahead(encoder.encode_groups, rendered_chunks())
        else:
            encoded = ordered_map(TextEncoder.encode_groups, rendered_chunks(), worker_count(workers), encoder)
        for all_ids in encoded:
            read, kept = work.popleft()
            done = [
                fit_group(group, rendered, pairs, scores, ids, encoder, limits, counts)
                for (group, rendered, pairs, scores), ids in zip(kept, all_ids)
            ]
            yield [group for group in done if group is not None]
            if shown is not None:
                shown.update(read)
    counts.update(encoder.renderer.counts)


def _one_ahead(function, items):
    """Yields function(item) for every item, computed in a thread while the next item is made ready."""
    with ThreadPoolExecutor(1) as thread:
        running = None
        for item in items:
            following = thread.submit(function, item)
            if running:
                yield running.result()
            running = following
        if running:
            yield running.result()


def rendered_group(group: PromptGroup, encoder: TextEncoder, kind: str, source: Source, counts: Counter):
    """(group, its texts, pairs into them, their scores), or None for a group that this loss has no use for."""
    if kind == "responses":
        if not group.sft_targets:
            counts["dropped_no_sft_target"] += 1
            return None
        responses, pairs = group.sft_targets, []
    else:
        used = sorted({index for pair in group.pairs for index in pair if index >= 0})
        if not used:
            counts["dropped_no_pair"] += 1
            return None
        renumbered = {index: number for number, index in enumerate(used)} | {-1: -1}
        responses = [group.responses[index] for index in used]
        pairs = [(renumbered[chosen], renumbered[rejected]) for chosen, rejected in group.pairs]
    scores = [group.scores.get(text, math.nan) for text in responses]
    try:
        return group, encoder.renderer.render(group, responses), pairs, scores
    except ValueError as error:
        raise ValueError(f"data set {source.name}, row {group.row}: {error}") from error
