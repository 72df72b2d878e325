"""Checks this machine's GPU, or its CPU, with the project as it is: `scripts/check_gpu --help`.

Each section is a generator of rows. On a GPU it runs in a process of its own, because an error of the device ends
whatever else the process does there; a row is handed over as one line of JSON, and the page is written anew after each.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator

from benchmarks.pages import FOLDER, ROOT, Report, describe, version_of_code

SECTIONS = ("environment", "kernels", "precision", "determinism", "recompiles", "memory", "speed")
# Modules are imported when their section runs, so that one that is missing here costs that section only.
MODULE_OF = {"environment": "rates", "kernels": "kernel_checks", "speed": "speed_checks"}
OTHERS = "training_checks"


def rows_here(section: str, small: bool) -> Iterator[dict]:
    """The rows of a section, computed in this process. What it raises becomes a row that failed."""
    try:
        module = importlib.import_module(f"benchmarks.{MODULE_OF.get(section, OTHERS)}")
        rows = getattr(module, section)(small)
        while True:
            with contextlib.redirect_stdout(io.StringIO()):  # what trainers report of their runs
                row = next(rows, None)
            if row is None:
                return
            yield row
    except ModuleNotFoundError as problem:
        text = f"{problem.name} is not installed: pip install -r requirements.txt"
        yield {"note": text, "ok": False}
    except Exception as problem:
        traceback.print_exc()
        text = (str(problem).strip().splitlines() or [""])[0]
        yield {"note": f"{type(problem).__name__}: {text}"[:300], "ok": False}


def rows_apart(section: str, seconds: float) -> Iterator[dict]:
    """The same from a process of its own, which is ended with all that it has started when the time is over."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.check_gpu", "--rows-of", section],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        cut = threading.Event()

        def end() -> None:
            cut.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(max(1.0, seconds), end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("ROW "):
                    yield json.loads(line.removeprefix("ROW "))
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if cut.is_set():
            yield {"note": "cut: the time is over (--minutes)", "ok": None}
        elif code:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [""])[-1]
            yield {"note": f"ended with exit code {code}: {last}"[:300], "ok": False}


def run(sections: list[str], minutes: float, small: bool, report: Report) -> None:
    """All sections in turn; the page is written after each row."""
    until = time.monotonic() + 60 * minutes
    for section in sections:
        print(f"\n{section}", flush=True)
        left = until - time.monotonic()
        if left <= 0:
            rows: Iterator[dict] = iter([{"note": "not run: the time is over (--minutes)", "ok": None}])
        else:
            rows = rows_here(section, small) if small else rows_apart(section, left)
        for row in rows:
            report.add(section, row)
            print("  " + describe(row), flush=True)
        report.write()


def explanations() -> dict[str, str]:
    """What each section's table shows, with its tolerances."""
    from benchmarks import kernel_checks, speed_checks, training_checks

    return {"kernels": kernel_checks.EXPLANATION, **training_checks.EXPLANATIONS, "speed": speed_checks.EXPLANATION}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/check_gpu",
        description="Checks that training is right on this machine's GPUs, and measures how fast it is beside TRL. "
        "Exit code 0: all checks hold; 1: those that do not are listed at the end.",
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--minutes", type=float, default=60, help="what is not done by then is left out (default 60)")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU: tries the checks themselves")
    parser.add_argument("--out", help="folder of the page (default docs/benchmarks; with --cpu no page is written)")
    parser.add_argument("--rows-of", choices=SECTIONS, help=argparse.SUPPRESS)  # a section's own process
    options = parser.parse_args(arguments)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from benchmarks.rates import gpu, hardware

    if options.rows_of:
        for row in rows_here(options.rows_of, small=False):
            print("\nROW " + json.dumps(row), flush=True)
        return 0
    if not options.cpu and not gpu():
        print("error: torch sees no CUDA device here; --cpu tries the checks on the CPU", file=sys.stderr)
        return 2
    name = hardware()
    date = datetime.date.today().isoformat()
    card = "cpu" if options.cpu else re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    folder = options.out or (None if options.cpu else FOLDER)
    path = os.path.join(folder, f"{date}-gpu-{card}" if not options.cpu else f"{date}-check-cpu") if folder else None
    report = Report(f"{name}; commit {version_of_code()}; {date}", path, explanations())
    run([section for section in SECTIONS if section in options.only], options.minutes, options.cpu, report)
    if path:
        print(f"\nwritten: {path}.md and .json")
    print(report.verdict())
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
