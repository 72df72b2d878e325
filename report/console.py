"""Logs to the console: a line for each record, and progress bars on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from tqdm import tqdm

from losses import LOSSES
from report.formatting import SHORT_NAMES, as_number, console_line, duration, excerpt, on_terminal, printable, short
from report.logger import Logger, RunInfo

PLAIN_INTERVAL = 60.0  # seconds without a line, after which a long loop without a bar prints how far it is
SHOWN_SAMPLES = 2


class ConsoleLogger(Logger):
    name = "console"

    def start(self, run: RunInfo) -> None:
        self.run = run
        loss = (run.settings.get("loss") or {}).get("name")
        self.unit = LOSSES[loss].inputs.example if loss in LOSSES else "examples"
        self.bars: list[Progress] = []
        self.last_line = time.monotonic()

    def metrics(self, values: dict[str, int | float], examples: int, updates: int, marks: list[str]) -> None:
        line = console_line(values, examples, self.run.total_examples, self.unit)
        if line:
            self.show(line + "".join(f"  ! {mark}" for mark in marks))

    def samples(self, rows: list[dict[str, Any]], examples: int, updates: int) -> None:
        for row in rows[:SHOWN_SAMPLES]:
            self.show(f"sample at {examples:,} examples")
            for name in ("prompt", "policy", "reference"):
                if row.get(name) is not None:
                    self.show(f"  {name + ':':<10} {excerpt(row[name], end=name == 'prompt')}")

    def notice(self, text: str, examples: int) -> None:
        self.show(f"note: {text}")

    def counts(self, dataset: str, split: str, counts: dict[str, int]) -> None:
        shown = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in counts.items() if value)
        self.show(f"data: {dataset} {split}: {shown or 'empty'}")

    def show(self, text: str) -> None:
        self.last_line = time.monotonic()
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        line = printable(text).encode(encoding, "replace").decode(encoding)
        # A pipe or terminal that closes does not end the run: its files have everything. tqdm does so for its bars.
        with contextlib.suppress(OSError, ValueError):
            tqdm.write(line, file=sys.stdout)  # above the bars
            sys.stdout.flush()

    def finish(self, ok: bool, message: str | None) -> None:
        for bar in list(self.bars):
            bar.close()
        if message:
            self.show(message)


class Progress:
    """A bar on a terminal; elsewhere a plain line now and then, if nothing else was printed meanwhile.

    Args:
        console: None shows nothing.
        total: how much there is to do, if it is known; initial: how much of it is done already.
        leave: whether the bar stays on the screen when it is closed.
    """

    def __init__(
        self,
        console: ConsoleLogger | None,
        total: int | None,
        description: str,
        unit: str = "it",
        initial: int = 0,
        leave: bool = False,
    ):
        self.console, self.total, self.description, self.unit = console, total, description, unit
        self.done, self.bar = initial, None
        self.initial, self.started = initial, time.monotonic()
        if console is None:
            return
        console.bars.append(self)
        if on_terminal(sys.stderr):
            self.bar = tqdm(
                total=total,
                desc=description,
                unit=f" {unit}",
                initial=initial,
                leave=leave,
                file=sys.stderr,
                dynamic_ncols=True,
                mininterval=0.25,
            )

    def update(self, n: int = 1, **postfix: Any) -> None:
        """Advance by n; numbers in `postfix` are shown at the end of the bar."""
        self.done += n
        if self.console is None:
            return
        words = ", ".join(f"{SHORT_NAMES.get(name, name)} {short(as_number(value))}" for name, value in postfix.items())
        if self.bar is not None:
            if words:
                self.bar.set_postfix_str(words, refresh=False)
            self.bar.update(n)
        elif time.monotonic() - self.console.last_line > PLAIN_INTERVAL:
            rate = (self.done - self.initial) / max(time.monotonic() - self.started, 1e-9)
            share = f"/{self.total:,} ({self.done / self.total:.0%})" if self.total else ""
            line = f"{self.description}: {self.done:,}{share}, {short(rate)} {self.unit}/s"
            if self.total and rate > 0:
                line += f", {duration((self.total - self.done) / rate)} left"
            self.console.show(line + (f", {words}" if words else ""))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self.console is not None and self in self.console.bars:
            self.console.bars.remove(self)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.close()
