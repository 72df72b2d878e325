"""Reference log-probs kept on disk.

A file holds one float32 number a response of one tokenised data set; NaN means not computed yet. Its path is made of
the reference's weights, the precision of the computation, and the tokens: changing any of them leads to another file,
and changing anything else (learning rate, beta, loss) to the same one, which a whole sweep then shares.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch

from utils import checksum, remove_leftovers, write_atomically

MAGIC = b"reference log-probs 1\n"


class ReferenceCache:
    """Reference log-probs of the responses of several tokenised data sets.

    Args:
        folder: where files are kept; None keeps everything in memory.
        key: fingerprint of weights and precision.
        datasets: by split ("train", "eval"), the data sets in the order in which batches number them.
        notice: called with a message about a file that cannot be read or written.
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
                    buffer = io.BytesIO()
                    np.save(buffer, values)
                    body = buffer.getvalue()
                    write_atomically(self._path(dataset), MAGIC + _crc32(body) + body)
        except OSError as problem:
            self.notice(
                f"The reference cache {self.folder} cannot be written ({problem.strerror}); "
                "its log-probs are kept for this run only. Set reference.cache_dir to a writable folder."
            )
            self.folder = None

    def _path(self, dataset) -> str:
        assert self.folder is not None
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


def _crc32(body: bytes) -> bytes:
    return bytes.fromhex(checksum(body, "crc32"))
