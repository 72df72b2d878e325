"""Stopping early, and knowing which evaluation was the best."""

from __future__ import annotations

import math
from collections.abc import Collection

from checkpoint.step_folders import metric_mode
from losses import find_loss
from settings import Settings


def check_watched_metrics(config: Settings, evaluated: Collection[str]) -> None:
    """Refuse to watch a metric that no evaluation of this run has.

    Args:
        evaluated: names of the data sets of which held-out examples are evaluated.
    Raises:
        ValueError: early_stopping.metric or checkpoint.best_metric is of a data set without such examples.
    """
    of_all = find_loss(config.loss.name, config.loss.options).metric_names("eval", config.loss.options)
    for key, metric in (
        ("early_stopping.metric", config.early_stopping.metric),
        ("checkpoint.best_metric", config.checkpoint.best_metric),
    ):
        if metric is None or (metric in of_all and evaluated):
            continue
        if not any(metric == f"{each}/{name}" for each in of_all for name in evaluated):
            found = f"of {', '.join(evaluated)}" if evaluated else "there are none"
            raise ValueError(
                f"{key}={metric}: no evaluation has it, because it needs held-out examples: {found}. Choose another "
                f"metric, hold more out (data.test_fraction, n_eval_examples), or leave {key}=null."
            )


class EarlyStop:
    """Watches whether an evaluation metric got no better for `patience` evaluations."""

    def __init__(self, metric: str | None, patience: int, min_delta: float, mode: str | None):
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.sign = -1.0 if (mode or (metric and metric_mode(metric))) == "min" else 1.0
        self.best: float | None = None
        self.without = 0

    def update(self, metrics: dict[str, float]) -> bool:
        """Take in an evaluation; whether to stop now.

        Raises:
            ValueError: the evaluation has no such metric.
        """
        if self.metric is None or not metrics:
            return self.over
        if self.metric not in metrics:
            raise ValueError(
                f"early_stopping.metric={self.metric!r} is no metric of the evaluation; there are "
                f"{', '.join(sorted(metrics))}."
            )
        value = self.sign * metrics[self.metric]
        if not math.isnan(value) and (self.best is None or value > self.best + self.min_delta):
            self.best, self.without = value, 0
        else:
            self.without += 1
        return self.over

    @property
    def over(self) -> bool:
        return self.metric is not None and self.without >= self.patience

    @property
    def watched(self) -> tuple[str, str] | None:
        """(metric, "min" or "max"), if one is watched."""
        return (self.metric, "min" if self.sign < 0 else "max") if self.metric else None

    def is_best(self) -> bool:
        """Whether the last evaluation was the best so far."""
        return self.metric is not None and self.best is not None and self.without == 0

    def state(self) -> dict:
        return {"metric": self.metric, "sign": self.sign, "best": self.best, "without": self.without}

    def load_state(self, state: dict) -> None:
        """Go on from a checkpoint; one that watched another metric does not count for this one."""
        if (state["metric"], state["sign"]) == (self.metric, self.sign):
            self.best, self.without = state["best"], state["without"]
