"""One row of any supported format -> one PromptGroup (text), or the reason why the row is left out.

Every parser has the form `parse(row) -> PromptGroup | str`: a string is the reason under which a dropped row is
counted. A row that is malformed, rather than merely unusable, raises ValueError; the caller adds file and line.
"""

import json
from dataclasses import dataclass, field

from data.answers import Answer, answer_of, is_blank, text_of_answer, turns_of
from data.files import describe, quoted
from data.row_values import column, is_conversation, is_empty, list_of, messages_of, number_of, text_of, weights_of

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"

# Why a row, a response or a pair is left out: the keys of the counts that every data set comes with.
EMPTY, IDENTICAL, DIVERGED, NO_PREFERENCE = "dropped_empty", "dropped_identical", "dropped_diverged", "dropped_tied"
WEIGHT_ZERO, SMALL_GAP, BAD_RESPONSE = "dropped_weight_zero", "dropped_small_gap", "dropped_labelled_bad"
BAD_ROW = "dropped_bad_row"


@dataclass
class PromptGroup:
    """A prompt and its responses, as text.

    prompt: text, or a conversation as a list of {"role", "content"} that the tokenizer's chat template will render.
    pairs: (chosen, rejected) indices into responses; (n, -1) and (-1, n) for a response that is good or bad by itself.
    weights: of the pairs, what their losses are multiplied by; empty for 1. scores: response -> how the data rate it.
    ranked: the pairs follow from the scores (ranked_rows.py), once all responses of the prompt are there.
    sft_targets: the responses that SFT learns, an example each. earlier_turns: (prompt, target) of further turns of the
    same conversation that SFT learns, each an example by itself. turns: the messages of responses that are more than
    one plain message (answers.py). tools: JSON schemas of functions, which the chat template writes.
    row: number of the (first) source row, for messages. header: text at the end of a text prompt that opens the
    assistant's turn, which truncation keeps. sft_score: of a source that has one target a prompt; when rows merge, the
    first target of the highest score stays. None: all targets stay.
    """

    prompt: str | list
    responses: list[str] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    sft_targets: list[str] = field(default_factory=list)
    row: int = 0
    header: str = ""
    sft_score: float | None = None
    weights: list[float] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    ranked: bool = False
    earlier_turns: list[tuple[list[dict], Answer]] = field(default_factory=list)
    turns: dict[str, list[dict]] = field(default_factory=dict)
    tools: list[dict] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def sft_target(self) -> str | None:
        """The first of the responses that SFT learns."""
        return self.sft_targets[0] if self.sft_targets else None

    @property
    def pair_weights(self) -> list[float]:
        """The weight of each pair."""
        return self.weights or [1.0] * len(self.pairs)

    def key(self):
        """What makes two prompts the same."""
        if isinstance(self.prompt, str):
            return self.prompt
        return json.dumps([*self.prompt, self.tools] if self.tools else self.prompt, ensure_ascii=False)

    def conflicts(self, other: "PromptGroup") -> bool:
        """Whether another group of the same prompt rates a response otherwise, as margins of two pairs do that share
        it. Ratings of a ranking merge: the best one counts."""
        both = self.scores.keys() & other.scores.keys()
        return not (self.ranked and other.ranked) and any(self.scores[text] != other.scores[text] for text in both)

    def merge(self, other: "PromptGroup"):
        """Takes over the responses, pairs and targets of another group of the same prompt; equal texts become one."""
        known = {text: index for index, text in enumerate(self.responses)}
        renumbered = []
        for text in other.responses:
            if text not in known:
                known[text] = len(self.responses)
                self.responses.append(text)
            renumbered.append(known[text])
        if self.weights or other.weights:
            self.weights = self.pair_weights + other.pair_weights
        renumbered.append(-1)  # at index -1: no response
        self.pairs += [(renumbered[first], renumbered[second]) for first, second in other.pairs]
        self.turns |= other.turns
        self.earlier_turns += [turn for turn in other.earlier_turns if turn not in self.earlier_turns]
        for text, score in other.scores.items():
            # As within a row: of a response that is rated twice the best rating counts.
            self.scores[text] = max(score, self.scores.get(text, score))
        if self.sft_score is None or other.sft_score is None:
            self.sft_targets += [text for text in other.sft_targets if text not in self.sft_targets]
        elif other.sft_score > self.sft_score:
            self.sft_targets, self.sft_score = other.sft_targets, other.sft_score
        for reason, number in other.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + number


def pair_group(prompt, chosen: Answer, rejected: Answer) -> PromptGroup | str:
    """The group of a single pair, or why there is none."""
    if is_blank(chosen) or is_blank(rejected):
        return EMPTY
    if chosen == rejected:
        return IDENTICAL
    texts, turns = [text_of_answer(chosen), text_of_answer(rejected)], turns_of([chosen, rejected])
    return PromptGroup(prompt, texts, [(0, 1)], texts[:1], header=header_of(prompt), turns=turns)


def header_of(prompt) -> str:
    return ASSISTANT if isinstance(prompt, str) and prompt.endswith(ASSISTANT) else ""


# ---- named sources -----------------------------------------------------------------------------------------------


def parse_hh(row: dict) -> PromptGroup | str:
    """Anthropic HH: two whole dialogues, which must be the same up to the last assistant turn of the chosen one."""
    chosen = text_of(column(row, "chosen"), "chosen")
    rejected = text_of(column(row, "rejected"), "rejected")
    group = split_dialogues(chosen, rejected)
    if isinstance(group, PromptGroup):
        group.sft_score = 0.0  # a prompt has one target, as in the DPO reference implementation
    return group


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
        group.sft_targets, group.sft_score = [responses[best]], scores[best]
        group.scores = dict(zip(responses, scores))
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
    group.sft_targets = [max(scores, key=scores.__getitem__)]
    group.sft_score, group.scores = max(values), scores
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
        return _conversation_pair(prompt, chosen, rejected)
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


def prompt_of(value) -> str | list[dict]:
    """A prompt as text or, checked, as a conversation."""
    return _prompt_messages(value) if is_conversation(value) else text_of(value, "prompt")


def _prompt_messages(value) -> list[dict]:
    """A conversation. One that ends with an assistant message is gone on with by the response (a prefill)."""
    messages = messages_of(value, "prompt")
    last = messages[-1]
    if last["role"] == "assistant" and (set(last) != {"role", "content"} or not last["content"].strip()):
        raise ValueError("prompt ends with an assistant message that is no text, which a response cannot go on with")
    if len(messages) == 1 and last["role"] == "assistant":
        raise ValueError("prompt is the assistant's message alone; begin it with the user's")
    return messages


def _refuse_weight_zero(value, n_answer: int, what: str) -> None:
    """ValueError where one of a conversation's last n_answer messages, its answer, is not to be learnt."""
    weights = weights_of(value, what)
    for number in range(len(weights) - n_answer, len(weights)):
        if weights[number] == 0:
            raise ValueError(
                f"{what}[{number}] has weight 0, but an answer is learnt whole: put the turns up to it into the "
                "prompt, or leave the weight out"
            )


def _conversation_pair(prompt, chosen_value, rejected_value) -> PromptGroup | str:
    chosen, rejected = messages_of(chosen_value, "chosen"), messages_of(rejected_value, "rejected")
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages[-1]["role"] != "assistant":
            raise ValueError(
                f"{name} must end with an assistant message, not one of role {quoted(messages[-1]['role'])}"
            )
    if is_conversation(prompt):
        messages = _prompt_messages(prompt)
        if chosen[: len(messages)] == messages and rejected[: len(messages)] == messages:
            chosen, rejected = chosen[len(messages) :], rejected[len(messages) :]
        if not chosen or not rejected:
            return DIVERGED
    elif len(chosen) == 1 and len(rejected) == 1:
        if prompt is None:
            raise ValueError("chosen and rejected hold no prompt message, and there is no prompt column")
        messages = [{"role": "user", "content": text_of(prompt, "prompt")}]
    else:  # an implicit prompt: everything before the last assistant turn, the same in both
        messages, chosen = chosen[:-1], chosen[-1:]
        if rejected[:-1] != messages:
            return DIVERGED
        rejected = rejected[-1:]
    _refuse_weight_zero(chosen_value, len(chosen), "chosen")
    _refuse_weight_zero(rejected_value, len(rejected), "rejected")
    return pair_group(messages, answer_of(chosen, "chosen"), answer_of(rejected, "rejected"))


def parse_groups(row: dict) -> PromptGroup | str:
    """{prompt, responses, pairs, sft_target}: the project's own shape, one prompt a row."""
    prompt = prompt_of(column(row, "prompt"))
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
        group.sft_targets = [text_of(sft_target, "sft_target")]
        if not sft_target.strip():
            return EMPTY
    elif group.pairs:
        group.sft_targets = [group.responses[group.pairs[0][0]]]
    return group if group.responses or group.sft_targets else EMPTY


def parse_messages(row: dict, name: str = "messages", every_turn: bool = False) -> PromptGroup | str:
    """{messages}, or ShareGPT's {conversations}: SFT on the last message, which must be the assistant's.

    every_turn: on all of the assistant's messages, each after all that comes before it. Messages of weight 0 are read,
    but not learnt.
    """
    value = column(row, name)
    messages = messages_of(value, name)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{name} must end with an assistant message, not one of role {quoted(messages[-1]['role'])}")
    if len(messages) < 2:
        raise ValueError(f"{name} holds the assistant's message alone, without a prompt")
    weights = weights_of(value, name)
    first = len(messages) - 1 if not every_turn else 1
    learnt = [
        number
        for number in range(first, len(messages))
        if messages[number]["role"] == "assistant" and weights[number] != 0
    ]
    if not learnt:
        return WEIGHT_ZERO
    *earlier, last = learnt
    group = sft_group(messages[:last], answer_of(messages[last : last + 1], name))
    if isinstance(group, PromptGroup):
        turns = [(messages[:number], answer_of(messages[number : number + 1], name)) for number in earlier]
        group.earlier_turns = [(prompt, target) for prompt, target in turns if not is_blank(target)]
    return group


def parse_sharegpt_pair(row: dict, name: str = "conversations") -> PromptGroup | str:
    """ShareGPT's {conversations, chosen, rejected}, or {messages, ...}: a conversation, and two answers to its end."""
    return _preferences(column(row, name), row)


def parse_alpaca_pair(row: dict) -> PromptGroup | str:
    """{instruction, input, chosen, rejected}: Alpaca's instruction with two answers."""
    prompt = with_input(column(row, "instruction"), row.get("input"))
    return _preferences([{"role": "user", "content": prompt}], row)


def parse_rejected_response(row: dict) -> PromptGroup | str:
    """ms-swift's {messages, rejected_response}: a conversation with its answer, and a worse answer."""
    messages = messages_of(column(row, "messages"), "messages")
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise ValueError("messages must end with the assistant's answer to what comes before it")
    _refuse_weight_zero(row["messages"], 1, "messages")
    rejected = text_of(column(row, "rejected_response"), "rejected_response")
    return pair_group(messages[:-1], answer_of(messages[-1:], "messages"), rejected)


def parse_orca(row: dict) -> PromptGroup | str:
    """Orca's {system, question, chosen, rejected}, texts: `parse_row` puts the system message first."""
    return _preferences(column(row, "question"), row)


def parse_alpaca(row: dict) -> PromptGroup | str:
    """Alpaca's {instruction, input, output}: SFT, as a conversation of two messages. An output that is a list holds the
    chosen and the rejected response."""
    if not is_empty(row.get("history")):
        raise ValueError("history has turns, which are not read here; write whole conversations in a column messages")
    prompt = with_input(column(row, "instruction"), row.get("input"))
    messages, output = [{"role": "user", "content": prompt}], column(row, "output")
    if isinstance(output, (list, tuple)):
        if len(output) != 2:
            raise ValueError(f"output is a list of {len(output)}: a pair is [chosen, rejected]")
        return pair_group(messages, *(text_of(text, f"output[{number}]") for number, text in enumerate(output)))
    return sft_group(messages, text_of(output, "output"))


def with_input(instruction, added) -> str:
    """An instruction and the text that it is about."""
    instruction = text_of(instruction, "instruction")
    return instruction if is_empty(added) else f"{instruction}\n{text_of(added, 'input')}"


def parse_completion(row: dict) -> PromptGroup | str:
    """{prompt, completion}: SFT, text or conversations."""
    prompt, completion = prompt_of(column(row, "prompt")), column(row, "completion")
    if is_conversation(completion):
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = messages_of(completion, "completion")
        _refuse_weight_zero(completion, len(messages), "completion")
        return sft_group(prompt, answer_of(messages, "completion"))
    return sft_group(prompt, text_of(completion, "completion"))


def sft_group(prompt, target: Answer) -> PromptGroup | str:
    """The group of a single answer to learn, or why there is none."""
    if is_blank(target):
        return EMPTY
    text = text_of_answer(target)
    return PromptGroup(prompt, [text], [], [text], header=header_of(prompt), turns=turns_of([target]))
