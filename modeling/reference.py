"""The frozen reference: a model beside the policy, or its log-probs, computed once and kept on disk.

`Reference` is what the trainer asks. `ReferenceCache` keeps log-probs under what they depend on. A file holds one
float32 number a response of one tokenised data set; NaN means not computed yet. Its path is made of the reference's
weights, the precision of the computation, and the tokens: changing any of them leads to another file, and changing
anything else (learning rate, beta, loss) to the same one, which a whole sweep then shares.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from modeling.generation import reshard_after_eval
from utils import (
    all_reduce_sum,
    broadcast_object,
    checksum,
    gather_objects,
    get_local_dir,
    remove_leftovers,
    write_atomically,
)

MAGIC = b"reference log-probs 1\n"


def weights_digest(model: torch.nn.Module, world=None) -> str:
    """Fingerprint of a model's weights, the same however they are sharded.

    Each weight's bits are read as an integer and summed, once as they are and once multiplied by their position;
    integer sums do not depend on order, so shards can be summed apart and then together.
    """
    names, sums = [], []
    for name, parameter in sorted(model.named_parameters()):
        local, offsets = _local_part(parameter)
        bits = local.detach().contiguous().view({4: torch.int32, 2: torch.int16, 8: torch.int64}[local.element_size()])
        # A rank's part may be empty, so no dimension is left to be inferred.
        rows = bits.reshape(len(bits), math.prod(bits.shape[1:])) if bits.ndim else bits.reshape(1, 1)
        # sum over (i, j) of bits[i, j] * (i * 1,000,003 + j), counted from 1 in the whole weight, out of the sums of rows and
        # of columns. A few rows at a time: as int64 the whole weight would take twice its memory.
        row_place, column_place = (
            torch.arange(n, device=rows.device) + offset + 1 for n, offset in zip(rows.shape, offsets)
        )
        total = torch.zeros(2, dtype=torch.int64, device=rows.device)
        at_once = max(1, (1 << 19) // max(1, rows.shape[1]))
        for part, place in zip(rows.split(at_once), row_place.split(at_once)):
            wide = part.to(torch.int64)
            of_rows = wide.sum(1)
            total += torch.stack(
                [of_rows.sum(), 1_000_003 * (of_rows * place).sum() + (wide.sum(0) * column_place).sum()]
            )
        # A part held by several ranks (replicas) counts once.
        sums.append(total if _counts_here(parameter) else torch.zeros_like(total))
        names.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}")
    totals = torch.stack(sums)
    if world is not None:
        totals = all_reduce_sum(totals, world)
    text = "\n".join(f"{name} {pair}" for name, pair in zip(names, totals.tolist()))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _local_part(parameter) -> tuple[torch.Tensor, tuple[int, int]]:
    """This rank's part of a parameter, and where it starts in dimensions 0 and 1."""
    if not hasattr(parameter, "placements"):
        return parameter, (0, 0)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    assert not any(offset[2:]), "weights are sharded in their first two dimensions only"
    first, second = (tuple(offset) + (0, 0))[:2]
    # Trailing dimensions are flattened into one, so a step in dimension 1 is as long as what follows it.
    return parameter.to_local(), (first, second * int(np.prod(parameter.shape[2:])))


def _counts_here(parameter) -> bool:
    if not hasattr(parameter, "placements"):
        import torch.distributed as dist

        return not dist.is_initialized() or dist.get_rank() == 0
    coordinate = parameter.device_mesh.get_coordinate()
    return all(place == 0 for place, placement in zip(coordinate, parameter.placements) if placement.is_replicate())


class ReferenceCache:
    """Reference log-probs of the responses of several tokenised data sets.

    Args:
        folder: where files are kept; None keeps everything in memory.
        key: fingerprint of weights and precision.
        datasets: by split ("train", "eval"), the data sets in the order in which batches number them.
        notice: told of files that cannot be read or written.
        writer: whether this process writes (one does).
    """

    def __init__(
        self,
        folder: str | None,
        key: str,
        datasets: dict[str, Sequence],
        notice: Callable[[str], None],
        writer: bool = True,
    ):
        self.folder = os.path.join(folder, key) if folder else None
        self.datasets, self.notice, self.writer = datasets, notice, writer
        self.values = {split: [self._read(dataset) for dataset in many] for split, many in datasets.items()}

    def lookup(self, split: str, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Log-probs [K] of responses (data set index, response id).

        Raises:
            KeyError: one has not been computed; it is never taken to be zero.
        """
        found = np.array([self.values[split][dataset][response] for dataset, response in keys], dtype=np.float32)
        if np.isnan(found).any():
            missing = [key for key, value in zip(keys, found) if np.isnan(value)]
            raise KeyError(f"No reference log-prob for {split} responses {missing[:5]} (data set, response).")
        return torch.from_numpy(found)

    def has(self, split: str, keys: Sequence[tuple[int, int]]) -> bool:
        return not any(np.isnan(self.values[split][dataset][response]) for dataset, response in keys)

    def store(self, split: str, keys: Sequence[tuple[int, int]], values: Sequence[float]) -> None:
        for (dataset, response), value in zip(keys, values):
            self.values[split][dataset][response] = value

    def forget(self) -> None:
        """Take all values as not computed."""
        for many in self.values.values():
            for values in many:
                values.fill(np.nan)

    def save(self, merge: bool = True) -> None:
        """Write what is known, merged with what another job may have written since."""
        if self.folder is None or not self.writer:
            return
        try:
            os.makedirs(self.folder, exist_ok=True)
            remove_leftovers(self.folder)
            for split, many in self.datasets.items():
                for dataset, values in zip(many, self.values[split]):
                    if merge:
                        others = self._read(dataset)
                        gaps = np.isnan(values)
                        values[gaps] = others[gaps]
                    self._write(self._path(dataset), values)
        except OSError as problem:
            self.notice(
                f"The reference cache {self.folder} cannot be written ({problem.strerror}); "
                "its log-probs are kept for this run only. Set reference.cache_dir to a writable folder."
            )
            self.folder = None

    def _path(self, dataset) -> str:
        return os.path.join(self.folder, f"{dataset.key}.logps")

    def _read(self, dataset) -> np.ndarray:
        nothing = np.full(dataset.n_responses, np.nan, dtype=np.float32)
        if self.folder is None or not os.path.exists(self._path(dataset)):
            return nothing
        path = self._path(dataset)
        try:
            with open(path, "rb") as file:
                content = file.read()
            body = content[len(MAGIC) + 4 :]
            intact = content == MAGIC + _crc32(body) + body
            values = np.load(io.BytesIO(body), allow_pickle=False) if intact else None
            if values is not None and values.shape == nothing.shape and values.dtype == nothing.dtype:
                return values
            self.notice(f"The reference cache file {path} is damaged or of another version: computing it anew.")
        except (OSError, ValueError, EOFError) as problem:
            self.notice(f"The reference cache file {path} cannot be read ({problem}): computing it anew.")
        return nothing

    @staticmethod
    def _write(path: str, values: np.ndarray) -> None:
        buffer = io.BytesIO()
        np.save(buffer, values)
        body = buffer.getvalue()
        write_atomically(path, MAGIC + _crc32(body) + body)


def _crc32(body: bytes) -> bytes:
    return bytes.fromhex(checksum(body, "crc32"))


class Reference:
    """The reference of a preference run.

    Args:
        config: the run's settings; policy: the model before its first update, which then is the reference.
        build_frozen: dtype name -> a frozen model of its own, ready to score.
        samplers: by split ("train", "eval"), the steps whose responses need log-probs; None for a split without examples.
        datasets: by split, the data sets in the order in which batches number them.
        idle_batch: what a rank without work computes.

    Attributes:
        model: the reference itself with reference.mode=online, else None.
        key: fingerprint of its weights and precision, for a resumed run to compare.
    """

    def __init__(
        self, config, policy, build_frozen: Callable, samplers: dict, datasets: dict, idle_batch, reporter, world
    ):
        self.config, self.policy, self.build_frozen, self.samplers, self.datasets = (
            config,
            policy,
            build_frozen,
            samplers,
            datasets,
        )
        self.idle_batch, self.reporter, self.world = idle_batch, reporter, world
        self.device = torch.device(world.device)
        self.model: torch.nn.Module | None = None
        self._cache: ReferenceCache | None = None
        dtype = config.model.reference_dtype or config.model.policy_dtype
        self.key = f"{weights_digest(policy, world)}-{dtype}-{config.model.fsdp_policy_mp or dtype}"
        if config.reference.mode == "online":
            self.model = build_frozen(dtype)
            return
        folder = config.reference.cache_dir or os.path.join(get_local_dir(config.local_dirs), "reference")
        self._cache = ReferenceCache(folder, self.key, datasets, reporter.notice, writer=world.is_main)
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
