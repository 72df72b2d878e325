"""The trainer's way to its loggers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from report.console import ConsoleLogger, Progress
from report.files import METRICS, NOTICES, read_json_lines
from report.formatting import as_number, excerpt
from report.logger import Logger, RunInfo
from report.loggers import LOGGERS
from report.spikes import SpikeWatch
from utils import World

# "wandb failed to log samples: ..."
ACTIONS = {
    "metrics": "log",
    "samples": "log samples",
    "notice": "log a notice",
    "counts": "log the data counts",
    "show": "show a line",
    "state": "save its state",
    "load_state": "resume",
}


class Reporter:
    """Hands what a run reports to each of its loggers.

    Make one on every rank: rank 0 reports, elsewhere all methods do nothing. It averages nothing and decides nothing.
    No failure of a logger ends the run.

    Args:
        settings: the resolved configuration as plain dicts and lists.
        run_dir: the run's folder. A resumed run calls `load_state` before it reports any metrics or samples.
        total_examples: examples of the whole run, for percentages and the time left; may be set later.
        loggers: classes of loggers, instead of LOGGERS.

    Attributes:
        notices: texts of all notices of the run, those before a resume included.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        run_dir: str,
        world: World | None = None,
        total_examples: int | None = None,
        loggers: Sequence[type[Logger]] = LOGGERS,
    ):
        self.silent = world is not None and world.rank != 0
        self.run = RunInfo(settings, str(run_dir), self.notice, self.show, total_examples)
        self.examples = self.updates = 0
        self.notices: list[str] = []
        self.loggers: list[Logger] = []
        self._reported: set[str] = set()
        self._failed: set[tuple[str, str]] = set()
        self._finished = False
        if self.silent:
            return
        os.makedirs(self.run.run_dir, exist_ok=True)
        self.notices = [row["text"] for row in self._read(NOTICES) if row.get("kind") == "notice"]
        self._spikes = SpikeWatch(self._read(METRICS))
        problems = []
        for logger in (kind() for kind in loggers if kind.wanted(self.run.settings)):
            try:
                logger.start(self.run)
                self.loggers.append(logger)
            except Exception as error:
                problems.append(f"{logger.name} could not start: {_words(error)}; the run goes on without it")
        for problem in problems:  # now there are all that can report it
            self.notice(problem)

    @property
    def total_examples(self) -> int | None:
        return self.run.total_examples

    @total_examples.setter
    def total_examples(self, value: int | None) -> None:
        self.run.total_examples = value

    def log(self, metrics: dict[str, Any], examples: int, updates: int) -> None:
        """Log one line of metrics.

        Values are numbers or what float() takes (a tensor with one element, a numpy scalar). A training loss or
        gradient norm far outside what the last lines had is marked.
        """
        if self.silent:
            return
        self.examples, self.updates = int(examples), int(updates)
        values = {name: as_number(value) for name, value in metrics.items()}
        self._call("metrics", values, self.examples, self.updates, self._spikes.check(values))

    def samples(self, examples: int, rows: list[dict[str, Any]]) -> None:
        """Log samples: {prompt, policy, reference (None without a reference), dataset} a row."""
        self._call("samples", rows, int(examples), self.updates)

    def notice(self, text: str) -> None:
        """Report something that a user should know, once however often it comes up."""
        if self.silent or text in self._reported:
            return
        self._reported.add(text)
        if text not in self.notices:
            self.notices.append(text)
        self._call("notice", text, self.examples)

    def show(self, text: str) -> None:
        """A line for whoever watches the run, which need not be kept."""
        self._call("show", text)

    def counts(self, dataset: str, split: str, counts: dict[str, int]) -> None:
        """Report how many rows of a data set were read, dropped (by reason) and cut."""
        self._call("counts", dataset, split, {name: int(value) for name, value in counts.items()})

    def progress(
        self, total: int | None, description: str, unit: str = "it", initial: int = 0, leave: bool = False
    ) -> Progress:
        """A progress bar as a context manager: `bar.update(n, tokens_per_second=..., loss=...)`. Without a terminal, an
        occasional line."""
        console = next((logger for logger in self.loggers if isinstance(logger, ConsoleLogger)), None)
        return Progress(console, total, description, unit, initial, leave)

    def finish(self, ok: bool, message: str | None = None) -> None:
        """End the reports of a run that succeeded or failed. Never raises; a second call does nothing."""
        if not self._finished:
            self._finished = True
            self._call("finish", bool(ok), message)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps so that a resumed run goes on where the loggers are now."""
        state: dict[str, Any] = {}
        for part in self._call("state"):
            state |= part
        return {} if self.silent else {**state, "examples": self.examples, "updates": self.updates}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's `state()`. None or {} is the start of the run, for one that died before its first
        checkpoint. Notices are not taken back."""
        if self.silent:
            return
        state = state or {}
        self.examples, self.updates = state.get("examples", 0), state.get("updates", 0)
        self._call("load_state", state)
        self._spikes = SpikeWatch(self._read(METRICS))

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each logger; the results of those that did not fail."""
        results = []
        for logger in self.loggers:
            try:
                results.append(getattr(logger, method)(*arguments))
            except Exception as error:
                if (logger.name, method) not in self._failed:  # once, also if what it failed to log is this notice
                    self._failed.add((logger.name, method))
                    action = ACTIONS.get(method, method)
                    self.notice(f"{logger.name} failed to {action}: {_words(error)}; training goes on")
        return results

    def _read(self, name: str) -> list[dict[str, Any]]:
        return read_json_lines(os.path.join(self.run.run_dir, name))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {excerpt(str(error), 300)}"
