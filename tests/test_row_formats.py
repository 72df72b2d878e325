"""Rows of every supported format become prompt groups, or an error that names the place and the fault."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import A, H, chat, config, hh, only, read, write

from data.format_detection import CANONICAL_COLUMNS
from data.sources import check_dataset_names

ROOT = Path(__file__).resolve().parent.parent
REAL_HH = ROOT.parent / "shared" / "data" / "hh-rlhf"


# ---- formats -----------------------------------------------------------------------------------------------------

PAIR = ([" good", " bad"], [(0, 1)], " good")


@pytest.mark.parametrize("file", ["d.jsonl", "d.json", "d.csv", "d.parquet", "d.jsonl.gz"])
@pytest.mark.parametrize(
    "row, prompt, rest",
    [
        ({"prompt": "Q:", "chosen": " good", "rejected": " bad"}, "Q:", PAIR),
        ({"chosen": f"{H} x{A} good", "rejected": f"{H} x{A} bad"}, f"{H} x{A}", PAIR),
        ({"prompt": f"{H} x{A}", "chosen": f"{H} x{A} good", "rejected": f"{H} x{A} bad"}, f"{H} x{A}", PAIR),
        (
            {"chosen": chat("x", " good", system="be kind"), "rejected": chat("x", " bad", system="be kind")},
            chat("x", system="be kind"),
            PAIR,
        ),
        (
            {
                "prompt": chat("x"),
                "chosen": [{"role": "assistant", "content": " good"}],
                "rejected": [{"role": "assistant", "content": " bad"}],
            },
            chat("x"),
            PAIR,
        ),
        ({"prompt": chat("x", "y", "z"), "chosen": " good", "rejected": " bad"}, chat("x", "y", "z"), PAIR),
        ({"prompt": "x", "chosen": chat("x", " good"), "rejected": chat("x", " bad")}, chat("x"), PAIR),
        (
            {
                "prompt": "x",
                "chosen": [{"role": "assistant", "content": " good"}],
                "rejected": [{"role": "assistant", "content": " bad"}],
            },
            chat("x"),
            PAIR,
        ),
        (
            {"prompt": "Q:", "responses": ["a", "b", "a"], "pairs": [[0, 1], [1, 2]], "sft_target": "c"},
            "Q:",
            (["a", "b"], [(0, 1), (1, 0)], "c"),
        ),
    ],
)
def test_every_format_in_every_file(tmp_path, file, row, prompt, rest):
    group = only(write(tmp_path / file, [row]), tmp_path)
    assert (group.prompt, (group.responses, group.pairs, group.sft_target)) == (prompt, rest)


@pytest.mark.parametrize(
    "row, prompt, target",
    [
        ({"messages": chat("a", "b", "c", "d", system="s")}, chat("a", "b", "c", system="s"), "d"),
        ({"prompt": "Q:", "completion": " yes"}, "Q:", " yes"),
        ({"prompt": chat("q"), "completion": [{"role": "assistant", "content": "yes"}]}, chat("q"), "yes"),
        ({"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "yes"}]}, chat("q"), "yes"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "q"}]},
                    {"role": "assistant", "content": "yes"},
                ]
            },
            chat("q"),
            "yes",
        ),
        ({"prompt": "Q:", "chosen": " good", "rejected": " bad"}, "Q:", " good"),
    ],
)
def test_sft_formats(tmp_path, row, prompt, target):
    path = write(tmp_path / "d.jsonl", [row])
    group = only(path, tmp_path, sft=True)
    assert (group.prompt, group.sft_target) == (prompt, target)
    if "chosen" not in row:
        with pytest.raises(ValueError, match="loss=sft only"):
            read(path, tmp_path, sft=False)


def test_columns_by_other_names(tmp_path):
    rows = [{"question": "Q:", "good": "a", "bad": "b", "prompt": "something else"}]
    path = write(tmp_path / "d.jsonl", rows)
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    assert only(path, tmp_path, columns=columns).prompt == "Q:"
    assert only(path, tmp_path, columns={str(path): columns}).responses == ["a", "b"]
    with pytest.raises(ValueError, match="'qestion'.*columns of .* are \\['bad', 'good', 'prompt', 'question'\\]"):
        read(path, tmp_path, columns=columns | {"prompt": "qestion"})
    with pytest.raises(ValueError, match="data.columns.promt"):
        read(path, tmp_path, columns={"promt": "question"})
    with pytest.raises(ValueError, match="data.columns.nosuch: no such data set"):
        check_dataset_names([str(path)], config(tmp_path, columns={"nosuch": columns}))


@pytest.mark.parametrize(
    "row, complaint",
    [
        ({"chosen": "just words", "rejected": "other words"}, "chosen has no .*where its prompt ends cannot be known"),
        ({"prompt": "Q:", "chosen": 5, "rejected": "x"}, "chosen must be text, not a number"),
        ({"prompt": "Q:", "chosen": None, "rejected": "x"}, "chosen must be text, not nothing"),
        ({"prompt": "Q:", "chosen": float("nan"), "rejected": "x"}, "chosen must be text, not NaN"),
        ({"prompt": "Q:", "chosen": "x"}, "column 'rejected' is missing"),
        ({"question": "Q:", "prompt": None, "chosen": "x", "rejected": "y"}, "prompt must be text, not nothing"),
        ({"prompt": "Q:", "chosen": "\ud800x", "rejected": "x"}, "chosen has a lone surrogate"),
        ({"prompt": "Q:", "chosen": chat("a", "b"), "rejected": "x"}, "chosen is a list .*both must be text, or both"),
        ({"prompt": "Q:", "chosen": chat("a"), "rejected": chat("b")}, "chosen must end with an assistant message"),
        ({"prompt": chat("a", " "), "chosen": "x", "rejected": "y"}, "prompt ends with an assistant message that"),
        (
            {"prompt": "Q:", "chosen": [{"role": "assistant"}], "rejected": [{"role": "assistant", "content": "x"}]},
            r"chosen\[0\]: content must be text, not nothing",
        ),
    ],
)
def test_malformed_rows_name_file_line_and_fault(tmp_path, row, complaint):
    fine = {"prompt": "Q0", "chosen": "x", "rejected": "y"}
    if "prompt" not in row:
        fine = hh(f"{H} q{A}", "x", "y")
    path = write(tmp_path / "data.jsonl", [fine, row])
    with pytest.raises(ValueError, match=f"data.jsonl, line 2: {complaint}"):
        read(path, tmp_path)


@pytest.mark.parametrize(
    "pairs, complaint",
    [
        ([[0, 2]], "index 2 is out of range"),
        ([[0, -1]], "index -1 is out"),
        ([[0]], "must be two indices"),
        ([[0, "1"]], "must be two indices"),
        ("x", "pairs must be a list"),
        ([[True, False]], "must be two indices"),
    ],
)
def test_pair_indices_are_checked(tmp_path, pairs, complaint):
    path = write(tmp_path / "d.jsonl", [{"prompt": "q", "responses": ["a", "b"], "pairs": pairs, "sft_target": "a"}])
    with pytest.raises(ValueError, match=complaint):
        read(path, tmp_path)


# ---- fuzz --------------------------------------------------------------------------------------------------------

NASTY = st.sampled_from(
    ["", " ", "\x00", "<|endoftext|>", "</s>", "\ud800", "\ufeff", "\u2028", f"{H} a{A} b", "x" * 70_000]
)
TEXT = st.one_of(st.text(max_size=20), NASTY)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
ROLE = st.sampled_from(["user", "assistant", "system"])
MESSAGE = st.fixed_dictionaries({"role": ROLE | JSON, "content": TEXT | JSON})
COLUMN = st.sampled_from(CANONICAL_COLUMNS + ["other"])
PAIRS = st.lists(st.lists(st.integers(-1, 3), max_size=3), max_size=3)
VALUE = st.one_of(TEXT, JSON, st.lists(MESSAGE, max_size=3), PAIRS)
SHAPES = st.one_of(
    st.dictionaries(COLUMN, VALUE, max_size=5),
    st.fixed_dictionaries({"prompt": VALUE, "chosen": VALUE, "rejected": VALUE}),
    st.fixed_dictionaries({"prompt": TEXT, "responses": st.lists(TEXT, max_size=3) | VALUE, "pairs": VALUE}),
    st.fixed_dictionaries(
        {
            "history": TEXT,
            "human_ref_A": TEXT,
            "human_ref_B": VALUE,
            "labels": st.integers(0, 1) | JSON,
            "score_A": st.integers() | st.floats() | JSON,
            "score_B": st.floats() | st.integers(),
        }
    ),
    st.fixed_dictionaries(
        {
            "question": TEXT,
            "answers": st.lists(
                st.fixed_dictionaries({"text": TEXT, "pm_score": st.floats() | st.integers() | JSON}), max_size=3
            )
            | VALUE,
        }
    ),
)


def rows_or_value_error(path, tmp_path, sft):
    """Reads a file of unknown content; whatever it holds, sound groups or a ValueError must come out."""
    try:
        groups, _ = read(path, tmp_path, sft=sft)
    except ValueError as error:
        str(error).encode("utf-8")  # a message that can be printed
        return
    for group in groups:
        group.key().encode("utf-8")
        assert len(set(group.responses)) == len(group.responses) and all(text.strip() for text in group.responses)
        assert all(0 <= a < len(group.responses) and 0 <= b < len(group.responses) and a != b for a, b in group.pairs)


FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@FUZZ
@given(rows=st.lists(SHAPES, max_size=3), kind=st.sampled_from([".jsonl", ".json", ".jsonl.gz"]), sft=st.booleans())
def test_fuzz_rows(tmp_path_factory, rows, kind, sft):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    rows_or_value_error(write(tmp_path / f"d{kind}", rows), tmp_path, sft)


@FUZZ
@given(
    data=st.one_of(
        st.binary(max_size=60),
        st.text(max_size=40).map(str.encode),
        TEXT.map(
            lambda text: json.dumps({"prompt": "q", "completion": text}, ensure_ascii=False).encode(
                "utf-16", "surrogatepass"
            )
        ),
        JSON.map(lambda value: json.dumps(value).encode()),
    ),
    kind=st.sampled_from([".jsonl", ".json", ".jsonl.gz", ".csv", ".parquet", ".arrow"]),
    squeeze=st.booleans(),
)
def test_fuzz_bytes(tmp_path_factory, data, kind, squeeze):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    (tmp_path / f"d{kind}").write_bytes(gzip.compress(data)[: -squeeze or None] if kind.endswith("gz") else data)
    rows_or_value_error(tmp_path / f"d{kind}", tmp_path, True)


def test_messages_about_long_names_stay_short(tmp_path):
    long = "x" * 30_000
    for row in (
        {long: "a"},
        {"prompt": "a", "chosen": [{"role": long, "content": "b"}], "rejected": "c"},
        {f"{n}" * 50: 1 for n in range(99)},
    ):
        with pytest.raises(ValueError) as caught:
            read(write(tmp_path / "d.jsonl", [row]), tmp_path)
        assert len(str(caught.value)) < 2_500
