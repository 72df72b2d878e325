"""The logger protocol: one place that the records of a run go to, such as a file, a console or a service.

To add a logger: write a class that inherits from Logger and overrides what it needs, in a file of its own in report/;
add the class to LOGGERS in report/loggers.py; add its settings, if it has any, to config/config.yaml and settings/; and
add its tests to tests/test_loggers.py.

A logger may raise any Exception. The Reporter reports that once for each method, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


@dataclass
class RunInfo:
    """The run that a logger logs.

    Attributes:
        settings: the resolved configuration as plain dicts and lists.
        run_dir: the run's folder, which exists.
        notice: tells the user of something, once; `notice` of all loggers is called. For a logger's own troubles.
        show: `show` of all loggers.
        total_examples: examples of the whole run; None until the data has been read.
    """

    settings: dict[str, Any]
    run_dir: str
    notice: Callable[[str], None]
    show: Callable[[str], None]
    total_examples: int | None = None


class Logger(Protocol):
    """Made and called on rank 0 only. Every method does nothing unless a logger overrides it."""

    name: ClassVar[str]  # as in "wandb failed to log: ..."

    @classmethod
    def wanted(cls, settings: dict[str, Any]) -> bool:
        """Whether a run with these settings has this logger. What only this logger imports, it imports later."""
        return True

    def start(self, run: RunInfo) -> None:
        """The first call. If it fails, no other follows."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, before anything is logged.

        Args:
            state: what `state` of all loggers returned at the checkpoint; {} for a run that starts, or starts over.
        """

    def metrics(self, values: dict[str, int | float], examples: int, updates: int, marks: list[str]) -> None:
        """One log line. Values may be NaN or infinite; `marks` are words for those that are unusual."""

    def samples(self, rows: list[dict[str, Any]], examples: int, updates: int) -> None:
        """Sampled texts: {prompt, policy, reference (None without one), dataset} a row."""

    def notice(self, text: str, examples: int) -> None:
        """Something that the user should know. Called once for each text, and again by a resumed run."""

    def counts(self, dataset: str, split: str, counts: dict[str, int]) -> None:
        """How many rows of a data set were read, dropped (by reason) and cut. A resumed run calls it again."""

    def show(self, text: str) -> None:
        """A line for whoever watches the run, which need not be kept."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps for an exact resume: JSON values, under keys that no other logger uses."""
        return {}

    def finish(self, ok: bool, message: str | None) -> None:
        """The run has ended. Only `notice` and `show` may follow, with what goes wrong while others finish."""


def asked_for(name: str, settings: dict[str, Any]) -> bool:
    """Whether `loggers` in the settings names a logger, and this run logs outside its folder at all."""
    return name in settings.get("loggers", ("wandb",)) and not settings.get("debug", False)
