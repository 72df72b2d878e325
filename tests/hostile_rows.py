"""Hostile rows in files of all formats, read and tokenised as a run does; what comes through must be the rows' text."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import random
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
from hostile_values import leaves, sane_text, spoiled, text, torn, value

SUFFIXES = (".jsonl", ".jsonl", ".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".arrow", ".ndjson")
KINDS = ("pairs", "pairs", "responses", "responses", "unpaired", "group")


# ---- Rows -----------------------------------------------------------------------------------------------------------


def conversation(chance: random.Random, ends: str) -> list[dict]:
    roles = ["system"] * (chance.random() < 0.2) + ["user", "assistant"] * chance.randrange(1, 3)
    if ends == "user":
        roles = roles[:-1]
    turns = [{"role": role, "content": sane_text(chance)} for role in roles]
    if chance.random() < 0.1:
        turns = [
            {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]}
            for m in turns
        ]
    return turns


def answer(chance: random.Random) -> list[dict]:
    return [{"role": "assistant", "content": sane_text(chance)}]


def groups(chance):
    count = chance.randrange(1, 4)
    pairs = [[chance.randrange(count), chance.randrange(count)] for _ in range(chance.randrange(4))]
    responses = [sane_text(chance) + str(number) for number in range(count)]
    return {"prompt": sane_text(chance), "responses": responses, "pairs": pairs, "sft_target": responses[0]}


def stack_exchange(chance):
    html = lambda: f"<p>{sane_text(chance)}</p><pre><code>{sane_text(chance)}</code></pre>"  # noqa: E731
    answers = [{"text": html(), "pm_score": chance.randrange(5)} for _ in range(chance.randrange(1, 4))]
    return {"question": html(), "answers": answers}


def dialogue(chance):
    start = f"\n\nHuman: {sane_text(chance)}\n\nAssistant:"
    return {"chosen": f"{start} {sane_text(chance)}", "rejected": f"{start} {sane_text(chance)}"}


def implicit_chat(chance):
    start = conversation(chance, "user")
    return {"chosen": start + answer(chance), "rejected": start + answer(chance)}


ROWS = {
    "pairs": lambda c: {"prompt": sane_text(c), "chosen": sane_text(c), "rejected": sane_text(c)},
    "chat pairs": lambda c: {"prompt": conversation(c, "user"), "chosen": answer(c), "rejected": answer(c)},
    "half chat": lambda c: {"prompt": sane_text(c), "chosen": answer(c), "rejected": answer(c)},
    "implicit chat": implicit_chat,
    "dialogues": dialogue,
    "groups": groups,
    "messages": lambda c: {"messages": conversation(c, "assistant")},
    "completions": lambda c: {"prompt": sane_text(c), "completion": sane_text(c)},
    "labelled": lambda c: {"prompt": sane_text(c), "completion": sane_text(c), "label": c.random() < 0.5},
    "shp": lambda c: {
        "history": sane_text(c),
        "human_ref_A": sane_text(c),
        "human_ref_B": sane_text(c),
        "labels": c.randrange(2),
        "score_A": c.randrange(9),
        "score_B": c.randrange(9),
    },
    "stack exchange": stack_exchange,
    "any": lambda c: {text(c): value(c) for _ in range(c.randrange(4))},
}
RESPONSES_ONLY = ("messages", "completions")
EXTRA = ("system", "input", "tools", "images", "weight", "label", "reasoning_content", "score", "id", "prompt")


def rows_of(chance: random.Random) -> tuple[str, list]:
    """(name of the layout, rows): most of them right, some not."""
    layout = chance.choice(list(ROWS))
    rate = chance.choice((0.0, 0.02, 0.1, 0.4))
    rows = [ROWS[layout](chance) for _ in range(chance.randrange(1, 9))]
    if chance.random() < 0.3:
        for name in chance.sample(EXTRA, 2):
            entry = value(chance)
            for row in rows:
                row.setdefault(name, entry if chance.random() < 0.8 else value(chance))
    if chance.random() < 0.2:
        rows += [dict(chance.choice(rows)) for _ in range(3)]
    # The first row settles the format: spoiling it in each case would leave the others untried.
    return layout, [
        row if not number and chance.random() < 0.7 else spoiled(chance, row, rate) for number, row in enumerate(rows)
    ]


def write(chance: random.Random, path: Path, rows: list) -> tuple[Path, list]:
    """The rows in a file of the format that the name asks for, torn at times; as .jsonl where it cannot hold them.

    Returns: the file, and the rows that can be compared with what is read from it (none of a torn file).
    """
    suffix = "".join(path.suffixes)
    try:
        data = as_bytes(chance, suffix, rows)
    except Exception:  # a value that the format has no place for
        path = path.with_name(path.name.removesuffix(suffix) + ".jsonl")
        suffix, data = ".jsonl", as_bytes(chance, ".jsonl", rows)
    whole = data
    if chance.random() < 0.12:
        data = torn(chance, data)
    is_whole = data == whole
    if suffix.endswith(".gz"):
        data = gzip.compress(data, 1)
        if chance.random() < 0.2:
            data = torn(chance, data)
    path.write_bytes(data)
    if suffix == ".csv":
        rows = [{name: as_cell(cell) for name, cell in row.items()} for row in rows if isinstance(row, dict)]
    return path, rows if is_whole else []


def as_cell(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def as_bytes(chance: random.Random, suffix: str, rows: list) -> bytes:
    dump = functools.partial(json.dumps, ensure_ascii=chance.random() < 0.5)
    # Lone surrogates can be spelled in JSON; written as they are, they are not UTF-8, which settles the whole file.
    errors = "surrogatepass" if chance.random() < 0.1 else "replace"
    if suffix.removesuffix(".gz") in (".jsonl", ".ndjson"):
        return "".join(dump(row) + "\n" for row in rows).encode("utf-8", errors)
    if suffix == ".json":
        whole = chance.choice((rows, rows, {"data": rows}, {"rows": rows, "version": 1}))
        return dump(whole, indent=chance.choice((None, 1))).encode("utf-8", errors)
    if suffix == ".csv":
        stream = io.StringIO()
        writer = csv.writer(stream)
        names = list(rows[0])
        writer.writerow(names)
        for row in rows:
            cells = [row.get(name, "") for name in names]
            writer.writerow([cell if isinstance(cell, str) else dump(cell) for cell in cells])
        return stream.getvalue().encode("utf-8", errors)
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    if chance.random() < 0.2:
        stamps = pyarrow.array([chance.randrange(-(2**62), 2**62) for _ in rows], pyarrow.timestamp("s"))
        table = table.append_column(chance.choice(("when", "id", "score")), stamps)
    sink = pyarrow.BufferOutputStream()
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, sink)
    else:
        with pyarrow.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table)
    return sink.getvalue().to_pybytes()


# ---- Settings and tokenizers ----------------------------------------------------------------------------------------


@functools.cache
def tokenizers() -> dict:
    """Small tokenizers of several kinds, made once a process."""
    from small_tokenizers import CHATML, TOKENIZERS, byte_level

    from modeling.loading import byte_tokenizer

    return {
        "bytes": byte_tokenizer(),
        "chat": byte_level("<|bos|>", True, template=CHATML),
        **{name: make() for name, make in TOKENIZERS.items()},
    }


@functools.cache
def base_settings():
    from conftest import compose_config

    import settings

    config = compose_config("model=tiny", "loss=dpo", "device=cpu", "debug=true", "data.num_workers=1")
    return settings.finalize(config)


def settings_with(chance: random.Random, folder: Path, name: str, **more):
    """Checked settings of a run on one data set, with lengths and cuts drawn."""
    import settings

    length = chance.choice((2, 8, 24, 64, 512, 512, 512))
    changes = {
        "datasets": [name],
        "data.cache_dir": str(folder / "tokens"),
        "local_dirs": [str(folder)],
        "max_length": length,
        "max_prompt_length": chance.choice((1, min(4, length - 1), length // 2, length // 2)),
        "data.truncation": chance.choice((None, "keep_end", "keep_start")),
        "data.on_overlong": chance.choice(("truncate",) * 8 + ("drop", "error")),
        "data.test_fraction": chance.choice((0.05, 0.3, 0.9)),
    }
    config = settings.replace(base_settings(), changes | more)
    settings.check(config, device_count=0)
    return config


# ---- Cases ----------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Make what all cases share."""
    import pyarrow.parquet  # noqa: F401

    import data.batching
    import data.tokenization  # noqa: F401

    tokenizers(), base_settings()


def make(chance: random.Random, folder: Path):
    """A file of rows, and reading it with one of the tokenizers for one of the losses."""
    layout, rows = rows_of(chance)
    path, rows = write(chance, folder / f"rows{chance.choice(SUFFIXES)}", rows)
    kind, name = chance.choice(KINDS), chance.choice(list(tokenizers()))
    if layout in RESPONSES_ONLY and chance.random() < 0.9:
        kind = "responses"
    about = f"{layout} in {path.name}, examples of kind {kind}, tokenizer {name!r}"

    def run() -> None:
        config = settings_with(chance, folder, str(path))
        read_and_check(config, tokenizers()[name], kind, rows, chance)

    return about, run


def read_and_check(config, tokenizer, kind: str, rows: list, chance: random.Random, answers: Sequence[str] = ()):
    """Both splits as tokens, checked, and once more from the cache.

    rows: what the file holds; empty where that cannot be known. answers: the responses, laid out by a chat template.
    """
    from data.tokenization import load_tokenized

    (name,) = config.datasets
    for split in ("train", "test"):
        dataset = load_tokenized(name, split, tokenizer, config, kind)
        check_dataset(dataset, tokenizer, config, rows, answers)
        if split == "train":
            check_steps(dataset, chance)
        if chance.random() < 0.2:
            again = load_tokenized(name, split, tokenizer, config, kind)
            assert again.key == dataset.key and again.counts == dataset.counts, "the cache gives something else"
    return None


def check_dataset(dataset, tokenizer, config, rows: list, answers: Sequence[str]) -> None:
    """What holds of every tokenised data set: nothing empty, nothing too long, nothing but the rows' own text."""
    spelled = spelling_of(tokenizer)
    texts = set(encoded(rows)) if spelled and rows else None
    if texts and dataset.counts.get("merged_boundaries"):  # a response may then begin with the end of its prompt
        texts |= {one + other for row in rows for one, other in permutations(set(encoded(row)), 2)}
    laid_out = [bare(answer.encode("utf-8", "surrogatepass")) for answer in answers] if spelled else []
    control = set(map(int, tokenizer.all_special_ids))
    n_tokens, flags = len(tokenizer), iter(dataset.truncated.tolist())
    assert int(dataset.segment_starts[-1]) == len(dataset.tokens), "tokens that belong to nothing"
    for group in range(dataset.n_groups):
        prompt = dataset.prompt(group).tolist()
        assert prompt, "an empty prompt"
        for index in range(dataset.n_group_responses(group)):
            response, truncated = dataset.response(group, index).tolist(), next(flags)
            assert response, "an empty response"
            assert len(prompt) + len(response) <= config.max_length, "longer than max_length"
            assert 0 <= min(prompt + response) and max(prompt + response) < n_tokens, "no token of the vocabulary"
            assert truncated or response[-1] in control, f"a whole response without an end: {response[-5:]}"
            body = spelled(response if truncated else response[:-1]) if spelled else b""
            if laid_out and not truncated:
                assert any(each in bare(body) for each in laid_out), f"a response without its answer: {body[:200]!r}"
            if texts is None:
                continue
            inside = [token for token in response[:-1] if token in control and token != tokenizer.unk_token_id]
            assert not inside, f"control tokens {inside} inside a response"
            assert any(contains(each, body) for each in texts), f"a response that no row has: {body[:200]!r}"
    examples = dataset.examples
    if len(examples):
        assert examples[:, 0].min() >= 0 and examples[:, 0].max() < dataset.n_groups
        for group, *responses in examples.tolist():
            assert max(responses) < dataset.n_group_responses(group)


def encoded(rows) -> list[bytes]:
    """All texts in the rows, as UTF-8; lone surrogates also as what `as_bytes` may have put in their place."""
    return [leaf.encode("utf-8", errors) for leaf in leaves(rows) for errors in ("surrogatepass", "replace")]


def bare(text: bytes) -> bytes:
    """Without blanks of any kind, which templates add and trim."""
    return "".join(text.decode("utf-8", "replace").split()).encode()


def contains(whole: bytes, body: bytes) -> bool:
    """Whether a text of a row holds a response; one that was laid out anew differs by blanks at its ends."""
    return body.strip() in whole or body.strip() in b" ".join(whole.split()) or html_like(whole)


def html_like(whole: bytes) -> bool:
    """HTML becomes text of other words, which tests of html_text.py look at."""
    return b"<" in whole or b"&" in whole or b'[{"' in whole or b"[{'" in whole


def spelling_of(tokenizer):
    """The bytes that tokens spell, for tokenizers whose tokens are bytes; else None."""
    import re

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or "ByteLevel" not in type(backend.pre_tokenizer).__name__:
        return None
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}

    def spelled(ids: list[int]) -> bytes:
        tokens = tokenizer.convert_ids_to_tokens(ids)
        return bytes(byte_of[c] for token in tokens if not re.fullmatch(r"<\|\w+\|>", token) for c in token)

    return spelled


def check_steps(dataset, chance: random.Random) -> None:
    """Every example of an epoch is in one step, as often as it should, and no loss mask is empty."""
    from data.batching import pack
    from data.sampler import BatchSampler, DatasetMixture

    if not len(dataset):
        return
    ranks, size = chance.choice((1, 2)), chance.choice((1, 3, 8))
    shuffle, budget = chance.choice(("pairs", "prompts")), chance.choice((1, 100, 10_000))
    seen = 0
    for rank in range(ranks):
        sampler = BatchSampler(
            DatasetMixture([dataset]),
            size,
            seed=0,
            shuffle=shuffle,
            make_batch=lambda units: pack(units) if units else None,
            rank=rank,
            n_ranks=ranks,
            budget=budget,
        )
        for number in range(sampler.n_steps):
            for batch in sampler.step(number).micro_batches:
                if batch is not None:
                    seen += len(batch.pairs)
                    assert (np.asarray(batch.lengths) > 0).all(), "a response without a scored token"
    assert seen == len(dataset), f"{seen} of {len(dataset)} examples are in the steps of an epoch"
