"""Cuts the token ids of a prompt group to the lengths that the settings allow (the rules stand in tokenization.py)."""

from collections import Counter
from dataclasses import dataclass, field

from data.conversations import RenderedGroup
from data.row_formats import PromptGroup
from data.text_encoding import TextEncoder, common_length


@dataclass(frozen=True)
class Limits:
    """How much of a group stays. Lengths in tokens."""

    max_length: int
    max_prompt_length: int
    truncation: str = "keep_end"
    on_overlong: str = "truncate"


@dataclass
class TokenGroup:
    """A tokenised prompt group; every response occurs in a pair (SFT: each is an example, and there is no pair).

    pairs: as in PromptGroup, with -1 for no response. scores: of the responses, NaN unknown. weights: of the examples.
    unscored: of each response, (start, stop) of its tokens that are not scored; empty where all are.
    """

    prompt: list[int]
    responses: list[list[int]]
    pairs: list[tuple[int, int]]
    truncated: list[bool]
    row: int
    scores: list[float]
    weights: list[float]
    unscored: list[list[tuple[int, int]]] = field(default_factory=list)


def fit_group(
    group: PromptGroup,
    rendered: RenderedGroup,
    pairs,
    scores: list[float],
    ids,
    encoder: TextEncoder,
    limits: Limits,
    counts: Counter,
) -> TokenGroup | None:
    """Splits, ends and cuts one group's tokens; None when nothing of it is left.

    ids: of the rendered prompt and of each of the full texts. pairs: into the full texts, whose scores are `scores`.
    Fills counts.
    Raises ValueError for a group that is too long, with on_overlong=error.
    """
    prompt_ids, *fulls = ids
    length = min(common_length(prompt_ids, full) for full in fulls)
    if length < len(prompt_ids):
        counts["merged_boundaries"] += 1
    ended = [encoder.ends(full) if rendered.terminated is None else rendered.terminated for full in fulls]
    responses = [full[length:] + ([] if end else [encoder.eos_id]) for full, end in zip(fulls, ended)]
    prefix = [] if rendered.from_template else encoder.prefix
    if prompt_ids[: len(prefix)] == prefix:  # the text has its own
        prefix = []
    prompt = prefix + prompt_ids[:length]
    if not prompt:
        # The first response token needs something before it: what the model takes for the start of a text.
        bos = encoder.tokenizer.bos_token_id
        prompt = prefix = [encoder.eos_id if bos is None else int(bos)]
        counts["empty_prompts"] += 1
    alive = [bool(response) for response in responses]  # what is no more than the prompt's own opening is empty
    truncated = [False] * len(responses)
    longest = max(map(len, responses))
    if len(prompt) + longest > limits.max_length:
        if limits.on_overlong == "error":
            raise ValueError(
                f"row {group.row}: prompt of {len(prompt)} + response of {longest} tokens exceed "
                f"max_length={limits.max_length}; raise it, or set data.on_overlong to truncate or drop"
            )
        if limits.on_overlong == "drop":
            alive = [bool(response) and len(prompt) + len(response) <= limits.max_length for response in responses]
        else:
            if len(prompt) > limits.max_prompt_length:
                header = max(encoder.header_tokens(rendered, prompt_ids) - (len(prompt_ids) - length), 0)
                prompt = cut_prompt(prompt, limits, _kept_start(prompt, prefix, encoder), header)
                counts["prompts_cut"] += 1
            room = max(limits.max_length - len(prompt), 0)
            truncated = [len(response) > room for response in responses]
            responses = [response[:room] for response in responses]
            alive = [bool(response) for response in responses]
            counts["responses_cut"] += sum(cut and left for cut, left in zip(truncated, alive))
    reason = "dropped_overlong" if limits.on_overlong == "drop" else "dropped_no_room"
    if pairs:
        weighted = list(zip(pairs, group.pair_weights, strict=True))
        kept = [each for each in weighted if all(alive[index] for index in each[0] if index >= 0)]
        counts[reason] += len(pairs) - len(kept)
        differing = [(pair, weight) for pair, weight in kept if -1 in pair or responses[pair[0]] != responses[pair[1]]]
        counts["dropped_identical_tokens"] += len(kept) - len(differing)
        used = sorted({index for pair, _ in differing for index in pair if index >= 0})
        renumbered = {index: number for number, index in enumerate(used)} | {-1: -1}
        pairs = [(renumbered[first], renumbered[second]) for (first, second), _ in differing]
        weights = [weight for _, weight in differing]
    else:
        used = [index for index, living in enumerate(alive) if living]
        counts[reason] += len(alive) - len(used)
        weights = [1.0] * len(used)
    if not used:
        return None
    spans = [
        [(a - length, min(b - length, len(text))) for a, b in of if a - length < len(text)]
        for of, text in zip(encoder.unscored_tokens(rendered, fulls), responses)
    ]
    return TokenGroup(
        prompt,
        [responses[index] for index in used],
        pairs,
        [truncated[index] for index in used],
        group.row,
        [scores[index] for index in used],
        weights,
        [spans[index] for index in used] if spans else [],
    )


def _kept_start(prompt: list[int], prefix: list[int], encoder: TextEncoder) -> int:
    """How many tokens at the prompt's start are no text: the BOS, added by the tokenizer or by the template."""
    if prefix:
        return len(prefix)
    bos = encoder.tokenizer.bos_token_id
    # Some templates use the BOS as a turn's mark; one that occurs again is such a mark.
    return int(prompt[0] == bos and (encoder.prefix == [bos] or prompt.count(bos) == 1))


def cut_prompt(prompt: list[int], limits: Limits, start: int, header: int) -> list[int]:
    """Cuts a prompt to max_prompt_length; its first `start` and last `header` tokens stay in any case."""
    room = max(limits.max_prompt_length - start, header)
    if limits.truncation == "keep_end":
        return prompt[:start] + (prompt[len(prompt) - room :] if room else [])
    body, tail = prompt[start : len(prompt) - header], prompt[len(prompt) - header :]
    return prompt[:start] + body[: room - header] + tail
