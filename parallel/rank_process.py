"""What runs in the process of one rank: joining the group, calling the function, reporting how it ended."""

import os
import signal
import time
from datetime import timedelta

import settings
import utils
from parallel.failures import Report, report_error
from report import streams
from settings import Settings
from utils import World

_to_parent = None  # the pipe to the process that started this rank


def heeded_signals() -> list[signal.Signals]:
    """The signals that ask a run to save and end: SIGTERM and SIGUSR1 (preemption), SIGINT (Ctrl-C), SIGHUP (the
    terminal was closed), but for a SIGHUP that is ignored, as nohup asks."""
    return [
        number
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]


def hold_on() -> None:
    """Report to the parent that this rank saves after a signal and must not be killed for taking its time."""
    if _to_parent is not None:
        _to_parent.send("hold on")


def call(function, config: Settings, run_dir, world: World):
    """The function itself, on this process's device."""
    if world.device.startswith("cuda"):
        import torch

        torch.cuda.set_device(world.device)
    return function(config, run_dir, world)


def call_in_group(function, config: Settings, run_dir, world: World, init_method: str):
    """The function inside a process group, which all ranks have entered with the same settings."""
    import torch
    import torch.distributed as dist

    if world.device.startswith("cuda"):
        torch.cuda.set_device(world.device)
    try:
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if world.device.startswith("cuda") else "gloo",
            init_method=init_method,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(minutes=config.guards.collective_timeout_minutes),
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ValueError(
            f"the port of {init_method} is taken by another program; choose another one, or leave "
            "fsdp_port=null on one node"
        ) from error
    same = {key: value for key, value in settings.flatten(settings.as_dict(config)).items() if not _per_node(key)}
    utils.check_same(utils.digest(same), "the configuration", world)
    result = function(config, run_dir, world)
    utils.barrier(world)  # no rank closes its connections while another still reads
    dist.destroy_process_group()
    return result


def _per_node(key: str) -> bool:
    return key in settings.SCHEMA and settings.SCHEMA[key].per_node


def rank_main(
    function, config: Settings, run_dir, world: World, init_method, local_size: int, parent: int, pipe
) -> None:
    """What a spawned process runs."""
    global _to_parent
    _to_parent = pipe
    # A session of its own: Ctrl-C then reaches the parent alone, which passes it on once, and the parent can end this
    # process together with the helpers that it may start.
    os.setsid()
    utils.die_with_parent(parent)
    try:
        if world.device == "cpu":
            share_cores(local_size)
        if os.path.isdir("/sys/class/net/lo"):
            # All ranks are on this node. By default gloo asks the network for this host's name, which may not be known.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if init_method is None:
            result = call(function, config, run_dir, world)
        else:
            result = call_in_group(function, config, run_dir, world, init_method)
        pipe.send(Report(world.rank, "result", value=result if world.is_main else None))
        streams.flush_streams()
        return
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
        pipe.send(Report(world.rank, "exit", value=code, time=time.time()))
    except KeyboardInterrupt:
        pipe.send(Report(world.rank, "exit", value=128 + signal.SIGINT, time=time.time()))
    except BaseException as error:
        # Sent while the connections to the other ranks are still open, so that it arrives before their complaints.
        pipe.send(report_error(world.rank, error))
    streams.flush_streams()
    # Not sys.exit: the process group is still open, and a thread of it that asks for the interpreter while this shuts
    # down aborts the process, with a message of the C++ library before the user's.
    os._exit(1)


def threads_of_rank(local_size: int) -> int:
    """Threads that torch uses in one of `local_size` ranks of a node on the CPU: its part of the cores, unless the user
    chose by OMP_NUM_THREADS or MKL_NUM_THREADS."""
    if "MKL_NUM_THREADS" in os.environ or ("OMP_NUM_THREADS" in os.environ and not _torchrun_chose_threads()):
        import torch

        return torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_size)


def _torchrun_chose_threads() -> bool:
    """Whether OMP_NUM_THREADS=1 comes from torchrun, which sets it for its processes where the user set nothing."""
    if os.environ["OMP_NUM_THREADS"] != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:  # what torchrun itself was started with
            return b"OMP_NUM_THREADS=" not in file.read()
    except OSError:
        return True


def share_cores(local_size: int) -> None:
    """Give this rank its part of the cores."""
    import torch

    torch.set_num_threads(threads_of_rank(local_size))
