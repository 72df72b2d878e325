"""Logs to trackio: on this machine (`trackio show`), or to a Hugging Face Space."""

from __future__ import annotations

import os
from typing import Any

from report.logger import Logger, RunInfo, asked_for


class TrackioLogger(Logger):
    """One trackio run, named after the run's folder, so that a resumed run goes on with it."""

    name = "trackio"

    @classmethod
    def wanted(cls, settings: dict[str, Any]) -> bool:
        return asked_for(cls.name, settings)

    def start(self, run: RunInfo) -> None:
        self.run, self.options = run, run.settings["trackio"]
        self.opened: Any = None

    def metrics(self, values: dict[str, int | float], examples: int, updates: int, marks: list[str]) -> None:
        self._open().log({**values, "examples": examples}, step=updates)

    def samples(self, rows: list[dict[str, Any]], examples: int, updates: int) -> None:
        import trackio

        names = [name for name in ("prompt", "policy", "reference") if any(row.get(name) is not None for row in rows)]
        import pandas

        table = pandas.DataFrame([{name: row.get(name) for name in names} for row in rows])
        self._open().log({"samples": trackio.Table(dataframe=table)}, step=updates)

    def finish(self, ok: bool, message: str | None) -> None:
        if self.opened is not None:
            self.opened.finish()

    def _open(self) -> Any:
        if self.opened is None:
            import trackio

            self.opened = trackio.init(
                project=self.options["project"],
                name=os.path.basename(os.path.normpath(self.run.run_dir)),
                space_id=self.options.get("space_id"),
                config=self.run.settings,
                resume="allow",
                embed=False,
            )
            self.run.show(f"trackio: trackio show --project {self.options['project']}")
        return self.opened
