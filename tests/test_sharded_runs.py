"""Sharded runs as their users see them: weights and samples, torchrun, the command line, sweeps."""

import functools
import json
import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from conftest import ROOT, free_port
from runs import FSDP, LLAMA, MODELS, STRONG, distance, train
from torch.distributed.tensor import DTensor

import private_apis
from modeling.blocks import find_blocks
from training import gathering

# ---- Saving, samples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FULL_SHARD", "TP"])
def test_a_sharded_runs_weights_open_everywhere(folder, sharded, name):
    from transformers import AutoModelForCausalLM

    run = sharded(2, name, "debug=false", "do_first_eval=true", model="neox", loss="sft")[0]
    latest = os.path.join(run.run_dir, "LATEST")
    content = torch.load(os.path.join(latest, "policy.pt"), weights_only=True)
    assert all(torch.equal(run.weights[key], value) for key, value in content["state"].items())
    model = AutoModelForCausalLM.from_pretrained(os.path.join(latest, "hf"))
    assert all(torch.equal(run.weights[key], value) for key, value in model.state_dict().items())
    alone = train(
        folder, *MODELS["neox"], "loss=sft", "n_examples=4", "do_first_eval=true", f"model.archive={latest}/policy.pt"
    )
    assert alone.evals[0]["loss/eval"] == pytest.approx(run.evals[-1]["loss/eval"], rel=1e-6)
    assert alone.evals[0]["loss/eval"] != pytest.approx(run.evals[0]["loss/eval"], rel=1e-3)


class Gathers(private_apis.dispatch_mode()):
    """Counts what FSDP2 gathers, and of how many models blocks are whole at once."""

    def __init__(self, models):
        super().__init__()
        self.blocks = [find_blocks(model, None) for model in models]
        self.count = self.most_whole = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "_allgather_base_":
            self.count += 1
            whole = [sum(not isinstance(next(block.parameters()), DTensor) for block in of) for of in self.blocks]
            self.most_whole = max(self.most_whole, sum(map(bool, whole)))
        return func(*args, **(kwargs or {}))


def watch_samples(trainer, free: int) -> None:
    """Note in trainer.seen.gathers what each writing of samples gathers, with so many bytes of memory."""
    write = trainer.write_samples
    trainer.seen.gathers = []

    def watched():
        models = [model for model in (trainer.policy, trainer.objective.reference_model) if model is not None]
        with Gathers(models) as gathers, patch.object(gathering, "free_memory", lambda device: free):
            write()
        trainer.seen.gathers.append((gathers.count, gathers.most_whole))

    trainer.write_samples = watched


@pytest.mark.parametrize(
    "name, more, room",
    [
        ("FULL_SHARD", [], True),
        ("FULL_SHARD", ["reference.mode=online"], True),
        ("FULL_SHARD", ["reference.mode=online"], False),
        ("TP", [], True),
    ],
)
def test_samples_are_those_of_one_device(folder, sharded, name, more, room):
    """Three prompts on two ranks, some of which end early: nothing hangs, and nobody's text depends on the world.

    Where there is memory each model gathers its parameters once, one model after the other.
    """
    options = [
        "sample_during_eval=true",
        "do_first_eval=true",
        "n_eval_model_samples=3",
        "sampling.max_new_tokens=12",
        "n_examples=10",
        "eval_every=5",
        *more,
    ]
    alone = train(folder, *LLAMA, *STRONG, *options)
    watch = functools.partial(watch_samples, free=1 << 40 if room else 1 << 20)
    runs = sharded(2, name, *options, prepare=watch)
    rows = [
        [
            (row["examples"], row["prompt"], row["policy"], row["reference"])
            for row in map(json.loads, open(os.path.join(run.run_dir, "samples.jsonl")))
        ]
        for run in (alone, runs[0])
    ]
    assert len(rows[0]) == 9 and rows[0] == rows[1]
    if name == "FULL_SHARD":
        groups = 3  # two blocks and the root
        wrote = [2 if more else 1, 1, 1]  # models: the reference's samples are written once
        for gathers, whole in runs[0].gathers:
            models = wrote.pop(0)
            assert (gathers, whole) == (groups * models, 1) if room else gathers > 10 * models


# ---- A world that others start --------------------------------------------------------------------------------------


def test_two_nodes_under_torchrun_train_together(folder, tmp_path):
    port = free_port()
    options = [
        "model=tiny",
        "loss=dpo",
        *FSDP,
        "device=cpu",
        f"datasets=[{folder}/data]",
        "n_examples=10",
        "batch_size=5",
        "lr=1e-4",
        "warmup_steps=2",
        "wandb.enabled=false",
        "sample_during_eval=false",
        "local_dirs=[runs]",
        "data.num_workers=1",
        "minimum_log_interval_secs=0",
    ]
    nodes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes=2",
                "--nproc-per-node=1",
                f"--node-rank={node}",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
                str(ROOT / "train.py"),
                *options,
            ],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for node in range(2)
    ]
    try:
        output = [node.communicate(timeout=200)[0] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                node.kill()
    assert [node.returncode for node in nodes] == [0, 0], output[0][-3000:] + output[1][-3000:]
    lines = [json.loads(line) for path in tmp_path.glob("runs/*/*/metrics.jsonl") for line in open(path)]
    found = [line["loss/train"] for line in lines if "loss/train" in line]
    alone = train(folder, *LLAMA, *STRONG, "n_examples=10")
    assert found == pytest.approx(alone.losses, abs=1e-5) and len(found) == 2


def test_the_command_line_starts_a_process_a_device(folder, tmp_path, command):
    options = [
        "model=tiny",
        "loss=dpo",
        *FSDP,
        "device=cpu",
        "world_size=2",
        f"datasets=[{folder}/data]",
        "n_examples=10",
        "batch_size=5",
        "lr=1e-4",
        "warmup_steps=2",
        "wandb.enabled=false",
        "sampling.max_new_tokens=2",
        "local_dirs=[runs]",
        "minimum_log_interval_secs=0",
    ]
    done = command(*options, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    (run_dir,) = tmp_path.glob("runs/*/tiny_dpo_*")
    lines = [json.loads(line) for line in open(run_dir / "metrics.jsonl")]
    found = [line["loss/train"] for line in lines if "loss/train" in line]
    alone = train(folder, *LLAMA, *STRONG, "n_examples=10")
    assert found == pytest.approx(alone.losses, abs=1e-5)
    weights = torch.load(run_dir / "LATEST" / "policy.pt", weights_only=True)["state"]
    assert distance(weights, alone.weights) < 1e-4
    assert "rank 1 holds" in done.stdout and "of 0.1 M parameters" in done.stdout


@pytest.mark.slow
def test_a_sweep_over_sharded_runs(folder, tmp_path, command):
    options = [
        "-m",
        "model=tiny",
        "loss=dpo",
        "loss.beta=0.05,0.5",
        *FSDP,
        "device=cpu",
        "world_size=2",
        f"datasets=[{folder}/data]",
        "n_examples=10",
        "lr=1e-4",
        "wandb.enabled=false",
        "sample_during_eval=false",
        "local_dirs=[runs]",
    ]
    done = command(*options, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(tmp_path.glob("runs/*/tiny_dpo_*/metrics.jsonl"))) == 2
