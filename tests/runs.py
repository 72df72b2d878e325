"""Real training runs in this process or in a pool of processes, watched step by step: shared by the trainers' tests.

A whole run of a tiny model takes a second; starting a process takes five. So the tests call the trainers as train.py
does, and `Pool` keeps its processes over many runs.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import compose_config

from utils import World, die_with_parent

# 13 prompts with 1 to 3 pairs each: 26 pairs, so that an epoch of steps of 5 ends in a step of 1.
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
    "a bridge",
    "moss",
)
# What every run starts from; debug: no checkpoints.
QUICK = (
    "loss=dpo",
    "device=cpu",
    "wandb.enabled=false",
    "sample_during_eval=false",
    "do_first_eval=false",
    "data.num_workers=1",
    "minimum_log_interval_secs=0",
    "eval_every=1000000",
    "debug=true",
)
# Large enough that a wrong gradient shows in the losses within a few steps, and not so large that rounding does.
STRONG = ("lr=1e-4", "warmup_steps=2", "n_epochs=2", "n_examples=50", "batch_size=5")
LLAMA = ("model=tiny",)
NEOX = (
    "model=blank_model",
    "model.name_or_path=neox",
    "model.random_config={model_type:gpt_neox,hidden_size:64,intermediate_size:128,num_hidden_layers:2,"
    "num_attention_heads:4}",
)
MODELS = {"llama": LLAMA, "neox": NEOX}
FSDP = ("trainer=FSDPTrainer",)
PLACEMENTS = {
    "FULL_SHARD": FSDP,
    "SHARD_GRAD_OP": (*FSDP, "fsdp=shard_grad_op"),
    "HYBRID_SHARD": (*FSDP, "fsdp=hybrid_shard", "fsdp.replicas=2"),
    "NO_SHARD": (*FSDP, "fsdp=no_shard"),
    "TP": ("trainer=TensorParallelTrainer", "tp_size={size}"),
    "FSDP+TP": ("trainer=TensorParallelTrainer", "tp_size=2"),
}


def placement(name: str, size: int) -> list[str]:
    """The options of one of PLACEMENTS for a world of this size."""
    if name == "HYBRID_SHARD" and size == 1:
        return [*FSDP, "fsdp=hybrid_shard"]
    options = [option.format(size=size) for option in PLACEMENTS[name]]
    return [*options, "world_size=1"] if size == 1 else options  # alone only where it is asked for


def write_data(folder: Path, prompts: int = 13, held_out: int = 3) -> Path:
    """A folder with train.jsonl (1, 2 or 3 pairs a prompt over as many responses and one) and test.jsonl (5 pairs)."""
    folder.mkdir(parents=True, exist_ok=True)

    def row(number, n_pairs):
        subject = SUBJECTS[number % len(SUBJECTS)]
        # Every text another: responses alike would be the same work, and a mistake in their order would not show.
        responses = [
            f" {subject.capitalize()} is {'quite ' * (k + number % 2)}number {number * 7 + k}."
            for k in range(n_pairs + 1)
        ]
        # The first response is in every pair, so that sharing a response over pairs is put to work.
        return {
            "prompt": f"Tell me of {subject}{', please' * (number % 3)}:",
            "responses": responses,
            "pairs": [[0, k] if k % 2 else [k, 0] for k in range(1, n_pairs + 1)],
            "sft_target": responses[0],
        }

    train = [row(number, 1 + (number + 1) % 3) for number in range(prompts)]
    test = [row(20 + number, n_pairs) for number, n_pairs in zip(range(held_out), (2, 1, 2))]
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings_of(folder: Path, *overrides: str):
    """Checked settings of a run on the data in folder/data, which keeps all its files in `folder`.

    Of several overrides of one key the last one holds.
    """
    import settings

    every = (
        *QUICK,
        f"datasets=[{folder}/data]",
        f"local_dirs=[{folder}/runs]",
        f"data.cache_dir={folder}/tokens",
        *overrides,
    )
    config = compose_config(*{override.split("=")[0]: override for override in every}.values())
    settings.validate(config, device_count=0)
    return settings.finalize(config)


@dataclass
class Run:
    """What was seen of a run: every step's mean loss and gradient norm, evaluations, final weights by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    steps: list[dict] = field(default_factory=list)
    evals: list[dict] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    result: float | None = None
    run_dir: str = ""
    bytes_held: int = 0  # by this rank: parameters, gradients and optimizer state
    examples: list = field(default_factory=list)


_numbers = itertools.count()


def new_run_dir(folder: Path) -> str:
    run_dir = folder / "made" / f"{os.getpid()}-{next(_numbers)}"
    run_dir.mkdir(parents=True)
    return str(run_dir)


def train(folder: Path, *overrides: str, world: World = World(), prepare=None, run_dir: str | None = None) -> Run:
    """Train as train.py would on this rank, and watch.

    Args:
        prepare: called with the trainer before anything is loaded.
        run_dir: the same on every rank; a new one when None, which does for one rank only.
    """
    import trainers
    from checkpoint.state import full_state

    config = settings_of(folder, *overrides, *(() if world.size == 1 else (f"world_size={world.size}",)))
    seen = Run(run_dir=run_dir or new_run_dir(folder))

    make, trainers_made = trainers.TRAINERS[config.trainer], []

    def watch(config, run_dir, world):
        trainer = make(config, run_dir, world)
        step, evaluate, train_all = trainer.train_step, trainer.evaluate, trainer.train

        def watched_step(*arguments):
            metrics = step(*arguments)
            if metrics is not None:
                seen.steps.append({name: value / count for name, (value, count) in metrics.items()})
                seen.losses.append(seen.steps[-1]["loss/train"])
                seen.norms.append(seen.steps[-1]["grad_norm"])
            return metrics

        def watched_evaluation():
            seen.evals.append(evaluate())
            return seen.evals[-1]

        def watched_training():
            result = train_all()
            state = full_state(trainer.policy, world, copy=True)  # before the group of a sharded model is closed
            seen.weights = {name: value.detach() for name, value in state.items()}
            return result

        trainer.train_step, trainer.evaluate, trainer.train = watched_step, watched_evaluation, watched_training
        trainer.seen = seen
        if prepare:
            prepare(trainer)
        trainers_made.append(trainer)
        return trainer

    with patch.dict(trainers.TRAINERS, {config.trainer: watch}):
        seen.result = trainers.run(config, seen.run_dir, world)
    (trainer,) = trainers_made
    seen.notices = list(trainer.reporter.notices)
    return seen


def train_in_two(folder: Path, *overrides: str, stop_in: int, prepare=None) -> tuple[Run, Run]:
    """A run that a signal comes to in the step `stop_in`, so that it ends after the next one, and the run that goes on
    from there. `prepare` is called with both trainers."""
    import signal

    from checkpoint import run_folder

    run_dir, stopped = new_run_dir(folder), []

    def stopping(trainer):
        if prepare:
            prepare(trainer)
        stopped.append(trainer.seen)
        step = trainer.train_step

        def interrupted(s):
            metrics = step(s)
            if s.number == stop_in:
                trainer.signals.received = signal.SIGTERM
            return metrics

        trainer.train_step = interrupted

    run_folder.make(settings_of(folder, *overrides, f"local_run_dir={run_dir}"))
    with suppress(SystemExit):
        train(folder, *overrides, prepare=stopping, run_dir=run_dir)
        raise AssertionError("the run was not stopped")
    return stopped[0], train(folder, *overrides, f"resume={run_dir}", prepare=prepare, run_dir=run_dir)


_baselines: dict[tuple, Run] = {}


def baseline(folder: Path, *overrides: str) -> Run:
    """BasicTrainer's run that others are compared with: trained once."""
    if (folder, overrides) not in _baselines:
        _baselines[folder, overrides] = train(folder, *overrides, *STRONG)
    return _baselines[folder, overrides]


class ChangedPlacement:
    """A placement with some methods replaced: trainer.placement = ChangedPlacement(trainer.placement, ...)."""

    def __init__(self, placement, **methods):
        self.original = placement
        vars(self).update(methods)

    def __getattr__(self, name):
        return getattr(self.original, name)


def spoil(*which, value=float("nan")):
    """Makes the losses of the which-th pairs that are trained on not finite, by a loss of its own."""
    seen = {"pairs": 0}

    def prepare(trainer):
        training = trainer.losses_and_metrics

        def spoiled(split, batch):
            per_example_loss, metrics = training(split, batch)
            if split == "eval":
                return per_example_loss, metrics
            factor = torch.ones_like(per_example_loss)
            for place in range(len(factor)):
                if seen["pairs"] in which:
                    factor[place] = value
                seen["pairs"] += 1
            metrics.values[:, 0] *= factor
            return per_example_loss * factor, metrics

        trainer.losses_and_metrics = spoiled

    return prepare


def distance(one: dict, other: dict) -> float:
    """2-norm of the difference of two sets of weights, relative to the weights' own."""
    assert one.keys() == other.keys()
    difference = sum(((one[name].double() - other[name].double()) ** 2).sum() for name in one)
    return math.sqrt(difference / sum((value.double() ** 2).sum() for value in one.values()))


def assert_same_training(one: Run, other: Run, losses: float = 1e-5, weights: float = 1e-4) -> None:
    """Law 1: losses within `losses` of each other (relative to them where above 1), weights within `weights`."""
    assert len(one.losses) == len(other.losses) > 1
    assert max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(one.losses, other.losses)) < losses
    assert max(abs(a - b) / a for a, b in zip(one.norms, other.norms)) < 1e-4
    assert distance(one.weights, other.weights) < weights


def save_model(folder: Path, kind: str, seed: int = 0, **options):
    """A local Hugging Face folder of a tiny model with the byte tokenizer, as `hf download` would leave it.

    `options` go to save_pretrained. Returns the model.
    """
    import architectures

    from modeling import loading

    tokenizer = loading.byte_tokenizer()
    model = architectures.make(kind, seed=seed, spread=2.0, vocab_size=len(tokenizer))
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Several processes


def _serve(rank: int, size: int, pipe, parent: int) -> None:
    """A process of a pool: carries out what it is sent, each call in a process group of its own."""
    die_with_parent(parent)
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, store = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
            )
            pipe.send((True, function(World(rank, size, rank, "cpu"), *arguments)))
        except Exception as problem:
            with suppress(Exception):
                problem.add_note(traceback.format_exc())
            pipe.send((False, problem))
        finally:
            with suppress(Exception):
                dist.destroy_process_group()


class Pool:
    """Processes that train together, kept over many runs because starting one takes seconds.

    `run(function, *arguments)` calls function(world, *arguments) on every rank and returns the results by rank. An
    error of a rank is raised here; ranks that then do not end by themselves are killed, and the next call starts anew.
    """

    def __init__(self, size: int):
        self.size, self.processes, self.pipes = size, [], []

    def start(self) -> None:
        context = mp.get_context("spawn")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, there, os.getpid()), daemon=False)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes, self.pipes = [], []

    def run(self, function, *arguments, timeout: float = 120) -> list:
        if not self.processes:
            self.start()
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self.pipes:
                pipe.send((function, arguments, os.path.join(folder, "store")))
            replies: dict[int, tuple] = {}
            deadline = time.monotonic() + timeout
            while len(replies) < self.size:
                failed = any(not good for good, _ in replies.values())
                ready = connection.wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in replies], 0.5)
                for pipe in ready:
                    rank = self.pipes.index(pipe)
                    try:
                        replies[rank] = pipe.recv()
                    except EOFError:
                        replies[rank] = (False, RuntimeError(f"rank {rank} died"))
                    if not replies[rank][0] and not failed:
                        deadline = min(deadline, time.monotonic() + 5)
                if time.monotonic() > deadline:
                    missing = [rank for rank in range(self.size) if rank not in replies]
                    self.stop()
                    first = next((value for good, value in replies.values() if not good), None)
                    raise first or TimeoutError(f"ranks {missing} did not come back in {timeout} s")
        problems = [replies[rank][1] for rank in range(self.size) if not replies[rank][0]]
        if problems:
            raise problems[0]
        return [replies[rank][1] for rank in range(self.size)]


def train_on_rank(world: World, folder: Path, overrides: tuple, prepare=None, run_dir: str | None = None) -> Run:
    return train(folder, *overrides, world=world, prepare=prepare, run_dir=run_dir)


def train_together(pool: Pool, folder: Path, *overrides: str, prepare=None, timeout: float = 120) -> list[Run]:
    """Train on all ranks of a pool; what each rank saw."""
    return pool.run(train_on_rank, folder, overrides, prepare, new_run_dir(folder), timeout=timeout)
