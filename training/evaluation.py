"""Evaluation on held-out examples, and samples of policy and reference to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

import torch

from data.batching import MicroBatch, PromptUnit
from data.sampler import BatchSampler, DatasetMixture
from modeling.generation import decode, generate_ids
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
        units = first_prompts(self.sampler.mixture, self.config.seed, self.config.n_eval_model_samples)

        def write(model) -> list[str]:
            new = write_ids(self.config, model, self.tokenizer, units, self.placement, self.reporter.notice)
            return [decode(self.tokenizer, unit.prompt, ids) for unit, ids in zip(units, new)]

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


def write_ids(
    config: Settings, model, tokenizer, units: list[PromptUnit], placement: Placement, notice: Callable[[str], None]
) -> list[list[int]]:
    """Tokens that a model writes after the prompts of units. All ranks call it together."""
    # The model may be whole on each device meanwhile, where that fits.
    dtype = mixed_dtype(config)
    rows = min(config.eval_batch_size, -(-len(units) // placement.data_ranks))
    tokens = max((len(unit.prompt) for unit in units), default=0) + config.sampling.max_new_tokens
    whole = fits_whole(model, placement, DTYPES[dtype] if dtype else None, rows, tokens)
    with gathered_once(model) if whole else nullcontext():
        return generate_ids(
            model,
            tokenizer,
            [unit.prompt for unit in units],
            world=placement.world,
            batch_size=config.eval_batch_size,
            device=placement.device,
            notice=notice,
            shard=(placement.data_rank, placement.data_ranks),
            **dataclasses.asdict(config.sampling),
        )


def first_prompts(mixture: DatasetMixture, seed: int, n: int) -> list[PromptUnit]:
    """The first `n` distinct prompts in an order of the seed: the same at each evaluation."""
    units: list[PromptUnit] = []
    seen = set()
    for unit in mixture.units(mixture.epoch_permutation(seed, 0)):
        if len(units) < n and (unit.dataset, unit.group) not in seen:
            seen.add((unit.dataset, unit.group))
            units.append(unit)
    return units
