"""plan=true: the figures against what real passes take, the data's size, the verdict and the advice."""

import dataclasses
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
from planning import trace
from planning.advice import advise
from planning.batch_shape import BatchShape, fill
from planning.data_figures import data_figures, whole_run
from planning.estimate import ACCELERATOR_OVERHEAD, estimate
from planning.optimizer_memory import optimizer_needs
from planning.plan import USABLE
from planning.token_budget import token_budget

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
    """A real pass in a process of its own; glibc is set to give freed memory back, so that it can be seen."""
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


def _model_config(**changes):
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**LLAMA, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 500, **changes})


def _config(*overrides):
    return settings.finalize(compose_config("model=tiny", "loss=dpo", *overrides))


SMALL = BatchShape(32, (32, 32), 2)


def _estimate(*overrides, world=1, batch=SMALL, **more):
    return estimate(_config(*overrides), world, batch=batch, model_config=_model_config(), **more)


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
    needs = optimizer_needs(name, arguments, torch.float32, foreach=False)
    assert sum(needs.state_bytes(shape) for shape in shapes) == truth


def test_foreach_needs_room_for_all_parameters_at_once():
    alone, together = (optimizer_needs("AdamW", {}, torch.float32, foreach) for foreach in (False, True))
    assert alone.step_bytes([1000, 3000]) == alone.step_bytes([3000]) > 0
    assert together.step_bytes([1000, 3000]) == pytest.approx(together.step_bytes([4000]), abs=2) != 0


def test_proportion_agrees_with_the_whole():
    model, shape = _model_config(num_hidden_layers=8), BatchShape(32, (32, 32), 6)
    whole = trace.trace_pass(model, 8, shape, torch.float32, 0, "kept", False, True, None).max()
    assert trace.pass_peaks(model, shape, torch.float32, gradients="kept").max() == pytest.approx(whole, rel=0.02)


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
    assert _estimate(kind="cuda", capacity=int(80e9)).fits
    wanted = dict(kind="cuda", batch=BatchShape(128, (128, 128), 1))
    changes = ["reference.mode=online", "batch_size=16", "tokens_per_microbatch=6144"]
    more = _estimate(*changes, capacity=int(80e9), **wanted)
    assert more.batch.units == 16
    enough = more.total - (more.total - ACCELERATOR_OVERHEAD) // 3
    tight = _estimate(*changes, capacity=int(enough / USABLE), **wanted)
    assert tight.fits is False
    advice = advise(_config(*changes), tight, _model_config())
    assert any(fits for *_, fits in advice)
    words = " ".join(arguments for arguments, *_ in advice)
    assert "tokens_per_microbatch" in words and "activation_checkpointing=true" in words
    assert [fits for *_, fits in advice[:-1]] == sorted((fits for *_, fits in advice[:-1]), reverse=True)


def test_a_unit_larger_than_the_budget_runs_alone():
    unit = BatchShape(100, (100, 100), 1)
    assert fill(unit, 8, 200).units == 1
    assert fill(unit, 2, 10_000).tokens == 600
    assert 900 <= fill(unit, 8, 1000).tokens <= 1000


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
    sampled = data_figures(config, tokenizer)
    assert sampled.source.startswith("estimated")
    dataset = load_tokenized(config.datasets[0], "train", tokenizer, config, "pairs")
    exact = data_figures(config, tokenizer)
    assert exact.source.startswith("exact") and exact.examples == len(dataset)
    assert sampled.examples == pytest.approx(exact.examples, rel=0.05)
    assert sampled.tokens == pytest.approx(exact.tokens, rel=0.1)
    examples, steps, tokens = whole_run(config, exact)
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


def test_data_out_of_reach_is_reported(command):
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


@pytest.mark.parametrize("precision", ["auto", "bfloat16"])
def test_advice_for_one_device_in_half_precision_can_be_followed(precision):
    """FSDP2 casts its parameters, but it is one device all the same."""
    config, model = (
        _config("optimizer=AdamW", "batch_size=64", f"precision={precision}"),
        _model_config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4),
    )
    unit = BatchShape(128, (128, 128), 1)
    tight = estimate(config, 1, kind="cuda", capacity=int(2e9), batch=unit, model_config=model)
    assert tight.fits is False
    advice = advise(config, tight, model)
    assert any("trainer=FSDPTrainer" in arguments for arguments, *_ in advice)
    for arguments, *_ in advice:
        assert "precision" not in arguments and "fsdp." not in arguments and "Adafactor" not in arguments
        assert ("world_size" in arguments) == ("trainer=FSDPTrainer" in arguments)


def test_auto_takes_the_units_that_fit():
    changes = ["trainer=FSDPTrainer", "batch_size=64", "precision=float32"]
    unit = BatchShape(128, (128, 128), 1)
    plans = [_estimate(*changes, kind="cuda", capacity=int(gb * 1e9), batch=unit) for gb in (1.6, 3, 80)]
    assert all(plan.fits for plan in plans)
    assert plans[0].batch.units < plans[1].batch.units < plans[2].batch.units == 64


@pytest.mark.parametrize("every", ["false", "true", "2", "4"])
@pytest.mark.parametrize("layers", [6, 40])
def test_what_the_automatic_budget_fills_fits_by_what_a_plan_counts(layers, every):
    """A micro-batch of as many tokens as the trainers choose takes no more than what was free, however many blocks are
    recomputed."""
    free, unit = int(4e9), BatchShape(128, (128, 128), 1)
    model = _model_config(num_hidden_layers=layers, hidden_size=512, intermediate_size=1536)
    budget = token_budget(_config(f"activation_checkpointing={every}"), model, "cuda", free, threads=1)
    shape = dataclasses.replace(unit, units=max(1, budget // unit.unit_tokens))
    every = int(json.loads(every))
    peak = trace.pass_peaks(model, shape, torch.float32, every=every, gradients="handed over").max()
    assert 0.2 * free < peak < 0.7 * free or budget == 65536


def test_a_plan_takes_the_budget_that_the_trainer_takes():
    unit, capacity, overrides = (
        BatchShape(128, (128, 128), 1),
        int(1.9e9),
        ["activation_checkpointing=2", "precision=float32"],
    )
    sharded = ["trainer=FSDPTrainer", "batch_size=256", *overrides]
    plan = _estimate(*sharded, world=2, kind="cuda", capacity=capacity, batch=unit)
    free = capacity - ACCELERATOR_OVERHEAD - plan.parts["parameters"] - plan.parts["buffers"]
    budget = token_budget(_config(*sharded), _model_config(), "cuda", free, threads=1)
    assert plan.fits and 0.9 * budget < plan.batch.tokens <= budget < 65536 and not plan.notes[1:]
    # One device repeats steps that do not fit in smaller passes, and the plan is that of the passes that fit.
    alone = _estimate(*overrides, "batch_size=256", "optimizer=AdamW", kind="cuda", capacity=int(1.34e9), batch=unit)
    assert alone.fits and any("repeated" in note for note in alone.notes)
    given = _estimate(*overrides, "tokens_per_microbatch=700", kind="cpu", capacity=capacity, batch=unit)
    assert given.batch.tokens <= 700


def test_a_cpus_budget_depends_on_the_threads_of_a_rank(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        unit = BatchShape(128, (128, 128), 1)
        plan = _estimate("batch_size=64", kind="cpu", capacity=int(80e9), batch=unit)
    finally:
        torch.set_num_threads(before)
    assert 0.9 * 1536 < plan.batch.tokens <= token_budget(_config(), _model_config(), "cpu", None, 4) == 1536


def test_a_reference_of_another_model_and_log_probs_of_the_whole_vocabulary_are_counted(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(LLAMA | {"hidden_size": 1024}))
    gpu = dict(kind="cuda", capacity=int(10e9))
    same = _estimate("reference.mode=online", **gpu)
    larger = _estimate("reference.mode=online", f"reference.name_or_path={other}", **gpu)
    assert larger.parts["reference"] > 1.5 * same.parts["reference"]
    assert larger.parts["parameters"] == same.parts["parameters"]
    shape = dict(batch=BatchShape(16, (32, 16), 2), **gpu)
    dpo, tdpo = (_estimate("reference.mode=online", f"loss={loss}", **shape) for loss in ("dpo", "tdpo"))
    assert tdpo.parts["logits"] - dpo.parts["logits"] == 2 * 48 * 4 * _model_config().vocab_size
