"""What data sets are called: by name or path in `datasets`, by short names in metrics, and by any of these in keys."""

import os
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from data.files import data_suffix, looks_like_path


def short_names(names: Sequence[str], paths: Container[str] = ()) -> list[str]:
    """A short name for each of `datasets`, for metrics: of a path its last part, or as many as make it unique.

    paths: the names that data.paths has a place for. A registered name or a Hub name stays as it is.
    """
    parts = [_parts(name) if looks_like_path(name) or name in paths else [name] for name in names]
    shorts = ["/".join(each[-1:]) for each in parts]
    for length in range(2, max(map(len, parts), default=0) + 1):
        doubled = {short for short in shorts if shorts.count(short) > 1}
        shorts = [
            "/".join(each[-length:]) if short in doubled else short for each, short in zip(parts, shorts, strict=True)
        ]
    return [short if shorts.count(short) == 1 else name for short, name in zip(shorts, names, strict=True)]


def _parts(name: str) -> list[str]:
    """The parts that a short name is made of."""
    path = os.path.normpath(name)
    path = path[: len(path) - len(data_suffix(path))]
    return [part for part in re.split(r"[/\\]", path) if part not in ("", ".", "..", "~")] or [name]


def _aliases(names: Sequence[str]) -> dict[str, str]:
    """What a data set may be called in a key -> its name in `datasets`."""
    aliases = {name: name for name in names}
    files = [os.path.basename(name) for name in names]  # of a Hub name NAME:CONFIGURATION
    for others in (short_names(names), files, [name.partition(":")[0] for name in files]):
        for other, name in zip(others, names, strict=True):
            if others.count(other) == 1:
                aliases.setdefault(other, name)
    return aliases


def by_full_name(mapping: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A mapping under data.* with each data set's entry under its name in `datasets`.

    On a command line, data.weights.p.jsonl=2 arrives as {p: {jsonl: 2}}, and a path with a slash cannot be a key at
    all: there its short name or file name is one.
    """
    aliases = _aliases(names)
    result: dict[str, Any] = {}

    def place(key: str, value: Any) -> None:
        inside = {}
        if isinstance(value, dict):
            longer = {inner: f"{key}.{inner}" for inner in value}
            inside = {i: k for i, k in longer.items() if any(f"{alias}.".startswith(f"{k}.") for alias in aliases)}
            for inner, inner_key in inside.items():
                place(inner_key, value[inner])
        if inside and len(inside) == len(value):
            return
        rest = {inner: each for inner, each in value.items() if inner not in inside} if inside else value
        result[aliases.get(key, key)] = rest

    for key, value in mapping.items():
        place(str(key), value)
    return result


def key_of(section: str, name: str, names: Sequence[str], value: Any) -> str:
    """How an entry of a mapping under data.* is written on the command line."""
    aliases = [alias for alias, full in _aliases([*dict.fromkeys([*names, name])]).items() if full == name]
    for alias in [name, *sorted(aliases, key=len)]:
        if re.fullmatch(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", alias, re.ASCII):
            return f"{section}.{alias}={value}"
    return f"'{section}={{{name}: {value}}}'"
