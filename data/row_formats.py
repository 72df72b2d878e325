"""One row of any supported format -> one PromptGroup (text), or the reason why the row is left out.

Every parser has the form `parse(row) -> PromptGroup | str`: a string is the reason under which a dropped row is
counted. A row that is malformed, rather than merely unusable, raises ValueError; the caller adds file and line.
"""

import json
import math
from dataclasses import dataclass, field

from data.files import describe

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"

# Why a row, a response or a pair is left out: the keys of the counts that every data set comes with.
EMPTY, IDENTICAL, DIVERGED, NO_PREFERENCE = "dropped_empty", "dropped_identical", "dropped_diverged", "dropped_tied"


@dataclass
class PromptGroup:
    """A prompt and its responses, as text.

    prompt: text, or a conversation as a list of {"role", "content"} that the tokenizer's chat template will render.
    pairs: (chosen, rejected) indices into responses. sft_target: the response that SFT learns, or None.
    row: number of the (first) source row, for messages. header: text at the end of a text prompt that opens the
    assistant's turn, which truncation keeps. sft_score: decides which sft_target stays when rows merge; None is lowest.
    """

    prompt: str | list
    responses: list[str] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    sft_target: str | None = None
    row: int = 0
    header: str = ""
    sft_score: float | None = None
    dropped: dict[str, int] = field(default_factory=dict)

    def key(self):
        """What makes two prompts the same."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, ensure_ascii=False)

    def merge(self, other: "PromptGroup"):
        """Takes over the responses and pairs of another group of the same prompt; equal texts become one response.

        The SFT target stays the first one, unless the other's score is higher.
        """
        known = {text: index for index, text in enumerate(self.responses)}
        renumbered = []
        for text in other.responses:
            if text not in known:
                known[text] = len(self.responses)
                self.responses.append(text)
            renumbered.append(known[text])
        self.pairs += [(renumbered[chosen], renumbered[rejected]) for chosen, rejected in other.pairs]
        better = other.sft_score is not None and (self.sft_score is None or other.sft_score > self.sft_score)
        if other.sft_target is not None and (self.sft_target is None or better):
            self.sft_target, self.sft_score = other.sft_target, other.sft_score
        for reason, number in other.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + number


def pair_group(prompt, chosen: str, rejected: str) -> PromptGroup | str:
    """The group of a single pair, or why there is none."""
    if not chosen.strip() or not rejected.strip():
        return EMPTY
    if chosen == rejected:
        return IDENTICAL
    return PromptGroup(prompt, [chosen, rejected], [(0, 1)], chosen, header=header_of(prompt))


def header_of(prompt) -> str:
    return ASSISTANT if isinstance(prompt, str) and prompt.endswith(ASSISTANT) else ""


# ---- values ------------------------------------------------------------------------------------------------------


def text_of(value, what: str) -> str:
    """`value` as text that can be encoded, else ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be text, not {describe(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has a lone surrogate ({ascii(value[error.start])} at character {error.start}), which "
            f"is not text; repair the file's encoding"
        ) from None
    return value


def column(row: dict, name: str):
    if name not in row:
        raise ValueError(f"column '{name}' is missing; the row has {sorted(map(str, row))}")
    return row[name]


def number_of(value, what: str) -> float:
    if isinstance(value, str):  # csv has no numbers
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{what} must be a number, not {describe(value)}") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{what} must be a number, not {describe(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, not {value}")
    return value


def list_of(value, what: str) -> list:
    if isinstance(value, str):  # csv cells hold lists as JSON
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            pass
    if isinstance(value, dict) and value and all(isinstance(each, list) for each in value.values()):
        # A column of structs as some versions of `datasets` serve it: a struct of lists.
        if len({len(each) for each in value.values()}) != 1:
            raise ValueError(f"{what}: its lists differ in length")
        value = [dict(zip(value, entry)) for entry in zip(*value.values())]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} must be a list, not {describe(value)}")
    return list(value)


def messages_of(value, what: str) -> list[dict]:
    """A checked conversation: [{"role", "content"}, ...] with nothing else in it."""
    messages = []
    for number, message in enumerate(list_of(value, what)):
        where = f"{what}[{number}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} must be a message with role and content, not {describe(message)}")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        role = text_of(role, f"{where}: role")
        role = {"human": "user", "gpt": "assistant"}.get(role, role)
        if message.get("tool_calls"):
            raise ValueError(f"{where} calls tools, which is not supported: render the call into its content")
        if isinstance(content, list):
            parts = [
                part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
            ]
            if any(part is None for part in parts):
                raise ValueError(f"{where}: content has parts other than text, which is not supported")
            content = "".join(text_of(part, f"{where}: content") for part in parts)
        messages.append({"role": role, "content": text_of(content, f"{where}: content")})
    if not messages:
        raise ValueError(f"{what} is an empty conversation")
    return messages


def is_conversation(value) -> bool:
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    if isinstance(value, dict):
        return {"role", "content"} <= set(value)
    return isinstance(value, (list, tuple)) and (not value or isinstance(value[0], dict))


# ---- named sources -----------------------------------------------------------------------------------------------


def parse_hh(row: dict) -> PromptGroup | str:
    """Anthropic HH: two whole dialogues, which must be the same up to the last assistant turn of the chosen one."""
    chosen = text_of(column(row, "chosen"), "chosen")
    rejected = text_of(column(row, "rejected"), "rejected")
    return split_dialogues(chosen, rejected)


def split_dialogues(chosen: str, rejected: str) -> PromptGroup | str:
    for name, dialogue in (("chosen", chosen), ("rejected", rejected)):
        if ASSISTANT not in dialogue:
            raise ValueError(
                f"{name} has no {ASSISTANT!r} turn, so where its prompt ends cannot be known; give the "
                f"prompt in a column of its own (prompt, chosen, rejected)"
            )
    prompt = chosen[: chosen.rfind(ASSISTANT) + len(ASSISTANT)]
    if not rejected.startswith(prompt) or HUMAN in rejected[len(prompt) :] or HUMAN in chosen[len(prompt) :]:
        return DIVERGED
    return pair_group(prompt, chosen[len(prompt) :], rejected[len(prompt) :])


def parse_shp(row: dict) -> PromptGroup | str:
    """Stanford Human Preferences: pairs whose scores differ by a factor of 2 or more, as its authors advise."""
    prompt = f"{HUMAN} {text_of(column(row, 'history'), 'history')}{ASSISTANT}"
    responses = [" " + text_of(column(row, name), name) for name in ("human_ref_A", "human_ref_B")]
    scores = [number_of(column(row, name), name) for name in ("score_A", "score_B")]
    label = number_of(column(row, "labels"), "labels")
    if label not in (0, 1):
        raise ValueError(f"labels must be 0 or 1, not {label}")
    low, high = sorted(scores)
    # Against a score of zero (or less) any positive one is infinitely better; without a positive one there is no ratio.
    if high <= 0 or high < 2 * low:
        return NO_PREFERENCE
    chosen, rejected = (0, 1) if label == 1 else (1, 0)
    group = pair_group(prompt, responses[chosen], responses[rejected])
    if isinstance(group, PromptGroup):
        best = 0 if scores[0] >= scores[1] else 1
        group.sft_target, group.sft_score = responses[best], scores[best]
    return group


def parse_se(row: dict) -> PromptGroup | str:
    """StackExchange preferences: every two answers of different pm_score make a pair; HTML becomes text."""
    from data.html_text import html_to_text

    question = html_to_text(text_of(column(row, "question"), "question")).strip()
    prompt = f"{HUMAN} {question}{ASSISTANT}"
    scores: dict[str, float] = {}
    group = PromptGroup(prompt, header=ASSISTANT)
    for number, answer in enumerate(list_of(column(row, "answers"), "answers")):
        if not isinstance(answer, dict):
            raise ValueError(f"answers[{number}] must be an object, not {describe(answer)}")
        text = " " + html_to_text(text_of(column(answer, "text"), f"answers[{number}].text")).strip()
        score = number_of(column(answer, "pm_score"), f"answers[{number}].pm_score")
        if not text.strip():
            group.dropped[EMPTY] = group.dropped.get(EMPTY, 0) + 1
        elif text in scores:  # the same words twice are one response, worth its best score
            scores[text] = max(score, scores[text])
            group.dropped[IDENTICAL] = group.dropped.get(IDENTICAL, 0) + 1
        else:
            scores[text] = score
    if not scores:
        return EMPTY
    group.responses = list(scores)
    values = list(scores.values())
    for first in range(len(values)):
        for second in range(first + 1, len(values)):
            if values[first] != values[second]:
                group.pairs.append((first, second) if values[first] > values[second] else (second, first))
            else:
                group.dropped[NO_PREFERENCE] = group.dropped.get(NO_PREFERENCE, 0) + 1
    group.sft_target = max(scores, key=scores.__getitem__)
    group.sft_score = max(values)
    return group


# ---- formats recognised by their columns ---------------------------------------------------------------------------


def parse_preferences(row: dict) -> PromptGroup | str:
    """{prompt, chosen, rejected}, each text or a conversation."""
    return _preferences(column(row, "prompt"), row)


def parse_implicit(row: dict) -> PromptGroup | str:
    """{chosen, rejected} that begin with their prompt: whole dialogues in the layout of HH, or whole conversations."""
    return _preferences(None, row)


def _preferences(prompt, row: dict) -> PromptGroup | str:
    chosen, rejected = column(row, "chosen"), column(row, "rejected")
    conversations = is_conversation(chosen), is_conversation(rejected)
    if conversations == (True, True):
        return _conversation_pair(prompt, _turns(chosen, "chosen"), _turns(rejected, "rejected"))
    if any(conversations):
        raise ValueError(
            f"chosen is {describe(chosen)} but rejected is {describe(rejected)}: both must be text, or "
            f"both conversations"
        )
    chosen, rejected = text_of(chosen, "chosen"), text_of(rejected, "rejected")
    if is_conversation(prompt):
        return pair_group(_prompt_messages(prompt), chosen, rejected)
    if prompt is None and "prompt" not in row:
        return split_dialogues(chosen, rejected)
    prompt = text_of(prompt, "prompt")
    if ASSISTANT in prompt and chosen.startswith(prompt) and rejected.startswith(prompt):
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]  # whole dialogues beside their prompt
    return pair_group(prompt, chosen, rejected)


def _turns(value, what: str) -> list[dict]:
    return messages_of([value] if isinstance(value, dict) else value, what)


def _prompt_messages(value) -> list[dict]:
    messages = messages_of(value, "prompt")
    if messages[-1]["role"] == "assistant":
        raise ValueError("prompt ends with an assistant message; the response should be the next one")
    return messages


def _conversation_pair(prompt, chosen: list[dict], rejected: list[dict]) -> PromptGroup | str:
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"{name} must end with an assistant message, not one of role {messages[-1]['role']!r}")
    if is_conversation(prompt):
        messages = _prompt_messages(prompt)
        if chosen[: len(messages)] == messages and rejected[: len(messages)] == messages:
            chosen, rejected = chosen[len(messages) :], rejected[len(messages) :]
    elif len(chosen) == 1 and len(rejected) == 1:
        if prompt is None:
            raise ValueError("chosen and rejected hold no prompt message, and there is no prompt column")
        messages = [{"role": "user", "content": text_of(prompt, "prompt")}]
    else:  # an implicit prompt: everything before the last assistant turn, the same in both
        messages, chosen = chosen[:-1], chosen[-1:]
        if rejected[:-1] != messages:
            return DIVERGED
        rejected = rejected[-1:]
    if len(chosen) != 1 or len(rejected) != 1:
        return DIVERGED
    return pair_group(messages, chosen[0]["content"], rejected[0]["content"])


def parse_groups(row: dict) -> PromptGroup | str:
    """{prompt, responses, pairs, sft_target}: the project's own shape, one prompt a row."""
    prompt = column(row, "prompt")
    prompt = _prompt_messages(prompt) if is_conversation(prompt) else text_of(prompt, "prompt")
    return checked_group(prompt, column(row, "responses"), row.get("pairs"), row.get("sft_target"))


def checked_group(prompt, responses, pairs, sft_target) -> PromptGroup | str:
    """A PromptGroup of values from outside: checked, without empty texts, equal texts merged."""
    responses = [text_of(text, f"responses[{number}]") for number, text in enumerate(list_of(responses, "responses"))]
    group = PromptGroup(prompt, header=header_of(prompt))
    index_of: dict[str, int] = {}
    for text in responses:
        if text.strip() and text not in index_of:
            index_of[text] = len(group.responses)
            group.responses.append(text)
    for number, pair in enumerate([] if pairs is None else list_of(pairs, "pairs")):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(type(index) is int for index in pair):
            raise ValueError(f"pairs[{number}] must be two indices (chosen, rejected), not {ascii(pair)[:80]}")
        for index in pair:
            if not 0 <= index < len(responses):
                raise ValueError(
                    f"pairs[{number}] = {list(pair)}: index {index} is out of range, there are "
                    f"{len(responses)} responses"
                )
        texts = responses[pair[0]], responses[pair[1]]
        reason = EMPTY if not all(text.strip() for text in texts) else IDENTICAL if texts[0] == texts[1] else None
        if reason:
            group.dropped[reason] = group.dropped.get(reason, 0) + 1
        else:
            group.pairs.append((index_of[texts[0]], index_of[texts[1]]))
    if sft_target not in (None, ""):
        group.sft_target = text_of(sft_target, "sft_target")
        if not group.sft_target.strip():
            return EMPTY
    elif group.pairs:
        group.sft_target = group.responses[group.pairs[0][0]]
    return group if group.responses or group.sft_target else EMPTY


def parse_messages(row: dict) -> PromptGroup | str:
    """{messages}: SFT on the last message, which must be the assistant's."""
    messages = messages_of(column(row, "messages"), "messages")
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"messages must end with an assistant message, not one of role {messages[-1]['role']!r}")
    if len(messages) < 2:
        raise ValueError("messages holds the assistant's message alone, without a prompt")
    return _sft_group(messages[:-1], messages[-1]["content"])


def parse_completion(row: dict) -> PromptGroup | str:
    """{prompt, completion}: SFT, text or conversations."""
    prompt, completion = column(row, "prompt"), column(row, "completion")
    prompt = _prompt_messages(prompt) if is_conversation(prompt) else text_of(prompt, "prompt")
    if is_conversation(completion):
        turns = _turns(completion, "completion")
        if len(turns) != 1 or turns[0]["role"] != "assistant":
            raise ValueError("completion must be one assistant message")
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        return _sft_group(prompt, turns[0]["content"])
    return _sft_group(prompt, text_of(completion, "completion"))


def _sft_group(prompt, target: str) -> PromptGroup | str:
    if not target.strip():
        return EMPTY
    return PromptGroup(prompt, [target], [], target, header=header_of(prompt))


FORMATS = {  # the columns that mark a format -> its parser, whether it has pairs, the columns it reads
    ("prompt", "responses", "pairs"): (parse_groups, True, ("prompt", "responses", "pairs", "sft_target")),
    ("prompt", "responses", "sft_target"): (parse_groups, False, ("prompt", "responses", "pairs", "sft_target")),
    ("prompt", "chosen", "rejected"): (parse_preferences, True, ("prompt", "chosen", "rejected")),
    ("chosen", "rejected"): (parse_implicit, True, ("chosen", "rejected")),
    ("messages",): (parse_messages, False, ("messages",)),
    ("prompt", "completion"): (parse_completion, False, ("prompt", "completion")),
    ("history", "human_ref_A", "human_ref_B", "labels", "score_A", "score_B"): (
        parse_shp,
        True,
        ("history", "human_ref_A", "human_ref_B", "labels", "score_A", "score_B"),
    ),
    ("question", "answers"): (parse_se, True, ("question", "answers")),
}
CANONICAL_COLUMNS = sorted({name for _, _, columns in FORMATS.values() for name in columns})


def detect_format(columns, responses_only: bool):
    """(parser, columns it reads) for data with these columns; `responses_only`: the loss needs no pairs. Raises
    ValueError when no format fits."""
    columns = set(columns)
    for needed, (parser, has_pairs, reads) in FORMATS.items():
        if not columns.issuperset(needed):
            continue
        if not has_pairs and not responses_only:
            raise ValueError(
                f"columns {sorted(columns)} hold examples for loss=sft only, and no preferences; other losses need "
                f"chosen and rejected, or responses and pairs"
            )
        if parser is parse_completion and "label" in columns:
            raise ValueError(
                "columns prompt, completion and label are unpaired preferences, which no loss here uses; "
                "keep the good completions and leave the column label out"
            )
        return parser, reads
    known = "; ".join(", ".join(needed) for needed in FORMATS)
    raise ValueError(
        f"columns {sorted(columns)} fit no known format. Known are: {known}. Name yours with "
        f"data.columns, such as data.columns.prompt=question data.columns.chosen=good"
    )
