"""Saving on several processes, and resuming on as many or on others."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_models import Small, full_disk, same, settings, snapshot, step, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpoint import step_writer
from checkpoint.checkpointer import Checkpointer
from checkpoint.state import full_state
from modeling.loading import byte_tokenizer
from utils import World

# ---- on two processes -----------------------------------------------------------------------------------------------


def sharded(family, seed):
    model = tiny(family, seed)
    blocks = model.model.layers if family == "llama" else model.gpt_neox.layers
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def two_processes(rank, folder, families):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    world, notices = World(rank, 2), []
    for family in families:
        run = folder / family
        model, optimizer = sharded(family, seed=5)
        everything = settings(formats=["state", "policy", "hf"], async_save=True)
        checkpointer = Checkpointer(run, everything, world, notices.append)
        # what one process saved
        assert checkpointer.load(run / "step-1", model, optimizer) == {"n": 1}
        assert any("2 processes what 1 saved" in text for text in notices) == (rank == 0)
        full = full_state(model, world)
        if rank == 0:
            same(torch.load(run / "step-1" / "policy.pt", weights_only=True)["state"], full)
        else:
            assert full == {}
        # in the background, with training going on; gathers of both sides are in flight at once
        step(model, optimizer, 2)
        with torch.no_grad():
            model(torch.arange(4)[None])  # an evaluation leaves the root's parameters whole
        assert checkpointer.save(2, model, optimizer, byte_tokenizer(), {"n": 2}) is None
        saved, drawn = snapshot(model, optimizer), torch.rand(3)
        step(model, optimizer, 2)
        for _ in range(600):
            if checkpointer.poll() or checkpointer.latest().name == "step-2":
                break
            time.sleep(0.02)
        after = snapshot(model, optimizer)
        other, resumed = sharded(family, seed=6)
        assert checkpointer.load(checkpointer.resumable(), other, resumed) == {"n": 2}
        same(saved, snapshot(other, resumed))
        assert torch.equal(drawn, torch.rand(3))
        step(other, resumed, 2)
        same(after, snapshot(other, resumed))
        checkpointer.close()
        # a disk that is full for one rank only
        checkpointer = Checkpointer(run, settings(formats=["state", "policy"]), world, notices.append)
        for stage in ("state", "rng", "checksum"):
            step_writer.hooks[:] = [full_disk(stage)] if rank == 1 else []
            problem = checkpointer.save(3, model, optimizer, None, {"n": 3})
            assert "rank 1" in problem and "No space left" in problem and "rank 0" not in problem, problem
            assert not (run / "step-3").exists() and not (run / "step-3.tmp").exists()
            dist.barrier()
        step_writer.hooks.clear()
        assert checkpointer.save(4, model, optimizer, None, {"n": 4}) is None
        # each rank has its own random numbers, and a damaged file of one rank is everyone's error
        assert (run / "step-4" / "state" / "rng-1.pt").exists()
        dist.barrier()
        if rank == 0:
            os.rename(run / "step-4" / "state" / "rng-1.pt", run / "rng-1.pt")
        dist.barrier()
        with pytest.raises(ValueError, match="rank 1.*rng-1.pt"):
            checkpointer.load(run / "step-4", model, optimizer)
        dist.barrier()
        if rank == 0:
            os.rename(run / "rng-1.pt", run / "step-4" / "state" / "rng-1.pt")
        checkpointer.close()
    dist.destroy_process_group()


def test_sharded_over_two_processes_and_back_on_one(tmp_path):
    families = ["llama", "neox"]
    for family in families:
        model = tiny(family)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer)
        checkpointer = Checkpointer(tmp_path / family, settings(formats=["state", "policy"], keep_last=None), World())
        assert checkpointer.save(1, model, optimizer, None, {"n": 1}) is None
        checkpointer.close()
    mp.spawn(two_processes, (tmp_path, families), nprocs=2)
    for family in families:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = tiny(family, 7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        checkpointer = Checkpointer(tmp_path / family, settings(), World(), lambda text: None)
        assert checkpointer.load(checkpointer.resumable(), model, optimizer) == {"n": 4}
        assert all(float(state["step"]) == 5 for state in optimizer.state.values())
        whole = torch.load(tmp_path / family / "LATEST" / "policy.pt", weights_only=True)
        same(whole["state"], dict(model.state_dict()))
        other = tiny(family, 8)
        other.load_state_dict(whole["state"])  # as the reference implementation does
        checkpointer.load(tmp_path / family / "step-2", other, None)
        hf = AutoModelForCausalLM.from_pretrained(tmp_path / family / "step-2" / "hf")
        same(dict(other.state_dict()), dict(hf.state_dict()))
        assert AutoTokenizer.from_pretrained(tmp_path / family / "step-2" / "hf").chat_template
        assert hf.config.architectures[0].startswith(("Llama", "GPTNeoX"))


PLACEMENTS = ["replicas of shards", "replicas", "offloaded", "tensor parallel", "tensor parallel and sharded"]


def placed(placement, seed):
    model, options = tiny("neox", seed), {}
    if placement.startswith("tensor parallel"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        for block in model.gpt_neox.layers:
            plan = {"dense_h_to_4h": ColwiseParallel(), "dense_4h_to_h": RowwiseParallel()}
            parallelize_module(block.mlp, mesh["tp"], plan)
        options["mesh"] = mesh["shard"]
    elif placement.startswith("replicas"):
        size = (2, 2) if "shards" in placement else (4, 1)
        options["mesh"] = init_device_mesh("cpu", size, mesh_dim_names=("replicate", "shard"))
    elif placement == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if placement != "tensor parallel":
        for block in [*model.gpt_neox.layers, model]:
            fully_shard(block, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # foreach takes one mesh only


def four_processes(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4)
    for placement in PLACEMENTS:
        model, optimizer = placed(placement, 1)
        checkpointer = Checkpointer(
            folder / placement, settings(formats=["state", "policy", "hf"], async_save=True), World(rank, 4)
        )
        step(model, optimizer, 2)
        assert checkpointer.save(1, model, optimizer, None, {}) is None
        saved = snapshot(model, optimizer)
        step(model, optimizer, 2)
        assert checkpointer.finish() is None
        other, resumed = placed(placement, 2)
        checkpointer.load(checkpointer.resumable(), other, resumed)
        same(saved, snapshot(other, resumed))
        step(other, resumed, 2)
        same(snapshot(model, optimizer), snapshot(other, resumed))
        checkpointer.close()
    dist.destroy_process_group()


@pytest.mark.slow
def test_every_placement_on_four_processes_and_back_on_one(tmp_path):
    mp.spawn(four_processes, (tmp_path,), nprocs=4)
    for placement in PLACEMENTS:
        model = tiny("neox", 7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        checkpointer = Checkpointer(tmp_path / placement, settings(), World(), lambda text: None)
        checkpointer.load(checkpointer.resumable(), model, optimizer)
        policy = torch.load(tmp_path / placement / "LATEST" / "policy.pt", weights_only=True)["state"]
        same(policy, dict(model.state_dict()))
        # what is replicated is written once
        written = sum(p.stat().st_size for p in (tmp_path / placement / "step-1" / "state").glob("*.distcp"))
        assert written < 1.5 * 3 * sum(p.nbytes for p in model.parameters()) + 2500 * 4 * len(optimizer.state) * 4


def one_rank_dies(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = Small()
    checkpointer = Checkpointer(folder / "run", settings(), World(rank, 2))
    assert checkpointer.save(1, model, None, None, {"n": 1}) is None
    if rank == 1:
        step_writer.hooks.append(lambda stage: os.kill(os.getpid(), signal.SIGKILL) if stage == "state" else None)
    checkpointer.save(2, model, None, None, {"n": 2})


@pytest.mark.slow
def test_a_rank_killed_inside_a_save_ends_the_other_and_costs_no_checkpoint(tmp_path):
    context = mp.get_context("spawn")
    ranks = [context.Process(target=one_rank_dies, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert ranks[1].exitcode == -signal.SIGKILL and ranks[0].exitcode == 1  # not hanging, not pretending
    model = Small(1)
    checkpointer = Checkpointer(tmp_path / "run", settings(), World(), lambda text: None)
    assert checkpointer.load(checkpointer.resumable(), model, None) == {"n": 1}
    assert not list((tmp_path / "run").glob("*.tmp"))
