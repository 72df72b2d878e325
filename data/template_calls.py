"""One chat template, called so that whatever it does wrong is a ValueError, and with a fixed date."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path

import private_apis
from data.answers import strings_in
from data.files import check_regular

# CPU seconds that one rendering may take; a conversation of 100,000 tokens takes a few milliseconds.
PATIENCE = 10.0
# Characters that a template may write beside the messages' own; the longest ones in use write some thousand.
MOST_ADDED = 1_000_000
# Code points that no text uses, for it is up to each program what they mean; then the planes without characters.
_UNASSIGNED = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE), range(0x40000, 0xDFFFE))


class TemplateRefusal(ValueError):
    """The template itself raised an error, as templates do for roles that they do not know."""


def read_chat_template(value: str | None) -> str | None:
    """data.chat_template: a template, or the path of a file that holds one. Raises ValueError when it is neither."""
    if not value:
        return None
    if "{" in value:
        return value
    path = Path(value).expanduser()
    try:
        if path.exists():
            check_regular(path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data.chat_template={value}: neither a template (it has no braces) nor a readable file ({error})"
        ) from error


def unused_characters(*texts: str) -> Iterator[str]:
    """Characters that occur in none of the texts, private-use ones first. Raises ValueError when there is none left."""
    used = {character for text in texts if not text.isascii() for character in text}
    for codes in _UNASSIGNED:
        for code in codes:
            if chr(code) not in used:
                yield chr(code)
    raise ValueError("the conversation has every private-use character, so that none is left to mark its parts with")


class ChatTemplate:
    """The chat template of a tokenizer, or the one given; `text` is None where there is neither.

    given: a template instead of the tokenizer's. date: YYYY-MM-DD, what `strftime_now` is in the template; None: today.
    """

    def __init__(self, tokenizer, given: str | None = None, date: str | None = None):
        self.tokenizer = tokenizer
        text = given or getattr(tokenizer, "chat_template", None)
        if isinstance(text, dict):  # named templates; 'default' is the one for plain chat
            text = text.get("default", next(iter(text.values()), None))
        self.text: str | None = text or None
        # As far as can be seen without rendering; a template that only mentions the name is rendered all the same.
        self.has_generation_prompt = "add_generation_prompt" in (text or "")
        self.date = date if text and "strftime_now" in text else None
        self._left_out: dict[tuple[tuple[str, ...], bool, bool], frozenset[int]] = {}
        self._tools: list[dict] | None = None

    @contextmanager
    def with_tools(self, tools: list[dict]) -> Iterator[None]:
        """In the block, the template writes these functions with every conversation."""
        before, self._tools = self._tools, tools or None
        try:
            yield
        finally:
            self._tools = before

    def render(self, messages: list[dict], generation_prompt: bool = False) -> str:
        """The text of a conversation; generation_prompt: followed by what opens the assistant's turn.

        Raises:
            TemplateRefusal: the template refuses the conversation.
            ValueError: it fails in another way, or does not end.
        """
        from jinja2 import TemplateError

        roles = f"roles {[message['role'] for message in messages]}"
        try:
            with _cpu_time_limit(PATIENCE):
                text = self._call(messages, generation_prompt)
            text.encode("utf-8")
        except TemplateError as error:
            raise TemplateRefusal(f"the chat template refuses this conversation ({roles}): {error}") from error
        except Exception as error:  # a template is a program, which can fail in any way
            raise ValueError(
                f"the chat template fails on this conversation ({roles}): {type(error).__name__}: {error}; "
                "give another with data.chat_template"
            ) from error
        own = sum(map(len, strings_in([messages, self._tools or []])))
        if len(text) > 4 * own + MOST_ADDED:
            raise ValueError(
                f"the chat template makes {len(text):,} characters of a conversation of {own:,} ({roles}); give "
                "another with data.chat_template"
            )
        return text

    def _call(self, messages, generation_prompt: bool) -> str:
        if self.date and self.text:
            compiled = private_apis.compiled_chat_template(self.text)
            if compiled is not None:
                now = datetime.fromisoformat(self.date)
                return compiled.render(
                    messages=[dict(message) for message in messages],
                    tools=self._tools,
                    documents=None,
                    add_generation_prompt=generation_prompt,
                    strftime_now=now.strftime,
                    **self.tokenizer.special_tokens_map,
                )
        return self.tokenizer.apply_chat_template(
            messages,
            tools=self._tools,
            chat_template=self.text,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )

    def around_answer(self, messages: list[dict], mark: str) -> tuple[str, str]:
        """What the template writes before and after the assistant's answer to `messages`; mark: unused characters.

        Raises:
            ValueError: it does not write the answer, or more than once.
        """
        text = self.render([*messages, {"role": "assistant", "content": mark}])
        head, found, tail = text.rpartition(mark)
        if not found:
            raise ValueError(
                "the chat template does not write the assistant's answer; give another with data.chat_template"
            )
        if mark in head:  # what lies between the two would be trained on as if it were the answer
            raise ValueError(
                "the chat template writes the assistant's answer more than once; give another with data.chat_template"
            )
        return head, tail

    def turn_end(self, tail: str, control_text: re.Pattern) -> str:
        """What ends the assistant's turn, out of what the template writes after its last answer; "" for no token.

        Some turns end with several control tokens (Command R7B's answer and turn), and some templates write one more at
        the end of the text (Phi-3's): the turn ends where the user's next one would follow.

        Args:
            control_text: matches control tokens.
        """
        ends = [match.end() for match in control_text.finditer(tail)]
        within = [end for end in ends if end <= len(os.path.commonprefix([tail, self._before_next_turn]))]
        return tail[: (within or [*ends, 0][:1])[-1]]

    @cached_property
    def _before_next_turn(self) -> str:
        """What the template writes between an answer and the user's next message; "" where it fails."""
        free = unused_characters(self.text or "")
        marks = [next(free) * 3 for _ in range(3)]
        roles = "user", "assistant", "user"
        try:
            text = self.render([{"role": role, "content": mark} for role, mark in zip(roles, marks)])
        except ValueError:
            return ""
        return text.partition(marks[1])[2].partition(marks[2])[0]

    def left_out(self, roles: tuple[str, ...], generation_prompt: bool) -> frozenset[int]:
        """The numbers of the messages that are not written at all, in conversations with these roles: in what is
        rendered for generation, or before an answer."""
        key = roles, generation_prompt, self._tools is not None
        if key not in self._left_out:
            if len(self._left_out) > 4096:
                self._left_out.clear()
            self._left_out[key] = self._find_left_out(roles, generation_prompt)
        return self._left_out[key]

    def _find_left_out(self, roles: tuple[str, ...], generation_prompt: bool) -> frozenset[int]:
        free = unused_characters(self.text or "")
        marks = [next(free) * 3 for _ in roles]
        marked = [{"role": role, "content": mark} for role, mark in zip(roles, marks)]
        try:
            if generation_prompt:
                text = self.render(marked, generation_prompt=True)
            else:
                text = self.around_answer(marked, next(free) * 3)[0]
        except ValueError:
            return frozenset()
        return frozenset(number for number, mark in enumerate(marks) if mark not in text)

    def turn_marks(self, tokens: Collection[str]) -> set[str]:
        """Those of `tokens` that open a user's turn in this template, or end the assistant's.

        Others, such as <think>, are words of a message that the model writes itself.
        """
        if not tokens or not self.text:
            return set()
        free = unused_characters(self.text, *tokens)
        user, answer = next(free) * 3, next(free) * 3
        try:
            head, tail = self.around_answer([{"role": "user", "content": user}], answer)
        except ValueError:
            return set()
        before = head.partition(user)[0]
        return {token for token in tokens if token in before or token in tail}


@contextmanager
def _cpu_time_limit(seconds: float):
    """Raises TimeoutError in the block once this thread has computed for so long. In the main thread only."""
    if (
        threading.current_thread() is not threading.main_thread()
        or not hasattr(signal, "setitimer")
        or signal.getsignal(signal.SIGVTALRM) != signal.SIG_DFL
    ):
        yield
        return
    start = time.thread_time()

    def check(*_):  # the timer counts all threads of the process
        if time.thread_time() - start > seconds:
            raise TimeoutError(f"it did not end within {seconds:.0f} seconds")

    signal.signal(signal.SIGVTALRM, check)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
