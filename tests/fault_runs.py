"""Real runs that are killed and resumed: what test_resume.py, test_guards.py and scripts/faults share.

A run is `train.command_line()` with a command line, in a process of its own, with ranks of its own: real training, real
files, real SIGKILL. Only the six seconds of imports are saved: a `Forge` has imported everything once and forks for
each run, and the run's ranks are forked as well instead of spawned.

    with Forge(folder) as forge:
        run = forge.start("loss=dpo", ..., kill={"stage": "manifest"})
        code = run.wait()
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [entry for entry in (str(ROOT), str(ROOT / "tests")) if entry not in sys.path]

# Values that differ between two runs of the same thing.
SUBJECTS = (
    "rain",
    "bread",
    "a violin",
    "chess",
    "the moon",
    "an old clock",
    "salt",
    "a bee",
    "glass",
    "the tide",
    "ink",
)
# The stages of a save (step_writer.hooks) at which every rank comes by, and those of rank 0 alone.
STAGES_OF_ALL = ("state", "rng", "checksum")
STAGES = ("open", "state", "rng", "policy", "checksum", "manifest", "rename", "latest", "retention")


def write_data(folder: Path) -> Path:
    """train.jsonl with 22 pairs and test.jsonl with 6."""
    folder.mkdir(parents=True, exist_ok=True)

    def row(number, pairs):
        word = SUBJECTS[number % len(SUBJECTS)]
        responses = [f" {word} is {'quite ' * (number % 3)}{number * 3 + k}." for k in range(3)]
        return {
            "prompt": f"Of {word}:",
            "responses": responses,
            "pairs": [[0, k + 1] for k in range(pairs)],
            "sft_target": responses[0],
        }

    for name, rows in (("train", [row(n, 2) for n in range(11)]), ("test", [row(20 + n, 1) for n in range(6)])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def arguments(folder: Path, *overrides: str) -> list[str]:
    """A command line of a run of 18 steps over 3 epochs, a checkpoint every second step, an evaluation every third."""
    values = dict(
        value.split("=", 1)
        for value in (
            "model=tiny",
            "model.random_config.hidden_size=32",
            "model.random_config.intermediate_size=48",
            "loss=dpo",
            f"datasets=[{folder}/data]",
            f"local_dirs=[{folder}/runs]",
            f"data.cache_dir={folder}/tokens",
            "device=cpu",
            f"reference.cache_dir={folder}/reference",
            "data.num_workers=1",
            "wandb.enabled=false",
            "n_epochs=3",
            "batch_size=4",
            "optimizer=AdamW",
            "lr=1e-3",
            "warmup_steps=3",
            "schedule=cosine",
            "minimum_log_interval_secs=0",
            "eval_every=12",
            "checkpoint.every=8",
            "checkpoint.formats=[state,policy]",
            "eval_batch_size=4",
            "n_eval_model_samples=2",
            "sampling.max_new_tokens=3",
        )
    )
    values |= dict(value.split("=", 1) for value in overrides)
    if values["loss"] == "sft" or values.get("reference.mode") == "online":
        del values["reference.cache_dir"]
    if values.get("sample_during_eval") == "false":
        del values["n_eval_model_samples"], values["sampling.max_new_tokens"]
    return [f"{key}={value}" for key, value in values.items()]


FSDP = ("trainer=FSDPTrainer", "world_size=2")


# ---- The forge ------------------------------------------------------------------------------------------------------


def serve() -> None:
    """The forge's process: forks a run for each line it reads, and reports its process id and its exit code."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: an orphan becomes a child of this process, and is seen
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.multiprocessing
    import transformers.models.llama.modeling_llama  # noqa: F401

    import train
    import trainers  # noqa: F401
    from parallel import placement  # noqa: F401

    torch.set_num_threads(1)
    real = torch.multiprocessing.get_context
    torch.multiprocessing.get_context = lambda method=None: real("fork")
    print(json.dumps({"ready": True}), flush=True)
    runs = {}
    while True:
        if select.select([sys.stdin], [], [], 0.01)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            job = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _run(train, job)
            runs[pid] = job["id"]
            print(json.dumps({"id": job["id"], "pid": pid}), flush=True)
        while runs:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in runs:  # the others are orphans of killed runs
                print(json.dumps({"id": runs.pop(pid), "code": os.waitstatus_to_exitcode(status)}), flush=True)


def _run(train, job) -> None:
    """In the fork: the command line, with hooks in the saves."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests themselves run under nohup
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(job["environment"])
        _hook(job["stages"], job["kill"])
        if job["prepare"]:
            exec(job["prepare"], {"__name__": "prepare"})
        sys.argv = ["train.py", *job["arguments"]]
        try:
            code = train.command_line()
        except SystemExit as request:
            code = request.code
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code or 0)


def _hook(path: str, kill: dict | None) -> None:
    """Write down each stage of a save as it begins, and kill at the one that `kill` names:
    {"stage", "nth": how often it comes by first, "rank": that rank alone; all processes of the run without it}."""
    from checkpoint import step_writer

    top, record, passed = os.getpid(), os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), [0]

    def at(stage):
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank == 0:
            os.pwrite(record, stage.ljust(16).encode(), 0)
        if not kill or stage != kill["stage"] or rank != kill.get("rank", 0):
            return
        passed[0] += 1
        if passed[0] <= kill.get("nth", 0):
            return
        if "rank" not in kill:
            for pid in [top, *descendants(top)]:
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    step_writer.hooks.append(at)


def descendants(pid: int) -> list[int]:
    """Living processes below a process, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry))
    found, left = [], [pid]
    while left:
        found += (below := [child for one in left for child in children.get(one, [])])
        left = below
    return found


@dataclass
class Started:
    """A run that was started."""

    forge: Forge
    number: int
    log: Path
    stages: Path
    pid: int | None = None
    code: int | None = None

    def wait(self, timeout: float = 120.0) -> int:
        """Its exit code, negative for a signal."""
        deadline = time.monotonic() + timeout
        while self.code is None:
            if not self.forge.listen(0.05) and time.monotonic() > deadline:
                text = self.text
                self.kill()
                raise AssertionError(f"the run hangs:\n{text[-3000:]}")
        return self.code

    def kill(self) -> None:
        """SIGKILL to every process of the run, the parent first."""
        for pid in [self.pid, *descendants(self.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def stage(self) -> str:
        """The stage of a save that came by last, "" before the first."""
        return self.stages.read_text().strip() if self.stages.exists() else ""

    @property
    def in_a_save(self) -> bool:
        return self.stage not in ("", "end")

    def wait_for(self, what, timeout: float = 60.0) -> None:
        """Wait until what() is true. Raises AssertionError if the run ends first."""
        deadline = time.monotonic() + timeout
        while not what():
            self.forge.listen(0.002)
            assert self.code is None and time.monotonic() < deadline, f"exit code {self.code}\n{self.text[-3000:]}"


@dataclass
class Forge:
    """See the top of the file. `folder` holds the data, the runs and their logs."""

    folder: Path
    started: list[Started] = field(default_factory=list)

    def __enter__(self) -> Forge:
        write_data(self.folder / "data")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        assert json.loads(self.process.stdout.readline() or "{}").get("ready"), "the forge did not start"
        return self

    def __exit__(self, *_) -> None:
        for pid in descendants(self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()

    def start(
        self, *overrides: str, kill: dict | None = None, prepare: str = "", plain: bool = False, **environment: str
    ) -> Started:
        """Start a run. `plain`: with these arguments alone; `prepare`: Python that the run's process executes first."""
        number = len(self.started)
        run = Started(self, number, self.folder / f"log-{number}.txt", self.folder / f"stages-{number}")
        self.started.append(run)
        words = list(overrides) if plain else arguments(self.folder, *overrides)
        self.process.stdin.write(
            json.dumps(
                {
                    "id": number,
                    "arguments": words,
                    "log": str(run.log),
                    "stages": str(run.stages),
                    "kill": kill,
                    "prepare": prepare,
                    "environment": environment,
                }
            )
            + "\n"
        )
        self.process.stdin.flush()
        while run.pid is None:
            assert self.listen(10.0), "the forge is gone"
        return run

    def run(self, *overrides: str, **options) -> Started:
        """Start a run and wait for it to end well."""
        run = self.start(*overrides, **options)
        assert run.wait() == 0, run.text
        return run

    def listen(self, seconds: float) -> bool:
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return False
        line = self.process.stdout.readline()
        assert line, "the forge is gone"
        report = json.loads(line)
        run = self.started[report["id"]]
        run.pid, run.code = report.get("pid", run.pid), report.get("code", run.code)
        return True

    def orphans(self) -> list[int]:
        """Processes of runs that are still alive five seconds after their run has ended."""
        deadline = time.monotonic() + 5
        while (left := descendants(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left


# ---- Settings of short runs ------------------------------------------------------------------------------------------

QUIET = ("sample_during_eval=false",)
SHORT = (*QUIET, "n_epochs=1", "schedule=constant", "checkpoint.formats=[state]")  # 6 steps, saves after 2, 4 and 6
SLOW_STEPS = """
import time, trainers
step = trainers.BasicTrainer.train_step
def slow(self, *arguments):
    time.sleep(0.3)
    return step(self, *arguments)
trainers.BasicTrainer.train_step = slow
"""


def resume(forge, place, *changes, **options):
    return forge.start(f"resume={place}", *changes, plain=True, **options)


if __name__ == "__main__":
    assert sys.argv[1:] == ["serve"]
    serve()
