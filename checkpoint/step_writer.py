"""One save: what it writes, how it is written, and how its folder becomes a complete step.

All ranks write into step-N.tmp, each syncs and checksums what it wrote; once all agree that it went well, rank 0 writes
the manifest, renames the folder and moves LATEST. A kill at any moment leaves LATEST on a complete folder.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from atomic_files import sync_folder
from checkpoint import step_folders
from checkpoint.hf_folder import write_hf_folder
from checkpoint.state import model_tensors, optimizer_tensors
from checkpoint.step_folders import gigabytes
from utils import World

FORMATS = ("state", "policy", "hf")

# Called with the name of each stage of a save as it begins: tests kill the process or raise there.
hooks: list[Callable[[str], object]] = []


def reached(stage):
    for hook in hooks:
        hook(stage)


def attempt(action, *arguments):
    """Runs an action that touches the disk. Returns (its result, None), or (None, what went wrong in words)."""
    try:
        return action(*arguments), None
    except CheckpointException as error:  # torch's own agreement: the same on all ranks
        causes = {rank: failure[0] for rank, failure in error.failures.items()}
        for cause in causes.values():
            if isinstance(cause, (KeyboardInterrupt, SystemExit)):
                raise cause from error
        return None, "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def estimate_bytes(model, optimizer, formats=FORMATS):
    """Bytes that a save of these formats takes on disk, over all ranks."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model_tensors(model).values())
    moments = 0
    if optimizer is not None:
        moments = sum(t.numel() * t.element_size() for t in optimizer_tensors(model, optimizer)[0].values())
    sizes = {"state": weights + moments, "policy": weights, "hf": weights}
    return int(sum(sizes[name] for name in formats) * 1.01) + (1 << 20)


class _Writer(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        reached("state")
        return super().write_data(plan, planner)


@dataclass
class Save:
    """All that one save writes, taken at the moment of save(): with async_save, training goes on under it.

    final: the step's folder; temporary: where it is written first. trainer: the bytes of trainer.pt. rng: this rank's
    random generators. tensors: of model and optimizer, as sharded. full: {name: whole tensor}, on rank 0.
    model, tokenizer: for the Hugging Face folder.
    """

    world: World
    examples: int
    formats: tuple
    metrics: dict
    final: Path
    trainer: bytes
    rng: dict
    tensors: dict = field(default_factory=dict)
    full: dict = field(default_factory=dict)
    model: object = None
    tokenizer: object = None

    @property
    def temporary(self) -> Path:
        return self.final.with_name(self.final.name + ".tmp")

    def open(self, model, optimizer) -> None:
        """Rank 0: is there room, can the folder be made?"""
        reached("open")
        run_dir = self.final.parent
        needed, free = estimate_bytes(model, optimizer, self.formats), step_folders.free_bytes(run_dir)
        if needed > free:
            raise OSError(f"it needs {gigabytes(needed)} and {run_dir} has {gigabytes(free)} free")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()

    def write(self, group) -> tuple[dict | None, str | None]:
        """Writes this rank's files. Returns ({relative path: [size, digest]} of what it wrote, problem or None).

        The sharded state comes first: torch agrees over it among all ranks, so none may fail before and stay away.
        """
        if "state" in self.formats:
            _, problem = attempt(self._write_tensors, group)
            if problem:
                return None, problem
        return attempt(self._write_rest)

    def _write_tensors(self, group):
        writer = _Writer(self.temporary / "state", sync_files=False)  # they are synced with the checksums
        dcp.save(self.tensors, storage_writer=writer, process_group=group, no_dist=group is None)

    def _write_rest(self) -> dict:
        rank, main, folder = self.world.rank, self.world.is_main, self.temporary
        written = []
        if "state" in self.formats:
            reached("rng")
            torch.save(self.rng, folder / "state" / f"rng-{rank}.pt")
            written += [f"state/rng-{rank}.pt", *(f"state/{p.name}" for p in (folder / "state").glob(f"__{rank}_*"))]
            if main:
                (folder / "state" / "trainer.pt").write_bytes(self.trainer)
                written += ["state/trainer.pt", "state/.metadata"]
        if main and "policy" in self.formats:
            reached("policy")
            torch.save({"step_idx": self.examples, "state": self.full, "metrics": self.metrics}, folder / "policy.pt")
            written.append("policy.pt")
        if main and "hf" in self.formats:
            reached("hf")
            write_hf_folder(self.model, self.full, self.tokenizer, folder / "hf")
            written += [f"hf/{name}" for name in step_folders.files_below(folder / "hf")]
        self.full = self.tensors = {}
        reached("checksum")
        return {name: step_folders.checksum(folder / name, fsync=True) for name in written}

    def complete(self, files) -> None:
        """Rank 0, once all ranks have written `files`: makes the temporary folder the step, and the latest one."""
        reached("manifest")
        step_folders.write_manifest(self.temporary, self.examples, self.metrics, files)
        replaced = self.final.with_name(self.final.name + ".replaced")
        reached("rename")
        if self.final.exists():
            if replaced.exists():
                step_folders.remove_folder(replaced)
            os.rename(self.final, replaced)
            reached("replace")
        try:
            os.rename(self.temporary, self.final)
        except OSError:
            if replaced.exists():
                os.rename(replaced, self.final)
            raise
        sync_folder(self.final.parent)
        reached("latest")
        step_folders.point_latest(self.final.parent, self.final)
