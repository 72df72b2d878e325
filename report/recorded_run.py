"""Reads a run's folder: its settings, metrics, samples and notices, whatever of them there is."""

from __future__ import annotations

import math
import os
from typing import Any

import yaml

from report.files import METRICS, NOTICES, SAMPLES, read_json_lines

MOST_STAGES = 5


class Run:
    """What a run's folder holds.

    Attributes:
        config: the settings; {} if they cannot be read.
        metrics: one dict a log line; values are numbers, NaN and infinities among them, but for `marks`.
        samples, notices: one dict a line of samples.jsonl and notices.jsonl.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.config = read_yaml(os.path.join(folder, "config.yaml"))
        rows = [
            {name: value if name == "marks" else _float(value) for name, value in row.items()}
            for row in read_json_lines(os.path.join(folder, METRICS))
        ]
        self.metrics: list[dict[str, Any]] = [row for row in rows if isinstance(row.get("examples"), (int, float))]
        self.samples = read_json_lines(os.path.join(folder, SAMPLES))
        self.notices = read_json_lines(os.path.join(folder, NOTICES))

    @property
    def name(self) -> str:
        return str(self.config.get("exp_name") or os.path.basename(os.path.normpath(self.folder)))

    @property
    def loss(self) -> str:
        return str((self.config.get("loss") or {}).get("name", ""))

    def points(self, name: str) -> list[tuple[float, float]]:
        """(examples, value) of a metric, where it is a finite number."""
        pairs = ((row["examples"], row.get(name)) for row in self.metrics)
        return [(x, y) for x, y in pairs if isinstance(y, (int, float)) and math.isfinite(y)]

    def ends(self, name: str) -> tuple[float, float] | None:
        """First and last finite value of a metric."""
        points = self.points(name)
        return (points[0][1], points[-1][1]) if points else None

    def names(self) -> list[str]:
        """All metric names, in the order of their first appearance."""
        return [
            name
            for name in dict.fromkeys(name for row in self.metrics for name in row)
            if name not in ("examples", "updates", "time", "marks")
        ]

    def end(self) -> dict[str, Any]:
        """The last record of how it ended, {"ok", "message", "time"}; {} while it runs, or if it was killed."""
        last = [row for row in self.notices if row.get("kind") == "end"]
        newer = self.metrics and last and (self.metrics[-1].get("time") or 0) > last[-1].get("time", 0) + 1
        return last[-1] if last and not newer else {}


def earlier_stages(run: Run, most: int = MOST_STAGES) -> list[str]:
    """The folders of the runs that this one started from, oldest first: model.archive names the last of them."""
    folders: list[str] = []
    seen = {os.path.realpath(run.folder)}
    while len(folders) < most:
        folder = str((run.config.get("model") or {}).get("archive") or "")
        for _ in range(2):  # RUN, RUN/step-N and RUN/step-N/policy.pt are all archives
            if folder and not os.path.isfile(os.path.join(folder, METRICS)):
                folder = os.path.dirname(folder)
        if not os.path.isfile(os.path.join(folder, METRICS)) or os.path.realpath(folder) in seen:
            break
        seen.add(os.path.realpath(folder))
        folders.append(folder)
        run = Run(folder)
    return folders[::-1]


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping in a YAML file; {} if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            content = yaml.safe_load(file)
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _float(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value
