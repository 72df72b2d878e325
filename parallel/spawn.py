"""The ranks of this node as spawned processes: started, watched, given the signals, and ended with this one."""

import os
import signal
import threading
import time
from multiprocessing import connection
from typing import Any

from parallel.failures import RankFailure, Report, ReportedMistake, describe_death
from parallel.rank_process import heeded_signals, rank_main
from parallel.rendezvous import Rendezvous
from report import streams
from settings import Settings
from utils import World

# How long the other ranks get to end by themselves after one failed: time to close the wandb run, no more, because they
# may be stuck in a collective operation that never ends.
FAILURE_GRACE_SECONDS = 5.0
# How long ranks get after a signal, unless they reported by `hold_on` that they are saving.
SIGNAL_GRACE_SECONDS = 30.0
# How long all ranks may take to end after the first one has, unless they reported `hold_on`.
LINGER_SECONDS = 60.0


def spawn(function, config: Settings, run_dir, devices: list[str], group: str | None):
    """One process for each of `devices`; they form a process group unless `group` is None."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    size = len(devices)
    ranks: list[_Rank] = []
    with Rendezvous(None if group is None else config.fsdp_port) as meeting, _Signals(ranks) as signals:
        try:
            for number, device in enumerate(devices):
                here, there = context.Pipe()
                process = context.Process(
                    target=rank_main,
                    name=f"rank-{number}",
                    args=(
                        function,
                        config,
                        run_dir,
                        World(number, size, number, device),
                        meeting if group else None,
                        size,
                        os.getpid(),
                        there,
                    ),
                )
                process.start()
                there.close()
                ranks.append(_Rank(number, process, here))
                if signals.received:
                    break
            _wait(ranks, signals)
        finally:
            for rank in ranks:
                rank.kill()
    return _outcome(ranks, signals)


class _Rank:
    """A rank as its parent sees it."""

    def __init__(self, rank: int, process, pipe):
        self.rank, self.process, self.pipe = rank, process, pipe
        self.report: Report | None = None
        self.holding = self.killed = self.done = False

    def poll(self) -> None:
        """Take in what has come through the pipe, and whether the process has ended."""
        ended = not self.process.is_alive()  # asked first: what is sent before the end is then in the pipe
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, Report):
                    self.report = message
                else:
                    self.holding = True
        except (EOFError, OSError):
            pass
        if ended:
            self.done = True
            if self.report is None:
                code = self.process.exitcode or 0
                self.report = Report(
                    self.rank,
                    "error",
                    time=time.time(),
                    message=describe_death(code),
                    is_explained=True,
                    is_follower=self.killed or code == -signal.SIGABRT,
                )  # NCCL's watchdog aborts

    @property
    def failed(self) -> bool:
        return self.report is not None and self.report.kind != "result"

    def signal(self, number: int) -> None:
        if self.process.is_alive():
            try:
                os.kill(self.process.pid, number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """End the process and the helpers in its session, if it is still there; the helpers of one that died, too."""
        if self.process.is_alive():
            self.killed = True
        elif not self.failed:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()  # so young that it has no session yet
        self.process.join()


class _Signals:
    """Passes signals on to the ranks, which may save before they end; a second one ends them at once."""

    def __init__(self, ranks: list[_Rank]):
        self.ranks, self.since = ranks, 0.0
        self.received: list[int] = []
        self.old: dict[int, Any] = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self.old = {number: signal.signal(number, self._handle) for number in heeded_signals()}
        return self

    def __exit__(self, *_):
        for number, handler in self.old.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        now = time.monotonic()
        # Ctrl-C in some terminals and schedulers that signal whole process trees send several for one request.
        if self.received and now - self.since < 1.0 and number == self.received[-1]:
            return
        self.received.append(number)
        if len(self.received) == 1:
            self.since = now
        for rank in list(self.ranks):
            rank.signal(number if len(self.received) == 1 else signal.SIGKILL)


def _wait(ranks: list[_Rank], signals: _Signals) -> None:
    """Return when all ranks have ended, or when one failed and the others had time to end."""
    failed_at = ending_at = None
    while True:
        for rank in ranks:
            rank.poll()
        if all(rank.done for rank in ranks):
            return
        now = time.monotonic()
        if failed_at is None and any(rank.report is not None and rank.report.kind == "error" for rank in ranks):
            failed_at = now
        if ending_at is None and any(rank.report for rank in ranks):
            ending_at = now
        holding = any(rank.holding for rank in ranks)
        if failed_at is not None and now - failed_at > FAILURE_GRACE_SECONDS:
            return
        if signals.received and now - signals.since > SIGNAL_GRACE_SECONDS and not holding:
            return
        if ending_at is not None and now - ending_at > LINGER_SECONDS and not holding:
            return
        # Waits for news from any rank; the time limit lets the limits above come true, and handlers of signals run.
        connection.wait(
            [rank.pipe for rank in ranks if not rank.done and not rank.pipe.closed and not rank.report]
            + [rank.process.sentinel for rank in ranks if not rank.done],
            timeout=0.2,
        )


def _outcome(ranks: list[_Rank], signals: _Signals):
    """Rank 0's result, or the exception that explains what happened."""
    reports = [rank.report for rank in ranks if rank.report is not None]
    errors = [report for report in reports if report.kind == "error"]
    codes = [report.value for report in reports if report.kind == "exit" and report.value]
    if signals.received:
        for report in errors:
            if report.trace and not report.is_follower:  # such as a disk that was full when it tried to save
                what = report.message + "\n" if report.is_explained else report.trace
                streams.write_error(f"rank {report.rank} failed while it was ending:\n{what}")
        if signals.received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        if errors or codes or not reports:
            raise SystemExit(codes[0] if codes else 128 + signals.received[0])
    if errors:
        # Where it began: the earliest error that is not a rank's complaint about another one.
        first = min(errors, key=lambda report: (report.is_follower, report.time))
        if first.is_users:
            raise ReportedMistake(first.message, first.trace)
        message = first.message.strip()
        if not first.is_explained:
            message = message.splitlines()[0]
        raise RankFailure(f"rank {first.rank} of {len(ranks)} failed: {message}", first.trace, first.is_explained)
    if codes:
        raise SystemExit(codes[0])
    if ranks[0].report is None:
        raise RankFailure(
            f"rank 0 of {len(ranks)} went on for {LINGER_SECONDS:.0f} s after another one had ended", is_explained=True
        )
    return ranks[0].report.value
