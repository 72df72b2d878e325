"""Logs to the run's folder: metrics.jsonl, samples.jsonl and notices.jsonl, one JSON object a line.

    metrics.jsonl   {"examples", "updates", "time", <metric name>: number, ..., "marks"?: "loss spike: ..."}
    samples.jsonl   {"examples", "time", "prompt", "policy", "reference"?, "dataset"?}
    notices.jsonl   {"kind": "notice" | "counts" | "end", "time", ...}

`time` is in seconds since 1970. A number that is not finite becomes the string "NaN", "Infinity" or "-Infinity": JSON
has no such numbers, null would hide which one it was, and float() reads all three.

Written by hand because no logging library does these together: a line that a full disk does not take is kept and
written later, a kill leaves no half line, and a resumed run cuts the files to the byte at which its checkpoint was
made, so that it writes no line twice.
"""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any

from atomic_files import write_atomically
from report.logger import Logger, RunInfo

METRICS, SAMPLES, NOTICES = "metrics.jsonl", "samples.jsonl", "notices.jsonl"


class FileLogger(Logger):
    name = "files"

    def start(self, run: RunInfo) -> None:
        self.run = run
        os.makedirs(run.run_dir, exist_ok=True)
        self._metrics, self._samples, self._notices = (
            JsonLines(os.path.join(run.run_dir, name)) for name in (METRICS, SAMPLES, NOTICES)
        )
        earlier = read_json_lines(self._notices.path)
        self._texts = {row.get("text") for row in earlier if row.get("kind") == "notice"}
        self._counts = [{k: v for k, v in row.items() if k != "time"} for row in earlier if row.get("kind") == "counts"]

    def metrics(self, values: dict[str, int | float], examples: int, updates: int, marks: list[str]) -> None:
        record = {"examples": examples, "updates": updates, "time": now(), **values}
        self._append(self._metrics, record | ({"marks": "; ".join(marks)} if marks else {}))

    def samples(self, rows: list[dict[str, Any]], examples: int, updates: int) -> None:
        for row in rows:
            self._append(self._samples, {"examples": examples, "time": now(), **row})

    def notice(self, text: str, examples: int) -> None:
        if text not in self._texts:  # else written before the resume: notices are not cut back
            self._texts.add(text)
            self._append(self._notices, {"kind": "notice", "time": now(), "examples": examples, "text": text})

    def counts(self, dataset: str, split: str, counts: dict[str, int]) -> None:
        record = {"kind": "counts", "dataset": dataset, "split": split, "counts": counts}
        if record not in self._counts:
            self._counts.append(record)
            self._append(self._notices, record | {"time": now()})

    def state(self) -> dict[str, Any]:
        """How far the files are written and on disk, and the lines that the disk has not taken yet."""
        state: dict[str, Any] = {}
        for name, file in (("metrics", self._metrics), ("samples", self._samples)):
            self._sync(file)
            state |= {f"{name}_bytes": file.size, f"{name}_pending": file.pending}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Cut the files back to where the checkpoint left them. Notices stay: they are of the whole run."""
        for name, file in (("metrics", self._metrics), ("samples", self._samples)):
            # A state without sizes is of a run that could not start this logger: its lines are those of before.
            missing = file.truncate(state.get(f"{name}_bytes", file.size if state else 0))
            file.pending = state.get(f"{name}_pending", "")
            if missing:
                self.run.notice(
                    f"{os.path.basename(file.path)} is {missing:,} bytes shorter than at its checkpoint; "
                    "its last lines are lost"
                )

    def finish(self, ok: bool, message: str | None) -> None:
        self._append(self._notices, {"kind": "end", "time": now(), "ok": bool(ok), "message": message})
        for file in (self._metrics, self._samples, self._notices):
            self._sync(file)
            file.close()

    def _append(self, file: JsonLines, record: dict[str, Any]) -> None:
        try:
            restored = file.append(record)
            if restored:
                self._report(f"{os.path.basename(file.path)} {restored}")
        except OSError as error:
            self._report(
                f"{os.path.basename(file.path)} could not be written ({error.strerror or error}); "
                "its lines are kept in memory and tried again"
            )

    def _sync(self, file: JsonLines) -> None:
        try:
            file.sync()
        except OSError as error:
            self._report(f"{os.path.basename(file.path)} could not be synced to the disk ({error.strerror or error})")

    def _report(self, problem: str) -> None:
        """To the other loggers: a disk that does not take a line need not try to take this one."""
        self._texts.add(problem)
        self.run.notice(problem)


class JsonLines:
    """An append-only file of JSON lines. A write that fails leaves no torn line behind and is tried again with the
    next. A file that is removed or replaced while it is open is put back.

    Attributes:
        size: bytes of whole lines in the file; pending: lines that could not be written yet.
    """

    def __init__(self, path: str):
        self.path, self.pending = path, ""
        self._fd: int | None = None
        fd = self._open()
        self.size = os.fstat(fd).st_size
        self.truncate(os.pread(fd, self.size, 0).rfind(b"\n") + 1)  # a killed run may leave half a line

    def append(self, record: dict[str, Any]) -> str | None:
        """Returns what happened to the file meanwhile, in words, if it had to be put back.

        Raises OSError when the disk does; the record is not lost. Opens the file again if it was closed.
        """
        finite = {name: _json_number(value) for name, value in record.items()}
        self.pending += json.dumps(finite, allow_nan=False) + "\n"
        restored = self._put_back()
        self._write()
        return restored

    def _put_back(self) -> str | None:
        """Undo what others did to the file while it is open: its lines can still be read from what was removed."""
        if self._fd is None:
            return None
        here, size = os.fstat(self._fd), self.size
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            content = os.pread(self._fd, size, 0)
            write_atomically(self.path, content)
            self.close()
            self._open()
            return "was removed or replaced by others while the run writes it; it has been put back"
        if here.st_size < size:
            self.size = here.st_size
            os.lseek(self._fd, self.size, os.SEEK_SET)
            return f"was cut by others while the run writes it; {size - self.size:,} bytes of it are lost"
        return None

    def sync(self) -> None:
        """Force what is written to the disk, after another try of what is pending. Raises OSError."""
        if self.pending:
            try:
                self._write()
            except OSError:
                pass  # the disk is still full
        os.fsync(self._open())

    def truncate(self, size: int) -> int:
        """Cut to `size` bytes and drop what is pending; returns how many bytes the file is short of `size`."""
        missing = max(0, size - self.size)
        if size < self.size:
            os.ftruncate(self._open(), size)
            self.size = size
        self.pending = ""
        os.lseek(self._open(), self.size, os.SEEK_SET)
        return missing

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            os.lseek(self._fd, 0, os.SEEK_END)
        return self._fd

    def _write(self) -> None:
        fd, lines, done = self._open(), self.pending.encode(), 0
        try:
            while done < len(lines):
                done += os.write(fd, lines[done:])
        except OSError:
            os.ftruncate(fd, self.size)
            os.lseek(fd, self.size, os.SEEK_SET)
            raise
        self.size += done
        self.pending = ""


def now() -> float:
    return round(time.time(), 3)


def _json_number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def read_json_lines(path: str) -> list[dict]:
    """The objects of a JSON-lines file. A missing file is empty; a line that is not an object (cut by a kill) is left
    out."""
    rows = []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    rows.append(row)
    except OSError:
        pass
    return rows
