"""Sharded training is the computation of BasicTrainer: every placement on 1, 2 and 4 processes over gloo, weights read
into shards from every kind of file, and what a rank holds."""

import json
import math
import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from conftest import ROOT, free_port
from private_torch import fsdp_options
from runs import (
    LLAMA,
    MODELS,
    STRONG,
    ChangedPlacement,
    assert_same_training,
    baseline,
    distance,
    new_run_dir,
    save_model,
    settings_of,
    spoil,
    train,
    train_together,
)
from torch.distributed.tensor import DTensor

from data.batching import PromptUnit, pack, pad
from modeling import loading
from modeling.attention import use_attention
from modeling.blocks import find_blocks
from parallel import build
from parallel.placement import make_placement
from parallel.weights import count_held

FSDP = ("trainer=FSDPTrainer",)
PLACEMENTS = {
    "FULL_SHARD": FSDP,
    "SHARD_GRAD_OP": (*FSDP, "fsdp=shard_grad_op"),
    "HYBRID_SHARD": (*FSDP, "fsdp=hybrid_shard", "fsdp.replicas=2"),
    "NO_SHARD": (*FSDP, "fsdp=no_shard"),
    "TP": ("trainer=TensorParallelTrainer", "tp_size={size}"),
    "FSDP+TP": ("trainer=TensorParallelTrainer", "tp_size=2"),
}
LOSSES = ("sft", "dpo", "ipo")


def placement(name: str, size: int) -> list[str]:
    if name == "HYBRID_SHARD" and size == 1:
        return [*FSDP, "fsdp=hybrid_shard"]
    return [option.format(size=size) for option in PLACEMENTS[name]]


@pytest.fixture
def sharded(folder, pools):
    """Trains as `baseline` does but for the placement and what else is given; the runs that the ranks saw."""

    def run(size, name, *more, model="llama", loss="dpo", prepare=None, timeout=120):
        options = [*STRONG]
        if loss != "sft" and "reference.mode=online" not in more:
            # A cold cache, or these ranks would read what BasicTrainer computed.
            options.append(f"reference.cache_dir={new_run_dir(folder)}")
        return train_together(
            pools(size),
            folder,
            *MODELS[model],
            f"loss={loss}",
            *options,
            *placement(name, size),
            *more,
            prepare=prepare,
            timeout=timeout,
        )

    return run


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


def test_float16_is_refused_on_a_cpu(folder):
    with pytest.raises(ValueError, match="model.fsdp_policy_mp=float16 needs a GPU"):
        settings_of(folder, *LLAMA, *FSDP, "world_size=2", "model.fsdp_policy_mp=float16")


@pytest.mark.parametrize("optimizer", ["Adafactor", "Rprop"])
def test_optimizers_that_cannot_work_on_shards_are_refused(folder, optimizer):
    with pytest.raises(ValueError, match=f"optimizer={optimizer}.*BasicTrainer"):
        settings_of(folder, *LLAMA, *FSDP, "world_size=2", f"optimizer={optimizer}")
    settings_of(folder, *LLAMA, f"optimizer={optimizer}")


def read_placement(world, folder, options):
    """What FSDP2 was given for the blocks of a placed model, and this rank's share of its parameters."""
    config = settings_of(folder, *options, f"world_size={world.size}")
    tokenizer = loading.load_tokenizer(config)
    place = make_placement(config, world)
    found = {}
    for frozen in (False, True):
        model = place.build_model(config, tokenizer, torch.float32, frozen)
        blocks = [fsdp_options(block) for block in find_blocks(model, None)]
        part, whole = count_held(model)
        found["reference" if frozen else "policy"] = {
            "reshards": blocks[0].reshards,
            "offloads": type(blocks[0].offload_policy).__name__,
            "computes": blocks[0].mp_policy.param_dtype,
            "reduces": blocks[0].mp_policy.reduce_dtype,
            "share": part / whole,
            "ahead": [options.prefetched for options in blocks],
            "checkpoints": [hasattr(block.forward, "func") for block in find_blocks(model, None)],
            "trains": any(p.requires_grad for p in model.parameters()),
        }
    return found


@pytest.mark.parametrize(
    "name, more, policy, reference",
    [
        (
            "FULL_SHARD",
            [],
            {
                "reshards": True,
                "offloads": "OffloadPolicy",
                "computes": None,
                "ahead": [0, 0],
                "trains": True,
                "checkpoints": [False, False],
            },
            {"reshards": True, "trains": False},
        ),
        ("SHARD_GRAD_OP", [], {"reshards": False}, {"reshards": True}),
        ("FULL_SHARD", ["fsdp.cpu_offload=true"], {"offloads": "CPUOffloadPolicy"}, {"offloads": "CPUOffloadPolicy"}),
        (
            "FULL_SHARD",
            ["fsdp.reference_cpu_offload=true", "reference.mode=online"],
            {"offloads": "OffloadPolicy"},
            {"offloads": "CPUOffloadPolicy"},
        ),
        (
            "FULL_SHARD",
            ["model.fsdp_policy_mp=bfloat16"],
            {"computes": torch.bfloat16, "reduces": torch.float32},
            {"computes": torch.bfloat16},
        ),
        (
            "FULL_SHARD",
            ["model.fsdp_policy_mp=bfloat16", "fsdp.reduce_dtype=bfloat16"],
            {"computes": torch.bfloat16, "reduces": torch.bfloat16},
            {},
        ),
        ("FULL_SHARD", ["fsdp.forward_prefetch=1"], {"ahead": [1, 0]}, {}),
        (
            "FULL_SHARD",
            ["activation_checkpointing=true"],
            {"checkpoints": [True, True]},
            {"checkpoints": [False, False]},
        ),
        ("FULL_SHARD", ["activation_checkpointing=2"], {"checkpoints": [True, False]}, {"checkpoints": [False, False]}),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, list)) else "",
)
def test_options_reach_the_placement(folder, pools, name, more, policy, reference):
    for found in pools(2).run(read_placement, folder, [*LLAMA, *placement(name, 2), *more]):
        assert {key: found["policy"][key] for key in policy} == policy
        assert {key: found["reference"][key] for key in reference} == reference


@pytest.mark.parametrize(
    "size, name, share",
    [
        (2, "FULL_SHARD", 1 / 2),
        (2, "SHARD_GRAD_OP", 1 / 2),
        (2, "NO_SHARD", 1),
        (2, "HYBRID_SHARD", 1),
        pytest.param(4, "FULL_SHARD", 1 / 4, marks=pytest.mark.slow),
        pytest.param(4, "HYBRID_SHARD", 1 / 2, marks=pytest.mark.slow),
    ],
)
def test_each_rank_holds_its_share(folder, pools, size, name, share):
    for found in pools(size).run(read_placement, folder, [*LLAMA, *placement(name, size)]):
        assert found["policy"]["share"] == pytest.approx(share, rel=0.1)


def test_a_tensor_parallel_rank_holds_its_part_of_the_matrices(folder, pools):
    shares = [
        held[0] / held[1]
        for _, _, held in pools(2).run(
            load_sharded, folder, [*LLAMA, *placement("TP", 2), "max_length=128", "max_prompt_length=64"]
        )
    ]
    # All but embeddings and norms is split: of this model, the blocks' 81,920 numbers of 98,816.
    assert shares == [pytest.approx(1 - 0.5 * 81_920 / 98_816, abs=1e-3)] * 2


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
    said = pools(2).run(train_into_trouble, folder, options, run_dir)
    assert said[0] == said[1] and said[0][1:] == (1, True), said
    rows = [json.loads(line) for line in open(os.path.join(run_dir, "nonfinite.jsonl"))]
    assert len(rows) == 1 and f"row {rows[0]['row']}." in said[0][0]


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


# ---- Gradients and memory -------------------------------------------------------------------------------------------


def compare_norms(trainer):
    """Checks every gradient norm against one of whole gradients, and that clipping scales to the limit."""
    placement = trainer.placement

    def whole_norm():
        total = 0.0
        for parameter in trainer.policy.parameters():
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            total += grad.double().square().sum().item()
        return math.sqrt(total)

    def compared(*arguments):
        before = whole_norm()
        norm = placement.clip_gradients(*arguments)
        assert norm.item() == pytest.approx(before, rel=1e-5)
        assert before > trainer.config.max_grad_norm
        assert whole_norm() == pytest.approx(trainer.config.max_grad_norm, rel=1e-4)
        return norm

    trainer.placement = ChangedPlacement(placement, clip_gradients=compared)


def check_given_back(trainer):
    """Sees that after forward passes alone no parameter stays whole, as the root's would."""
    evaluate = trainer.evaluate

    def checked():
        metrics = evaluate()
        models_here = [model for model in (trainer.policy, trainer.objective.reference_model) if model is not None]
        assert all(isinstance(p, DTensor) for model in models_here for p in model.parameters())
        return metrics

    trainer.evaluate = checked


def test_parameters_are_given_back_after_an_evaluation(sharded):
    for mode in ("cached", "online"):
        sharded(
            2, "FULL_SHARD", "do_first_eval=true", "n_examples=5", f"reference.mode={mode}", prepare=check_given_back
        )


@pytest.mark.parametrize(
    "size, name",
    [
        (2, "FULL_SHARD"),
        (2, "NO_SHARD"),
        (2, "TP"),
        pytest.param(4, "FSDP+TP", marks=pytest.mark.slow),
        pytest.param(4, "HYBRID_SHARD", marks=pytest.mark.slow),
    ],
)
def test_the_clipped_norm_is_that_of_all_gradients(sharded, size, name):
    run = sharded(size, name, "max_grad_norm=0.1", "n_examples=10", prepare=compare_norms)[0]
    assert len(run.norms) == 2


def count_bytes(trainer):
    """Notes what this rank holds of parameters, gradients and optimizer state once all of them exist."""
    placement = trainer.placement

    def nbytes(tensor):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.numel() * local.element_size()

    def counted(*arguments):
        parameters = list(trainer.policy.parameters())
        held = sum(nbytes(p) + nbytes(p.grad) for p in parameters)
        state = [value for entry in trainer.optimizer.state.values() for value in entry.values()]
        trainer.seen.bytes_held = held + sum(nbytes(v) for v in state if isinstance(v, torch.Tensor) and v.dim())
        return placement.clip_gradients(*arguments)

    trainer.placement = ChangedPlacement(placement, clip_gradients=counted)


@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((1, 2, 4), marks=pytest.mark.slow)], ids=str)
def test_what_a_rank_holds_falls_with_the_number_of_ranks(sharded, sizes):
    held = {}
    for size in sizes:
        runs = sharded(size, "FULL_SHARD", "optimizer=AdamW", "n_examples=10", prepare=count_bytes)
        held[size] = [run.bytes_held for run in runs]
    print(held)
    whole = 16 * sum(value.numel() for name, value in runs[0].weights.items() if name != "lm_head.weight")
    assert held[1] == [whole]  # float32: weight, gradient and two moments
    for size in sizes[1:]:
        assert max(held[size]) <= 1.1 * whole / size, held


# ---- Loading --------------------------------------------------------------------------------------------------------

UNITS = [
    PromptUnit(
        0,
        0,
        torch.arange(5, 12).numpy().astype("int32"),
        [torch.arange(a, b).numpy().astype("int32") for a, b in ((20, 29), (40, 45), (60, 71))],
        [0, 1, 2],
        [(0, 1), (0, 2)],
    )
]


def logps_of(model, plain=False):
    use_attention(model, "plain" if plain else "packed_sdpa", False)
    with torch.no_grad():
        return model.response_logps(pad(UNITS, 0) if plain else pack(UNITS)).clone()


def load_sharded(world, folder, options, frozen=False):
    """Log-probs of a freshly loaded sharded model, how it was read, and the largest share of a rank."""
    config = settings_of(folder, *options, f"world_size={world.size}")
    tokenizer = loading.load_tokenizer(config)
    model = make_placement(config, world).build_model(config, tokenizer, torch.float32, frozen)
    return logps_of(model), model.loaded_from, count_held(model)


KINDS = ("llama", "llama_tied", "gpt_neox", "gpt2", "gptj", "gemma", "qwen3")


@pytest.mark.parametrize("form", ["safetensors", "shards", "bin", "policy.pt", "hf archive"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_scores_as_the_whole_one(folder, pools, tmp_path, kind, form):
    model = save_model(tmp_path / "model", kind, **({"max_shard_size": "60KB"} if form == "shards" else {}))
    options = [
        "model=blank_model",
        f"model.name_or_path={tmp_path}/model",
        *FSDP,
        "max_length=128",
        "max_prompt_length=64",
    ]
    if form == "shards":
        assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    if form == "bin":
        from safetensors.torch import load_file

        torch.save(load_file(tmp_path / "model" / "model.safetensors"), tmp_path / "model" / "pytorch_model.bin")
        (tmp_path / "model" / "model.safetensors").unlink()
    if form == "policy.pt":
        model = save_model(tmp_path / "other", kind, seed=1)
        torch.save({"step_idx": 1, "state": model.state_dict(), "metrics": {}}, tmp_path / "policy.pt")
        options.append(f"model.archive={tmp_path}/policy.pt")
    if form == "hf archive":
        model = save_model(tmp_path / "other", kind, seed=1)
        options.append(f"model.archive={tmp_path}/other")
    if kind == "gpt_neox" and form == "safetensors":
        from safetensors import safe_open

        with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
            assert "embed_out.weight" in file.keys()
    expected = logps_of(model)
    for found, how, (part, whole) in pools(2).run(load_sharded, folder, options):
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-6), (found, expected)
        assert ("each rank read its own part" in how) is (form in ("safetensors", "shards")), how
        assert part < 0.6 * whole


def test_a_frozen_model_and_one_in_host_memory_load_the_same(folder, pools, tmp_path):
    model = save_model(tmp_path / "model", "llama_tied")
    options = ["model=blank_model", f"model.name_or_path={tmp_path}/model", *FSDP]
    for more, frozen in (([], True), (["fsdp.cpu_offload=true"], False)):
        for found, _, _ in pools(2).run(load_sharded, folder, [*options, *more], frozen):
            assert torch.allclose(found, logps_of(model), atol=1e-4)


def refuse_to_load(world, folder, options):
    """The message of an error that comes before weights are read."""

    def no(*arguments):
        raise AssertionError("weights were read")

    with patch.object(build, "load_weights", no), pytest.raises(ValueError) as problem:
        load_sharded(world, folder, options)
    return str(problem.value)


def test_a_wrong_block_name_lists_those_there_are(folder, pools, tmp_path):
    save_model(tmp_path / "model", "gpt_neox")
    options = ["model=blank_model", f"model.name_or_path={tmp_path}/model", *FSDP]
    for message in pools(2).run(refuse_to_load, folder, [*options, "model.block_name=GPTNeoXBlock"]):
        assert "model.block_name='GPTNeoXBlock'" in message and "GPTNeoXLayer" in message


def test_a_model_without_a_plan_cannot_be_split(folder, pools, tmp_path):
    save_model(tmp_path / "model", "gpt2")
    options = [
        "model=blank_model",
        f"model.name_or_path={tmp_path}/model",
        "trainer=TensorParallelTrainer",
        "tp_size=2",
    ]
    for message in pools(2).run(refuse_to_load, folder, options):
        assert "no tensor-parallel plan" in message and "FSDPTrainer" in message


def test_an_archive_that_does_not_fit_is_refused_on_all_ranks(folder, pools, tmp_path):
    save_model(tmp_path / "model", "gpt_neox")
    torch.save({"state": {"nonsense": torch.zeros(2)}}, tmp_path / "policy.pt")
    options = [
        "model=blank_model",
        f"model.name_or_path={tmp_path}/model",
        *FSDP,
        f"model.archive={tmp_path}/policy.pt",
    ]
    with pytest.raises(ValueError, match="does not fit the model"):
        pools(2).run(load_sharded, folder, options)


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


@pytest.mark.parametrize("name, more", [("FULL_SHARD", []), ("FULL_SHARD", ["reference.mode=online"]), ("TP", [])])
def test_samples_are_those_of_one_device(folder, sharded, name, more):
    """Three prompts on two ranks, some of which end early: nothing hangs, and nobody's text depends on the world."""
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
    runs = sharded(2, name, *options)
    rows = [
        [
            (row["examples"], row["prompt"], row["policy"], row["reference"])
            for row in map(json.loads, open(os.path.join(run.run_dir, "samples.jsonl")))
        ]
        for run in (alone, runs[0])
    ]
    assert len(rows[0]) == 9 and rows[0] == rows[1]


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
        said = [node.communicate(timeout=200)[0] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said[0][-3000:] + said[1][-3000:]
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
