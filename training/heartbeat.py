"""Where each rank is, so that a collective or a save that stalls can name the ranks that are missing."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from typing import Any

from atomic_files import write_atomically
from report import streams
from utils import PROJECT_DIR

# A save that takes longer is reported: a process may be stopped, or the disk gone. Nothing else would ever report it.
SAVING, SAVE_SECONDS = "saving", 300.0
# A rank that stands still renews its file every second. Older by this much than one's own, it does not run.
SILENT_SECONDS = 15.0


class Heartbeat:
    """Each rank's place in the run, in a small file: the message about a stalled collective then names who is missing.

    Args:
        folder: in the run's folder, which all ranks see.
        patience: seconds in one place after which this rank reports who is missing: a little less than the time after
            which the collective itself fails, because some backends then end the process without a word.
    """

    def __init__(self, folder: str, rank: int, size: int, patience: float):
        self.folder, self.rank, self.size, self.patience = folder, rank, size, patience
        self.enabled = size > 1  # whether there are files; a world of one watches its saves only
        self.row: dict[str, Any] = {"place": "starting", "update": 0, "beats": 0}
        self.last, self.limit = time.monotonic(), math.inf
        self.main_thread = threading.get_ident()
        self.closed = threading.Event()
        if self.enabled:
            os.makedirs(folder, exist_ok=True)
            self._clear()  # what a killed run left
        threading.Thread(target=self._watch, daemon=True, name="heartbeat").start()

    def at(self, place: str, update: int, patient: bool = False) -> None:
        """Note where this rank is: a few words, and the number of updates done. All ranks pass the same places.

        `patient`: what is done there may take longer than a collective may (a pass over all data).
        """
        self._enter(place, update, math.inf if patient else self.patience)

    def saving(self, update: int) -> None:
        """Note that this rank saves: that may take long, but not for ever without a word."""
        self._enter(SAVING, update, SAVE_SECONDS)

    def _enter(self, place: str, update: int, limit: float) -> None:
        self.last, self.limit = time.monotonic(), limit
        self.row = {"place": place, "update": update, "beats": self.row["beats"] + 1}

    def _watch(self) -> None:
        # Writing is left to this thread: a step may take milliseconds, and the folder be on a slow network.
        written, reported, due = None, None, math.inf
        while not self.closed.wait(min(1.0, self.patience / 8, SAVE_SECONDS / 8)):
            row, quiet, limit = self.row, time.monotonic() - self.last, self.limit
            still = quiet > min(self.patience, limit) / 2
            if self.enabled and (still or row is not written):
                self._write(row | {"time": time.time() - quiet} | (self._standstill() if still else {}))
                written = row
            if row is not reported:
                reported, due = row, limit
            if quiet > due:
                due = 2 * quiet if row["place"] == SAVING else math.inf  # once more, after twice as long
                streams.write_error(self._complaint(row, quiet) + "\n")

    def _complaint(self, row: dict, quiet: float) -> str:
        if row["place"] != SAVING:
            return f"rank {self.rank} has waited {self.patience:.0f} s for other ranks. Missing: {self.missing()}."
        text = f"this save has taken {quiet:.0f} s so far; the disk may be slow, or its network gone."
        if self.enabled:
            text = f"rank {self.rank}: {text} Not done: {self.missing()}."
        return text

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
        furthest one; if all are as far, those whose process does not run, else those that do not wait for others."""
        seen, newest = {}, self._written(self.rank)
        for rank in range(self.size):
            try:
                with open(os.path.join(self.folder, f"rank-{rank}")) as file:
                    seen[rank] = json.load(file) | {"silent": newest - self._written(rank) > SILENT_SECONDS}
            except (OSError, ValueError):
                seen[rank] = None
        own = {"time": time.time() - (time.monotonic() - self.last), "waits": True, "silent": False}
        seen[self.rank] = self.row | own
        furthest = max(row["beats"] for row in seen.values() if row)
        lagging = [rank for rank, row in seen.items() if row is None or row["beats"] < furthest]
        lagging = lagging or [rank for rank, row in seen.items() if row["silent"]]
        lagging = lagging or [rank for rank, row in seen.items() if not row.get("waits", True)] or list(seen)
        return "; ".join(f"rank {rank}: {self._describe(seen[rank])}" for rank in lagging)

    def _written(self, rank: int) -> float:
        """When a rank wrote its file, by the clock of the file system; 0 if it has none."""
        try:
            return os.stat(os.path.join(self.folder, f"rank-{rank}")).st_mtime
        except OSError:
            return 0.0

    @staticmethod
    def _describe(row: dict | None) -> str:
        if row is None:
            return "no sign of life"
        where = f" ({row['where']})" if row.get("where") else ""
        silent = "its process is stopped or gone, " if row.get("silent") else ""
        return f"{silent}{row['place']}{where}, update {row['update']}, last seen {time.time() - row['time']:.0f} s ago"
