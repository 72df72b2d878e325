"""Paths in the settings. A run records them in full, so that it can be resumed from any folder."""

import functools
import os
from collections.abc import Callable
from typing import Any

import preference_datasets

# Folders that a run may make: paths, whether or not they are there yet.
FOLDERS = ("local_dirs", "local_run_dir", "data.cache_dir", "reference.cache_dir")
# Models: Hub names, unless such a folder or .gguf file is there.
MODELS = ("model.name_or_path", "model.tokenizer_name_or_path", "reference.name_or_path")
# Templates, names of modules and the like, unless a file or folder of that name is there.
FILES = (
    *("model.local_copy", "model.archive", "reference.archive"),
    *("evals.checkpoint", "evals.reference", "evals.against"),
    *("data.chat_template", "data.plugins", "data.paths"),
)


def in_full(values: dict[str, Any]) -> None:
    """Make every path in nested settings absolute, in place, with ~ replaced by the home folder.

    The names in `datasets` stay, because metrics and other keys are named after them: where they are files or folders,
    `data.paths` gets their places. Values of other types than the schema asks for are left for its checks.

    Raises:
        ValueError: the home of a user that does not exist.
    """
    for key in FOLDERS:
        _replace(values, key, functools.partial(_full, key))
    if not _get(values, "model.random_config"):
        _replace(values, MODELS[0], _if_there(MODELS[0], _is_model))
    for key in MODELS[1:]:
        _replace(values, key, _if_there(key, _is_model))
    for key in FILES:
        _replace(values, key, _if_there(key, os.path.exists))
    names, places = values.get("datasets"), _get(values, "data.paths")
    if not isinstance(names, list) or not isinstance(places, dict):
        return
    for name in names:
        if isinstance(name, str) and name not in places and name not in _registered(name, values):
            place = _if_there("datasets", os.path.exists)(name)
            if os.path.isabs(place) and os.path.exists(place):
                places[name] = place


def moved(key: str, old: Any, new: Any) -> bool:
    """Whether a setting gives the new place of files that are no longer at the recorded one."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return all(moved(key, old[name], new[name]) for name in old if old[name] != new[name])
    if key not in (*MODELS, *FILES) or not (isinstance(old, str) and isinstance(new, str)):
        return False
    return os.path.isabs(old) and not os.path.exists(old) and os.path.exists(new)


def _full(key: str, path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = expanded.split(os.sep)[0]
        raise ValueError(f"{key}={path}: there is no home folder for {user}; write ./{path} for a folder of that name")
    return os.path.abspath(expanded)


def _if_there(key: str, there: Callable[[str], bool]) -> Callable[[str], str]:
    """Absolute if there is such a file or folder; else a name of something else, or a mistake for the checks."""

    def convert(text: str) -> str:
        return _full(key, text) if there(os.path.expanduser(text)) else text

    return convert


def _is_model(path: str) -> bool:
    return os.path.isdir(path) or (path.endswith(".gguf") and os.path.isfile(path))


def _registered(name: str, values: dict[str, Any]) -> set[str]:
    """Names of data sets that come before files of the same name; plugins may register them as well."""
    plugins = _get(values, "data.plugins")
    if plugins and os.sep not in name and isinstance(plugins, list):
        from data import sources

        sources.load_plugins(plugins)
    return set(preference_datasets.REGISTRY)


def _get(values: dict[str, Any], key: str) -> Any:
    place: Any = values
    for name in key.split("."):
        place = place.get(name) if isinstance(place, dict) else None
    return place


def _replace(values: dict[str, Any], key: str, convert: Callable[[str], str]) -> None:
    """Apply `convert` to the text at a dotted key, or to each text of the list or mapping there."""
    *sections, name = key.split(".")
    for section in sections:
        inner = values.get(section)
        if not isinstance(inner, dict):
            return
        values = inner
    value = values.get(name)
    if isinstance(value, str):
        values[name] = convert(value)
    elif isinstance(value, list):
        values[name] = [convert(item) if isinstance(item, str) else item for item in value]
    elif isinstance(value, dict):
        values[name] = {inner: convert(item) if isinstance(item, str) else item for inner, item in value.items()}
