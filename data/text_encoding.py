"""Text and conversations -> token ids, with control tokens only where we put them.

A preference row is full of text that other people wrote. What looks like a control token in it (an end-of-text mark, a
chat marker) is encoded as the plain characters it is; only the chat template's own markers, the tokenizer's own BOS and
the EOS at a response's end become control tokens.
"""

import hashlib
import json
import os
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from data.row_formats import ASSISTANT, HUMAN, PromptGroup

# Private-use characters that stand for text while a template is rendered; picked anew when a text contains them.
_PRIVATE = [chr(code) for code in range(0xE000, 0xF8FF)]


@dataclass
class Layout:
    """A group's texts as they will be encoded: `prompt` is a prefix of each of `fulls`.

    markers: control tokens in these texts are real ones (a rendered conversation), except stand-ins in `stood_for`.
    terminated: the texts end with the turn's own end token, so no EOS is added.
    header: the end of the prompt that truncation keeps; None when it takes another rendering (see `header_of`).
    """

    prompt: str
    fulls: list[str]
    markers: bool = False
    terminated: bool = False
    header: str | None = ""
    stood_for: dict[str, str] = field(default_factory=dict)
    messages: list | None = None


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


class TextEncoder:
    """Encodes with one tokenizer. Raises ValueError for a tokenizer that has no EOS token."""

    def __init__(self, tokenizer, chat_template: str | None = None):
        self.tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no EOS token, so responses could not end; give one that has, with "
                "model.tokenizer_name_or_path"
            )
        self.eos_id = int(tokenizer.eos_token_id)
        template = chat_template or getattr(tokenizer, "chat_template", None)
        if isinstance(template, dict):  # named templates; 'default' is the one for plain chat
            template = template.get("default", next(iter(template.values()), None))
        self.template = template
        self.prefix = self._added_prefix()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        control = {token.content: int(number) for number, token in added.items() if token.special}
        control.update(zip(tokenizer.all_special_tokens, map(int, tokenizer.all_special_ids)))
        self.control = {text: number for text, number in control.items() if text}
        self._strips = {token.content: (token.lstrip, token.rstrip) for token in added.values()}
        longest_first = sorted(self.control, key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, longest_first)))
        self._forbidden = set(self.control.values()) - {tokenizer.unk_token_id}
        self.notices: list[str] = []
        self.counts: Counter = Counter()

    @cached_property
    def _serialized(self) -> str | None:
        """The fast tokenizer as JSON, None for one written in Python."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return None if backend is None else backend.to_str()

    @property
    def is_fast(self) -> bool:
        return self._serialized is not None

    def __getstate__(self):
        """Workers get the tokenizer and make their own copies of what was derived from it."""
        return {key: value for key, value in vars(self).items() if key not in ("_plain", "_marked", "_inner")}

    def _fast(self, serialized: str, encode_special_tokens: bool):
        """A private copy of the fast tokenizer that does, or does not, treat control tokens in a text as plain text."""
        from tokenizers import Tokenizer

        copy = Tokenizer.from_str(serialized)
        copy.no_padding()
        copy.no_truncation()
        copy.encode_special_tokens = encode_special_tokens
        return copy

    @cached_property
    def _plain(self):
        return self._fast(self._serialized, True) if self._serialized else None

    @cached_property
    def _marked(self):
        return self._fast(self._serialized, False) if self._serialized else None

    @cached_property
    def _inner(self):
        """For text after a control token: a word mark that only a text's first word gets must not appear there."""
        if not self._serialized:
            return None
        return self._fast(self._serialized.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"'), True)

    def _added_prefix(self) -> list[int]:
        """The ids (a BOS, mostly) that the tokenizer itself puts before a text; each at most once."""
        bare = list(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        dressed = list(self.tokenizer("a", add_special_tokens=True)["input_ids"])
        for start in range(len(dressed) - len(bare) + 1):
            if dressed[start : start + len(bare)] == bare:
                return list(dict.fromkeys(int(number) for number in dressed[:start]))
        return []

    def digest(self) -> str:
        """Changes when any text could get other ids."""
        if self._serialized:
            # What stands before the vocabulary is padding and truncation, which change with every call.
            vocabulary = self._serialized[self._serialized.index('"added_tokens"') :]
        else:
            settings = {
                key: str(value)
                for key, value in getattr(self.tokenizer, "init_kwargs", {}).items()
                if not key.endswith(("file", "path"))
            }
            vocabulary = json.dumps([sorted(self.tokenizer.get_vocab().items()), settings])
        parts = [
            "" if self._serialized else type(self.tokenizer).__name__,
            vocabulary,
            self.prefix,
            self.eos_id,
            self.template,
            sorted(self.control.items()),
        ]
        return hashlib.blake2b(json.dumps(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()

    # ---- text -> ids -------------------------------------------------------------------------------------------

    def encode_plain(self, texts: list[str]) -> list[list[int]]:
        """Ids of whole texts, without BOS or EOS; nothing in them is a control token."""
        if self.is_fast:
            encoded = [each.ids for each in self._plain.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            encoded = [self._slow_ids(text, plain=True) for text in texts]
        for index, ids in enumerate(encoded):
            if self._spells_control(texts[index], ids):
                encoded[index] = self._broken_up(texts[index], at_start=True)
        return encoded

    def _slow_ids(self, text: str, plain: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain))

    def _spells_control(self, text: str, ids: list[int]) -> bool:
        """Whether control-like words of a text got their control ids, because they are words of the vocabulary too."""
        return not self._forbidden.isdisjoint(ids) and self._control_text.search(text) is not None

    def _broken_up(self, text: str, at_start: bool) -> list[int]:
        """Ids of a text in which each control-like word is cut after its first character."""
        cuts = [0] + [match.start() + 1 for match in self._control_text.finditer(text)] + [len(text)]
        ids = []
        for start, end in zip(cuts, cuts[1:]):
            if not self.is_fast:
                ids += self._slow_ids(text[start:end], plain=True)
            elif start < end:
                first = at_start and start == 0
                ids += (self._plain if first else self._inner).encode(text[start:end], add_special_tokens=False).ids
        return ids

    def encode_marked(self, texts: list[str]) -> list[list[int]]:
        """Ids of rendered conversations: control tokens written in these texts are control tokens."""
        if self.is_fast:
            return [each.ids for each in self._marked.encode_batch_fast(texts, add_special_tokens=False)]
        return [self._slow_ids(text, plain=False) for text in texts]

    def encode_stood_for(self, text: str, stood_for: dict[str, str]) -> list[int]:
        """Ids of a rendered conversation in which stand-ins take the place of control-like text in the messages."""
        ids: list[int] = []
        runs = re.split(f"({self._control_text.pattern})", text)
        for index, run in enumerate(runs):
            if index % 2:
                ids.append(self.control[run])
                continue
            if index > 0 and self._strips.get(runs[index - 1], (False, False))[1]:
                run = run.lstrip()
            if index + 1 < len(runs) and self._strips.get(runs[index + 1], (False, False))[0]:
                run = run.rstrip()
            for stand_in, original in stood_for.items():
                run = run.replace(stand_in, original)
            if not run:
                continue
            if self.is_fast and index > 0:
                encoded = self._inner.encode(run, add_special_tokens=False).ids
                ids += self._broken_up(run, at_start=False) if self._spells_control(run, encoded) else encoded
            else:
                ids += self.encode_plain([run])[0]
        return ids

    def encode_layouts(self, layouts: list[Layout]) -> list[list[list[int]]]:
        """For each layout the ids of its prompt and of each full text, in one batch of each kind."""
        plain = [text for each in layouts if not each.markers for text in (each.prompt, *each.fulls)]
        marked = [
            text for each in layouts if each.markers and not each.stood_for for text in (each.prompt, *each.fulls)
        ]
        plain_ids = iter(self.encode_plain(plain) if plain else ())
        marked_ids = iter(self.encode_marked(marked) if marked else ())
        result = []
        for each in layouts:
            texts = (each.prompt, *each.fulls)
            if each.stood_for:
                result.append([self.encode_stood_for(text, each.stood_for) for text in texts])
            else:
                source = marked_ids if each.markers else plain_ids
                result.append([next(source) for _ in texts])
        return result

    # ---- groups -> texts ---------------------------------------------------------------------------------------

    def lay_out(self, group: PromptGroup, responses: list[str]) -> Layout:
        """The texts of a group. Raises ValueError when the chat template refuses the conversation."""
        conversation = isinstance(group.prompt, list)
        contents = [message["content"] for message in group.prompt] if conversation else [group.prompt]
        lookalikes = sum(bool(self._control_text.search(text)) for text in contents + responses)
        if lookalikes:
            self.counts["texts_with_control_lookalikes"] += lookalikes
        if conversation:
            if self.template:
                return self._rendered(group.prompt, responses, bool(lookalikes))
            self._notice(
                "the tokenizer has no chat template: conversations are laid out as "
                r"'\n\nHuman: ... \n\nAssistant:'; data.chat_template gives another layout"
            )
            prompt, responses = dialogue_text(group.prompt), [" " + text.lstrip(" ") for text in responses]
            return Layout(prompt, [prompt + text for text in responses], header=ASSISTANT)
        return Layout(group.prompt, [group.prompt + text for text in responses], header=group.header)

    def _notice(self, text: str):
        if text not in self.notices:
            self.notices.append(text)

    def _rendered(self, messages: list[dict], responses: list[str], protect: bool) -> Layout:
        everything = "".join(message["content"] for message in messages) + "".join(responses)
        free = (character for character in _PRIVATE if character not in everything)
        stood_for: dict[str, str] = {}
        if protect:
            # Stand-ins keep a template's own handling of the text around them (trimming, splitting) as it is.
            known: dict[str, str] = {}

            def stand_in(match):
                if match.group() not in known:
                    known[match.group()] = next(free)
                return known[match.group()]

            messages = [
                {**message, "content": self._control_text.sub(stand_in, message["content"])} for message in messages
            ]
            responses = [self._control_text.sub(stand_in, text) for text in responses]
            stood_for = {character: text for text, character in known.items()}
        mark = next(free) * 3
        head, tail, messages = self._head_and_tail(messages, mark)
        end = self._control_text.search(tail)
        kept_tail = tail[: end.end()] if end else ""
        prompt, bodies = head, []
        for response in responses:
            text = self._render(messages + [{"role": "assistant", "content": response}])
            if not text.endswith(tail):
                raise ValueError(
                    "the chat template ends this assistant turn otherwise than others, so its end cannot "
                    "be told; give another template with data.chat_template"
                )
            body = text[: len(text) - len(tail)]
            # A template may look into the answer (reasoning blocks, say): what all answers share is the prompt.
            if not body.startswith(prompt):
                prompt = os.path.commonprefix([prompt, body])
            bodies.append(body)
        return Layout(
            prompt,
            [body + kept_tail if len(body) > len(prompt) else body for body in bodies],
            True,
            bool(end),
            None,
            stood_for,
            messages,
        )

    def _head_and_tail(self, messages, mark: str):
        """What the template writes before and after the assistant's answer; the messages, changed if they had to be."""
        from jinja2 import TemplateError

        try:
            text = self._render(messages + [{"role": "assistant", "content": mark}])
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

    def _render(self, messages) -> str:
        return self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, tokenize=False, add_generation_prompt=False
        )

    def header_tokens(self, layout: Layout, prompt_ids: list[int]) -> int:
        """How many tokens at the prompt's end open the assistant's turn."""
        header = layout.header
        if header is None:  # what the template writes after the last message's words
            everything = layout.prompt + "".join(message["content"] for message in layout.messages)
            mark = next(character for character in _PRIVATE if character not in everything) * 3
            last = {**layout.messages[-1], "content": mark}
            try:
                head = self._head_and_tail(layout.messages[:-1] + [last], "\uf8ff" * 3)[0]
            except ValueError:
                head = ""
            header = head.rpartition(mark)[2]
        if not header or not layout.prompt.endswith(header):
            return 0
        before = layout.prompt[: len(layout.prompt) - len(header)]
        ids = self.encode_layouts([Layout(before, [], layout.markers, stood_for=layout.stood_for)])[0][0]
        return len(prompt_ids) - common_length(ids, prompt_ids)


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


def common_length(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    if right[: len(left)] == left:
        return len(left)
    for index, (one, other) in enumerate(zip(left, right)):
        if one != other:
            return index
    return min(len(left), len(right))


@contextmanager
def tokenizer_threads(workers: int | None):
    """Lets a fast tokenizer use that many threads: all cores when None, only the calling thread when 0 or 1."""
    wanted = {"TOKENIZERS_PARALLELISM": "false" if workers in (0, 1) else "true"}
    if workers and workers > 1:
        wanted["RAYON_NUM_THREADS"] = str(workers)  # read when the tokenizers' thread pool is first used
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
