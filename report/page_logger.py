"""Writes report.html (report/page.py) when a run ends."""

from __future__ import annotations

import os

from report.files import METRICS
from report.logger import Logger, RunInfo


class PageLogger(Logger):
    name = "report.html"

    def start(self, run: RunInfo) -> None:
        self.run = run

    def finish(self, ok: bool, message: str | None) -> None:
        if not os.path.getsize(os.path.join(self.run.run_dir, METRICS)):
            return  # a run that ended before its first line has nothing to look at
        try:
            from report import page  # its templates are not needed before the end

            self.run.show(f"report: {page.write_report(self.run.run_dir)}")
        except Exception as error:
            self.run.notice(f"report.html could not be written: {type(error).__name__}: {error}")
