"""Signals that ask a run to stop: it saves between two steps, then ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from parallel.rank_process import heeded_signals

# What a scheduler takes for "try again later" (EX_TEMPFAIL of sysexits.h): the job was preempted, its state is saved.
PREEMPTED = 75


class SignalWatch:
    """Remembers that a signal of `heeded_signals` came; the loop asks between two steps.

    While there is nothing to save yet, a signal ends the process by itself, with the same exit code. A second signal
    ends it at once, in case the first takes too long.

    Args:
        on_first: called as the first signal comes.
    """

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
            self._old = {number: signal.signal(number, self._handle) for number in heeded_signals()}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        now = time.monotonic()
        if self.received is not None:
            # A scheduler that signals every process of a job, and a launcher that passes it on, mean one request.
            if number == self.received and now - self._since < 1.0:
                return
            os._exit(128 + number)
        self.received, self._since = number, now
        if not self.deferred:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(PREEMPTED)
        self.on_first()
