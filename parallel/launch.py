"""Start a function on every device and bring back what rank 0 returns, whatever happens on the way.

One process a device, unless torchrun or srun started this one among others: then it joins their world. When a rank
fails, its own traceback is what the user sees, not the broken connections of the others; and no process outlives the
run, even if the parent is killed. That is why the processes are started here (spawn.py, rank_process.py) and not by
torch's own launcher, which ends the other ranks at once when one fails and knows nothing of a save in progress.
"""

from collections.abc import Callable

import utils
from parallel.rank_process import call, call_in_group, share_cores
from parallel.rendezvous import srun_address
from parallel.spawn import spawn
from settings import Settings
from settings.shard_layout import world_size_of
from utils import World


def launch(function: Callable, config: Settings, run_dir: str | None = None, fresh: bool = False):
    """Call function(config, run_dir, world) on every rank; return what it returns on rank 0.

    Args:
        function: picklable by name. Raises ValueError for mistakes of the user's; SystemExit(code) to end with a code.
        config: the validated settings.
        run_dir: handed through.
        fresh: use a new process even for a world of one, as the jobs of a sweep must, so that nothing is left over.

    Raises:
        ValueError: of the rank that failed first. RankFailure: it failed otherwise. SystemExit: the ranks asked for it,
        or a signal ended them. KeyboardInterrupt: Ctrl-C ended them.
    """
    raise_open_files_limit()
    kind, count = visible_devices(config)
    joined = utils.joined_world()
    if joined is not None:
        return _join(function, config, run_dir, kind, count, joined)
    if config.trainer == "BasicTrainer":
        device = config.device or kind
        if not fresh:
            return call(function, config, run_dir, World(device="cuda:0" if device == "cuda" else device))
        return spawn(function, config, run_dir, ["cuda:0" if device == "cuda" else device], None)
    size = world_size_of(config, kind, count)
    return spawn(function, config, run_dir, [f"cuda:{i}" if kind == "cuda" else "cpu" for i in range(size)], kind)


def visible_devices(config: Settings) -> tuple[str, int]:
    """(kind, number) of the devices that the settings mean: ("cuda", 8), ("mps", 1), ("cpu", 0)."""
    import torch

    asked = (config.device or "").split(":")[0]
    if asked in ("", "cuda") and torch.cuda.is_available():
        return "cuda", torch.cuda.device_count()
    # Collectives over MPS do not exist: sharded trainers take the CPU instead.
    if asked == "mps" or (not asked and config.trainer == "BasicTrainer" and torch.backends.mps.is_available()):
        return "mps", int(torch.backends.mps.is_available())
    return "cpu", 0


def has_bfloat16(kind: str) -> bool:
    """Whether a kind of device computes in bfloat16. A GPU that is planned for and not here is taken to."""
    import torch

    if kind != "cuda":
        return kind == "cpu"
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def raise_open_files_limit() -> None:
    """Sharded loading and many ranks open more files than the usual soft limit of 1024 allows."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ImportError, ValueError, OSError):
        pass  # not allowed here, or no such limit: the soft limit has to do


def _join(function, config: Settings, run_dir, kind: str, count: int, joined: tuple):
    rank, size, local_rank, starter = joined
    local_size = utils.processes_on_node(size)
    device = "cpu"
    if kind == "cuda":
        # srun may show each task its own device only; it is then number 0 whatever the task's number.
        index = 0 if starter == "srun" and count == 1 else local_rank
        if index >= count:
            raise ValueError(
                f"rank {rank} is process {local_rank} of its node, which shows only {count} CUDA devices; "
                "start one process a device"
            )
        device = f"cuda:{index}"
    world = World(rank, size, local_rank, device)
    if config.trainer == "BasicTrainer":
        return call(function, config, run_dir, world)
    if device == "cpu":
        share_cores(local_size)
    return call_in_group(function, config, run_dir, world, "env://" if starter == "torchrun" else srun_address())
