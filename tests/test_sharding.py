"""Sharded training is the computation of BasicTrainer: every placement on 1, 2 and 4 processes over gloo."""

import json
import math
import os

import pytest
import torch
from runs import (
    FSDP,
    LLAMA,
    MODELS,
    PLACEMENTS,
    STRONG,
    assert_same_training,
    baseline,
    distance,
    new_run_dir,
    placement,
    save_model,
    settings_of,
    spoil,
    train,
    train_together,
)

LOSSES = ("sft", "dpo", "ipo")

# ---- The matrix -----------------------------------------------------------------------------------------------------

WHOLE = [
    (size, name, loss, model)
    for size in (1, 2, 4)
    for name in PLACEMENTS
    for loss in LOSSES
    for model in MODELS
    if not (name == "FSDP+TP" and size != 4)
]
# Every placement with every loss and with both models, on two processes; every placement on one.
COVERING = {
    (2, name, loss, model)
    for index, name in enumerate(PLACEMENTS)
    for k, loss in enumerate(LOSSES)
    for model in [("llama", "neox")[(index + k) % 2]]
}
COVERING |= {(1, name, "dpo", "neox") for name in ("FULL_SHARD", "NO_SHARD", "TP")}


@pytest.mark.parametrize(
    "size, name, loss, model",
    [
        pytest.param(*case, id="-".join(map(str, case)), marks=[] if case in COVERING else pytest.mark.slow)
        for case in WHOLE
    ],
)
def test_every_placement_trains_as_one_device_does(folder, sharded, size, name, loss, model):
    runs = sharded(size, name, model=model, loss=loss)
    assert_same_training(baseline(folder, *MODELS[model], f"loss={loss}"), runs[0])
    for run in runs[1:]:  # metrics are global on every rank
        assert run.losses == runs[0].losses and run.norms == runs[0].norms and run.evals == runs[0].evals
    plain = baseline(folder, *MODELS[model], f"loss={loss}").evals[-1]
    for metric, value in runs[0].evals[-1].items():
        assert value == pytest.approx(plain[metric], abs=1e-5 * max(1, abs(plain[metric]))), metric


@pytest.mark.parametrize(
    "size, name",
    [
        (2, "FULL_SHARD"),
        (2, "TP"),
        pytest.param(4, "FSDP+TP", marks=pytest.mark.slow),
        pytest.param(4, "HYBRID_SHARD", marks=pytest.mark.slow),
    ],
)
def test_the_same_world_twice_is_the_same_bits(sharded, size, name):
    one, other = sharded(size, name)[0], sharded(size, name)[0]
    assert one.losses == other.losses and one.norms == other.norms
    assert all(torch.equal(value, other.weights[key]) for key, value in one.weights.items())


@pytest.mark.parametrize(
    "change",
    [
        ["tokens_per_microbatch=1"],  # ranks with nothing in a micro-batch
        ["gradient_accumulation_steps=5"],
        ["activation_checkpointing=true"],
        ["activation_checkpointing=2"],
        ["fsdp.cpu_offload=true"],
        ["fsdp.backward_prefetch=null", "fsdp.forward_prefetch=1"],
        ["reference.mode=online"],
        ["fsdp.reference_cpu_offload=true", "reference.mode=online"],
        ["prefix_sharing=false"],
        ["model.attention=plain"],
        ["shuffle=prompts"],
        ["batch_size=2"],
        ["model.frozen=[model.embed_tokens.weight,*norm*]"],
    ],
    ids=lambda change: change[0],
)
def test_options_of_a_sharded_run_do_not_change_it(folder, sharded, change):
    plain = baseline(folder, *LLAMA)
    if change[0].startswith(("shuffle", "batch_size", "model.frozen")):  # which make another run
        plain = train(folder, *LLAMA, *STRONG, *change)
    assert_same_training(plain, sharded(2, "FULL_SHARD", *change)[0])


@pytest.mark.parametrize(
    "change", ["tokens_per_microbatch=1", "activation_checkpointing=true", "reference.mode=online"]
)
def test_options_of_a_tensor_parallel_run_do_not_change_it(folder, sharded, change):
    assert_same_training(baseline(folder, *MODELS["neox"]), sharded(2, "TP", change, model="neox")[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, change",
    [
        ("FSDP+TP", ["fsdp.cpu_offload=true"]),
        ("FSDP+TP", ["reference.mode=online"]),
        ("FSDP+TP", ["fsdp=no_shard"]),
        ("FSDP+TP", ["tokens_per_microbatch=1"]),
        ("HYBRID_SHARD", ["reference.mode=online", "fsdp.cpu_offload=true"]),
    ],
    ids=str,
)
def test_options_on_a_grid_of_ranks_do_not_change_it(folder, sharded, name, change):
    assert_same_training(baseline(folder, *MODELS["neox"]), sharded(4, name, *change, model="neox")[0])


@pytest.mark.slow
def test_more_ranks_than_examples_in_a_step(folder, sharded):
    """26 pairs in steps of 4 end in one of 2, on four ranks."""
    plain = train(folder, *LLAMA, *STRONG, "batch_size=4")
    assert_same_training(plain, sharded(4, "FULL_SHARD", "batch_size=4")[0])
    assert_same_training(plain, sharded(4, "FULL_SHARD", "batch_size=4", "tokens_per_microbatch=1")[0])


@pytest.mark.parametrize(
    "optimizer",
    [
        "AdamW",
        "SGD",
        pytest.param("Adagrad", marks=pytest.mark.slow),
        pytest.param("NAdam", marks=pytest.mark.slow),
        pytest.param("Adamax", marks=pytest.mark.slow),
    ],
)
def test_other_optimizers(folder, sharded, optimizer):
    plain = train(folder, *LLAMA, *STRONG, f"optimizer={optimizer}")
    assert_same_training(plain, sharded(2, "FULL_SHARD", f"optimizer={optimizer}")[0])


@pytest.mark.parametrize("eval_batch_size", [1, 3, 5])
def test_evaluation_does_not_depend_on_batches_and_world(folder, sharded, eval_batch_size):
    evals = sharded(2, "FULL_SHARD", f"eval_batch_size={eval_batch_size}", "lr=1e-12", "n_examples=5")[0].evals[-1]
    alone = sharded(1, "FULL_SHARD", "eval_batch_size=16", "lr=1e-12", "n_examples=5")[0].evals[-1]
    assert evals.keys() == alone.keys()
    for name, value in evals.items():
        assert value == pytest.approx(alone[name], abs=1e-6 * max(1, abs(alone[name]))), name


def test_bfloat16_is_close_and_keeps_float32_weights(folder, sharded):
    for mode in ("cached", "online"):
        run = sharded(2, "FULL_SHARD", "model.fsdp_policy_mp=bfloat16", f"reference.mode={mode}")[0]
        assert run.losses[0] == pytest.approx(math.log(2), abs=1e-6) and run.steps[0]["rewards_train/margins"] == 0
        assert max(abs(a - b) for a, b in zip(run.losses, baseline(folder, *LLAMA).losses)) < 0.05
        assert all(value.dtype == torch.float32 for value in run.weights.values())
        assert distance(run.weights, baseline(folder, *LLAMA).weights) < 0.02


def test_bfloat16_on_one_device_is_that_of_many(folder, sharded):
    """One device casts its parameters by the same means: FSDP2 over a group of one."""
    alone = train(folder, *LLAMA, *STRONG, "precision=bfloat16")
    together = sharded(2, "FULL_SHARD", "precision=bfloat16")[0]
    assert alone.losses == pytest.approx(together.losses, abs=5e-3)
    assert distance(alone.weights, together.weights) < 5e-3


def test_float16_is_refused_on_a_cpu(folder):
    with pytest.raises(ValueError, match="model.fsdp_policy_mp=float16 needs a GPU"):
        settings_of(folder, *LLAMA, *FSDP, "world_size=2", "model.fsdp_policy_mp=float16")


@pytest.mark.parametrize("optimizer", ["Adafactor", "Rprop"])
def test_optimizers_that_cannot_work_on_shards_are_refused(folder, optimizer):
    with pytest.raises(ValueError, match=f"optimizer={optimizer}.*BasicTrainer"):
        settings_of(folder, *LLAMA, *FSDP, "world_size=2", f"optimizer={optimizer}")
    settings_of(folder, *LLAMA, f"optimizer={optimizer}")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma", "phi"])
def test_tensor_parallel_architectures_train_as_on_one_device(folder, pools, tmp_path, kind):
    """Among them norms over a head's width, whose gradients the ranks have parts of (qwen3); biases (phi, qwen2)."""
    save_model(tmp_path / "model", kind)
    options = ["model=blank_model", f"model.name_or_path={tmp_path}/model", *STRONG]
    alone = train(folder, *options)
    assert_same_training(alone, train_together(pools(2), folder, *options, *placement("TP", 2))[0])


def note_examples(trainer):
    """Keeps the pairs that this rank trains on, by step."""
    step = trainer.train_step

    def noted(s):
        units = [unit for batch in s.micro_batches if batch is not None for unit in batch.units]
        trainer.seen.examples.append(
            [(unit.group, unit.response_ids[a], unit.response_ids[b]) for unit in units for a, b in unit.pairs]
        )
        return step(s)

    trainer.train_step = noted


def test_every_example_is_trained_on_once_by_one_rank(sharded):
    ranks = [run.examples for run in sharded(2, "FULL_SHARD", "n_examples=26", "n_epochs=1", prepare=note_examples)]
    assert len(ranks[0]) == len(ranks[1]) == 6
    seen = [pair for rank in ranks for step in rank for pair in step]
    assert len(seen) == len(set(seen)) == 26
    assert [len(a) + len(b) for a, b in zip(*ranks)] == [5, 5, 5, 5, 5, 1]
    tensor_parallel = [run.examples for run in sharded(2, "TP", "n_examples=26", "n_epochs=1", prepare=note_examples)]
    assert tensor_parallel[0] == tensor_parallel[1] and sum(map(len, tensor_parallel[0])) == 26


def test_the_policy_starts_as_the_reference_on_shards(sharded, tmp_path):
    cache = [f"reference.cache_dir={tmp_path}/cache"]  # cold the first time, then warm
    for name, more in (
        ("FULL_SHARD", cache),
        ("FULL_SHARD", cache),
        ("FULL_SHARD", ["reference.mode=online"]),
        ("TP", []),
    ):
        run = sharded(2, name, "do_first_eval=true", "n_examples=10", *more, model="neox")[0]
        assert run.losses[0] == pytest.approx(math.log(2), abs=1e-6) and run.evals[0]["rewards_eval/margins"] == 0
        assert run.steps[0]["rewards_train/margins"] == 0 and run.evals[0]["rewards_eval/accuracies"] == 0.5


def spoil_rank_1(trainer):
    if trainer.world.rank == 1:
        spoil(3)(trainer)


def train_into_trouble(world, folder, options, run_dir):
    """(error, updates done, weights unchanged) of a run on this rank in which a step is not finite."""
    held = {}

    def prepare(trainer):
        spoil_rank_1(trainer)
        step = trainer.train_step

        def watched(s):
            held["trainer"] = trainer
            held["before"] = [p.to_local().clone() for p in trainer.policy.parameters()]
            return step(s)

        trainer.train_step = watched

    try:
        train(folder, *options, world=world, prepare=prepare, run_dir=run_dir)
    except FloatingPointError as problem:
        trainer = held["trainer"]
        return (
            str(problem),
            trainer.state.updates,
            all(torch.equal(a, p.to_local()) for a, p in zip(held["before"], trainer.policy.parameters())),
        )


def test_a_step_that_is_not_finite_on_one_rank_stops_all(folder, pools):
    run_dir = new_run_dir(folder)
    options = [*LLAMA, *STRONG, *FSDP]
    found = pools(2).run(train_into_trouble, folder, options, run_dir)
    assert found[0] == found[1] and found[0][1:] == (1, True), found
    rows = [json.loads(line) for line in open(os.path.join(run_dir, "nonfinite.jsonl"))]
    assert len(rows) == 1 and f"row {rows[0]['row']}." in found[0][0]


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(sharded):
    runs = sharded(
        2,
        "FULL_SHARD",
        "guards.on_nonfinite=skip",
        "guards.max_nonfinite_steps=1",
        "n_examples=20",
        prepare=spoil_rank_1,
    )
    assert len(runs[0].losses) == 3 and runs[0].losses == runs[1].losses
    assert all(torch.isfinite(value).all() for value in runs[0].weights.values())


def no_memory_on_rank_1(trainer):
    forward = trainer.losses_and_metrics

    def limited(split, batch):
        if split == "train" and trainer.world.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(split, batch)

    trainer.losses_and_metrics = limited


def test_a_rank_out_of_memory_says_which_settings_help(sharded):
    with pytest.raises(ValueError, match="Out of memory on rank 1 .*Set tokens_per_microbatch=512 .it was 1024"):
        sharded(2, "FULL_SHARD", "tokens_per_microbatch=1024", prepare=no_memory_on_rank_1)
