"""Prompt groups -> the texts that will be encoded: conversations as a chat template lays them out, plain text as it is.

transformers' own `apply_chat_template` does the rendering. What is added here: where the prompt ends inside the
rendered text, one prompt for several answers, a layout for models without a template, placeholders that keep
control-like text in the messages apart from the template's own control tokens, and checks that what is trained on is
what was written:

- the prompt is what the template renders for generation, as the model will see it in use;
- a message whose text the template leaves out is an error, one that it changes is counted;
- an answer of which the template leaves out a part, as many do with reasoning, is trained on whole.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass, field

from data.row_formats import ASSISTANT, HUMAN, PromptGroup
from data.template_calls import ChatTemplate, TemplateRefusal, unused_characters

SHOWN = 5  # row numbers that a notice names
_SHORT = 8  # characters: texts below may stand in a rendering by chance
_TURN = re.compile(f"({re.escape(HUMAN)}|{re.escape(ASSISTANT)})")

NOTICES = {  # what is counted -> what the user should know
    "answers_trimmed": "the chat template drops the blanks around some answers or moves them: trained on as rendered",
    "answers_kept_whole": (
        "the chat template leaves out or changes a part of some answers (a reasoning block, mostly); they are trained "
        "on whole, in the place where it writes answers"
    ),
    "messages_changed": (
        "the chat template leaves out or changes a part of some messages before the answer (earlier reasoning, "
        "mostly), as it will when the model is used; trained on as rendered"
    ),
    "prompts_from_generation": (
        "the chat template lays out some conversations otherwise once an answer follows (it moves the system text, "
        "mostly): prompts are trained on as it renders them for generation"
    ),
    "generation_prompts_differ": (
        "what the chat template writes to open the assistant's turn for generation is not how it begins some turns "
        "with an answer: trained on as it writes turns; if the model is to answer after the generation prompt, give a "
        "template in which both agree, with data.chat_template"
    ),
    "system_turns_folded": "the chat template knows no system turn: its text was put before the first user turn",
}

LOOKALIKES = {  # kind of prompt -> what to do about texts that look like control tokens
    "text": "data.allow_control_tokens=true encodes them as control tokens",
    "conversation": "in a conversation, the chat template alone writes control tokens",
}


@dataclass
class RenderedGroup:
    """A group's texts as they will be encoded: `prompt` is a prefix of each of `full_texts`.

    control_tokens: control tokens in these texts are real ones.
    from_template: a chat template wrote these texts, with the BOS that they need.
    placeholders: character -> the control-like text of a message that it takes the place of.
    terminated: the texts end with the turn's own end token, so no EOS is added; None: those that end with a control
    token do.
    header: the end of the prompt that truncation keeps; None: ask `ChatRenderer.header`, which renders again.
    messages: the conversation that was rendered. generation_prompt: the prompt is what was rendered for generation.
    """

    prompt: str
    full_texts: list[str]
    control_tokens: bool = False
    from_template: bool = False
    terminated: bool | None = False
    header: str | None = ""
    placeholders: dict[str, str] = field(default_factory=dict)
    messages: list[dict] = field(default_factory=list)
    generation_prompt: bool = False


class Lookalikes:
    """Texts in the data that look like control tokens, and the first rows that have some."""

    def __init__(self):
        self.texts: Counter = Counter()
        self.rows: list[int] = []

    def add(self, row: int, texts: list[str]):
        self.texts.update(texts)
        if len(self.rows) <= SHOWN and row not in self.rows:
            self.rows.append(row)

    def notice(self, advice: str) -> str:
        """What the user should know about them."""
        named = ", ".join(text for text, _ in self.texts.most_common(SHOWN))
        rows = f"row{'s' * (len(self.rows) > 1)} {', '.join(map(str, self.rows[:SHOWN]))}"
        more = " and more" if len(self.rows) > SHOWN else ""
        return (
            f"texts contain {named} ({rows}{more}), which are encoded as the plain characters that they are; {advice}"
        )


class ChatRenderer:
    """Renders prompt groups with a chat template.

    control_text: matches all texts that look like control tokens of the tokenizer. eos: the tokenizer's EOS token.
    allow_control_tokens, apply_template: see the keys under `data`.
    counts: what happened on the way; `notices`: what the user should see once.

    Raises:
        ValueError: apply_template without a template.
    """

    def __init__(
        self,
        template: ChatTemplate,
        control_text: re.Pattern,
        eos: str = "",
        allow_control_tokens: bool = False,
        apply_template: bool = False,
    ):
        if apply_template and not template.text:
            raise ValueError(
                "data.apply_template=true, but the tokenizer has no chat template: give one with data.chat_template, "
                "or leave data.apply_template=false"
            )
        self.template, self.control_text, self.eos = template, control_text, eos
        self.allow_control_tokens, self.apply_template = allow_control_tokens, apply_template
        self.counts: Counter = Counter()
        self._notices: list[str] = []
        self._lookalikes: dict[str, Lookalikes] = {}  # by kind of prompt

    @property
    def notices(self) -> list[str]:
        """What the user should see once."""
        counted = [text for reason, text in NOTICES.items() if self.counts[reason]]
        return self._notices + counted + [found.notice(LOOKALIKES[kind]) for kind, found in self._lookalikes.items()]

    def render(self, group: PromptGroup, responses: list[str]) -> RenderedGroup:
        """The texts of a group. Raises ValueError when the chat template fails on the conversation or drops a part."""
        prompt = group.prompt
        if isinstance(prompt, str) and self.apply_template:
            self.counts["templated_prompts"] += 1
            if group.header:
                prompt, responses = messages_of_dialogue(prompt), [text.removeprefix(" ") for text in responses]
            else:
                prompt = [_user(prompt)]
        if isinstance(prompt, str):
            return self._render_text(prompt, responses, group)
        texts = [*(message["content"] for message in prompt), *responses]
        lookalikes = any(map(self.control_text.search, texts))
        if lookalikes:
            self._count_lookalikes("conversation", group.row, texts)
        if self.template.text:
            return self._render_conversation(prompt, responses, protect=lookalikes)
        self._notice(
            "the tokenizer has no chat template: conversations are laid out as "
            r"'\n\nHuman: ... \n\nAssistant:'; data.chat_template gives another layout"
        )
        dialogue = dialogue_text(prompt)
        return RenderedGroup(dialogue, [f"{dialogue} {text.lstrip(' ')}" for text in responses], header=ASSISTANT)

    def _render_text(self, prompt: str, responses: list[str], group: PromptGroup) -> RenderedGroup:
        """Text as it is."""
        full_texts = [prompt + text for text in responses]
        lookalikes = any(map(self.control_text.search, [prompt, *responses]))
        allowed = lookalikes and self.allow_control_tokens
        if self.allow_control_tokens:
            self.counts["text_prompts"] += 1
            self.counts["prompts_with_control_tokens"] += lookalikes
        elif lookalikes:
            self._count_lookalikes("text", group.row, [prompt, *responses])
        if allowed:
            texts = [self._up_to_end(text) for text in full_texts]
            return RenderedGroup(prompt, texts, control_tokens=True, terminated=None, header=group.header)
        if self.template.text:
            self._notice(
                "prompts are text, so that the chat template is not applied to them: they are trained on as they are; "
                "data.apply_template=true makes the prompt a user's turn and the response the assistant's"
            )
        return RenderedGroup(prompt, full_texts, header=group.header)

    def _up_to_end(self, text: str) -> str:
        """Without the blanks after a control token at the text's very end: nobody writes on after it."""
        bare = text.rstrip()
        ends = [match.end() for match in self.control_text.finditer(bare)]
        return bare if ends and ends[-1] == len(bare) else text

    def _notice(self, text: str):
        if text not in self._notices:
            self._notices.append(text)

    def _count_lookalikes(self, kind: str, row: int, texts: list[str]):
        found = [self.control_text.findall(text) for text in texts]
        self.counts["texts_with_control_lookalikes"] += sum(map(bool, found))
        self._lookalikes.setdefault(kind, Lookalikes()).add(row, [text for each in found for text in each])

    # ---- Conversations ----------------------------------------------------------------------------------------------

    def _render_conversation(self, messages: list[dict], responses: list[str], protect: bool) -> RenderedGroup:
        """Renders a conversation with each response. protect: the texts hold control-like text."""
        free = unused_characters(self.template.text or "", *(message["content"] for message in messages), *responses)
        originals: dict[str, str] = {}  # placeholder -> text
        if protect:
            # One character each keeps a template's own handling of the text around it (trimming, splitting) as it is.
            placeholders: dict[str, str] = {}  # text -> placeholder

            def placeholder(match):
                if match.group() not in placeholders:
                    placeholders[match.group()] = next(free)
                return placeholders[match.group()]

            messages = [
                {**message, "content": self.control_text.sub(placeholder, message["content"])} for message in messages
            ]
            responses = [self.control_text.sub(placeholder, text) for text in responses]
            originals = {character: text for text, character in placeholders.items()}
        mark = next(free) * 3
        head, tail, messages = self._head_and_tail(messages, mark)
        kept_tail = self.template.turn_end(tail, self.control_text)
        if not kept_tail and tail.strip():
            self._notice(
                f"the chat template ends an answer with {tail.strip()!r}, which is no control token of this tokenizer: "
                f"responses end with its EOS {self.eos} instead"
            )
        bodies = [self._body(messages, head, tail, response) for response in responses]
        prompt, bodies, generation_prompt = self._split(messages, head, bodies, mark, next(free) * 3)
        self._check_messages(messages, prompt, generation_prompt)
        return RenderedGroup(
            prompt,
            [body + kept_tail if len(body) > len(prompt) else body for body in bodies],
            control_tokens=True,
            from_template=True,
            terminated=bool(kept_tail),
            header=None,
            placeholders=originals,
            messages=messages,
            generation_prompt=generation_prompt,
        )

    def _head_and_tail(self, messages, mark: str):
        """What the template writes before and after the assistant's answer; the messages, changed if they had to be."""
        try:
            return *self.template.around_answer(messages, mark), messages
        except TemplateRefusal:
            if not (len(messages) > 1 and messages[0]["role"] == "system" and messages[1]["role"] == "user"):
                raise
        folded = messages[0]["content"] + "\n\n" + messages[1]["content"]
        result = self._head_and_tail([_user(folded), *messages[2:]], mark)
        self.counts["system_turns_folded"] += 1
        return result

    def _body(self, messages: list[dict], head: str, tail: str, response: str) -> str:
        """The conversation up to the end of the answer, without what the template writes after it."""
        text = self.template.render([*messages, {"role": "assistant", "content": response}])
        body = text[: len(text) - len(tail)]
        if text.endswith(tail):
            if body == head + response:
                return body
            if _without_blanks(body).endswith(_without_blanks(response)):
                # Laid out anew, as some templates do with reasoning, or trimmed.
                self.counts["answers_trimmed"] += response not in body
                return body
        self.counts["answers_kept_whole"] += 1
        return head + response

    def _split(self, messages: list[dict], head: str, bodies: list[str], mark: str, other_mark: str):
        """(prompt, bodies, whether the prompt is what the template renders for generation).

        head: the conversation up to an answer. bodies: up to the end of each; they are changed where the template lays
        the messages out otherwise when no answer follows.
        """
        opening = self.template.render(messages, generation_prompt=True)
        opens_turn = self.template.has_generation_prompt
        if opens_turn and all(body.startswith(opening) for body in bodies):
            return opening, bodies, True
        shared = os.path.commonprefix([head, *bodies])
        if not opens_turn and head.startswith(opening):
            # A blank before the answer is written by the model, as Mistral's after [/INST]; a header is not.
            only_blanks = shared.startswith(opening) and not head[len(opening) :].strip()
            return opening if only_blanks else shared, bodies, False
        # What the template writes after the last message, for generation and before an answer.
        marked = [*messages[:-1], {**messages[-1], "content": other_mark}]
        _, found, for_generation = self.template.render(marked, generation_prompt=True).rpartition(other_mark)
        _, found_too, before_answer = self.template.around_answer(marked, mark)[0].rpartition(other_mark)
        in_one_place = found and found_too and before_answer.startswith(for_generation)
        if in_one_place and all(body.startswith(head) for body in bodies):
            self.counts["prompts_from_generation"] += 1
            start = opening + before_answer[len(for_generation) :]
            return opening, [start + body[len(head) :] for body in bodies], True
        self.counts["generation_prompts_differ"] += 1
        return shared, bodies, False

    def _check_messages(self, messages: list[dict], prompt: str, generation_prompt: bool):
        """Counts messages that the prompt does not hold as they are. Raises ValueError for one that is left out."""
        left_out = self.template.left_out(tuple(message["role"] for message in messages), generation_prompt)
        rest, changed = prompt, []
        for number in sorted(range(len(messages)), key=lambda number: -len(messages[number]["content"])):
            text = messages[number]["content"].strip()
            before, found, after = rest.partition(text) if text else ("", "", rest)
            rest = f"{before}\0{after}" if found else rest
            if text and (not found or (len(text) < _SHORT and number in left_out)):
                changed.append(number)
        if not changed:
            return
        squeezed = _without_blanks(prompt)
        for number in changed:
            message = messages[number]
            if number in left_out:
                raise ValueError(
                    f"the chat template leaves out the {message['role']} message {message['content'][:60]!r}: put its "
                    "text into another turn, leave it out of the data, or give a template that writes it, with "
                    "data.chat_template"
                )
            self.counts["messages_changed"] += _without_blanks(message["content"]) not in squeezed

    def header(self, rendered: RenderedGroup) -> str:
        """The end of a prompt that opens the assistant's turn: what the template writes after the last message."""
        if rendered.header is not None:
            return rendered.header
        free = unused_characters(rendered.prompt, *(message["content"] for message in rendered.messages))
        mark = next(free) * 3
        messages = [*rendered.messages[:-1], {**rendered.messages[-1], "content": mark}]
        try:
            if rendered.generation_prompt:
                text = self.template.render(messages, generation_prompt=True)
            else:
                text = self.template.around_answer(messages, next(free) * 3)[0]
        except ValueError:
            return ""
        header = text.rpartition(mark)[2]
        while not rendered.prompt.endswith(header):  # a prompt may end before the header does
            header = header[:-1]
        return header


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def messages_of_dialogue(dialogue: str) -> list[dict]:
    """The turns of a text in the layout of the HH data, which ends with the assistant's header.

    Turns of one speaker after another become one; text before the first turn is the system's.
    """
    start, *parts = _TURN.split(dialogue[: -len(ASSISTANT)])
    messages = [{"role": "system", "content": start.strip()}] if start.strip() and parts else []
    if not parts:
        return [_user(start)]
    for name, text in zip(parts[::2], parts[1::2]):
        role = "user" if name == HUMAN else "assistant"
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n\n" + text.strip()
        else:
            messages.append({"role": role, "content": text.strip()})
    return messages


def dialogue_text(messages: list[dict]) -> str:
    """A conversation in the layout of the HH data, up to and including the assistant's header."""
    names = {"user": HUMAN, "assistant": ASSISTANT}
    turns = [
        f"{names[message['role']]} {message['content']}" if message["role"] in names else message["content"]
        for message in messages
    ]
    return (
        "".join(turn if turn.startswith("\n\n") or not number else "\n\n" + turn for number, turn in enumerate(turns))
        + ASSISTANT
    )
