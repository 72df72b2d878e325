"""The training loop.

`BasicTrainer` reads from top to bottom: one step, an evaluation, the loop. Its parts are prepared in
training/preparation.py. `FSDPTrainer` and `TensorParallelTrainer` do the same computation, and tests hold them to it;
what differs between one device and many is their placement (parallel/placement.py).
"""

from __future__ import annotations

import math

import torch

from data.batching import MicroBatch
from data.sampler import Step
from losses.pairwise import preference_loss  # noqa: F401  (users of the DPO reference implementation import it from here)
from parallel.failures import CollectiveFailure, is_follower
from settings import Settings
from training.memory_retry import out_of_memory_message, within_memory
from training.meter import Meter
from training.metrics import ExampleMetrics, MetricAccumulator
from training.optimizer import learning_rate
from training.precision import on_device
from training.preparation import PreparedRun
from utils import World, gather_objects

# Steps of an evaluation after which the ranks ask each other whether a signal came: a preempted job's time is short.
SIGNAL_INTERVAL = 8


def run(config: Settings, run_dir: str, world: World) -> float | None:
    """Train as `config` says, on this rank. Returns the last evaluation's loss (None if there was none)."""
    config = on_device(config, world.device)
    trainer = TRAINERS[config.trainer](config, run_dir, world)
    try:
        with trainer.signals:
            result = trainer.train()
    except BaseException as problem:
        if world.size == 1 or isinstance(problem, FloatingPointError):  # which all ranks raise together
            trainer.checkpointer.close()  # a save in the background still completes
        if world.size > 1 and is_follower(problem):
            problem = CollectiveFailure(
                f"A collective operation failed; it was waiting for {trainer.heartbeat.missing()}. The cause: {problem}"
            ).with_traceback(problem.__traceback__)
        if isinstance(problem, torch.OutOfMemoryError):  # outside a training step, which repeats itself where it can
            problem = ValueError(trainer.out_of_memory(str(problem).splitlines()[0]))
        # train.py reports the user's own mistakes, in one line; they need no second one here.
        trainer.reporter.finish(False, None if type(problem) is ValueError else f"{type(problem).__name__}: {problem}")
        raise problem
    finally:
        trainer.heartbeat.close()
        trainer.placement.close()
    trainer.reporter.finish(True)
    return result


class BasicTrainer(PreparedRun):
    """Trains on one device."""

    # ---- One step -------------------------------------------------------------------------------------------------

    def losses_and_metrics(self, split: str, batch: MicroBatch) -> tuple[torch.Tensor, ExampleMetrics]:
        """Losses of a micro-batch's examples, [E] with gradient, and their metrics without."""
        return self.objective(split, batch)

    def gradients(self, step: Step) -> tuple[MetricAccumulator, list[tuple[MicroBatch, torch.Tensor]]]:
        """Gradients of a step, summed over its micro-batches. Returns the metric sums of this rank, and each
        micro-batch with its examples' losses [E].
        """
        sums = self.objective.accumulator("train", [data.short_name for data in self.datasets["train"]], self.device)
        seen: list[tuple[MicroBatch, torch.Tensor]] = []
        # Placements average gradients over data ranks; with this factor every example of the step weighs the same.
        factor = self.placement.data_ranks * self.loss_scale.value / step.n_examples
        self.objective.look_ahead(step.micro_batches, self.idle_batch)
        for index, batch in enumerate(step.micro_batches):
            self.heartbeat.at(f"in pass {index + 1} of {len(step.micro_batches)} of a step", self.state.updates)
            self.placement.sync_gradients(self.policy, last=index == len(step.micro_batches) - 1)
            if batch is None:
                self.objective.idle_pass(self.idle_batch).backward()
                continue
            batch = batch.to(self.device)
            per_example_loss, metrics = self.losses_and_metrics("train", batch)
            (per_example_loss.sum() * factor).backward()
            sums.add(batch.datasets, metrics)
            seen.append((batch, per_example_loss.detach().float()))
        return sums, seen

    def _gradients_within_memory(self, step: Step):
        """`gradients`, in smaller micro-batches where memory runs out and this placement can repeat a step."""
        if not self.placement.retries_out_of_memory:
            return self.gradients(step)
        return within_memory(
            self.gradients, step, self.sampler, self.optimizer, self.notice, lambda: self.placement.recover(self.policy)
        )

    def out_of_memory(self, problem: str) -> str:
        """What to do about it, in words."""
        budget = self.sampler.budget if self.prepared else None
        return out_of_memory_message(problem, budget, self.world.rank if self.world.size > 1 else None)

    def train_step(self, step: Step) -> dict[str, tuple[float, float]] | None:
        """One optimizer step. Returns (sum, count) of the step's metrics, or None if it was skipped as non-finite.

        Raises:
            FloatingPointError: loss or gradient is not finite, and guards do not allow to skip.
        """
        rate = learning_rate(self.config, self.state.updates, step.number, self.sampler.n_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums, seen = self._gradients_within_memory(step)
        self.loss_scale.unscale(self.policy.parameters())
        self.heartbeat.at("summing gradients", self.state.updates)
        norm = self.placement.clip_gradients(self.policy, self.config.max_grad_norm)
        # Whether a signal came on any rank travels with the metrics: the step needs no host sync of its own for it.
        signalled = torch.zeros_like(sums.sums[:, :1])
        signalled[0] = float(self.signals.received is not None)
        total = self.placement.reduce(torch.cat([sums.sums, signalled], dim=1))
        values = torch.cat([total.flatten(), norm.reshape(1).to(total)]).cpu()
        total, norm = values[:-1].reshape(total.shape), values[-1].item()
        total, self.stop_requested = total[:, :-1], total[0, -1].item() > 0
        self.saver.agree_on_time()
        finite = torch.isfinite(total).all()
        if not (math.isfinite(norm) and finite):
            self.optimizer.zero_grad(set_to_none=True)
            if finite and self.loss_scale.active:
                self.loss_scale.lower()
                return self.train_step(step)  # again, so that its examples are not lost
            self.nonfinite.stop_or_skip(seen, norm, self.state)
            return None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.updates += 1
        self.state.loss_memory = self.objective.next_memory
        if self.objective.reference is not None:
            self.objective.reference.follow(self.state.updates)
        self.loss_scale.stepped()
        if problem := self.movement.update(self.config, self.world):
            self.notice(problem)
        return sums.by_name(total) | {"grad_norm": (norm, 1.0), "learning_rate": (rate, 1.0)}

    # ---- Evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float] | None:
        """Metrics of the held-out examples, and samples if asked for; reported and returned. None if a signal came."""
        if self.evaluation is None:
            return {}
        metrics = self.evaluation.metrics(lambda batch: self.losses_and_metrics("eval", batch)[1], self._interrupted)
        if metrics is not None:
            self.reporter.log(metrics, self.state.examples, self.state.updates)
            if self.config.sample_during_eval:
                self.write_samples()
        return metrics

    def write_samples(self) -> None:
        """Report what policy and reference write after held-out prompts."""
        assert self.evaluation is not None
        self.heartbeat.at("writing samples", self.state.updates, patient=True)
        self.evaluation.write_samples(self.state)

    def _interrupted(self, steps: int) -> bool:
        """Called after each step of an evaluation: whether a signal came on any rank, which they ask together."""
        self.heartbeat.at("in an evaluation", self.state.updates)
        if steps % SIGNAL_INTERVAL == 0:
            self.stop_requested |= any(gather_objects(self.signals.received is not None, self.world))
        return self.stop_requested

    # ---- The loop -------------------------------------------------------------------------------------------------

    def train(self) -> float | None:
        """Prepare, then train to the end. Returns the last evaluation's loss, for sweepers to minimise.

        Raises:
            SystemExit: a signal asked to stop; the state is saved. OSError: the last checkpoint could not be written.
            ValueError, FloatingPointError: see the methods.
        """
        self.prepare()
        config, sampler, state = self.config, self.sampler, self.state
        meter = Meter(
            self.reporter.log,
            interval=config.minimum_log_interval_secs,
            data_ranks=self.placement.data_ranks,
            device=self.device,
        )
        self.signals.deferred = True  # from here on there is something to save
        example = self.loss.inputs.example
        with self.reporter.progress(sampler.n_examples, "training", example, initial=state.examples) as bar:
            if state.step_number == 0 and config.sample_during_eval and not config.do_first_eval:
                # The samples of a reference without a model of its own can only be had while the policy still is it.
                if self.objective.reference_is_policy and self.evaluation is not None:
                    self.write_samples()
            for step in sampler.steps(state.step_number):
                if self._between_steps(meter):
                    break
                metrics = self.train_step(step)
                state.step_number = step.number + 1
                state.examples = sampler.examples_before(state.step_number)
                meter.add(metrics, step, state.examples, state.updates)
                bar.update(step.n_examples, **meter.rates())
            else:
                self._between_steps(meter, last=True)
        self.saver.close()
        return state.last_eval.get("loss/eval")

    def _between_steps(self, meter: Meter, last: bool = False) -> bool:
        """Evaluate, save or stop, where one is due. Whether training is over."""
        config, state = self.config, self.state
        due, best = state.evaluation_due(config, self.sampler, last), False
        if due:
            meter.flush()
            # After a signal there may be no time for it: the resumed run evaluates here instead.
            metrics = None if self.stop_requested else self.evaluate()
            if metrics is not None:
                state.last_eval, state.evaluated_at, due = metrics, state.step_number, False
                if self.early_stop.update(metrics):
                    self.notice(
                        f"{self.early_stop.metric} has not got better for {self.early_stop.patience} evaluations: "
                        f"training ends at {state.examples:,} examples."
                    )
                best = self.early_stop.is_best() and config.checkpoint.keep_best
        over = self.early_stop.over
        save_due = self.saver.due(state, self.sampler)
        if state.step_number and (last or over or best or save_due or self.stop_requested):
            meter.flush()
            self.save(again=due)
        if self.stop_requested:
            self.saver.close_after_signal(state)
            raise SystemExit(self.signals.exit_code)
        if state.step_number in (state.evaluated_at, state.saved_at):
            meter.restart()
        if self.checkpointer.poll():
            state.saved_at = None  # a save in the background failed: what is due next is saved then
        return over


class FSDPTrainer(BasicTrainer):
    """Shards policy and reference over all devices with FSDP2 (`fsdp` in the config says how), one process a device.

    Every rank takes its share of each step's examples; the update is the one that BasicTrainer would make.
    """


class TensorParallelTrainer(FSDPTrainer):
    """Splits each matrix over `tp_size` devices, and shards over the groups of such devices if there are several."""


TRAINERS = {"BasicTrainer": BasicTrainer, "FSDPTrainer": FSDPTrainer, "TensorParallelTrainer": TensorParallelTrainer}
