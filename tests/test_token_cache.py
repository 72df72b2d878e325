"""The token cache: what it may serve, what it must make again, and what happens when it cannot be written."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_tokenizers import byte_level, config, dump, load, pair, trees

import atomic_files
import preference_datasets
import utils
from atomic_files import process_space
from data import sources, tokenization
from data.tokenization import load_tokenized
from preference_datasets import register_dataset


@pytest.fixture(scope="module")
def gpt2():
    return byte_level()


def test_a_warm_cache_reads_no_rows(tmp_path, gpt2, monkeypatch):
    first = load(tmp_path, [pair()], gpt2)
    monkeypatch.setattr(sources, "read_rows", None)
    again = load_tokenized(str(tmp_path / "data.jsonl"), "train", gpt2, config(tmp_path), "pairs")
    assert again.key == first.key and again.counts == first.counts and isinstance(again.tokens, np.memmap)


def test_the_key_follows_what_matters_and_nothing_else(tmp_path, gpt2):
    usual = (pair(" the" * 30, " sky", " fox"),)

    def folder(rows=usual, tokenizer=gpt2, sft=False, extra=None, **options):
        path = dump(tmp_path, list(rows))
        settings = SimpleNamespace(**vars(config(tmp_path, **options)), **(extra or {}))
        return load_tokenized(path, "train", tokenizer, settings, "responses" if sft else "pairs").folder

    base = folder()
    assert folder(num_workers=2) == base and folder(extra={"lr": 1.0, "seed": 5, "batch_size": 3}) == base
    assert folder(weights={"x": 2.0}) == base and folder() == base
    different = [
        folder([pair("other", " sky", " fox")]),
        folder(tokenizer=byte_level("<|bos|>", True)),
        folder(sft=True),
        folder(max_length=500),
        folder(max_prompt_length=20),
        folder(truncation="keep_start"),
        folder(on_overlong="drop"),
        folder(columns={"chosen": "rejected", "rejected": "chosen"}),
        folder(test_fraction=0.01),
    ]
    assert len({base, *different}) == len(different) + 1
    assert folder() == base


def test_the_content_key_is_of_tokens_and_structure(tmp_path, gpt2):
    one = load(tmp_path, [pair()], gpt2)
    assert load(tmp_path, [pair()], gpt2, max_length=400).key == one.key  # nothing was cut: the same content
    assert load(tmp_path, [pair(chosen="yes", rejected="yellow")], gpt2).key != one.key


def damage_truncate(file):
    file.write_bytes(file.read_bytes()[:-4])


def damage_flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def damage_remove(file):
    file.unlink()


@pytest.mark.parametrize("name", ["tokens.npy", "examples.npy", "manifest.json", "segment_starts.npy"])
@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_remove])
def test_a_damaged_cache_is_made_again(tmp_path, gpt2, name, damage):
    before = load(tmp_path, [pair()], gpt2)
    expected, folder = trees(before), before.folder
    del before
    damage(folder / name)
    after = load(tmp_path, [pair()], gpt2)
    assert trees(after) == expected and after.folder == folder
    assert any("not usable" in notice for notice in after.notices)
    assert load(tmp_path, [pair()], gpt2).notices == [] and not list(folder.parent.glob("*.tmp"))


def test_a_cache_of_another_version_is_not_used(tmp_path, gpt2, monkeypatch):
    first = load(tmp_path, [pair()], gpt2).folder
    monkeypatch.setattr(tokenization, "FORMAT", tokenization.FORMAT + 1)
    assert load(tmp_path, [pair()], gpt2).folder != first


def test_a_cache_folder_that_cannot_be_written_costs_only_the_cache(tmp_path, gpt2):
    expected = trees(load(tmp_path, [pair()], gpt2))
    (tmp_path / "file").write_text("not a folder")
    path = dump(tmp_path, [pair()])
    settings_ = config(tmp_path, cache_dir=str(tmp_path / "file" / "cache"))
    dataset = load_tokenized(path, "train", gpt2, settings_, "pairs")
    assert trees(dataset) == expected and any("cannot be written" in notice for notice in dataset.notices)


def test_a_disk_that_fills_up_mid_write_costs_only_the_cache(tmp_path, gpt2, monkeypatch):
    original = tokenization.ArrayFile.append

    def full(self, values):
        if (tmp_path / "cache") in self.path.parents:
            raise tokenization.CacheWriteError(28, "No space left on device")
        original(self, values)

    monkeypatch.setattr(tokenization.ArrayFile, "append", full)
    dataset = load(tmp_path, [pair()], gpt2)
    assert len(dataset) == 1 and any("No space left" in notice for notice in dataset.notices)
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.name != "files"]
    monkeypatch.setattr(
        tokenization.ArrayFile,
        "append",
        lambda self, values: (_ for _ in ()).throw(tokenization.CacheWriteError(28, "No space left on device")),
    )
    with pytest.raises(ValueError, match="free some space"):
        load(tmp_path, [pair()], gpt2)


def test_a_malformed_row_leaves_nothing_behind(tmp_path, gpt2):
    with pytest.raises(ValueError, match="line 2"):
        load(tmp_path, [pair(), {"prompt": 1, "chosen": "a", "rejected": "b"}], gpt2)
    assert not list((tmp_path / "cache").glob("data*"))


def test_leftovers_of_dead_processes_are_swept(tmp_path, gpt2):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = tmp_path / "cache" / f"x.{process_space()}-{gone.pid}-abc.tmp"
    alive = tmp_path / "cache" / f"x.{process_space()}-{os.getpid()}-abc.tmp"
    for folder in (stale, alive):
        folder.mkdir(parents=True)
    load(tmp_path, [pair()], gpt2)
    assert not stale.exists() and alive.exists()


def test_what_a_container_of_the_same_host_name_is_writing_stays(tmp_path, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    other = tmp_path / "cache" / f"x.{process_space()}-{gone.pid}-abc.tmp"
    other.mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(utils.os, "readlink", lambda path: "pid:[1]")  # another namespace of process ids
        atomic_files.process_space.cache_clear()
        atomic_files.remove_leftovers(tmp_path / "cache")
        assert other.exists() and atomic_files.process_space() not in other.name
    atomic_files.process_space.cache_clear()
    atomic_files.remove_leftovers(tmp_path / "cache")
    assert not other.exists()


def _load_in_process(path, tmp_path, barrier, results):
    tokenizer = byte_level()
    barrier.wait()
    dataset = load_tokenized(path, "train", tokenizer, config(Path(tmp_path)), "pairs")
    results.put((dataset.key, len(dataset), str(dataset.folder)))


def test_writers_at_the_same_time_agree(tmp_path):
    path = dump(tmp_path, [pair(f"q{number}") for number in range(200)])
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    arguments = (path, str(tmp_path), barrier, results)
    processes = [context.Process(target=_load_in_process, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    outcomes = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert len(outcomes) == 1 and next(iter(outcomes))[1] == 200
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_a_test_split_without_rows_is_a_notice(tmp_path, gpt2):
    dataset = load_tokenized(dump(tmp_path, [pair()]), "test", gpt2, config(tmp_path), "pairs")
    assert len(dataset) == 0 and dataset.n_groups == 0 and "no example is left" in dataset.notices[0]


def test_a_changed_file_is_read_again(tmp_path, gpt2):
    first = load(tmp_path, [pair(chosen="yes", rejected="no")], gpt2)
    second = load(tmp_path, [pair(chosen="yas", rejected="no")], gpt2)  # the same size, moments later
    assert first.key != second.key


def test_a_file_replaced_while_it_is_tokenised_is_not_kept(tmp_path, gpt2, monkeypatch):
    old, new = [pair("q", "old", "x")], [pair("q", "new", "x")]
    path = Path(dump(tmp_path, old))
    before = path.read_bytes()
    other = Path(dump(tmp_path, new, name="other.jsonl")).read_bytes()
    path.write_bytes(before)
    read = sources.read_rows

    def replaced_first(file, wanted=None):
        Path(file).write_bytes(other)
        return read(file, wanted)

    monkeypatch.setattr(sources, "read_rows", replaced_first)
    with pytest.raises(ValueError, match="data.jsonl changed while it was read; start again"):
        load_tokenized(str(path), "train", gpt2, config(tmp_path), "pairs")
    monkeypatch.setattr(sources, "read_rows", read)
    path.write_bytes(before)
    data = load_tokenized(str(path), "train", gpt2, config(tmp_path), "pairs")
    assert "old" in gpt2.decode(data.response(0, 0))


@pytest.mark.parametrize("kind", ["file", "empty file", "link to nothing", "link to a file"])
def test_a_cache_entry_that_is_no_folder_is_made_again(tmp_path, gpt2, kind):
    folder = load(tmp_path, [pair()], gpt2).folder
    shutil.rmtree(folder)
    if kind.endswith("file") and not kind.startswith("link"):
        folder.write_text("" if "empty" in kind else "no folder")
    else:
        (tmp_path / "target").write_text("mine")
        folder.symlink_to(tmp_path / ("nowhere" if "nothing" in kind else "target"))
    again = load_tokenized(str(tmp_path / "data.jsonl"), "train", gpt2, config(tmp_path), "pairs")
    assert len(again) == 1 and folder.is_dir() and not folder.is_symlink() and "no folder" in again.notices[0]
    assert not (tmp_path / "target").exists() or (tmp_path / "target").read_text() == "mine"
    assert not list(folder.parent.glob("*.tmp"))


def test_a_custom_source_is_cached_by_what_it_returns(tmp_path, gpt2):
    data = {"q": {"responses": ["a", "b"], "pairs": [(0, 1)], "sft_target": "a"}}
    try:
        register_dataset("cached")(lambda split: data)
        one = load_tokenized("cached", "train", gpt2, config(tmp_path), "pairs")
        assert load_tokenized("cached", "train", gpt2, config(tmp_path), "pairs").folder == one.folder
        data["q"]["pairs"] = [(1, 0)]
        assert load_tokenized("cached", "train", gpt2, config(tmp_path), "pairs").folder != one.folder
    finally:
        preference_datasets.REGISTRY.pop("cached", None)


def test_progress_is_shown(tmp_path, gpt2):
    seen = []

    class Bar:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            seen.append("closed")

        def update(self, number, **postfix):
            seen.append(number)

    def progress(total, description, unit):
        seen.append(description)
        return Bar()

    load_tokenized(dump(tmp_path, [pair()]), "train", gpt2, config(tmp_path), "pairs", progress)
    assert "tokenising" in seen[0] and seen[1:] == [1, "closed"]
