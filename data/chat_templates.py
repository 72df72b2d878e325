"""Prompt groups -> the texts that will be encoded: conversations as a chat template lays them out, plain text as it is.

transformers' own `apply_chat_template` does the rendering. What is added here: where the prompt ends inside the
rendered text, one prompt for several answers, a layout for models without a template, placeholders that keep
control-like text in the messages apart from the template's own control tokens, and checks that what is trained on is
what was written:

- the prompt is what the template renders for generation, as the model will see it in use;
- a message whose text the template leaves out is an error, one that it changes is counted;
- an answer of which the template leaves out a part, as many do with reasoning, is trained on whole.
"""

import re
from collections import Counter

from data.answers import strings_in
from data.conversations import ConversationRenderer, RenderedGroup
from data.dialogues import dialogue_text, messages_of_dialogue, user_message
from data.row_formats import ASSISTANT, PromptGroup
from data.template_calls import ChatTemplate

SHOWN = 5  # row numbers that a notice names

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
        self.conversations = ConversationRenderer(template, control_text, eos, self.counts, self._notice)

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
                prompt = [user_message(prompt)]
        if isinstance(prompt, str):
            return self._render_text(prompt, responses, group)
        answers = [group.turns.get(text, text) for text in responses]
        texts = list(strings_in([prompt, answers, group.tools]))
        lookalikes = any(map(self.control_text.search, texts))
        if lookalikes:
            self._count_lookalikes("conversation", group.row, texts)
        if self.template.text:
            if prompt[-1]["role"] == "assistant":
                return self.conversations.render_prefill(prompt, answers, group.tools, protect=lookalikes)
            return self.conversations.render(prompt, answers, group.tools, protect=lookalikes)
        if group.turns or group.tools or any(set(message) != {"role", "content"} for message in prompt):
            raise ValueError(
                "tools, tool calls, reasoning and answers of several turns are written by a chat template, and the "
                "tokenizer has none: give one with data.chat_template"
            )
        self._notice(
            "the tokenizer has no chat template: conversations are laid out as "
            r"'\n\nHuman: ... \n\nAssistant:'; data.chat_template gives another layout"
        )
        if prompt[-1]["role"] == "assistant":
            dialogue = f"{dialogue_text(prompt[:-1])} {prompt[-1]['content'].lstrip(' ')}"
            return RenderedGroup(dialogue, [dialogue + text for text in responses])
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
