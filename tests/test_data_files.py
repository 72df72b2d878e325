"""Files of every kind are read, broken ones refused, and the files and rows of each split found."""

import bz2
import gzip
import json
import lzma
import os
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from rows import config, only, read, write

from data import files
from data.sources import check_dataset_names, open_source
from data.template_calls import read_chat_template

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


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv"])
@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_compressed_and_tab_separated_files(tmp_path, suffix, packed):
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"prompt": f"q{n}", "chosen": "a,b", "rejected": "c"} for n in range(50)]
    data = write(tmp_path / f"plain.{suffix.replace('tsv', 'csv')}", rows).read_bytes()
    if suffix == "tsv":
        data = b"prompt\tchosen\trejected\n" + b"".join(b"q%d\ta,b\tc\n" % number for number in range(50))
    path = tmp_path / "x" / f"train.{suffix}{packed}"
    path.parent.mkdir()
    if packed == ".zst":
        with pyarrow.output_stream(str(path), compression="zstd") as stream:
            stream.write(data)
    else:
        path.write_bytes({"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[packed](data))
    groups, _ = read(path.parent, tmp_path)
    assert len(groups) == 50 and groups[49].responses == ["a,b", "c"]
    if packed:
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(ValueError, match=f"train.{suffix}{packed}: .*broken"):
            read(path, tmp_path)


def test_a_file_of_an_unknown_kind_is_explained(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "train.jsonl.lz4").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no data file in this folder \(train.jsonl.lz4 is none\).*\.tsv.*\.zst"):
        read(tmp_path / "x", tmp_path)
    with pytest.raises(ValueError, match="not a data file by its name"):
        read(tmp_path / "x" / "train.jsonl.lz4", tmp_path)


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv"])
def test_a_small_compressed_file_cannot_fill_the_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files, "MAX_ROW", 1 << 20)
    monkeypatch.setattr(files, "MAX_UNPACKED_JSON", 1 << 20)
    start = b'[{"prompt": "' if name == "d.json" else b'prompt,chosen\n"' if name == "d.csv" else b'{"prompt": "'
    filling = (b"x" * 999 + b"\n") if name == "d.csv" else b"x" * 1000  # one quoted cell over many lines
    path = tmp_path / f"{name}.gz"
    with gzip.open(path, "wb") as stream:
        stream.write(start)
        for _ in range(8_000):
            stream.write(filling)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="d.*: .*more than 1 MB|longer than 1 MB|unpacked more than 1 MB"):
            read(path, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


def test_a_pipe_or_device_is_refused_at_once(tmp_path):
    (tmp_path / "x").mkdir()
    os.mkfifo(tmp_path / "x" / "train.jsonl")
    for path in (tmp_path / "x", tmp_path / "x" / "train.jsonl"):
        with pytest.raises(ValueError, match="train.jsonl: is a named pipe, not a file"):
            check_dataset_names([str(path)], config(tmp_path))
        with pytest.raises(ValueError, match="is a named pipe"):
            read(path, tmp_path)
    with pytest.raises(ValueError, match="is a named pipe"):
        read_chat_template(str(tmp_path / "x" / "train.jsonl"))
    (tmp_path / "d.jsonl").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="is a device or socket"):
        read(tmp_path / "d.jsonl", tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_columns_that_nobody_reads_are_not_read(tmp_path, suffix):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    # A date that Python has no object for.
    bad = pyarrow.array([10**12], pyarrow.int64()).cast(pyarrow.timestamp("s"))
    table = pyarrow.table({"when": bad, "prompt": ["q"], "chosen": ["a"], "rejected": ["b"]})
    path = tmp_path / f"d.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    assert only(path, tmp_path).responses == ["a", "b"]


def test_an_empty_first_file_does_not_settle_the_format(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    (tmp_path / "x").mkdir()
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "x" / "a.parquet")
    write(tmp_path / "x" / "b.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    assert read(tmp_path / "x", tmp_path)[0][0].prompt == "q"


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


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    def row(prompt):
        return [{"prompt": prompt, "chosen": "a", "rejected": "b"}]

    for name in ("train", "training", "extra", "test", "validation"):
        write(tmp_path / "x" / f"{name}.jsonl", row(name))
    (tmp_path / "x" / "train-2.txt").write_text("more")
    (tmp_path / "x" / "README.md").write_text("about")
    assert {g.prompt for g in read(tmp_path / "x", tmp_path)[0]} == {"train", "training"}
    notices = {tuple(open_source(str(tmp_path / "x"), split, config(tmp_path)).notices) for split in ("train", "test")}
    (notice,) = notices.pop()
    assert not notices  # the same text for both, so that it is shown once
    assert "x: not read: extra.jsonl, validation.jsonl, train-2.txt. " in notice
    (tmp_path / "x" / "train-2.txt").unlink()
    for name in ("extra", "validation"):
        (tmp_path / "x" / f"{name}.jsonl").unlink()
    assert not open_source(str(tmp_path / "x"), "train", config(tmp_path)).notices


@pytest.mark.parametrize("copy", ["train.jsonl.gz", "train.csv", "train.parquet"])
def test_the_same_split_in_two_formats_is_refused(tmp_path, copy):
    for name in ("train.jsonl", "test.jsonl", copy):
        write(tmp_path / "x" / name, [{"prompt": name, "chosen": "a", "rejected": "b"}])
    with pytest.raises(ValueError, match="x: (train.* and train.*) would both be read, .* give the path of the file"):
        read(tmp_path / "x", tmp_path)
    (tmp_path / "x" / "train.jsonl").rename(tmp_path / "x" / "train-more.jsonl")
    assert len(read(tmp_path / "x", tmp_path)[0]) == 2


def test_files_that_two_data_sets_read_are_refused(tmp_path):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}]
    path = write(tmp_path / "x" / "train.jsonl", rows)
    for other in (tmp_path / "x", f"{tmp_path}/x/../x/train.jsonl"):
        names = [str(path), str(other)]
        with pytest.raises(ValueError, match="both read .*train.jsonl; leave one of them out"):
            check_dataset_names(names, config(tmp_path, datasets=names))


def test_missing_parts_of_a_split_are_named(tmp_path):
    for name in ("train-00000-of-00003", "train-00002-of-00003", "test-00000-of-00001"):
        write(tmp_path / "x" / f"{name}.jsonl", [{"prompt": name, "chosen": "a", "rejected": "b"}])
    (notice,) = open_source(str(tmp_path / "x"), "train", config(tmp_path)).notices
    assert "missing, by the numbers of the others: train-00001-of-00003.jsonl; their rows are not trained on" in notice
    write(tmp_path / "x" / "train-00001-of-00003.jsonl", [{"prompt": "1", "chosen": "a", "rejected": "b"}])
    assert not open_source(str(tmp_path / "x"), "train", config(tmp_path)).notices


def test_a_snapshot_with_a_split_for_each_kind_of_loss_is_read_once(tmp_path):
    """The files of HuggingFaceH4/ultrafeedback_binarized: the same prompts for preferences, SFT and generation."""

    def row(prompt):
        return {"prompt": prompt, "chosen": "a", "rejected": "b"}

    for split in ("train", "test"):
        for kind in ("prefs", "sft", "gen"):
            rows = [row(f"{split} {kind}")]
            write(tmp_path / "x" / "data" / f"{split}_{kind}-00000-of-00001-0ae1fd.parquet", rows)
    for split in ("train", "test"):
        assert [g.prompt for g in read(tmp_path / "x", tmp_path, split)[0]] == [f"{split} prefs"]
        assert [g.prompt for g in read(tmp_path / "x", tmp_path, split, sft=True)[0]] == [f"{split} sft"]
    check_dataset_names([str(tmp_path / "x")], config(tmp_path))
    (notice,) = open_source(str(tmp_path / "x"), "train", config(tmp_path)).notices
    assert "train_gen-00000" in notice and "train_sft-00000" in notice and "prefs" not in notice
    for file in (tmp_path / "x" / "data").glob("*_prefs*"):
        file.unlink()
    with pytest.raises(ValueError, match="has files of the kinds gen, sft, and none with preferences"):
        read(tmp_path / "x", tmp_path)


def test_shards_and_several_sets_in_a_folder_are_read_together(tmp_path):
    for name in ("hh/train-00000-of-00002", "hh/train-00001-of-00002", "shp_train"):
        write(tmp_path / "x" / f"{name}.jsonl", [{"prompt": name, "chosen": "a", "rejected": "b"}])
    assert len(read(tmp_path / "x", tmp_path)[0]) == 3


def test_a_named_pipe_in_a_model_an_archive_or_a_run_is_refused(tmp_path):
    from checkpoint.archives import locate
    from modeling.model_files import check_model_path
    from settings.resume import _run_folder

    os.mkfifo(tmp_path / "policy.pt")
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "nowhere").symlink_to("missing")
    for reader in (locate, check_model_path, _run_folder, lambda folder: locate(f"{folder}/policy.pt")):
        with pytest.raises(ValueError, match="policy.pt: is a named pipe"):
            reader(str(tmp_path))


@pytest.mark.parametrize("end", [2**30, -7])
def test_damaged_offsets_of_an_arrow_file_are_refused(tmp_path, end):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"prompt": ["abc", "defgh"], "chosen": ["a", "b"], "rejected": ["c", "d"]})
    path = tmp_path / "d.arrow"
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)
    data, offsets = path.read_bytes(), struct.pack("<3i", 0, 3, 8)
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, struct.pack("<3i", 0, end, 8)))
    with pytest.raises(ValueError, match="d.arrow: cannot be read as arrow"):
        read(path, tmp_path)
