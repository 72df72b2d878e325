"""Small helpers without policy: the world of processes, random seeds and run folders.

torch is imported inside the functions that need it, so that a mistake in the settings is reported before it loads.
"""

import getpass
import hashlib
import importlib
import json
import os
import re
import sys
import threading
import time
from dataclasses import dataclass
from datetime import datetime

PROJECT_DIR = os.path.dirname(os.path.abspath(__file__))


class LazyModule:
    """A module that is imported at its first use, for files that are read before anything heavy may be loaded."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str):
        return getattr(importlib.import_module(self._name), attribute)


@dataclass(frozen=True)
class World:
    """The place of this process among those that train together.

    rank counts over all nodes, local_rank on this node only; device is the torch device that this process computes on.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: str = "cpu"

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def joined_world() -> tuple[int, int, int, str] | None:
    """(rank, size, local rank, starter) when torchrun or srun started this process among others, else None."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0)), "torchrun"
    # A batch script's own shell has SLURM_PROCID and SLURM_NTASKS as well, without being one of the tasks. What marks a
    # task of srun is its step, or an address that was set for the tasks to meet at.
    if "SLURM_PROCID" in env and ("SLURM_STEP_ID" in env or "MASTER_ADDR" in env):
        size = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
        if size > 1:
            return int(env["SLURM_PROCID"]), size, int(env.get("SLURM_LOCALID", 0)), "srun"
    return None


def processes_on_node(world_size: int) -> int:
    """How many of the world's processes run on this node, by what torchrun or srun reports; else all of them do."""
    if joined_world() is None:
        return world_size
    env = os.environ
    # srun writes "4(x2),3" for two nodes of four tasks and one of three.
    given = env.get("LOCAL_WORLD_SIZE") or env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE")
    first = re.match(r"\d+", given) if given else None
    return int(first.group()) if first else world_size


# ---- Collectives: in a world of one they do nothing -----------------------------------------------------------------


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    if world.size > 1:
        # Not dist.barrier(): over NCCL that one guesses a device, and may guess wrong on a second node.
        all_gather_bytes(b"", world)


def all_reduce_sum(tensor, world: World):
    """Sum of `tensor` (any shape, equal on all ranks) over the ranks: a new tensor on the same device."""
    if world.size == 1:
        return tensor.clone()
    import torch.distributed as dist

    total = tensor.detach().clone().contiguous()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


def broadcast_object(obj, world: World, src: int = 0, group=None):
    """The object of rank `src`, on every rank (of `group`). It is pickled: only for objects of our own making."""
    if world.size == 1:
        return obj
    import torch
    import torch.distributed as dist

    box = [obj]
    # Named, because the default is the accelerator, which should not hold a pickle.
    dist.broadcast_object_list(box, src=src, group=group, device=torch.device("cpu"))
    return box[0]


def run_on_main(function, world: World, group=None):
    """What function() returns on rank 0, on every rank; the others wait for it, as long as `group` does.

    Raises:
        ValueError: on every rank of several, with the message of the ValueError or OSError that rank 0 raised.
    """
    if world.size == 1:
        return function()
    result = problem = None
    if world.is_main:
        try:
            result = function()
        except (ValueError, OSError) as error:
            problem = str(error)
    result, problem = broadcast_object((result, problem), world, group=group)
    if problem is not None:
        raise ValueError(problem)
    return result


def gather_objects(obj, world: World) -> list:
    """The objects of all ranks in the order of ranks, on every rank. They are pickled: only for our own objects."""
    if world.size == 1:
        return [obj]
    import pickle

    return [pickle.loads(data) for data in all_gather_bytes(pickle.dumps(obj), world)]


def all_gather_bytes(data: bytes, world: World) -> list:
    """The byte strings of all ranks, which may differ in length, in the order of ranks, on every rank.

    Runs over CPU tensors and hence gloo. torch's own all_gather_object would pick the accelerator where there is one,
    and spend its memory on this.
    """
    import torch
    import torch.distributed as dist

    length = torch.tensor([len(data)], dtype=torch.int64)
    lengths = [torch.zeros_like(length) for _ in range(world.size)]
    dist.all_gather(lengths, length)
    longest = max(1, max(int(n) for n in lengths))  # gloo takes no empty tensors
    padded = torch.zeros(longest, dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(parts, padded)
    return [bytes(part[: int(n)].numpy().tobytes()) for part, n in zip(parts, lengths)]


def digest(obj) -> str:
    """A short fingerprint of anything that json can write; keys in any order."""
    return hashlib.sha256(json.dumps(obj, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_same(obj_digest: str, what: str, world: World) -> None:
    """Raise ValueError on every rank, naming the ranks that differ, unless all ranks hold the same digest.

    Ranks that see different settings or data would train on nonsense, or wait for each other for ever.
    """
    digests = gather_objects(obj_digest, world)
    if len(set(digests)) == 1:
        return
    # The largest group is taken to be right, the first of equals: most often it is one node that was set up otherwise.
    usual = max(digests, key=digests.count)
    others = [rank for rank, other in enumerate(digests) if other != usual]
    agreeing = [rank for rank, other in enumerate(digests) if other == usual]
    raise ValueError(
        f"{what} differs between the processes: {_ranks(others)} not the same as {_ranks(agreeing)}. "
        "Start all of them with the same command, the same code and the same files."
    )


def _ranks(ranks: list) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


# ---- Processes and seeds --------------------------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on all devices, for what in the libraries draws without a generator of its own."""
    import random

    import numpy
    import torch

    seed = int(seed)  # a NumPy integer is refused by random.seed from Python 3.11 on
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def die_with_parent(parent: int = 0) -> None:
    """Have this process killed when its parent ends, even by kill -9: nothing may go on training unseen.

    Also fits as the initializer of a process pool. `parent` is the expected parent's id, if the caller knows it: the
    parent may have ended before this call.
    """
    parent = parent or os.getppid()
    if sys.platform == "linux":
        import ctypes
        import signal

        PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:

        def watch():
            while os.getppid() == parent:
                time.sleep(1)
            os._exit(1)

        threading.Thread(target=watch, daemon=True, name="watch-parent").start()
    if os.getppid() != parent:
        os._exit(1)


def keep_freed_memory() -> None:
    """Have the C library keep the memory of freed tensors for the next ones, instead of giving it back each time.

    Every micro-batch needs the same again, and the kernel would have to clear each page anew: about a tenth of a
    training step on a CPU. Does nothing where the C library is not glibc, or where the environment tunes it already.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        largest = 2**31 - 1  # the values are C ints
        library.mallopt(-3, largest)  # M_MMAP_THRESHOLD
        library.mallopt(-1, largest)  # M_TRIM_THRESHOLD


# ---- Folders --------------------------------------------------------------------------------------------------------


def get_local_dir(prefixes) -> str:
    """<folder>/<user>, for the first of the folders that exists and can be written, else the last. Makes nothing."""
    prefixes = [os.path.expanduser(prefix) for prefix in ([prefixes] if isinstance(prefixes, str) else prefixes)]
    if not prefixes:
        raise ValueError("local_dirs is empty: name at least one folder for runs, such as local_dirs=[.cache]")
    usable = [p for p in prefixes if os.path.isdir(p) and os.access(p, os.W_OK | os.X_OK)]
    return os.path.join((usable or prefixes[-1:])[0], _user())


def get_local_run_dir(exp_name: str, local_dirs) -> str:
    """A name for a new run's folder: <local dir>/<user>/<exp_name>_<date>_<time to the microsecond>. Makes nothing."""
    return os.path.join(get_local_dir(local_dirs), f"{exp_name}_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}")


def make_run_dir(exp_name: str, local_dirs) -> str:
    """Make a new run folder that no other process has, also when two start in the same instant, and return its path."""
    while True:
        run_dir = get_local_run_dir(exp_name, local_dirs)
        try:
            os.makedirs(os.path.dirname(run_dir), exist_ok=True)
            os.mkdir(run_dir)  # fails if it exists: who makes it, owns it
            return run_dir
        except FileExistsError as error:
            if not os.path.isdir(run_dir):
                raise ValueError(
                    f"no run folder can be made at {run_dir}: {error.strerror} ({error.filename}). "
                    "Set local_dirs to a folder that can be written."
                ) from error
            time.sleep(0.001)
        except OSError as error:
            raise ValueError(
                f"no run folder can be made at {run_dir}: {error.strerror}. "
                "Set local_dirs to a folder that can be written."
            ) from error


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # containers run under user ids that have no name
        return f"uid-{os.getuid()}"
    # It comes from the environment, and may neither lead out of the folder nor be none.
    return name if os.path.basename(name) == name and name not in (os.curdir, os.pardir) else file_name(name)


# ---- Small parts -----------------------------------------------------------------------------------------------------


def file_name(text: str) -> str:
    """`text` with all that is awkward in a file name replaced."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.") or "unnamed"
