"""Metrics as sums and counts over distinct examples: added up, reduced over ranks once, divided last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from losses import LossOutput


@dataclass
class ExampleMetrics:
    """Metrics of E examples, without gradient.

    Attributes:
        values: float32 [E, metrics], in the order of `Loss.metric_names`.
        weights: float32 [E, metrics], 0 where a metric is not of that example; None where every one is of all.
    """

    values: torch.Tensor
    weights: torch.Tensor | None = None

    @classmethod
    def of(cls, inputs, output: LossOutput) -> ExampleMetrics:
        """The loss, what it reports, and what is known of its input whatever the loss."""
        own = inputs.metrics()
        named = {"loss": output.losses} | output.metrics | {name: own[name] for name in inputs.own_metrics}
        columns, weights, weighted = [], [], False
        for value in named.values():
            value, weight = value if isinstance(value, tuple) else (value, None)
            weighted |= weight is not None
            columns.append(value.detach().float())
            weights.append(torch.ones_like(columns[-1]) if weight is None else weight.detach().float())
        return cls(torch.stack(columns, dim=1), torch.stack(weights, dim=1) if weighted else None)

    def split(self, sizes: list[int]) -> list[ExampleMetrics]:
        """Those of the first `sizes[0]` examples, of the next `sizes[1]`, ..."""
        weights = [None] * len(sizes) if self.weights is None else self.weights.split(sizes)
        return [ExampleMetrics(*part) for part in zip(self.values.split(sizes), weights, strict=True)]


class MetricAccumulator:
    """Sums of metrics for each data set of a split, and how many examples they are of.

    Args:
        dataset_names: of the split, in the order in which batches number them.
        metric_names: what the columns of `ExampleMetrics` are called.

    Attributes:
        sums: [data sets, 2 * metrics]: a sum for each metric, then a count for each.
    """

    def __init__(self, dataset_names: Iterable[str], metric_names: tuple[str, ...], device: torch.device):
        self.dataset_names, self.metric_names = list(dataset_names), metric_names
        precision = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self.sums = torch.zeros(len(self.dataset_names), 2 * len(metric_names), device=device, dtype=precision)

    def add(self, datasets: torch.Tensor, metrics: ExampleMetrics) -> None:
        """Take in examples.

        Args:
            datasets: int64 [E], the data set of each.
        """
        values, weights = metrics.values, metrics.weights
        if weights is None:
            weights = torch.ones_like(values)
        else:
            values = torch.where(weights > 0, values * weights, 0.0)
        rows = torch.cat([values, weights], dim=1).to(self.sums)
        # A product with a one-hot matrix adds in a fixed order, which index_add on a GPU would not.
        members = torch.nn.functional.one_hot(datasets, len(self.sums)).to(self.sums)
        self.sums += members.T @ rows

    def by_name(self, total: torch.Tensor) -> dict[str, tuple[float, float]]:
        """Metric name -> (sum, count), of all data sets together and, if there are several, of each.

        Args:
            total: `sums` of all ranks, on the host.
        """
        parts = [("", total.sum(0))]
        if len(total) > 1:
            parts += [(f"/{name}", row) for name, row in zip(self.dataset_names, total)]
        named: dict[str, tuple[float, float]] = {}
        for suffix, row in parts:
            values, counts = row.reshape(2, -1).tolist()
            found = zip(self.metric_names, values, counts)
            named |= {name + suffix: (value, count) for name, value, count in found if count}
        return named
