"""Files of every kind are read, broken ones refused, and the files and rows of each split found."""

import gzip
import json
import time
from pathlib import Path

import pytest
from rows import only, read, write

ROOT = Path(__file__).resolve().parent.parent
REAL_HH = ROOT.parent / "shared" / "data" / "hh-rlhf"


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


def test_a_big_line_is_read_in_reasonable_time(tmp_path):
    start = time.perf_counter()
    only(write(tmp_path / "d.jsonl", [{"prompt": "q", "chosen": "x" * 20_000_000, "rejected": "y"}]), tmp_path)
    assert time.perf_counter() - start < 20


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
