"""What a run says: the console, metrics.jsonl, samples.jsonl, notices.jsonl and wandb.

Rank 0 reports, the others are silent. Nothing here averages, decides or throttles: it writes down what the trainer
hands over. Nothing here may end a training run either: a full disk or a failing wandb is said once and survived.

The files hold one JSON object a line:

    metrics.jsonl   {"examples", "updates", "time", <metric name>: number, ..., "marks"?: "loss spike: ..."}
    samples.jsonl   {"examples", "time", "prompt", "policy", "reference"?, "dataset"?}
    notices.jsonl   {"kind": "notice" | "counts" | "end", "time", ...}

`time` is in seconds since 1970. A number that is not finite becomes the string "NaN", "Infinity" or "-Infinity": JSON
has no such numbers, null would hide which one it was, and float() reads all three.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from report.formatting import SHORT_NAMES, console_line, duration, excerpt, on_terminal, printable, short
from report.wandb_run import WandbRun
from utils import read_json_lines

PLAIN_INTERVAL = 60.0  # seconds of silence, after which a long loop without a bar says how far it is


class Reporter:
    """The voice of a run. Make one on every rank; where `world.rank` is not 0 all methods do nothing.

    Args:
        config: the resolved configuration, a DictConfig or a plain dict.
        run_dir: the run's folder; files there are appended to. A resumed run calls `load_state` before it reports
            anything.
        world: anything with a `rank`; None means rank 0.
        total_examples: examples of the whole run, for percentages and the time left.
        group: wandb group; jobs of a sweep share one. Null leaves it to `wandb.group` in the config or WANDB_RUN_GROUP.
    """

    def __init__(
        self, config: Any, run_dir: str, world: Any = None, total_examples: int | None = None, group: str | None = None
    ):
        self.silent = world is not None and world.rank != 0
        self.run_dir, self.total_examples = str(run_dir), total_examples
        self.examples = self.updates = 0
        self.notices: list[str] = []  # all of this run's, those before a resume included
        if self.silent:
            return
        os.makedirs(self.run_dir, exist_ok=True)
        self._metrics = _JsonLines(os.path.join(self.run_dir, "metrics.jsonl"))
        self._samples = _JsonLines(os.path.join(self.run_dir, "samples.jsonl"))
        self._notices = _JsonLines(os.path.join(self.run_dir, "notices.jsonl"))
        self._said: set[str] = set()
        self.notices = [row["text"] for row in read_json_lines(self._notices.path) if row.get("kind") == "notice"]
        self._bars: list[Progress] = []
        self._last_line = time.monotonic()
        self._spikes = SpikeWatch(read_json_lines(self._metrics.path))
        self._finished = False
        self._wandb = WandbRun(plain(config), self.run_dir, group, self.notice)
        self._wandb_started = False

    # -- what a run reports
    # ----------------------------------------------------------------------------------------------

    def log(self, metrics: dict[str, Any], examples: int, updates: int) -> None:
        """Write one line of metrics: to the file, to wandb, and in short to the console.

        Values are numbers or what float() takes (a tensor with one element, a numpy scalar). A training loss or
        gradient norm far outside what the last lines had is marked, in the file under `marks` and on the console.
        """
        if self.silent:
            return
        self.examples, self.updates = int(examples), int(updates)
        values = {name: _number(value) for name, value in metrics.items()}
        marks = self._spikes.check(values)
        record = {"examples": self.examples, "updates": self.updates, "time": round(time.time(), 3), **values}
        self._append(self._metrics, record | ({"marks": "; ".join(marks)} if marks else {}))
        self._start_wandb()
        self._wandb.log(values, self.examples, self.updates)
        line = console_line(values, self.examples, self.total_examples)
        if line:
            self._print(line + "".join(f"  ! {mark}" for mark in marks))

    def samples(self, examples: int, rows: list[dict[str, Any]], show: int = 2) -> None:
        """Write samples: {prompt, policy, reference (None without a reference), dataset} a row; `show` of them as
        console excerpts."""
        if self.silent:
            return
        self._start_wandb()
        for row in rows:
            self._append(self._samples, {"examples": int(examples), "time": round(time.time(), 3), **row})
        self._wandb.samples([{"examples": int(examples), **row} for row in rows], self.updates)
        for row in rows[:show]:
            self._print(
                f"sample at {examples:,} examples",
                *(
                    f"  {name + ':':<10} {excerpt(row[name], end=name == 'prompt')}"
                    for name in ("prompt", "policy", "reference")
                    if row.get(name) is not None
                ),
            )

    def notice(self, text: str) -> None:
        """Say something a user should know, once however often it comes up, and keep it for the report."""
        if self.silent or text in self._said:
            return
        self._said.add(text)
        self._print(f"note: {text}")
        if text not in self.notices:  # a resumed run says it again on its console, but the file has it
            self.notices.append(text)
            self._append(
                self._notices,
                {"kind": "notice", "time": round(time.time(), 3), "examples": self.examples, "text": text},
            )

    def counts(self, dataset: str, split: str, counts: dict[str, int]) -> None:
        """Record how many rows of a data set were read, dropped (by reason) and cut, and show what is not zero."""
        if self.silent:
            return
        counts = {name: int(value) for name, value in counts.items()}
        shown = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in counts.items() if value)
        self._print(f"data: {dataset} {split}: {shown or 'empty'}")
        record = {"kind": "counts", "dataset": dataset, "split": split, "counts": counts}
        known = ({name: row.get(name) for name in record} for row in read_json_lines(self._notices.path))
        if record not in known:
            self._append(self._notices, record | {"time": round(time.time(), 3)})

    def progress(
        self, total: int | None, description: str, unit: str = "it", initial: int = 0, leave: bool = False
    ) -> Progress:
        """A progress bar as a context manager: `bar.update(n, tokens_per_second=..., loss=...)`. Without a terminal, an
        occasional line."""
        return Progress(self, total, description, unit, initial, leave)

    def finish(self, ok: bool, message: str | None = None) -> None:
        """End the report: close the wandb run as succeeded or failed and write report.html. Never raises; a second call
        does nothing."""
        if self.silent or self._finished:
            return
        self._finished = True
        for bar in list(self._bars):
            bar.close()
        if message:
            self._print(message)
        self._append(self._notices, {"kind": "end", "time": round(time.time(), 3), "ok": bool(ok), "message": message})
        try:
            if self._metrics.sync():  # a run that ended before its first line has nothing to look at
                from report import page

                self._print(f"report: {page.write_report(self.run_dir)}")
        except Exception as error:  # a report that fails must not turn a finished run into a failed one
            self.notice(f"report.html could not be written: {type(error).__name__}: {error}")
        self._wandb.finish(ok)
        for file in (self._metrics, self._samples, self._notices):
            file.close()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.finish(ok=error is None, message=None if error is None else f"stopped by {kind.__name__}: {error}")

    # -- exact resume
    # ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: how far the files are written (and on disk: they are synced first), and the wandb
        run's id."""
        if self.silent:
            return {}
        files = {}
        for name, file in (("metrics", self._metrics), ("samples", self._samples)):
            try:
                files[f"{name}_bytes"] = file.sync()
            except OSError as error:
                self.notice(
                    f"{os.path.basename(file.path)} could not be synced to the disk ({error.strerror or error})"
                )
                files[f"{name}_bytes"] = file.size
            files[f"{name}_pending"] = file.pending
        return {**files, "examples": self.examples, "updates": self.updates, "wandb_id": self._wandb.id}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Cut the files back to where a checkpoint left them, so that a resumed run writes no line twice. None or {} is
        the start of the run, for one that died before its first checkpoint. Notices stay: they are said once a run."""
        if self.silent:
            return
        state = state or {}
        for name, file in (("metrics_bytes", self._metrics), ("samples_bytes", self._samples)):
            missing = file.truncate(state.get(name, 0))
            file.pending = state.get(name.replace("bytes", "pending"), "")
            if missing:
                self.notice(
                    f"{os.path.basename(file.path)} is {missing:,} bytes shorter than the checkpoint says; "
                    "its last lines are lost"
                )
        self.examples, self.updates = state.get("examples", 0), state.get("updates", 0)
        self._spikes = SpikeWatch(read_json_lines(self._metrics.path))
        self._start_wandb()
        self._wandb.rewind(state.get("wandb_id"), list(read_json_lines(self._samples.path)))

    def _start_wandb(self) -> None:
        """Not before there is something to send: a run that ends while its weights are loaded leaves no wandb run."""
        if self._wandb_started:
            return
        self._wandb_started = True
        self._wandb.start(list(read_json_lines(self._samples.path)))
        if self._wandb.where:
            self._print(self._wandb.where)

    # -- plumbing
    # --------------------------------------------------------------------------------------------------------

    def _append(self, file: _JsonLines, record: dict[str, Any]) -> None:
        try:
            file.append(record)
        except OSError as error:
            name, why = os.path.basename(file.path), error.strerror or error
            text = f"{name} could not be written ({why}); its lines are kept in memory and tried again"
            if text not in self._said:
                self._said.add(text)
                self._print(f"note: {text}")

    def _print(self, *lines: str) -> None:
        self._last_line = time.monotonic()
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        for line in lines:
            line = printable(line).encode(encoding, "replace").decode(encoding)
            try:
                tqdm.write(line, file=sys.stdout)  # steps around the bars
                sys.stdout.flush()
            except (OSError, ValueError):  # a closed pipe or terminal: the run goes on, its files have everything
                pass


class Progress:
    """A bar on a terminal; elsewhere a plain line now and then, if nothing else was printed meanwhile."""

    def __init__(self, reporter: Reporter, total: int | None, description: str, unit: str, initial: int, leave: bool):
        self.reporter, self.total, self.description, self.unit = reporter, total, description, unit
        self.done, self.bar = initial, None
        self.initial, self.started = initial, time.monotonic()
        if reporter.silent:
            return
        reporter._bars.append(self)
        if on_terminal(sys.stderr):
            self.bar = tqdm(
                total=total,
                desc=description,
                unit=f" {unit}",
                initial=initial,
                leave=leave,
                file=sys.stderr,
                dynamic_ncols=True,
                mininterval=0.25,
            )

    def update(self, n: int = 1, **postfix: Any) -> None:
        """Advance by n; numbers in `postfix` are shown at the end of the bar."""
        self.done += n
        if self.reporter.silent:
            return
        words = ", ".join(f"{SHORT_NAMES.get(name, name)} {short(_number(value))}" for name, value in postfix.items())
        if self.bar is not None:
            if words:
                self.bar.set_postfix_str(words, refresh=False)
            self.bar.update(n)
        elif time.monotonic() - self.reporter._last_line > PLAIN_INTERVAL:
            rate = (self.done - self.initial) / max(time.monotonic() - self.started, 1e-9)
            share = f"/{self.total:,} ({self.done / self.total:.0%})" if self.total else ""
            line = f"{self.description}: {self.done:,}{share}, {short(rate)} {self.unit}/s"
            if self.total and rate > 0:
                line += f", {duration((self.total - self.done) / rate)} left"
            self.reporter._print(line + (f", {words}" if words else ""))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if not self.reporter.silent and self in self.reporter._bars:
            self.reporter._bars.remove(self)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class SpikeWatch:
    """Marks a training loss or gradient norm far above what the last lines had, or not finite.

    "Far" is beyond the median by 8 robust standard deviations (1.4826 * median absolute deviation) and by a factor, so
    that neither the usual noise of small batches nor a quiet stretch sets it off. Its memory is the tail of
    metrics.jsonl, so a resumed run marks the same lines.
    """

    FACTORS = {"loss/train": 1.5, "grad_norm": 4.0}
    WINDOW, LEAST = 50, 10

    def __init__(self, history: Iterable[dict[str, Any]] = ()):
        self.recent = {name: deque(maxlen=self.WINDOW) for name in self.FACTORS}
        for record in history:
            self._remember(record)

    def _remember(self, record: dict[str, Any]) -> None:
        for name, recent in self.recent.items():
            if isinstance(record.get(name), (int, float)) and math.isfinite(record[name]):
                recent.append(float(record[name]))

    def check(self, values: dict[str, float]) -> list[str]:
        marks = []
        for name, recent in self.recent.items():
            value, label = values.get(name), "loss" if name == "loss/train" else "gradient norm"
            if value is None:
                continue
            if not math.isfinite(value):
                marks.append(f"{label} is {value}")
            elif len(recent) >= self.LEAST:
                median = statistics.median(recent)
                deviation = 1.4826 * statistics.median(abs(x - median) for x in recent)
                if value > median + 8 * deviation and value > median + (self.FACTORS[name] - 1) * abs(median):
                    marks.append(
                        f"{label} spike: {short(value)}, median of the last {len(recent)} lines {short(median)}"
                    )
        self._remember(values)
        return marks


class _JsonLines:
    """An append-only file of JSON lines. A write that fails leaves no torn line behind and is tried again with the
    next."""

    def __init__(self, path: str):
        self.path = path
        self.pending = ""  # lines that could not be written yet
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        size = os.fstat(self._fd).st_size
        whole = os.pread(self._fd, size, 0).rfind(b"\n") + 1  # a killed run may leave half a line
        self.size = size
        self.truncate(whole)

    def append(self, record: dict[str, Any]) -> None:
        """Raises OSError when the disk does; the record is not lost."""
        finite = {name: _json_number(value) for name, value in record.items()}
        self.pending += json.dumps(finite, allow_nan=False) + "\n"
        self._write()

    def _write(self) -> None:
        lines, done = self.pending.encode(), 0
        try:
            while done < len(lines):
                done += os.write(self._fd, lines[done:])
        except OSError:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.size += done
        self.pending = ""

    def sync(self) -> int:
        """Bytes that are surely on disk."""
        if self.pending:
            try:
                self._write()
            except OSError:
                pass  # the disk is still full
        os.fsync(self._fd)
        return self.size

    def truncate(self, size: int) -> int:
        """Cut to `size` bytes; returns how many bytes the file is short of it."""
        missing = max(0, size - self.size)
        if size < self.size:
            os.ftruncate(self._fd, size)
            self.size = size
        self.pending = ""
        os.lseek(self._fd, self.size, os.SEEK_SET)
        return missing

    def close(self) -> None:
        os.close(self._fd)


# -- reading and writing ----------------------------------------------------------------------------------------------


def plain(config: Any) -> dict[str, Any]:
    """A resolved, plain dict of a DictConfig or mapping."""
    try:
        from omegaconf import OmegaConf

        if OmegaConf.is_config(config):
            return OmegaConf.to_container(config, resolve=True)
    except ImportError:
        pass
    return dict(config or {})


def _number(value: Any) -> int | float:
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, int) else float(value)


def _json_number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
