"""What is minimised: the loss of the policy's log-probs, compared with the reference's where the loss needs one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from data.batching import MicroBatch
from losses import Loss
from modeling.reference import Reference
from modeling.scoring import sum_responses
from parallel.placement import Placement
from training.metrics import ExampleMetrics, MetricAccumulator
from training.token_numbers import TOKEN_NUMBERS

# Of a micro-batch: gradient of the step's loss with respect to its log-probs [K], losses [E], metrics.
Found: TypeAlias = tuple[torch.Tensor, torch.Tensor, ExampleMetrics]


@dataclass
class ScoredBatch:
    """What a step-wide loss needs of a micro-batch, on the host; field by field as in MicroBatch.

    Attributes:
        policy, reference: [K], log-probs of the responses.
        mismatched_keys: (data set, number) of the responses in `mismatched`, the same wherever their prompt comes.
    """

    policy: torch.Tensor
    reference: torch.Tensor
    lengths: torch.Tensor
    scores: torch.Tensor
    pairs: torch.Tensor
    weights: torch.Tensor
    group: torch.Tensor
    preferences: torch.Tensor
    mismatched: torch.Tensor
    n_units: int
    mismatched_keys: list[tuple[int, int]]

    @classmethod
    def of(cls, batch: MicroBatch, policy: torch.Tensor, reference: torch.Tensor) -> ScoredBatch:
        names = [each.name for each in dataclasses.fields(cls)]
        own = {name: getattr(batch, name).cpu() for name in names if name in vars(batch)}
        sums = {"policy": policy.detach().cpu(), "reference": reference.detach().cpu()}
        keys = [batch.keys[index] for index in own["mismatched"].tolist()]
        return cls(**sums, n_units=len(batch.units), mismatched_keys=keys, **own)

    @classmethod
    def join(cls, parts: Sequence[ScoredBatch]) -> ScoredBatch:
        """All of them as one, indices shifted."""
        before, units, shifted = 0, 0, []
        seen: set[tuple[int, int]] = set()
        for part in parts:
            # A prompt whose responses lie in several passes of an evaluation brings its mismatched one in each.
            new = [number for number, key in enumerate(part.mismatched_keys) if key not in seen]
            seen.update(part.mismatched_keys)
            shifted.append(
                dataclasses.replace(
                    part,
                    pairs=torch.where(part.pairs >= 0, part.pairs + before, part.pairs),
                    preferences=part.preferences + before,
                    mismatched=part.mismatched[new] + before,
                    group=part.group + units,
                )
            )
            before, units = before + len(part.lengths), units + part.n_units
        tensors = {
            each.name: torch.cat([getattr(part, each.name) for part in shifted])
            for each in dataclasses.fields(cls)
            if each.name not in ("n_units", "mismatched_keys")
        }
        return cls(**tensors, n_units=units, mismatched_keys=sorted(seen))


@dataclass
class Objective:
    """A loss with its options, and the models that it is of.

    Attributes:
        updates: how many the policy has had.
        placement: which ranks take different examples.
        memory: what the loss keeps from step to step (losses/registry.py).
        reference: None where the loss needs none; its log-probs then count as 0.
    """

    loss: Loss
    options: dict[str, Any]
    policy: torch.nn.Module
    updates: Callable[[], int]
    placement: Placement
    memory: Callable[[], dict[str, float]] = dict
    reference: Reference | None = None
    # Of a step-wide loss's training step: each of its micro-batches' gradients, losses and metrics, and its memory.
    _ahead: list[Found] = field(default_factory=list)
    next_memory: dict[str, float] = field(default_factory=dict)

    def __call__(self, split: str, batch: MicroBatch) -> tuple[torch.Tensor, ExampleMetrics]:
        """Losses of a micro-batch's examples, [E] with gradient, and their metrics without; split "train" or "eval".

        A step-wide loss takes the micro-batches of a training step in the order in which `look_ahead` had them.
        """
        if self.loss.step_wide and split == "train":
            slope, losses, metrics = self._ahead.pop(0)
            total = (self.policy.response_logps(batch) * slope.to(batch.lengths.device)).sum()
            # The losses' own values, and in sum the gradient that the whole step gives them.
            return losses.to(total.device) + (total - total.detach()) / len(losses), metrics
        policy, reference, numbers = self.score(split, batch)
        inputs = self.loss.inputs.select(policy, reference, batch, numbers)
        output = self.loss(inputs, **self.options)
        output.losses = output.losses * batch.weights
        return output.losses, ExampleMetrics.of(inputs, output)

    def idle_pass(self, idle_batch: MicroBatch) -> torch.Tensor:
        """What a rank without examples computes in a training pass, so that collectives match: 0, with gradients."""
        if self.loss.step_wide:  # the reference was asked when the step was looked at ahead
            return self.policy.response_logps(idle_batch).sum() * 0
        policy, _, numbers = self.score("train", idle_batch)
        return sum((part.sum() for part in numbers), policy.sum()) * 0

    def score(self, split: str, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Log-probs [K] of a micro-batch's responses: the policy's, with gradient, and the reference's; and the numbers
        of their tokens that the loss's input needs."""
        needs = self.loss.inputs.needs_tokens
        if not needs:
            policy = self.policy.response_logps(batch)
            return policy, self._reference_logps(split, batch, policy), ()
        found = TOKEN_NUMBERS[needs](self.policy, self.reference_model, batch)
        policy = sum_responses(found.policy, batch)
        if found.reference is None:
            return policy, self._reference_logps(split, batch, policy), found.numbers
        return policy, sum_responses(found.reference, batch), found.numbers

    def _reference_logps(self, split: str, batch: MicroBatch, policy: torch.Tensor) -> torch.Tensor:
        if self.reference is None:
            return torch.zeros_like(policy)
        return self.reference.logps(split, batch, policy.detach() if self.updates() == 0 else None)

    # ---- Losses of a whole step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def look_ahead(self, batches: Sequence[MicroBatch | None], idle_batch: MicroBatch) -> None:
        """Before the passes of a training step: of a step-wide loss, score all its micro-batches on all ranks, and find
        the loss of each and its gradient with respect to each log-prob.

        The passes then compute the log-probs once more. So a step costs a forward pass more, but no memory.
        """
        if not self.loss.step_wide:
            return
        scored = []
        for batch in batches:
            if batch is None:
                self.score("train", idle_batch)
                continue
            batch = batch.to(self.placement.device)
            scored.append(ScoredBatch.of(batch, *self.score("train", batch)[:2]))
        self.placement.reshard_after_eval(self.policy, self.reference_model)
        self._ahead, self.next_memory = self.of_all(scored)

    def of_all(self, scored: list[ScoredBatch]) -> tuple[list[Found], dict[str, float]]:
        """A step-wide loss of the micro-batches of all ranks together.

        Returns: for each of this rank's, the gradient [K] of the summed losses with respect to its log-probs, the
        losses [E] and the metrics, on the host; and the loss's new memory.
        """
        ranks = self.placement.gather(scored)
        parts = [part for rank in ranks for part in rank]
        joined = ScoredBatch.join(parts)
        policy = joined.policy.requires_grad_()
        memory: dict[str, Any] = {"memory": self.memory()} if self.loss.memory else {}
        with torch.enable_grad():
            inputs = self.loss.inputs.select(policy, joined.reference, joined)
            output = self.loss(inputs, **self.options, **memory)
            output.losses = output.losses * joined.weights
            (slope,) = torch.autograd.grad(output.losses.sum(), policy)
        metrics = ExampleMetrics.of(inputs, output)
        examples = [len(part.pairs) for part in parts]
        found = list(
            zip(
                slope.split([len(part.lengths) for part in parts]),
                output.losses.detach().split(examples),
                metrics.split(examples),
                strict=True,
            )
        )
        first = sum(len(rank) for rank in ranks[: self.placement.data_rank])
        return found[first : first + len(scored)], {name: float(value) for name, value in output.memory.items()}

    @property
    def reference_model(self) -> torch.nn.Module | None:
        """The reference where it is a model beside the policy (reference.mode=online)."""
        return self.reference.model if self.reference else None

    @property
    def reference_is_policy(self) -> bool:
        """Whether the only model of the reference is the policy before its first update."""
        return self.reference is not None and self.reference.model is None and not self.reference.own_weights

    def accumulator(self, split: str, dataset_names: list[str], device: torch.device) -> MetricAccumulator:
        """For the metrics of a split."""
        return MetricAccumulator(dataset_names, self.loss.metric_names(split, self.options), device)
