"""What watches over a run: signals that ask it to stop, metrics that no longer get better, weights that do not move, losses
that are not finite, and ranks that do not come."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch

from checkpoint.step_folders import metric_mode
from utils import PROJECT_DIR, gather_objects, write_atomically

# What a scheduler takes for "try again later" (EX_TEMPFAIL of sysexits.h): the job was preempted, its state is saved.
PREEMPTED = 75


class SignalWatch:
    """Remembers that SIGTERM, SIGUSR1 (preemption) or SIGINT (Ctrl-C) came; the loop asks between two steps.

    While there is nothing to save yet, a signal ends the process by itself, with the same exit code. A second signal
    ends it at once, in case the first cannot be honoured.

    Args:
        on_first: called as the first signal comes.
    """

    NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, on_first: Callable[[], None] = lambda: None):
        self.received: int | None = None
        self.deferred = False  # whether the loop asks
        self.on_first, self._since = on_first, 0.0
        self._old: dict = {}

    @property
    def exit_code(self) -> int:
        return 128 + signal.SIGINT if self.received == signal.SIGINT else PREEMPTED

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._old = {number: signal.signal(number, self._handle) for number in self.NUMBERS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        now = time.monotonic()
        if self.received is not None:
            # A scheduler that signals every process of a job, and a launcher that passes it on, mean one wish.
            if number == self.received and now - self._since < 1.0:
                return
            os._exit(128 + number)
        self.received, self._since = number, now
        if not self.deferred:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(PREEMPTED)
        self.on_first()


class EarlyStop:
    """Tells when an evaluation metric has not got better for `patience` evaluations."""

    def __init__(self, metric: str | None, patience: int, min_delta: float, mode: str | None):
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.sign = -1.0 if (mode or (metric and metric_mode(metric))) == "min" else 1.0
        self.best, self.without = None, 0

    def update(self, metrics: dict[str, float]) -> bool:
        """Take in an evaluation; whether to stop now.

        Raises:
            ValueError: the evaluation has no such metric.
        """
        if self.metric is None or not metrics:
            return self.over
        if self.metric not in metrics:
            raise ValueError(
                f"early_stopping.metric={self.metric!r} is no metric of the evaluation; there are "
                f"{', '.join(sorted(metrics))}."
            )
        value = self.sign * metrics[self.metric]
        if not math.isnan(value) and (self.best is None or value > self.best + self.min_delta):
            self.best, self.without = value, 0
        else:
            self.without += 1
        return self.over

    @property
    def over(self) -> bool:
        return self.metric is not None and self.without >= self.patience

    @property
    def watched(self) -> tuple[str, str] | None:
        """(metric, "min" or "max"), if one is watched."""
        return (self.metric, "min" if self.sign < 0 else "max") if self.metric else None

    def is_best(self) -> bool:
        """Whether the last evaluation was the best so far."""
        return self.metric is not None and self.best is not None and self.without == 0

    def state(self) -> dict:
        return {"metric": self.metric, "sign": self.sign, "best": self.best, "without": self.without}

    def load_state(self, state: dict) -> None:
        """Go on from a checkpoint; one that watched another metric says nothing about this one."""
        if (state["metric"], state["sign"]) == (self.metric, self.sign):
            self.best, self.without = state["best"], state["without"]


class MovementWatch:
    """Measures what share of low-precision weights an optimizer really changes.

    A bfloat16 weight has 8 bits of mantissa: an update smaller than 1/256 of it is rounded away, and at preference
    learning's rates most are. Looked at once, over the first `after` updates.
    """

    UPDATES = 20

    def __init__(self, model: torch.nn.Module, after: int = UPDATES):
        self.left = after
        low = [p for p in model.parameters() if p.requires_grad and p.element_size() < 4]
        self.samples = [(p, self._part(p).clone()) for p in low]

    @staticmethod
    def _part(parameter: torch.Tensor) -> torch.Tensor:
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        return local.detach().flatten()[:4096]

    def update(self) -> tuple[int, int] | None:
        """Called after each update; when due, (weights that changed, weights looked at), once."""
        if self.left == 0 or not self.samples:
            return None
        self.left -= 1
        if self.left:
            return None
        moved = sum(int((self._part(p) != before).sum()) for p, before in self.samples)
        looked = sum(before.numel() for _, before in self.samples)
        self.samples = []
        return moved, looked


class Heartbeat:
    """Each rank's place in the run, in a small file, so that a collective that stalls can say who is missing and where.

    Args:
        folder: in the run's folder, which all ranks see.
        patience: seconds in one place after which this rank says who is missing: a little less than the time after
            which the collective itself fails, because some backends then end the process without a word.
    """

    def __init__(self, folder: str, rank: int, size: int, patience: float):
        self.folder, self.rank, self.size, self.patience = folder, rank, size, patience
        self.enabled = size > 1
        self.row = {"place": "starting", "update": 0, "beats": 0}
        self.last, self.patient = time.monotonic(), True
        self.main_thread = threading.get_ident()
        self.closed = threading.Event()
        if self.enabled:
            os.makedirs(folder, exist_ok=True)
            self._clear()  # what a killed run left
            threading.Thread(target=self._watch, daemon=True, name="heartbeat").start()

    def at(self, place: str, update: int, patient: bool = False) -> None:
        """Say where this rank is: a few words, and the number of updates done. All ranks pass the same places.

        `patient`: what is done there may take longer than a collective may (a save, a pass over all data).
        """
        self.last, self.patient = time.monotonic(), patient
        self.row = {"place": place, "update": update, "beats": self.row["beats"] + 1}

    def _watch(self) -> None:
        # Writing is left to this thread: a step may take milliseconds, and the folder be on a slow network.
        written = told = None
        while not self.closed.wait(min(1.0, self.patience / 8)):
            row, quiet = self.row, time.monotonic() - self.last
            if row is not written and quiet < self.patience / 2:
                self._write(row | {"time": time.time() - quiet})
                written = row
            elif quiet > self.patience / 2:
                self._write(row | {"time": time.time() - quiet} | self._standstill())
            if quiet > self.patience and not self.patient and told is not row:
                told = row
                print(
                    f"rank {self.rank} has waited {self.patience:.0f} s for other ranks. Missing: {self.missing()}.",
                    file=sys.stderr,
                    flush=True,
                )

    def _standstill(self) -> dict:
        """Where the main thread is: its innermost line of this program, and whether it waits for other ranks there."""
        frame, here, waits = sys._current_frames().get(self.main_thread), "", False
        while frame is not None:
            path = frame.f_code.co_filename
            waits |= f"torch{os.sep}distributed" in path
            if not here and path.startswith(PROJECT_DIR + os.sep) and "site-packages" not in path:
                here = f"{os.path.basename(path)}:{frame.f_lineno}"
            frame = frame.f_back
        return {"where": here, "waits": waits}

    def _write(self, row: dict) -> None:
        try:
            path = os.path.join(self.folder, f"rank-{self.rank}")
            write_atomically(path, json.dumps(row).encode(), durable=False)
        except OSError:
            pass  # a full disk must not end a run that could go on

    def close(self) -> None:
        """Remove this rank's file, and the folder after the last one."""
        self.closed.set()
        if self.enabled:
            self._clear()
            try:
                os.rmdir(self.folder)
            except OSError:
                pass

    def _clear(self) -> None:
        """Remove this rank's files, and those of ranks that a larger world had."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return
        for name in names:
            number = name.removeprefix("rank-").partition(".")[0]  # half-written ones too
            if number.isdigit() and (int(number) == self.rank or int(number) >= self.size):
                try:
                    os.unlink(os.path.join(self.folder, name))
                except OSError:
                    pass

    def missing(self) -> str:
        """Who holds the others up, and where, in words: ranks that never reported or passed fewer places than the
        furthest one; if all are as far, those that do not wait for others themselves."""
        seen = {}
        for rank in range(self.size):
            try:
                with open(os.path.join(self.folder, f"rank-{rank}")) as file:
                    seen[rank] = json.load(file)
            except (OSError, ValueError):
                seen[rank] = None
        seen[self.rank] = self.row | {"time": time.time() - (time.monotonic() - self.last), "waits": True}
        furthest = max(row["beats"] for row in seen.values() if row)
        lagging = [rank for rank, row in seen.items() if row is None or row["beats"] < furthest]
        lagging = lagging or [rank for rank, row in seen.items() if not row.get("waits", True)] or list(seen)
        return "; ".join(f"rank {rank}: {self._describe(seen[rank])}" for rank in lagging)

    @staticmethod
    def _describe(row: dict | None) -> str:
        if row is None:
            return "no sign of life"
        where = f" ({row['where']})" if row.get("where") else ""
        return f"{row['place']}{where}, update {row['update']}, last heard of {time.time() - row['time']:.0f} s ago"


def offending_examples(seen: list, describe: Callable, world) -> tuple[list[dict], bool]:
    """What made a step not finite, over all ranks.

    Args:
        seen: (micro-batch, losses [E] of its examples) of this rank; describe: (unit, pair) -> what to say of it.
    Returns: the examples, and whether their losses show it; if only the gradient overflowed, any of the step's may have
    done it, and all are returned.
    """
    bad = []
    for batch, losses in seen:
        examples = [(unit, pair) for unit in batch.units for pair in unit.pairs]
        bad += [example for example, value in zip(examples, losses.tolist()) if not math.isfinite(value)]
    in_loss = any(gather_objects(bool(bad), world))
    if not in_loss:
        bad = [(unit, pair) for batch, _ in seen for unit in batch.units for pair in unit.pairs]
    rows = gather_objects([describe(unit, pair) for unit, pair in bad], world)
    return [row for part in rows for row in part], in_loss


def write_down(path: str, rows: list[dict], notice: Callable[[str], None]) -> None:
    """Append rows to a JSON-lines file. Called on one rank alone, so it must not raise where the others do not."""
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
    except OSError as problem:
        notice(f"{path} could not be written ({problem.strerror}).")
