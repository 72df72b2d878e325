"""A run that is asked to stop saves, ends with the exit code that its scheduler waits for, and goes on later."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import fault_runs
import pytest
from fault_runs import FSDP, ROOT, SHORT, SLOW_STEPS, resume
from left_behind import differences, lines


def has_begun(run):
    return "train  " in run.text


@pytest.mark.parametrize(
    "settings, number, to",
    [
        ((), signal.SIGHUP, "all"),
        (FSDP, signal.SIGUSR1, "parent"),
        (FSDP, signal.SIGTERM, "one rank"),
        pytest.param(FSDP, signal.SIGINT, "parent", marks=pytest.mark.slow),
    ],
)
def test_preemption_saves_and_is_requeued(forge, calm, place, settings, number, to):
    settings = (*SHORT, *settings)
    run = forge.start(*settings, f"local_run_dir={place}", prepare=SLOW_STEPS)
    run.wait_for(lambda: has_begun(run))
    os.kill(fault_runs.descendants(run.pid)[0] if to == "one rank" else run.pid, number)
    assert run.wait() == (130 if number == signal.SIGINT else 75), run.text
    assert "the state is saved. To go on:  python train.py resume=" in run.text and "Traceback" not in run.text
    assert 0 < lines(place)[-1]["examples"] < 22
    assert resume(forge, place).wait() == 0
    assert not differences(calm(*settings), place)


def test_one_wish_signalled_twice_is_one_and_a_second_wish_ends_at_once(forge, place):
    slow_save = SLOW_STEPS + (
        "from checkpoint import step_writer\nstep_writer.hooks.append(lambda stage: stage == 'rng' and time.sleep(60))"
    )
    run = forge.start(*SHORT, "checkpoint.every=1000", f"local_run_dir={place}", prepare=slow_save)
    run.wait_for(lambda: has_begun(run))
    os.kill(run.pid, signal.SIGTERM)
    time.sleep(0.1)
    os.kill(run.pid, signal.SIGTERM)  # as a scheduler does that signals a process and its group
    run.wait_for(lambda: run.stage == "rng")
    time.sleep(1.2)
    assert run.code is None
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(5) == 128 + signal.SIGTERM


def test_ctrl_c_offers_the_command_to_go_on(forge, place):
    place = place.with_name("a folder, with 'signs' = more")
    # Without state among the formats it is saved all the same, and the command asks for it.
    run = forge.start(
        *SHORT,
        f"local_run_dir='{str(place).replace(chr(39), chr(92) + chr(39))}'",
        "checkpoint.formats=[policy]",
        prepare=SLOW_STEPS,
    )
    run.wait_for(lambda: has_begun(run))
    os.kill(run.pid, signal.SIGINT)
    assert run.wait() == 130
    command = run.text.split("To go on:  python train.py ")[1].splitlines()[0]
    echo = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "
    shown = subprocess.run(["bash", "-c", echo + command], text=True, capture_output=True, check=True)
    words = json.loads(shown.stdout)
    run = forge.start(*words, plain=True)
    assert run.wait() == 0, run.text
    assert lines(place)[-1]["examples"] == 22
    shutil.rmtree(place)


def test_a_signal_in_an_evaluation_leaves_it_to_the_resumed_run(forge, calm, place):
    slow_evaluation = """
import time, trainers
compute = trainers.BasicTrainer.losses_and_metrics
def slow(self, split, batch):
    if split == "eval" and self.state.step_number:
        print("evaluating", flush=True)
        time.sleep(0.2)
    return compute(self, split, batch)
trainers.BasicTrainer.losses_and_metrics = slow
"""
    settings = (
        *SHORT,
        "eval_batch_size=1",
        "n_eval_examples=null",
        "eval_every=16",
        "checkpoint.every=16",
        "batch_size=8",
    )
    # Six evaluation steps are fewer than those after which it asks, so the data are taken several times over.
    many = fault_runs.write_data(forge.folder / "many")
    rows = (many / "test.jsonl").read_text().splitlines()
    rows = [row.replace("Of ", f"Of{'f' * n} ") for n in range(4) for row in rows]
    (many / "test.jsonl").write_text("\n".join(rows) + "\n")
    settings = (*settings, f"datasets=[{many}]")
    run = forge.start(*settings, f"local_run_dir={place}", prepare=slow_evaluation)
    run.wait_for(lambda: "evaluating" in run.text)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75, run.text
    assert not [row for row in lines(place) if "loss/eval" in row and row["examples"]]
    assert resume(forge, place).wait() == 0
    assert not differences(calm(*settings), place)


def test_a_signal_before_the_first_step_leaves_nothing(forge, place):
    run = forge.start(
        *SHORT,
        f"local_run_dir={place}",
        prepare="import time\nfrom modeling import loading\n"
        "loading.load_model = lambda *_: (print('loading', flush=True), time.sleep(60))",
    )
    run.wait_for(lambda: "loading" in run.text)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75
    assert not place.exists()


@pytest.mark.slow
def test_torchrun_passes_the_signal_on(forge, calm, place):
    settings = (*SHORT, "trainer=FSDPTrainer", "n_epochs=200")
    words = fault_runs.arguments(forge.folder, *settings, f"local_run_dir={place}")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            "--standalone",
            str(ROOT / "train.py"),
            *words,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=forge.folder,
    )
    deadline = time.monotonic() + 90
    while not (place / "LATEST").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert "the state is saved. To go on:" in output, output
    done = lines(place)[-1]["examples"]
    run = resume(forge, place, f"n_examples={done + 8 - done % 2}", "world_size=2", "n_epochs=null")
    assert run.wait() == 0 or "between two steps" in run.text, run.text
