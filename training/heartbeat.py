"""Where each rank is, so that a collective that stalls can name the ranks that are missing."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from utils import PROJECT_DIR, write_atomically


class Heartbeat:
    """Each rank's place in the run, in a small file: the message about a stalled collective then names who is missing.

    Args:
        folder: in the run's folder, which all ranks see.
        patience: seconds in one place after which this rank reports who is missing: a little less than the time after
            which the collective itself fails, because some backends then end the process without a word.
    """

    def __init__(self, folder: str, rank: int, size: int, patience: float):
        self.folder, self.rank, self.size, self.patience = folder, rank, size, patience
        self.enabled = size > 1
        self.row: dict[str, Any] = {"place": "starting", "update": 0, "beats": 0}
        self.last, self.patient = time.monotonic(), True
        self.main_thread = threading.get_ident()
        self.closed = threading.Event()
        if self.enabled:
            os.makedirs(folder, exist_ok=True)
            self._clear()  # what a killed run left
            threading.Thread(target=self._watch, daemon=True, name="heartbeat").start()

    def at(self, place: str, update: int, patient: bool = False) -> None:
        """Note where this rank is: a few words, and the number of updates done. All ranks pass the same places.

        `patient`: what is done there may take longer than a collective may (a save, a pass over all data).
        """
        self.last, self.patient = time.monotonic(), patient
        self.row = {"place": place, "update": update, "beats": self.row["beats"] + 1}

    def _watch(self) -> None:
        # Writing is left to this thread: a step may take milliseconds, and the folder be on a slow network.
        written = reported = None
        while not self.closed.wait(min(1.0, self.patience / 8)):
            row, quiet = self.row, time.monotonic() - self.last
            if row is not written and quiet < self.patience / 2:
                self._write(row | {"time": time.time() - quiet})
                written = row
            elif quiet > self.patience / 2:
                self._write(row | {"time": time.time() - quiet} | self._standstill())
            if quiet > self.patience and not self.patient and reported is not row:
                reported = row
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
        return f"{row['place']}{where}, update {row['update']}, last seen {time.time() - row['time']:.0f} s ago"
