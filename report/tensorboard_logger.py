"""Logs to TensorBoard: event files in the run's folder, for `tensorboard --logdir RUN_FOLDER`."""

from __future__ import annotations

import os
from typing import Any

import yaml

from report.formatting import well_formed
from report.logger import Logger, RunInfo, asked_for


class TensorBoardLogger(Logger):
    """Steps on its x axis count examples. A resumed run hides what was written after its checkpoint."""

    name = "tensorboard"

    @classmethod
    def wanted(cls, settings: dict[str, Any]) -> bool:
        return asked_for(cls.name, settings)

    def start(self, run: RunInfo) -> None:
        self.run = run
        self.writer: Any = None
        self.purge: int | None = None

    def load_state(self, state: dict[str, Any]) -> None:
        self.purge = int(state.get("examples", 0)) + 1

    def metrics(self, values: dict[str, int | float], examples: int, updates: int, marks: list[str]) -> None:
        writer = self._open()
        for name, value in values.items():
            writer.add_scalar(name, value, examples)

    def samples(self, rows: list[dict[str, Any]], examples: int, updates: int) -> None:
        for number, row in enumerate(rows):
            parts = [f"**{name}**\n\n    " + well_formed(row[name]).replace("\n", "\n    ")
                     for name in ("prompt", "policy", "reference") if row.get(name) is not None]  # fmt: skip
            self._open().add_text(f"samples/{number}", "\n\n".join(parts), examples)

    def finish(self, ok: bool, message: str | None) -> None:
        if self.writer is not None:
            self.writer.close()

    def _open(self) -> Any:
        """With the first record, so that a run which ends while it prepares leaves nothing."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = os.path.join(self.run.run_dir, "tensorboard")
            self.writer = SummaryWriter(folder, purge_step=self.purge)
            self.writer.add_text("settings", "    " + yaml.safe_dump(self.run.settings).replace("\n", "\n    "))
            self.run.show(f"tensorboard: tensorboard --logdir {folder}")
        return self.writer
