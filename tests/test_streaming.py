"""data.streaming=true: every example once an epoch in an order of its own, the same steps on one process and on two, an
exact resume, nothing on disk, and what does not go with it."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial

import pytest
import torch
from conftest import ROOT
from rows import write
from runs import LLAMA, placement, settings_of, train, train_in_two, train_together

from data.batching import pack
from data.streaming import StreamSampler, TokenStream
from modeling.loading import byte_tokenizer

STREAM = ("data.streaming=true", "n_epochs=null", "reference.mode=online")


def rows_of(n: int, name: str = "r"):
    """Rows of 1 to 3 pairs a prompt, all texts different."""
    rows = []
    for number in range(n):
        for k in range(1 + number % 3):
            texts = {"chosen": f" {name}{number} yes {k}", "rejected": f" {name}{number} no {k}"}
            rows.append({"prompt": f"{name}{number}:", **texts})
    return rows


def data(folder, n=40, name="stream"):
    write(folder / name / "train.jsonl", rows_of(n))
    write(folder / name / "test.jsonl", rows_of(3, "t"))
    return f"datasets=[{folder}/{name}]"


def sampler(folder, *overrides, batch=4, n_examples=100, kind="pairs", place=None):
    config = settings_of(folder, *LLAMA, "loss=dpo", *STREAM, f"n_examples={n_examples}", *overrides)
    found = StreamSampler(TokenStream(config, byte_tokenizer(), kind), batch, n_examples, 0, config.shuffle)
    found.layout = {"make_batch": pack, "budget": 10**6}
    found.restore(place)
    return found


def texts_of(step, datasets):
    """The examples of a step as texts."""
    tokenizer = byte_tokenizer()
    return [
        tuple(tokenizer.decode(unit.responses[k]) for k in pair if k >= 0)
        for batch in step.micro_batches
        for unit in batch.units
        for pair in unit.pairs
    ]


def examples(found, start=0):
    return [texts_of(step, found.datasets) for step in found.steps(start)]


# ---- Which examples, in which order ---------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 10, 1000])
@pytest.mark.parametrize("n", [7, 40])
def test_every_example_comes_once_an_epoch_in_whole_steps(tmp_path, window, n, monkeypatch):
    monkeypatch.setattr("data.streaming.CHUNK", 4)
    monkeypatch.setattr("data.tokenization.CHUNK", 4)
    every = Counter((row["chosen"], row["rejected"]) for row in rows_of(n))
    total = 3 * len(every)
    steps = examples(sampler(tmp_path, data(tmp_path, n), f"data.shuffle_window={window}", n_examples=total))
    assert [len(step) for step in steps[:-1]] == [4] * (len(steps) - 1) and sum(map(len, steps)) == total
    seen = Counter(tuple(text.removesuffix("<|endoftext|>") for text in pair) for step in steps for pair in step)
    # Windows reach over the end of an epoch: what the last one has of the next epoch, others lack.
    assert seen.keys() == every.keys() and all(abs(count - 3) <= 1 for count in seen.values())
    if window == 1000:
        assert steps[0] != examples(sampler(tmp_path, data(tmp_path, n), "data.shuffle_window=1", n_examples=total))[0]


def test_an_example_moves_within_two_windows(tmp_path, monkeypatch):
    monkeypatch.setattr("data.streaming.CHUNK", 2)
    monkeypatch.setattr("data.tokenization.CHUNK", 2)
    found = examples(sampler(tmp_path, data(tmp_path, 60), "data.shuffle_window=12", n_examples=100))
    order = [(row["chosen"], row["rejected"]) for row in rows_of(60)]
    places = [
        order.index(tuple(text.removesuffix("<|endoftext|>") for text in pair)) for step in found for pair in step
    ]
    assert places != sorted(places)
    assert max(abs(place - now) for now, place in enumerate(places)) < 2 * (12 + 6)


def test_the_order_is_that_of_the_seed(tmp_path):
    option = data(tmp_path)
    one, other = (examples(sampler(tmp_path, option)) for _ in range(2))
    assert one == other


def test_sources_take_turns_by_their_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("data.streaming.CHUNK", 2)
    monkeypatch.setattr("data.tokenization.CHUNK", 2)
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", rows_of(300, name))
    option = f"datasets=[{tmp_path}/a.jsonl,{tmp_path}/b.jsonl]"
    found = examples(sampler(tmp_path, option, "++data.weights.b=3", "data.shuffle_window=20", n_examples=200))
    named = Counter(pair[0].strip()[0] for step in found for pair in step)
    assert named["b"] / named["a"] == pytest.approx(3, rel=0.25)


@pytest.mark.parametrize("kind", ["responses", "unpaired", "unpaired_mismatched", "group"])
def test_other_kinds_of_examples(tmp_path, kind):
    found = sampler(tmp_path, data(tmp_path), "data.shuffle_window=30", kind=kind, n_examples=60)
    steps = list(found.steps())
    assert sum(step.n_examples for step in steps) == 60
    assert {step.n_examples for step in steps} == {4}


# ---- Going on from a place ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pairs", "unpaired", "group"])
def test_a_sampler_goes_on_from_any_step(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("data.streaming.CHUNK", 3)
    monkeypatch.setattr("data.tokenization.CHUNK", 3)
    options = (data(tmp_path, 20), "data.shuffle_window=10")
    make = partial(sampler, tmp_path, *options, kind=kind, n_examples=90)
    first, places, whole = make(), [], []
    places.append(first.saved(0))
    for step in first.steps():
        whole.append(texts_of(step, first.datasets))
        places.append(json.loads(json.dumps(first.saved(step.number + 1))))  # as plain values
    for number in range(0, len(whole), 3):
        assert examples(make(place=places[number]), number) == whole[number:], number


def test_a_resumed_run_is_the_same_to_the_bit(folder, tmp_path):
    options = (*LLAMA, "loss=dpo", *STREAM, data(tmp_path), "n_examples=44", "batch_size=4", "data.shuffle_window=13")
    options += ("debug=false", "checkpoint.formats=[state]", "eval_every=1000", "do_first_eval=false")
    whole = train(folder, *options)
    first, rest = train_in_two(folder, *options, stop_in=5)
    assert 1 <= len(rest.losses) < len(whole.losses) and first.losses + rest.losses == whole.losses
    assert all(torch.equal(whole.weights[name], value) for name, value in rest.weights.items())


def test_a_run_that_is_killed_goes_on_exactly(tmp_path):
    option = data(tmp_path, 60)
    words = ["model=tiny", "loss=dpo", *STREAM, option, "n_examples=120", "batch_size=4", "data.shuffle_window=20"]
    words += ["wandb.enabled=false", "eval_every=1000", "do_first_eval=false", "sample_during_eval=false"]
    words += ["checkpoint.every=8", "checkpoint.formats=[state,policy]", "minimum_log_interval_secs=0"]
    words += [f"local_dirs=[{tmp_path}/runs]", "warmup_steps=0", "lr=1e-3"]

    def start(*more):
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *words, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    assert start(f"local_run_dir={tmp_path}/whole").wait(120) == 0
    process, folder = start(f"local_run_dir={tmp_path}/killed"), tmp_path / "killed"
    deadline = time.monotonic() + 60
    while not (folder / "LATEST").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert start(f"resume={folder}").wait(120) == 0

    def metrics(name):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [(row["examples"], row["loss/train"]) for row in rows if "loss/train" in row]

    assert metrics("killed") == metrics("whole")
    files = (tmp_path / name / "LATEST" / "policy.pt" for name in ("whole", "killed"))
    one, other = (torch.load(file, weights_only=True)["state"] for file in files)
    assert all(torch.equal(one[name], other[name]) for name in one)


# ---- Runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, name", [(2, "FULL_SHARD"), (2, "TP")])
def test_processes_make_the_same_steps_together(folder, tmp_path, pools, size, name):
    options = (*LLAMA, "loss=dpo", *STREAM, data(tmp_path), "n_examples=24", "batch_size=4", "data.shuffle_window=11")
    alone = train(folder, *options)
    for run in train_together(pools(size), folder, *options, *placement(name, size)):
        assert run.losses == pytest.approx(alone.losses, abs=1e-5)


def test_nothing_of_the_training_data_is_kept_on_disk(folder, tmp_path):
    cache = tmp_path / "cache"
    train(folder, *LLAMA, "loss=dpo", *STREAM, data(tmp_path), "n_examples=12", f"data.cache_dir={cache}")
    assert not list(cache.glob("*-train-*"))
    assert list(cache.glob("*-test-*"))  # held-out data are read whole


def test_without_a_test_split_nothing_is_evaluated(folder, tmp_path):
    write(tmp_path / "alone.jsonl", rows_of(20))
    run = train(folder, *LLAMA, "loss=sft", *STREAM[:2], f"datasets=[{tmp_path}/alone.jsonl]", "n_examples=12")
    assert len(run.losses) == 3 and any("no held-out examples" in text for text in run.notices)
    assert any("shuffled within windows of 10,000" in text for text in run.notices)


def test_a_row_that_cannot_be_read_ends_the_run_with_its_place(folder, tmp_path):
    rows = rows_of(300)
    write(tmp_path / "bad.jsonl", [*rows, {"prompt": 3, "chosen": "a", "rejected": "b"}])
    options = (*LLAMA, "loss=sft", *STREAM[:2], f"datasets=[{tmp_path}/bad.jsonl]", "data.shuffle_window=100")
    with pytest.raises(ValueError, match=f"bad.jsonl, line {len(rows) + 1}: prompt must be text"):
        train(folder, *options, "n_examples=2000", "batch_size=50")


def test_rows_that_are_left_out_are_counted_and_named(folder, tmp_path, capsys):
    rows = rows_of(12)
    rows.insert(3, {"prompt": 3, "chosen": "a", "rejected": "b", "extra": 1})
    rows.insert(5, {"prompt": "same", "chosen": "a", "rejected": "a"})
    write(tmp_path / "bad.jsonl", rows)
    options = (*LLAMA, "loss=sft", *STREAM[:2], f"datasets=[{tmp_path}/bad.jsonl]", "data.on_bad_row=skip")
    run = train(folder, *options, "n_examples=16")
    assert any("1 rows cannot be read and are left out; first: " in text and "line 4" in text for text in run.notices)
    assert any("columns that are not read: ['extra']" in text for text in run.notices)
    out = capsys.readouterr().out
    assert f"train: rows {len(rows)}" in out.replace("dropped", "") or f"rows {len(rows)}" in out
    assert "dropped bad row 1" in out and "dropped identical 1" in out


def test_rows_without_an_example_end_the_run(folder, tmp_path):
    write(tmp_path / "empty.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "a"}] * 3)
    with pytest.raises(ValueError, match="hold no example to train on .*dropped_identical 3"):
        train(folder, *LLAMA, "loss=sft", *STREAM[:2], f"datasets=[{tmp_path}/empty.jsonl]", "n_examples=10")


@pytest.mark.parametrize(
    "words, message",
    [
        (["data.streaming=true", "n_epochs=null"], "n_epochs and n_examples are both null|give the length of the run"),
        (["data.streaming=true", "n_examples=10"], "with n_epochs=null"),
        (["loss=dpo", *STREAM[:2], "n_examples=10"], "reference.mode=online"),
        ([*STREAM[:2], "n_examples=10", "show=3"], "show looks at whole data sets"),
        ([*STREAM[:2], "n_examples=10", "data.test_fraction=0.2"], "holds nothing out"),
        (["data.shuffle_window=5"], "data.streaming=false shuffles all examples"),
    ],
)
def test_what_does_not_go_with_it(compose, words, message):
    import settings

    with pytest.raises(ValueError, match=message):
        settings.validate(compose("model=tiny", *words), device_count=0)
