"""A run that is stopped anywhere and resumed is the run that was never stopped: same weights, same lines, no litter."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import pytest
from fault_runs import FSDP, SHORT, SLOW_STEPS, resume
from left_behind import differences, leftovers, lines
from random_kills import kill_and_resume


def killed_then_resumed(forge, place, settings, **kill):
    run = forge.start(*settings, f"local_run_dir={place}", kill=kill)
    assert run.wait() != 0, "the kill did not happen"
    run = resume(forge, place)
    assert run.wait() == 0, run.text
    assert not forge.orphans() and not leftovers(forge.folder)
    return run


# ---- Kill -9 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings, kills", [((), 6), (FSDP, 4)], ids=["BasicTrainer", "FSDPTrainer"])
def test_killed_at_random_moments(forge, settings, kills):
    counts = kill_and_resume(forge, settings, kills, seed=len(settings), ways=("time", "folder", "hook", "rank"))
    assert not counts.wrong and counts.kills >= kills and counts.finished >= 1


@pytest.mark.parametrize(
    "optimizer",
    ["RMSprop", "SGD", "Adafactor"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "Rprop")
    ],
)
def test_every_optimizer_goes_on_bitwise(forge, calm, place, optimizer):
    more = {"SGD": ("optimizer_kwargs.momentum=0.9",), "Adam": ("optimizer_kwargs.amsgrad=true",)}.get(optimizer, ())
    settings = (*SHORT, f"optimizer={optimizer}", *more)
    killed_then_resumed(forge, place, settings, stage="end", nth=1)
    assert not differences(calm(*settings), place)


@pytest.mark.parametrize(
    "placement",
    [
        "trainer=TensorParallelTrainer tp_size=2",
        "trainer=FSDPTrainer fsdp=hybrid_shard fsdp.replicas=2",
        *(
            pytest.param(f"trainer=FSDPTrainer {words}", marks=pytest.mark.slow)
            for words in ("fsdp=shard_grad_op", "fsdp=no_shard", "fsdp.cpu_offload=true", "reference.mode=online")
        ),
    ],
)
def test_every_placement_goes_on_bitwise(forge, calm, place, placement):
    settings = (*SHORT, "world_size=2", *placement.split())
    killed_then_resumed(forge, place, settings, stage="retention", nth=1)
    assert not differences(calm(*settings), place)


@pytest.mark.parametrize("stage", ["latest", "retention"])
def test_killed_inside_the_last_save(forge, calm, place, stage):
    settings = (*SHORT, "checkpoint.keep_last=1")
    killed_then_resumed(forge, place, settings, stage=stage, nth=2)
    assert not differences(calm(*settings), place)
    assert sorted(p.name for p in place.glob("step-*")) == sorted(p.name for p in calm(*settings).glob("step-*"))


def test_a_rank_killed_inside_a_save(forge, calm, place):
    settings = (*SHORT, *FSDP)
    killed_then_resumed(forge, place, settings, stage="checksum", nth=2, rank=1)
    assert not differences(calm(*settings), place)


@pytest.mark.parametrize("stage", ["state", pytest.param("latest", marks=pytest.mark.slow)])
def test_saving_in_the_background(forge, calm, place, stage):
    settings = (*SHORT, "checkpoint.async_save=true")
    killed_then_resumed(forge, place, settings, stage=stage, nth=1)
    assert not differences(calm(*settings), place)
    assert not differences(calm(*SHORT), place), "and it is the run that saves in the foreground"


def test_another_world_size_stays_within_rounding(forge, calm, place):
    settings = (*SHORT, *FSDP)
    assert forge.start(*settings, f"local_run_dir={place}", kill={"stage": "end", "nth": 0}).wait() != 0
    run = resume(forge, place, "world_size=1")
    assert run.wait() == 0 and "world_size=1; it was 2" in run.text and "equal up to rounding" in run.text
    one, other = lines(calm(*settings)), lines(place)
    assert [row["examples"] for row in one] == [row["examples"] for row in other]
    for a, b in zip(one, other):
        assert a.keys() == b.keys()
        assert all(abs(a[key] - b[key]) < 1e-5 for key in a if key.startswith("loss/"))


# ---- What may change, and what may not ------------------------------------------------------------------------------


def test_longer_is_the_longer_run(forge, calm, place):
    forge.run(*SHORT, "n_epochs=1", f"local_run_dir={place}")
    run = resume(forge, place, "n_epochs=2")
    assert run.wait() == 0 and "n_epochs=2; it was 1" in run.text
    longer = calm(*SHORT, "n_epochs=2")
    of_training = [[row for row in lines(folder) if "loss/train" in row] for folder in (place, longer)]
    assert of_training[0] == of_training[1]
    assert not [text for text in differences(longer, place) if text.startswith("state of model")]
    shorter = resume(forge, place, "n_epochs=1")
    assert shorter.wait() == 2 and "Leave both as they were, or choose more" in shorter.text


def test_a_decay_fixes_the_length(forge, calm):
    done = calm(*SHORT, "schedule=linear")
    run = resume(forge, done, "n_epochs=2")
    assert run.wait() == 2
    assert "n_epochs: 1 -> 2" in run.text and "schedule=linear decays over the whole run" in run.text


def test_a_refused_resume_leaves_the_run_as_it_was(forge, calm, place):
    shutil.copytree(calm(*SHORT), place)  # follows links: LATEST is a folder
    config = place / "config.yaml"
    before = config.read_bytes()
    refused = resume(forge, place, "n_examples=7")
    assert refused.wait() == 2 and "between two steps" in refused.text, refused.text
    assert config.read_bytes() == before
    config.write_bytes(before.replace(b"lr: 0.001", b"lr: 0.002"))
    edited = resume(forge, place)
    assert edited.wait() == 2 and "lr: 0.001 -> 0.002" in edited.text and "Traceback" not in edited.text, edited.text
    config.write_bytes(before)
    run = resume(forge, place / "LATEST", "n_epochs=2")
    assert run.wait() == 0, run.text
    assert (place / "LATEST").is_symlink() and b"n_epochs: 2" in config.read_bytes()


def test_a_finished_run_has_nothing_to_do(forge, place):
    forge.run(*SHORT, f"local_run_dir={place}")
    before, weights = lines(place), sorted(place.rglob("step-*"))
    run = resume(forge, place)
    assert run.wait() == 0 and lines(place) == before and sorted(place.rglob("step-*")) == weights


def test_auto_goes_on_with_the_newest_run_of_the_same_command(forge, calm, tmp_path):
    settings = (*SHORT, f"local_dirs=[{tmp_path}]", "resume=auto")
    assert forge.start(*settings, kill={"stage": "end", "nth": 0}).wait() != 0
    run = forge.run(*settings)
    (folder,) = (path.parent for path in tmp_path.rglob("LATEST"))
    assert "Resumed from" in run.text and not differences(calm(*SHORT), folder)
    # The same with a folder of one's own, also when it was killed before its first checkpoint.
    own = (*SHORT, f"local_run_dir={tmp_path}/own", "resume=auto")
    assert forge.start(*own, kill={"stage": "open"}).wait() != 0
    assert "starts from its beginning" in forge.run(*own).text
    assert not differences(calm(*SHORT), tmp_path / "own") and not leftovers(tmp_path)


def test_other_data_or_another_reference_is_refused(forge, place, tmp_path):
    shutil.copytree(forge.folder / "data", tmp_path / "data")
    donors = [tmp_path / name for name in ("one", "two")]
    for seed, donor in enumerate(donors):
        forge.run(*SHORT, "checkpoint.formats=[policy]", f"seed={seed}", f"local_run_dir={donor}")
    archive = tmp_path / "policy.pt"
    shutil.copy(donors[0] / "LATEST" / "policy.pt", archive)
    settings = (*SHORT, f"datasets=[{tmp_path}/data]", f"model.archive={archive}", f"local_run_dir={place}")
    assert forge.start(*settings, kill={"stage": "end", "nth": 1}).wait() != 0
    kept = lines(place)

    text = (tmp_path / "data" / "train.jsonl").read_text()
    (tmp_path / "data" / "train.jsonl").write_text(text.replace("bread", "butter"))
    run = resume(forge, place)
    assert run.wait() == 2 and "the train data changed since this run began" in run.text
    (tmp_path / "data" / "train.jsonl").write_text(text)

    shutil.copy(donors[1] / "LATEST" / "policy.pt", archive)
    run = resume(forge, place)
    assert run.wait() == 2 and "the reference model changed since this run began" in run.text
    assert lines(place) == kept, "a refused resume loses no line"

    shutil.copy(donors[0] / "LATEST" / "policy.pt", archive)
    assert resume(forge, place).wait() == 0
    for step in place.glob("step-*"):
        damaged = next((step / "state").glob("*.distcp"))
        damaged.write_bytes(damaged.read_bytes()[:-7])
    run = resume(forge, place)
    assert run.wait() == 2
    assert "none of its checkpoints can be resumed from" in run.text and "bytes, its manifest says" in run.text
    assert lines(place), "and what is there stays"


def test_half_written_cache_files_of_killed_jobs_go(tmp_path):
    from modeling.reference_cache import ReferenceCache

    os.makedirs(tmp_path / "key")
    for name, age in (("a.logps.1-ff.tmp", 7200), ("b.logps.2-ff.tmp", 5)):
        (tmp_path / "key" / name).write_bytes(b"half")
        os.utime(tmp_path / "key" / name, (time.time() - age,) * 2)
    ReferenceCache(str(tmp_path), "key", {}, print).save()
    assert os.listdir(tmp_path / "key") == ["b.logps.2-ff.tmp"], "another job may be writing that one"


# ---- Saving ---------------------------------------------------------------------------------------------------------


def test_saves_by_the_clock(forge, calm, place):
    settings = (*SHORT, "checkpoint.every=1000", "checkpoint.keep_last=null")
    forge.run(*settings, "checkpoint.every_minutes=1e-6", f"local_run_dir={place}")
    assert len(list(place.glob("step-*"))) == 6
    assert not differences(calm(*settings), place)


def test_early_stop_keeps_the_best_and_stays_stopped(forge, place):
    # The reward margin grows from evaluation to evaluation, so that the first one after the start is the best.
    settings = (
        *SHORT,
        "n_epochs=4",
        "early_stopping.metric=rewards_eval/margins",
        "early_stopping.mode=min",
        "early_stopping.patience=2",
        "checkpoint.every=1000",
        "checkpoint.keep_last=1",
        "do_first_eval=false",
    )
    run = forge.start(*settings, f"local_run_dir={place}", kill={"stage": "end", "nth": 1})
    assert run.wait() != 0
    kept = sorted(path.name for path in place.glob("step-*"))
    ended = lines(place)[-1]["examples"]
    assert len(kept) == 2 and "step-12" in kept and f"step-{ended}" in kept and ended < 88
    before = lines(place)
    assert resume(forge, place).wait() == 0
    assert lines(place) == before, "it stopped for good"


DISK = """
import os
from checkpoint import step_writer
ballast, passed = {path!r} + "/ballast", []
def disk(stage):
    passed.append(stage)
    if stage == "rng" and passed.count("open") == 2:      # in the middle of the second save
        with open(ballast, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
            try:
                while True:
                    file.write(bytes(1))
            except OSError:
                pass
    if stage == "open" and passed.count("open") > {until}:
        if os.path.exists(ballast):
            os.unlink(ballast)
step_writer.hooks.append(disk)
"""


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("placement", [(), pytest.param(FSDP, marks=pytest.mark.slow)])
def test_a_full_disk_in_the_middle_of_a_save_costs_that_save_only(forge, calm, small_disk, placement):
    folder = small_disk / "run"
    settings = (*SHORT, *placement, "checkpoint.formats=[state,policy]")
    run = forge.run(*settings, f"local_run_dir={folder}", prepare=DISK.format(path=str(small_disk), until=2))
    assert "WAS NOT SAVED" in run.text and "disk is full" in run.text
    assert "the last good checkpoint is step-8" in run.text
    assert not differences(calm(*settings), folder) and not leftovers(folder)


def test_a_full_disk_at_the_end_is_a_failure(forge, calm, small_disk):
    folder = small_disk / "run"
    run = forge.start(*SHORT, f"local_run_dir={folder}", prepare=DISK.format(path=str(small_disk), until=99))
    assert run.wait() == 1 and "last checkpoint could not be written" in run.text
    os.unlink(small_disk / "ballast")
    assert resume(forge, folder).wait() == 0
    assert not differences(calm(*SHORT), folder) and not leftovers(folder)


TOGETHER = """
import glob, os, time
from checkpoint import run_folder
make = run_folder.make
def together(config):
    open({path!r} + f"-{{os.getpid()}}", "w").close()
    deadline = time.monotonic() + 20
    while len(glob.glob({path!r} + "-*")) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    return make(config)
run_folder.make = together
"""


def test_two_runs_in_one_folder_in_the_same_instant(forge, calm, place, tmp_path):
    def one_wins(start, words):
        runs = [start(), start()]
        codes = sorted(run.wait() for run in runs)
        loser = max(runs, key=lambda run: run.code)
        assert codes == [0, 2] and words in loser.text, [run.text for run in runs]

    together = TOGETHER.format(path=str(tmp_path / "here"))
    one_wins(lambda: forge.start(*SHORT, f"local_run_dir={place}", prepare=together), "another run has just begun")
    assert not differences(calm(*SHORT), place) and not leftovers(place)
    shutil.rmtree(place)
    assert forge.start(*SHORT, f"local_run_dir={place}", kill={"stage": "end", "nth": 0}).wait() != 0
    # A resumed run waits ten seconds for a predecessor that is dying.
    one_wins(lambda: resume(forge, place, prepare=SLOW_STEPS.replace("0.3", "4")), "another run is writing into")
    assert not differences(calm(*SHORT), place) and not leftovers(place)
