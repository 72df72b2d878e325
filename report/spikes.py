"""Marks log lines whose loss or gradient norm is unusual."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

from report.formatting import short


class SpikeWatch:
    """Marks a training loss or gradient norm far above what the last lines had, or not finite.

    "Far" is beyond the median by 8 robust standard deviations (1.4826 * median absolute deviation) and by a factor, so
    that neither the usual noise of small batches nor a quiet stretch is marked. Its memory is the tail of
    metrics.jsonl, so a resumed run marks the same lines.

    Args:
        history: the lines so far.
    """

    FACTORS = {"loss/train": 1.5, "grad_norm": 4.0}
    WINDOW, LEAST = 50, 10

    def __init__(self, history: Iterable[dict[str, Any]] = ()):
        self.recent: dict[str, deque[float]] = {name: deque(maxlen=self.WINDOW) for name in self.FACTORS}
        for record in history:
            self._remember(record)

    def _remember(self, record: dict[str, Any]) -> None:
        for name, recent in self.recent.items():
            if isinstance(record.get(name), (int, float)) and math.isfinite(record[name]):
                recent.append(float(record[name]))

    def check(self, values: dict[str, int | float]) -> list[str]:
        """What is unusual in a new line, in words."""
        marks = []
        for name, recent in self.recent.items():
            value, label = values.get(name), "loss" if name == "loss/train" else "gradient norm"
            if value is None:
                continue
            if not math.isfinite(value):
                marks.append(f"{label} is {value}")
            elif len(recent) >= self.LEAST:
                median = statistics.median(recent)
                deviation = 1.4826 * statistics.median(abs(x - median) for x in recent)
                if value > median + 8 * deviation and value > median + (self.FACTORS[name] - 1) * abs(median):
                    marks.append(
                        f"{label} spike: {short(value)}, median of the last {len(recent)} lines {short(median)}"
                    )
        self._remember(values)
        return marks
