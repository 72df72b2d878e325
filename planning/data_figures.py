"""Examples, steps and tokens of a run, from the tokenised data or an estimate from its first prompts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from data.examples import examples_of_kind, own_examples
from data.options import mixture_weights
from losses import find_loss
from planning.batch_shape import BatchShape
from settings import Settings

# Prompts that are tokenised to estimate the length of the rest, and seconds that counting them may take.
SAMPLE, PATIENCE = 512, 20.0


class _NotCached(Exception):
    pass


@contextmanager
def _refuse(*_):
    raise _NotCached
    yield


@dataclass
class DataFigures:
    """examples, tokens: of one epoch (tokens: what passes over it compute, prompts shared within a step).
    unit: the prompt and responses of a long unit; source: how these were found."""

    examples: int
    tokens: int
    unit: BatchShape
    source: str


def data_figures(config: Settings, tokenizer) -> DataFigures:
    """Size of the training data: exact if it is tokenised already, else estimated from its first prompts.

    Raises:
        ValueError, OSError: the data is not at hand.
    """
    from data.tokenization import load_tokenized

    if config.data.streaming:
        raise ValueError("data.streaming=true reads them only while the run trains")
    kind = find_loss(config.loss.name, config.loss.options).inputs.kind
    try:
        # Tokenising starts by asking for a progress bar; without one coming, only what is cached is read.
        datasets = [
            load_tokenized(name, "train", tokenizer, config, kind, progress=_refuse) for name in config.datasets
        ]
    except _NotCached:
        return _sampled_figures(config, tokenizer, kind)
    return _cached_figures(config, datasets)


def _long_unit(units: list[tuple[int, tuple[int, ...]]], share: bool) -> BatchShape:
    """A unit that is typical of a full micro-batch: the middle of the longest tenth."""
    ordered = sorted(
        (BatchShape(prompt, responses, 1, share) for prompt, responses in units), key=lambda shape: shape.unit_tokens
    )
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _cached_figures(config: Settings, datasets) -> DataFigures:
    from data.sampler import BatchSampler, DatasetMixture

    mixture = DatasetMixture(datasets, mixture_weights(config))
    sampler = BatchSampler(
        mixture,
        config.batch_size,
        seed=config.seed,
        shuffle=config.shuffle,
        make_batch=None,
        n_epochs=1,
        share_prefix=config.prefix_sharing,
    )
    tokens = 0
    seen: list[tuple[int, tuple[int, ...]]] = []
    for step in range(sampler.n_steps):
        units = mixture.units(sampler.example_indices(step))
        tokens += sum(unit.cost(config.prefix_sharing) for unit in units)
        if len(seen) < 20_000:
            seen += [(len(unit.prompt), tuple(map(len, unit.responses))) for unit in units]
    return DataFigures(
        sampler.n_examples, tokens, _long_unit(seen, config.prefix_sharing), "exact, from the tokenised data"
    )


def _responses_of_examples(n_responses: int, pairs: list[tuple[int, int]], kind: str) -> list[list[int]]:
    """The responses of a prompt that each of its examples needs."""
    rows = np.array([(0, *example) for example in own_examples(n_responses, pairs)], dtype=np.int32)
    every = sorted({response for pair in pairs for response in pair if response >= 0})
    found = [[number for number in row[1:] if number >= 0] or every for row in examples_of_kind(rows, kind)[0].tolist()]
    # Another prompt's response comes beside; the own one is as long on average.
    return [numbers + numbers[:1] for numbers in found] if kind == "unpaired_mismatched" else found


def _first_groups(read, counts):
    return itertools.islice(read(counts), SAMPLE)


def _sampled_figures(config: Settings, tokenizer, kind: str) -> DataFigures:
    from data.sources import open_source
    from data.text_encoding import TextEncoder
    from data.tokenization import tokenized_chunks
    from data.truncation import Limits

    encoder = TextEncoder.of_options(tokenizer, config.data)
    examples = tokens = 0.0
    seen, sources = [], []
    for name, weight in zip(config.datasets, mixture_weights(config), strict=True):
        source = open_source(name, "train", config, kind)
        limits = Limits(config.max_length, config.max_prompt_length, source.truncation, config.data.on_overlong)
        sample = dataclasses.replace(source, reader=functools.partial(_first_groups, source.reader), counts=Counter())
        n_examples = sample_tokens = 0
        for group in itertools.chain.from_iterable(tokenized_chunks(sample, encoder, limits, kind, Counter())):
            for numbers in _responses_of_examples(len(group.responses), group.pairs, kind):
                # Examples of a prompt meet in a step by chance only, unless asked for; each is taken to come alone.
                lengths = len(group.prompt), tuple(len(group.responses[i]) for i in numbers)
                sample_tokens += BatchShape(*lengths, 1, config.prefix_sharing).unit_tokens
                seen.append(lengths)
                n_examples += 1
        groups, until, complete = 0, time.monotonic() + PATIENCE, True
        for _ in source.groups():
            groups += 1
            if time.monotonic() > until:
                complete = False
                break
        factor = groups / max(1, min(groups, SAMPLE)) * weight
        examples += n_examples * factor
        tokens += sample_tokens * factor
        least = "" if complete else "at least "
        sources.append(f"{name}: {least}{groups} prompts, {min(groups, SAMPLE)} of them tokenised")
    if not seen:
        raise ValueError(f"datasets={list(config.datasets)} hold no usable training example")
    return DataFigures(
        round(examples), round(tokens), _long_unit(seen, config.prefix_sharing), f"estimated ({'; '.join(sources)})"
    )


def whole_run(config: Settings, figures: DataFigures) -> tuple[int, int, int]:
    """(examples, optimizer steps, tokens) from the first to the last step."""
    in_epochs = None if config.n_epochs is None else config.n_epochs * figures.examples
    examples = min(n for n in (in_epochs, config.n_examples) if n is not None)
    epochs, rest = divmod(examples, max(1, figures.examples))
    steps = epochs * -(-figures.examples // config.batch_size) + -(-rest // config.batch_size)
    return examples, steps, round(figures.tokens * examples / max(1, figures.examples))
