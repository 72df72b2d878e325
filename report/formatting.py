"""Numbers and texts in the form in which a person reads them on a console or in a report."""

from __future__ import annotations

import math
import os
import re
from typing import Any

SHORT_NAMES = {
    "tokens_per_second": "tok/s",
    "examples_per_second": "examples/s",
    "accuracy": "acc",
    "grad_norm": "grad",
}


def metric_dataset(name: str, split: str) -> tuple[str, str] | None:
    """For a metric of `split` ("train" or "eval"): (its name without data set, data set or ""); None for any other
    metric.

    >>> metric_dataset("rewards_eval/accuracies", "eval"), metric_dataset("loss/eval/hh", "eval")
    (('rewards_eval/accuracies', ''), ('loss/eval', 'hh'))
    """
    found = re.fullmatch(rf"(loss/{split}|\w+_{split}/[^/]+)(?:/(.+))?", name)
    return (found[1], found[2] or "") if found else None


def console_line(values: dict[str, float], examples: int, total: int | None, unit: str = "examples") -> str:
    """The numbers a reader follows, in one line; "" where there are none of them. An eval adds each data set when there
    are several. `unit` is what the loss calls its examples."""
    split = next((split for split in ("eval", "train") if any(metric_dataset(name, split) for name in values)), None)
    if split is None:
        return ""
    tables: dict[str, dict[str, float]] = {"": {}}
    for name, value in values.items():
        base, dataset = metric_dataset(name, split) or (None, "")
        if base:
            tables.setdefault(dataset, {})[base] = value
    if len(tables) == 2:  # a single data set is all there is
        tables = {"": {**tables.popitem()[1], **tables[""]}}
    results = []
    for dataset, table in tables.items():
        words = [f"{label} {table[name]:.4f}" for label, name in _results(split) if name in table]
        if split == "train":
            words += [f"{label} {form(values[name])}" for label, name, form in STEP_NUMBERS if name in values]
        if words:
            results.append((f"{dataset}: " if dataset else "") + "  ".join(words))
        if split == "train":
            break
    rates = [f"{short(values[name])} {label.format(unit)}" for label, name in RATES if name in values]
    speed = values.get("examples_per_second") or 0
    if total and speed > 0 and math.isfinite(speed) and examples < total:
        rates.append(f"{duration((total - examples) / speed)} left")
    where = f"{split:<5} {examples:>9,}" + (f" ({examples / total:.0%})" if total else "")
    return " | ".join([where, *results, *(["  ".join(rates)] if rates else [])]) if results else ""


STEP_NUMBERS = (("grad", "grad_norm", lambda norm: short(norm)), ("lr", "learning_rate", "{:.2g}".format))
RATES = (("{}/s", "examples_per_second"), ("tok/s", "tokens_per_second"))


def _results(split: str) -> tuple[tuple[str, str], ...]:
    return ("loss", f"loss/{split}"), ("acc", f"rewards_{split}/accuracies"), ("margin", f"rewards_{split}/margins")


def short(value: float) -> str:
    """A number in at most about six characters: 0.6931, 41.2, 12.3k, 1.25M."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if size == 0 or 1e-3 <= size < 1 else f"{value:.3g}" if size < 1000 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """45s, 12m 30s, 3h 5m, 2d 4h."""
    seconds = int(seconds)
    for unit, size, lower, lower_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size}{unit} {seconds % size // lower_size}{lower}"
    return f"{seconds}s"


def as_number(value: Any) -> int | float:
    """A plain number of a tensor with one element, a numpy scalar or a truth value."""
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, int) else float(value)


def excerpt(text: str, length: int = 160, end: bool = False) -> str:
    """One line of a text: its beginning, or its end."""
    text = " ".join(str(text).split())
    if len(text) <= length:
        return text
    return "... " + text[-length:] if end else text[:length] + " ..."


def printable(text: str) -> str:
    """The text with control characters written out: text from a model or a data file must not steer the terminal."""
    return "".join(
        char if char.isprintable() or char == " " else "\\n" if char == "\n" else ascii(char)[1:-1]
        for char in well_formed(text)
    )


def well_formed(text: str) -> str:
    """The text without lone surrogates, which no encoding can write."""
    return str(text).encode("utf-8", "replace").decode("utf-8")


def on_terminal(stream: Any) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)()) and os.environ.get("TERM") != "dumb"
