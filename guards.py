"""What watches over a run: signals that ask it to stop, metrics that no longer get better, weights that do not move."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time

import torch

from step_folders import metric_mode

# What a scheduler takes for "try again later" (EX_TEMPFAIL of sysexits.h): the job was preempted, its state is saved.
PREEMPTED = 75


class SignalWatch:
    """Remembers that SIGTERM, SIGUSR1 (preemption) or SIGINT (Ctrl-C) came; the loop asks between two steps.

    A second signal ends the process at once, in case the first cannot be honoured.
    """

    NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self):
        self.received: int | None = None
        self._old: dict = {}

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._old = {number: signal.signal(number, self._handle) for number in self.NUMBERS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number


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
            return False
        if self.metric not in metrics:
            raise ValueError(f"early_stopping.metric={self.metric!r} is no metric of the evaluation; there are "
                             f"{', '.join(sorted(metrics))}.")
        value = self.sign * metrics[self.metric]
        if self.best is None or value > self.best + self.min_delta:
            self.best, self.without = value, 0
        else:
            self.without += 1
        return self.without >= self.patience

    def state(self) -> dict:
        return {"best": self.best, "without": self.without}

    def load_state(self, state: dict) -> None:
        self.best, self.without = state["best"], state["without"]


class MovementWatch:
    """Measures what share of low-precision weights an optimizer really changes.

    A bfloat16 weight has 8 bits of mantissa: an update smaller than 1/256 of it is rounded away, and at preference
    learning's rates most are. Looked at once, over the first `after` updates.
    """

    def __init__(self, model: torch.nn.Module, after: int = 20):
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
        self.last = time.monotonic()
        self.closed = threading.Event()
        if self.enabled:
            os.makedirs(folder, exist_ok=True)
            threading.Thread(target=self._watch, daemon=True, name="heartbeat").start()

    def _watch(self) -> None:
        while not self.closed.wait(min(5.0, self.patience / 4)):
            if time.monotonic() - self.last > self.patience:
                print(f"rank {self.rank} has waited {self.patience:.0f} s for other ranks. Missing: {self.missing()}.",
                      file=sys.stderr, flush=True)
                return

    def at(self, place: str, update: int) -> None:
        """Say where this rank is: a few words, and the number of updates done."""
        self.last = time.monotonic()
        if not self.enabled:
            return
        try:
            with open(os.path.join(self.folder, f"rank-{self.rank}.tmp"), "w") as file:
                json.dump({"place": place, "update": update, "time": time.time()}, file)
            os.replace(file.name, os.path.join(self.folder, f"rank-{self.rank}"))
        except OSError:
            pass  # a full disk must not end a run that could go on

    def close(self) -> None:
        """Remove this rank's file, and the folder after the last one."""
        self.closed.set()
        if self.enabled:
            try:
                os.unlink(os.path.join(self.folder, f"rank-{self.rank}"))
                os.rmdir(self.folder)
            except OSError:
                pass

    def missing(self) -> str:
        """Who lags behind, in words: ranks whose update or place is behind the furthest, or that never reported."""
        seen = {}
        for rank in range(self.size):
            try:
                with open(os.path.join(self.folder, f"rank-{rank}")) as file:
                    seen[rank] = json.load(file)
            except (OSError, ValueError):
                seen[rank] = {"place": "no sign of life", "update": -1, "time": math.nan}
        furthest = max((row["update"], row["time"]) for row in seen.values() if row["update"] >= 0)
        lagging = [rank for rank, row in seen.items()
                   if row["update"] < furthest[0] or not row["time"] > furthest[1] - 10] or list(seen)
        return "; ".join(f"rank {rank}: {seen[rank]['place']}, update {seen[rank]['update']}, "
                         f"last heard of {time.time() - seen[rank]['time']:.0f} s ago" for rank in lagging)
