"""Which files, which splits of a Hub data set and which rows are for training, and which for testing."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data.files import check_regular, data_suffix, known_suffixes

SPLITS = ("train", "test")
# Words in a file's name (or its folder's) that name its split: words of one tuple mean the same, the best tuple first.
SPLIT_WORDS = {
    "train": (("train", "training"),),
    "test": (("test",), ("validation", "valid", "val"), ("dev",), ("eval", "evaluation")),
}
# What some data sets add to a split's name for the kind of loss that it is for, as in train_sft and train_prefs.
PREFERENCES, RESPONSES, OTHER_KINDS = "prefs", "sft", ("gen",)
METADATA_FILES = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "config.json",
    "package.json",
}


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass
class SplitFiles:
    """The files of a split, in a fixed order.

    alone: they hold that split alone; False: they hold everything, and the caller has to hold out the test part.
    notice: which files of the folder neither split reads, and why, and which are missing; '' where there are none.
    """

    files: list[Path]
    alone: bool
    notice: str = ""


def find_split_files(path, split: str, responses_only: bool | None = None) -> SplitFiles:
    """The files of `split` ('train' or 'test') under `path`.

    responses_only: whether the loss reads responses rather than preferences, where a folder has files for each; None:
    not known yet. Raises ValueError when there is nothing to read.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(
            f"{path}: no such file or folder. Give a data file ({known_suffixes()}) or a folder that holds train and "
            f"test files"
        )
    if not path.is_dir():
        check_regular(path)
        if not data_suffix(path):
            raise ValueError(f"{path}: not a data file by its name; known are {known_suffixes()}")
        return SplitFiles([path], False)
    files = _data_files(path)
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_word(file.relative_to(path)), []).append(file)
    others = _unknown_files(path)
    if not by_split:
        found = f" ({others[0].name} is none)" if others else ""
        raise ValueError(f"{path}: no data file in this folder{found}; known are {known_suffixes()}")
    train = _of_kind(path, _first_present(by_split, "train"), responses_only)
    test = _of_kind(path, _first_present(by_split, "test"), responses_only)
    for chosen in (train, test) if train or test else (by_split[""],):
        _refuse_copies(path, chosen)
    if not train and not test:
        return SplitFiles(by_split[""], False, _notice(path, by_split[""], others))
    if not train and (split == "train" or not test):
        raise ValueError(f"{path}: holds test files only ({test[0].name}, ...), none whose name says train")
    unread = sorted(set(files) - set(train) - set(test)) + others
    # Without a test file the training files are split further, so train must leave the same part out.
    return SplitFiles(train if split == "train" or not test else test, bool(test), _notice(path, train + test, unread))


def _first_present(by_split, split) -> list[Path]:
    for words in SPLIT_WORDS[split]:
        if found := [file for word in words for file in by_split.get(word, ())]:
            return sorted(found)
    return []


def _split_word(relative: Path) -> str:
    """The split word in a relative path; the file's own name counts before its folders'."""
    for part in reversed(relative.parts):
        words = re.split(r"[^a-z]+", part.lower())
        for groups in SPLIT_WORDS.values():
            for word in (word for group in groups for word in group):
                if word in words:
                    return word
    return ""


def _of_kind(folder: Path, files: list[Path], responses_only: bool | None) -> list[Path]:
    """Of a split's files those for the loss, if the data set has the same rows for several kinds of loss."""
    by_kind: dict[str, list[Path]] = {}
    for file in files:
        by_kind.setdefault(_loss_kind(file.relative_to(folder)), []).append(file)
    if len(by_kind) < 2 or responses_only is None:
        return files
    # Preferences have a response to learn, too.
    for kind in ("", RESPONSES, PREFERENCES) if responses_only else ("", PREFERENCES):
        if kind in by_kind:
            return by_kind[kind]
    found = ", ".join(sorted(by_kind))
    raise ValueError(f"{folder}: has files of the kinds {found}, and none with preferences ({PREFERENCES})")


def _loss_kind(relative: Path) -> str:
    """The kind of loss that a file is for, by the word after its split's: prefs of train_prefs-00000-of-00001."""
    for part in reversed(relative.parts):
        words = [word for word in re.split(r"[^a-z]+", part.lower()) if word]
        for word, following in zip(words, words[1:]):
            if following in (PREFERENCES, RESPONSES, *OTHER_KINDS) and _split_word(Path(word)):
                return following
    return ""


def _refuse_copies(folder: Path, files: list[Path]) -> None:
    """Raises ValueError for train.jsonl beside train.jsonl.gz: the rows of both would be trained on twice."""
    seen: dict[str, Path] = {}
    for file in files:
        other = seen.setdefault(str(file)[: -len(data_suffix(file))], file)
        if other is not file:
            raise ValueError(
                f"{folder}: {other.relative_to(folder)} and {file.relative_to(folder)} would both be read, and seem to "
                "hold the same rows. Remove or rename one of them, or give the path of the file to read"
            )


def _notice(folder: Path, read: list[Path], unread: list[Path]) -> str:
    return " ".join(filter(None, (_missing_parts(folder, read), _not_read(folder, unread))))


def _missing_parts(folder: Path, files: list[Path]) -> str:
    """Names the parts of a split that is cut into numbered files, such as train-00000-of-00003, that are not there."""
    found: dict[tuple[str, int, str], set[int]] = {}
    for file in files:
        if part := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\..*)", str(file.relative_to(folder))):
            found.setdefault((part[1], int(part[3]), part[4]), set()).add(int(part[2]))
    missing = [
        f"{name}-{number:05d}-of-{total:05d}{suffix}"
        for (name, total, suffix), numbers in found.items()
        for number in sorted(set(range(total)) - numbers)
    ]
    names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
    return (
        f"{folder}: missing, by the numbers of the others: {names}; their rows are not trained on." if missing else ""
    )


def _not_read(folder: Path, files: list[Path]) -> str:
    if not files:
        return ""
    names = ", ".join(str(file.relative_to(folder)) for file in files[:8]) + (", ..." if len(files) > 8 else "")
    return (
        f"{folder}: not read: {names}. Of a folder the files of a train and a test split are read, by their names, and "
        f"those with a known suffix ({known_suffixes()}); to read a file give its own path."
    )


def _unknown_files(folder: Path) -> list[Path]:
    """Files whose name says that they belong to a split, with a suffix that no reader knows."""
    return sorted(
        Path(root) / name
        for root, folders, names in os.walk(folder)
        if not any(part.startswith((".", "__")) for part in Path(root).relative_to(folder).parts)
        for name in names
        if not data_suffix(name) and not name.startswith(".") and name not in METADATA_FILES and _split_word(Path(name))
    )


def _data_files(folder: Path) -> list[Path]:
    """Data files below `folder`, sorted; a folder that `datasets` saved lists its own files."""
    files = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        if "state.json" in names:
            files += _saved_dataset_files(Path(root))
            continue
        files += [
            Path(root) / name
            for name in names
            if data_suffix(name) and name not in METADATA_FILES and not name.startswith(".")
        ]
    for file in files:
        check_regular(file)
    return sorted(files)


def _saved_dataset_files(folder: Path) -> list[Path]:
    """The arrow files of a `save_to_disk` folder, as its state.json lists them."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / 'state.json'}: not the state of a saved `datasets` folder ({error!r})") from error
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(
            f"{folder}: saved with an indices file by an old `datasets`; save it again with "
            f"dataset.flatten_indices().save_to_disk(...)"
        )
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\]", name):
            raise ValueError(f"{folder / 'state.json'}: names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: missing, though state.json names it")
    return [folder / name for name in names]


# ---- Hub data sets ---------------------------------------------------------------------------------------------------


def find_hub_split(loaded, split: str, responses_only: bool) -> tuple[str | None, bool]:
    """What a loaded Hub data set calls `split`, and whether that holds `split` alone (as above).

    None for the only split there is, under any other name. Raises ValueError when no split fits.
    """
    words = ("test", "validation", "valid", "val", "dev", "eval")
    test = next((found for word in words if (found := _hub_split(loaded, word, responses_only))), None)
    train = _hub_split(loaded, "train", responses_only)
    if train is None and test is None:
        if len(loaded) == 1:
            return None, False
        raise ValueError(f"has splits {sorted(loaded)}, none of which is train or test")
    chosen = train if split == "train" else test or train
    if chosen is None:
        raise ValueError(f"has splits {sorted(loaded)}, none of which is train")
    return chosen, test is not None


def _hub_split(loaded, word: str, responses_only: bool) -> str | None:
    """The split called `word`, or `word` with the ending that some data sets give to the kind of loss."""
    for candidate in (word, f"{word}_sft" if responses_only else f"{word}_prefs"):
        if candidate in loaded:
            return candidate
    return None


# ---- rows ------------------------------------------------------------------------------------------------------------


def hold_out(keys, split: str, share: float | None, by_row: bool = False) -> Callable[[int, int], bool]:
    """Which rows belong to a split of data that have no split of their own, as a function of (row number, key).

    keys: for each row a 64-bit hash of its prompt, so that all rows of a prompt go the same way; 0 for a row that has
    none. share: of the prompts, the part that is for testing; None takes all rows. by_row: go by a shuffle of the rows
    instead, as the DPO reference implementation does for StackExchange.
    """
    if share is None:
        return lambda index, key: True
    wants_test = split == "test"
    if by_row:
        import numpy as np

        order = np.random.default_rng(42).permutation(len(keys))
        test = set(order[: max(int(len(keys) * share), 1)].tolist())
        return lambda index, key: (index in test) == wants_test
    lowest, highest = min(filter(None, keys), default=0), max(keys, default=0)
    limit = int(share * 2**64)
    if lowest == highest:
        limit = 0  # a single prompt is for training
    elif share > 0:
        limit = min(max(limit, lowest + 1), highest)  # of two prompts, each split gets one
    return lambda index, key: (0 < key < limit) == wants_test
