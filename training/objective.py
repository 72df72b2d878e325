"""What is minimised: the loss of the policy's log-probs, compared with the reference's where the loss needs one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from data.batching import MicroBatch
from losses import Loss
from modeling.reference import Reference
from training.metrics import ExampleMetrics, MetricAccumulator


@dataclass
class Objective:
    """A loss with its options, and the models that it is of.

    Attributes:
        updates: how many the policy has had.
        reference: None where the loss needs none; its log-probs then count as 0.
    """

    loss: Loss
    options: dict[str, Any]
    policy: torch.nn.Module
    updates: Callable[[], int]
    reference: Reference | None = None

    def __call__(self, split: str, batch: MicroBatch) -> tuple[torch.Tensor, ExampleMetrics]:
        """Losses of a micro-batch's examples, [E] with gradient, and their metrics without; split "train" or "eval"."""
        policy = self.policy.response_logps(batch)
        if self.reference is None:
            reference = torch.zeros_like(policy)
        else:
            reference = self.reference.logps(split, batch, policy.detach() if self.updates() == 0 else None)
        inputs = self.loss.inputs.select(policy, reference, batch)
        output = self.loss(inputs, **self.options)
        return output.losses, ExampleMetrics.of(self.loss, inputs, output)

    @property
    def reference_model(self) -> torch.nn.Module | None:
        """The reference where it is a model beside the policy (reference.mode=online)."""
        return self.reference.model if self.reference else None

    @property
    def reference_is_policy(self) -> bool:
        """Whether the only model of the reference is the policy before its first update."""
        return self.reference is not None and self.reference.model is None

    def accumulator(self, split: str, dataset_names: list[str], device: torch.device) -> MetricAccumulator:
        """For the metrics of a split."""
        return MetricAccumulator(dataset_names, self.loss.metric_names(split), device)
