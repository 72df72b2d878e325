"""Checkpoints on preference pairs, what evaluate.py computes: the log-probs of every response by the policy, its
reference and another policy, and texts that they write. The models are in memory one after another."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from data.batching import PromptUnit
from data.dataset_names import short_names
from data.sampler import BatchSampler, DatasetMixture, longest_unit
from data.tokenization import TokenizedDataset, load_tokenized
from modeling import attention, loading
from modeling.attention_kernels import is_packed
from modeling.generation import decode
from modeling.loading import DTYPES
from modeling.model_check import check_model, check_same_tokenizer, check_token_ids
from modeling.sharded import reshard_after_eval
from parallel.patience import on_all, patient_group
from parallel.placement import make_placement
from planning.token_budget import free_memory, token_budget
from report import evaluation_page
from report.console import ConsoleLogger
from report.evaluation_page import Evaluated
from report.files import FileLogger
from report.pair_figures import ScoredPairs
from report.reporter import Reporter
from settings import Settings, as_dict
from settings.checkpoints import model_of, reference_of
from training.attention_choice import choose_attention, shares_prefix
from training.data_loading import batch_layout, evaluation_steps, in_turns, one_token_batch
from training.evaluation import first_prompts, write_ids
from training.memory_retry import out_of_memory_message
from training.precision import on_device
from utils import World, gather_objects, keep_freed_memory, run_on_main, seed_everything

KIND = "pairs"
USUAL_BETA = 0.1  # of runs whose loss has none, such as SFT
SPLITS = {"train": ("train",), "test": ("test",), "all": ("train", "test")}


@dataclass
class Scores:
    """What one model gives: logps, (data set, response) -> nats; texts: tokens written after each prompt; written:
    the log-probs of the policy's texts, nats."""

    logps: dict[tuple[int, int], float] = field(default_factory=dict)
    texts: list[list[int]] = field(default_factory=list)
    written: list[float] = field(default_factory=list)


def run(config: Settings, run_dir: str, world: World) -> float:
    """Evaluate as `config.evals` says, on this rank. Returns the accuracy.

    Raises:
        ValueError: a checkpoint, model or data set cannot be found, or they do not fit each other.
    """
    config = on_device(config, world.device)
    reporter = Reporter(as_dict(config), run_dir, world, loggers=(FileLogger, ConsoleLogger))
    reporter.show(f"folder: {run_dir}")
    try:
        result = PairEvaluation(config, world, reporter).results()
        accuracy = run_on_main(lambda: result and evaluation_page.write(result, run_dir, reporter.show), world)
    except torch.OutOfMemoryError as problem:
        raise ValueError(out_of_memory_message(str(problem).splitlines()[0])) from None
    reporter.finish(True)
    return float(accuracy)


class PairEvaluation:
    """Pairs of data sets, scored by a few models in turn. All ranks make one and call `results` together."""

    def __init__(self, config: Settings, world: World, reporter: Reporter):
        self.config, self.world, self.reporter = config, world, reporter
        self.device = torch.device(world.device)
        seed_everything(config.seed)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.placement = make_placement(config, world)
        checkpoint, against = config.evals.checkpoint, config.evals.against
        self.models: dict[str, Settings] = {"policy": model_of(checkpoint, config) if checkpoint else config}
        if (reference := reference_of(config)) is not None:
            self.models["reference"] = reference
        if against is not None:
            self.models["against"] = model_of(against, config)
        self.tokenizer = loading.load_tokenizer(self.models["policy"])
        self.datasets = self._load_datasets()
        self.mixture = DatasetMixture(self.datasets)
        self.units: list[PromptUnit] = []
        if config.sample_during_eval:
            self.units = first_prompts(self.mixture, config.seed, config.n_eval_model_samples)

    def _load_datasets(self) -> list[TokenizedDataset]:
        """The rows to evaluate on, of each data set one after another."""
        config = self.config
        shorts = short_names(config.datasets, config.data.paths)
        wanted = [(*names, split) for names in zip(config.datasets, shorts) for split in SPLITS[config.evals.split]]

        def read() -> list[TokenizedDataset]:
            found = []
            for name, short, split in wanted:
                dataset = load_tokenized(name, split, self.tokenizer, config, KIND, progress=self.reporter.progress)
                dataset.short_name = short
                found.append(dataset)
            return found

        with patient_group(self.world) as group:
            run_on_main(self._check_models, self.world, group)
            datasets = in_turns(read, self.world, lambda: on_all(lambda: None, self.world, group))
        if not any(map(len, datasets)):
            raise ValueError(
                f"datasets={list(config.datasets)} hold no pair in the {config.evals.split} split: give other data, or "
                "evals.split=all"
            )
        for dataset in datasets:
            self.reporter.counts(dataset.short_name, dataset.split, dataset.counts)
            for text in dataset.notices:
                self.reporter.notice(text)
        return [dataset for dataset in datasets if len(dataset)]

    def _check_models(self) -> None:
        for name, model in self.models.items():
            if name != "policy":
                key = {"reference": "evals.reference", "against": "evals.against"}[name]
                check_same_tokenizer(self.tokenizer, model, key)
            check_model(model, self.tokenizer)

    def results(self) -> Evaluated | None:
        """Everything that was found, on rank 0."""
        scores: dict[str, Scores] = {}
        for name, settings in self.models.items():
            self.reporter.show(f"{name}: {loading.origin_of(settings)}")
            scores[name] = self._scores(name, settings, scores["policy"].texts if scores else None)
        if not self.world.is_main:
            return None
        self.places = self._places(scores["policy"].logps)
        return Evaluated(
            titles=self._titles(),
            pairs={name: self._pairs(scores, name) for name in self.models if name != "reference"},
            texts=self._text_of_pair,
            samples=self._samples(scores),
            kl=self._kl(scores),
            notices=self.reporter.notices,
        )

    @torch.no_grad()
    def _scores(self, name: str, settings: Settings, policy_texts: list[list[int]] | None) -> Scores:
        """What a model gives to all pairs and, of the policy's texts, what it gives to those; its own texts, too."""
        model = self.placement.build_model(settings, self.tokenizer, DTYPES[settings.model.policy_dtype], frozen=True)
        limits = check_model(settings, self.tokenizer, weights=False)
        run_on_main(lambda: check_token_ids(self.datasets, limits, self.tokenizer), self.world)
        share = shares_prefix(settings, model, self.mixture.longest_row(), self.reporter.notice)
        kernel, full_forward = choose_attention(
            settings, self.tokenizer, self.placement, model, longest_unit(self.mixture), share, self.reporter.notice
        )
        attention.use_attention(model, kernel, full_forward, getattr(model, "attention_windows", ()))
        free, threads = free_memory(self.device), torch.get_num_threads()
        budget = min(gather_objects(token_budget(settings, model.config, self.device.type, free, threads), self.world))
        layout = batch_layout(self.config, self.tokenizer, self.placement, kernel, share and is_packed(kernel), budget)
        sampler = evaluation_steps(self.config, self.mixture, layout)
        assert sampler is not None
        found = Scores(self._logps(model, sampler, name))
        if self.units:
            found.texts = write_ids(
                self.config, model, self.tokenizer, self.units, self.placement, self.reporter.notice
            )
            found.written = self._written(model, layout["make_batch"], policy_texts or found.texts)
        reshard_after_eval(model)
        del model
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def _logps(self, model, sampler: BatchSampler, name: str) -> dict[tuple[int, int], float]:
        """Log-probs of all responses, on every rank."""
        idle = one_token_batch(self.tokenizer, KIND, sampler.make_batch).to(self.device)
        found: dict[tuple[int, int], float] = {}
        with self.reporter.progress(sampler.n_examples, name, "pairs") as bar:
            for step in sampler.steps():
                for batch in step.micro_batches:
                    logps = model.response_logps(idle if batch is None else batch.to(self.device))
                    if batch is not None:
                        found.update(zip(batch.keys, logps.tolist()))
                bar.update(step.n_examples)
        for part in gather_objects(found, self.world):
            found.update(part)
        wrong = [key for key, value in found.items() if not np.isfinite(value)]
        if wrong:
            dataset = self.datasets[wrong[0][0]]
            raise ValueError(
                f"{name} gives response {wrong[0][1]} of {dataset.short_name} the log-prob {found[wrong[0]]}: use "
                "precision=float32, or look at the checkpoint's weights"
            )
        return found

    def _written(self, model, make_batch: Callable, texts: list[list[int]]) -> list[float]:
        """Log-probs of texts after their prompts; 0 of an empty one. Every rank computes all: they are few."""
        values = []
        for unit, text in zip(self.units, texts, strict=True):
            response = np.array(text or [self.tokenizer.eos_token_id], dtype=np.int32)
            batch = make_batch([PromptUnit(0, 0, unit.prompt, [response], [0], [(0, 0)])])
            logp = model.response_logps(batch.to(self.device)).item()
            values.append(logp if text else 0.0)
        return values

    # ---- What was found, on rank 0 --------------------------------------------------------------------------------

    def _pairs(self, scores: dict[str, Scores], policy: str) -> ScoredPairs:
        """The pairs that were scored (n_eval_examples may leave some out), in the order of the data."""
        shorts = list(dict.fromkeys(dataset.short_name for dataset in self.datasets))
        first_group = np.cumsum([0, *(dataset.n_groups for dataset in self.datasets)])
        parts = [(index, self.datasets[index], group) for index, group, _, _ in self.places]

        def of_responses(column: int, values: dict[tuple[int, int], float]) -> np.ndarray:
            return np.array(
                [
                    values[place[0], self.datasets[place[0]].response_id(place[1], place[column])]
                    for place in self.places
                ]
            )

        def lengths(column: int) -> np.ndarray:
            return np.array([len(self.datasets[place[0]].response(place[1], place[column])) for place in self.places])

        own, reference = scores[policy].logps, scores.get("reference")
        return ScoredPairs(
            shorts,
            np.array([shorts.index(dataset.short_name) for _, dataset, _ in parts]),
            np.array([first_group[index] + group for index, _, group in parts]),
            np.array([int(dataset.rows[group]) for _, dataset, group in parts]),
            of_responses(2, own),
            of_responses(3, own),
            None if reference is None else of_responses(2, reference.logps),
            None if reference is None else of_responses(3, reference.logps),
            lengths(2),
            lengths(3),
            float(self.config.loss.options.get("beta") or USUAL_BETA),
        )

    def _places(self, known: dict[tuple[int, int], float]) -> list[tuple[int, int, int, int]]:
        """(data set, group, chosen, rejected) of the pairs of which both responses are known."""
        return [
            (index, group, chosen, rejected)
            for index, dataset in enumerate(self.datasets)
            for group, chosen, rejected in dataset.examples.tolist()
            if all((index, dataset.response_id(group, number)) in known for number in (chosen, rejected))
        ]

    def _text_of_pair(self, number: int) -> dict[str, str]:
        index, group, chosen, rejected = self.places[number]
        dataset = self.datasets[index]
        return {
            "prompt": self.tokenizer.decode(dataset.prompt(group)),
            "chosen": self.tokenizer.decode(dataset.response(group, chosen)),
            "rejected": self.tokenizer.decode(dataset.response(group, rejected)),
        }

    def _samples(self, scores: dict[str, Scores]) -> list[dict[str, str]]:
        """Texts of all models after the same prompts."""
        return [
            {"dataset": self.datasets[unit.dataset].short_name, "prompt": self.tokenizer.decode(unit.prompt)}
            | {name: decode(self.tokenizer, unit.prompt, of.texts[number]) for name, of in scores.items()}
            for number, unit in enumerate(self.units)
        ]

    def _kl(self, scores: dict[str, Scores]) -> np.ndarray | None:
        """Of each text that the policy wrote, its log-prob less the reference's, nats: their mean estimates the KL
        divergence of policy from reference. None where texts are not drawn from the policy as it is."""
        sampling = self.config.sampling
        if not self.units or "reference" not in scores or sampling.temperature != 1 or sampling.top_p != 1:
            return None
        return np.array(scores["policy"].written) - np.array(scores["reference"].written)

    def _titles(self) -> dict[str, str]:
        names = {"policy": "policy", "reference": "reference", "against": "compared with"}
        titles = {names[name]: loading.origin_of(settings) for name, settings in self.models.items()}
        titles.setdefault("reference", "none")
        return titles | {
            "data": ", ".join(f"{dataset.short_name} {dataset.split}" for dataset in self.datasets),
            "computed in": self.config.precision,
        }
