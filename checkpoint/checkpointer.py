"""Saving a run so that nothing can be lost, and resuming it exactly.

    checkpointer = Checkpointer(run_dir, config.checkpoint, world, notice)    # on every rank, after init_process_group
    problem = checkpointer.save(examples, model, optimizer, tokenizer, trainer_state, metrics)     # None: all is well
    checkpointer.poll()      # with async_save: now and then, at the same place on every rank; finishes what is written
    checkpointer.finish()    # waits for a pending save and finishes it; returns its problem or None
    checkpointer.close()     # finish, and give the run folder free

    step = checkpointer.resumable()                              # newest complete and undamaged step folder, or None
    trainer_state = checkpointer.load(step, model, optimizer)    # in place; RNG too when the world is the same

Every method is collective: all ranks call it, and all get the same answer. `model` may be a plain module, or sharded by
fully_shard, tensor parallelism or both (DTensor); the optimizer any of torch.optim that steps without a closure.
Parameters are known by their names in state_dict(), so a state saved on one world loads on any other.

`trainer_state` is a dict of numbers, strings, tensors, lists and dicts (weights_only can read it back): schedule,
counters, data cursor, scaler, reporter, best-so-far, config digest. Rank 0's is the one that is kept. The states of the
random generators are kept for each rank.

How a save goes: all ranks write into step-N.tmp, each syncs and checksums what it wrote, all agree that it went well,
then rank 0 writes the manifest, renames the folder and moves LATEST. A kill at any moment leaves LATEST on a complete
folder. A save that fails on any rank is undone on all; the run goes on and is told so.

torch's own get_optimizer_state_dict is not used: for an optimizer that has not stepped yet it takes a step with zero
gradients, and so invents the state that such a checkpoint should not have.
"""

import io
import os
import pickle
import random
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from checkpoint import step_folders
from checkpoint.archives import InertReader, listing, named_tensors, write_hf_folder
from checkpoint.step_folders import find_resumable, free_bytes, gigabytes, metric_mode  # noqa: F401
from utils import sync_folder

FORMATS = ("state", "policy", "hf")
DEFAULT_BEST_METRIC = "loss/eval"
# Choices of an optimizer's implementation that belong to the machine, not to the run: the new process keeps its own.
MACHINE_OPTIONS = ("fused", "foreach", "capturable", "differentiable")
# A rank may write hundreds of GB while the others wait for it; a dead rank is noticed by its closed connection anyway.
PATIENCE = timedelta(hours=6)

# Called with the name of each stage of a save as it begins: tests kill the process or raise there.
hooks = []


def _at(stage):
    for hook in hooks:
        hook(stage)


# ---- what is in the state -------------------------------------------------------------------------------------------


def model_tensors(model):
    """{'model.<name>': tensor (as sharded)}: parameters and persistent buffers, tied ones once."""
    return {"model." + names[0]: tensor.detach() for names, tensor in named_tensors(model)}


def optimizer_tensors(model, optimizer):
    """Takes an optimizer's state apart.

    Returns ({'optimizer.<entry>.<parameter name>': tensor}, description), the description being made of plain values:
    class, hyperparameters and parameter names of each group, entries that are no tensors, and entries without
    dimensions that live on an accelerator.
    """
    name_of = {id(tensor): names[0] for names, tensor in named_tensors(model)}
    tensors, values, on_device = {}, {}, []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = name_of[id(parameter)]
            for entry, value in optimizer.state.get(parameter, {}).items():
                assert "." not in entry
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{entry}.{name}"] = value.detach()
                    if value.dim() == 0 and value.device.type != "cpu" and entry not in on_device:
                        on_device.append(entry)
                else:
                    values.setdefault(name, {})[entry] = value
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "names": [name_of[id(parameter)] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "values": values, "on_device": on_device}


def full_state(model, world, copy=False):
    """{name: full CPU tensor} on rank 0, {} elsewhere.

    Gathered one parameter after the other, so that only rank 0 ever holds a whole model.
    On one CPU process these are the model's own tensors, unless `copy`.
    """
    state = {}
    for names, tensor in named_tensors(model):
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            if tensor.device.type != tensor.device_mesh.device_type:  # offloaded: gather where the mesh communicates
                tensor = tensor.to(tensor.device_mesh.device_type)
            gathered = tensor.full_tensor()
        else:
            gathered = tensor
        if world.is_main:
            value = gathered.cpu()
            # a copy too where the tensor is a window on a larger storage: torch.save would write all of that
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if (copy and value.data_ptr() == own.data_ptr()) or value.untyped_storage().nbytes() > value.nbytes:
                value = value.clone(memory_format=torch.contiguous_format)
            state.update(dict.fromkeys(names, value))
    return state


def _to_host(tensor):
    """A copy in host memory that later steps do not touch, sharded as before."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _packed(content):
    """The bytes of trainer.pt, read back at once: one that cannot be read must not wait for the resume to show."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError(f"trainer_state must be made of numbers, strings, tensors, lists and dicts: {error}") from None
    return buffer.getvalue()


def estimate_bytes(model, optimizer, formats=FORMATS):
    """Bytes that a save of these formats takes on disk, over all ranks."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model_tensors(model).values())
    moments = 0
    if optimizer is not None:
        moments = sum(t.numel() * t.element_size() for t in optimizer_tensors(model, optimizer)[0].values())
    sizes = {"state": weights + moments, "policy": weights, "hf": weights}
    return int(sum(sizes[name] for name in formats) * 1.01) + (1 << 20)


def rng_state():
    """The state of every random generator of this process, in plain values and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state):
    """Puts back what rng_state() gave. An accelerator's state is skipped where there is no such accelerator."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


# ---- the checkpointer -----------------------------------------------------------------------------------------------


@dataclass
class _Save:
    """All that one save writes, taken at the moment of save(): with async_save, training goes on under it."""

    examples: int
    formats: tuple
    metrics: dict
    final: Path
    temporary: Path
    trainer: bytes = b""
    rng: dict = field(default_factory=dict)
    tensors: dict = field(default_factory=dict)
    full: dict = field(default_factory=dict)
    model: object = None
    tokenizer: object = None


class _Writer(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        _at("state")
        return super().write_data(plan, planner)


class Checkpointer:
    """See the top of the file. `settings` is config.checkpoint; `notice` is called with text that the user must see."""

    def __init__(self, run_dir, settings, world, notice=print, watched=None):
        """`watched`: (metric, "min" or "max") by which the best is kept if the settings name none."""
        self.run_dir, self.world, self.notice = Path(run_dir), world, notice
        self.formats = tuple(settings.formats)
        self.keep_last, self.keep_best = settings.keep_last, settings.keep_best
        self.best_metric, self.best_mode = settings.best_metric or DEFAULT_BEST_METRIC, None
        if watched and settings.best_metric in (None, watched[0]):
            self.best_metric, self.best_mode = watched
        self.problem = None  # of the last save that ended; None if it went well
        self._pending = None
        self._group = self._background = self._executor = self._lock = None
        if world.size > 1:
            # Groups of its own: the waiting times differ from those of training, and a save in the background must
            # never meet training's collectives (it crashed when they shared one).
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        if settings.async_save:
            self._executor = ThreadPoolExecutor(1, "checkpoint")
            self._background = dist.new_group(backend="gloo", timeout=PATIENCE) if world.size > 1 else None
        problem = self._agree(self._attempt(self._take_folder) if world.is_main else None)
        if problem:
            raise ValueError(problem.removeprefix("ValueError: "))

    def _take_folder(self):
        self.run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = step_folders.lock(self.run_dir)
        except OSError as error:
            self.notice(f"{self.run_dir} cannot be locked ({error.strerror}): see that no second run writes there")
        try:
            removed = step_folders.recover(self.run_dir)
        except OSError as error:
            self.notice(f"what a dead run left in {self.run_dir} cannot be cleared away ({error})")
        else:
            if removed:
                self.notice(f"cleared away what an interrupted save left behind: {', '.join(removed)}")

    # -- agreement

    def _gather(self, thing):
        if self._group is None:
            return [thing]
        things = [None] * self.world.size
        dist.all_gather_object(things, thing, group=self._group)
        return things

    def _agree(self, problem):
        """Every rank's problem (or None) in, one answer for all out: None only if none has one."""
        problems = self._gather(problem)
        if len(set(problems)) == 1:
            return problems[0]
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)

    @staticmethod
    def _attempt(action, *arguments):
        """Runs an action that touches the disk. Returns what went wrong in words, or None."""
        try:
            action(*arguments)
        except CheckpointException as error:  # torch's own agreement: the same on all ranks
            causes = {rank: failure[0] for rank, failure in error.failures.items()}
            for cause in causes.values():
                if isinstance(cause, (KeyboardInterrupt, SystemExit)):
                    raise cause from error
            return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    # -- saving

    def save(self, examples, model, optimizer, tokenizer, trainer_state, metrics=None, formats=None):
        """Saves the run as step-<examples>. Returns None, or what went wrong in words (already told through `notice`).

        With async_save it returns as soon as everything is copied to host memory, and the problem comes from the
        poll(), finish() or close() that finds the writing done. Raises TypeError for a trainer_state that could not be
        read back.
        """
        self.finish()
        formats = self.formats if formats is None else tuple(formats)
        assert set(formats) <= set(FORMATS), formats
        copy = self._executor is not None
        final = self.run_dir / step_folders.step_name(examples)
        plan = _Save(
            examples,
            formats,
            {key: float(value) for key, value in (metrics or {}).items()},
            final,
            final.with_name(final.name + ".tmp"),
            rng=rng_state(),
            model=model,
            tokenizer=tokenizer,
        )
        tensors, description = optimizer_tensors(model, optimizer) if optimizer is not None else ({}, None)
        plan.trainer = _packed(
            {
                "format": 1,
                "examples": examples,
                "world": self.world.size,
                "optimizer": description,
                "trainer": trainer_state,
            }
        )
        problem = self._attempt(self._open, plan, model, optimizer) if self.world.is_main else None
        problem = self._agree(problem)
        if problem is None and not plan.temporary.is_dir():
            problem = f"{plan.temporary} is not seen here: local_dirs must be on a file system that all nodes share"
        problem = self._agree(problem)
        if problem is None:
            if "state" in formats:
                tensors.update(model_tensors(model))
                plan.tensors = {key: _to_host(tensor) for key, tensor in tensors.items()} if copy else tensors
            if "policy" in formats or "hf" in formats:
                plan.full = full_state(model, self.world, copy)
            if copy:
                self._pending = plan, self._executor.submit(self._write, plan, self._background)
                return None
        outcome = (problem, {}) if problem else self._write(plan, self._group)
        return self._conclude(plan, outcome)

    def _open(self, plan, model, optimizer):
        """Rank 0: is there room, can the folder be made?"""
        _at("open")
        needed, free = estimate_bytes(model, optimizer, plan.formats), free_bytes(self.run_dir)
        if needed > free:
            raise OSError(f"it needs {gigabytes(needed)} and {self.run_dir} has {gigabytes(free)} free")
        shutil.rmtree(plan.temporary, ignore_errors=True)
        plan.temporary.mkdir()

    def _write(self, plan, group):
        """Writes this rank's files. Returns (problem or None, {relative path: [size, digest]} of the files it wrote).

        The sharded state comes first: torch agrees over it among all ranks, so none may fail before and stay away.
        """
        if "state" in plan.formats:
            problem = self._attempt(self._write_tensors, plan, group)
            if problem:
                return problem, {}
        files = {}
        return self._attempt(self._write_rest, plan, files), files

    def _write_tensors(self, plan, group):
        writer = _Writer(plan.temporary / "state", sync_files=False)  # they are synced with the checksums
        dcp.save(plan.tensors, storage_writer=writer, process_group=group, no_dist=group is None)

    def _write_rest(self, plan, files):
        rank, main, folder = self.world.rank, self.world.is_main, plan.temporary
        written = []
        if "state" in plan.formats:
            _at("rng")
            torch.save(plan.rng, folder / "state" / f"rng-{rank}.pt")
            written += [f"state/rng-{rank}.pt", *(f"state/{p.name}" for p in (folder / "state").glob(f"__{rank}_*"))]
            if main:
                (folder / "state" / "trainer.pt").write_bytes(plan.trainer)
                written += ["state/trainer.pt", "state/.metadata"]
        if main and "policy" in plan.formats:
            _at("policy")
            torch.save({"step_idx": plan.examples, "state": plan.full, "metrics": plan.metrics}, folder / "policy.pt")
            written.append("policy.pt")
        if main and "hf" in plan.formats:
            _at("hf")
            write_hf_folder(plan.model, plan.full, plan.tokenizer, folder / "hf")
            written += [f"hf/{name}" for name in step_folders.files_below(folder / "hf")]
        plan.full = plan.tensors = {}
        _at("checksum")
        for name in written:
            files[name] = step_folders.checksum(folder / name, fsync=True)

    def _conclude(self, plan, outcome):
        """All ranks have written: complete the folder, or take it back."""
        outcomes = self._gather(outcome)
        problem = self._agree(outcome[0])
        if problem is None:
            files = {name: entry for _, written in outcomes for name, entry in written.items()}
            problem = self._agree(self._attempt(self._complete, plan, files) if self.world.is_main else None)
        if problem is not None and self.world.is_main:
            # torch's writers speak of unexpected positions when the disk is full; looked at before tidying makes room
            if "unexpected pos" in problem or (free_bytes(self.run_dir) < 1 << 20 and "No space left" not in problem):
                problem = f"the disk is full, or writing to it failed: {problem}"
            shutil.rmtree(plan.temporary, ignore_errors=True)
            latest = step_folders.read_latest(self.run_dir)
            good = f"the last good checkpoint is {latest.name}" if latest else "there is no checkpoint of this run yet"
            self.notice(
                f"CHECKPOINT {plan.final.name} WAS NOT SAVED ({problem}). Training goes on; {good}. "
                f"Mend this before the next save."
            )
        if problem is not None:
            problem = self._gather(problem)[0]  # and nobody goes on before it is taken back
        self.problem = problem
        return problem

    def _complete(self, plan, files):
        _at("manifest")
        step_folders.write_manifest(plan.temporary, plan.examples, plan.metrics, files)
        replaced = plan.final.with_name(plan.final.name + ".replaced")
        _at("rename")
        if plan.final.exists():
            if replaced.exists():
                step_folders.remove_folder(replaced)
            os.rename(plan.final, replaced)
            _at("replace")
        try:
            os.rename(plan.temporary, plan.final)
        except OSError:
            if replaced.exists():
                os.rename(replaced, plan.final)
            raise
        sync_folder(self.run_dir)
        _at("latest")
        step_folders.point_latest(self.run_dir, plan.final)
        _at("retention")
        self._retain()
        _at("end")

    def _retain(self):
        """Rank 0: deletes all steps but the last `keep_last`, the best, and the one that LATEST points to; tells of
        what cannot be deleted."""
        try:
            for replaced in self.run_dir.glob("step-*.replaced"):
                step_folders.remove_folder(replaced)
            if self.keep_last is not None:
                self._delete_old_steps()
        except OSError as error:
            self.notice(f"an old checkpoint could not be removed: {error}")

    def _delete_old_steps(self):
        steps = step_folders.complete_steps(self.run_dir)
        kept = {folder for _, folder in steps[max(0, len(steps) - self.keep_last) :]}
        kept |= {step_folders.read_latest(self.run_dir)}
        if self.keep_best:
            kept |= {step_folders.best_step(steps, self.best_metric, self.best_mode)}
        for _, folder in steps:
            if folder not in kept:
                step_folders.remove_folder(folder)

    def poll(self):
        """With a save pending: finishes it if all ranks have written. Returns its problem or None. Costs a gather."""
        if self._pending is not None and all(self._gather(self._pending[1].done())):
            return self.finish()
        return None

    def finish(self):
        """Waits for a pending save and finishes it. Returns its problem; None if all is well or nothing was pending."""
        if self._pending is None:
            return None
        (plan, future), self._pending = self._pending, None
        return self._conclude(plan, future.result())

    def close(self):
        """Finishes, and gives the run folder free for another process. Returns the last save's problem, or None."""
        self.finish()
        if self._executor is not None:
            self._executor.shutdown()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        return self.problem

    # -- resuming

    def latest(self):
        """The step folder that LATEST points to, or None."""
        return step_folders.read_latest(self.run_dir)

    def best(self):
        """The complete step folder that is best by the metric of `checkpoint.best_metric`, or None."""
        return step_folders.best_step(step_folders.complete_steps(self.run_dir), self.best_metric, self.best_mode)

    def resumable(self):
        """The newest step that is complete and matches its checksums (rank 0 looks), or None; damaged ones are told."""
        found = find_resumable(self.run_dir, self.notice) if self.world.is_main else None
        return self._gather(found)[0]

    def any_step(self):
        """Whether there is a step folder at all, whole or not (rank 0 looks)."""
        found = any(self.run_dir.glob("step-*")) if self.world.is_main else None
        return self._gather(found)[0]

    def peek(self, step):
        """(world size, trainer_state) of a step folder, the same on all ranks, without loading it.

        Raises ValueError if it cannot be read.
        """
        saved, problem = None, None
        if self.world.is_main:
            try:
                saved = torch.load(Path(step) / "state" / "trainer.pt", map_location="cpu", weights_only=True)
            except Exception as error:
                problem = f"{step} cannot be resumed from: {type(error).__name__}: {error}"
        saved, problem = self._gather((saved, problem))[0]
        if problem is not None:
            raise ValueError(problem)
        return saved["world"], saved["trainer"]

    def wait_for_all(self):
        """A barrier for what may take longer than a collective of training may."""
        self._gather(None)

    def load(self, step, model, optimizer):
        """Loads a step folder into model and optimizer, in place, and the RNG if the world has the same size.

        Returns the trainer_state of that save. Raises ValueError, on all ranks alike, for a state that is damaged or
        does not fit the model or the optimizer.
        """
        loaded = {}
        problem = self._agree(self._attempt(self._check, Path(step) / "state", model, optimizer, loaded))
        if problem is None:
            problem = self._agree(self._attempt(self._load, Path(step) / "state", model, optimizer, loaded))
        if problem is not None:
            raise ValueError(f"{step} cannot be resumed from: {problem}")
        if self.world.is_main and self.latest() == Path(step):
            self._retain()  # the save of this step may have been killed before it came to that
        saved = loaded["saved"]
        if saved["world"] != self.world.size and self.world.is_main:
            self.notice(
                f"resuming on {self.world.size} processes what {saved['world']} saved: equal up to rounding, "
                "and the random generators start anew"
            )
        return saved["trainer"]

    def _check(self, folder, model, optimizer, loaded):
        """Everything that can be wrong is found here, before anything is overwritten."""
        try:
            saved = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
            if saved["world"] == self.world.size:
                loaded["rng"] = torch.load(folder / f"rng-{self.world.rank}.pt", map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"{folder} is damaged ({type(error).__name__}: {error})") from None
        stored = InertReader(folder).read_metadata().state_dict_metadata
        request, wrong, by_name = {}, [], {}
        for names, tensor in named_tensors(model):
            key = next((f"model.{name}" for name in names if f"model.{name}" in stored), None)
            by_name.update(dict.fromkeys(names, tensor))
            if key is None:
                wrong.append(f"{names[0]} is missing")
            elif tuple(stored[key].size) != tuple(tensor.shape) or stored[key].properties.dtype != tensor.dtype:
                wrong.append(
                    f"{names[0]} is {tuple(stored[key].size)} {stored[key].properties.dtype}, "
                    f"the model has {tuple(tensor.shape)} {tensor.dtype}"
                )
            else:
                request[key] = tensor.detach()
        wrong += [
            f"{key[len('model.') :]} is not in the model"
            for key in stored
            if key.startswith("model.") and key not in request and key[len("model.") :] not in by_name
        ]
        description, states = saved["optimizer"], {}
        if optimizer is not None:
            states = self._check_optimizer(description, stored, by_name, model, optimizer, request, wrong)
        if wrong:
            raise ValueError(listing(wrong))
        loaded.update(saved=saved, request=request, states=states)

    @staticmethod
    def _check_optimizer(description, stored, by_name, model, optimizer, request, wrong):
        if description is None:
            raise ValueError("it holds no optimizer")
        if description["class"] != type(optimizer).__name__:
            raise ValueError(f"it holds the state of {description['class']}, not of {type(optimizer).__name__}")
        now = optimizer_tensors(model, optimizer)[1]["groups"]
        if [group["names"] for group in now] != [group["names"] for group in description["groups"]]:
            raise ValueError("its optimizer trains other parameters, or groups them differently")
        group_of = {name: group for group, named in zip(optimizer.param_groups, now) for name in named["names"]}
        states = {}
        for key, meta in stored.items():
            if not key.startswith("optimizer."):
                continue
            _, entry, name = key.split(".", 2)
            if name not in group_of:
                wrong.append(f"the optimizer's {entry} of {name} has no parameter")
                continue
            parameter, dtype = by_name[name].detach(), meta.properties.dtype
            if tuple(meta.size) == tuple(parameter.shape):
                tensor = torch.empty_like(parameter, dtype=dtype)  # sharded as the parameter is
            else:  # counters, and the factored moments of Adafactor
                group = group_of[name]
                resident = (
                    len(meta.size) > 0
                    or entry in description["on_device"]
                    or group.get("fused")
                    or group.get("capturable")
                )
                tensor = torch.empty(meta.size, dtype=dtype, device=parameter.device if resident else "cpu")
            request[key] = states.setdefault(name, {})[entry] = tensor
        for name, values in description["values"].items():
            states.setdefault(name, {}).update(values)
        return states

    def _load(self, folder, model, optimizer, loaded):
        dcp.load(
            loaded["request"],
            storage_reader=InertReader(folder),
            process_group=self._group,
            no_dist=self._group is None,
        )
        if optimizer is not None:
            parameter_of = {names[0]: tensor for names, tensor in named_tensors(model)}
            optimizer.state.clear()
            for name, state in loaded["states"].items():
                optimizer.state[parameter_of[name]] = state
            for group, was in zip(optimizer.param_groups, loaded["saved"]["optimizer"]["groups"]):
                group.update({key: value for key, value in was.items() if key not in ("names", *MACHINE_OPTIONS)})
        if "rng" in loaded:
            set_rng_state(loaded["rng"])


def resume_command(run_dir, formats):
    """What to paste into a shell to go on with a run that writes `formats`."""
    value = str(run_dir)
    if not re.fullmatch(r"[\w./@:+-]+", value):  # anything else has a meaning to Hydra
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    words = ["python", "train.py", f"resume={value}"]
    if "state" not in formats:
        words.append(f"checkpoint.formats=[{','.join(['state', *formats])}]")
    return shlex.join(words)
