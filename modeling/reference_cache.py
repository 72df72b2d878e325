"""Reference log-probs kept on disk.

A file holds one float32 number a response of one tokenised data set; NaN means not computed yet. Its path is made of
the reference and how it is computed (reference_key.py), and of the tokens: changing any of them leads to another file,
and changing anything else (learning rate, beta, loss) to the same one, which a whole sweep then shares.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atomic_files import checksum, remove_leftovers, try_lock, write_atomically

MAGIC = b"reference log-probs 1\n"
LOCK_SECONDS = 10  # a job that was stopped while it held the lock must not stop the others


@dataclass(frozen=True)
class CachedResponses:
    """What a file is of: its name without the ending, and how many responses it has."""

    key: str
    n_responses: int


class ReferenceCache:
    """Reference log-probs of the responses of several tokenised data sets.

    Several jobs may use a folder at once. Of two values for one response the first that was written stays, so that a
    run which is resumed reads what it trained with.

    Args:
        folder: where files are kept; None keeps everything in memory.
        key: fingerprint of the reference.
        datasets: by split ("train", "eval"), one entry a data set in the order in which batches number them.
        notice: called with a message about a file that cannot be read or written.
        writer: whether this process writes (one does).
    """

    def __init__(
        self,
        folder: str | None,
        key: str,
        datasets: Mapping[str, Sequence[CachedResponses]],
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

    def known(self, split: str) -> list[np.ndarray]:
        """By data set, bool [n_responses]: which responses have a value."""
        return [~np.isnan(values) for values in self.values[split]]

    def store(self, split: str, keys: Sequence[tuple[int, int]], values: Sequence[float]) -> None:
        """Take over values of responses that have none yet."""
        for (dataset, response), value in zip(keys, values):
            if np.isnan(self.values[split][dataset][response]):
                self.values[split][dataset][response] = value

    def forget(self) -> None:
        """Take all values as not computed, and remove them from the disk, from where they would come back."""
        for split, many in self.datasets.items():
            for dataset, values in zip(many, self.values[split]):
                values.fill(np.nan)
                if self.folder is not None and self.writer:
                    try:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(self._path(dataset))
                    except OSError as problem:
                        self._do_without(f"cannot be cleared of wrong values ({problem.strerror})")

    def save(self) -> None:
        """Write what is known, merged with what another job has written since."""
        if self.folder is None or not self.writer:
            return
        try:
            os.makedirs(self.folder, exist_ok=True)
            remove_leftovers(self.folder)
            with _locked(self.folder):
                for split, many in self.datasets.items():
                    for dataset, values in zip(many, self.values[split]):
                        self._merge(dataset, values)
        except OSError as problem:
            self._do_without(f"cannot be written ({problem.strerror})")

    def _merge(self, dataset: CachedResponses, values: np.ndarray) -> None:
        others = self._read(dataset)
        written = ~np.isnan(others)
        values[written] = others[written]
        if np.isnan(values).sum() == np.isnan(others).sum():
            return  # nothing is new
        buffer = io.BytesIO()
        np.save(buffer, values)
        body = buffer.getvalue()
        write_atomically(self._path(dataset), MAGIC + _crc32(body) + body)

    def _do_without(self, problem: str) -> None:
        self.notice(
            f"The reference cache {self.folder} {problem}; its log-probs are kept for this run only. "
            "Set reference.cache_dir to a writable folder."
        )
        self.folder = None

    def _path(self, dataset: CachedResponses) -> str:
        assert self.folder is not None
        return os.path.join(self.folder, f"{dataset.key}.logps")

    def _read(self, dataset: CachedResponses) -> np.ndarray:
        nothing: np.ndarray = np.full(dataset.n_responses, np.nan, dtype=np.float32)
        if self.folder is None:
            return nothing
        path = self._path(dataset)
        try:
            with open(path, "rb") as file:
                content = file.read()
            body = content[len(MAGIC) + 4 :]
            intact = content == MAGIC + _crc32(body) + body
            values = np.lib.format.read_array(io.BytesIO(body), allow_pickle=False) if intact else None
            if values is not None and values.shape == nothing.shape and values.dtype == nothing.dtype:
                if not np.isinf(values).any():
                    return values
            self.notice(f"The reference cache file {path} is damaged or of another version: computing it anew.")
        except (FileNotFoundError, NotADirectoryError):  # the latter: nor can it be written, which is reported then
            pass
        except (OSError, ValueError) as problem:
            self.notice(f"The reference cache file {path} cannot be read ({problem}): computing it anew.")
        return nothing


@contextlib.contextmanager
def _locked(folder: str):
    """Keep other jobs from writing into a folder between our reading and our writing; without locks, go on."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _need_not_wait(descriptor) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _need_not_wait(descriptor: int) -> bool:
    """Whether the lock is taken, or the file system has none."""
    try:
        return try_lock(descriptor)
    except OSError:
        return True


def _crc32(body: bytes) -> bytes:
    return bytes.fromhex(checksum(body, "crc32"))
