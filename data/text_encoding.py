"""Text -> token ids, with control tokens only where we put them.

A preference row is full of text that other people wrote. What looks like a control token in it (an end-of-text mark, a
chat marker) is encoded as the plain characters it is; only the chat template's own markers, the tokenizer's own BOS and
the EOS at a response's end become control tokens. transformers' tokenizers would take such text for control tokens.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager
from functools import cached_property

from atomic_files import checksum
from data.chat_templates import ChatRenderer
from data.conversations import RenderedGroup
from data.options import DataSection
from data.template_calls import ChatTemplate, read_chat_template, unused_characters


class TextEncoder:
    """Encodes with one tokenizer. Raises ValueError for a tokenizer that has no EOS token."""

    def __init__(
        self,
        tokenizer,
        chat_template: str | None = None,
        *,
        allow_control_tokens: bool = False,
        apply_template: bool = False,
        template_date: str | None = None,
    ):
        self.tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no EOS token, so responses could not end; give one that has, with "
                "model.tokenizer_name_or_path"
            )
        self.eos_id = int(tokenizer.eos_token_id)
        self.prefix = self._added_prefix()
        template = ChatTemplate(tokenizer, chat_template, template_date)
        self.control = control_tokens(tokenizer, template)
        added = _added_tokens(tokenizer)
        self._strips = {token.content: (token.lstrip, token.rstrip) for token in added.values()}
        self._control_text = _any_of(self.control)
        self._forbidden = set(self.control.values()) - {tokenizer.unk_token_id}
        self.renderer = ChatRenderer(
            template, self._control_text, tokenizer.eos_token, allow_control_tokens, apply_template
        )

    @classmethod
    def of_options(cls, tokenizer, data: DataSection) -> TextEncoder:
        """The encoder that the keys under `data` ask for."""
        return cls(
            tokenizer,
            read_chat_template(data.chat_template),
            allow_control_tokens=data.allow_control_tokens,
            apply_template=data.apply_template,
            template_date=data.template_date,
        )

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
            self.renderer.template.text,
            self.renderer.template.date,
            self.renderer.allow_control_tokens,
            self.renderer.apply_template,
            sorted(self.control.items()),
        ]
        return checksum(json.dumps(parts).encode(errors="surrogatepass"))

    def ends(self, ids: list[int]) -> bool:
        """Whether the last token is a control token that nobody writes on after; a BOS is none."""
        last = ids[-1] if ids else None
        return last == self.eos_id or (last in self._forbidden and last != self.tokenizer.bos_token_id)

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

    def encode_with_placeholders(self, text: str, placeholders: dict[str, str]) -> list[int]:
        """Ids of a rendered conversation: control tokens are real ones, placeholders become the texts they replaced."""
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
            for placeholder, original in placeholders.items():
                run = run.replace(placeholder, original)
            if not run:
                continue
            if self.is_fast and index > 0:
                encoded = self._inner.encode(run, add_special_tokens=False).ids
                ids += self._broken_up(run, at_start=False) if self._spells_control(run, encoded) else encoded
            else:
                ids += self.encode_plain([run])[0]
        return ids

    def encode_groups(self, groups: list[RenderedGroup]) -> list[list[list[int]]]:
        """For each group the ids of its prompt and of each full text, in one batch of each kind."""
        plain = [text for group in groups if not group.control_tokens for text in (group.prompt, *group.full_texts)]
        marked = [
            text
            for group in groups
            if group.control_tokens and not group.placeholders
            for text in (group.prompt, *group.full_texts)
        ]
        plain_ids = iter(self.encode_plain(plain) if plain else ())
        marked_ids = iter(self.encode_marked(marked) if marked else ())
        result = []
        for group in groups:
            texts = (group.prompt, *group.full_texts)
            if group.placeholders:
                result.append([self.encode_with_placeholders(text, group.placeholders) for text in texts])
            else:
                source = marked_ids if group.control_tokens else plain_ids
                result.append([next(source) for _ in texts])
        return result

    def unscored_tokens(self, group: RenderedGroup, fulls: list[list[int]]) -> list[list[tuple[int, int]]]:
        """Of each full text, (start, stop) of the tokens in `group.unscored`; [] where everything is scored."""
        if not group.unscored:
            return []

        def place(text: str, end: int, ids: list[int]) -> int:
            part = RenderedGroup(text[:end], [], group.control_tokens, placeholders=group.placeholders)
            return common_length(self.encode_groups([part])[0][0], ids)

        return [
            [(place(text, start, ids), place(text, stop, ids)) for start, stop in spans]
            for text, ids, spans in zip(group.full_texts, fulls, group.unscored, strict=True)
        ]

    def header_tokens(self, group: RenderedGroup, prompt_ids: list[int]) -> int:
        """How many tokens at the prompt's end open the assistant's turn."""
        header = self.renderer.conversations.header(group)
        if not header or not group.prompt.endswith(header):
            return 0
        before = group.prompt[: len(group.prompt) - len(header)]
        rendered = RenderedGroup(before, [], group.control_tokens, placeholders=group.placeholders)
        return len(prompt_ids) - common_length(self.encode_groups([rendered])[0][0], prompt_ids)


def _added_tokens(tokenizer) -> dict:
    """{id: token with its settings} of the tokens that are no part of the vocabulary that was learnt."""
    return getattr(tokenizer, "added_tokens_decoder", {})


def _any_of(texts) -> re.Pattern:
    """Matches any of the texts, the longest first; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def control_tokens(tokenizer, template: ChatTemplate) -> dict[str, int]:
    """{text: id} of the tokens that only the template, the tokenizer or we may write: the tokenizer's special ones, and
    those that open and end turns in the template though they were added as ordinary ones (special=False)."""
    added = {token.content: (int(number), token.special) for number, token in _added_tokens(tokenizer).items()}
    control = {text: number for text, (number, special) in added.items() if special}
    control.update(zip(tokenizer.all_special_tokens, map(int, tokenizer.all_special_ids)))
    turns = template.turn_marks([text for text in added if text and text not in control])
    control.update({text: added[text][0] for text in turns})
    return {text: number for text, number in control.items() if text}


def end_of_turn_id(tokenizer) -> int | None:
    """The id of the token that ends the assistant's turn in the tokenizer's chat template; None if there is none."""
    template = ChatTemplate(tokenizer)
    if not template.text or not hasattr(tokenizer, "apply_chat_template"):
        return None
    control = control_tokens(tokenizer, template)
    free = unused_characters(template.text, *control)
    try:
        _, tail = template.around_answer([{"role": "user", "content": next(free) * 3}], next(free) * 3)
    except ValueError:
        return None
    ends = _any_of(control).findall(template.turn_end(tail, _any_of(control)))
    return control[ends[-1]] if ends else None


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
