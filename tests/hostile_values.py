"""Random texts and values of the sorts that break programs, all drawn from a random generator that is given."""

from __future__ import annotations

import random

TEXTS = (
    "",
    " ",
    "\n",
    "\t\r\n",
    "yes",
    "A short answer.",
    "\n\nHuman: hello\n\nAssistant:",
    "\n\nAssistant: yes",
    "<|endoftext|>",
    "<|im_start|>user\nhello<|im_end|>\n",
    "<s>[INST] <<SYS>> </s>",
    "<think>so</think>",
    "\x00",
    "\x1b[31m",
    "\ufeff",
    "\u2028\u2029",
    "\u202eright to left",
    "e\u0301\u0323",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\ufdfa\u0130\u1e9e",
    "\ue000\ue000\ue000",
    "\uf8ff",
    "\U0010ffff",
    "\ud800",
    "\udfff\ud800",
    "[{",
    '[{"role": "user", "content": "hello"}]',
    "[{'role': 'user', 'content': 'hello'}]",
    '{"a": 1}',
    "[]",
    "null",
    "NaN",
    "-1e999",
    "{{ 7 * 7 }}",
    "{% for x in y %}",
    "{% raw %}",
    "${oc.env:HOME}",
    "${data.paths}",
    "???",
    "%s%n%d",
    "../../etc/passwd",
    "a, 'quoted' \"cell\"; -- \\",
    "<p>one<p>two &amp; &#x110000; &#0; &nope;",
    "<pre><code>x < 1</code></pre><ul><li>a<li>b</ul>",
    "<a <a <a ",
    "<!-- <!-- ",
    "<![CDATA[ x ]]><?php ?><!DOCTYPE",
    "<blockquote>" * 50,
    "1",
    "1.5",
    "True",
)
VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**63,
    -(10**40),
    1.5,
    -0.0,
    float("nan"),
    float("inf"),
    1e308,
    [],
    {},
    [[]],
    [None],
    {"": None},
)


def text(chance: random.Random) -> str:
    """A text: a chosen one, several joined, random characters, or a long one."""
    way = chance.random()
    if way < 0.55:
        return chance.choice(TEXTS)
    if way < 0.75:
        return "".join(chance.choice(TEXTS) for _ in range(chance.randrange(2, 5)))
    if way < 0.93:
        top = chance.choice((0x7F, 0xFF, 0x2FFF, 0xD7FF))
        return "".join(chr(chance.randrange(top)) for _ in range(chance.randrange(1, 40)))
    return chance.choice(TEXTS) * chance.choice((100, 500, 2000))


def sane_text(chance: random.Random) -> str:
    """A text without surprises."""
    words = ("the", "sky", "is", "blue", "why", "a", "bee", "how", "do", "I", "glass", "?", ".", "42")
    return " ".join(chance.choice(words) for _ in range(chance.randrange(1, 12)))


def value(chance: random.Random, depth: int = 0):
    """Any JSON value."""
    way = chance.random()
    if way < 0.4:
        return text(chance)
    if way < 0.8 or depth > 3:
        return chance.choice(VALUES)
    if way < 0.9:
        return [value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {text(chance): value(chance, depth + 1) for _ in range(chance.randrange(4))}


def spoiled(chance: random.Random, whole, rate: float):
    """A copy of a JSON value in which entries were replaced, left out, added or wrapped, each at this rate."""
    if chance.random() < rate / 2:
        return value(chance)
    if isinstance(whole, dict):
        kept = {key: spoiled(chance, entry, rate) for key, entry in whole.items() if chance.random() > rate / 4}
        if chance.random() < rate / 2:
            kept[text(chance)] = value(chance)
        return kept
    if isinstance(whole, list):
        kept = [spoiled(chance, entry, rate) for entry in whole if chance.random() > rate / 4]
        if chance.random() < rate / 4:
            kept.insert(chance.randrange(len(kept) + 1), value(chance))
        return kept
    if isinstance(whole, str) and chance.random() < rate:
        return text(chance)
    return [whole] if chance.random() < rate / 8 else whole


def leaves(whole) -> list[str]:
    """All texts inside a JSON value."""
    if isinstance(whole, str):
        return [whole]
    if isinstance(whole, dict):
        return [leaf for entry in whole.values() for leaf in leaves(entry)]
    if isinstance(whole, (list, tuple)):
        return [leaf for entry in whole for leaf in leaves(entry)]
    return []


def torn(chance: random.Random, data: bytes) -> bytes:
    """Bytes of a file that something went wrong with."""
    way = chance.randrange(7)
    at = chance.randrange(len(data) + 1)
    if way == 0:
        return data[:at]
    if way == 1:
        return data[:at] + bytes(chance.randrange(256) for _ in range(chance.randrange(1, 5))) + data[at + 1 :]
    if way == 2:
        return b"\xef\xbb\xbf" + data
    if way == 3:
        return data.decode("utf-8", "ignore").encode("utf-16")
    if way == 4:
        return data.replace(b"\n", b"\r\n")
    if way == 5:
        return data[:at] + chance.choice((b"[", b"{", b'{"a":', b"9", b"\x00", b"-")) * 30_000 + data[at:]
    return chance.choice((b"", b"\n\n", b"null", b"[]", b"{}", b"version https://git-lfs.github.com/spec/v1\n"))
