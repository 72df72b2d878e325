"""The tokenised data of a run, and the steps that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from data.batching import MicroBatch, PromptUnit, pack, pad
from data.dataset_names import short_names
from data.examples import ONE_RESPONSE, rows_of
from data.options import mixture_weights
from data.sampler import BatchSampler, DatasetMixture
from data.streaming import StreamSampler, TokenStream
from data.tokenization import load_tokenized
from losses import find_loss
from modeling import loading
from modeling.attention_kernels import is_packed, row_multiple
from parallel.placement import Placement
from settings import Settings
from settings.config_files import default
from utils import World, check_same

EVALUATION_SEED = 0
LARGEST_EPOCH = 10**9  # examples: their order is kept in memory, eight bytes each


def load_datasets(
    config: Settings, tokenizer, kind: str, world: World, wait_for_all: Callable[[], None], reporter
) -> tuple[dict[str, list], None]:
    """Tokenised data sets by split, "train" and "eval"; what was dropped or cut is reported. And nothing that streams.

    Args:
        kind: of the loss's examples, see losses/inputs.py; wait_for_all: a barrier that allows for hours.
    Raises:
        ValueError: there is no training example, or ranks see different data.
    """
    datasets = {}
    for split, part in (("train", "train"), ("eval", "test")):

        def read(part: str = part) -> list:
            return [
                load_tokenized(name, part, tokenizer, config, kind, progress=reporter.progress)
                for name in config.datasets
            ]

        datasets[split] = in_turns(read, world, wait_for_all)
    if not sum(len(dataset.examples) for dataset in datasets["train"]):
        raise ValueError(
            f"datasets={list(config.datasets)} hold no usable training example: "
            f"{'; '.join(str(dataset.counts) for dataset in datasets['train'])}"
        )
    check_text_options(config, datasets["train"])
    check_scores(config, datasets)
    check_labels(kind, datasets["train"])
    for split, found in datasets.items():
        for dataset, short_name in zip(found, short_names(config.datasets, config.data.paths), strict=True):
            dataset.short_name = short_name
            check_same(dataset.key, f"the tokenised {split} data of {dataset.name}", world)
            reporter.counts(dataset.name, split, dataset.counts)
            for text in dataset.notices:
                reporter.notice(text)
    check_weights(config, datasets["train"])
    check_test_fraction(config, datasets["train"], reporter.notice)
    return datasets, None


def load_streamed(
    config: Settings, tokenizer, kind: str, world: World, wait_for_all: Callable[[], None], reporter
) -> tuple[dict[str, list], StreamSampler]:
    """The same of data that are streamed: the first window of the training data, held-out data where a data set has a
    test split, and the steps of the run. Every rank reads the stream."""
    assert config.n_examples is not None
    stream = TokenStream(config, tokenizer, kind)
    sampler = StreamSampler(stream, config.batch_size, config.n_examples, config.seed, config.shuffle)
    tested = [(name, short) for name, short, separate in
              zip(config.datasets, stream.short_names, stream.has_test_split, strict=True) if separate]  # fmt: skip

    def read() -> list:
        return [load_tokenized(name, "test", tokenizer, config, kind, progress=reporter.progress) for name, _ in tested]

    held_out = in_turns(read, world, wait_for_all)
    datasets = {"train": sampler.datasets, "eval": held_out}
    check_scores(config, datasets)
    for dataset, (_, short) in zip(held_out, tested, strict=True):
        dataset.short_name = short
        check_same(dataset.key, f"the tokenised test data of {dataset.name}", world)
        reporter.counts(dataset.name, "eval", dataset.counts)
    check_same(stream.key, "the streamed training data", world)
    reporter.notice(
        f"data.streaming=true: examples are shuffled within windows of {config.data.shuffle_window:,} and not over an "
        "epoch, only rows of one prompt that follow each other are merged, and nothing is held out of the training data"
    )

    def report(name: str, counts: dict[str, int] | None, notices: list[str]) -> None:
        for text in (*stream.encoder.renderer.notices, *notices):
            reporter.notice(text)
        if counts is not None:
            reporter.counts(name, "train", counts)

    sampler.report = report
    return datasets, sampler


def in_turns(read: Callable[[], list], world: World, wait_for_all: Callable[[], None]) -> list:
    """read() on one process of each node, which tokenises and writes the cache, and then on the others, which read it.

    Args:
        wait_for_all: a barrier that allows for hours.
    """
    found = []
    for turn in (True, False):
        if (world.local_rank == 0) == turn:
            found = read()
        wait_for_all()
    return found


def check_test_fraction(config: Settings, datasets: list, notice: Callable[[str], None]) -> None:
    """Refuse a share to hold out that no data set takes; report which ones do not."""
    fraction, usual = config.data.test_fraction, default("data.test_fraction")
    without = [f"{dataset.name}: {dataset.own_test_split}" for dataset in datasets if dataset.own_test_split]
    if fraction == usual or not without:
        return
    text = f"data.test_fraction={fraction:g} has no effect on {'; '.join(without)}."
    if len(without) == len(datasets) and not config.resume:
        raise ValueError(f"{text} Leave data.test_fraction={usual:g}, or give files without a test split.")
    notice(text)


def check_weights(config: Settings, datasets: list) -> None:
    """Refuse a weight so small that none of a data set's examples would be drawn, or too large to draw an epoch."""
    mixture = training_mixture(config, datasets)
    if sum(mixture.shares) > LARGEST_EPOCH:
        index = max(range(len(datasets)), key=mixture.shares.__getitem__)
        raise ValueError(
            f"data.weights: {mixture.weights[index]:g} times the {len(datasets[index].examples):,} examples of "
            f"{datasets[index].name} is too much: an epoch may have {LARGEST_EPOCH:,} examples. Weights are "
            "relative to a data set's own size: 2 draws each example twice"
        )
    epochs = mixture.epochs(config.n_epochs, config.n_examples)
    for index in mixture.never_drawn(epochs):
        name, count, weight = datasets[index].name, len(datasets[index].examples), mixture.weights[index]
        raise ValueError(
            f"data.weights: {weight:g} of the {count:,} examples of {name} is less than one in the run's {epochs} "
            f"epochs, so that none would be drawn. Give it {1 / count:.2g} or more, or leave {name} out of datasets."
        )


def check_text_options(config: Settings, datasets: list) -> None:
    """Refuse options of text prompts where no prompt is text."""
    for key, count in (("apply_template", "templated_prompts"), ("allow_control_tokens", "text_prompts")):
        if getattr(config.data, key) and not any(dataset.counts.get(count) for dataset in datasets):
            raise ValueError(
                f"data.{key}=true has no effect: every prompt in datasets={list(config.datasets)} is a conversation, "
                f"which the chat template lays out in any case. Leave data.{key}=false"
            )


def check_scores(config: Settings, datasets: dict[str, list]) -> None:
    """Refuse a loss of scores on responses without one, and options about scores where there are none."""
    inputs = find_loss(config.loss.name, config.loss.options).inputs
    for dataset in (found for of_split in datasets.values() for found in of_split):
        unknown = np.flatnonzero(np.isnan(dataset.scores))
        if inputs.needs_scores and len(unknown):
            first_responses = dataset.group_starts - np.arange(dataset.n_groups + 1)
            group = int(np.searchsorted(first_responses, unknown[0], "right")) - 1
            raise ValueError(
                f"loss={config.loss.name} reads the scores of responses; data set {dataset.name} has none for "
                f"{len(unknown):,} of {dataset.n_responses:,}, first in row {dataset.rows[group]}. Give columns "
                "score_chosen and score_rejected, margin, or responses and scores, or name yours with data.columns"
            )
    if (
        config.data.score
        and not config.data.streaming
        and not any(dataset.counts.get("rated_by_data_score") for dataset in datasets["train"])
    ):
        raise ValueError(
            f"data.score={config.data.score} has no effect: no data set in datasets={list(config.datasets)} has such a "
            "column beside prompt and response"
        )
    scored = any(not np.isnan(dataset.scores).all() for dataset in datasets["train"])
    for key in ("pairs", "min_score_gap"):
        if not scored and getattr(config.data, key) != default(f"data.{key}"):
            raise ValueError(
                f"data.{key}={getattr(config.data, key)} has no effect: no response in datasets="
                f"{list(config.datasets)} has a score. Leave data.{key}={default(f'data.{key}')}"
            )


def check_labels(kind: str, datasets: list) -> None:
    """Refuse single responses that are all good or all bad: there is nothing to tell apart."""
    if rows_of(kind) != "unpaired":
        return
    good = sum(int((dataset.examples[:, 1] >= 0).sum()) for dataset in datasets)
    every = sum(len(dataset.examples) for dataset in datasets)
    if good in (0, every):
        raise ValueError(
            f"all {every:,} labelled responses are {'good' if good else 'bad'}: this loss learns to tell good from bad "
            "ones. Give some of the other kind" + (", or choose loss=sft" if good else "")
        )


def evaluated_names(config: Settings, datasets: list) -> list[str]:
    """Short names of the held-out data sets of which an evaluation has examples."""
    held_out = DatasetMixture(datasets)
    drawn = held_out.epoch_permutation(EVALUATION_SEED, 0)[: config.n_eval_examples]
    return [datasets[index].short_name for index in held_out.datasets_of(drawn)]


def training_mixture(config: Settings, datasets: list) -> DatasetMixture:
    """The training data sets with their weights."""
    return DatasetMixture(datasets, mixture_weights(config))


@dataclass
class RunSteps:
    """The steps of a run.

    Attributes:
        training: of training; held_out: of an evaluation, None if there are no held-out examples.
        idle_batch: what a rank without work in a micro-batch computes, at weight zero, so that collectives match.
    """

    training: BatchSampler | StreamSampler
    held_out: BatchSampler | None
    idle_batch: MicroBatch


def make_steps(
    config: Settings,
    train: DatasetMixture | StreamSampler,
    held_out: DatasetMixture,
    tokenizer,
    kind: str,
    placement: Placement,
    kernel: str,
    share_prefix: bool,
    budget: int,
) -> RunSteps:
    """Steps of the run's data, laid out for an attention kernel.

    Args:
        train: the training data, or the steps of a stream of them, which get their layout here.
        kind: of the loss's examples; kernel: name of the attention kernel, which has a layout; share_prefix: whether a
            row holds a prompt once for all its responses; budget: tokens a pass.
    """
    layout = batch_layout(config, tokenizer, placement, kernel, share_prefix, budget)
    least: dict[str, Any] = {"min_micro_batches": config.gradient_accumulation_steps}
    training: BatchSampler | StreamSampler
    if isinstance(train, StreamSampler):
        training, train.layout = train, layout | least
    else:
        training = BatchSampler(
            train,
            config.batch_size,
            seed=config.seed,
            shuffle=config.shuffle,
            n_epochs=config.n_epochs,
            n_examples=config.n_examples,
            **layout,
            **least,
        )
    idle_batch = one_token_batch(tokenizer, kind, layout["make_batch"])
    return RunSteps(training, evaluation_steps(config, held_out, layout), idle_batch.to(placement.device))


def batch_layout(
    config: Settings, tokenizer, placement: Placement, kernel: str, share_prefix: bool, budget: int
) -> dict[str, Any]:
    """How a BatchSampler lays out micro-batches for an attention kernel on this rank; arguments as in `make_steps`."""
    if is_packed(kernel):
        make_batch = partial(pack, share_prefix=share_prefix, multiple=row_multiple(kernel))
    else:
        make_batch = partial(pad, pad_token_id=loading.padding_id(tokenizer))
    return {
        "make_batch": make_batch,
        "rank": placement.data_rank,
        "n_ranks": placement.data_ranks,
        "share_prefix": share_prefix,
        "budget": budget,
    }


def evaluation_steps(config: Settings, held_out: DatasetMixture, layout: dict[str, Any]) -> BatchSampler | None:
    """Steps over held-out examples; None if there are none.

    One seed for all runs: n_eval_examples takes the same rows whatever the run's seed, so that runs compare.
    """
    if not held_out.epoch_size():
        return None
    return BatchSampler(
        held_out,
        config.eval_batch_size,
        seed=EVALUATION_SEED,
        shuffle="pairs",
        n_epochs=1,
        n_examples=config.n_eval_examples,
        **layout,
    )


def one_token_batch(tokenizer, kind: str, make_batch: Callable[[list[PromptUnit]], MicroBatch | None]) -> MicroBatch:
    """What a rank without work computes, so that collectives match."""
    token = np.array([tokenizer.eos_token_id], dtype=np.int32)
    batch = make_batch([PromptUnit(0, 0, token, [token], [0], [ONE_RESPONSE[kind]])])
    assert batch is not None
    return batch
