"""Preference data: named sources, files and Hub data sets -> prompt groups (text); tokenization.py encodes them.

To add a data set of your own, write one function and register it, here or in a module named by data.plugins:

    @register_dataset("xyz", truncation="keep_end")
    def get_xyz(split):
        return {prompt: {"responses": ["good", "bad"], "pairs": [(0, 1)], "sft_target": "good"}}

`split` is 'train' or 'test'; a pair is (index of the chosen response, index of the rejected one). Train on it with
`datasets=[xyz]`. Data that already are in a file need no function: `datasets=[path/to/file.jsonl]`.

Sources are read as streams, twice: once for a 64-bit hash of every prompt, which shows what prompts repeat and which
are held out, and once for the rows themselves. So memory does not grow with the data, but for 8 bytes a row.
"""

import hashlib
import importlib
import importlib.util
import json
import re
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from data.files import find_split_files, fingerprint_files, looks_like_path, place, read_rows
from data.row_formats import (
    CANONICAL_COLUMNS,
    PromptGroup,
    checked_group,
    describe,
    detect_format,
    parse_hh,
    parse_se,
    parse_shp,
    text_of,
)
from data.workers import ordered_map, worker_count

SPLITS = ("train", "test")
HOLD_OUT_SE = 0.01  # the share of StackExchange that the DPO paper's reference implementation tests on


@dataclass(frozen=True)
class NamedSource:
    """A registered data set: a function of the split, or a parser for the rows of a Hub data set and its copies."""

    name: str
    truncation: str  # keep_start | keep_end: which end of a prompt that is too long stays
    function: Callable | None = None
    hub: str | None = None
    parser: Callable | None = None
    columns: tuple[str, ...] = ()


REGISTRY: dict[str, NamedSource] = {}


def register_dataset(name: str, truncation: str = "keep_end"):
    """Registers `function(split) -> {prompt: {"responses", "pairs", "sft_target"}}` under `name`."""
    if truncation not in ("keep_start", "keep_end"):
        raise ValueError(f"register_dataset({name!r}): truncation={truncation!r}; allowed are keep_start and keep_end")

    def register(function):
        known = REGISTRY.get(name)
        if known and _origin(known.function) != _origin(function):
            raise ValueError(f"register_dataset({name!r}): the name is taken; choose another")
        REGISTRY[name] = NamedSource(name, truncation, function=function)
        return function

    return register


def _origin(function):
    """Where a function was written: the same one imported twice is no conflict."""
    code = getattr(function, "__code__", None)
    return code and (code.co_filename, code.co_name)


REGISTRY["hh"] = NamedSource("hh", "keep_end", hub="Anthropic/hh-rlhf", parser=parse_hh, columns=("chosen", "rejected"))
REGISTRY["shp"] = NamedSource(
    "shp",
    "keep_start",
    hub="stanfordnlp/SHP",
    parser=parse_shp,
    columns=("history", "human_ref_A", "human_ref_B", "labels", "score_A", "score_B"),
)
REGISTRY["se"] = NamedSource(
    "se", "keep_start", hub="HuggingFaceH4/stack-exchange-preferences", parser=parse_se, columns=("question", "answers")
)


# ---- configuration -----------------------------------------------------------------------------------------------


def setting(config, path: str, default=None):
    """The value at a dotted path of a config (mapping, DictConfig or object); the default where absent or null."""
    for key in path.split("."):
        if config is None:
            return default
        config = config.get(key) if hasattr(config, "get") else getattr(config, key, None)
    return default if config is None else config


def _plain(mapping) -> dict:
    """A config node as nested plain dicts."""
    return {str(key): _plain(value) if hasattr(value, "items") else value for key, value in (mapping or {}).items()}


def cache_folder(config) -> Path:
    """Where token caches live: data.cache_dir, else `tokens` in the run's local directory."""
    from utils import get_local_dir

    explicit = setting(config, "data.cache_dir")
    return Path(explicit or str(Path(get_local_dir(setting(config, "local_dirs", [".cache"]))) / "tokens")).expanduser()


def load_plugins(config):
    """Imports the modules (names or .py files) of data.plugins, whose register_dataset calls then take effect."""
    for plugin in setting(config, "data.plugins", ()):
        try:
            if str(plugin).endswith(".py"):
                file = Path(plugin).expanduser().resolve()
                name = "data_plugin_" + hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()
                if name in sys.modules:
                    continue
                if not file.is_file():
                    raise ValueError(f"data.plugins: no such file: {plugin}")
                spec = importlib.util.spec_from_file_location(name, file)
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


def _columns_for(name: str, config) -> dict[str, str]:
    """canonical -> actual column names of one data set: data.columns, flat or under the data set's name."""
    columns = _plain(setting(config, "data.columns", {}))
    flat = {key: value for key, value in columns.items() if not isinstance(value, dict)}
    flat.update(columns.get(name) if isinstance(columns.get(name), dict) else {})
    for canonical, actual in flat.items():
        if canonical not in CANONICAL_COLUMNS or not isinstance(actual, str):
            raise ValueError(
                f"data.columns.{canonical}={actual}: a column is named canonical: actual, where "
                f"canonical is one of {', '.join(CANONICAL_COLUMNS)}"
            )
    return flat


def check_dataset_names(names, config):
    """Raises ValueError for a data set that cannot be found, without reading any data or importing torch."""
    load_plugins(config)
    if isinstance(names, str):
        raise ValueError(f"datasets={names}: give a list, datasets=[{names}]")
    if not names:
        raise ValueError("datasets=[]: name at least one data set")
    names = [str(name) for name in names]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"datasets: {name} is named twice; use data.weights to give it more weight")
        kind, target, named = _resolve(name, config)
        if kind == "path":
            for split in SPLITS:
                if not (split == "test" and target.is_file()):
                    find_split_files(target, split)
        _columns_for(name, config)
    paths = _plain(setting(config, "data.paths", {}))
    for name, value in _plain(setting(config, "data.columns", {})).items():
        if isinstance(value, dict) and name not in names:
            raise ValueError(f"data.columns.{name}: no such data set among datasets={names}")
    for name, value in paths.items():
        if not isinstance(value, str):
            raise ValueError(f"data.paths.{name}={value}: must be a file or a folder")


def _resolve(name: str, config) -> tuple[str, object, NamedSource | None]:
    """('function' | 'path' | 'hub', function or Path or Hub name, the registered source if any)."""
    named = REGISTRY.get(name)
    path = _plain(setting(config, "data.paths", {})).get(name)
    if path is not None:
        if named and named.function:
            raise ValueError(f"data.paths.{name}: the data set {name} is a registered function, which reads no path")
        path = Path(str(path)).expanduser()
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

    known = sorted(set(REGISTRY) | set(_plain(setting(config, "data.paths", {}))))
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


# ---- sources -----------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """An opened data set: `groups()` streams its prompt groups and fills `counts`; nothing is read before."""

    name: str
    split: str
    truncation: str
    fingerprint: str  # of everything in the source that the groups depend on
    reader: Callable[[], Iterator[PromptGroup]]
    counts: Counter = field(default_factory=Counter)

    def groups(self) -> Iterator[PromptGroup]:
        """Yields each distinct prompt once, with all its responses and pairs. Raises ValueError for a malformed row."""
        self.counts.clear()
        return self.reader(self.counts)


def open_source(name: str, split: str, config, sft: bool = False) -> Source:
    """Finds a data set and fingerprints it. Raises ValueError when it cannot be found."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}; allowed are {SPLITS}")
    load_plugins(config)
    kind, target, named = _resolve(name, config)
    truncation = setting(config, "data.truncation") or (named.truncation if named else "keep_end")
    renames = _columns_for(name, config)
    if kind == "function":
        if renames and name in _plain(setting(config, "data.columns", {})):
            raise ValueError(f"data.columns.{name}: the data set {name} is a registered function, which has no columns")
        return _function_source(name, split, truncation, target)
    fraction = float(setting(config, "data.test_fraction", 0.05))
    if kind == "path":
        files, separate = find_split_files(target, split)
        content = fingerprint_files(files, cache_folder(config) / "files")
        rows = _FileRows(files)
    else:
        rows, separate = _hub_rows(name, target, split, sft)
        content = rows.fingerprint
    hold_out = None if separate else HOLD_OUT_SE if named and named.name == "se" else fraction
    parser, columns = (named.parser, named.columns) if named else (None, ())
    workers = worker_count(setting(config, "data.num_workers"))
    by_row = hold_out is not None and parser is parse_se
    stream = _RowStream(name, split, rows, parser, columns, renames, hold_out, sft, by_row, workers)
    identity = [content, named.name if named else "", renames, hold_out, split if hold_out is not None else "", sft]
    fingerprint = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()
    return Source(name, split, truncation, fingerprint, stream.groups)


def load_groups(name: str, split: str, config, sft: bool = False):
    """(iterator of PromptGroup, counts that fill while it is read, fingerprint of the source's content)."""
    source = open_source(name, split, config, sft)
    return source.groups(), source.counts, source.fingerprint


def get_dataset(name: str, split: str, config=None, sft: bool = False) -> dict:
    """The whole split in the shape {prompt: {"responses", "pairs", "sft_target"}}, for looking at it."""
    groups, _, _ = load_groups(name, split, config or {}, sft)
    return {
        group.key(): {"responses": group.responses, "pairs": group.pairs, "sft_target": group.sft_target}
        for group in groups
    }


def _function_source(name, split, truncation, function) -> Source:
    try:
        data = function(split)
    except ValueError as error:
        raise ValueError(f"data set {name}: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"data set {name}: its function must return a dict of prompts, not {describe(data)}")
    digest = hashlib.blake2b(digest_size=16)
    groups = []
    counts = Counter()
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

    return Source(name, split, truncation, digest.hexdigest(), reader)


class _FileRows:
    """Rows of local files, in order, with the place of each."""

    def __init__(self, files):
        self.files = files

    def __iter__(self):
        return self.read(None)

    def read(self, wanted):
        for file in self.files:
            for number, row in read_rows(file, wanted):
                yield file, number, row

    def describe(self, where, number) -> str:
        return place(where, number)

    def label(self) -> str:
        return ", ".join(str(file) for file in self.files[:3]) + (", ..." if len(self.files) > 3 else "")


class _HubRows:
    """Rows of a data set that the `datasets` library loaded."""

    def __init__(self, dataset, name):
        self.dataset, self.name = dataset, name
        self.fingerprint = f"hub {name} {dataset._fingerprint}"

    def read(self, wanted):
        dataset = self.dataset
        names = [column for column in dataset.column_names if wanted is None or column in wanted]
        for number, row in enumerate(dataset.select_columns(names) if names else dataset, 1):
            yield self.name, number, row

    def describe(self, where, number) -> str:
        return f"{where}, row {number}"

    def label(self) -> str:
        return self.name


def _hub_rows(name: str, target: str, split: str, sft: bool) -> tuple[_HubRows, bool]:
    """The rows of a Hub data set's split, and whether that split is a split of its own."""
    repository, _, configuration = target.partition(":")
    try:
        import datasets

        loaded = datasets.load_dataset(repository, configuration or None)
    except Exception as error:  # the library raises from many families; all of them mean: no data
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ValueError(
            f"data set {name}: cannot load {target} from the Hugging Face Hub ({type(error).__name__}: "
            f"{first}). Without a network give a local copy: data.paths.{_key(name)}=FILE_OR_FOLDER "
            f"(json, jsonl, csv, parquet or a saved `datasets` folder). If the data set has "
            f"configurations, name one: {repository}:NAME"
        ) from error
    if not hasattr(loaded, "keys"):
        return _HubRows(loaded, name), False
    test = next(
        (
            found
            for word in ("test", "validation", "valid", "val", "dev", "eval")
            if (found := _hub_split(loaded, word, sft))
        ),
        None,
    )
    train = _hub_split(loaded, "train", sft)
    if train is None and test is None:
        if len(loaded) == 1:
            return _HubRows(next(iter(loaded.values())), name), False
        raise ValueError(f"data set {name}: has splits {sorted(loaded)}, none of which is train or test")
    chosen = train if split == "train" else test or train
    if chosen is None:
        raise ValueError(f"data set {name}: has splits {sorted(loaded)}, none of which is train")
    return _HubRows(loaded[chosen], f"{name} ({chosen})"), test is not None


def _hub_split(loaded, word: str, sft: bool) -> str | None:
    """The split called `word`, or `word` with the ending that some data sets give to the kind of loss."""
    for candidate in (word, f"{word}_sft" if sft else f"{word}_prefs"):
        if candidate in loaded:
            return candidate
    return None


def _key(name: str) -> str:
    """A name as one would write it as a config key."""
    return name if re.fullmatch(r"\w+", name) else f"'{name}'"


class _RowStream:
    """Rows -> groups: parses, holds out the test part, and merges rows of the same prompt."""

    def __init__(self, name, split, rows, parser, columns, renames, hold_out, sft, shuffled_split, workers):
        self.name, self.split, self.rows, self.sft = name, split, rows, sft
        self.parser, self.columns, self.renames = parser, columns, renames
        self.hold_out, self.shuffled_split, self.workers = hold_out, shuffled_split, workers

    def _detect(self):
        """Settles the parser and the columns to read, from the first row."""
        first = next(iter(self.rows.read(None)), None)
        if first is None:
            raise ValueError(f"data set {self.name}: {self.rows.label()} is empty: no row to train on")
        names = set(first[2])
        missing = [actual for actual in self.renames.values() if actual not in names]
        if missing:
            raise ValueError(
                f"data set {self.name}: data.columns names {missing[0]!r}, but the columns of "
                f"{self.rows.label()} are {sorted(map(str, names))}"
            )
        if self.parser is None:
            canonical = (names - set(self.renames.values())) | set(self.renames)
            try:
                self.parser, self.columns = detect_format(canonical, self.sft)
            except ValueError as error:
                raise ValueError(f"data set {self.name} ({self.rows.label()}): {error}") from error
        elif not names & {self.renames.get(each, each) for each in self.columns}:
            raise ValueError(
                f"data set {self.name}: {self.rows.label()} has columns {sorted(map(str, names))}, but "
                f"{self.name} has {', '.join(self.columns)}; name yours with data.columns"
            )

    def _rows(self):
        """Yields (file or data set, number, row under its canonical column names)."""
        for where, number, row in self.rows.read({self.renames.get(each, each) for each in self.columns}):
            yield where, number, self._renamed(where, number, row) if self.renames else row

    def _renamed(self, where, number, row) -> dict:
        taken = set(self.renames.values())
        renamed = {key: value for key, value in row.items() if key not in taken and key not in self.renames}
        for canonical, actual in self.renames.items():
            if actual not in row:
                raise ValueError(
                    f"{self.rows.describe(where, number)}: column '{actual}' (data.columns.{canonical}) "
                    f"is missing; the row has {sorted(map(str, row))}"
                )
            renamed[canonical] = row[actual]
        return renamed

    def _parsed(self):
        """Yields every row as PromptGroup, or the reason why it is dropped."""
        rows = self._rows()
        if self.parser is parse_se:  # HTML costs a hundred times what other rows do, so workers share it
            chunks = iter(lambda: list(islice(rows, 64)), [])
            parsed = ordered_map(_parse_rows, chunks, self.workers, (self.parser, self.sft))
        else:
            parsed = (_parse_rows((self.parser, self.sft), [row]) for row in rows)
        for chunk in parsed:
            for where, number, group in chunk:
                if isinstance(group, ValueError):
                    raise ValueError(f"{self.rows.describe(where, number)}: {group}") from group
                yield group

    def _keys(self):
        """Yields a 64-bit number a row, equal for rows of the same prompt, 0 for rows that are certainly dropped."""
        if self.parser is parse_se:  # the question's source says as much as its text, which is costly to make
            for _, _, row in self._rows():
                yield _hash(str(row.get("question")))
        else:
            for group in self._parsed():
                yield 0 if isinstance(group, str) else _hash(group.key())

    def groups(self, counts: Counter) -> Iterator[PromptGroup]:
        self._detect()
        keys = array("Q", self._keys())
        belongs = self._membership(keys)
        waiting = _repeated(key for index, key in enumerate(keys) if belongs(index, key))
        merged: dict[int, dict[str, PromptGroup]] = defaultdict(dict)
        seen = 0
        for index, group in enumerate(self._parsed()):
            seen += 1
            if seen > len(keys):
                break
            key = keys[index]
            if not belongs(index, key):
                continue
            counts["rows"] += 1
            same = merged[key] if key in waiting else {}  # by text below the number: a collision must not merge prompts
            if isinstance(group, str):
                counts[group] += 1
            else:
                counts.update(group.dropped)
                known = same.get(group.key()) if same else None
                if known is None:
                    same[group.key()] = group
                else:
                    known.merge(group)
                    counts["merged_rows"] += 1
            if key in waiting:
                waiting[key] -= 1
                if waiting[key]:
                    continue
                del waiting[key], merged[key]
            counts["groups"] += len(same)
            yield from same.values()
        if seen != len(keys):
            raise ValueError(f"data set {self.name}: {self.rows.label()} changed while it was read")
        assert not merged, "every row of a repeated prompt was seen"
        if not counts["rows"] and self.split == "train":
            raise ValueError(
                f"data set {self.name}: no row is left to train on ({len(keys)} rows, held-out share "
                f"{self.hold_out}); give more data, a test file, or a smaller data.test_fraction"
            )

    def _membership(self, keys) -> Callable[[int, int], bool]:
        """Which rows are in this split, as a function of (row index, prompt hash)."""
        if self.hold_out is None:
            return lambda index, number: True
        wants_test = self.split == "test"
        if self.shuffled_split:
            # StackExchange has no test split; the reference implementation takes the first 1% of a shuffle.
            import numpy as np

            order = np.random.default_rng(42).permutation(len(keys))
            test = set(order[: max(int(len(keys) * self.hold_out), 1)].tolist())
            return lambda index, number: (index in test) == wants_test
        lowest, highest = min(filter(None, keys), default=0), max(keys, default=0)
        limit = int(self.hold_out * 2**64)
        if lowest == highest:
            limit = 0  # a single prompt is for training
        elif self.hold_out > 0:
            limit = min(max(limit, lowest + 1), highest)  # of two prompts, each split gets one
        return lambda index, number: (0 < number < limit) == wants_test


def _parse_rows(how, rows) -> list:
    """[(where, number, PromptGroup | reason | ValueError)] of rows [(where, number, row)]; runs in workers too."""
    parser, sft = how
    done = []
    for where, number, row in rows:
        try:
            group = parser(row, sft)
            if isinstance(group, PromptGroup):
                group.row = number
        except ValueError as error:
            group = ValueError(str(error))
        done.append((where, number, group))
    return done


def _hash(text: str) -> int:
    """A stable 64-bit hash above 0."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "big") or 1


def _repeated(keys) -> dict[int, int]:
    """key -> number of rows, for the keys above 0 that occur more than once."""
    import numpy as np

    numbers, occurrences = np.unique(np.frombuffer(array("Q", keys), np.uint64), return_counts=True)
    many = (occurrences > 1) & (numbers > 0)
    return dict(zip(numbers[many].tolist(), occurrences[many].tolist()))
