"""Runs cases of hostile input through the project's own code, and says which of them ended otherwise than they may.

A case is made by `make(chance, folder)` of one of the modules in KINDS, out of its random generator alone: (text that
describes it, function that runs it). It may end well, or with a message for the user: a ValueError that our own code
raised on purpose. Any other error, an AssertionError of the case's own checks, a time above `LIMIT_SECONDS` or memory
above `LIMIT_BYTES` is a failure. Processes carry the cases out, and one that hangs is ended by the parent.
"""

from __future__ import annotations

import importlib
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path

KINDS = {
    "rows": "hostile_rows",
    "commands": "hostile_commands",
    "folders": "hostile_folders",
    "templates": "hostile_templates",
}
# What "all" is made of, in turn: what is cheap and has most ways to go wrong comes most often.
SHARES = ("rows", "templates", "rows", "folders", "templates", "rows", "commands")
LIMIT_SECONDS = 20.0  # of the processor for one case; the usual one takes a hundredth of a second to a second
PATIENCE = 4  # times as long may it take on a busy machine before its process is ended
LIMIT_BYTES = 1_500_000_000  # by which a case may raise the peak memory of its process
LONGEST_MESSAGE = 4_000  # characters


@dataclass(frozen=True)
class Case:
    """One case, named by what it is made from."""

    kind: str
    seed: int
    number: int

    def command(self) -> str:
        """What runs this case alone."""
        return f"scripts/fuzz --kind {self.kind} --seed {self.seed} --case {self.number}"


@dataclass
class Outcome:
    """How a case ended: "well", "refused" with a message, or "failed" with what is wrong."""

    case: Case
    end: str
    text: str = ""
    about: str = ""
    seconds: float = 0.0


@dataclass
class Summary:
    """What came of many cases."""

    ends: Counter = field(default_factory=Counter)  # (kind, end)
    failures: list[Outcome] = field(default_factory=list)
    slowest: Outcome | None = None

    def add(self, outcome: Outcome) -> None:
        self.ends[outcome.case.kind, outcome.end] += 1
        if outcome.end == "failed":
            self.failures.append(outcome)
        if self.slowest is None or outcome.seconds > self.slowest.seconds:
            self.slowest = outcome


def cases(kind: str, count: int, seed: int) -> Iterator[Case]:
    """`count` cases of a kind, or of all kinds."""
    kinds = SHARES if kind == "all" else (kind,)
    for number in range(count):
        yield Case(kinds[number % len(kinds)], seed, number)


def carry_out(case: Case, keep: Path | None = None, begun: Callable[[str], None] = lambda about: None) -> Outcome:
    """Make a case in a folder of its own and run it in this process.

    Args:
        keep: the folder, which then stays. begun: called with the case's description before it runs.
    """
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")) if keep is None else keep
    here, about = os.getcwd(), ""
    hostile = importlib.import_module(KINDS[case.kind])
    hostile.prepare()  # what all cases share counts for none
    started, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        chance = random.Random(f"{case.seed}-{case.kind}-{case.number}")
        about, run = hostile.make(chance, folder)
        begun(about)
        os.chdir(folder)
        end, text = "well", run() or ""
        if text:
            end = "refused"
    except Exception as error:
        end, text = judge(error)
    finally:
        os.chdir(here)
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    seconds = time.process_time() - started
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory)
    if end == "refused":
        end, text = judged_message(text)
    if end != "failed" and seconds > LIMIT_SECONDS:
        end, text = "failed", f"it took {seconds:.0f} s"
    if end != "failed" and grown > LIMIT_BYTES:
        end, text = "failed", f"memory grew by {grown / 1e9:.1f} GB"
    return Outcome(case, end, text, about, seconds)


def judge(error: Exception) -> tuple[str, str]:
    """(end, text) of a case that raised."""
    from parallel.failures import is_users_mistake

    if is_users_mistake(error):
        return "refused", str(error)
    return "failed", "".join(traceback.format_exception(error))


def judged_message(text: str) -> tuple[str, str]:
    """A message must say something, be short enough to be read, and be printable."""
    if not text.strip() or "Traceback (most recent call last)" in text:
        return "failed", f"this is no message for a user: {text!r}"
    if len(text) > LONGEST_MESSAGE:
        return "failed", f"a message of {len(text)} characters: {text[:300]!r}"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "failed", f"a message that cannot be printed: {text!r}"
    return "refused", text


# ---- Processes ------------------------------------------------------------------------------------------------------


def run_all(work: Iterable[Case], jobs: int, seen: Callable[[Outcome], None] = lambda outcome: None) -> Summary:
    """Carry out all cases in `jobs` processes (0: in this one). `seen` is called with each outcome."""
    summary = Summary()

    def add(outcome: Outcome) -> None:
        summary.add(outcome)
        seen(outcome)

    if jobs == 0:
        for case in work:
            add(carry_out(case))
        return summary
    waiting, folder = iter(work), tempfile.mkdtemp(prefix="fuzz-")
    workers = [Worker(folder) for _ in range(jobs)]
    try:
        for worker in workers:
            worker.give(next(waiting, None))
        while any(worker.case for worker in workers):
            busy = [worker for worker in workers if worker.case]
            connection.wait([worker.pipe for worker in busy], 0.5)
            for worker in busy:
                outcome = worker.outcome()
                if outcome:
                    add(outcome)
                    worker.give(next(waiting, None))
    finally:
        for worker in workers:
            worker.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return summary


class Worker:
    """A process that carries out one case after another; started anew when it dies or hangs.

    folder: where it keeps its files.
    """

    STARTING_SECONDS = 240.0  # for what the first case of a kind needs: imports, models, a run

    def __init__(self, folder) -> None:
        self.folder = str(folder)
        self.case: Case | None = None
        self.about = ""
        self.process = None
        self.proven = False  # it has ended a case
        self.kinds: set[str] = set()  # that it has begun

    def give(self, case: Case | None) -> None:
        self.case, self.about = case, ""
        if case is None:
            return
        allowed = LIMIT_SECONDS * PATIENCE
        if self.process is None:
            context = get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs, os.getpid(), self.folder), daemon=True)
            self.process.start()
            theirs.close()
            self.kinds, self.proven = set(), False
        if case.kind not in self.kinds:
            allowed += self.STARTING_SECONDS
        self.kinds.add(case.kind)
        self.deadline = time.monotonic() + allowed
        self.pipe.send(case)

    def outcome(self) -> Outcome | None:
        """The outcome of its case if there is one by now."""
        assert self.case is not None
        try:
            if self.pipe.poll():
                received = self.pipe.recv()
                if isinstance(received, str):
                    self.about = received
                    return None
                self.proven = True
                return received
        except (EOFError, OSError):
            code = self.process.exitcode
            self.stop()
            if not self.proven:
                raise RuntimeError(f"a worker died before its first case ended (exit code {code})") from None
            return Outcome(self.case, "failed", f"its process died (exit code {code})", self.about)
        if time.monotonic() > self.deadline:
            self.stop()
            return Outcome(self.case, "failed", "it hangs: its process was ended", self.about, LIMIT_SECONDS)
        return None

    def stop(self) -> None:
        if self.process is not None:
            self.pipe.close()
            self.process.kill()
            self.process.join()
            self.process = None


def serve(pipe, parent: int, folder: str) -> None:
    """What a worker runs."""
    from utils import die_with_parent

    die_with_parent(parent)
    tempfile.tempdir = folder
    import torch

    torch.set_num_threads(1)
    # What a library prints is not of interest, and would tear the progress bar.
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    if "FUZZ_STDERR" not in os.environ:
        os.dup2(quiet, 2)
    sys.stdout.flush()
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        pipe.send(carry_out(case, begun=pipe.send))
