"""Start a function on every device and bring back what rank 0 returns, whatever happens on the way.

One process a device, unless torchrun or srun started this one among others: then it joins their world. When a rank
fails, its own traceback is what the user sees, not the broken connections of the others; and no process outlives the
run, even if the parent is killed.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection

import settings
import utils
from settings import Settings
from utils import World

# How long the other ranks get to end by themselves after one failed: time to close the wandb run, no more, because they
# may be stuck in a collective operation that never ends.
FAILURE_GRACE_SECONDS = 5.0
# How long ranks get after a signal, unless they said by `hold_on` that they are saving.
SIGNAL_GRACE_SECONDS = 30.0
# How long all ranks may take to end after the first one has, unless they said `hold_on`.
LINGER_SECONDS = 60.0
# A rank that was cut off from the others waits so long before it tells, so that torchrun or srun can end it first: the
# first message on the screen is then the one of the rank where the trouble began.
FOLLOWER_DELAY_SECONDS = 3.0


class RankFailure(RuntimeError):
    """A rank failed with something other than a mistake of the user's. `trace` is its traceback as text."""

    def __init__(self, message: str, trace: str = ""):
        super().__init__(message)
        self.trace = trace


@dataclass
class Report:
    """How a rank ended: with a result, an exit code, or an error."""

    rank: int
    kind: str  # result | exit | error
    value: object = None
    message: str = ""
    trace: str = ""
    is_users: bool = False  # a ValueError raised on purpose by our own code, whose message says it all
    is_follower: bool = False  # the error of a rank that was waiting for another
    time: float = 0.0


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
    _raise_open_files_limit()
    kind, count = visible_devices(config)
    joined = utils.joined_world()
    if joined is not None:
        return _join(function, config, run_dir, kind, count, joined)
    if config.trainer == "BasicTrainer":
        device = config.device or kind
        if not fresh:
            return _call(function, config, run_dir, World(device="cuda:0" if device == "cuda" else device))
        return _spawn(function, config, run_dir, ["cuda:0" if device == "cuda" else device], None)
    size = config.world_size or (count if kind == "cuda" else 1)
    return _spawn(function, config, run_dir, [f"cuda:{i}" if kind == "cuda" else "cpu" for i in range(size)], kind)


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


# ---- In a rank ------------------------------------------------------------------------------------------------------

_to_parent = None  # the pipe to the process that started this rank


def hold_on() -> None:
    """Tell the parent that this rank saves after a signal and must not be killed for taking its time."""
    if _to_parent is not None:
        _to_parent.send("hold on")


def _call(function, config: Settings, run_dir, world: World):
    """The function itself, on this process's device."""
    if world.device.startswith("cuda"):
        import torch

        torch.cuda.set_device(world.device)
    return function(config, run_dir, world)


def _call_in_group(function, config: Settings, run_dir, world: World, init_method: str):
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
    utils.barrier(world)  # nobody hangs up while another still reads
    dist.destroy_process_group()
    return result


def _per_node(key: str) -> bool:
    return key in settings.SCHEMA and settings.SCHEMA[key].per_node


def _report_error(rank: int, error: BaseException) -> Report:
    trace = "".join(traceback.format_exception(error))
    return Report(
        rank,
        "error",
        message=str(error) or type(error).__name__,
        trace=trace,
        time=time.time(),
        is_users=is_users_mistake(error),
        is_follower=is_follower(error),
    )


def is_users_mistake(error: BaseException) -> bool:
    """Whether an error is a ValueError that our own code raised to tell the user something, so needs no traceback."""
    if type(error) is not ValueError:
        return False
    if getattr(error, "told_by_rank", None) is not None or error.__traceback__ is None:
        return True
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = os.path.abspath(frames[-1].filename)
    return (
        raised_in.startswith(utils.PROJECT_DIR + os.sep) and "site-packages" not in raised_in
    )  # .venv may be inside the project


def is_follower(error: BaseException) -> bool:
    """Whether an error looks like that of a rank whose partner has gone."""
    import torch.distributed as dist

    words = r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting|recvValue failed"
    kinds = tuple(kind for kind in (getattr(dist, "DistError", None), getattr(dist, "DistBackendError", None)) if kind)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and bool(re.search(words, str(error), re.I)))


def _rank_main(
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
            _share_cores(local_size)
        if os.path.isdir("/sys/class/net/lo"):
            # All ranks are on this node. By default gloo asks the network for this host's name, which may not be known.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if init_method is None:
            result = _call(function, config, run_dir, world)
        else:
            result = _call_in_group(function, config, run_dir, world, init_method)
        pipe.send(Report(world.rank, "result", value=result if world.is_main else None))
        return
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
        pipe.send(Report(world.rank, "exit", value=code, time=time.time()))
    except KeyboardInterrupt:
        pipe.send(Report(world.rank, "exit", value=128 + signal.SIGINT, time=time.time()))
    except BaseException as error:
        # Sent while the connections to the other ranks are still open, so that it arrives before their complaints.
        pipe.send(_report_error(world.rank, error))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the process group is still open, and a thread of it that asks for the interpreter while this shuts
    # down aborts the process, with a message of the C++ library before the user's.
    os._exit(1)


def _share_cores(local_size: int) -> None:
    """Give this rank its part of the cores, unless the user chose (1 is what torchrun sets when the user did not)."""
    import torch

    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_size))


# ---- Starting the ranks of this node --------------------------------------------------------------------------------


def _spawn(function, config: Settings, run_dir, devices: list[str], group: str | None):
    """One process for each of `devices`; they form a process group unless `group` is None."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    size, ranks = len(devices), []
    with _Rendezvous(None if group is None else config.fsdp_port) as meeting, _Signals(ranks) as signals:
        try:
            for rank, device in enumerate(devices):
                here, there = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    name=f"rank-{rank}",
                    args=(
                        function,
                        config,
                        run_dir,
                        World(rank, size, rank, device),
                        meeting if group else None,
                        size,
                        os.getpid(),
                        there,
                    ),
                )
                process.start()
                there.close()
                ranks.append(_Rank(rank, process, here))
                if signals.received:
                    break
            _wait(ranks, signals)
        finally:
            for rank in ranks:
                rank.kill()
    return _outcome(ranks, signals)


class _Rank:
    """A rank as its parent sees it."""

    def __init__(self, rank: int, process, pipe):
        self.rank, self.process, self.pipe = rank, process, pipe
        self.report: Report | None = None
        self.holding = self.killed = self.done = False

    def poll(self) -> None:
        """Take in what has come through the pipe, and whether the process has ended."""
        ended = not self.process.is_alive()  # asked first: what is sent before the end is then in the pipe
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, Report):
                    self.report = message
                else:
                    self.holding = True
        except (EOFError, OSError):
            pass
        if ended:
            self.done = True
            if self.report is None:
                code = self.process.exitcode or 0
                self.report = Report(
                    self.rank,
                    "error",
                    time=time.time(),
                    message=_describe_death(self.rank, code),
                    is_follower=self.killed or code == -signal.SIGABRT,
                )  # NCCL's watchdog aborts

    @property
    def failed(self) -> bool:
        return self.report is not None and self.report.kind != "result"

    def signal(self, number: int) -> None:
        if self.process.is_alive():
            try:
                os.kill(self.process.pid, number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """End the process and the helpers in its session, if it is still there; the helpers of one that died, too."""
        if self.process.is_alive():
            self.killed = True
        elif not self.failed:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()  # so young that it has no session yet
        self.process.join()


class _Signals:
    """Passes signals on to the ranks, which may save before they end; a second one ends them at once."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, ranks: list[_Rank]):
        self.ranks, self.received, self.since, self.old = ranks, [], 0.0, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self.old = {number: signal.signal(number, self._handle) for number in self.NUMBERS}
        return self

    def __exit__(self, *_):
        for number, handler in self.old.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        now = time.monotonic()
        # Ctrl-C in some terminals and schedulers that signal whole process trees send more than one for one wish.
        if self.received and now - self.since < 1.0 and number == self.received[-1]:
            return
        self.received.append(number)
        if len(self.received) == 1:
            self.since = now
        for rank in list(self.ranks):
            rank.signal(number if len(self.received) == 1 else signal.SIGKILL)


def _wait(ranks: list[_Rank], signals: _Signals) -> None:
    """Return when all ranks have ended, or when one failed and the others had time to end."""
    failed_at = ending_at = None
    while True:
        for rank in ranks:
            rank.poll()
        if all(rank.done for rank in ranks):
            return
        now = time.monotonic()
        if failed_at is None and any(rank.failed and rank.report.kind == "error" for rank in ranks):
            failed_at = now
        if ending_at is None and any(rank.report for rank in ranks):
            ending_at = now
        holding = any(rank.holding for rank in ranks)
        if failed_at is not None and now - failed_at > FAILURE_GRACE_SECONDS:
            return
        if signals.received and now - signals.since > SIGNAL_GRACE_SECONDS and not holding:
            return
        if ending_at is not None and now - ending_at > LINGER_SECONDS and not holding:
            return
        # Waits for news from any rank; the time limit lets the limits above come true, and handlers of signals run.
        connection.wait(
            [rank.pipe for rank in ranks if not rank.done and not rank.pipe.closed and not rank.report]
            + [rank.process.sentinel for rank in ranks if not rank.done],
            timeout=0.2,
        )


def _outcome(ranks: list[_Rank], signals: _Signals):
    """Rank 0's result, or the exception that tells what happened."""
    reports = [rank.report for rank in ranks if rank.report is not None]
    errors = [report for report in reports if report.kind == "error"]
    codes = [report.value for report in reports if report.kind == "exit" and report.value]
    if signals.received:
        for report in errors:
            if report.trace and not report.is_follower:  # such as a disk that was full when it tried to save
                sys.stderr.write(f"rank {report.rank} failed while it was ending:\n{report.trace}")
        if signals.received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        if errors or codes or not reports:
            raise SystemExit(codes[0] if codes else 128 + signals.received[0])
    reports = [rank.report for rank in ranks]
    if errors:
        # Where it began: the earliest error that is not a rank's complaint about another one.
        first = min(errors, key=lambda report: (report.is_follower, report.time))
        if first.is_users:
            raise users_error(first.message, first.rank, first.trace)
        raise RankFailure(
            f"rank {first.rank} of {len(ranks)} failed: {first.message.strip().splitlines()[0]}", first.trace
        )
    if codes:
        raise SystemExit(codes[0])
    return reports[0].value


def users_error(message: str, rank: int, trace: str) -> ValueError:
    """A ValueError that carries what a rank said to the user."""
    error = ValueError(message)
    error.told_by_rank, error.trace = rank, trace
    return error


def _describe_death(rank: int, code: int) -> str:
    if code >= 0:
        return f"its process ended without a result (exit code {code})"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    why = {
        "SIGKILL": ": most likely the system ran out of memory, or somebody killed it",
        "SIGSEGV": ": a crash in native code",
        "SIGBUS": ": most likely shared memory or disk is full",
    }.get(name, "")
    return f"its process was ended by {name}{why}"


class _Rendezvous:
    """Where the ranks of one node meet: gives the init_method of torch.distributed.

    A file in memory that has no name in any folder, reached through this process's entry in /proc: nobody else can take
    it, as a port can be taken, and nothing is left on the disk however this process ends. Not on Linux: a
    file in a private folder. With `port`: that TCP port.
    """

    def __init__(self, port: int | None):
        self.port, self.descriptor, self.folder = port, None, None

    def __enter__(self) -> str:
        if self.port is not None:
            return f"tcp://127.0.0.1:{self.port}"
        if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
            self.descriptor = os.memfd_create("rendezvous")
            return f"file:///proc/{os.getpid()}/fd/{self.descriptor}"
        self.folder = tempfile.mkdtemp(prefix="rendezvous-")
        return f"file://{self.folder}/store"

    def __exit__(self, *_):
        if self.descriptor is not None:
            os.close(self.descriptor)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _raise_open_files_limit() -> None:
    """Sharded loading and many ranks open more files than the usual soft limit of 1024 allows."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ImportError, ValueError, OSError):
        pass  # not allowed here, or no such limit: the soft limit has to do


# ---- Joining the world of torchrun or srun --------------------------------------------------------------------------


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
        return _call(function, config, run_dir, world)
    if device == "cpu":
        _share_cores(local_size)
    return _call_in_group(function, config, run_dir, world, "env://" if starter == "torchrun" else _srun_address())


def _srun_address() -> str:
    """tcp://MASTER_ADDR:MASTER_PORT, by default the first node of the step and a port drawn from the job's number."""
    env = os.environ
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "127.0.0.1"
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)  # of gpu[01-04,07],other
    address = env.get("MASTER_ADDR") or first.group(1) + (first.group(2) or "")
    job = re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or "0"
    return f"tcp://{address}:{env.get('MASTER_PORT') or 20000 + int(job) % 20000}"
