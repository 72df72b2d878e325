"""The loggers of a run. Their order is that of each call."""

from __future__ import annotations

from report.background import in_background
from report.console import ConsoleLogger
from report.files import FileLogger
from report.logger import Logger
from report.mlflow_logger import MlflowLogger
from report.page_logger import PageLogger
from report.tensorboard_logger import TensorBoardLogger
from report.trackio_logger import TrackioLogger
from report.wandb_logger import WandbLogger

# Files come first: what the page and wandb read of them is complete by then. What waits for a network comes last: the
# files and the page should not wait with it.
LOGGERS: tuple[type[Logger], ...] = (
    FileLogger,
    ConsoleLogger,
    PageLogger,
    TensorBoardLogger,
    in_background(WandbLogger),
    in_background(MlflowLogger),
    in_background(TrackioLogger),
)
