"""Saving, resuming, and everything that may go wrong meanwhile, on one process."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from small_models import Small, full_disk, same, settings, snapshot, step, tiny

from checkpoint import step_folders, step_writer
from checkpoint.checkpointer import Checkpointer
from checkpoint.step_folders import find_resumable
from modeling.loading import byte_tokenizer
from utils import World

OPTIMIZERS = [
    ("AdamW", dict(amsgrad=True, weight_decay=0.1)),
    ("Adam", dict(lr=torch.tensor(1e-3))),
    ("AdamW", dict(fused=True)),
    ("RMSprop", {}),
    ("RMSprop", dict(momentum=0.9, centered=True)),
    ("SGD", {}),
    ("SGD", dict(momentum=0.9)),
    ("Adagrad", {}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("ASGD", {}),
    ("Rprop", {}),
    ("Adafactor", {}),
    # As optimizer_kwargs come from the settings: lists.
    ("Adam", dict(betas=[0.8, 0.9], amsgrad=True)),
    ("AdamW", dict(betas=[0.8, 0.9], eps=1e-6)),
    ("Adamax", dict(betas=[0.8, 0.9])),
    ("NAdam", dict(betas=[0.8, 0.9])),
    ("RAdam", dict(betas=[0.8, 0.9])),
    ("Rprop", dict(etas=[0.4, 1.3], step_sizes=[1e-6, 10])),
    ("Adafactor", dict(eps=[None, 1e-3], d=2)),
]


@pytest.mark.parametrize("name, kwargs", OPTIMIZERS, ids=[f"{name} {'+'.join(kwargs)}" for name, kwargs in OPTIMIZERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_optimizer_comes_back_bitwise(tmp_path, name, kwargs, dtype):
    def build(seed):
        model = Small(seed, dtype)
        groups = [{"params": [model.embed.weight]}, {"params": [model.body.weight, model.body.bias, model.frozen]}]
        return model, getattr(torch.optim, name)(groups, **{"lr": 1e-3, **kwargs})

    model, optimizer = build(0)
    step(model, optimizer, 2)
    model.count += 5
    optimizer.param_groups[1]["lr"] = 0.5e-3
    checkpointer = Checkpointer(tmp_path, settings(), World())
    assert checkpointer.save(16, model, optimizer, None, {"n": 1}) is None
    saved = snapshot(model, optimizer)
    step(model, optimizer, 2)

    other, resumed = build(1)
    assert checkpointer.load(checkpointer.resumable(), other, resumed) == {"n": 1}
    same(saved, snapshot(other, resumed))
    assert other.head.weight is other.embed.weight and resumed.param_groups[1]["lr"] == 0.5e-3
    step(other, resumed, 2)
    same(snapshot(model, optimizer), snapshot(other, resumed))
    checkpointer.close()


def test_a_save_before_the_first_step_invents_no_optimizer_state(tmp_path):
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer(tmp_path, settings(), World())
    checkpointer.save(0, model, optimizer, None, {})
    assert not optimizer.state
    step(model, optimizer)
    other = Small(1)
    resumed = torch.optim.AdamW(other.parameters())
    step(other, resumed)  # must be forgotten
    checkpointer.load(tmp_path / "step-0", other, resumed)
    assert not resumed.state
    step(other, resumed)
    same(snapshot(model, optimizer), snapshot(other, resumed))


def test_random_generators_and_the_trainer_state_come_back(tmp_path):
    import random

    import numpy as np

    def draw():
        return random.random(), float(np.random.rand()), float(np.random.randn()), torch.rand(3).tolist()

    model = Small()
    np.random.randn()  # leaves the second one of a pair behind
    checkpointer = Checkpointer(tmp_path, settings(), World())
    state = {"cursor": {"epoch": 1, "step": 3}, "best": 0.25, "digest": "ab", "none": None, "scale": torch.tensor(2.0)}
    checkpointer.save(4, model, None, None, state)
    drawn = draw()
    draw()
    assert checkpointer.load(tmp_path / "step-4", model, None) == state
    assert draw() == drawn
    with pytest.raises(TypeError, match="trainer_state"):
        checkpointer.save(8, model, None, None, {"object": SimpleNamespace()})
    assert checkpointer.latest().name == "step-4"


def test_what_does_not_fit_is_listed_and_nothing_is_overwritten(tmp_path):
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer(tmp_path, settings(), World())
    checkpointer.save(4, model, optimizer, None, {})
    wider = Small(1)
    wider.body = torch.nn.Linear(6, 6, dtype=torch.bfloat16)
    wider.new = torch.nn.Linear(1, 1, bias=False)
    before = snapshot(wider, optimizer)
    with pytest.raises(ValueError, match=r"body.weight is \(6, 6\) torch.float32.*bfloat16.*new.weight is missing"):
        checkpointer.load(tmp_path / "step-4", wider, None)
    same(before, snapshot(wider, optimizer))
    with pytest.raises(ValueError, match="state of AdamW, not of SGD"):
        checkpointer.load(tmp_path / "step-4", model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="other parameters"):
        checkpointer.load(tmp_path / "step-4", model, torch.optim.AdamW(model.body.parameters()))


def test_last_ones_the_best_and_latest_are_kept(tmp_path):
    model = Small()
    checkpointer = Checkpointer(tmp_path, settings(keep_last=2, best_metric="rewards_eval/accuracies"), World())
    for examples, accuracy in ((1, 0.5), (2, 0.9), (3, float("nan")), (4, 0.6), (5, 0.7)):
        checkpointer.save(examples, model, None, None, {}, {"rewards_eval/accuracies": accuracy})
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-2", "step-4", "step-5"]
    assert checkpointer.best().name == "step-2" and checkpointer.latest().name == "step-5"
    # a run that fell back to an older step goes on from there: the order is that of saving, not of the numbers
    checkpointer.save(3, model, None, None, {}, {})
    assert find_resumable(tmp_path).name == "step-3"
    checkpointer.keep_last, checkpointer.keep_best = 0, False
    checkpointer.save(6, model, None, None, {}, {})
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-6"]
    assert step_folders.metric_mode("loss/eval") == "min" and step_folders.metric_mode("rewards_eval/margins") == "max"


def test_the_same_step_may_be_saved_again(tmp_path):
    model = Small()
    checkpointer = Checkpointer(tmp_path, settings(), World())
    checkpointer.save(4, model, None, None, {"n": 1})
    assert checkpointer.save(4, model, None, None, {"n": 2}) is None
    assert checkpointer.load(checkpointer.resumable(), model, None) == {"n": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "LATEST", "step-4"]


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["open", "state", "rng", "policy", "hf", "checksum", "manifest", "rename", "latest"])
def test_a_failing_save_leaves_the_run_alive_and_the_last_checkpoint_good(tmp_path, monkeypatch, stage):
    model, notices = tiny("llama"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(tmp_path, settings(formats=["state", "policy", "hf"]), World(), notices.append)
    assert checkpointer.save(1, model, optimizer, None, {"n": 1}) is None
    monkeypatch.setattr(step_writer, "hooks", [full_disk(stage)])
    problem = checkpointer.save(2, model, optimizer, None, {"n": 2})
    assert "No space left" in problem and checkpointer.problem == problem
    assert "step-2 WAS NOT SAVED" in notices[0] and "last good checkpoint is step-1" in notices[0] and len(notices) == 1
    assert not list(tmp_path.glob("*.tmp")) and checkpointer.latest().name == "step-1"
    monkeypatch.setattr(step_writer, "hooks", [])
    step(model, optimizer)
    assert checkpointer.save(3, model, optimizer, None, {"n": 3}) is None and checkpointer.problem is None
    assert checkpointer.load(checkpointer.resumable(), model, optimizer) == {"n": 3}


def test_free_space_is_looked_at_before_writing(tmp_path, monkeypatch):
    notices = []
    checkpointer = Checkpointer(tmp_path, settings(), World(), notices.append)
    monkeypatch.setattr(step_folders, "free_bytes", lambda path: 1000)
    model = Small()
    assert "1.05 MB" in checkpointer.save(1, model, None, None, {}) and "0.00 MB free" in notices[0]
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]
    large = tiny("llama")
    assert step_writer.estimate_bytes(large, None, ["policy"]) > sum(p.nbytes for p in large.parameters())


def in_a_child(action):
    """Runs an action in a forked process. Returns its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hung")


STAGES = ["open", "state", "rng", "policy", "hf", "checksum", "manifest", "rename", "latest", "retention", "end"]


@pytest.mark.parametrize("stage, again", [(s, False) for s in STAGES] + [(s, True) for s in [*STAGES, "replace"]])
def test_kill_9_inside_a_save(tmp_path, stage, again):
    everything = settings(formats=["state", "policy", "hf"], keep_last=1)
    model, first = tiny("neox"), 2 if again else 1
    checkpointer = Checkpointer(tmp_path, everything, World())
    checkpointer.save(first, model, None, None, {"n": 1}, {"loss/eval": 2.0})
    checkpointer.close()

    def killed():
        step_writer.hooks.append(lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == stage else None)
        Checkpointer(tmp_path, everything, World()).save(2, model, None, None, {"n": 2}, {"loss/eval": 1.0})

    assert in_a_child(killed) == -signal.SIGKILL
    found = find_resumable(tmp_path)  # before anyone cleared up
    checkpointer = Checkpointer(tmp_path, everything, World(), lambda text: None)
    resumed = checkpointer.resumable()
    assert resumed.name == found.name.removesuffix(".replaced")
    assert checkpointer.latest() == resumed, "even if this was the run's last save"
    n = checkpointer.load(resumed, model, None)["n"]
    assert n == (2 if stage in ("latest", "retention", "end") else 1)
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith((".tmp", ".replaced"))]
    assert [p.name for p in tmp_path.glob("step-*")] == [resumed.name], "keep_last=1 holds after the resume already"
    checkpointer.save(3, model, None, None, {"n": 3}, {"loss/eval": 0.5})
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-3"] and checkpointer.latest().name == "step-3"


def test_damage_is_found_and_the_step_before_is_offered(tmp_path):
    model, notices = Small(), []
    checkpointer = Checkpointer(tmp_path, settings(keep_last=9), World())
    for n in range(1, 6):
        checkpointer.save(n, model, None, None, {"n": n})
    assert find_resumable(tmp_path, notices.append).name == "step-5" and not notices
    shard = next((tmp_path / "step-5" / "state").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    shard = next((tmp_path / "step-4" / "state").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size - 1)
    (tmp_path / "step-3" / "manifest.json").write_text("{")
    (tmp_path / "step-2" / "state" / "trainer.pt").unlink()
    assert find_resumable(tmp_path, notices.append).name == "step-1"
    notices = "\n".join(notices)
    for words in (
        "differs from its checksum",
        "its manifest says",
        "no readable manifest",
        "cannot be read",
        "step-1 instead",
    ):
        assert words in notices
    with pytest.raises(ValueError, match="no run folder"):
        find_resumable(tmp_path / "nowhere")
    assert step_folders.checksum(shard, "crc32")[1] and step_folders.checksum(shard, "md9")[1] is None


def test_a_state_that_would_run_code_is_refused(tmp_path):
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    model = Small()
    checkpointer = Checkpointer(tmp_path, settings(), World())
    checkpointer.save(1, model, None, None, {})
    (tmp_path / "step-1" / "state" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="not allowed"):
        checkpointer.load(tmp_path / "step-1", model, None)
    assert not (tmp_path / "evil").exists()


def test_two_runs_cannot_write_into_one_folder(tmp_path):
    checkpointer = Checkpointer(tmp_path, settings(), World())
    (tmp_path / "step-1.tmp").mkdir()

    def second():
        with pytest.raises(ValueError, match="another run is writing"):
            step_folders.lock(tmp_path, patience=0.1)

    assert in_a_child(second) == 0
    assert (tmp_path / "step-1.tmp").exists()  # a living run's half-written folder is left alone
    checkpointer.close()
    assert in_a_child(lambda: step_folders.lock(tmp_path, patience=0.1)) == 0


def test_a_run_folder_stays_taken_when_its_lock_file_is_opened_and_closed_by_others(tmp_path):
    held = step_folders.lock(tmp_path)
    open(tmp_path / step_folders.LOCK).close()  # as copying the folder would
    with pytest.raises(ValueError, match="another run is writing"):
        step_folders.lock(tmp_path, patience=0)  # and a second run of this process
    assert in_a_child(lambda: step_folders.lock(tmp_path, patience=0)) != 0
    held.close()
    step_folders.lock(tmp_path, patience=0).close()


def test_saving_in_the_background_keeps_the_weights_of_its_moment(tmp_path, monkeypatch):
    model = tiny("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    checkpointer = Checkpointer(tmp_path, settings(formats=["state", "policy", "hf"], async_save=True), World())
    trained_on = threading.Event()
    monkeypatch.setattr(step_writer, "hooks", [lambda stage: stage in ("state", "policy") and trained_on.wait(60)])
    assert checkpointer.save(1, model, optimizer, byte_tokenizer(), {"n": 1}) is None
    saved = snapshot(model, optimizer)
    step(model, optimizer, 2)  # while it is written
    assert checkpointer.latest() is None and checkpointer.poll() is None and checkpointer.latest() is None
    trained_on.set()
    assert checkpointer.finish() is None and checkpointer.latest().name == "step-1"
    other = tiny("llama", 1)
    resumed = torch.optim.AdamW(other.parameters(), lr=0.1)
    checkpointer.load(checkpointer.resumable(), other, resumed)
    same(saved, snapshot(other, resumed))
    policy = torch.load(tmp_path / "LATEST" / "policy.pt", weights_only=True)["state"]
    same({name: saved[name] for name in policy}, policy)
    monkeypatch.setattr(step_writer, "hooks", [full_disk("policy")])
    assert checkpointer.save(2, model, optimizer, None, {"n": 2}) is None
    assert "No space left" in checkpointer.close() and checkpointer.latest().name == "step-1"
    monkeypatch.setattr(step_writer, "hooks", [])
