"""Rows that rate responses: scores or ranks -> a PromptGroup whose pairs follow from them.

Several rows of one prompt may each bring a response, so pairs are made when all rows are read: `rank_pairs`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from data.files import describe
from data.row_formats import ASSISTANT, EMPTY, NO_PREFERENCE, SMALL_GAP, PromptGroup, header_of, prompt_of, with_input
from data.row_values import column, in_float32, is_empty, list_of, score_of, text_of

# Where UltraFeedback's completions have their score, the first that there is.
SCORE_FIELDS = ("overall_score", "score", "fine-grained_score", "rating", "reward")
TEXT_FIELDS = ("response", "completion", "text")  # of an object that is a completion


@dataclass(frozen=True)
class PairRule:
    """Which pairs a ranking gives: `data.pairs` and `data.min_score_gap`."""

    how: str = "all"
    min_gap: float = 0.0

    @property
    def is_default(self) -> bool:
        return self == PairRule()


def rank_pairs(group: PromptGroup, rule: PairRule) -> None:
    """Give a group with scores the pairs that follow from them; those left out are counted in its `dropped`."""
    scored = [(group.scores[text], index) for index, text in enumerate(group.responses) if text in group.scores]
    ordered = [index for _, index in sorted(scored, key=lambda each: (-each[0], each[1]))]
    score = {index: value for value, index in scored}
    pairs = []
    for better, worse in itertools.combinations(ordered, 2):
        gap = score[better] - score[worse]
        # Scores are kept in float32: what is equal there is level.
        level = in_float32(score[better]) == in_float32(score[worse])
        reason = NO_PREFERENCE if level else SMALL_GAP if gap < rule.min_gap else None
        if reason:
            group.dropped[reason] = group.dropped.get(reason, 0) + 1
        else:
            pairs.append((better, worse))
    if rule.how == "best_worst":
        pairs = [pair for pair in pairs if pair == (ordered[0], ordered[-1])]
    elif rule.how == "adjacent":
        # Of each response the next worse one: where responses are level, the first of the level below.
        pairs = [next(each for each in pairs if each[0] == first) for first in dict.fromkeys(p[0] for p in pairs)]
    elif rule.how == "random" and pairs:
        drawn = hashlib.blake2b(group.key().encode("utf-8", "surrogatepass"), digest_size=8).digest()
        pairs = [pairs[int.from_bytes(drawn, "big") % len(pairs)]]
    group.pairs = pairs


def drop_small_gaps(group: PromptGroup, rule: PairRule) -> None:
    """Leave out those of a group's own pairs whose scores differ by less than asked for, or the other way round."""
    if not rule.min_gap or not group.scores:
        return
    kept = []
    for pair, weight in zip(group.pairs, group.pair_weights, strict=True):
        rated = [group.responses[index] for index in pair if index >= 0 and group.responses[index] in group.scores]
        if len(rated) == 2 and group.scores[rated[0]] - group.scores[rated[1]] < rule.min_gap:
            group.dropped[SMALL_GAP] = group.dropped.get(SMALL_GAP, 0) + 1
        else:
            kept.append((pair, weight))
    group.pairs = [pair for pair, _ in kept]
    group.weights = [weight for _, weight in kept] if group.weights else []


def ranked_group(prompt, rated: list[tuple[str, float]]) -> PromptGroup | str:
    """The group of a prompt's rated responses; of equal texts the best rating counts."""
    scores: dict[str, float] = {}
    for text, score in rated:
        if text.strip():
            scores[text] = max(score, scores.get(text, -math.inf))
    if not scores:
        return EMPTY
    best = max(scores, key=scores.__getitem__)
    return PromptGroup(
        prompt, list(scores), [], [best], header=header_of(prompt), sft_score=scores[best], scores=scores, ranked=True
    )


def parse_scored(row: dict) -> PromptGroup | str:
    """{prompt, responses, scores}: a list of texts and a list of as many numbers."""
    responses, scores = (list_of(column(row, name), name) for name in ("responses", "scores"))
    if len(responses) != len(scores):
        raise ValueError(f"there are {len(responses)} responses but {len(scores)} scores")
    rated = [
        (text_of(text, f"responses[{number}]"), score_of(score, f"scores[{number}]"))
        for number, (text, score) in enumerate(zip(responses, scores))
    ]
    return ranked_group(prompt_of(column(row, "prompt")), rated)


def parse_ultrafeedback(row: dict) -> PromptGroup | str:
    """UltraFeedback's {instruction, completions: [{response, overall_score, ...}]}."""
    rated = []
    for where, each in _objects(row, "completions", "a response and a score"):
        field = next((name for name in SCORE_FIELDS if each.get(name) is not None), None)
        if field is None:
            raise ValueError(f"{where} has no score; read are {', '.join(SCORE_FIELDS)}")
        text = text_of(column(each, "response"), f"{where}.response")
        rated.append((text, score_of(each[field], f"{where}.{field}")))
    prompt = with_input(column(row, "instruction"), row.get("input"))
    return ranked_group([{"role": "user", "content": prompt}], rated)


def parse_completions(row: dict) -> PromptGroup | str:
    """{prompt, completions}: texts beside as many numbers in a column scores or ranks, or objects with both."""
    values = list_of(column(row, "completions"), "completions")
    beside = next((name for name in ("scores", "ranks") if not is_empty(row.get(name))), None)
    if beside is not None:
        numbers = list_of(row[beside], beside)
        if len(values) != len(numbers):
            raise ValueError(f"there are {len(values)} completions but {len(numbers)} {beside}")
        sign = -1 if beside == "ranks" else 1
        rated = [
            (text_of(text, f"completions[{place}]"), sign * score_of(number, f"{beside}[{place}]"))
            for place, (text, number) in enumerate(zip(values, numbers))
        ]
    elif any(isinstance(value, str) for value in values):
        raise ValueError(
            "completions are texts that nothing rates: give a column scores or ranks with a number for each; for "
            "loss=sft, a row of prompt and completion for each"
        )
    else:
        rated = [_rated_object(where, each) for where, each in _objects(row, "completions", "a text and a score")]
    return ranked_group(prompt_of(column(row, "prompt")), rated)


def _rated_object(where: str, each: dict) -> tuple[str, float]:
    """The text and the score of an object; of a rank, with the sign turned."""
    text = next((name for name in TEXT_FIELDS if name in each), None)
    field = next((name for name in (*SCORE_FIELDS, "rank") if each.get(name) is not None), None)
    if text is None:
        raise ValueError(f"{where} has no text; read are {', '.join(TEXT_FIELDS)}")
    if field is None:
        raise ValueError(f"{where} has no score; read are {', '.join(SCORE_FIELDS)}, rank")
    score = score_of(each[field], f"{where}.{field}")
    return text_of(each[text], f"{where}.{text}"), -score if field == "rank" else score


def parse_nectar(row: dict) -> PromptGroup | str:
    """Nectar's {prompt, answers: [{answer, rank}]}; rank 1 is the best, and scores are ranks with the sign turned."""
    rated = []
    for where, each in _objects(row, "answers", "answer and rank"):
        rank = score_of(column(each, "rank"), f"{where}.rank")
        rated.append((text_of(column(each, "answer"), f"{where}.answer"), -rank))
    prompt = prompt_of(column(row, "prompt"))
    if isinstance(prompt, str) and prompt.rstrip(" ").endswith(ASSISTANT):
        # Its prompts end with a blank, which belongs to the answer: as tokens it would be another one.
        prompt = prompt.rstrip(" ")
        rated = [(f" {text.lstrip(' ')}" if text.strip() else text, score) for text, score in rated]
    return ranked_group(prompt, rated)


def _objects(row: dict, name: str, what: str) -> Iterator[tuple[str, dict]]:
    """(where it is, for messages; the object) of each entry of a column that is a list of objects with `what`."""
    for number, each in enumerate(list_of(column(row, name), name)):
        where = f"{name}[{number}]"
        if not isinstance(each, dict):
            raise ValueError(f"{where} must be an object with {what}, not {describe(each)}")
        yield where, each


def parse_rated_response(attribute: str, row: dict) -> PromptGroup | str:
    """{prompt, response} and a number in the column `attribute`, as HelpSteer has: one response a row."""
    rated = [(text_of(column(row, "response"), "response"), score_of(column(row, attribute), attribute))]
    return ranked_group(prompt_of(column(row, "prompt")), rated)
