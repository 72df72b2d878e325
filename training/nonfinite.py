"""A loss or gradient that is not finite: its examples are named, and the run stops or skips the step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atomic_files import write_atomically
from data.batching import MicroBatch
from report.files import read_json_lines
from settings.schema import GuardSettings
from training.run_state import TrainState
from utils import World, gather_objects

FILE = "nonfinite.jsonl"

Seen = Sequence[tuple[MicroBatch, torch.Tensor]]


def offending_examples(seen: Seen, describe: Callable, world: World) -> tuple[list[dict], bool]:
    """What made a step not finite, over all ranks.

    Args:
        seen: (micro-batch, losses [E] of its examples) of this rank.
        describe: (prompt unit, pair) -> a row about it.
    Returns: the examples, and whether their losses show it; if only the gradient overflowed, any of the step's may have
    done it, and all are returned.
    """
    bad = []
    for batch, losses in seen:
        examples = [(unit, pair) for unit in batch.units for pair in unit.pairs]
        bad += [example for example, value in zip(examples, losses.tolist()) if not math.isfinite(value)]
    in_loss = any(gather_objects(bool(bad), world))
    if not in_loss:
        bad = [(unit, pair) for batch, _ in seen for unit in batch.units for pair in unit.pairs]
    rows = gather_objects([describe(unit, pair) for unit, pair in bad], world)
    return [row for part in rows for row in part], in_loss


@dataclass(frozen=True)
class NonFiniteGuard:
    """What happens to a step that is not finite.

    Args:
        settings: `config.guards`; datasets: the training data sets; run_dir: where nonfinite.jsonl is written.
    """

    settings: GuardSettings
    datasets: list
    tokenizer: Any
    run_dir: str
    world: World
    notice: Callable[[str], None]

    def stop_or_skip(self, seen: Seen, norm: float, state: TrainState) -> None:
        """Name the examples in nonfinite.jsonl, and end the run or let it go on.

        Args:
            seen: see `offending_examples`; norm: the gradient's; state: before the step, which is counted as skipped.
        Raises:
            FloatingPointError: the settings do not allow to skip it.
        """
        state.skipped += 1
        rows, in_loss = offending_examples(seen, self._describe, self.world)
        what = "loss" if in_loss else f"gradient (norm {norm})"
        names = ", ".join(f"{row['dataset']} row {row['row']}" for row in rows[:5]) + (" ..." if len(rows) > 5 else "")
        path = os.path.join(self.run_dir, FILE)
        message = (
            f"The {what} of update {state.updates + 1} is not finite: {names}. The optimizer did not step. "
            f"Texts: {path}."
        )
        if self.world.is_main:
            progress = {"examples": state.examples, "updates": state.updates}
            append_rows(path, [progress | row for row in rows], self.notice)
        most = self.settings.max_nonfinite_steps
        if self.settings.on_nonfinite == "skip" and state.skipped <= most:
            self.notice(f"{message} Skipped ({state.skipped} of at most {most}).")
            return
        raise FloatingPointError(
            f"{message} Look at these rows, lower lr, use float32, or set guards.on_nonfinite=skip "
            "guards.max_nonfinite_steps=N to go on without such steps."
        )

    def _describe(self, unit, pair: tuple[int, int]) -> dict:
        """Data set, row number, prompt, and chosen and rejected response of an example."""
        dataset, decode = self.datasets[unit.dataset], self.tokenizer.decode
        texts = {side: decode(unit.responses[k]) for side, k in zip(("chosen", "rejected"), pair) if k >= 0}
        if not texts:  # an example that is a whole prompt
            texts = {"responses": [decode(response) for response in unit.responses]}
        row = {"dataset": dataset.name, "row": int(dataset.rows[unit.group]), "prompt": decode(unit.prompt)}
        return row | texts


def append_rows(path: str, rows: list[dict], notice: Callable[[str], None]) -> None:
    """Append rows to a JSON-lines file. Called on one rank alone, so it must not raise where the others do not."""
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
    except OSError as problem:
        notice(f"{path} could not be written ({problem.strerror}).")


def forget_rows(run_dir: str, examples: int) -> None:
    """Drop the rows of nonfinite.jsonl of steps that a resumed run, which is at `examples`, takes again."""
    path = os.path.join(run_dir, FILE)
    rows = read_json_lines(path)
    kept = [row for row in rows if row.get("examples", 0) < examples]
    if len(kept) < len(rows):
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
