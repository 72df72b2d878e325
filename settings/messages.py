"""How settings are shown to the user: values as on the command line, and the nearest known word for an unknown one."""

import difflib
import re
import shlex
from collections.abc import Iterable
from typing import Any

LONGEST = 300  # characters of a value in a message


def show(value: Any) -> str:
    """A value as it is written on the command line; a very long one is shortened, for it comes from a broken file."""
    text = _written(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 60]}... ({len(text)} characters)"


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, int) and abs(value) >= 10**20:
        text = str(value)
        return f"{text[:6]}...{text[-3:]}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def near_miss(word: object, known: Iterable[str], cut: float = 0.6) -> str:
    """'; did you mean ...?' for the nearest known word, or nothing. Keys of a mapping in YAML need not be text."""
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(word).lower(), list(lower), n=1, cutoff=cut)
    return f"; did you mean {lower[near[0]]}?" if near else ""


def argument(key: str, value: str) -> str:
    """KEY=VALUE to paste into a shell, quoted for the shell and for Hydra."""
    if not re.fullmatch(r"[\w./@:+-]+", value, re.ASCII):  # anything else has a meaning to Hydra
        # Backslashes are doubled only where they come before a quotation mark: Hydra keeps all others.
        inner = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), value)
        value = f'"{inner}"'
    return shlex.quote(f"{key}={value}")
