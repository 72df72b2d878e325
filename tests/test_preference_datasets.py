"""Sources and formats: from rows that people have to prompt groups, or to an error that says where and what."""

import csv
import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import preference_datasets
from data.row_formats import CANONICAL_COLUMNS, PromptGroup
from data.sources import check_dataset_names, get_dataset, open_source
from preference_datasets import register_dataset

ROOT = Path(__file__).resolve().parent.parent
REAL_HH = ROOT.parent / "shared" / "data" / "hh-rlhf"
H, A = "\n\nHuman:", "\n\nAssistant:"


def hh(prompt, chosen, rejected):
    return {"chosen": prompt + chosen, "rejected": prompt + rejected}


def write(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=1))
    elif name.endswith(".csv"):
        with open(path, "w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(
                {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
                for row in rows
            )
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def config(tmp_path, **data):
    return {"data": {"cache_dir": str(tmp_path / "cache"), "num_workers": 1, **data}}


def read(path, tmp_path, split="train", sft=False, name=None, **data):
    """(list of groups, counts) of a local path; everything goes to train unless a fraction is given."""
    data.setdefault("test_fraction", 0.0)
    if name:
        data["paths"] = {name: str(path)}
    source = open_source(name or str(path), split, config(tmp_path, **data), sft)
    return list(source.groups()), source.counts


def only(path, tmp_path, **options) -> PromptGroup:
    groups, _ = read(path, tmp_path, **options)
    assert len(groups) == 1
    return groups[0]


def chat(*contents, system=None):
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


# ---- hh ----------------------------------------------------------------------------------------------------------


def test_hh_splits_at_the_last_assistant_turn_and_counts_what_it_leaves_out(tmp_path):
    two_turns = f"{H} hi{A} hello{H} how are you?{A}"
    rows = [
        hh(two_turns, " fine", " go away"),
        hh(f"{H} one{A}", " same", " same"),
        hh(f"{H} two{A}", " ", " words"),
        {"chosen": f"{H} hi{A} a good start{H} go on{A} yes", "rejected": f"{H} hi{A} a bad start{H} go on{A} no"},
        {"chosen": f"{H} a{A} yes", "rejected": f"{H} a{A} no{H} b{A} c"},
    ]
    groups, counts = read(write(tmp_path / "d" / "train.jsonl", rows), tmp_path, name="hh")
    assert [(g.prompt, g.responses, g.pairs, g.sft_target) for g in groups] == [
        (two_turns, [" fine", " go away"], [(0, 1)], " fine")
    ]
    assert (counts["rows"], counts["groups"]) == (5, 1)
    assert (counts["dropped_identical"], counts["dropped_empty"], counts["dropped_diverged"]) == (1, 1, 2)


def test_rows_of_one_prompt_become_one_group_with_each_text_once(tmp_path):
    rows = [hh(f"{H} q{A}", " best", " bad"), hh(f"{H} other{A}", " x", " y"), hh(f"{H} q{A}", " good", " bad")]
    groups, counts = read(write(tmp_path / "train.jsonl", rows), tmp_path, name="hh")
    merged = next(g for g in groups if g.prompt == f"{H} q{A}")
    assert merged.responses == [" best", " bad", " good"] and merged.pairs == [(0, 1), (2, 1)]
    assert merged.sft_target == " best" and counts["merged_rows"] == 1 and len(groups) == 2 and merged.row == 1


@pytest.mark.skipif(not REAL_HH.is_dir(), reason="the real HH rows are not here")
def test_real_hh_rows(tmp_path):
    groups, counts = read(REAL_HH, tmp_path, name="hh")
    _, test_counts = read(REAL_HH, tmp_path, split="test", name="hh")
    list(open_source("hh", "test", config(tmp_path, paths={"hh": str(REAL_HH)})).groups())
    assert counts["rows"] == 2000 and test_counts["rows"] == 312
    assert counts["dropped_diverged"] + test_counts["dropped_diverged"] == 4
    assert counts["dropped_empty"] + test_counts["dropped_empty"] == 4
    assert counts["merged_rows"] + test_counts["merged_rows"] == 2
    assert all(g.prompt.startswith(H) and g.prompt.endswith(A) and g.header == A for g in groups)
    with gzip.open(REAL_HH / "train.jsonl.gz") as stream:
        whole = {(row["chosen"], row["rejected"]) for row in map(json.loads, stream)}
    for group in groups:
        for chosen, rejected in group.pairs:
            assert (group.prompt + group.responses[chosen], group.prompt + group.responses[rejected]) in whole


# ---- shp ---------------------------------------------------------------------------------------------------------


def shp(history, a, b, score_a, score_b, label):
    return {
        "history": history,
        "human_ref_A": a,
        "human_ref_B": b,
        "score_A": score_a,
        "score_B": score_b,
        "labels": label,
        "domain": "askbaking",
    }


def test_shp_keeps_ratios_of_two_and_survives_zero_scores(tmp_path):
    rows = [
        shp("q", "a", "b", 10, 5, 1),
        shp("q", "b", "c", 5, 9, 0),
        shp("q", "c", "d", 9, 30, 0),
        shp("zero", "a", "b", 0, 3, 0),
        shp("none", "a", "b", 0, 0, 1),
        shp("down", "a", "b", -3, -1, 0),
        shp("half", "a", "b", 3.0, -2, 1),
    ]
    groups, counts = read(write(tmp_path / "train.json", rows), tmp_path, name="shp")
    by_prompt = {group.prompt: group for group in groups}
    assert set(by_prompt) == {f"{H} {text}{A}" for text in ("q", "zero", "half")}
    q = by_prompt[f"{H} q{A}"]
    assert q.responses == [" a", " b", " d", " c"] or q.responses == [" a", " b", " c", " d"]
    assert {(q.responses[c], q.responses[r]) for c, r in q.pairs} == {(" a", " b"), (" d", " c")}
    assert q.sft_target == " d"  # the highest score of all its rows
    assert by_prompt[f"{H} zero{A}"].pairs == [(0, 1)] and by_prompt[f"{H} zero{A}"].responses == [" b", " a"]
    assert counts["dropped_tied"] == 3


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"score_A": float("nan")}, "score_A must be a finite number"),
        ({"score_B": "many"}, "score_B must be a number"),
        ({"labels": 2}, "labels must be 0 or 1"),
        ({"history": None}, "history must be text, not nothing"),
    ],
)
def test_shp_malformed(tmp_path, change, complaint):
    path = write(tmp_path / "train.jsonl", [shp("ok", "a", "b", 4, 1, 1), shp("q", "a", "b", 4, 1, 1) | change])
    with pytest.raises(ValueError, match=f"train.jsonl, line 2: .*{complaint}"):
        read(path, tmp_path, name="shp")


# ---- stackexchange -----------------------------------------------------------------------------------------------


def answers(*pairs):
    return [
        {"answer_id": number, "text": text, "pm_score": score, "selected": False}
        for number, (text, score) in enumerate(pairs)
    ]


def test_se_pairs_differ_in_score_and_equal_texts_are_one_response(tmp_path):
    row = {
        "qid": 1,
        "question": "<p>Why?</p>",
        "answers": answers(("<p>A</p>", 3), ("B", 3), ("C", 5), ("<b>A</b>", 7), ("<!-- -->", 9)),
    }
    group = only(write(tmp_path / "train.parquet", [row]), tmp_path, name="se", split="test")
    assert group.prompt == f"{H} Why?{A}" and group.responses == [" A", " B", " C"]
    assert sorted(group.pairs) == [(0, 1), (0, 2), (2, 1)]
    assert group.sft_target == " A"
    tied = {"qid": 1, "question": "q", "answers": answers(("x", 2), ("y", 2))}
    group = only(write(tmp_path / "tied" / "train.jsonl", [tied]), tmp_path, name="se", split="test")
    assert group.pairs == [] and group.dropped == {"dropped_tied": 1}


def test_se_test_split_is_the_reference_one(tmp_path):
    import numpy as np

    rows = [{"qid": n, "question": f"q{n}", "answers": answers(("x", 1), ("y", 2))} for n in range(300)]
    path = write(tmp_path / "data" / "site" / "part.parquet", rows)
    test = {g.prompt for g in read(path.parent.parent, tmp_path, split="test", name="se")[0]}
    train = {g.prompt for g in read(path.parent.parent, tmp_path, split="train", name="se")[0]}
    expected = np.random.default_rng(42).permutation(300)[:3]  # what Dataset.shuffle(seed=42) does
    assert test == {f"{H} q{n}{A}" for n in expected} and len(train) == 297 and not test & train


def test_se_shuffle_is_that_of_the_datasets_library():
    datasets = pytest.importorskip("datasets")
    import numpy as np

    shuffled = datasets.Dataset.from_dict({"n": list(range(500))}).shuffle(seed=42)
    assert list(shuffled["n"]) == np.random.default_rng(42).permutation(500).tolist()


@pytest.mark.parametrize(
    "html, text",
    [
        (
            "<p>Use <code>a &lt; b</code> or see <a href='http://x.y/?q=1'>the <em>manual</em></a>.</p>",
            "Use <code>a < b</code> or see the manual.",
        ),
        (
            "<p>one</p>\n\n<pre><code>if x:\n    y()\n</code></pre>\n\n<p>two</p>",
            "one\n\n<code>if x:\n    y()</code>\n\ntwo",
        ),
        ("<ul>\n<li>first</li>\n<li><p>second</p><ul><li>inner</li></ul></li>\n</ul>", "- first\n- second\n  - inner"),
        ("<ol><li>a</li><li>b</li></ol>", "1. a\n2. b"),
        ("<ul>loose<ul><li>nested</li></ul></ul>", "loose\n  - nested"),
        ("<blockquote><p>quoted</p><p>twice</p></blockquote>said he", "> quoted\n>\n> twice\n\nsaid he"),
        ("<p>a<!-- hidden --><br>b</p><hr/><script>alert(1)</script><h2>Head</h2>", "a\nb\n\nHead"),
        ("5 &gt; 3 &amp; 2", "5 > 3 & 2"),
        ("plain", "plain"),
        ("", ""),
        ("<p>unclosed <b>bold", "unclosed bold"),
        ("<p>keep  <code>two  blanks</code>  here</p>", "keep <code>two  blanks</code> here"),
    ],
)
def test_html_to_text(html, text):
    from data.html_text import html_to_text

    assert html_to_text(html) == text


def test_html_nested_without_end_is_a_value_error_or_text():
    from data.html_text import html_to_text

    try:
        assert "deep" in html_to_text("<div>" * 5000 + "deep")
    except ValueError as error:
        assert "nested" in str(error)


def test_worker_processes_give_what_one_process_gives(tmp_path):
    rows = [{"question": f"<p>q{n}</p>", "answers": answers((f"<b>x{n}</b>", 1), ("y", 2))} for n in range(1300)]
    path = write(tmp_path / "train.jsonl", rows)
    alone = read(path, tmp_path, num_workers=1)[0]
    assert read(path, tmp_path, num_workers=2)[0] == alone and len(alone) == 1300
    rows[1290]["answers"][0]["pm_score"] = None
    with pytest.raises(ValueError, match="line 1291: .*pm_score must be a number"):
        read(write(path, rows), tmp_path, num_workers=2)


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


def test_a_saved_datasets_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"prompt": ["a", "b"], "chosen": ["x", "x"], "rejected": ["y", "y"]}
    one = datasets.Dataset.from_dict(rows)
    one.save_to_disk(tmp_path / "one")
    assert len(read(tmp_path / "one", tmp_path)[0]) == 2
    datasets.DatasetDict(train=one, test=one.select([0])).save_to_disk(tmp_path / "both")
    assert len(read(tmp_path / "both", tmp_path)[0]) == 2
    assert [g.prompt for g in read(tmp_path / "both", tmp_path, split="test")[0]] == ["a"]
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    state["_data_files"][0]["filename"] = "../both/train/data-00000-of-00001.arrow"
    (tmp_path / "one" / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="not a file of this folder"):
        read(tmp_path / "one", tmp_path)


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
        ({"prompt": chat("a", "b"), "chosen": "x", "rejected": "y"}, "prompt ends with an assistant message"),
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


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("d.jsonl", b"", "is empty"),
        ("d.json", b"[]", "is empty"),
        ("d.csv", b"", "is empty"),
        ("d.jsonl", b'{"prompt": "a"', "d.jsonl, line 1: invalid JSON"),
        ("d.jsonl", b"[1]\n", "d.jsonl, line 1: expected a JSON object"),
        ("d.jsonl", b'{"prompt": "\xff"}', "d.jsonl, line 1: not UTF-8"),
        ("d.jsonl", '{"prompt": "a"}'.encode("utf-16"), "d.jsonl, line 1: not UTF-8"),
        ("d.json", b'[{"prompt": "a", "completion": "b"}, 2]', "d.json, row 2: expected an object"),
        ("d.json", b'"text"', "expected an array of objects"),
        ("d.json", b"[" * 100_000, "d.json: invalid JSON"),
        ("d.jsonl.gz", b"no gzip", "broken gzip file"),
        ("d.jsonl.gz", gzip.compress(b"{}" * 1000)[:20], "broken gzip file"),
        ("d.parquet", b"PAR1 no parquet", "cannot be read as parquet"),
        ("d.csv", b"prompt,chosen\na,b,c\n", "line 2: 3 cells under 2 columns"),
        ("d.csv", b"prompt,prompt\na,b\n", "two columns of the same name"),
        ("d.csv", b'prompt,chosen,rejected\na,"b,c\n', "invalid CSV"),
        ("d.jsonl", b'{"text": "a"}', r"columns \['text'\] fit no known format"),
        ("d.jsonl", b'{"prompt": "a", "completion": "b", "label": true}', "unpaired preferences"),
    ],
)
def test_broken_files(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        read(tmp_path / name, tmp_path, sft=True)


def test_byte_order_marks_and_lines_in_a_json_file_are_fine(tmp_path):
    row = json.dumps({"prompt": "Q\u2028:", "chosen": "a", "rejected": "b"}, ensure_ascii=False).encode()
    for name, data in (
        ("a.jsonl", b"\xef\xbb\xbf" + row + b"\r\n\r\n"),
        ("b.json", row + b"\n"),
        ("c.json", b'{"data": [' + row + b"]}"),
        ("d.json", row + b"\n" + row.replace(b"Q", b"R")),
    ):
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name, tmp_path)[0][0].prompt == "Q\u2028:"


# ---- splits ------------------------------------------------------------------------------------------------------


def test_held_out_rows_go_by_prompt_and_stay_where_they_are(tmp_path):
    rows = [{"prompt": f"p{n % 100}", "chosen": f"a{n}", "rejected": "b"} for n in range(300)]
    path = write(tmp_path / "d.jsonl", rows)
    train = {g.prompt for g in read(path, tmp_path, test_fraction=0.2)[0]}
    test = {g.prompt for g in read(path, tmp_path, split="test", test_fraction=0.2)[0]}
    assert train | test == {f"p{n}" for n in range(100)} and not train & test and 8 <= len(test) <= 35
    write(path, rows[150:] + rows[:150] + [{"prompt": "new", "chosen": "a", "rejected": "b"}])
    assert test <= {g.prompt for g in read(path, tmp_path, split="test", test_fraction=0.2)[0]} <= test | {"new"}


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_tiny_files_leave_something_to_train_on(tmp_path, prompts):
    path = write(tmp_path / "d.jsonl", [{"prompt": f"p{n}", "chosen": "a", "rejected": "b"} for n in range(prompts)])
    train, test = read(path, tmp_path, test_fraction=0.05)[0], read(path, tmp_path, split="test", test_fraction=0.05)[0]
    assert len(train) + len(test) == prompts and len(train) >= 1 and len(test) == min(1, prompts - 1)


def test_split_files_are_found_by_name(tmp_path):
    def row(prompt):
        return [{"prompt": prompt, "chosen": "a", "rejected": "b"}]

    write(tmp_path / "x" / "sub1" / "train.jsonl.gz", row("one"))
    write(tmp_path / "x" / "sub2" / "train-00000-of-00001.parquet", row("two"))
    write(tmp_path / "x" / "sub1" / "validation.jsonl", row("three"))
    write(tmp_path / "x" / "other" / "extra.jsonl", row("four"))
    (tmp_path / "x" / "dataset_infos.json").write_text("{}")
    assert {g.prompt for g in read(tmp_path / "x", tmp_path)[0]} == {"one", "two"}
    assert {g.prompt for g in read(tmp_path / "x", tmp_path, split="test")[0]} == {"three"}
    write(tmp_path / "x" / "test.csv", row("five"))
    assert {g.prompt for g in read(tmp_path / "x", tmp_path, split="test")[0]} == {"five"}
    write(tmp_path / "only_test" / "test.jsonl", row("six"))
    with pytest.raises(ValueError, match="holds test files only"):
        read(tmp_path / "only_test", tmp_path)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="no data file in this folder"):
        read(tmp_path / "nothing", tmp_path)


# ---- names, plugins, the Hub -------------------------------------------------------------------------------------


def test_unknown_names_are_refused_in_no_time_and_without_torch(tmp_path):
    code = (
        "import sys, time; import data.sources as p\n"
        "start = time.perf_counter()\n"
        "try: p.check_dataset_names(['hhh'], {})\n"
        "except ValueError as error: print(error)\n"
        "print(time.perf_counter() - start < 0.1)\n"
        "print(sorted({'torch', 'datasets', 'bs4', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "unknown data set 'hhh'. Did you mean 'hh'? Registered are hh, se, shp" in output
    assert output.endswith("True\n[]\n")


@pytest.mark.parametrize(
    "names, data, complaint",
    [
        ([], {}, "name at least one"),
        (["hh", "hh"], {}, "named twice"),
        ("hh", {}, r"datasets=\[hh\]"),
        (["./nowhere.jsonl"], {}, "no such file"),
        (["hh"], {"paths": {"hh": "/nowhere"}}, "data.paths.hh=/nowhere"),
        (["hh"], {"plugins": ["nowhere.py"]}, "no such file: nowhere.py"),
        (["hh"], {"plugins": ["no_such_module_here"]}, "cannot import no_such_module_here"),
        (["hh"], {"columns": {"chosen": {"deeper": "x"}}}, "data.columns.chosen"),
    ],
)
def test_names_are_checked(names, data, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_dataset_names(names, {"data": data})
    check_dataset_names(["hh", "shp", "se", "owner/name", "owner/name:config"], {})


def test_a_custom_source_is_one_registered_function(tmp_path):
    plugin = tmp_path / "my_data.py"
    plugin.write_text(
        "from preference_datasets import register_dataset\n"
        "@register_dataset('xyz', truncation='keep_start')\n"
        "def get_xyz(split):\n"
        "    return {'q ' + split: {'responses': ['a', 'b', 'b', ''], 'sft_target': 'a',\n"
        "                           'pairs': [(0, 1), (2, 0), (0, 3)]}}\n"
    )
    settings_ = config(tmp_path, plugins=[str(plugin)])
    try:
        check_dataset_names(["xyz"], settings_)
        source = open_source("xyz", "test", settings_)
        assert source.truncation == "keep_start"
        assert get_dataset("xyz", "test", settings_) == {
            "q test": {"responses": ["a", "b"], "pairs": [(0, 1), (1, 0)], "sft_target": "a"}
        }
        assert source.fingerprint != open_source("xyz", "train", settings_).fingerprint
        with pytest.raises(ValueError, match="the name is taken"):
            register_dataset("xyz")(lambda split: {})
        with pytest.raises(ValueError, match="which reads no path"):
            check_dataset_names(["xyz"], config(tmp_path, plugins=[str(plugin)], paths={"xyz": str(plugin)}))
    finally:
        preference_datasets.REGISTRY.pop("xyz", None)


@pytest.mark.parametrize(
    "returned, complaint",
    [
        ({"p": {"responses": ["a"], "pairs": [(0, 1)], "sft_target": "a"}}, "data set bad, prompt 1: .*out of range"),
        ({"p": ["a"]}, "prompt 1: must be a dict"),
        (None, "must return a dict"),
        ({5: {"responses": [], "pairs": []}}, "the prompt must be text"),
    ],
)
def test_what_a_custom_source_returns_is_checked(returned, complaint):
    try:
        register_dataset("bad")(lambda split: returned)
        with pytest.raises(ValueError, match=complaint):
            get_dataset("bad", "train")
    finally:
        preference_datasets.REGISTRY.pop("bad", None)


def test_a_hub_that_cannot_be_reached_is_explained(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def refuse(*args, **kwargs):
        assert "trust_remote_code" not in kwargs
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    complaint = r"Anthropic/hh-rlhf .*ConnectionError: no network.*data.paths.hh=FILE_OR_FOLDER"
    with pytest.raises(ValueError, match=complaint):
        open_source("hh", "train", config(tmp_path))


def test_hub_splits(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def rows(*prompts):
        return datasets.Dataset.from_dict(
            {
                "prompt": list(prompts),
                "chosen": ["a"] * len(prompts),
                "rejected": ["b"] * len(prompts),
                "other": [1] * len(prompts),
            }
        )

    def load(splits):
        monkeypatch.setattr(datasets, "load_dataset", lambda *args: asked.append(args) or datasets.DatasetDict(splits))

    def prompts(split, **options):
        return [g.prompt for g in open_source("own/er:cfg", split, config(tmp_path, **options)).groups()]

    load({"train": rows("x"), "test": rows("y")})
    assert prompts("train") == ["x"] and prompts("test") == ["y"] and asked[0] == ("own/er", "cfg")
    load({"train_prefs": rows("x"), "test_prefs": rows("y"), "train_sft": rows("z"), "test_sft": rows("z")})
    assert prompts("train") == ["x"] and prompts("test") == ["y"]
    load({"train": rows(*"abcdefgh")})
    assert sorted(prompts("train") + prompts("test")) == list("abcdefgh") and prompts("test")
    load({"foo": rows("x"), "bar": rows("y")})
    with pytest.raises(ValueError, match=r"has splits \['bar', 'foo'\]"):
        prompts("train")


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


def test_a_big_line_is_read_in_reasonable_time(tmp_path):
    start = time.perf_counter()
    only(write(tmp_path / "d.jsonl", [{"prompt": "q", "chosen": "x" * 20_000_000, "rejected": "y"}]), tmp_path)
    assert time.perf_counter() - start < 20
