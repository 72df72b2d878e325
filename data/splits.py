"""Which files, which splits of a Hub data set and which rows are for training, and which for testing."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from data.files import DATA_SUFFIXES, data_suffix

SPLITS = ("train", "test")
# Words in a file's name (or its folder's) that name its split, best first.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "validation", "valid", "val", "dev", "eval", "evaluation"),
}
METADATA_FILES = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "config.json",
    "package.json",
}


# ---- files -----------------------------------------------------------------------------------------------------------


def find_split_files(path, split: str) -> tuple[list[Path], bool]:
    """The files of `split` ('train' or 'test') under `path`, in a fixed order, and whether they are that split alone.

    (files, False) means that the files hold everything and the caller has to hold out the test part by itself.
    Raises ValueError when there is nothing to read.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(
            f"{path}: no such file or folder. Give a data file ({', '.join(DATA_SUFFIXES)}) or a folder "
            f"that holds train and test files"
        )
    if path.is_file():
        if not data_suffix(path):
            raise ValueError(f"{path}: not a data file by its name; known are {', '.join(DATA_SUFFIXES)}")
        return [path], False
    by_split: dict[str, list[Path]] = {}
    for file in _data_files(path):
        by_split.setdefault(_split_word(file.relative_to(path)), []).append(file)
    if not by_split:
        raise ValueError(f"{path}: no data file in this folder; known are {', '.join(DATA_SUFFIXES)}")
    train = _first_present(by_split, "train")
    test = _first_present(by_split, "test")
    if not train and not test:
        return by_split[""], False
    if split == "train" and not train:
        raise ValueError(f"{path}: holds test files only ({test[0].name}, ...), none whose name says train")
    if split == "test" and not test:
        return train, False
    # Without a test file the training files are split further, so train must leave the same part out.
    return (train, bool(test)) if split == "train" else (test, True)


def _first_present(by_split, split) -> list[Path]:
    return next((by_split[word] for word in SPLIT_WORDS[split] if word in by_split), [])


def _split_word(relative: Path) -> str:
    """The split word in a relative path; the file's own name counts before its folders'."""
    for part in reversed(relative.parts):
        words = re.split(r"[^a-z]+", part.lower())
        for split_words in SPLIT_WORDS.values():
            for word in split_words:
                if word in words:
                    return word
    return ""


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
