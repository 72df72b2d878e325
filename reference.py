"""The reference model's log-probs, computed once and kept on disk under what they depend on.

A file holds one float32 number a response of one tokenised data set; NaN means not computed yet. Its path is made of
the reference's weights, the precision of the computation, and the tokens: changing any of them leads to another file,
and changing anything else (learning rate, beta, loss) to the same one, which a whole sweep then shares.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import secrets
import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

MAGIC = b"reference log-probs 1\n"


def weights_digest(model: torch.nn.Module, world=None) -> str:
    """Fingerprint of a model's weights, the same however they are sharded.

    Each weight's bits are read as an integer and summed, once as they are and once multiplied by their position;
    integer sums do not depend on order, so shards can be summed apart and then together.
    """
    from utils import all_reduce_sum

    names, sums = [], []
    for name, parameter in sorted(model.named_parameters()):
        local, offsets = _local_part(parameter)
        bits = local.detach().contiguous().view({4: torch.int32, 2: torch.int16, 8: torch.int64}[local.element_size()])
        # A rank's part may be empty, so no dimension is left to be inferred.
        rows = bits.reshape(len(bits), math.prod(bits.shape[1:])) if bits.ndim else bits.reshape(1, 1)
        place = (torch.arange(rows.shape[0], device=rows.device) + offsets[0] + 1)[:, None] * 1_000_003
        place = place + (torch.arange(rows.shape[1], device=rows.device) + offsets[1] + 1)
        total = torch.zeros(2, dtype=torch.int64, device=rows.device)
        for part, factor in zip(rows.split(4096), place.split(4096)):  # int64 copies of a part only
            wide = part.to(torch.int64)
            total += torch.stack([wide.sum(), (wide * factor).sum()])
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

    def __init__(self, folder: str | None, key: str, datasets: dict[str, Sequence], notice: Callable[[str], None],
                 writer: bool = True):
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
            self._sweep()
            for split, many in self.datasets.items():
                for dataset, values in zip(many, self.values[split]):
                    if merge:
                        others = self._read(dataset)
                        gaps = np.isnan(values)
                        values[gaps] = others[gaps]
                    self._write(self._path(dataset), values)
        except OSError as problem:
            self.notice(f"The reference cache {self.folder} cannot be written ({problem.strerror}); "
                        "its log-probs are kept for this run only. Set reference.cache_dir to a writable folder.")
            self.folder = None

    def _sweep(self) -> None:
        """Remove what killed jobs left half-written; a write takes seconds, so an hour old belongs to nobody."""
        for name in os.listdir(self.folder):
            path = os.path.join(self.folder, name)
            try:
                if name.endswith(".tmp") and time.time() - os.path.getmtime(path) > 3600:
                    os.unlink(path)
            except OSError:
                pass  # another job did

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
            intact = content.startswith(MAGIC) and content[len(MAGIC) : len(MAGIC) + 4] == zlib.crc32(body).to_bytes(4, "big")
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
        # Not mkstemp, whose files nobody else may read: a cache folder can be shared.
        temporary = f"{path}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(MAGIC + zlib.crc32(body).to_bytes(4, "big") + body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
