"""What a run is made of: its parts are prepared here in their order, and saved and resumed together."""

from __future__ import annotations

import os

import torch

from checkpoint import run_folder
from checkpoint.checkpointer import Checkpointer
from data.sampler import DatasetMixture, longest_unit
from losses import find_loss
from modeling import attention, loading
from modeling.attention_kernels import is_packed
from modeling.loading import DTYPES
from modeling.model_check import ModelLimits, check_model, check_same_tokenizer, check_token_ids
from modeling.reference import Reference
from parallel import rank_process
from parallel.patience import patient_group
from parallel.placement import make_placement
from planning.token_budget import free_memory, token_budget
from report.reporter import Reporter
from settings import Settings, as_dict, replace
from settings.precision import mixed_dtype
from settings.reference import has_own_weights, reference_settings
from training import nonfinite
from training.attention_choice import choose_attention, shares_prefix
from training.data_loading import evaluated_names, load_datasets, load_streamed, make_steps, training_mixture
from training.early_stopping import EarlyStop, check_watched_metrics
from training.evaluation import Evaluation
from training.heartbeat import Heartbeat
from training.nonfinite import NonFiniteGuard
from training.objective import Objective
from training.optimizer import LossScale, make_optimizer, warm_up_problem
from training.run_saver import RunSaver, identity_of
from training.run_state import TrainState
from training.signals import SignalWatch
from training.weight_movement import MovementWatch
from utils import World, gather_objects, keep_freed_memory, run_on_main, seed_everything


class PreparedRun:
    """A run before its loop: data, models, steps, optimizer and the parts that watch over it.

    Args:
        config: the validated settings (settings/); run_dir: the run's folder, which exists; world: this process.
    """

    def __init__(self, config: Settings, run_dir: str, world: World):
        self.config, self.run_dir, self.world = config, run_dir, world
        self.device = torch.device(world.device)
        seed_everything(config.seed)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.loss = find_loss(config.loss.name, config.loss.options)
        self.loss_options = config.loss.options
        stop, early_notices = config.early_stopping, list[str]()
        self.early_stop = EarlyStop(stop.metric, stop.patience, stop.min_delta, stop.mode)
        # First of all: it takes the folder, or ends here because another run has it.
        self.checkpointer = Checkpointer(
            run_dir, config.checkpoint, world, early_notices.append, self.early_stop.watched
        )
        self.reporter = Reporter(as_dict(config), run_dir, world)
        self.reporter.show(f"run folder: {run_dir}")
        self.notice = self.checkpointer.notice = self.reporter.notice
        for text in early_notices:
            self.notice(text)
        self.state = TrainState()
        self.prepared = False  # whether the run has its steps, so that a pass may have begun
        self.stop_requested = False  # a signal came, on any rank
        self.signals = SignalWatch(on_first=rank_process.hold_on)  # the parent then gives the time that a save takes
        patience = 0.8 * 60 * config.guards.collective_timeout_minutes
        self.heartbeat = Heartbeat(os.path.join(run_dir, ".heartbeat"), world.rank, world.size, patience)
        self.loss_scale = LossScale(mixed_dtype(config) == "float16")
        self.saver = RunSaver(
            config, run_dir, self.checkpointer, self.reporter, self.early_stop, self.loss_scale, world, self.device.type
        )
        self.placement = make_placement(config, world)

    def prepare(self) -> None:
        """Data, weights, attention, steps, optimizer, reference, and the state of a run that is resumed."""
        config, kind = self.config, self.loss.inputs.kind
        if config.model.trust_remote_code:
            source = config.model.tokenizer_name_or_path or loading.source_of(config)
            self.notice(f"model.trust_remote_code=true: code that comes with {source} runs here, with your rights.")
        point = self.saver.find_point()
        self.heartbeat.at("preparing the data", 0, patient=True)
        self.tokenizer = loading.load_tokenizer(config)
        limits = self.check_model()
        load = load_streamed if config.data.streaming else load_datasets
        self.datasets, streamed = load(
            config, self.tokenizer, kind, self.world, self.checkpointer.wait_for_all, self.reporter
        )
        check_watched_metrics(config, evaluated_names(config, self.datasets["eval"]))
        every = [dataset for split in self.datasets.values() for dataset in split]
        run_on_main(lambda: check_token_ids(every, limits, self.tokenizer), self.world)
        self.heartbeat.at("loading the weights", 0, patient=True)
        self.policy = self.placement.build_model(config, self.tokenizer, DTYPES[config.model.policy_dtype])
        for text in self.placement.describe(self.policy):
            self.notice(text)
        held_out = DatasetMixture(self.datasets["eval"])
        train = streamed.mixture if streamed else training_mixture(config, self.datasets["train"])
        longest = config.max_length if streamed else max(train.longest_row(), held_out.longest_row())
        self.share_prefix = shares_prefix(config, self.policy, longest, self.notice)
        self.kernel, self.full_forward = self.choose_attention(longest_unit(train))
        windows = getattr(self.policy, "attention_windows", ())  # what the try has found
        attention.use_attention(self.policy, self.kernel, self.full_forward, windows)
        budget = point.first_budget if point else None
        if budget is None:  # ranks may differ in free memory
            free, threads = free_memory(self.device), torch.get_num_threads()
            budget = token_budget(config, self.policy.config, self.device.type, free, threads)
            budget = min(gather_objects(budget, self.world))
        self.first_budget = budget
        share_prefix = self.share_prefix and is_packed(self.kernel)
        steps = make_steps(
            config, streamed or train, held_out, self.tokenizer, kind, self.placement, self.kernel, share_prefix, budget
        )
        self.sampler, self.eval_sampler, self.idle_batch = steps.training, steps.held_out, steps.idle_batch
        self.prepared = True
        if problem := warm_up_problem(config, self.sampler.n_steps):
            self.notice(problem)
        self.objective = Objective(
            self.loss,
            self.loss_options,
            self.policy,
            lambda: self.state.updates,
            self.placement,
            lambda: self.loss.memory | self.state.loss_memory,
        )
        self.evaluation: Evaluation | None = None
        if self.eval_sampler is None:
            self.notice("There are no held-out examples: nothing is evaluated or sampled.")
        else:
            self.evaluation = Evaluation(
                config,
                self.objective,
                self.eval_sampler,
                self.idle_batch,
                self.datasets["eval"],
                self.tokenizer,
                self.placement,
                self.reporter,
            )
        self.nonfinite = NonFiniteGuard(
            config.guards, self.datasets["train"], self.tokenizer, self.run_dir, self.world, self.notice
        )
        self.reporter.total_examples = self.sampler.n_examples
        self.optimizer = make_optimizer(config, self.placement.parameter_groups(self.policy))
        self.heartbeat.at("computing the reference's log-probs", 0, patient=True)
        self.objective.reference = self.make_reference()
        if config.reference.sync_every is not None:
            self.checkpointer.reference = self.objective.reference_model
        self.movement = MovementWatch(self.policy)
        if point is None:
            self.reporter.load_state(None)
        else:
            identity = identity_of(self.datasets, self.objective.reference)
            self.state = self.saver.restore(point, self.policy, self.optimizer, self.sampler, identity)
            self.movement = MovementWatch(self.policy, after=max(0, MovementWatch.UPDATES - self.state.updates))
        if config.resume:
            run_on_main(self._take_over_folder, self.world)

    def _take_over_folder(self) -> None:
        """The resume is accepted: from here on the folder has this run's settings, and no rows of steps to come."""
        run_folder.record_changes(self.config, self.run_dir)
        nonfinite.forget_rows(self.run_dir, self.state.examples)

    def check_model(self) -> ModelLimits:
        """Refuse a model that cannot be trained or loaded before hours go into its data; what rows it takes."""
        self.heartbeat.at("checking the model", 0, patient=True)
        with patient_group(self.world) as group:  # the files may have to be downloaded
            return run_on_main(self._check_models, self.world, group)

    def _check_models(self) -> ModelLimits:
        limits = check_model(self.config, self.tokenizer)
        if has_own_weights(self.config):
            own = reference_settings(self.config)
            if self.config.reference.name_or_path:
                check_same_tokenizer(self.tokenizer, own)
            check_model(own, self.tokenizer)
        return limits

    def choose_attention(self, unit) -> tuple[str, bool]:
        """(kernel, full_forward): how this model is scored, tried on a prompt with several responses."""
        return choose_attention(
            self.config, self.tokenizer, self.placement, self.policy, unit, self.share_prefix, self.notice
        )

    def make_reference(self) -> Reference | None:
        """What policy log-probs are compared with; None where the loss needs none."""
        if not self.loss.needs_reference(self.loss_options):
            return None

        config = reference_settings(self.config)
        policy, reference = loading.origin_of(self.config), loading.origin_of(config)
        also = " and is the reference" if policy == reference else f", the reference is {reference}"
        self.notice(f"The policy starts from {policy}{also}.")

        def build_frozen(dtype: str) -> torch.nn.Module:
            model = self.placement.build_model(config, self.tokenizer, DTYPES[dtype], frozen=True)
            kernel, full_forward, windows = self.kernel, self.full_forward, self.policy.attention_windows
            if self.config.reference.name_or_path:  # another model may not be scored as the policy is
                same_rows = replace(config, {"model.attention": kernel, "prefix_sharing": self.share_prefix})
                unit = longest_unit(self.sampler.mixture)
                kernel, full_forward = choose_attention(
                    same_rows, self.tokenizer, self.placement, model, unit, self.share_prefix, self.notice
                )
                windows = getattr(model, "attention_windows", ())
            attention.use_attention(model, kernel, full_forward, windows)
            return model

        samplers = {"train": self.sampler, "eval": self.eval_sampler}
        return Reference(
            self.config, self.policy, build_frozen, samplers, self.datasets, self.idle_batch, self.reporter, self.world
        )

    def save(self, again: bool = False) -> None:
        """Write a checkpoint; `again`: a run resumed from it saves here once more, as an evaluation is due before."""
        if self.config.debug or self.state.saved_at == self.state.step_number:
            return
        self.heartbeat.saving(self.state.updates)
        self.state.stream = self.sampler.saved(self.state.step_number)
        self.saver.save(
            self.state,
            self.policy,
            self.optimizer,
            self.tokenizer,
            budget=self.sampler.budget,
            first_budget=self.first_budget,
            identity=identity_of(self.datasets, self.objective.reference),
            again=again,
            needs_state=self.stop_requested,
        )
