"""Prompt groups -> the texts that will be encoded: conversations as a chat template lays them out, plain text as it is.

transformers' own `apply_chat_template` does the rendering. What is added here: where the prompt ends inside the
rendered text, one prompt for several answers, a layout for models without a template, and placeholders that keep
control-like text in the messages apart from the template's own control tokens.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from data.row_formats import ASSISTANT, HUMAN, PromptGroup

# Private-use characters that take a text's place while a template is rendered; picked anew when a text contains them.
_PRIVATE = [chr(code) for code in range(0xE000, 0xF8FF)]


@dataclass
class RenderedGroup:
    """A group's texts as they will be encoded: `prompt` is a prefix of each of `full_texts`.

    control_tokens: control tokens in these texts are real ones (a conversation that a template rendered).
    placeholders: character -> the control-like text of a message that it takes the place of.
    terminated: the texts end with the turn's own end token, so no EOS is added.
    header: the end of the prompt that truncation keeps; None: ask `ChatRenderer.header`, which renders again.
    messages: the conversation that was rendered.
    """

    prompt: str
    full_texts: list[str]
    control_tokens: bool = False
    terminated: bool = False
    header: str | None = ""
    placeholders: dict[str, str] = field(default_factory=dict)
    messages: list[dict] = field(default_factory=list)


def read_chat_template(value: str | None) -> str | None:
    """data.chat_template: a template, or the path of a file that holds one. Raises ValueError when it is neither."""
    if not value:
        return None
    if "{" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.chat_template={value}: neither a template (it has no braces) nor a readable file ({error})"
        ) from error


class ChatRenderer:
    """Renders prompt groups with a tokenizer's chat template, or with the one given.

    control_text: matches all texts that look like control tokens of the tokenizer.
    counts, notices: what happened on the way, and what the user should see once.
    """

    def __init__(self, tokenizer, template: str | None, control_text: re.Pattern):
        self.tokenizer, self.control_text = tokenizer, control_text
        template = template or getattr(tokenizer, "chat_template", None)
        if isinstance(template, dict):  # named templates; 'default' is the one for plain chat
            template = template.get("default", next(iter(template.values()), None))
        self.template = template
        self.notices: list[str] = []
        self.counts: Counter = Counter()

    def render(self, group: PromptGroup, responses: list[str]) -> RenderedGroup:
        """The texts of a group. Raises ValueError when the chat template refuses the conversation."""
        prompt = group.prompt
        contents = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        lookalikes = sum(bool(self.control_text.search(text)) for text in contents + responses)
        if lookalikes:
            self.counts["texts_with_control_lookalikes"] += lookalikes
        if isinstance(prompt, str):
            return RenderedGroup(prompt, [prompt + text for text in responses], header=group.header)
        if self.template:
            return self._render_conversation(prompt, responses, protect=bool(lookalikes))
        self._notice(
            "the tokenizer has no chat template: conversations are laid out as "
            r"'\n\nHuman: ... \n\nAssistant:'; data.chat_template gives another layout"
        )
        dialogue = dialogue_text(prompt)
        return RenderedGroup(dialogue, [f"{dialogue} {text.lstrip(' ')}" for text in responses], header=ASSISTANT)

    def _notice(self, text: str):
        if text not in self.notices:
            self.notices.append(text)

    def _render_conversation(self, messages: list[dict], responses: list[str], protect: bool) -> RenderedGroup:
        """Renders a conversation with each response. protect: the texts hold control-like text."""
        everything = "".join(message["content"] for message in messages) + "".join(responses)
        free = (character for character in _PRIVATE if character not in everything)
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
        end = self.control_text.search(tail)
        kept_tail = tail[: end.end()] if end else ""
        prompt, bodies = head, []
        for response in responses:
            text = self._apply_template(messages + [{"role": "assistant", "content": response}])
            if not text.endswith(tail):
                raise ValueError(
                    "the chat template ends this assistant turn otherwise than others, so its end cannot "
                    "be found; give another template with data.chat_template"
                )
            body = text[: len(text) - len(tail)]
            # A template may look into the answer (for reasoning blocks): what all answers share is the prompt.
            if not body.startswith(prompt):
                prompt = os.path.commonprefix([prompt, body])
            bodies.append(body)
        return RenderedGroup(
            prompt,
            [body + kept_tail if len(body) > len(prompt) else body for body in bodies],
            control_tokens=True,
            terminated=bool(end),
            header=None,
            placeholders=originals,
            messages=messages,
        )

    def _head_and_tail(self, messages, mark: str):
        """What the template writes before and after the assistant's answer; the messages, changed if they had to be."""
        from jinja2 import TemplateError

        try:
            text = self._apply_template(messages + [{"role": "assistant", "content": mark}])
        except TemplateError as error:
            if not (len(messages) > 1 and messages[0]["role"] == "system" and messages[1]["role"] == "user"):
                raise ValueError(
                    f"the chat template refuses this conversation (roles "
                    f"{[message['role'] for message in messages]}): {error}"
                ) from error
            self._notice("the chat template knows no system turn: its text was put before the first user turn")
            self.counts["system_turns_folded"] += 1
            folded = messages[0]["content"] + "\n\n" + messages[1]["content"]
            return self._head_and_tail([{"role": "user", "content": folded}] + messages[2:], mark)
        head, found, tail = text.rpartition(mark)
        if not found:
            raise ValueError(
                "the chat template does not write the assistant's answer; give another with data.chat_template"
            )
        return head, tail, messages

    def _apply_template(self, messages) -> str:
        return self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, tokenize=False, add_generation_prompt=False
        )

    def header(self, rendered: RenderedGroup) -> str:
        """The end of a prompt that opens the assistant's turn: what the template writes after the last message."""
        if rendered.header is not None:
            return rendered.header
        everything = rendered.prompt + "".join(message["content"] for message in rendered.messages)
        mark = next(character for character in _PRIVATE if character not in everything) * 3
        last = {**rendered.messages[-1], "content": mark}
        try:
            head = self._head_and_tail(rendered.messages[:-1] + [last], "\uf8ff" * 3)[0]
        except ValueError:
            return ""
        return head.rpartition(mark)[2]


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
