"""Saving a run's state between two steps, and putting it back when the run is resumed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from checkpoint.checkpointer import Checkpointer, resume_command
from settings import Settings
from settings.messages import argument
from settings.resume import fixed_settings, not_allowed
from training.early_stopping import EarlyStop
from training.optimizer import LossScale
from training.run_state import TrainState
from utils import World, broadcast_object


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from.

    Attributes:
        folder: the step folder; content: what `RunSaver.save` put into it.
        first_budget, later_budget: tokens a pass that the run began with and had come down to; None where this world
            differs from that one, so that its micro-batches cannot be the same to the last bit anyway.
    """

    folder: Path
    content: dict
    first_budget: int | None
    later_budget: int | None


class RunSaver:
    """Writes checkpoints of a run, and finds the one to go on from.

    Args:
        reporter, early_stop, loss_scale: parts of the run with a state of their own.
        device_type: "cpu", "cuda" or "mps".
    """

    def __init__(
        self,
        config: Settings,
        run_dir: str,
        checkpointer: Checkpointer,
        reporter,
        early_stop: EarlyStop,
        loss_scale: LossScale,
        world: World,
        device_type: str,
    ):
        self.config, self.run_dir, self.checkpointer, self.reporter = config, run_dir, checkpointer, reporter
        self.early_stop, self.loss_scale, self.world, self.device_type = early_stop, loss_scale, world, device_type
        self.notice = reporter.notice
        self.last_save, self.seconds_since_save = time.monotonic(), 0.0

    # ---- Saving -----------------------------------------------------------------------------------------------------

    def agree_on_time(self) -> None:
        """Take rank 0's clock, for the ranks must save together; all call this after each step."""
        if self.config.checkpoint.every_minutes is not None:
            self.seconds_since_save = broadcast_object(time.monotonic() - self.last_save, self.world)

    def due(self, state: TrainState, sampler) -> bool:
        """Whether a checkpoint is due by its settings, in examples or in minutes."""
        settings = self.config.checkpoint
        if settings.every_minutes is not None and self.seconds_since_save > 60 * settings.every_minutes:
            return True
        return state.has_passed(settings.every or self.config.eval_every, state.saved_at, sampler)

    def save(
        self,
        state: TrainState,
        model,
        optimizer,
        tokenizer,
        *,
        budget: int,
        first_budget: int,
        identity: dict,
        again: bool = False,
        needs_state: bool = False,
    ) -> None:
        """Write a checkpoint; a failure is reported and survived.

        Args:
            budget, first_budget: tokens a pass now, and at the run's beginning; identity: see `restore`.
            again: a run resumed from it saves here once more, because an evaluation is due before.
            needs_state: write what is needed to resume whatever checkpoint.formats is: a signal ends the run.
        """
        before, state.saved_at = state.saved_at, state.step_number
        content = state.as_dict() | self.loss_scale.state()
        content |= {
            "budget": budget,
            "first_budget": first_budget,
            "tokens_per_microbatch": self.config.tokens_per_microbatch,
            "device": self.device_type,
            "identity": identity,
            "settings": fixed_settings(self.config),
            "reporter": self.reporter.state(),
            "early_stop": self.early_stop.state(),
        }
        if again:
            content["saved_at"] = None
        metrics = state.last_eval if state.evaluated_at == state.step_number else {}
        formats = list(self.config.checkpoint.formats)
        if needs_state and "state" not in formats:
            formats = ["state", *formats]
        problem = self.checkpointer.save(state.examples, model, optimizer, tokenizer, content, metrics, formats)
        self.last_save, self.seconds_since_save = time.monotonic(), 0.0
        if problem:
            state.saved_at = before

    def close(self) -> None:
        """Finish at the end of training.

        Raises:
            OSError: the last checkpoint could not be written.
        """
        problem = self.checkpointer.close()
        best = self.checkpointer.best() if self.early_stop.over else None
        if best is not None:
            self.notice(f"The best checkpoint by {self.checkpointer.best_metric} is {best}.")
        if problem:
            resumable = "state" in self.config.checkpoint.formats
            again = f"to do it again:  {resume_command(self.run_dir)}" if resumable else "then run the command again."
            raise OSError(
                "The run's last checkpoint could not be written, so what was learnt since the one before is lost "
                f"({problem}). Fix this; {again}"
            )

    def close_after_signal(self, state: TrainState) -> None:
        """Finish a pending save, and report whether the run's state is saved."""
        self.checkpointer.close()
        at = f"Stopped by a signal at {state.examples:,} examples;"
        if state.step_number == 0 or self.config.debug:
            why = " in debug mode." if self.config.debug else " before the first step."
            self.notice(f"{at} nothing is saved{why}")
            return
        saved = state.saved_at == state.step_number and self.checkpointer.problem is None
        self.notice(f"{at} the state is {'saved' if saved else 'NOT saved'}. To go on:  {resume_command(self.run_dir)}")

    # ---- Resuming ---------------------------------------------------------------------------------------------------

    def find_point(self) -> ResumePoint | None:
        """The newest complete checkpoint of the run that is resumed; None for a run that starts from its beginning.

        Raises:
            ValueError: there are checkpoints, but none can be resumed from; or the settings were changed in the folder.
        """
        if not self.config.resume:
            return None
        folder = self.checkpointer.resumable()
        if folder is None:
            if self.checkpointer.any_step():
                raise ValueError(
                    f"resume={self.run_dir}: none of its checkpoints can be resumed from (see above). Its last weights "
                    "can begin a new run, with model.archive=STEP_FOLDER if they are whole."
                )
            self.notice("The run has no checkpoint yet: it starts from its beginning.")
            return None
        size, content = self.checkpointer.peek(folder)
        check_settings(folder, content, self.config)
        if self.config.schedule != "constant" and "settings" not in content:
            self.notice(
                f"{folder.name} is of a version whose schedule={self.config.schedule} reached zero one step after the "
                "run's end. Now it is zero at the last step: from here on the learning rate is a little lower."
            )
        now = self.config.tokens_per_microbatch, self.device_type, self.world.size
        same = (content["tokens_per_microbatch"], content["device"], size) == now
        first, later = (content["first_budget"], content["budget"]) if same else (None, None)
        return ResumePoint(folder, content, first, later)

    def restore(self, point: ResumePoint, model, optimizer, sampler, identity: dict) -> TrainState:
        """Put a checkpoint's state back into model, optimizer and the parts of the run.

        Args:
            sampler: the training steps; identity: fingerprints of what must not have changed, by its name in words.
        Raises:
            ValueError: data or reference changed, or the checkpoint lies between two steps of the run's new length.
        """
        check_same_run(point, self.config, self.run_dir, identity, sampler)
        self.checkpointer.load(point.folder, model, optimizer)
        state = TrainState.of(point.content)
        sampler.restore(state.stream)
        if point.later_budget is not None:
            sampler.budget = point.later_budget
        self.loss_scale.load_state(point.content)
        self.reporter.load_state(point.content["reporter"])
        self.early_stop.load_state(point.content["early_stop"])
        self.notice(f"Resumed from {point.folder} at {state.examples:,} examples.")
        return state


def check_settings(folder: Path, content: dict, config: Settings) -> None:
    """Refuse settings that may not change and are not those that a checkpoint was made with.

    `settings/resume.py` compares a command with config.yaml; this finds a config.yaml that was edited meanwhile.
    """
    then, now = content.get("settings", {}), fixed_settings(config)  # older checkpoints hold none
    changed = {key: (old, now[key]) for key, old in then.items() if key in now and now[key] != old}
    if refused := not_allowed(changed, config.schedule):
        raise ValueError(
            f"resume={folder.parent}: its config.yaml has other settings than {folder.name} was made with, which may "
            f"not change:{refused}\nPut back the values of then, or start a new run with "
            f"{argument('model.archive', str(folder))}"
        )


def check_same_run(point: ResumePoint, config: Settings, run_dir: str, identity: dict, sampler) -> None:
    """Refuse to go on where the run would become another one; see `RunSaver.restore`."""
    was = point.content
    changed = [what for what, then in was["identity"].items() if then != identity[what]]
    if changed:
        raise ValueError(
            f"resume={run_dir}: {' and '.join(changed)} changed since this run began, so that it would be another run. "
            f"Put back the files of then, or begin a new run with {argument('model.archive', str(point.folder))}"
        )
    if sampler.examples_before(was["step_number"]) != was["examples"]:
        longer = was["examples"] > sampler.n_examples
        raise ValueError(
            f"resume={run_dir}: its checkpoint is at {was['examples']:,} examples, between two steps of "
            f"n_epochs={config.n_epochs} n_examples={config.n_examples}. Leave both as they were, or choose "
            f"{'more' if longer else 'an n_examples that ends with a whole step'}."
        )


def identity_of(datasets: dict[str, list], reference) -> dict[str, list | str | None]:
    """What must be the same for a resumed run to be the same run, beside its settings: by its name in words.

    Args:
        datasets: tokenised data sets by split; reference: with its `key`, None without one.
    """
    keys = {f"the {split} data": [dataset.key for dataset in found] for split, found in datasets.items()}
    return {**keys, "the reference model": reference.key if reference else None}
