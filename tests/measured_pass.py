"""Run in a process of its own by test_memory_plan.py: a real pass and what it took, as one line of JSON.

python measured_pass.py CASE.json: {overrides, model, unit, passes, fsdp: ranks or 0}
"""

import json
import os
import sys
import weakref
from dataclasses import replace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from hydra import compose, initialize_config_dir
from transformers import AutoConfig

import settings
from modeling.attention import use_attention
from modeling.blocks import checkpoint_activations, find_blocks
from planning import trace
from planning.batch_shape import BatchShape
from planning.estimate import estimate


class AsItIs:
    """Stands in for the mode that takes the content out of tensors."""

    def from_tensor(self, tensor):
        return tensor


class TrueBytes(trace.LiveBytes):
    """Adds up the storages at every operation: FSDP empties some without freeing them."""

    def __init__(self, known):
        super().__init__(known)
        self.known = weakref.WeakSet(tensor.untyped_storage() for tensor in known)
        self.highest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.highest = max(self.highest, sum(s.nbytes() for s in self._seen if s not in self.known))
        return result


def resident(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def build(model_settings, config, frozen=False):
    model = trace.build_model(model_settings, torch.float32)
    if int(config.activation_checkpointing) and not frozen:
        checkpoint_activations(find_blocks(model, None), int(config.activation_checkpointing))
    use_attention(model, "packed_sdpa")
    return model.requires_grad_(not frozen)


def steps(policy, reference, optimizer, batch, passes, small_batch):
    """Two steps: a cheap one that leaves the optimizer's state behind, and the one to be measured."""
    for each, n in ((small_batch, 1), (batch, passes)):
        for _ in range(n):
            logps = policy.response_logps(each)
            if reference is not None:
                with torch.no_grad():
                    reference.response_logps(each)
            logps.sum().backward()
            del logps
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def optimizer_of(config, policy):
    return getattr(torch.optim, config.optimizer)(policy.parameters(), lr=1e-6, **config.optimizer_kwargs)


def measure(case):
    with initialize_config_dir(settings.CONFIG_DIR, version_base="1.3"):
        config = settings.finalize(
            compose("config", overrides=["model=tiny", "model.block_name=null", "device=cpu", *case["overrides"]])
        )
    work = BatchShape(case["unit"][0], tuple(case["unit"][1]), case["unit"][2])
    online = config.loss.name != "sft" and config.reference.mode == "online"
    small = AutoConfig.for_model(**{**case["model"], "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64})
    big = AutoConfig.for_model(**case["model"])
    batch = work.batch(AsItIs(), True)
    batch = replace(batch, input_ids=torch.randint(0, big.vocab_size, batch.input_ids.shape))
    if case["fsdp"]:
        return measure_sharded(config, big, work, batch, case["fsdp"])
    warm_up = build(small, config)
    one = BatchShape(8, (8,) * len(work.responses), 1).batch(AsItIs(), True)
    steps(warm_up, warm_up if online else None, optimizer_of(config, warm_up), one, 1, one)
    del warm_up
    before = resident("VmRSS")
    policy = build(big, config)
    reference = build(big, config, frozen=True) if online else None
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the high-water mark starts anew
    steps(policy, reference, optimizer_of(config, policy), batch, case["passes"], one)
    measured = resident("VmHWM") - before
    plan = estimate(config, 1, kind="cpu", batch=work, model_config=big, single_pass=case["passes"] == 1)
    return {"measured": measured, "planned": plan.total - plan.parts["process"], "parts": plan.parts}


def measure_sharded(config, big, work, batch, ranks):
    """FSDP2 on one rank of a simulated group, so that what it holds can be counted to the byte."""
    from private_torch import join_simulated_group
    from torch.distributed.fsdp import register_fsdp_forward_method

    from parallel.fsdp import apply_fsdp
    from parallel.placement import make_placement
    from utils import World

    join_simulated_group(ranks)
    mesh = make_placement(config, World(0, ranks, 0, "cpu")).mesh
    policy = build(big, config)
    apply_fsdp(policy, find_blocks(policy, None), mesh, config, False, False)
    register_fsdp_forward_method(policy, "response_logps")
    local = [p.to_local() for p in policy.parameters()]
    counter = TrueBytes([*local, *policy.buffers()])
    optimizer = optimizer_of(config, policy)
    with counter:
        steps(policy, None, optimizer, batch, 1, batch)
    plan = estimate(config, ranks, kind="cpu", batch=work, model_config=big, single_pass=True)
    parts = dict(plan.parts)
    known = parts.pop("process") + parts["parameters"] + parts.pop("buffers")
    own = sum(t.numel() * t.element_size() for t in local)
    return {"measured": counter.highest + own, "planned": plan.total - known + plan.parts["parameters"], "parts": parts}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
