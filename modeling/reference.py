"""The frozen reference: a model beside the policy, or its log-probs, computed once and kept on disk."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import torch

from modeling.digest import weights_digest
from modeling.reference_cache import ReferenceCache
from modeling.sharded import reshard_after_eval
from settings import Settings
from utils import broadcast_object, gather_objects, get_local_dir


class Reference:
    """The reference of a preference run.

    Args:
        config: the run's settings; policy: the model before its first update, which then is the reference.
        build_frozen: dtype name -> a frozen model of its own, ready to score.
        samplers: by split ("train", "eval"), the steps whose responses need log-probs; None for an empty split.
        datasets: by split, the data sets in the order in which batches number them.
        idle_batch: what a rank without work computes.

    Attributes:
        model: the reference itself with reference.mode=online, else None.
        key: fingerprint of its weights and precision, for a resumed run to compare.
    """

    def __init__(
        self,
        config: Settings,
        policy,
        build_frozen: Callable,
        samplers: dict,
        datasets: dict,
        idle_batch,
        reporter,
        world,
    ):
        self.config, self.policy, self.build_frozen = config, policy, build_frozen
        self.samplers, self.datasets, self.idle_batch = samplers, datasets, idle_batch
        self.reporter, self.world = reporter, world
        self.device = torch.device(world.device)
        self.model: torch.nn.Module | None = None
        dtype = config.model.reference_dtype or config.model.policy_dtype
        self.key = f"{weights_digest(policy, world)}-{dtype}-{config.model.fsdp_policy_mp or dtype}"
        if config.reference.mode == "online":
            self.model = build_frozen(dtype)
            return
        folder = config.reference.cache_dir or os.path.join(get_local_dir(config.local_dirs), "reference")
        self._cache: ReferenceCache = ReferenceCache(folder, self.key, datasets, reporter.notice, writer=world.is_main)
        # What one rank found on disk is what all ranks go by: their decisions below must agree.
        self._cache.values = broadcast_object(self._cache.values, world)
        self._scorer = None if dtype != config.model.policy_dtype else policy
        self._dtype = dtype
        self._check()
        for split in ("eval", "train"):
            if samplers[split] is not None:
                self._fill(split, samplers[split])
        self._scorer = None  # a model of its own is freed

    def logps(self, split: str, batch) -> torch.Tensor:
        """Log-probs [K] of a micro-batch's responses, on the device."""
        if self.model is not None:
            with torch.no_grad():
                return self.model.response_logps(batch)
        if batch is self.idle_batch:
            return torch.zeros(len(batch.lengths), device=self.device)
        found = self._cache.lookup(split, batch.keys)
        return (found.pin_memory() if self.device.type == "cuda" else found).to(self.device, non_blocking=True)

    @torch.no_grad()
    def _score(self, batch) -> torch.Tensor:
        if self._scorer is None:
            # The policy is the reference before its first update; only another precision needs a model of its own.
            self._scorer = self.build_frozen(self._dtype)
        return self._scorer.response_logps(self.idle_batch if batch is None else batch.to(self.device))

    def _check(self) -> None:
        """Rescore the first step with cached values; a cache that disagrees is not used."""
        for split, sampler in self.samplers.items():
            if sampler is None or not self._cache.has(split, step_keys(sampler, 0)):
                continue
            worst = 0.0
            for batch in sampler.step(0).micro_batches[:1]:
                found = self._score(batch).cpu()
                if batch is not None:
                    kept = self._cache.lookup(split, batch.keys)
                    worst = ((found - kept).abs() / kept.abs().clamp(min=1.0)).max().item()
            reshard_after_eval(self._scorer)
            worst = max(gather_objects(worst, self.world))
            exact = self._dtype == "float32" and not self.config.model.fsdp_policy_mp
            if not worst < (1e-3 if exact else 5e-2):
                self.reporter.notice(f"Cached reference log-probs are off by {worst:.1e}: computing them anew.")
                self._cache.forget()
            return

    def _fill(self, split: str, sampler) -> None:
        """Compute what is missing, in the very micro-batches of the run, so that step 0 has a margin of exactly 0."""
        # After the first epoch there are new examples only where a data set is seen in part.
        steps = sampler.n_steps if any(weight % 1 for weight in sampler.mixture.weights) else sampler.steps_per_epoch
        missing = [
            step for step in range(min(sampler.n_steps, steps)) if not self._cache.has(split, step_keys(sampler, step))
        ]
        if not missing:
            return
        saved = time.monotonic()
        with self.reporter.progress(len(missing), f"reference, {split}", "steps") as bar:
            for number in missing:
                found = [(batch, self._score(batch)) for batch in sampler.step(number).micro_batches]
                found = [(batch.keys, logps.tolist()) for batch, logps in found if batch is not None]
                for keys, values in (pair for part in gather_objects(found, self.world) for pair in part):
                    self._require_finite(split, keys, values)
                    self._cache.store(split, keys, values)
                bar.update(1)
                if time.monotonic() - saved > 60:  # an interrupted run goes on from here
                    self._cache.save()
                    saved = time.monotonic()
        self._cache.save()
        reshard_after_eval(self._scorer)

    def _require_finite(self, split: str, keys, values) -> None:
        for (dataset, response), value in zip(keys, values):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"The reference gives response {response} of {self.datasets[split][dataset].name} ({split}) the "
                    f"log-prob {value}. Use model.reference_dtype=float32, or look at the model's weights."
                )


def step_keys(sampler, step: int) -> list[tuple[int, int]]:
    """(data set, response id) of all responses of a step, over all ranks."""
    return [
        (unit.dataset, response)
        for unit in sampler.mixture.units(sampler.example_indices(step))
        for response in unit.response_ids
    ]
