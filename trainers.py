"""The training loop.

`BasicTrainer` reads from top to bottom: prepare, evaluate, step, save. `FSDPTrainer` and `TensorParallelTrainer` are
the same computation, and tests hold them to it; what differs is in `placement` (parallel/placement.py).
"""

from __future__ import annotations

import math
import os
import time
from functools import partial

import numpy as np
import torch

import losses
from checkpoint.checkpointer import Checkpointer, resume_command
from data.batching import MicroBatch, PromptUnit, pack, pad
from data.sampler import BatchSampler, DatasetMixture, Step, cpu_token_budget, widest_unit
from data.tokenization import load_tokenized
from losses import preference_loss  # noqa: F401  (part of this module's public face)
from modeling import attention, loading
from modeling.generation import generate_samples
from modeling.loading import DTYPES
from modeling.reference import Reference
from parallel import launch
from parallel.placement import make_placement
from report.reporter import Reporter
from training.guards import EarlyStop, Heartbeat, MovementWatch, SignalWatch, offending_examples, write_down
from training.meter import Meter
from training.metrics import PREFERENCE_METRICS, SFT_METRICS, MetricAccumulator, preference_columns, sft_columns
from utils import World, broadcast_object, check_same, gather_objects, keep_freed_memory, run_on_main, seed_everything


def run(config, run_dir: str, world: World) -> float | None:
    """Train as `config` says, on this rank. Returns the last evaluation's loss (None if there was none)."""
    trainer = TRAINERS[config.trainer](config, run_dir, world)
    try:
        with trainer.signals:
            result = trainer.train()
    except BaseException as problem:
        if world.size == 1 or isinstance(problem, FloatingPointError):  # which all ranks raise together
            trainer.checkpointer.close()  # a save in the background still completes
        if world.size > 1 and launch.is_follower(problem):
            problem = RuntimeError(
                f"A collective operation failed; it was waiting for {trainer.heartbeat.missing()}. The cause: {problem}"
            ).with_traceback(problem.__traceback__)
        if isinstance(problem, torch.OutOfMemoryError):  # outside a training step, which repeats itself where it can
            problem = ValueError(trainer.out_of_memory(str(problem).splitlines()[0]))
        # train.py tells the user's own mistakes, in one line; they need no second one here.
        trainer.reporter.finish(False, None if type(problem) is ValueError else f"{type(problem).__name__}: {problem}")
        raise problem
    finally:
        trainer.heartbeat.close()
    trainer.reporter.finish(True)
    return result


class BasicTrainer:
    """Trains on one device.

    Args:
        config: the validated settings (settings.py); run_dir: the run's folder, which exists; world: this process.
    """

    def __init__(self, config, run_dir: str, world: World):
        self.config, self.run_dir, self.world = config, run_dir, world
        self.device = torch.device(world.device)
        self.sft = config.loss.name == "sft"
        seed_everything(config.seed)
        if self.device.type == "cpu":
            keep_freed_memory()
        stop, told = config.early_stopping, []
        self.early_stop = EarlyStop(stop.metric, stop.patience, stop.min_delta, stop.mode)
        # First of all: it takes the folder, or ends here because another run has it.
        self.checkpointer = Checkpointer(run_dir, config.checkpoint, world, told.append, self.early_stop.watched)
        self.reporter = Reporter(config, run_dir, world)
        self.notice = self.checkpointer.notice = self.reporter.notice
        for text in told:
            self.notice(text)
        self.examples = self.updates = self.step_number = self.skipped = 0
        self.evaluated_at: int | None = None  # the step before which the last evaluation, and the last save, were made
        self.saved_at: int | None = None
        self.last_eval: dict[str, float] = {}
        self.reference_samples: list[str] | None = None
        self.last_save, self.seconds_since_save = time.monotonic(), 0.0
        self.sampler: BatchSampler | None = None
        self.stop_requested = False  # a signal came, on any rank
        self.signals = SignalWatch(on_first=launch.hold_on)  # the parent then gives the time that a save takes
        self.heartbeat = Heartbeat(
            os.path.join(run_dir, ".heartbeat"),
            world.rank,
            world.size,
            patience=0.8 * 60 * config.guards.collective_timeout_minutes,
        )
        # float16 gradients underflow without a factor on the loss; it adapts in `train_step`.
        self.loss_scale = 2.0**16 if config.model.fsdp_policy_mp == "float16" else 1.0
        self.good_steps = 0
        self.placement = make_placement(config, world)

    def choose_attention(self, unit: PromptUnit) -> tuple[str, bool]:
        """The fastest way of scoring that is right for this model: (kernel, full_forward)."""
        # In low precision rounding could hide a small leak between responses, and shards complicate a try: a float32
        # copy of two layers with random weights shows it as well.
        exact = self.config.model.policy_dtype == "float32" and not self.placement.sharded

        def choose() -> tuple[str, bool, str | None]:
            model = self.policy if exact else loading.sample_of(self.config, self.tokenizer, self.device)
            return attention.choose_attention(
                model, unit, self.config.model.attention, self.tokenizer.pad_token_id, self.device
            )

        kernel, whole, notice = run_on_main(choose, self.world)
        if notice:
            self.notice(notice)
        return kernel, whole

    # ---- Preparation ----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Data, weights, reference log-probs, optimizer, and the state of a run that is resumed."""
        config = self.config
        self._check_loss()
        if config.model.trust_remote_code:
            self.notice(
                "model.trust_remote_code=true: code that comes with "
                f"{config.model.tokenizer_name_or_path or loading.source_of(config)} runs here, with your "
                "rights."
            )
        self._find_checkpoint()
        self.heartbeat.at("preparing the data", 0, patient=True)
        self.tokenizer = loading.load_tokenizer(config)
        self.datasets = {"train": self._load_data("train"), "eval": self._load_data("test")}
        if not sum(len(dataset.examples) for dataset in self.datasets["train"]):
            raise ValueError(
                f"datasets={list(config.datasets)} hold no usable training example: "
                f"{'; '.join(str(dataset.counts) for dataset in self.datasets['train'])}"
            )
        for split, datasets in self.datasets.items():
            for dataset in datasets:
                check_same(dataset.key, f"the tokenised {split} data of {dataset.name}", self.world)
                self.reporter.counts(dataset.name, split, dataset.counts)
                for text in dataset.notices:
                    self.notice(text)

        self.heartbeat.at("loading the weights", 0, patient=True)
        self.policy = self.placement.build_model(config, self.tokenizer, DTYPES[config.model.policy_dtype])
        self._report_model()
        train = DatasetMixture(self.datasets["train"], self._weights())
        self.kernel, whole = self.choose_attention(widest_unit(train, config.seed))
        attention.use_attention(self.policy, self.kernel, whole)
        self.full_forward = whole
        self.share_prefix = config.prefix_sharing and self.kernel != "plain"
        make_batch = (
            partial(pad, pad_token_id=self.tokenizer.pad_token_id)
            if self.kernel == "plain"
            else partial(pack, share_prefix=self.share_prefix)
        )
        if self.first_budget is None:
            self.first_budget = min(gather_objects(self._token_budget(), self.world))  # ranks may differ in free memory
        layout = dict(
            make_batch=make_batch,
            rank=self.placement.data_rank,
            n_ranks=self.placement.data_ranks,
            share_prefix=self.share_prefix,
            seed=config.seed,
            budget=self.first_budget,
        )
        self.sampler = BatchSampler(
            train,
            config.batch_size,
            shuffle=config.shuffle,
            n_epochs=config.n_epochs,
            n_examples=config.n_examples,
            min_micro_batches=config.gradient_accumulation_steps,
            **layout,
        )
        held_out = DatasetMixture(self.datasets["eval"])
        self.eval_sampler = (
            BatchSampler(
                held_out,
                config.eval_batch_size,
                shuffle="pairs",
                n_epochs=1,
                n_examples=config.n_eval_examples,
                **layout,
            )
            if held_out.epoch_size()
            else None
        )
        if self.eval_sampler is None:
            self.notice("There are no held-out examples: nothing is evaluated or sampled.")
        # A rank without work in a micro-batch computes this instead, at weight zero, so that collectives match.
        token = np.array([self.tokenizer.eos_token_id], dtype=np.int32)
        self.idle_batch = make_batch([PromptUnit(0, 0, token, [token], [0], [(0, -1 if self.sft else 0)])]).to(
            self.device
        )

        self.reporter.total_examples = self.sampler.n_examples
        self.optimizer = self._make_optimizer()
        self.heartbeat.at("computing the reference's log-probs", 0, patient=True)
        self.reference = self._make_reference()
        self._resume()

    def _make_reference(self) -> Reference | None:
        """What policy log-probs are compared with; None where the loss asks for none."""
        if self.sft or self.config.loss.get("reference_free"):
            return None

        def build_frozen(dtype: str) -> torch.nn.Module:
            model = self.placement.build_model(self.config, self.tokenizer, DTYPES[dtype], frozen=True)
            attention.use_attention(model, self.kernel, self.full_forward)
            return model

        return Reference(
            self.config,
            self.policy,
            build_frozen,
            {"train": self.sampler, "eval": self.eval_sampler},
            self.datasets,
            self.idle_batch,
            self.reporter,
            self.world,
        )

    def _check_loss(self) -> None:
        """The loss's settings against what its function takes: it may have been added with no more than a yaml."""
        given = set(self.config.loss) - {"name"}
        name = self.config.loss.name
        if not self.sft and name not in losses.LOSSES:
            raise ValueError(f"loss={name} has a file in config/loss, but losses.py has no @register_loss({name!r}).")
        takes, needed = losses.options(name), losses.options(name, needed=True)
        for keys, what in (
            (given - set(takes), "is a key that losses.py's function does not take"),
            (set(needed) - given, "is missing in its yaml"),
        ):
            if keys:
                raise ValueError(f"loss.{sorted(keys)[0]} {what}; loss={name} takes {', '.join(takes) or 'no keys'}.")

    def _load_data(self, split: str) -> list:
        # One process of each node tokenises and writes the cache; the others then read it.
        for turn in (True, False):
            if (self.world.local_rank == 0) == turn:
                loaded = [
                    load_tokenized(
                        name, split, self.tokenizer, self.config, sft=self.sft, progress=self.reporter.progress
                    )
                    for name in self.config.datasets
                ]
            self.checkpointer.wait_for_all()  # tokenising may take longer than a collective of training may
        return loaded

    def _weights(self) -> list[float]:
        weights = self.config.data.weights
        return [float(weights.get(name, 1.0)) for name in self.config.datasets]

    def _token_budget(self) -> int:
        wanted = self.config.tokens_per_microbatch
        if wanted != "auto":
            return int(wanted)
        if self.device.type == "cpu":
            return cpu_token_budget(torch.get_num_threads())
        # Some 18 hidden-sized and 3 MLP-sized activations a token and layer; half of what is free, as a start.
        settings = self.policy.config.get_text_config()
        layers = 1 if self.config.activation_checkpointing else settings.num_hidden_layers
        width = 18 * settings.hidden_size + 3 * (
            getattr(settings, "intermediate_size", None) or 4 * settings.hidden_size
        )
        size = 2 if self.config.model.fsdp_policy_mp or self.config.model.policy_dtype != "float32" else 4
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 8 << 30
        budget = int(0.5 * free / (layers * width * size))
        return max(1024, min(budget, 65536) // 256 * 256)

    def _report_model(self) -> None:
        count = sum(parameter.numel() for parameter in self.policy.parameters())
        name = type(self.policy).__name__.removeprefix("FSDP")  # which sharding puts before the class's name
        self.notice(f"{name}: {count / 1e6:,.1f} M parameters, {self.config.model.policy_dtype}, on {self.device}")
        parts = self.placement.describe(self.policy)
        if parts:
            self.notice(parts)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.config.optimizer)
        try:
            return kind(self.placement.parameter_groups(self.policy), lr=self.config.lr, **self.config.optimizer_kwargs)
        except TypeError as problem:
            raise ValueError(
                f"optimizer_kwargs={dict(self.config.optimizer_kwargs)} do not fit torch.optim."
                f"{self.config.optimizer}: {problem}"
            ) from problem

    def learning_rate(self, step: int) -> float:
        """Learning rate of optimizer step `step` (0-based): linear warm-up, then the schedule's decay."""
        warm = self.config.warmup_steps
        rate = self.config.lr * min(1.0, (step + 1) / (warm + 1))
        if self.config.schedule == "constant" or step <= warm:
            return rate
        done = (step - warm) / max(1, self.sampler.n_steps - warm)
        return rate * (1 - done if self.config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))

    # ---- One step -------------------------------------------------------------------------------------------------

    def losses_and_metrics(self, split: str, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [E] with gradient, and the metric matrix [E, columns] (metrics.py) without."""
        logps = self.policy.response_logps(batch)
        chosen, rejected = batch.pairs[:, 0], batch.pairs[:, 1]
        if self.sft:
            each = losses.sft(logps[chosen])
            return each, sft_columns(each, logps[chosen], batch.lengths[chosen])
        reference = self.reference.logps(split, batch) if self.reference else torch.zeros_like(logps)
        pairs = losses.PairLogps(
            logps[chosen],
            logps[rejected],
            reference[chosen],
            reference[rejected],
            batch.lengths[chosen],
            batch.lengths[rejected],
        )
        each, chosen_rewards, rejected_rewards = self.loss_function(pairs)
        return each, preference_columns(each, pairs, chosen_rewards, rejected_rewards)

    @property
    def loss_function(self):
        settings = {key: value for key, value in self.config.loss.items() if key != "name"}
        return partial(losses.LOSSES[self.config.loss.name], **settings)

    def _metric_sums(self, split: str) -> MetricAccumulator:
        return MetricAccumulator(
            split, self.datasets[split], SFT_METRICS if self.sft else PREFERENCE_METRICS, self.device
        )

    def _gradients(self, step: Step) -> tuple[MetricAccumulator, list[tuple[MicroBatch, torch.Tensor]]]:
        """Gradients of a step, summed over its micro-batches. Returns the metric sums of this rank, and each
        micro-batch with its examples' losses.
        """
        sums = self._metric_sums("train")
        seen: list[tuple[MicroBatch, torch.Tensor]] = []
        for index, batch in enumerate(step.micro_batches):
            self.heartbeat.at(f"in pass {index + 1} of {len(step.micro_batches)} of a step", self.updates)
            self.placement.sync_gradients(self.policy, last=index == len(step.micro_batches) - 1)
            if batch is None:
                each, _ = self.losses_and_metrics("train", self.idle_batch)
                (each.sum() * 0).backward()
                continue
            batch = batch.to(self.device)
            each, metrics = self.losses_and_metrics("train", batch)
            # Placements average gradients over data ranks; this makes every example of the step weigh the same.
            (each.sum() * (self.placement.data_ranks * self.loss_scale / step.n_examples)).backward()
            sums.add(batch, metrics)
            seen.append((batch, metrics[:, 0]))
        return sums, seen

    def _gradients_within_memory(self, step: Step):
        """`_gradients`, again in smaller micro-batches where the device's memory ran out. Returns (step, sums, seen)."""
        while True:
            try:
                return step, *self._gradients(step)
            except torch.OutOfMemoryError as error:
                problem = str(error).splitlines()[0]
            # Outside the handler, whose error holds on to the tensors of the pass that failed.
            self.optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            step = self.in_smaller_micro_batches(step, problem)

    def out_of_memory(self, problem: str) -> str:
        """What to do about it, in words."""
        where = f" on rank {self.world.rank}" if self.world.size > 1 else ""
        more = "plan=true tells what a run needs."
        if self.sampler is None:
            return (
                f"Out of memory{where} before the first pass ({problem}). Use trainer=FSDPTrainer on more devices, "
                f"fsdp.cpu_offload=true or a smaller model; {more}"
            )
        return (
            f"Out of memory{where} ({problem}). Set tokens_per_microbatch={max(1, self.sampler.budget // 2)} (it was "
            f"{self.sampler.budget}), activation_checkpointing=true, or trainer=FSDPTrainer with fsdp.cpu_offload=true; "
            f"{more}"
        )

    def in_smaller_micro_batches(self, step: Step, problem: str) -> Step:
        """The same step with more micro-batches, all later steps with it.

        Raises:
            ValueError: each holds one prompt already, or this placement cannot repeat a step.
        """
        if not self.placement.retries_out_of_memory:
            raise ValueError(self.out_of_memory(problem))
        again = self.sampler.step(
            step.number
        )  # an earlier step may have lowered the budget after this one was prepared
        while len(again.micro_batches) <= len(step.micro_batches):
            if self.sampler.budget <= 1 or all(len(batch.units) == 1 for batch in step.micro_batches):
                raise ValueError(
                    f"Out of memory with a single prompt and its responses in a pass ({problem}). Set "
                    "activation_checkpointing=true, lower max_length, or use trainer=FSDPTrainer on more "
                    "devices."
                )
            self.sampler.budget //= 2
            again = self.sampler.step(step.number)
        self.notice(
            f"Out of memory: passes now hold at most {self.sampler.budget:,} tokens, and the step is repeated. The "
            f"result is the same; tokens_per_microbatch={self.sampler.budget} saves the failed try."
        )
        return again

    def train_step(self, step: Step) -> dict[str, float] | None:
        """One optimizer step. Returns sums of the step's metrics, or None if it was skipped as non-finite.

        Raises:
            FloatingPointError: loss or gradient is not finite, and guards do not allow to skip.
        """
        rate = self.learning_rate(self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        step, sums, seen = self._gradients_within_memory(step)
        if self.loss_scale != 1.0:
            for parameter in self.policy.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.loss_scale)
        self.heartbeat.at("summing gradients", self.updates)
        norm = self.placement.clip_gradients(self.policy, self.config.max_grad_norm)
        # What the ranks must agree on travels with the metrics: whether a signal came, and rank 0's clock.
        wishes = torch.zeros_like(sums.sums[:, :1])
        wishes[0] = float(self.signals.received is not None)
        total = self.placement.reduce(torch.cat([sums.sums, wishes], dim=1))
        values = torch.cat([total.flatten(), norm.reshape(1).to(total.dtype)]).cpu()  # the step's one host sync
        total, norm = values[:-1].reshape(total.shape), values[-1].item()
        total, stop = total[:, :-1], total[0, -1].item()
        self._agree(stop)
        if not math.isfinite(norm) and self.loss_scale != 1.0 and torch.isfinite(total).all():
            self.optimizer.zero_grad(set_to_none=True)
            self.loss_scale, self.good_steps = self.loss_scale / 2, 0
            if self.loss_scale < 1.0:
                raise FloatingPointError(
                    "float16 gradients overflow at every loss scale: use model.fsdp_policy_mp=bfloat16."
                )
            return self.train_step(step)  # again, so that its examples are not lost
        if not (math.isfinite(norm) and torch.isfinite(total).all()):
            self.optimizer.zero_grad(set_to_none=True)
            self._non_finite(seen, norm)
            return None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self._after_update()
        result = sums.by_name(total)
        result["grad_norm"] = (norm, 1.0)
        result["learning_rate"] = (rate, 1.0)
        return result

    def _agree(self, stop: float) -> None:
        """Take in what all ranks agreed on in this step: signals (ranks that got one) and the time since a save."""
        self.stop_requested = stop > 0
        if self.config.checkpoint.every_minutes is not None:
            # A clock of one rank, for the ranks must save together.
            self.seconds_since_save = broadcast_object(time.monotonic() - self.last_save, self.world)

    def _after_update(self) -> None:
        if self.loss_scale != 1.0:
            self.good_steps += 1
            if self.good_steps % 2000 == 0:
                self.loss_scale *= 2
        moved = self.movement.update()
        if moved:
            moved = [sum(part) for part in zip(*gather_objects(moved, self.world))]
            share = moved[0] / max(1, moved[1])
            if share < 0.5:
                self.notice(
                    f"Only {share:.1%} of the {self.config.model.policy_dtype} weights changed in the first 20 "
                    f"updates: at lr={self.config.lr} most updates are rounded away. Use "
                    "model.policy_dtype=float32 (with trainer=FSDPTrainer model.fsdp_policy_mp=bfloat16 to "
                    "compute in bfloat16)."
                )

    def _non_finite(self, seen: list[tuple[MicroBatch, torch.Tensor]], norm: float) -> None:
        """Name the examples, write them down, and stop or go on as `guards` say."""
        settings = self.config.guards
        self.skipped += 1
        rows, in_loss = offending_examples(seen, self._describe, self.world)
        what = "loss" if in_loss else f"gradient (norm {norm})"
        names = ", ".join(f"{row['dataset']} row {row['row']}" for row in rows[:5]) + (" ..." if len(rows) > 5 else "")
        path = os.path.join(self.run_dir, "nonfinite.jsonl")
        message = (
            f"The {what} of update {self.updates + 1} is not finite: {names}. The optimizer did not step. "
            f"Texts: {path}."
        )
        if self.world.is_main:
            write_down(path, [{"examples": self.examples, "updates": self.updates, **row} for row in rows], self.notice)
        if settings.on_nonfinite == "skip" and self.skipped <= settings.max_nonfinite_steps:
            self.notice(f"{message} Skipped ({self.skipped} of at most {settings.max_nonfinite_steps}).")
            return
        raise FloatingPointError(
            f"{message} Look at these rows, lower lr, use float32, or set guards.on_nonfinite=skip "
            "guards.max_nonfinite_steps=N to go on without such steps."
        )

    def _describe(self, unit: PromptUnit, pair: tuple[int, int]) -> dict:
        dataset = self.datasets["train"][unit.dataset]
        texts = {
            side: self.tokenizer.decode(unit.responses[index])
            for side, index in zip(("chosen", "rejected"), pair)
            if index >= 0
        }
        return {
            "dataset": dataset.name,
            "row": int(dataset.rows[unit.group]),
            "prompt": self.tokenizer.decode(unit.prompt),
            **texts,
        }

    # ---- Evaluation -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> dict[str, float] | None:
        """Metrics of the held-out examples, and samples if asked for; reported and returned. None if a signal came."""
        if self.eval_sampler is None:
            return {}
        sums = self._metric_sums("eval")
        with self.reporter.progress(self.eval_sampler.n_examples, "evaluation", self.unit_name) as bar:
            for step in self.eval_sampler.steps():
                for batch in step.micro_batches:
                    if batch is None:
                        self.losses_and_metrics("eval", self.idle_batch)
                        continue
                    batch = batch.to(self.device)
                    _, metrics = self.losses_and_metrics("eval", batch)
                    sums.add(batch, metrics)
                bar.update(step.n_examples)
                self.heartbeat.at("in an evaluation", self.updates)
                if step.number % 8 == 7 and self._signalled():  # a preempted job's time is short
                    self._reshard()
                    return None
        self._reshard()
        metrics = {
            name: value / count for name, (value, count) in sums.by_name(self.placement.reduce(sums.sums).cpu()).items()
        }
        self.reporter.log(metrics, self.examples, self.updates)
        if self.config.sample_during_eval:
            self._sample()
        return metrics

    def _reshard(self) -> None:
        self.placement.reshard_after_eval(self.policy, self.reference.model if self.reference else None)

    def _signalled(self) -> bool:
        """Whether a signal came on any rank; all ranks ask together."""
        self.stop_requested |= any(gather_objects(self.signals.received is not None, self.world))
        return self.stop_requested

    def _sample(self) -> None:
        """Continuations of the same held-out prompts by policy and reference."""
        wanted = self.config.n_eval_model_samples
        units, seen = [], set()
        for unit in self.eval_sampler.mixture.units(self.eval_sampler.mixture.epoch_permutation(self.config.seed, 0)):
            if len(units) < wanted and (unit.dataset, unit.group) not in seen:
                seen.add((unit.dataset, unit.group))
                units.append(unit)
        self.heartbeat.at("writing samples", self.updates, patient=True)
        write = partial(
            generate_samples,
            tokenizer=self.tokenizer,
            prompts=[unit.prompt for unit in units],
            world=self.world,
            batch_size=self.config.eval_batch_size,
            device=self.device,
            notice=self.notice,
            shard=(self.placement.data_rank, self.placement.data_ranks),
            **self.config.sampling,
        )
        with self.reporter.progress(2 if self.reference_samples is None else 1, "samples", "models") as bar:
            policy = write(self.policy)
            bar.update(1)
            if self.reference_samples is None:
                if self.reference is not None and self.reference.model is not None:
                    self.reference_samples = write(self.reference.model)
                elif self.updates == 0:
                    self.reference_samples = policy  # nothing was learnt yet: the policy is the reference
                bar.update(1)
        self._reshard()
        names = [dataset.name for dataset in self.datasets["eval"]]
        rows = [
            {
                "dataset": names[unit.dataset],
                "prompt": self.tokenizer.decode(unit.prompt),
                "policy": text,
                "reference": self.reference_samples[index] if self.reference_samples and not self.sft else None,
            }
            for index, (unit, text) in enumerate(zip(units, policy))
        ]
        self.reporter.samples(self.examples, rows)

    # ---- The loop -------------------------------------------------------------------------------------------------

    def train(self) -> float | None:
        """Prepare, then train to the end. Returns the last evaluation's loss, for sweepers to minimise.

        Raises:
            SystemExit: a signal asked to stop; the state is saved. OSError: the last checkpoint could not be written.
            ValueError, FloatingPointError: see the methods.
        """
        self.prepare()
        config, sampler = self.config, self.sampler
        meter = Meter(
            self.reporter.log,
            interval=config.minimum_log_interval_secs,
            data_ranks=self.placement.data_ranks,
            device=self.device,
        )
        self.signals.deferred = True  # from here on there is something to save
        with self.reporter.progress(sampler.n_examples, "training", self.unit_name, initial=self.examples) as bar:
            if (
                self.step_number == 0
                and config.sample_during_eval
                and not config.do_first_eval
                and self._samples_cannot_wait
            ):
                self._sample()  # the reference's samples can only be had while the policy still is the reference
            for step in sampler.steps(self.step_number):
                if self._between_steps(meter):
                    break
                metrics = self.train_step(step)
                self.step_number = step.number + 1
                self.examples = sampler.examples_before(self.step_number)
                meter.add(metrics, step, self.examples, self.updates)
                bar.update(step.n_examples, **meter.rates())
            else:
                self._between_steps(meter, last=True)
        problem = self.checkpointer.close()
        best = self.checkpointer.best() if self.early_stop.over else None
        if best is not None:
            self.notice(f"The best checkpoint by {self.checkpointer.best_metric} is {best}.")
        if problem:
            raise OSError(
                f"The run's last checkpoint could not be written, so what was learnt since the one before is "
                f"lost ({problem}). Mend this; to do it again:  {resume_command(self.run_dir, self.config.checkpoint.formats)}"
            )
        return self.last_eval.get("loss/eval")

    @property
    def _samples_cannot_wait(self) -> bool:
        """Whether the reference lives only in the policy before its first update."""
        return self.reference is not None and self.reference.model is None and self.eval_sampler is not None

    @property
    def unit_name(self) -> str:
        return "examples" if self.sft else "pairs"

    def _between_steps(self, meter: Meter, last: bool = False) -> bool:
        """Evaluate, save or stop, where one is due. Whether training is over."""
        due = (
            self._passed(self.config.eval_every, self.evaluated_at)
            or (last and self.evaluated_at != self.step_number)
            or (self.step_number == 0 and self.config.do_first_eval and self.evaluated_at is None)
        )
        best = False
        if due:
            meter.flush()
            # After a signal there may be no time for it: the resumed run evaluates here instead.
            metrics = None if self.stop_requested else self.evaluate()
            if metrics is not None:
                self.last_eval, self.evaluated_at, due = metrics, self.step_number, False
                if self.early_stop.update(metrics):
                    self.notice(
                        f"{self.early_stop.metric} has not got better for {self.early_stop.patience} "
                        f"evaluations: training ends at {self.examples:,} examples."
                    )
                best = self.early_stop.is_best() and self.config.checkpoint.keep_best
        over = self.early_stop.over
        every = self.config.checkpoint.every or self.config.eval_every
        timed = self.config.checkpoint.every_minutes
        timed = timed is not None and self.seconds_since_save > 60 * timed
        if self.step_number and (
            last or over or best or timed or self.stop_requested or self._passed(every, self.saved_at)
        ):
            meter.flush()
            self.save(again=due)
        if self.stop_requested:
            self._stop()
        if self.evaluated_at == self.step_number or self.saved_at == self.step_number:
            meter.restart()
        if self.checkpointer.poll():
            self.saved_at = None  # a save in the background failed: what is due next is saved then
        return over

    def _passed(self, every: int, done_at: int | None) -> bool:
        """Whether the last step passed a multiple of `every` examples and what is due then was not done yet."""
        if self.step_number == 0 or done_at == self.step_number or self.step_number == self.sampler.n_steps:
            return False
        return self.examples // every > self.sampler.examples_before(self.step_number - 1) // every

    def _stop(self) -> None:
        """End after a signal: the state is saved."""
        self.checkpointer.close()
        saved = self.saved_at == self.step_number and self.checkpointer.problem is None
        if self.step_number == 0 or self.config.debug:
            self.notice(
                f"Stopped by a signal at {self.examples:,} examples; nothing is saved"
                + (" in debug mode." if self.config.debug else " before the first step.")
            )
        else:
            self.notice(
                f"Stopped by a signal at {self.examples:,} examples; the state is "
                f"{'saved' if saved else 'NOT saved'}. To go on:  {resume_command(self.run_dir, self.config.checkpoint.formats)}"
            )
        raise SystemExit(self.signals.exit_code)

    # ---- Saving and resuming --------------------------------------------------------------------------------------

    def save(self, again: bool = False) -> None:
        """Write a checkpoint; a failure is said and survived. `again`: a run resumed from it saves here once more,
        because an evaluation is due before."""
        if self.config.debug or self.saved_at == self.step_number:
            return
        self.heartbeat.at("saving", self.updates, patient=True)
        before, self.saved_at = self.saved_at, self.step_number
        state = {name: getattr(self, name) for name in self.STATE}
        state |= {
            "budget": self.sampler.budget,
            "first_budget": self.first_budget,
            "tokens_per_microbatch": self.config.tokens_per_microbatch,
            "device": self.device.type,
            "identity": self._identity(),
            "reporter": self.reporter.state(),
            "early_stop": self.early_stop.state(),
        }
        if again:
            state["saved_at"] = None
        metrics = self.last_eval if self.evaluated_at == self.step_number else {}
        formats = self.config.checkpoint.formats
        if self.stop_requested and "state" not in formats:
            formats = ["state", *formats]  # to be able to go on is what the signal asks for
        problem = self.checkpointer.save(
            self.examples, self.policy, self.optimizer, self.tokenizer, state, metrics, formats
        )
        self.last_save, self.seconds_since_save = time.monotonic(), 0.0
        if problem:
            self.saved_at = before

    # The trainer's own numbers that a resumed run starts from.
    STATE = (
        "examples",
        "updates",
        "step_number",
        "evaluated_at",
        "saved_at",
        "skipped",
        "reference_samples",
        "last_eval",
        "loss_scale",
        "good_steps",
    )

    def _identity(self) -> dict[str, list | str | None]:
        """What must be the same for a resumed run to be the same run, beside its settings."""
        keys = {f"the {split} data": [dataset.key for dataset in datasets] for split, datasets in self.datasets.items()}
        return {**keys, "the reference model": self.reference.key if self.reference else None}

    def _find_checkpoint(self) -> None:
        """The checkpoint to resume from, and what is needed of it before there is a model."""
        self.resume_from = self.first_budget = self.later_budget = None
        if not self.config.resume:
            return
        self.resume_from = self.checkpointer.resumable()
        if self.resume_from is None:
            if self.checkpointer.any_step():
                raise ValueError(
                    f"resume={self.run_dir}: none of its checkpoints can be resumed from (see above). Its "
                    "last weights can begin a new run, with model.archive=STEP_FOLDER if they are whole."
                )
            self.notice("The run has no checkpoint yet: it starts from its beginning.")
            return
        size, state = self.checkpointer.peek(self.resume_from)
        now = self.config.tokens_per_microbatch, self.device.type, self.world.size
        if (state["tokens_per_microbatch"], state["device"], size) == now:  # the micro-batches of then, to the last bit
            self.first_budget, self.later_budget = state["first_budget"], state["budget"]

    def _resume(self) -> None:
        self.movement = MovementWatch(self.policy)
        if self.resume_from is None:
            self.reporter.load_state(None)
            return
        state = self.checkpointer.peek(self.resume_from)[1]
        identity = self._identity()
        changed = [what for what, was in state["identity"].items() if was != identity[what]]
        if changed:
            raise ValueError(
                f"resume={self.run_dir}: {' and '.join(changed)} changed since this run began, so that it "
                "would be another run. Put back the files of then, or begin a new run with "
                f"model.archive={self.resume_from}"
            )
        if self.sampler.examples_before(state["step_number"]) != state["examples"]:
            raise ValueError(
                f"resume={self.run_dir}: its checkpoint is at {state['examples']:,} examples, between two steps of "
                f"n_epochs={self.config.n_epochs} n_examples={self.config.n_examples}. Leave both as they were, or choose "
                f"{'more' if state['examples'] > self.sampler.n_examples else 'an n_examples that ends with a whole step'}."
            )
        self.checkpointer.load(self.resume_from, self.policy, self.optimizer)
        for name in self.STATE:
            setattr(self, name, state[name])
        if self.later_budget is not None:
            self.sampler.budget = self.later_budget
        self.reporter.load_state(state["reporter"])
        self.early_stop.load_state(state["early_stop"])
        self.movement = MovementWatch(self.policy, after=max(0, MovementWatch.UPDATES - self.updates))
        self.notice(f"Resumed from {self.resume_from} at {self.examples:,} examples.")


class FSDPTrainer(BasicTrainer):
    """Shards policy and reference over all devices with FSDP2 (`fsdp` in the config says how), one process a device.

    Every rank takes its share of each step's examples; the update is the one that BasicTrainer would make. What differs
    is in `Placement`.
    """


class TensorParallelTrainer(FSDPTrainer):
    """Splits each matrix over `tp_size` devices, and shards over the groups of such devices if there are several."""


TRAINERS = {"BasicTrainer": BasicTrainer, "FSDPTrainer": FSDPTrainer, "TensorParallelTrainer": TensorParallelTrainer}
