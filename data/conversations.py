"""Conversations as a chat template lays them out: the prompt, each answer after it, and what in it is scored."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from data.answers import Answer, missing_in, names_of, plain, strings_in, with_strings
from data.dialogues import user_message
from data.template_calls import ChatTemplate, TemplateRefusal, unused_characters

_SHORT = 8  # characters: texts below may stand in a rendering by chance


@dataclass
class RenderedGroup:
    """A group's texts as they will be encoded: `prompt` is a prefix of each of `full_texts`.

    control_tokens: control tokens in these texts are real ones.
    from_template: a chat template wrote these texts, with the BOS that they need.
    placeholders: character -> the control-like text of a message that it takes the place of.
    terminated: the texts end with the turn's own end token, so no EOS is added; None: those that end with a control
    token do.
    header: the end of the prompt that truncation keeps; None: ask `ConversationRenderer.header`, which renders again.
    messages: the conversation that was rendered. generation_prompt: the prompt is what was rendered for generation.
    unscored: of each full text, (start, stop) of its characters that are not scored; empty: everything is.
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
    unscored: list[list[tuple[int, int]]] = field(default_factory=list)


class ConversationRenderer:
    """Renders conversations with one chat template.

    control_text: matches all texts that look like control tokens of the tokenizer. eos: the tokenizer's EOS token.
    counts: takes what happened on the way; notice: is called with what the user should see once.
    """

    def __init__(
        self, template: ChatTemplate, control_text: re.Pattern, eos: str, counts: Counter, notice: Callable[[str], None]
    ):
        self.template, self.control_text, self.eos = template, control_text, eos
        self.counts, self.notice = counts, notice

    def render_prefill(self, messages: list[dict], answers: list[Answer], tools: list[dict], protect: bool):
        """Renders a conversation whose last message, the assistant's, each answer goes on with."""
        *before, last = messages
        begun = last["content"]
        if not all(isinstance(answer, str) for answer in answers):
            raise ValueError(
                "prompt ends with an assistant message, which only a response that is text can go on with; this one "
                "has tool calls, reasoning or several turns"
            )
        if begun in answers:
            raise ValueError(
                f"the response {begun[:60]!r} is the assistant message that prompt ends with, once more: a response "
                "goes on with that message; leave it out of the prompt, or out of the response"
            )
        rendered = self.render(before, [f"{begun}{answer}" for answer in answers], tools, protect)
        placeholder_of = {text: character for character, text in rendered.placeholders.items()}
        begun = self.control_text.sub(lambda match: placeholder_of[match.group()], begun) if protect else begun
        prompt = rendered.prompt + begun
        if not all(text.startswith(prompt) for text in rendered.full_texts):
            raise ValueError(
                f"the chat template does not write the beginning of the answer {last['content'][:60]!r} as it is, so "
                "that a response cannot go on with it; leave blanks around it out, or give another template with "
                "data.chat_template"
            )
        return replace(rendered, prompt=prompt, header=self.header(rendered) + begun)

    def render(self, messages: list[dict], answers: list[Answer], tools: list[dict], protect: bool) -> RenderedGroup:
        """Renders a conversation with each answer. protect: the texts hold control-like text."""
        free = unused_characters(self.template.text or "", *strings_in([messages, answers, tools]))
        originals: dict[str, str] = {}  # placeholder -> text
        if protect:
            # One character each keeps a template's own handling of the text around it (trimming, splitting) as it is.
            placeholders: dict[str, str] = {}  # text -> placeholder

            def placeholder(match):
                if match.group() not in placeholders:
                    placeholders[match.group()] = next(free)
                return placeholders[match.group()]

            def protected(value):
                return with_strings(value, lambda text: self.control_text.sub(placeholder, text))

            messages, answers, tools = protected(messages), protected(answers), protected(tools)
            originals = {character: text for text, character in placeholders.items()}
        with self.template.with_tools(tools):
            rendered = self._rendered(messages, answers, tools, free)
        return replace(rendered, placeholders=originals)

    def _rendered(
        self, messages: list[dict], answers: list[Answer], tools: list[dict], free: Iterator[str]
    ) -> RenderedGroup:
        mark = next(free) * 3
        head, tail, messages = self._head_and_tail(messages, mark)
        if lacking := _unwritten_functions(self.template, messages, tools, head, mark):
            raise ValueError(
                f"the chat template does not write the function {lacking[0]} of column tools: give a template that "
                "does, with data.chat_template, or leave the column out"
            )
        kept_tail = self.template.turn_end(tail, self.control_text)
        if not kept_tail and tail.strip():
            self.notice(
                f"the chat template ends an answer with {tail.strip()!r}, which is no control token of this tokenizer: "
                f"responses end with its EOS {self.eos} instead"
            )
        unscored: list[list[tuple[int, int]]] = []
        bodies = []
        for answer in answers:
            if isinstance(answer, str):
                body, spans = self._body(messages, head, tail, answer), []
            else:
                body, spans = self._body_of_turns(messages, answer, tail, len(kept_tail))
            bodies.append(body)
            unscored.append(spans)
        prompt, bodies, generation_prompt = self._split(messages, head, bodies, mark, next(free) * 3)
        self._check_messages(messages, prompt, generation_prompt)
        return RenderedGroup(
            prompt,
            [body + kept_tail if len(body) > len(prompt) else body for body in bodies],
            control_tokens=True,
            from_template=True,
            terminated=bool(kept_tail),
            header=None,
            messages=messages,
            generation_prompt=generation_prompt,
            unscored=unscored if any(unscored) else [],
        )

    def _head_and_tail(self, messages, mark: str):
        """What the template writes before and after the assistant's answer; the messages, changed if they had to be."""
        try:
            return *self.template.around_answer(messages, mark), messages
        except TemplateRefusal:
            if not (len(messages) > 1 and messages[0]["role"] == "system" and messages[1]["role"] == "user"):
                raise
        folded = messages[0]["content"] + "\n\n" + messages[1]["content"]
        result = self._head_and_tail([user_message(folded), *messages[2:]], mark)
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

    def _body_of_turns(self, messages: list[dict], turns: list[dict], tail: str, kept: int):
        """(the conversation up to the end of an answer that is more than text, what in it is not scored).

        kept: characters of `tail`, what the template writes after an answer, that belong to the answer.
        """
        whole = self.template.render([*messages, *turns])
        if not whole.endswith(tail):
            raise ValueError(
                f"the chat template ends this answer otherwise than one of text, with {whole[-40:]!r} and not "
                f"{tail[-40:]!r}; give another with data.chat_template"
            )
        own = [turn for turn in turns if turn["role"] == "assistant"]
        without = (
            _text_or_nothing(self.template, [*messages, *plain(turns)]) if any(len(turn) > 2 for turn in own) else ""
        )
        lacking = missing_in(own, whole, without, reasoning=True)
        if lacking:
            raise ValueError(
                f"the chat template does not write {lacking} of the answer: give a template that does, with "
                "data.chat_template, or leave it out of the data"
            )
        spans = []
        for number, turn in enumerate(turns):
            if turn["role"] == "assistant" or turns[number - 1]["role"] != "assistant":
                continue
            following = next(k for k in range(number, len(turns)) if turns[k]["role"] == "assistant")
            until = self.template.render([*messages, *turns[:number]])
            end = len(until) - len(tail) + kept
            start = self.template.render([*messages, *turns[:following]], generation_prompt=True)
            if not (until.endswith(tail) and whole.startswith(until[:end]) and whole.startswith(start)):
                raise ValueError(
                    "the chat template lays turns out otherwise when others follow, so that the tokens of an answer of "
                    "several turns cannot be told apart: give the earlier turns in the prompt, or another template "
                    "with data.chat_template"
                )
            spans.append((end, len(start)))
        return whole[: len(whole) - len(tail)], spans

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
        more = [message for message in messages if len(message) > 2]
        without = _text_or_nothing(self.template, plain(messages), generation_prompt) if more else ""
        if more and (lacking := missing_in(more, prompt, without, reasoning=False)):
            raise ValueError(
                f"the chat template does not write {lacking} of an earlier message: give a template that does, with "
                "data.chat_template, or leave it out of the data"
            )
        # Templates leave out the reasoning of earlier turns, as the models are trained and used.
        if more and missing_in(more, prompt, without, reasoning=True):
            self.counts["earlier_reasoning_left_out"] += 1
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


def _unwritten_functions(
    template: ChatTemplate, messages: list[dict], tools: list[dict], head: str, mark: str
) -> list[str]:
    """The names of functions that `head`, the text up to the answer, has no more often than without tools."""
    if not tools:
        return []
    with template.with_tools([]):
        without = _text_or_nothing(template, [*messages, {"role": "assistant", "content": mark}]).partition(mark)[0]
    return [name for name in names_of(tools) if head.count(name) <= without.count(name)]


def _text_or_nothing(template: ChatTemplate, messages: list[dict], generation_prompt: bool = False) -> str:
    try:
        return template.render(messages, generation_prompt)
    except ValueError:  # of a conversation that the template need not be able to write
        return ""


def _without_blanks(text: str) -> str:
    return "".join(text.split())
