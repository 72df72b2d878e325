"""The loggers of a run. Their order is that of each call."""

from __future__ import annotations

from report.console import ConsoleLogger
from report.files import FileLogger
from report.logger import Logger
from report.page_logger import PageLogger
from report.wandb_logger import WandbLogger

# Files come first: what the page and wandb read of them is complete by then. wandb comes last: its end waits for the
# network, and the files and the page should not wait with it.
LOGGERS: tuple[type[Logger], ...] = (FileLogger, ConsoleLogger, PageLogger, WandbLogger)
