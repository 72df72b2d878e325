"""Hostile chat templates: random Jinja that raises, strips, moves or repeats text, loops or is broken."""

from __future__ import annotations

import random
from pathlib import Path

from hostile_rows import KINDS, answer, conversation, prepare, read_and_check, settings_with, tokenizers
from hostile_values import leaves, sane_text, spoiled, text

CONTENTS = (
    "m['content']",
    "m.content",
    "m['content'] | trim",
    "m['content'].strip()",
    "m['content'] | upper",
    "m['content'][:5]",
    "m['content'].split('</think>')[-1]",
    "m['content'] | replace('a', 'b')",
    "m['content'] | tojson",
    "m['content'] * 2",
    "m['content'] | default('')",
    "m.get('content')",
    "m['nothing']",
    "m['content'] + 1",
    "''",
)
MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|im_end|>\n",
    "<|endoftext|>",
    "{{ eos_token }}",
    "{{ bos_token }}",
    "\n",
    " ",
    "### {{ m['role'] }}:\n",
    "{{ m['role'] }}\n",
    "[INST] ",
    " [/INST]",
)
__all__ = ["make", "prepare"]

TROUBLE = (
    "{{ raise_exception('no') }}",
    "{{ raise_exception('\ud7ff' * 2000) }}",
    "{{ 1 // 0 }}",
    "{{ [][3] }}",
    "{{ undefined_thing }}",
    "{{ undefined_thing.more }}",
    "{{ undefined_call() }}",
    "{{ messages[7]['role'] }}",
    "{{ messages.append(1) }}",
    "{{ messages | length }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ 'x' | nothing }}",
    "{{ {}['a'] }}",
    "{{ 'a' < 1 }}",
    "{{ int('x') }}",
    "{{ ('x' | int) + ('y' | float) }}",
    "{{ strftime_now('%Y') }}",
    "{{ '%d' % 'x' }}",
    "{{ 'x'.encode('ascii').decode('utf-16') }}",
    "{{ '\\ud800' }}",
    "{{ tools | length }}",
    "{{ messages | map(attribute='role') | join }}",
    "{{ messages | tojson }}",
    "{% for i in range(30000) %}x{% endfor %}",
    "{% for i in range(200000) %}{% endfor %}",
    "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ 'ab' * 3000000 }}",
    "{% set m = 1 %}",
    "{% set messages = [] %}",
    "{% set ns = namespace(x=0) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}",
    "{% generation %}x{% endgeneration %}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% break %}",
    "{% endfor %}",
    "{% if %}",
    "{{",
    "{%",
    "{#",
    "}}",
    "{{ '",
    "\x00",
    "\ue000",
)
CONDITIONS = (
    "loop.first",
    "loop.last",
    "loop.index0 % 2 == 0",
    "m['role'] == 'user'",
    "m['role'] == 'assistant'",
    "m['role'] == 'system'",
    "m['role'] not in ['user', 'assistant']",
    "'</think>' in m['content']",
    "messages[0]['role'] == 'system'",
    "(m['role'] == 'user') != (loop.index0 % 2 == 0)",
    "add_generation_prompt",
    "m.tool_calls",
    "loop.nextitem is defined",
)


def piece(chance: random.Random, trouble: float, contents: bool = True, depth: int = 0) -> str:
    """A part of a loop over the messages `m`; contents: it may write one."""
    way = chance.random()
    if way < trouble:
        return chance.choice(TROUBLE)
    if way < 0.45 and contents:
        return "{{ " + (CONTENTS[0] if chance.random() < 0.6 else chance.choice(CONTENTS)) + " }}"
    if way < 0.8 or depth > 2:
        return chance.choice(MARKS)
    inside = piece(chance, trouble, contents, depth + 1)
    other = "{% else %}" + piece(chance, trouble, contents, depth + 1) if chance.random() < 0.4 else ""
    return "{% if " + chance.choice(CONDITIONS) + " %}" + inside + other + "{% endif %}"


def template(chance: random.Random) -> str:
    trouble = chance.choice((0.0, 0.0, 0.05, 0.2))
    often = chance.random() < 0.2  # contents anywhere; else each once, as templates that work have it
    head = chance.choice(("", "", "{{ bos_token }}", "\n", piece(chance, trouble, often)))
    parts = [piece(chance, trouble, often) for _ in range(chance.randrange(1, 5))]
    if not often:
        content = CONTENTS[0] if chance.random() < 0.5 else chance.choice(CONTENTS)
        parts.insert(chance.randrange(len(parts) + 1), "{{ " + content + " }}")
        parts.insert(0, chance.choice(("<|im_start|>{{ m['role'] }}\n", "", "{{ m['role'] }}: ")))
    body = "".join(parts)
    loop = chance.choice(("messages",) * 12 + ("messages[:-1]", "messages | reverse", "messages[1:]"))
    tail = chance.choice(
        (
            "",
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "{{ eos_token }}",
            piece(chance, trouble, often).replace("m[", "messages[0]["),
        )
    )
    whole = head + "{% for m in " + loop + " %}" + body + "{% endfor %}" + tail
    if chance.random() < 0.05:
        at = chance.randrange(len(whole))
        whole = whole[:at] + whole[at + chance.randrange(1, 6) :]
    return whole


def make(chance: random.Random, folder: Path):
    """Conversations under a template of data.chat_template, given as text or as a file."""
    import json

    layout = template(chance)
    rate = chance.choice((0.0, 0.0, 0.1))
    kind = chance.choice(KINDS)
    rows = []
    for _ in range(chance.randrange(1, 5)):
        row = {"prompt": conversation(chance, "user"), "chosen": answer(chance), "rejected": answer(chance)}
        if chance.random() < 0.3:
            row["chosen"][0]["content"] = "<think>" + sane_text(chance) + "</think>" + sane_text(chance)
        if chance.random() < 0.3:
            row["prompt"][-1]["content"] = text(chance)
        rows.append(spoiled(chance, row, rate))
    answers = [
        leaf
        for row in rows
        if isinstance(row, dict)
        for name in ("chosen", "rejected")
        for leaf in leaves(row.get(name))
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = chance.choice(("bytes", "chat", "byte-level", "with BOS", "metaspace"))
    given = layout
    if chance.random() < 0.2 or "{" not in layout:
        (folder / "layout.jinja").write_bytes(layout.encode("utf-8", "surrogatepass"))
        given = "layout.jinja"
    about = f"template {layout!r}, examples of kind {kind}, tokenizer {name!r}"

    def run() -> None:
        config = settings_with(chance, folder, str(path), **{"data.chat_template": given})
        read_and_check(config, tokenizers()[name], kind, [], chance, answers)

    return about, run
