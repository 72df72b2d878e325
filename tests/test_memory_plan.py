"""plan=true: the figures against what real passes take, the data's size, the verdict and the advice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, compose_config

import settings
from modeling import loading
from planning import memory_plan, memory_trace
from planning.memory_trace import Work

LLAMA = dict(
    model_type="llama",
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=8192,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)
NEOX = dict(
    model_type="gpt_neox",
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=5,
    num_attention_heads=8,
    vocab_size=8192,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
SHARDED = ["loss=dpo", "trainer=FSDPTrainer", "activation_checkpointing=true"]


def measured(**case):
    """A real pass in a process of its own; glibc is told to give freed memory back, so that it can be seen."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_TRIM_THRESHOLD_": "131072",
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "measured_pass.py"), json.dumps(case)],
        text=True,
        capture_output=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of resident memory are read from /proc")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            dict(overrides=["loss=sft", "optimizer=AdamW"], model=LLAMA, unit=[128, [256], 6], passes=1), id="sft"
        ),
        pytest.param(
            dict(
                overrides=["loss=dpo", "reference.mode=online", "activation_checkpointing=true"],
                model=NEOX,
                unit=[128, [256, 256], 3],
                passes=2,
            ),
            id="dpo online, recomputed, two passes",
        ),
        pytest.param(
            dict(
                overrides=["loss=dpo", "reference.mode=online", "activation_checkpointing=2"],
                model=LLAMA,
                unit=[128, [128, 128], 8],
                passes=1,
            ),
            id="every second block",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(
                overrides=["loss=dpo", "reference.mode=online", "optimizer=AdamW"],
                model=NEOX,
                unit=[128, [128, 128], 8],
                passes=2,
            ),
            id="dpo online",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_peak_of_resident_memory_is_as_planned(case):
    found = measured(fsdp=0, **case)
    assert found["planned"] == pytest.approx(found["measured"], rel=0.2), found


@pytest.mark.parametrize(
    "strategy, precision, model",
    [
        pytest.param("full_shard", "null", LLAMA),
        pytest.param("full_shard", "bfloat16", NEOX, marks=pytest.mark.slow),
        pytest.param("shard_grad_op", "null", LLAMA, marks=pytest.mark.slow),
        pytest.param("shard_grad_op", "bfloat16", NEOX, marks=pytest.mark.slow),
        pytest.param("no_shard", "null", LLAMA, marks=pytest.mark.slow),
        pytest.param("no_shard", "bfloat16", NEOX, marks=pytest.mark.slow),
    ],
)
def test_what_fsdp_holds_whole_is_as_planned(strategy, precision, model):
    found = measured(
        overrides=[*SHARDED, f"fsdp={strategy}", f"model.fsdp_policy_mp={precision}"],
        model=model,
        unit=[32, [32, 32], 2],
        passes=1,
        fsdp=4,
    )
    assert found["planned"] == pytest.approx(found["measured"], rel=0.2), found


def _settings(**changes):
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**LLAMA, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 500, **changes})


def _estimate(*overrides, world=1, work=Work(32, (32, 32), 2), **more):
    config = settings.finalize(compose_config("model=tiny", "loss=dpo", *overrides))
    return memory_plan.estimate(config, world, work=work, settings=_settings(), **more)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("AdamW", {}),
        ("AdamW", {"amsgrad": True}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("Adagrad", {}),
        ("Adafactor", {}),
        ("Rprop", {}),
        ("ASGD", {}),
    ],
)
def test_optimizer_state_is_what_the_optimizer_makes(name, arguments):
    shapes = [(64, 48), (48,), (4, 8, 16)]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, **arguments)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    truth = sum(
        t.numel() * 4 for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.ndim
    )
    needs = memory_trace.optimizer_needs(name, arguments, torch.float32, foreach=False)
    assert sum(needs.state_bytes(shape) for shape in shapes) == truth


def test_foreach_needs_room_for_all_parameters_at_once():
    alone, together = (memory_trace.optimizer_needs("AdamW", {}, torch.float32, foreach) for foreach in (False, True))
    assert alone.step_bytes([1000, 3000]) == alone.step_bytes([3000]) > 0
    assert together.step_bytes([1000, 3000]) == pytest.approx(together.step_bytes([4000]), abs=2) != 0


def test_proportion_agrees_with_the_whole():
    model, work = _settings(num_hidden_layers=8), Work(32, (32, 32), 6)
    whole = memory_trace._trace(model, 8, work, torch.float32, 0, "kept", False, True, None).max()
    assert memory_trace.pass_peaks(model, work, torch.float32, gradients="kept").max() == pytest.approx(whole, rel=0.02)
    a_token = memory_trace.activation_bytes_per_token(model, work, torch.float32)
    assert 0 < a_token * work.tokens <= whole


def test_placements_divide_what_lasts():
    alone = _estimate()
    fsdp = _estimate("trainer=FSDPTrainer", "batch_size=8", world=4)
    hybrid = _estimate("trainer=FSDPTrainer", "fsdp=hybrid_shard", "fsdp.replicas=2", "batch_size=8", world=4)
    whole = _estimate("trainer=FSDPTrainer", "fsdp=no_shard", "batch_size=8", world=4)
    split = _estimate("trainer=TensorParallelTrainer", "tp_size=2", world=2)
    assert fsdp.parts["parameters"] == pytest.approx(alone.parts["parameters"] / 4, rel=0.01)
    assert hybrid.parts["optimizer state"] == pytest.approx(alone.parts["optimizer state"] / 2, rel=0.01)
    assert whole.parts["parameters"] == alone.parts["parameters"] < split.parts["parameters"] * 2
    assert split.parts["parameters"] < alone.parts["parameters"]
    assert alone.parts["communication"] == 0 < fsdp.parts["communication"] < whole.parts["communication"]


def test_reference_and_offloading():
    gpu = dict(kind="cuda", capacity=int(10e9))
    assert _estimate(**gpu).parts["reference"] == 0
    online = _estimate("reference.mode=online", **gpu)
    assert online.parts["reference"] == online.parts["parameters"]
    offloaded = _estimate("trainer=FSDPTrainer", "fsdp.cpu_offload=true", **gpu)
    assert offloaded.parts["parameters"] == 0 < offloaded.host["parameters"]
    frozen = _estimate("trainer=FSDPTrainer", "reference.mode=online", "fsdp.reference_cpu_offload=true", **gpu)
    assert frozen.parts["reference"] == 0 < frozen.host["reference"] and frozen.parts["parameters"]


def test_bfloat16_and_recomputing_take_less():
    full = _estimate("trainer=FSDPTrainer", world=2)
    half = _estimate("trainer=FSDPTrainer", "model.fsdp_policy_mp=bfloat16", world=2)
    again = _estimate("trainer=FSDPTrainer", "activation_checkpointing=true", world=2)
    assert half.parts["parameters"] == full.parts["parameters"] and half.total < full.total
    assert again.parts["activations"] < full.parts["activations"]


def test_verdict_and_advice():
    roomy = _estimate(kind="cuda", capacity=int(80e9), advise=True)
    assert roomy.fits and not roomy.advice
    wanted = dict(kind="cuda", work=Work(128, (128, 128), 1))
    changes = ["reference.mode=online", "batch_size=16", "tokens_per_microbatch=6144"]
    more = _estimate(*changes, capacity=int(80e9), **wanted)
    assert more.work.units == 16
    enough = more.total - (more.total - memory_plan.ACCELERATOR_OVERHEAD) // 3
    tight = _estimate(*changes, advise=True, capacity=int(enough / memory_plan.USABLE), **wanted)
    assert tight.fits is False
    assert any(fits for *_, fits in tight.advice)
    words = " ".join(arguments for arguments, *_ in tight.advice)
    assert "tokens_per_microbatch" in words and "activation_checkpointing=true" in words
    assert [fits for *_, fits in tight.advice[:-1]] == sorted((fits for *_, fits in tight.advice[:-1]), reverse=True)


def test_a_unit_larger_than_the_budget_runs_alone():
    unit = Work(100, (100, 100), 1)
    assert memory_plan.fill(unit, 8, 200).units == 1
    assert memory_plan.fill(unit, 2, 10_000).tokens == 600
    assert 900 <= memory_plan.fill(unit, 8, 1000).tokens <= 1000


def test_data_is_estimated_first_and_exact_once_it_is_tokenised(tmp_path):
    from data.tokenization import load_tokenized

    config = settings.finalize(
        compose_config(
            "model=tiny",
            "loss=dpo",
            f"datasets=[{ROOT / 'examples' / 'quickstart'}]",
            f"data.cache_dir={tmp_path}",
            "n_epochs=3",
        )
    )
    tokenizer = loading.load_tokenizer(config)
    sampled = memory_plan.data_figures(config, tokenizer)
    assert sampled.source.startswith("estimated")
    dataset = load_tokenized(config.datasets[0], "train", tokenizer, config, "pairs")
    exact = memory_plan.data_figures(config, tokenizer)
    assert exact.source.startswith("exact") and exact.examples == len(dataset)
    assert sampled.examples == pytest.approx(exact.examples, rel=0.05)
    assert sampled.tokens == pytest.approx(exact.tokens, rel=0.1)
    examples, steps, tokens = memory_plan.whole_run(config, exact)
    assert (examples, tokens) == (3 * len(dataset), 3 * exact.tokens)
    assert steps == 3 * -(-len(dataset) // config.batch_size)


def test_command_prints_a_plan_and_leaves_nothing(command, tmp_path):
    done = command(
        "model=tiny",
        "loss=dpo",
        f"datasets=[{ROOT / 'examples' / 'quickstart'}]",
        "plan=true",
        "trainer=FSDPTrainer",
        "world_size=4",
        "plan_device_memory_gb=80",
        f"data.cache_dir={tmp_path / 'cache'}",
    )
    assert done.returncode == 0, done.stderr
    assert "Fits:" in done.stdout and "of 80.00 GB" in done.stdout and "4 processes on cuda" in done.stdout
    assert not list(tmp_path.glob("**/config.yaml")) and not list(tmp_path.glob("**/tokens.npy"))


def test_data_out_of_reach_is_said(command):
    done = command("model=tiny", "loss=sft", "datasets=[nobody/nothing]", "plan=true")
    assert done.returncode == 0, done.stderr
    assert "unknown: data not at hand" in done.stdout and "Fits:" in done.stdout


def test_model_out_of_reach_is_an_error(command, tmp_path):
    done = command("model=pythia28", "loss=dpo", "plan=true", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    assert done.returncode != 0 and "EleutherAI/pythia-2.8b" in done.stderr and "Traceback" not in done.stderr


def test_memory_of_a_device_belongs_to_a_plan(compose):
    with pytest.raises(ValueError, match="plan=true"):
        settings.validate(compose("model=tiny", "plan_device_memory_gb=80"))
    with pytest.raises(ValueError, match="plan_device_memory_gb"):
        settings.validate(compose("model=tiny", "plan=true", "plan_device_memory_gb=0"))


def test_auto_takes_the_units_that_fit():
    changes = ["trainer=FSDPTrainer", "batch_size=64"]
    unit = Work(128, (128, 128), 1)
    plans = [_estimate(*changes, kind="cuda", capacity=int(gb * 1e9), work=unit) for gb in (1.6, 3, 80)]
    assert all(plan.fits for plan in plans)
    assert plans[0].work.units < plans[1].work.units < plans[2].work.units == 64
