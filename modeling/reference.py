"""The frozen reference: a model beside the policy, or its log-probs, computed once and kept on disk."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import torch

import private_apis
from checkpoint.names import clean_name
from data.batching import to_device
from modeling.digest import weights_digest
from modeling.reference_cache import CachedResponses, ReferenceCache
from modeling.reference_key import allowed_rounding, computation_digest, probe_unit
from modeling.sharded import reshard_after_eval
from settings import Settings
from settings.precision import mixed_dtype
from settings.reference import has_own_weights
from utils import broadcast_object, digest, gather_objects, get_local_dir

SAVE_SECONDS = 60  # between two saves while values are computed


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
        starts_as_policy: whether the policy before its first update computes the very same.
        own_weights: whether it is another model than the policy before its first update.
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
        dtype, own = config.model.reference_dtype or config.model.policy_dtype, has_own_weights(config)
        self.own_weights = own
        self._dtype, self._compute_dtype = dtype, mixed_dtype(config) or dtype
        # The policy is the reference before its first update; other weights or another precision need their own model.
        self.starts_as_policy = dtype == config.model.policy_dtype and not own
        online = config.reference.mode == "online"
        scorer = policy if self.starts_as_policy and not online else build_frozen(dtype)
        self.key = f"{weights_digest(scorer if own else policy, world)}-{dtype}-{self._compute_dtype}"
        if online:
            self.model = scorer
            return
        self._scorer = scorer
        self._cache = self._open_cache()
        self._check()
        for split in ("eval", "train"):
            if samplers[split] is not None:
                self._fill(split, samplers[split])
        self._scorer = None  # a model of its own is freed

    def logps(self, split: str, batch, unmoved: torch.Tensor | None = None) -> torch.Tensor:
        """Log-probs [K] of a micro-batch's responses, on the device.

        Args:
            unmoved: the same of a policy that has had no update. It has the reference's weights, so a cached value of
                another pass, with other neighbours, may differ from it by rounding, and then is taken to be equal:
                the first margins are exactly 0. A difference that is not rounding stays to be seen.
        """
        if self.model is not None:
            with torch.no_grad():
                return self.model.response_logps(batch)
        if batch is self.idle_batch:
            return torch.zeros(len(batch.lengths), device=self.device)
        found = to_device(self._cache.lookup(split, batch.keys), self.device)
        if unmoved is None or not self.starts_as_policy:
            return found
        close = (found - unmoved).abs() <= allowed_rounding(batch.lengths, self._compute_dtype)
        return torch.where(close, unmoved, found)

    @torch.no_grad()
    def follow(self, updates: int) -> None:
        """Call after each update of the policy: where it is due, take over a share of its weights (TR-DPO, arXiv
        2404.09656). Both are sharded alike, so each rank mixes its own parts."""
        every = self.config.reference.sync_every
        if every is None or updates % every:
            return
        assert self.model is not None
        theirs = {clean_name(name): parameter for name, parameter in self.policy.named_parameters()}
        for name, parameter in self.model.named_parameters():
            own, new = private_apis.local_tensor(parameter), private_apis.local_tensor(theirs[clean_name(name)])
            own.lerp_(new.to(own.device, own.dtype), self.config.reference.sync_mix)

    def _open_cache(self) -> ReferenceCache:
        """The values that are known already, on all ranks: those that rank 0 finds on disk."""
        config, world = self.config, self.world
        folder = config.reference.cache_dir or os.path.join(get_local_dir(config.local_dirs), "reference")
        computation = computation_digest(self._scorer, self._dtype, self._compute_dtype)
        files = {
            split: [CachedResponses(cache_name(data, self._probe(split, data)), data.n_scored) for data in many]
            for split, many in self.datasets.items()
        }
        reshard_after_eval(self._scorer)
        cache = ReferenceCache(folder, f"{self.key}-{computation}", files, self.reporter.notice, writer=world.is_main)
        cache.values = broadcast_object(cache.values, world)
        return cache

    def _probe(self, split: str, dataset) -> str:
        """Digest of the bits that this computation gives a data set's probe; all ranks call it together."""
        unit = probe_unit(dataset)
        if unit is None or self.samplers[split] is None:
            return "none"
        bits = self._score(self.samplers[split].make_batch([unit])).cpu().numpy().tobytes()
        return digest(sorted({found.hex() for found in gather_objects(bits, self.world)}))

    @torch.no_grad()
    def _score(self, batch) -> torch.Tensor:
        return self._scorer.response_logps(self.idle_batch if batch is None else batch.to(self.device))

    def _check(self) -> None:
        """Rescore the first micro-batch of each split: values that differ by more than rounding are not used."""
        for split, sampler in self.samplers.items():
            if sampler is None or not self._cache.has(split, step_keys(sampler, 0)):
                continue
            batch = sampler.step(0).micro_batches[0]
            found, excess = self._score(batch).cpu(), 0.0
            if batch is not None:
                difference = (found - self._cache.lookup(split, batch.keys)).abs()
                excess = (difference / allowed_rounding(batch.lengths, self._compute_dtype)).max().item()
            reshard_after_eval(self._scorer)
            if not all(each <= 1 for each in gather_objects(excess, self.world)):  # NaN is not, either
                self.reporter.notice(
                    f"The cached reference log-probs of the {split} data differ from recomputed ones by more than "
                    "rounding explains: computing them anew."
                )
                self._cache.forget()
                return

    def _fill(self, split: str, sampler) -> None:
        """Compute what is missing, in the micro-batches of the run.

        What is missing is known to rank 0 alone, which reads what other jobs write meanwhile; all ranks go by it.
        """
        lacking = sampler.mixture.examples_lacking(self._cache.known(split))
        missing = broadcast_object(sampler.steps_with(lacking) if self.world.is_main else None, self.world)
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
                if time.monotonic() - saved > SAVE_SECONDS:  # an interrupted run goes on from here
                    self._cache.save()
                    saved = time.monotonic()
        self._cache.save()
        self._cache.values = broadcast_object(self._cache.values, self.world)
        reshard_after_eval(self._scorer)

    def _require_finite(self, split: str, keys, values) -> None:
        for (dataset, response), value in zip(keys, values):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"The reference gives response {response} of {self.datasets[split][dataset].name} ({split}) the "
                    f"log-prob {value}. Use model.reference_dtype=float32, or look at the model's weights."
                )


def cache_name(dataset, probe: str) -> str:
    """Name of the file with a data set's values: those with mismatched responses hold more of them."""
    return f"{dataset.key}-{probe}" + ("-mismatched" if dataset.mismatched else "")


def step_keys(sampler, step: int) -> list[tuple[int, int]]:
    """(data set, response id) of all responses of a step, over all ranks."""
    return [
        (unit.dataset, response)
        for unit in sampler.mixture.units(sampler.example_indices(step))
        for response in unit.response_ids
    ]
