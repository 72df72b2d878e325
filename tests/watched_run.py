"""A tiny run with everything about it written down that a setting could change, and the settings that it read.

All of it happens in this process, in a world of one: sharded trainers need a process group of that size. What happens
before a rank's own work (devices, processes, meeting point, waiting times) is watched at the calls that would do it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import json
import os
import re
import shlex
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
from conftest import compose_config
from omegaconf import OmegaConf
from runs import new_run_dir

import settings
import train
import trainers
from checkpoint import run_folder, step_writer
from checkpoint.state import full_state
from data import sources
from parallel import build, fsdp, launch, rank_process, spawn
from parallel.placement import Placement
from report.page_logger import PageLogger
from settings import Settings, as_dict
from settings.shard_layout import layout_of
from utils import World

TIMES = ("time", "examples_per_second", "tokens_per_second", "memory", "seconds")


@functools.cache
def _composed(*groups: str):
    return compose_config(*groups)


@functools.cache
def _parsed(value: str):
    return OmegaConf.create(f"value: {value}").value


def compose(words: list[str]):
    """As Hydra composes them, but with Hydra for the groups only: it takes most of the time. The last word of a key
    holds."""
    is_group = [word.partition("=")[0] in ("model", "loss", "fsdp") for word in words]
    last = {word.partition("=")[0]: word for word, group in zip(words, is_group) if group}
    config = copy.deepcopy(_composed(*sorted(last.values())))
    for word, group in zip(words, is_group):
        if not group:
            key, _, value = word.lstrip("+").partition("=")
            OmegaConf.update(config, key, _parsed(value), force_add=True)
    return config


def words_of(*lines: str) -> list[str]:
    return [word for line in lines for word in shlex.split(line)]


class Recorder:
    """Settings that note which keys are read one by one. Copies of all of them, such as config.yaml, do not count."""

    def __init__(self):
        self.reads: set[str] = set()
        self.paused = False

    def watched(self, section, prefix: str = ""):
        kind, recorder = type(section), self
        names = {declared.name for declared in dataclasses.fields(section)}

        def read(this, name):
            value = object.__getattribute__(this, name)
            if name in names and not recorder.paused and not dataclasses.is_dataclass(value):
                if prefix + name == "loss.options":
                    recorder.reads.update(f"loss.{option}" for option in value)
                recorder.reads.add(prefix + name)
            return value

        values = {name: getattr(section, name) for name in names}
        for name, value in values.items():
            if dataclasses.is_dataclass(value):
                values[name] = self.watched(value, f"{prefix}{name}.")
        return type(kind.__name__, (kind,), {"__getattribute__": read})(**values)

    def as_dict(self, section):
        self.paused = True
        try:
            return as_dict(section)
        finally:
            self.paused = False


def _files(folder: Path) -> set[str]:
    return {os.path.join(place, name) for place, _, names in os.walk(folder) for name in names}


class Stop(Exception):
    """Ends a call where what was to be seen has been seen."""


def launched(config: Settings) -> list:
    """Devices, meeting point and waiting times that starting the run would ask for, and how the world is divided."""
    seen: list = []

    def spawned(function, config, run_dir, devices, group):
        seen.append(("processes", devices, group))
        with patch.object(spawn, "Rendezvous", side_effect=Stop) as meeting, contextlib.suppress(Stop):
            spawn.spawn(function, config, run_dir, devices, group)
        seen.append(("meeting", meeting.call_args.args))
        with patch("torch.distributed.init_process_group", side_effect=Stop) as joining, contextlib.suppress(Stop):
            rank_process.call_in_group(function, config, run_dir, World(0, len(devices)), "env://")
        seen.append(("joining", joining.call_args.kwargs["timeout"]))

    with patch.object(launch, "spawn", spawned), patch("torch.cuda.is_available", lambda: False):
        launch.launch(lambda config, run_dir, world: seen.append(world.device), config)
    with contextlib.suppress(ValueError):
        seen.append(layout_of(config, 4).grid)
    return seen


def watched_run(folder: Path, words: list[str], reads: set[str], prepare=None) -> dict:
    """What is seen of a run; `reads` takes the keys that it read. An error that ends the run is seen as well.

    "workers" and "caches" depend on what earlier runs left behind; all else does not.
    """
    before = _files(folder)
    recorder = Recorder()
    config = recorder.watched(settings.finalize(compose(words)))
    assert isinstance(config, Settings)
    seen: dict = {"calls": [], "workers": [], "steps": [], "evaluations": [], "wandb": [], "launch": launched(config)}
    with patch.object(settings, "as_dict", recorder.as_dict):
        made = run_folder.make(config)
    seen["run folder"] = re.sub(r"_\d{4}-\d\d-\d\d_.*", "", made)
    own = config.local_run_dir is None and config.resume is None
    run_dir, trainer = new_run_dir(folder) if own else made, None
    with contextlib.ExitStack() as stack:
        for watch in _watches(seen, recorder):
            stack.enter_context(watch)
        for stream in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(stream(io.StringIO()))
        stack.enter_context(patch.dict(sys.modules, {"wandb": _wandb(seen["wandb"])}))
        try:
            trainer = trainers.TRAINERS[config.trainer](config, run_dir, World())
            _watch_trainer(trainer, seen)
            if prepare:
                prepare(trainer)
            with trainer.signals:
                trainer.train()
            trainer.reporter.finish(True)
            weights = full_state(trainer.policy, World())
            seen["weights"] = {name: value.double().sum().item() for name, value in weights.items()}
        except (ValueError, FloatingPointError) as error:
            seen["error"] = f"{type(error).__name__}: {error}"
        finally:
            if trainer:
                trainer.heartbeat.close()
                trainer.checkpointer.close()
    seen["parts"] = _parts(trainer)
    for name in ("metrics", "samples", "notices"):
        seen[name] = _rows(Path(run_dir) / f"{name}.jsonl", run_dir)
    names = sorted(path.replace(run_dir, "RUN") for path in _files(folder) - before)
    names = [re.sub(r"\d{4}-\d\d-\d\d_[\d_-]+|(?<=-)\d+-[0-9a-f]{8,}", "#", name) for name in names]
    seen["files"] = [name for name in names if name.startswith("RUN")]
    seen["caches"] = [name for name in names if not name.startswith("RUN") and "config.yaml" not in name]
    if own:
        for done in (made, run_dir):
            shutil.rmtree(done)
    reads |= recorder.reads
    return seen


def _watches(seen: dict, recorder: Recorder):
    """Patches that note what is asked of torch and of our own placement, and do it."""
    calls = seen["calls"]

    def note(module, name: str, described, calls=calls):
        original = getattr(module, name)

        @functools.wraps(original)
        def noted(*arguments, **named):
            calls.append((name, described(*arguments, **named)))
            return original(*arguments, **named)

        return patch.object(module, name, noted)

    yield patch.object(
        PageLogger, "wanted", lambda settings: False
    )  # a third of the time, and it shows what others have
    yield patch("training.preparation.as_dict", recorder.as_dict)
    yield note(build, "find_blocks", lambda model, name: name)
    yield note(build, "checkpoint_activations", lambda blocks, every: every)
    yield note(fsdp, "fully_shard", lambda module, **named: (type(module).__name__, _plain(named)))
    yield note(Placement, "build_model", lambda self, config, tokenizer, dtype, frozen=False: (dtype, frozen))
    yield note(step_writer.Save, "write", lambda *_: threading.current_thread() is threading.main_thread())
    yield note(torch.optim.Optimizer, "__init__", lambda self, params, defaults: (type(self).__name__, defaults))
    yield patch.object(torch, "compile", lambda function, **named: calls.append(("compile", named)) or function)
    for direction in ("forward", "backward"):
        name = f"set_modules_to_{direction}_prefetch"
        yield note(torch.distributed.fsdp.FSDPModule, name, lambda self, modules: len(modules))
    yield note(torch.distributed.fsdp.FSDPModule, "set_requires_gradient_sync", lambda self, wanted: wanted)
    # Only where data are not cached yet, so it is kept apart.
    yield note(sources, "worker_count", lambda number: number, seen["workers"])


def _plain(named: dict) -> dict:
    return {name: str(value) for name, value in named.items()}


def _wandb(calls: list):
    def init(**named):
        calls.append({name: named[name] for name in ("project", "entity", "name", "group", "tags", "notes")})
        return MagicMock()

    return SimpleNamespace(run=None, init=init, Settings=lambda **_: None, Table=MagicMock(), finish=lambda: None)


def _watch_trainer(trainer, seen: dict) -> None:
    step, evaluate = trainer.train_step, trainer.evaluate

    def watched_step(given):
        shapes = [None if batch is None else tuple(batch.input_ids.shape) for batch in given.micro_batches]
        metrics = step(given)
        seen["steps"].append((shapes, metrics))
        return metrics

    def watched_evaluation():
        seen["evaluations"].append((trainer.state.examples, evaluate()))
        return seen["evaluations"][-1][1]

    trainer.train_step, trainer.evaluate = watched_step, watched_evaluation


def _parts(trainer) -> dict:
    found = {name: getattr(trainer, name, None) for name in ("kernel", "full_forward", "first_budget")}
    if getattr(trainer, "eval_sampler", None):
        found["evaluation"] = trainer.eval_sampler.n_steps
    return found


def _rows(path: Path, run_dir: str) -> list:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        for name in [*row]:
            if name in TIMES or "second" in name or "memory" in name:
                del row[name]
            elif isinstance(row[name], str):
                row[name] = row[name].replace(run_dir, "RUN")
    return rows


def planned(words: list[str]) -> list:
    """What plan=true is asked to plan for, or that a run was started."""
    seen: list = []
    with (
        patch("planning.command.print_plan", lambda config: seen.append(("plan", config.plan_device_memory_gb))),
        patch.object(train, "check_devices", lambda *_: None),
        patch.object(train, "run", lambda *_, **__: seen.append("run")),
    ):
        train.main.__wrapped__(compose(words))
    return seen
