"""How a rank ended, and whose fault an error is: the user's, the code's, or only that another rank has gone."""

import errno
import os
import re
import signal
import time
import traceback
from dataclasses import dataclass

import utils

# A rank that was cut off from the others waits so long before it reports, so that torchrun or srun can end it first:
# the first message on the screen is then the one of the rank where the trouble began.
FOLLOWER_DELAY_SECONDS = 3.0


class RankFailure(RuntimeError):
    """A rank failed with something other than a mistake of the user's. `trace` is its traceback as text, without which
    the message says enough if it `is_explained`."""

    def __init__(self, message: str, trace: str = "", is_explained: bool = False):
        super().__init__(message)
        self.trace, self.is_explained = trace, is_explained


class CollectiveFailure(RuntimeError):
    """A collective operation failed; the message says which ranks it was waiting for."""


class ReportedMistake(ValueError):
    """A mistake of the user's that a rank reported; `trace` is the rank's traceback as text."""

    def __init__(self, message: str, trace: str):
        super().__init__(message)
        self.trace = trace


@dataclass
class Report:
    """How a rank ended: with a result, an exit code, or an error."""

    rank: int
    kind: str  # result | exit | error
    value: object = None
    message: str = ""
    trace: str = ""
    is_users: bool = False  # a ValueError raised on purpose by our own code, whose message is all the user needs
    is_explained: bool = False  # its message says enough without a traceback
    is_follower: bool = False  # the error of a rank that was waiting for another
    time: float = 0.0


def report_error(rank: int, error: BaseException) -> Report:
    trace = "".join(traceback.format_exception(error))
    return Report(
        rank,
        "error",
        message=str(error) or type(error).__name__,
        trace=trace,
        time=time.time(),
        is_users=is_users_mistake(error),
        is_explained=is_explained(error),
        is_follower=is_follower(error),
    )


def is_users_mistake(error: BaseException) -> bool:
    """Whether an error is a ValueError that our own code raised for the user to read, so that it needs no traceback."""
    if isinstance(error, ReportedMistake):
        return True
    return type(error) is ValueError and _is_ours(error)


def is_explained(error: BaseException) -> bool:
    """Whether an error's message says what happened and what to do, so that a traceback would only hide it."""
    if isinstance(error, RankFailure):
        return error.is_explained
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    written_by_us = type(error) is FloatingPointError or (type(error) is OSError and error.errno is None)
    return is_users_mistake(error) or isinstance(error, CollectiveFailure) or (written_by_us and _is_ours(error))


def _is_ours(error: BaseException) -> bool:
    """Whether our own code raised an error."""
    if error.__traceback__ is None:
        return True
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = os.path.abspath(frames[-1].filename)
    # A .venv may be inside the project.
    return raised_in.startswith(utils.PROJECT_DIR + os.sep) and "site-packages" not in raised_in


def is_follower(error: BaseException) -> bool:
    """Whether an error looks like that of a rank whose partner has gone."""
    import torch.distributed as dist

    words = r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting|recvValue failed"
    if isinstance(error, CollectiveFailure):
        return True
    kinds = tuple(kind for kind in (getattr(dist, "DistError", None), getattr(dist, "DistBackendError", None)) if kind)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and bool(re.search(words, str(error), re.I)))


def describe_death(code: int) -> str:
    """Why a process may have ended without a report, from its exit code."""
    if code >= 0:
        return f"its process ended without a result (exit code {code})"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    why = {
        "SIGKILL": ": most likely the system ran out of memory, or somebody killed it",
        "SIGSEGV": ": a crash in native code",
        "SIGBUS": ": most likely shared memory or disk is full",
    }.get(name, "")
    return f"its process was ended by {name}{why}"
