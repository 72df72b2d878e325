"""Opening a data set by its name: a registered function, a file or folder, or a Hub data set -> prompt groups (text).

tokenization.py encodes the groups.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import private_apis
from atomic_files import checksum, hasher
from data.dataset_names import key_of
from data.examples import rows_of
from data.files import column_names, describe, fingerprint_files, looks_like_path, read_rows, row_location
from data.format_detection import CANONICAL_COLUMNS, Reading
from data.options import DataOptions
from data.ranked_rows import PairRule
from data.row_formats import PromptGroup, checked_group, parse_se
from data.row_stream import RowStream
from data.row_values import text_of
from data.splits import SPLITS, find_hub_split, find_split_files
from data.workers import worker_count
from preference_datasets import HOLD_OUT_SE, REGISTRY, NamedSource
from utils import get_local_dir

# ---- configuration ---------------------------------------------------------------------------------------------------


def cache_folder(config: DataOptions) -> Path:
    """Where token caches live: data.cache_dir, else `tokens` in the run's local directory."""
    return Path(config.data.cache_dir or Path(get_local_dir(config.local_dirs)) / "tokens").expanduser()


def load_plugins(plugins: Sequence[str]) -> None:
    """Imports the modules (names or .py files) of data.plugins, whose register_dataset calls then take effect."""
    for plugin in plugins:
        try:
            if str(plugin).endswith(".py"):
                file = Path(plugin).expanduser().resolve()
                name = "data_plugin_" + hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()
                if name in sys.modules:
                    continue
                if not file.is_file():
                    raise ValueError(f"data.plugins: no such file: {plugin}")
                spec = importlib.util.spec_from_file_location(name, file)
                assert spec is not None and spec.loader is not None, file
                module = sys.modules[name] = importlib.util.module_from_spec(spec)
                try:
                    spec.loader.exec_module(module)
                except BaseException:
                    del sys.modules[name]
                    raise
            else:
                importlib.import_module(str(plugin))
        except ImportError as error:
            raise ValueError(
                f"data.plugins: cannot import {plugin} ({error}); give a .py file, or a module that Python finds"
            ) from error


def _columns_for(name: str, config: DataOptions) -> dict[str, str]:
    """canonical -> actual column names of one data set: data.columns, flat or under the data set's name."""
    columns = config.data.columns
    flat = {key: value for key, value in columns.items() if not isinstance(value, dict)}
    own = columns.get(name)
    flat.update(own if isinstance(own, dict) else {})
    for canonical, actual in flat.items():
        if canonical not in CANONICAL_COLUMNS or not isinstance(actual, str):
            raise ValueError(
                f"data.columns.{canonical}={actual}: a column is named canonical: actual, where "
                f"canonical is one of {', '.join(CANONICAL_COLUMNS)}"
            )
    return flat


def check_dataset_names(names: Sequence[str], config: DataOptions) -> None:
    """Raises ValueError for a data set that cannot be found, without reading any data or importing torch."""
    load_plugins(config.data.plugins)
    if isinstance(names, str):
        raise ValueError(f"datasets={names}: give a list, datasets=[{names}]")
    if not names:
        raise ValueError("datasets=[]: name at least one data set")
    names = [str(name) for name in names]
    readers: dict[str, str] = {}
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"datasets: {name} is named twice; use data.weights to give it more weight")
        kind, target, named = _resolve(name, config)
        if kind == "path":
            for split in SPLITS:
                if not (split == "test" and target.is_file()):
                    for file in find_split_files(target, split).files:
                        other = readers.setdefault(os.path.realpath(file), name)
                        if other != name:
                            raise ValueError(f"datasets: {other} and {name} both read {file}; leave one of them out")
        _columns_for(name, config)
    for name, value in config.data.columns.items():
        if isinstance(value, dict) and name not in names:
            raise ValueError(f"data.columns.{name}: no such data set among datasets={names}")
    for name, value in config.data.paths.items():
        if not isinstance(value, str):
            raise ValueError(f"data.paths.{name}={value}: must be a file or a folder")


# ---- names -----------------------------------------------------------------------------------------------------------


def _resolve(name: str, config: DataOptions) -> tuple[str, Any, NamedSource | None]:
    """('function' | 'path' | 'hub', function or Path or Hub name, the registered source if any)."""
    named = REGISTRY.get(name)
    given = config.data.paths.get(name)
    if given is not None:
        if named and named.function:
            raise ValueError(f"data.paths.{name}: the data set {name} is a registered function, which reads no path")
        path = Path(str(given)).expanduser()
        if not path.exists():
            raise ValueError(f"data.paths.{name}={path}: no such file or folder")
        return "path", path, named
    if named:
        return ("function", named.function, named) if named.function else ("hub", named.hub, named)
    if _exists(name):
        return "path", Path(name).expanduser(), None
    if looks_like_path(name):
        raise ValueError(f"datasets: {name}: no such file or folder")
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w. -]+)?", name):
        return "hub", name, None
    from difflib import get_close_matches

    known = sorted(set(REGISTRY) | set(config.data.paths))
    near = get_close_matches(name, known, 1, 0.5)
    raise ValueError(
        f"datasets: unknown data set {name!r}."
        + (f" Did you mean {near[0]!r}?" if near else "")
        + f" Registered are {', '.join(known)}; or give the path of a local file or folder, a Hub name "
        f"written owner/name or owner/name:config, or data.paths.{name}=PATH"
    )


def _exists(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError):  # too long for a path, or the home of an unknown user
        return False


# ---- opening ---------------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """An opened data set: `groups()` streams its prompt groups and fills `counts`; nothing is read before."""

    name: str
    split: str
    truncation: str
    fingerprint: str  # of everything in the source that the groups depend on
    reader: Callable[[Counter], Iterator[PromptGroup]]  # fills the counter that it is given
    counts: Counter = field(default_factory=Counter)
    notices: list[str] = field(default_factory=list)  # what the user should see once; complete after `groups`
    own_test_split: str = ""  # why data.test_fraction has no effect on it; "" where it has
    findings: Callable[[Counter], list[str]] = lambda counts: []  # notices of the rows read so far, where they stream

    def groups(self) -> Iterator[PromptGroup]:
        """Yields each distinct prompt once, with all its responses and pairs.

        Raises ValueError for a malformed row, and at the end if the files are no longer those of the fingerprint.
        """
        self.counts.clear()
        return self.reader(self.counts)


def open_source(name: str, split: str, config: DataOptions, kind: str = "pairs") -> Source:
    """Finds a data set and fingerprints it. Raises ValueError when it cannot be found.

    kind: of the examples that the loss takes (examples.py).
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}; allowed are {SPLITS}")
    load_plugins(config.data.plugins)
    place, target, named = _resolve(name, config)
    responses_only = rows_of(kind) == "responses"
    truncation = config.data.truncation or (named.truncation if named else "keep_end")
    renames = _columns_for(name, config)
    if place == "function":
        if renames and name in config.data.columns:
            raise ValueError(f"data.columns.{name}: the data set {name} is a registered function, which has no columns")
        return _function_source(name, split, truncation, target)
    fraction = float(config.data.test_fraction)
    if place == "path":
        found = find_split_files(target, split, responses_only)
        files, separate, notice = found.files, found.alone, found.notice
        content = fingerprint_files(files, cache_folder(config) / "files")
        rows: _FileRows | _HubRows = _FileRows(files)
    else:
        files = []
        hub_rows, separate, notice = _hub_rows(name, target, split, responses_only)
        rows, content = hub_rows, hub_rows.fingerprint
    test_share = None if separate else HOLD_OUT_SE if named and named.name == "se" else fraction
    parser, columns = (named.parser, named.columns) if named else (None, ())
    workers = worker_count(config.data.num_workers)
    by_row = test_share is not None and parser is parse_se
    reading = _reading(config, named, kind)
    stream = RowStream(name, split, rows, parser, columns, renames, test_share, by_row, workers, reading)
    own_test_split = "it has a test split" if separate else "" if test_share == fraction else "its test rows are fixed"
    identity = [
        content,
        named.name if named else "",
        renames,
        test_share,
        split if test_share is not None else "",
        dataclasses.asdict(reading),
    ]
    fingerprint = checksum(json.dumps(identity, sort_keys=True).encode())
    if notice:
        stream.notices.append(notice)

    def reader(counts: Counter) -> Iterator[PromptGroup]:
        yield from stream.groups(counts)
        # Rows of a file that was replaced while they were read must not be kept under the old content's fingerprint.
        if files and fingerprint_files(files, None) != content:
            raise ValueError(f"data set {name}: {rows.label()} changed while it was read; start again")

    return Source(name, split, truncation, fingerprint, reader, Counter(), stream.notices, own_test_split)


def _reading(config: DataOptions, named: NamedSource | None, kind: str) -> Reading:
    rows_for = rows_of(kind)
    return Reading(
        rows_for,
        PairRule(config.data.pairs, float(config.data.min_score_gap)),
        None if named else config.data.score,
        config.data.on_bad_row == "skip",
        rows_for == "responses" and config.data.train_on == "all",
    )


def open_stream(name: str, config: DataOptions, kind: str) -> tuple[Source, bool]:
    """The training rows of a data set to be read as they come, without reading any of them before; and whether it has a
    test split of its own.

    Its `groups()` merges only rows of one prompt that follow each other. Its fingerprint is of names and sizes.
    Raises ValueError when it cannot be found, or is made by a function.
    """
    load_plugins(config.data.plugins)
    place, target, named = _resolve(name, config)
    if place == "function":
        raise ValueError(f"data.streaming=true: the data set {name} is made by a function, which returns all of it")
    responses_only = rows_of(kind) == "responses"
    if place == "path":
        found = find_split_files(target, "train", responses_only)
        rows: _FileRows | _HubRows | _HubStream = _FileRows(found.files)
        separate, content = found.alone, json.dumps([[file.name, file.stat().st_size] for file in found.files])
    else:
        rows, separate = _hub_stream(name, target, responses_only)
        content = f"hub {target}"
    parser, columns = (named.parser, named.columns) if named else (None, ())
    workers, reading = worker_count(config.data.num_workers), _reading(config, named, kind)
    stream = RowStream(name, "train", rows, parser, columns, _columns_for(name, config), None, False, workers, reading)
    identity = [content, named.name if named else "", dataclasses.asdict(reading)]
    fingerprint = checksum(json.dumps(identity, sort_keys=True).encode())
    truncation = config.data.truncation or (named.truncation if named else "keep_end")
    reader = stream.groups_as_they_come
    source = Source(name, "train", truncation, fingerprint, reader, notices=stream.notices, findings=stream.findings)
    return source, separate


def get_dataset(name: str, split: str, config: DataOptions, kind: str = "pairs") -> dict:
    """The whole split in the shape {prompt: {"responses", "pairs", "sft_target"}}, for looking at it."""
    return {
        group.key(): {"responses": group.responses, "pairs": group.pairs, "sft_target": group.sft_target}
        for group in open_source(name, split, config, kind).groups()
    }


def _function_source(name, split, truncation, function) -> Source:
    try:
        data = function(split)
    except ValueError as error:
        raise ValueError(f"data set {name}: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"data set {name}: its function must return a dict of prompts, not {describe(data)}")
    digest = hasher()
    groups = []
    counts: Counter = Counter()
    for number, (prompt, entry) in enumerate(data.items(), 1):
        counts["rows"] += 1
        where = f"data set {name}, prompt {number}"
        try:
            if not hasattr(entry, "get") or not {"responses", "pairs"} <= set(entry):
                raise ValueError("must be a dict with responses, pairs and sft_target")
            group = checked_group(
                text_of(prompt, "the prompt"), entry["responses"], entry["pairs"], entry.get("sft_target")
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if isinstance(group, str):
            counts[group] += 1
            continue
        group.row = number
        counts.update(group.dropped)
        groups.append(group)
        digest.update(json.dumps([group.prompt, group.responses, group.pairs, group.sft_target]).encode())

    def reader(filled: Counter):
        filled.update(counts)
        filled["groups"] = len(groups)
        return iter(groups)

    return Source(name, split, truncation, digest.hexdigest(), reader, own_test_split="its function makes both splits")


class _FileRows:
    """Rows of local files, in order, with the place of each."""

    def __init__(self, files):
        self.files = files

    def column_names(self) -> list[str] | None:
        """The columns of the first file that has rows."""
        return next((names for file in self.files if (names := column_names(file)) is not None), None)

    def read(self, wanted):
        for file in self.files:
            for number, row in read_rows(file, wanted):
                yield file, number, row

    def describe(self, where, number) -> str:
        return row_location(where, number)

    def label(self) -> str:
        return ", ".join(str(file) for file in self.files[:3]) + (", ..." if len(self.files) > 3 else "")


class _HubRows:
    """Rows of a data set that the `datasets` library loaded."""

    def __init__(self, dataset, name):
        self.dataset, self.name = dataset, name
        self.fingerprint = f"hub {name} {private_apis.dataset_fingerprint(dataset)}"

    def column_names(self) -> list[str] | None:
        return self.dataset.column_names if len(self.dataset) else None

    def read(self, wanted):
        dataset = self.dataset
        names = [column for column in dataset.column_names if wanted is None or column in wanted]
        for number, row in enumerate(dataset.select_columns(names) if names else dataset, 1):
            yield self.name, number, row

    def describe(self, where, number) -> str:
        return f"{where}, row {number}"

    def label(self) -> str:
        return self.name


class _HubStream:
    """Rows of a data set that the `datasets` library reads as they come."""

    def __init__(self, dataset, name):
        self.dataset, self.name = dataset, name

    def column_names(self) -> list[str] | None:
        first = next(iter(self.dataset), None)
        return None if first is None else list(first)

    def read(self, wanted):
        for number, row in enumerate(self.dataset, 1):
            yield self.name, number, {key: value for key, value in row.items() if wanted is None or key in wanted}

    def describe(self, where, number) -> str:
        return f"{where}, row {number}"

    def label(self) -> str:
        return self.name


def _hub_stream(name: str, target: str, responses_only: bool) -> tuple[_HubStream, bool]:
    """The training rows of a Hub data set, and whether it has a test split."""
    loaded = _load_from_hub(name, target, streaming=True)
    if not hasattr(loaded, "keys"):
        return _HubStream(loaded, name), False
    try:
        found, separate = find_hub_split(loaded, "train", responses_only)
    except ValueError as error:
        raise ValueError(f"data set {name}: {error}") from None
    return _HubStream(loaded[found] if found else next(iter(loaded.values())), name), separate


def _hub_rows(name: str, target: str, split: str, responses_only: bool) -> tuple[_HubRows, bool, str]:
    """The rows of a Hub data set's split, whether that split is a split of its own, and a notice of splits not read."""
    loaded = _load_from_hub(name, target)
    if not hasattr(loaded, "keys"):
        return _HubRows(loaded, name), False, ""
    try:
        found, separate = find_hub_split(loaded, split, responses_only)
        other, _ = find_hub_split(loaded, "train" if split == "test" else "test", responses_only)
    except ValueError as error:
        raise ValueError(f"data set {name}: {error}") from None
    if found is None:
        return _HubRows(next(iter(loaded.values())), name), separate, ""
    unread = sorted(set(loaded) - {found, other})
    notice = f"data set {name}: splits that are not read: {', '.join(unread)}" if unread else ""
    return _HubRows(loaded[found], f"{name} ({found})"), separate, notice


def _load_from_hub(name: str, target: str, **options):
    repository, _, configuration = target.partition(":")
    try:
        import datasets

        return datasets.load_dataset(repository, configuration or None, **options)
    except Exception as error:  # the library raises from many families; all of them mean: no data
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ValueError(
            f"data set {name}: cannot load {target} from the Hugging Face Hub ({type(error).__name__}: "
            f"{first}). Without a network give a local copy: {key_of('data.paths', name, [name], 'FILE_OR_FOLDER')} "
            f"(json, jsonl, csv, parquet or a saved `datasets` folder). If the data set has "
            f"configurations, name one: {repository}:NAME"
        ) from error
