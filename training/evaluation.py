"""Evaluation on held-out examples, and samples of policy and reference to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

import torch

from data.batching import MicroBatch, PromptUnit
from data.sampler import BatchSampler
from modeling.generation import generate_samples
from modeling.loading import DTYPES
from modeling.sharded import gathered_once
from parallel.placement import Placement
from report.reporter import Reporter
from settings import Settings
from settings.precision import mixed_dtype
from settings.reference import has_own_weights
from training.gathering import fits_whole
from training.metrics import ExampleMetrics
from training.objective import Objective, ScoredBatch
from training.run_state import TrainState


class Evaluation:
    """What a run does with its held-out examples.

    Args:
        sampler: steps of held-out examples; datasets: the data sets that they are of.
        idle_batch: what a rank scores that has no work in a micro-batch, so that collectives match.
    """

    def __init__(
        self,
        config: Settings,
        objective: Objective,
        sampler: BatchSampler,
        idle_batch: MicroBatch,
        datasets: list,
        tokenizer,
        placement: Placement,
        reporter: Reporter,
    ):
        self.config, self.objective, self.tokenizer = config, objective, tokenizer
        self.sampler, self.idle_batch = sampler, idle_batch
        self.placement, self.reporter = placement, reporter
        self.dataset_names = [dataset.short_name for dataset in datasets]

    @torch.no_grad()
    def metrics(
        self, score: Callable[[MicroBatch], ExampleMetrics], interrupted: Callable[[int], bool]
    ) -> dict[str, float] | None:
        """Means over all held-out examples of all ranks; None if the evaluation was interrupted.

        A step-wide loss is given all held-out examples at once: so it does not depend on eval_batch_size, either.

        Args:
            score: a micro-batch on the device -> its examples' metrics, of losses that are not step-wide.
            interrupted: called with the number of steps done after each; True ends the evaluation, on all ranks.
        """
        device = self.placement.device
        sums = self.objective.accumulator("eval", self.dataset_names, device)
        unit, step_wide = self.objective.loss.inputs.example, self.objective.loss.step_wide
        kept: list[tuple[torch.Tensor, ScoredBatch]] = []
        with self.reporter.progress(self.sampler.n_examples, "evaluation", unit) as bar:
            for step in self.sampler.steps():
                for batch in step.micro_batches:
                    if batch is None:
                        self.objective.score("eval", self.idle_batch)
                        continue
                    batch = batch.to(device)
                    if step_wide:
                        scored = ScoredBatch.of(batch, *self.objective.score("eval", batch)[:2])
                        kept.append((batch.datasets, scored))
                    else:
                        sums.add(batch.datasets, score(batch))
                bar.update(step.n_examples)
                if interrupted(step.number + 1):
                    self._reshard()
                    return None
        self._reshard()
        if step_wide:
            found, _ = self.objective.of_all([scored for _, scored in kept])
            for (datasets, _), (_, _, metrics) in zip(kept, found, strict=True):
                sums.add(datasets, metrics)
        total = sums.by_name(self.placement.reduce(sums.sums).cpu())
        return {name: value / count for name, (value, count) in total.items()}

    def _reshard(self) -> None:
        self.placement.reshard_after_eval(self.objective.policy, self.objective.reference_model)

    def write_samples(self, state: TrainState) -> None:
        """Report continuations of the same held-out prompts by the policy and, once a run, by the reference."""
        units = self._prompts()

        def write(model) -> list[str]:
            with gathered_once(model) if self._fits_whole(model, units) else nullcontext():
                return generate_samples(
                    model,
                    self.tokenizer,
                    [unit.prompt for unit in units],
                    world=self.placement.world,
                    batch_size=self.config.eval_batch_size,
                    device=self.placement.device,
                    notice=self.reporter.notice,
                    shard=(self.placement.data_rank, self.placement.data_ranks),
                    **dataclasses.asdict(self.config.sampling),
                )

        first = state.reference_samples is None
        with self.reporter.progress(2 if first else 1, "samples", "models") as bar:
            texts = write(self.objective.policy)
            bar.update(1)
            if first:
                if self.objective.reference_model is not None:
                    state.reference_samples = write(self.objective.reference_model)
                elif state.updates == 0 and not has_own_weights(self.config):
                    state.reference_samples = texts  # nothing was learnt yet: the policy is the reference
                bar.update(1)
        self._reshard()
        # A loss without a reference has none to be compared with.
        compared = state.reference_samples if self.objective.loss.reads_reference else None
        rows = [
            {
                "dataset": self.dataset_names[unit.dataset],
                "prompt": self.tokenizer.decode(unit.prompt),
                "policy": text,
                "reference": compared[index] if compared else None,
            }
            for index, (unit, text) in enumerate(zip(units, texts))
        ]
        self.reporter.samples(state.examples, rows)

    def _fits_whole(self, model, units: list[PromptUnit]) -> bool:
        """Whether the model that writes may be whole on each device meanwhile."""
        dtype = mixed_dtype(self.config)
        rows = min(self.config.eval_batch_size, -(-len(units) // self.placement.data_ranks))
        tokens = max((len(unit.prompt) for unit in units), default=0) + self.config.sampling.max_new_tokens
        return fits_whole(model, self.placement, DTYPES[dtype] if dtype else None, rows, tokens)

    def _prompts(self) -> list[PromptUnit]:
        """The first distinct prompts in an order of the seed: the same at each evaluation."""
        units: list[PromptUnit] = []
        seen = set()
        mixture = self.sampler.mixture
        for unit in mixture.units(mixture.epoch_permutation(self.config.seed, 0)):
            if len(units) < self.config.n_eval_model_samples and (unit.dataset, unit.group) not in seen:
                seen.add((unit.dataset, unit.group))
                units.append(unit)
        return units
