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
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import numpy as np

from atomic_files import checksum
from data import token_cache
from data.examples import rows_of
from data.options import DataOptions
from data.row_formats import PromptGroup
from data.sources import Source, cache_folder, open_source
from data.text_encoding import TextEncoder, tokenizer_threads
from data.token_arrays import ARRAYS, USUAL, TokenizedDataset, append_groups, close_segments
from data.token_cache import ArrayFile, CacheWriteError
from data.truncation import Limits, fit_group
from data.workers import ordered_map, worker_count

FORMAT = 7  # of the cache folder and of the rules above; raised whenever the same input gives other arrays
CHUNK = 256  # groups that are encoded in one call


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
    dataset = TokenizedDataset.of_folder(folder, name, split)
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
            append_groups(files, chunk)
        close_segments(files)
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
