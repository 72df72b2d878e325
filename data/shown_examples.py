"""Rows as they will be trained, for a person to look at: the tokens of the prompt, those that are scored, and those
that were cut, as readable pieces of text."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from data.examples import examples_of_kind, own_examples
from data.options import DataOptions
from data.row_formats import PromptGroup
from data.sources import open_source
from data.text_encoding import TextEncoder
from data.tokenization import limits_of, rendered_group
from data.truncation import Limits, TokenGroup, fit_group

UNLIMITED = 2**31
CONTEXT = 4  # tokens before a piece that its text may depend on (blanks between words)
LONGEST_PIECE = 8  # tokens that one character may take


@dataclass(frozen=True)
class Piece:
    """The fewest tokens that make readable text: one, or several that make a character together.

    part: "prompt" (read only, as others' turns within a response are), "scored" (a token of a response, whose log-prob
    counts) or "cut" (left out by max_length).
    control: an end of text, a chat marker or another token that no text can spell.
    """

    text: str
    ids: tuple[int, ...]
    part: str
    control: bool = False


@dataclass(frozen=True)
class ShownText:
    """The prompt or a response of an example. tokens: of the prompt, or scored of a response; cut: left out; ended: it
    closes with a control token."""

    label: str
    pieces: list[Piece]
    tokens: int
    cut: int
    ended: bool


@dataclass(frozen=True)
class ShownExample:
    """An example of a data set: its prompt first, then its responses. row: number of the source row. weight: of its
    loss. dropped: what its row lost on the way, by reason; without texts nothing is left of it."""

    dataset: str
    row: int
    texts: list[ShownText] = field(default_factory=list)
    weight: float = 1.0
    dropped: dict[str, int] = field(default_factory=dict)


def first_examples(name: str, tokenizer, config: DataOptions, kind: str, n: int) -> list[ShownExample]:
    """The first `n` training examples of a data set, in the order of its rows.

    kind: of the examples, see examples.py.
    Raises ValueError for a row that cannot be read.
    """
    source = open_source(name, "train", config, kind)
    encoder = TextEncoder.of_options(tokenizer, config.data)
    limits = limits_of(source, config)
    shown: list[ShownExample] = []
    for group in source.groups():
        shown += _of_group(group, name, source, encoder, limits, kind)
        if len(shown) >= n:
            break
    return shown[:n]


def _of_group(group: PromptGroup, name: str, source, encoder: TextEncoder, limits: Limits, kind: str):
    dropped: Counter = Counter(group.dropped)
    prepared = rendered_group(group, encoder, kind, source, dropped)
    fitted = whole = None
    if prepared is not None:
        _, rendered, pairs, scores = prepared
        (ids,) = encoder.encode_groups([rendered])
        counts: Counter = Counter()
        fitted = fit_group(group, rendered, pairs, scores, ids, encoder, limits, counts)
        whole = fit_group(
            group,
            rendered,
            pairs,
            scores,
            ids,
            encoder,
            replace(limits, max_length=UNLIMITED, max_prompt_length=UNLIMITED),
            Counter(),
        )
        dropped += Counter({reason: count for reason, count in counts.items() if reason.startswith("dropped")})
    if fitted is None or whole is None:
        return [ShownExample(name, group.row, dropped=dict(dropped))]
    own = own_examples(len(fitted.responses), fitted.pairs)
    rows = np.array([(0, *example) for example in own], dtype=np.int32)
    found, example, row = examples_of_kind(rows, kind)
    weights = np.bincount(example, np.array(fitted.weights)[row]) / np.bincount(example)
    prompt = _prompt(whole.prompt, fitted.prompt, encoder)
    return [
        ShownExample(
            name,
            group.row,
            [prompt, *(_response(fitted, whole, *each, encoder) for each in _labelled(example, kind, fitted))],
            weight,
            dict(dropped),
        )
        for example, weight in zip(found[:, 1:].tolist(), weights.tolist())
    ]


def _labelled(example: list[int], kind: str, group: TokenGroup) -> list[tuple[int, str]]:
    """(number, label) of the responses of an example."""
    first, second = example
    if kind == "group":
        return [(number, f"response {number + 1}") for number in range(len(group.responses))]
    if kind == "responses":
        return [(first, "target")]
    names = ("chosen", "rejected") if kind == "pairs" else ("good", "bad")
    return [(number, name) for number, name in zip((first, second), names) if number >= 0]


def _response(group: TokenGroup, whole: TokenGroup, number: int, label: str, encoder: TextEncoder) -> ShownText:
    kept = group.responses[number]
    full = kept
    if group.truncated[number]:
        full = next(text for text in whole.responses if len(text) > len(kept) and text[: len(kept)] == kept)
    score = group.scores[number]
    label += "" if math.isnan(score) else f" (score {score:g})"
    spans = group.unscored[number] if group.unscored else []
    pieces, start = [], 0
    for first, last in spans:
        pieces += pieces_of(full, start, first, "scored", encoder) + pieces_of(full, first, last, "prompt", encoder)
        start = last
    pieces += pieces_of(full, start, len(kept), "scored", encoder) + pieces_of(
        full, len(kept), len(full), "cut", encoder
    )
    scored = len(kept) - sum(last - first for first, last in spans)
    return ShownText(label, pieces, scored, len(full) - len(kept), encoder.ends(kept))


def _kept_prompt(full: list[int], kept: list[int]) -> tuple[int, int]:
    """Where the tokens that were cut out of a prompt start and end; what stays is a start and an end of it."""
    tail = 0
    while tail < len(kept) and full[-1 - tail] == kept[-1 - tail]:
        tail += 1
    start = len(kept) - tail
    return start, start + len(full) - len(kept)


def _prompt(ids: list[int], kept: list[int], encoder: TextEncoder) -> ShownText:
    start, stop = _kept_prompt(ids, kept)
    pieces = [
        *pieces_of(ids, 0, start, "prompt", encoder),
        *pieces_of(ids, start, stop, "cut", encoder),
        *pieces_of(ids, stop, len(ids), "prompt", encoder),
    ]
    return ShownText("prompt", pieces, len(ids) - (stop - start), stop - start, False)


def pieces_of(ids: list[int], start: int, stop: int, part: str, encoder: TextEncoder) -> list[Piece]:
    """Readable pieces of the tokens from `start` to `stop`; what stands before them decides about blanks."""
    control = set(encoder.control.values())
    pieces, first = [], start
    for index in range(start, stop):
        if ids[index] in control:
            name = encoder.tokenizer.convert_ids_to_tokens(ids[index])
            if first < index:
                pieces.append(Piece(_decoded(ids, first, index, encoder), tuple(ids[first:index]), part))
            pieces.append(Piece(name, (ids[index],), part, control=True))
            first = index + 1
            continue
        text = _decoded(ids, first, index + 1, encoder)
        if text.endswith("\ufffd") and index + 1 < stop and index + 1 - first < LONGEST_PIECE:
            continue  # the first bytes of a character
        pieces.append(Piece(text, tuple(ids[first : index + 1]), part))
        first = index + 1
    if first < stop:
        pieces.append(Piece(_decoded(ids, first, stop, encoder), tuple(ids[first:stop]), part))
    return pieces


def _decoded(ids: list[int], start: int, stop: int, encoder: TextEncoder) -> str:
    before = ids[max(0, start - CONTEXT) : start]

    def decode(tokens: list[int]) -> str:
        return encoder.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return decode(before + ids[start:stop])[len(decode(before)) :]
