"""The named data sets, data sets of one's own, and data sets from the Hub: found by name, and read."""

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rows import A, H, config, hh, only, options, read, write

import preference_datasets
from data.sources import check_dataset_names, get_dataset, open_source
from preference_datasets import register_dataset

ROOT = Path(__file__).resolve().parent.parent
REAL_HH = ROOT.parent / "shared" / "data" / "hh-rlhf"


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
        ("<blockquote><p>quoted</p><p>twice</p></blockquote>she asked", "> quoted\n>\n> twice\n\nshe asked"),
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


@pytest.mark.parametrize(
    "piece", ["<a ", "<a/", "<a a=", '<a a="', "<!--", "<!-- >", "<![CDATA[ >", "<?", "</a ", "<!x"]
)
def test_html_that_never_closes_takes_no_time(piece):
    from data.html_text import html_to_text

    start = time.process_time()
    text = html_to_text("<p>before</p>" + piece * (100_000 // len(piece)))
    assert time.process_time() - start < 60 and text.startswith("before")  # many minutes where it is quadratic
    few = html_to_text("<p>before</p>" + piece * 20)  # as html.parser takes it
    assert len(few) < len(text) and text.startswith(few.rstrip("<").rstrip())


def test_html_with_a_nameless_section_is_text():
    from data.html_text import html_to_text

    assert html_to_text("<p>a</p> <![ b") == "a\n\n<![ b"


def test_worker_processes_give_what_one_process_gives(tmp_path):
    rows = [{"question": f"<p>q{n}</p>", "answers": answers((f"<b>x{n}</b>", 1), ("y", 2))} for n in range(1300)]
    path = write(tmp_path / "train.jsonl", rows)
    alone = read(path, tmp_path, num_workers=1)[0]
    assert read(path, tmp_path, num_workers=2)[0] == alone and len(alone) == 1300
    rows[1290]["answers"][0]["pm_score"] = None
    with pytest.raises(ValueError, match="line 1291: .*pm_score must be a number"):
        read(write(path, rows), tmp_path, num_workers=2)


# ---- names, plugins, the Hub -------------------------------------------------------------------------------------


def test_unknown_names_are_refused_without_torch(tmp_path):
    code = (
        "import sys; import data.sources as p; from types import SimpleNamespace as N\n"
        "try: p.check_dataset_names(['hhh'], N(data=N(plugins=[], paths={}, columns={})))\n"
        "except ValueError as error: print(error)\n"
        "print(sorted({'torch', 'datasets', 'bs4', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "unknown data set 'hhh'. Did you mean 'hh'? Registered are hh, se, shp" in output
    assert output.endswith("\n[]\n")


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
        check_dataset_names(names, options(**data))
    check_dataset_names(["hh", "shp", "se", "owner/name", "owner/name:config"], options())


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
            get_dataset("bad", "train", options())
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
    for split in ("train", "test"):
        (notice,) = open_source("own/er:cfg", split, config(tmp_path)).notices
        assert notice.endswith("splits that are not read: test_sft, train_sft")
    load({"train": rows(*"abcdefgh")})
    assert sorted(prompts("train") + prompts("test")) == list("abcdefgh") and prompts("test")
    load({"foo": rows("x"), "bar": rows("y")})
    with pytest.raises(ValueError, match=r"has splits \['bar', 'foo'\]"):
        prompts("train")
