"""The standard streams of a process, which may be closed before it starts or while it runs."""

import contextlib
import os
import sys

STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """Put the null device in the place of standard streams that are closed (`>&-`). Python has None for them, and the
    next file to be opened would get their number, and with it all that libraries write there."""
    closed = [(name, mode) for name, mode in STREAMS if getattr(sys, name) is None]
    for number in range(3):  # first all three, or one that is opened for the others would get the next one's number
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
    for name, mode in closed:
        setattr(sys, name, open(os.devnull, mode))


def flush_streams() -> None:
    """Write out what is buffered. What a closed pipe or terminal does not take is dropped, for Python would try again
    as it ends, and turn the exit code into one of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_out(text: str) -> None:
    """Write to stdout, if it is still there, with ? for what its encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()


def write_error(text: str) -> None:
    """Write to stderr, if it is still there."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
