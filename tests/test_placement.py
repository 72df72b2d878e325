"""How a world is divided, what FSDP2 is asked for, how gradients are clipped, and what a rank holds."""

import contextlib
import functools
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import compose_config
from private_torch import early_gathers, fsdp_options
from runs import FSDP, LLAMA, ChangedPlacement, placement, settings_of
from torch.distributed.tensor import DTensor

import settings
from modeling import loading
from modeling.blocks import find_blocks
from modeling.sharded import gathered_once
from parallel.placement import make_placement
from parallel.rank_process import threads_of_rank
from parallel.weights import count_held
from planning.token_budget import free_memory
from settings.shard_layout import layout_of
from training import gathering
from utils import World

# ---- How a world is divided -----------------------------------------------------------------------------------------


def grid(*overrides: str, world: int):
    return layout_of(settings.finalize(compose_config("model=tiny", *overrides)), world)


@pytest.mark.parametrize(
    "overrides, world, replicas, shards, tp",
    [
        ([], 1, 1, 1, 1),
        ([*FSDP], 4, 1, 4, 1),
        ([*FSDP, "fsdp=shard_grad_op"], 4, 1, 4, 1),
        ([*FSDP, "fsdp=no_shard"], 4, 4, 1, 1),
        ([*FSDP, "fsdp=hybrid_shard", "fsdp.replicas=2"], 8, 2, 4, 1),
        ([*FSDP, "fsdp=hybrid_shard"], 8, 1, 8, 1),
        (["trainer=TensorParallelTrainer", "tp_size=4"], 4, 1, 1, 4),
        (["trainer=TensorParallelTrainer", "tp_size=2", "fsdp=no_shard"], 8, 4, 1, 2),
    ],
)
def test_how_a_world_is_divided(overrides, world, replicas, shards, tp):
    layout = grid(*overrides, world=world)
    assert (layout.replicas, layout.shards, layout.tp, layout.world_size) == (replicas, shards, tp, world)
    assert layout.sharded == bool(overrides) and layout.data_ranks == world // tp
    ranks = [layout.data_rank(rank) for rank in range(world)]
    assert ranks == sorted(ranks) and all(ranks.count(part) == tp for part in range(layout.data_ranks))


@pytest.mark.parametrize(
    "overrides, world, words",
    [
        (["trainer=TensorParallelTrainer", "tp_size=2"], 3, "tp_size=2 does not divide the world of 3 processes"),
        ([*FSDP, "fsdp=hybrid_shard", "fsdp.replicas=3"], 4, "fsdp.replicas=3 does not divide the world of 4"),
    ],
)
def test_a_world_that_does_not_divide_is_refused(overrides, world, words):
    with pytest.raises(ValueError, match=words):
        grid(*overrides, world=world)
    with pytest.raises(ValueError, match=words):  # before anything is started
        settings.validate(compose_config("model=tiny", *overrides, f"world_size={world}"), device_count=0)


SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    "environment, nodes",
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 2),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}, 4),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 2),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "8"}, 1),
        ({**SRUN, "SLURM_NTASKS_PER_NODE": "2"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "2"}, 1),  # the shell of a batch script: the processes are started here
        ({}, 1),
    ],
    ids=str,
)
def test_hybrid_sharding_keeps_a_copy_a_node(monkeypatch, environment, nodes):
    for name in [*os.environ]:
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    layout = grid(*FSDP, "fsdp=hybrid_shard", world=8)
    assert (layout.replicas, layout.shards) == (nodes, 8 // nodes)


# ---- What FSDP2 is asked for ----------------------------------------------------------------------------------------


def read_placement(world, folder, options):
    """What FSDP2 was asked for in the blocks of a model, and this rank's share of its parameters."""
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


def blocks_gathered_early(world, folder, options):
    """Names of the blocks that a backward pass gathers ahead of their turn."""
    config = settings_of(folder, *options, f"world_size={world.size}")
    tokenizer = loading.load_tokenizer(config)
    model = make_placement(config, world).build_model(config, tokenizer, torch.float32)
    loss = model(input_ids=torch.arange(8)[None]).logits.square().mean()
    with early_gathers() as names:
        loss.backward()
    return names


def test_a_model_is_whole_for_many_passes_where_it_fits(folder, monkeypatch):
    """On a mesh of one, which BasicTrainer computes on in bfloat16."""
    config = settings_of(folder, *LLAMA, "precision=bfloat16")
    place, tokenizer = make_placement(config, World()), loading.load_tokenizer(config)
    try:
        policy, reference = (place.build_model(config, tokenizer, torch.float32, frozen) for frozen in (False, True))
        for model in (policy, reference):
            before = [fsdp_options(module).reshards for module in (*find_blocks(model, None), model)]
            parameters = sum(parameter.numel() for parameter in model.parameters())
            needed = 2 * parameters + gathering.cache_bytes(model.config, rows=3, tokens=20, size=2)
            for free, fits in (
                (needed / gathering.SHARE + 8, True),
                (needed / gathering.SHARE - 8, False),
                (None, False),
            ):
                monkeypatch.setattr(gathering, "free_memory", lambda device, free=free: free and int(free))
                assert gathering.fits_whole(model, place, torch.bfloat16, 3, 20) is fits, free
            with torch.no_grad(), gathered_once(model):
                for _ in range(2):
                    model(input_ids=torch.arange(8)[None])
                    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            assert [fsdp_options(module).reshards for module in (*find_blocks(model, None), model)] == before
    finally:
        place.close()
    alone = loading.load_model(config, tokenizer, torch.float32, torch.device("cpu"))
    assert not gathering.fits_whole(alone, place, torch.bfloat16, 3, 20)


def test_free_memory_of_the_host_is_within_the_machines():
    free = free_memory(torch.device("cpu"))
    assert free is None or 1 << 20 < free < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("prefetch, early", [("BACKWARD_PRE", ["model.layers.1", "model.layers.0"]), ("null", [])])
def test_backward_prefetch_is_what_was_asked_for(folder, pools, prefetch, early):
    options = [*LLAMA, *FSDP, f"fsdp.backward_prefetch={prefetch}"]
    for ahead in pools(2).run(blocks_gathered_early, folder, options):
        assert ahead == early


@contextlib.contextmanager
def kept_elements():
    """A list of the sizes of tensors that autograd keeps for the backward pass."""
    sizes = []

    def keep(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


def test_every_block_is_compiled_whether_it_is_recomputed_or_not(folder, monkeypatch):
    graphs, kept = [], {}

    def count(graph, inputs):
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    for checkpointing in ("false", "2", "true"):
        torch._dynamo.reset()
        graphs.clear()
        config = settings_of(folder, *LLAMA, "compile=true", f"activation_checkpointing={checkpointing}")
        world = World()
        model = make_placement(config, world).build_model(config, loading.load_tokenizer(config), torch.float32)
        with kept_elements() as sizes:
            loss = model(input_ids=torch.arange(8)[None]).logits.square().mean()
        assert len(graphs) >= 2 and min(graphs) > 20, "each block is a graph"
        loss.backward()
        kept[checkpointing] = sum(sizes)
    assert kept["true"] < kept["2"] < kept["false"], "and it is recomputed"


@pytest.mark.parametrize(
    "environment, starter, threads",
    [
        ({"OMP_NUM_THREADS": "3"}, None, 3),
        ({"OMP_NUM_THREADS": "1"}, None, 1),
        ({"MKL_NUM_THREADS": "3"}, None, 3),
        ({}, None, 4),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}, {}, 4),  # set by torchrun
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}, {"OMP_NUM_THREADS": "1"}, 1),  # before torchrun
    ],
)
def test_the_number_of_threads_that_the_user_chose_is_kept(monkeypatch, environment, starter, threads):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    chosen = int(environment.get("OMP_NUM_THREADS") or environment.get("MKL_NUM_THREADS") or 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    parent = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], **(starter or {})})
    monkeypatch.setattr(os, "getppid", lambda: parent.pid)
    try:
        # A process that has just begun has no environment to read for a moment.
        deadline = time.monotonic() + 10
        while sys.platform == "linux" and not Path(f"/proc/{parent.pid}/environ").read_bytes():
            assert time.monotonic() < deadline
        assert threads_of_rank(2) == threads
    finally:
        parent.kill()
        parent.wait()


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


def gradients_after_passes(world, folder, options):
    """Whether this rank has its shard of the gradients, and no more, after each of three passes of a step."""
    config = settings_of(folder, *options, f"world_size={world.size}")
    place = make_placement(config, world)
    model = place.build_model(config, loading.load_tokenizer(config), torch.float32)
    found = []
    for index in range(3):
        place.sync_gradients(model, last=index == 2)
        model(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
        found.append(all(parameter.grad is not None for parameter in model.parameters()))
    return found


def test_each_pass_leaves_shards_of_gradients_or_the_last_one_does(folder, pools):
    """Whole gradients on every device until the last pass are 32 GB for a model of eight billion parameters."""
    for wanted, expected in (("true", [True] * 3), ("false", [False, False, True])):
        option = f"fsdp.reduce_every_micro_batch={wanted}"
        assert pools(2).run(gradients_after_passes, folder, [*LLAMA, *FSDP, option]) == [expected] * 2
