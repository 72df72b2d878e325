"""What watches over a run: signals, values that are not finite, weights that do not move, ranks that do not come."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from conftest import compose_config
from fault_runs import FSDP, Forge
from left_behind import lines
from runs import LLAMA, train, write_data

import settings
from training import heartbeat
from training.early_stopping import EarlyStop, check_watched_metrics
from training.heartbeat import Heartbeat
from training.signals import PREEMPTED, SignalWatch
from training.weight_movement import MovementWatch
from utils import World

SHORT = ("sample_during_eval=false", "do_first_eval=false", "n_epochs=1", "checkpoint.formats=[policy]")


@pytest.fixture(scope="module")
def forge(tmp_path_factory):
    with Forge(tmp_path_factory.mktemp("guards")) as forge:
        yield forge


# ---- Signals --------------------------------------------------------------------------------------------------------


def test_a_signal_is_remembered_once_there_is_something_to_save(monkeypatch):
    class Ended(Exception):
        pass

    def end(code):
        raise Ended(code)

    calls = []
    monkeypatch.setattr(os, "_exit", end)
    before = signal.getsignal(signal.SIGUSR1)
    with SignalWatch(on_first=lambda: calls.append(1)) as watch:
        watch.deferred = True
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watch.received == signal.SIGUSR1 and watch.exit_code == PREEMPTED == 75 and calls == [1]
        os.kill(os.getpid(), signal.SIGUSR1)  # the same again at once is the same wish
        with pytest.raises(Ended, match=str(128 + signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        assert calls == [1]
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize("number, error", [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_while_there_is_nothing_to_save_ends_the_run(number, error):
    with SignalWatch() as watch, pytest.raises(error):
        os.kill(os.getpid(), number)
        time.sleep(1)
    assert watch.exit_code == (130 if number == signal.SIGINT else 75)


def test_a_hangup_is_heeded_unless_it_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with SignalWatch():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with SignalWatch() as watch:
            watch.deferred = True
            os.kill(os.getpid(), signal.SIGHUP)
            assert watch.received == signal.SIGHUP and watch.exit_code == PREEMPTED
    finally:
        signal.signal(signal.SIGHUP, before)


# ---- Early stop and movement ----------------------------------------------------------------------------------------


def test_early_stop():
    stop = EarlyStop("loss/eval", patience=2, min_delta=0.1, mode=None)
    assert stop.watched == ("loss/eval", "min")
    seen = [stop.update({"loss/eval": value}) for value in (math.nan, 1.0, 0.95)]
    assert seen == [False, False, False], "a NaN is no best, and 0.95 is not better by 0.1"
    other = EarlyStop("loss/eval", patience=2, min_delta=0.1, mode=None)
    other.load_state(stop.state())
    assert other.update({"loss/eval": 0.94}) and other.over and not other.is_best()
    third = EarlyStop("rewards_eval/margins", patience=2, min_delta=0.0, mode=None)
    third.load_state(other.state())
    assert not third.over, "what was watched before says nothing about another metric"
    assert not third.update({"rewards_eval/margins": -1.0}) and third.is_best() and third.watched[1] == "max"
    with pytest.raises(ValueError, match="is no metric of the evaluation"):
        third.update({"loss/eval": 1.0})
    assert not EarlyStop(None, 1, 0.0, None).update({"loss/eval": 1.0})


@pytest.mark.parametrize("key", ["early_stopping.metric", "checkpoint.best_metric"])
def test_a_metric_of_a_data_set_without_evaluation_is_refused(key):
    config = settings.finalize(compose_config("model=tiny", "datasets=[hh,shp]", f"{key}=loss/eval/shp"))
    check_watched_metrics(config, ["hh", "shp"])
    with pytest.raises(ValueError, match=f"{key}=loss/eval/shp.*held-out examples: of hh"):
        check_watched_metrics(config, ["hh"])
    for metric in ("loss/eval", "loss/eval/shp"):
        with pytest.raises(ValueError, match=f"{key}={metric}.*there are none"):
            check_watched_metrics(settings.replace(config, {key: metric}), [])
    check_watched_metrics(settings.replace(config, {key: None}), [])


def test_the_metrics_to_watch_are_checked_before_training(folder):
    names = [f"{folder}/data", str(write_data(folder / "more"))]
    with patch("training.preparation.check_watched_metrics") as check:
        run = train(folder, *LLAMA, f"datasets=[{names[0]},{names[1]}]", "n_eval_examples=1", "n_examples=2")
    ((_, evaluated),) = [call.args for call in check.call_args_list]
    assert len(evaluated) == 1, "the one example is of one data set"
    (metrics,) = run.evals
    assert sum("loss/eval/" in name for name in metrics) == 1 and f"loss/eval/{evaluated[0]}" in metrics


def test_movement_is_measured_in_low_precision_only():
    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    settings, alone = SimpleNamespace(lr=1e-6, model=SimpleNamespace(policy_dtype="bfloat16")), World()
    watch = MovementWatch(model, after=2)
    assert watch.update(settings, alone) is None
    with torch.no_grad():
        model.weight[:16] += 1
    share = 16 * 64 / (64 * 64 + 64)
    assert f"Only {share:.1%} of the bfloat16 weights changed" in watch.update(settings, alone)
    assert watch.update(settings, alone) is None, "it is reported once"
    assert MovementWatch(torch.nn.Linear(4, 4), after=1).update(settings, alone) is None


def test_weights_that_do_not_move_are_reported_with_their_share(forge):
    run = forge.run(
        *SHORT,
        "model.policy_dtype=bfloat16",
        "optimizer=SGD",
        "lr=1e-6",
        "n_epochs=4",
        "schedule=constant",
        f"local_run_dir={forge.folder}/still",
    )
    assert re.search(r"Only 0\.\d% of the bfloat16 weights changed in the first 20 updates", run.text), run.text


# ---- Values that are not finite -------------------------------------------------------------------------------------

# From update 2 on, on one rank alone: its losses, or only their gradients, are not finite.
BROKEN = """
import torch, trainers
compute = trainers.BasicTrainer.losses_and_metrics
left = [{times}]
def broken(self, split, batch):
    per_example_loss, metrics = compute(self, split, batch)
    here = self.world.rank == {rank} and batch is not self.idle_batch
    if here and split == "train" and self.state.step_number >= 2 and left[0]:
        left[0] -= 1
        if {loss}:
            bad = torch.zeros(len(per_example_loss)); bad[0] = float("nan")
            per_example_loss = per_example_loss + bad
            metrics.values[0, 0] = float("nan")
        else:
            per_example_loss.register_hook(lambda gradient: gradient * float("inf"))
    return per_example_loss, metrics
trainers.BasicTrainer.losses_and_metrics = broken
step = torch.optim.AdamW.step
def counted(self, *arguments, **options):
    print("stepped", flush=True)
    return step(self, *arguments, **options)
torch.optim.AdamW.step = counted
"""


@pytest.mark.parametrize(
    "settings, rank, loss",
    [((), 0, True), (FSDP, 1, True), (FSDP, 1, False)],
    ids=["one process", "rank 1", "gradient of rank 1"],
)
def test_no_rank_steps_on_what_is_not_finite(forge, settings, rank, loss, tmp_path):
    run = forge.start(
        *SHORT, *settings, f"local_run_dir={tmp_path}/run", prepare=BROKEN.format(times=99, rank=rank, loss=loss)
    )
    assert run.wait() == 1
    what = "loss" if loss else "gradient (norm "
    assert f"FloatingPointError: The {what}" in run.text and "of update 3 is not finite" in run.text
    assert "The optimizer did not step" in run.text and "guards.on_nonfinite=skip" in run.text
    ranks = 2 if settings else 1
    assert run.text.count("stepped") == 2 * ranks
    rows = [json.loads(line) for line in (tmp_path / "run" / "nonfinite.jsonl").read_text().splitlines()]
    assert len(rows) == (1 if loss else 4) and rows[0]["updates"] == 2
    assert all(row["prompt"].startswith("Of ") and row["chosen"] and row["dataset"] and row["row"] >= 0 for row in rows)
    assert [row["updates"] for row in lines(tmp_path / "run")] == [1, 2]
    assert not forge.orphans()


@pytest.mark.parametrize("settings, rank", [((), 0), (FSDP, 1)], ids=["one process", "rank 1"])
def test_steps_are_skipped_up_to_the_limit(forge, settings, rank, tmp_path):
    skip = ("guards.on_nonfinite=skip", "guards.max_nonfinite_steps=1")
    run = forge.run(
        *SHORT, *settings, *skip, f"local_run_dir={tmp_path}/run", prepare=BROKEN.format(times=1, rank=rank, loss=True)
    )
    assert "Skipped (1 of at most 1)" in run.text
    assert lines(tmp_path / "run")[-1]["updates"] == 5, "of six steps"
    run = forge.start(
        *SHORT,
        *settings,
        *skip,
        f"local_run_dir={tmp_path}/again",
        prepare=BROKEN.format(times=2, rank=rank, loss=True),
    )
    assert run.wait() == 1 and "FloatingPointError" in run.text


# ---- Ranks that do not come -----------------------------------------------------------------------------------------


def test_a_heartbeat_tells_who_is_missing(tmp_path):
    folder = str(tmp_path / "beats")
    first, second = (Heartbeat(folder, rank, 3, patience=60) for rank in (0, 1))
    for beat in (first, second):
        beat.at("in pass 1 of 1 of a step", 7)
    first.at("summing gradients", 7)
    time.sleep(1.3)  # each writes once a second
    assert "rank 0" not in first.missing()
    assert "rank 1: in pass 1 of 1 of a step, update 7, last seen 1 s ago" in first.missing()
    assert "rank 2: no sign of life" in first.missing()
    first.close()
    second.close()
    assert not os.path.exists(folder)


def test_a_save_that_stands_still_names_the_process_that_is_stopped(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(heartbeat, "SAVE_SECONDS", 0.4)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 5.0)
    ranks = [Heartbeat(str(tmp_path), rank, 3, patience=60) for rank in range(3)]
    for beat in ranks:
        beat.saving(7)
    ranks[2].closed.set()  # as one that a signal has stopped: it writes nothing any more
    time.sleep(0.3)
    (tmp_path / "rank-2").write_text(json.dumps(ranks[2].row | {"time": time.time()}))
    os.utime(tmp_path / "rank-2", (0, time.time() - 60))
    time.sleep(1.2)
    said = capfd.readouterr().err
    assert "rank 0: this save has taken" in said and "Not done: rank 2: its process is stopped or gone, saving" in said
    assert said.count("rank 0:") in (1, 2), "again, but less and less often"
    assert "rank 0: its process" not in said and "rank 1: its process" not in said
    ranks[0].at("computing the reference's log-probs", 7, patient=True)
    time.sleep(0.6)
    assert "rank 0:" not in capfd.readouterr().err
    for beat in ranks:
        beat.close()


def test_one_process_reports_a_save_that_stands_still(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(heartbeat, "SAVE_SECONDS", 0.2)
    alone = Heartbeat(str(tmp_path / "beats"), 0, 1, patience=60)
    alone.saving(7)
    time.sleep(0.4)
    alone.close()
    assert capfd.readouterr().err.startswith("this save has taken 0 s so far") and not (tmp_path / "beats").exists()


def test_files_of_a_larger_world_that_was_killed_do_not_stay(tmp_path):
    for name in ("rank-0", "rank-0.tmp", "rank-1", "rank-3"):
        (tmp_path / name).write_text("{}")
    Heartbeat(str(tmp_path), 0, 2, patience=60).close()
    assert os.listdir(tmp_path) == ["rank-1"]


SLEEPER = """
import time, trainers
make = trainers.BasicTrainer.gradients
def sleepy(self, *arguments):
    if self.state.step_number == 2 and self.world.rank == 1:
        time.sleep(600)
    return make(self, *arguments)
trainers.BasicTrainer.gradients = sleepy
"""


def test_a_stalled_collective_names_the_rank_that_is_missing(forge, tmp_path):
    run = forge.start(
        *SHORT, *FSDP, "guards.collective_timeout_minutes=0.2", f"local_run_dir={tmp_path}/run", prepare=SLEEPER
    )
    assert run.wait(60) == 1
    assert "rank 0 has waited 10 s for other ranks. Missing: rank 1: " in run.text
    assert "A collective operation failed; it was waiting for rank 1: " in run.text and "update 2" in run.text
    assert not forge.orphans()


# ---- Notices --------------------------------------------------------------------------------------------------------


def test_trust_remote_code_gives_a_notice(forge, tmp_path):
    run = forge.run(
        *SHORT, "n_epochs=null", "n_examples=4", "model.trust_remote_code=true", f"local_run_dir={tmp_path}/run"
    )
    assert "model.trust_remote_code=true: code that comes with" in run.text
