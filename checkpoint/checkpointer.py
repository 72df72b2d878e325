"""Saving a run so that nothing can be lost, and resuming it exactly.

    checkpointer = Checkpointer(run_dir, config.checkpoint, world, notice)    # on every rank, after init_process_group
    problem = checkpointer.save(examples, model, optimizer, tokenizer, trainer_state, metrics)     # None: all is well
    checkpointer.poll()      # with async_save: now and then, at the same place on every rank; finishes what is written
    checkpointer.finish()    # waits for a pending save and finishes it; returns its problem or None
    checkpointer.close()     # finish, and release the run folder

    step = checkpointer.resumable()                              # newest complete and undamaged step folder, or None
    trainer_state = checkpointer.load(step, model, optimizer)    # in place; RNG too when the world is the same

Every method is collective: all ranks call it, and all get the same answer. `model` may be a plain module, or sharded by
fully_shard, tensor parallelism or both (DTensor); the optimizer any of torch.optim that steps without a closure.

`trainer_state` is a dict of numbers, strings, tensors, lists and dicts (weights_only can read it back): schedule,
counters, data cursor, scaler, reporter, best-so-far, config digest. Rank 0's is the one that is kept. The states of the
random generators are kept for each rank.

A save that fails on any rank is undone on all, with a notice, and the run goes on. How one is written: step_writer.py.
What it holds of model and optimizer: state.py. What the folders look like: step_folders.py.
"""

import os
import shlex
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import utils
from checkpoint import step_folders
from checkpoint.state import (
    check_state,
    full_state,
    model_tensors,
    optimizer_tensors,
    packed_trainer_state,
    read_trainer_state,
    rng_state,
    to_host,
)
from checkpoint.step_writer import FORMATS, Save, attempt, reached
from settings.messages import argument
from settings.schema import CheckpointSettings

DEFAULT_BEST_METRIC = "loss/eval"
# A rank may write hundreds of GB while the others wait for it; a dead rank is noticed by its closed connection anyway.
PATIENCE = timedelta(hours=6)


class Checkpointer:
    """See the top of the file. `settings` is config.checkpoint; `notice` is called with text that the user must see."""

    def __init__(self, run_dir, settings: CheckpointSettings, world, notice=print, watched=None):
        """`watched`: (metric, "min" or "max") by which the best is kept if the settings name none."""
        self.run_dir, self.world, self.notice = Path(run_dir), world, notice
        self.formats = tuple(settings.formats)
        self.keep_last, self.keep_best = settings.keep_last, settings.keep_best
        self.best_metric, self.best_mode = settings.best_metric or DEFAULT_BEST_METRIC, None
        if watched and settings.best_metric in (None, watched[0]):
            self.best_metric, self.best_mode = watched
        self.reference = None  # a model beside the policy's whose weights change, and are part of the state
        self.problem = None  # of the last save that ended; None if it went well
        self._pending: tuple[Save, Future] | None = None
        self._group = self._background = self._executor = self._lock = None
        if world.size > 1:
            # Groups of its own: the waiting times differ from those of training, and a save in the background must
            # never meet training's collectives (it crashed when they shared one).
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        if settings.async_save:
            self._executor = ThreadPoolExecutor(1, "checkpoint")
            self._background = dist.new_group(backend="gloo", timeout=PATIENCE) if world.size > 1 else None
        problem = self._agree(attempt(self._take_folder)[1] if world.is_main else None)
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
            self.notice(f"what an interrupted run left in {self.run_dir} cannot be cleared away ({error})")
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

    # -- saving

    def save(self, examples, model, optimizer, tokenizer, trainer_state, metrics=None, formats=None):
        """Saves the run as step-<examples>. Returns None, or what went wrong in words (`notice` has reported it).

        With async_save it returns as soon as everything is copied to host memory, and the problem comes from the
        poll(), finish() or close() that finds the writing done. Raises TypeError for a trainer_state that could not be
        read back.
        """
        self.finish()
        formats = self.formats if formats is None else tuple(formats)
        assert set(formats) <= set(FORMATS), formats
        copy = self._executor is not None
        tensors, description = optimizer_tensors(model, optimizer) if optimizer is not None else ({}, None)
        save = Save(
            self.world,
            examples,
            formats,
            {key: float(value) for key, value in (metrics or {}).items()},
            self.run_dir / step_folders.step_name(examples),
            packed_trainer_state(examples, self.world, description, trainer_state),
            rng_state(),
            model=model,
            tokenizer=tokenizer,
        )
        problem = attempt(save.open, model, optimizer)[1] if self.world.is_main else None
        problem = self._agree(problem)
        if problem is None and not save.temporary.is_dir():
            problem = f"{save.temporary} is not seen here: local_dirs must be on a file system that all nodes share"
        problem = self._agree(problem)
        if problem is not None:
            return self._conclude(save, {}, problem)
        if "state" in formats:
            tensors.update(model_tensors(model))
            if self.reference is not None:
                tensors.update(model_tensors(self.reference, "reference"))
            save.tensors = {key: to_host(tensor) for key, tensor in tensors.items()} if copy else tensors
        if "policy" in formats or "hf" in formats:
            save.full = full_state(model, self.world, copy)
        if self._executor is not None:
            self._pending = save, self._executor.submit(save.write, self._background)
            return None
        return self._conclude(save, *save.write(self._group))

    def _conclude(self, save, files, problem):
        """All ranks have written: complete the folder, or take it back."""
        written = self._gather(files)
        problem = self._agree(problem)
        if problem is None:
            files = {name: entry for part in written for name, entry in part.items()}
            problem = self._agree(attempt(self._complete, save, files)[1] if self.world.is_main else None)
        if problem is not None and self.world.is_main:
            # torch's writers report unexpected positions when the disk is full; looked at before tidying makes room
            full = step_folders.free_bytes(self.run_dir) < 1 << 20 and "No space left" not in problem
            if "unexpected pos" in problem or full:
                problem = f"the disk is full, or writing to it failed: {problem}"
            shutil.rmtree(save.temporary, ignore_errors=True)
            latest = step_folders.read_latest(self.run_dir)
            good = f"the last good checkpoint is {latest.name}" if latest else "there is no checkpoint of this run yet"
            self.notice(
                f"CHECKPOINT {save.final.name} WAS NOT SAVED ({problem}). Training goes on; {good}. "
                f"Fix this before the next save."
            )
        if problem is not None:
            problem = self._gather(problem)[0]  # and nobody goes on before it is taken back
        self.problem = problem
        return problem

    def _complete(self, save, files):
        save.complete(files)
        reached("retention")
        self._retain()
        reached("end")

    def _retain(self):
        """Rank 0: deletes all steps but the last `keep_last`, the best, and the one that LATEST points to. A notice
        reports what cannot be deleted."""
        try:
            best = (self.best_metric, self.best_mode) if self.keep_best else None
            step_folders.delete_old_steps(self.run_dir, self.keep_last, best)
        except OSError as error:
            self.notice(f"an old checkpoint could not be removed: {error}")

    def poll(self):
        """With a save pending: finishes it if all ranks have written. Returns its problem or None. Costs a gather."""
        if self._pending is not None and all(self._gather(self._pending[1].done())):
            return self.finish()
        return None

    def finish(self):
        """Waits for a pending save and finishes it. Returns its problem; None if all is well or nothing was pending."""
        if self._pending is None:
            return None
        (save, future), self._pending = self._pending, None
        return self._conclude(save, *future.result())

    def close(self):
        """Finishes, and releases the run folder for another process. Returns the last save's problem, or None."""
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
        """The newest complete step that matches its checksums (rank 0 looks), or None; notices report damaged ones."""
        found = step_folders.find_resumable(self.run_dir, self.notice) if self.world.is_main else None
        return self._gather(found)[0]

    def any_step(self):
        """Whether there is a step folder at all, whole or not (rank 0 looks)."""
        found = any(self.run_dir.glob("step-*")) if self.world.is_main else None
        return self._gather(found)[0]

    def peek(self, step):
        """(world size, trainer_state) of a step folder, the same on all ranks, without loading it.

        Raises ValueError if it cannot be read.
        """
        saved = problem = None
        if self.world.is_main:
            saved, problem = attempt(read_trainer_state, Path(step) / "state")
        saved, problem = self._gather((saved, problem))[0]
        if problem is not None:
            raise ValueError(f"{step} cannot be resumed from: {problem}")
        return saved["world"], saved["trainer"]

    def wait_for_all(self):
        """A barrier for what may take longer than a collective of training may."""
        self._gather(None)

    def load(self, step, model, optimizer):
        """Loads a step folder into model and optimizer, in place, and the RNG if the world has the same size.

        Returns the trainer_state of that save. Raises ValueError, on all ranks alike, for a state that is damaged or
        does not fit the model or the optimizer.
        """
        checked, problem = attempt(check_state, Path(step) / "state", self.world, model, optimizer, self.reference)
        problem = self._agree(problem)
        if problem is None:
            problem = self._agree(attempt(checked.read_into, model, optimizer, self._group)[1])
        if problem is not None:
            raise ValueError(f"{step} cannot be resumed from: {problem}")
        if self.world.is_main and self.latest() == Path(step):
            self._retain()  # the save of this step may have been killed before it came to that
        if checked.saved["world"] != self.world.size and self.world.is_main:
            self.notice(
                f"resuming on {self.world.size} processes what {checked.saved['world']} saved: equal up to rounding, "
                "and the random generators start anew"
            )
        return checked.saved["trainer"]


def resume_command(run_dir):
    """What to paste into a shell to go on with a run."""
    script = os.path.join(utils.PROJECT_DIR, "train.py")
    here = os.path.realpath(os.curdir) == os.path.realpath(utils.PROJECT_DIR)
    return f"python {'train.py' if here else shlex.quote(script)} {argument('resume', str(run_dir))}"
