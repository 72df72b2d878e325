"""What we use of private interfaces is still as we use it, and doing without it gives the same.

A failure of one of the first tests after an upgrade of a library means: look at the named function in private_apis.py.
"""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from architectures import KINDS, make, settings
from conftest import ROOT
from scoring_checks import UNITS, check_same, scored, true_scores

import private_apis
from data.batching import pack

# ---- The interfaces are there ---------------------------------------------------------------------------------------


def test_cpu_flash_attention_is_there():
    assert private_apis.cpu_flash_attention() is not None, (
        "torch's fused CPU attention has another signature: private_apis.CPU_FLASH_ATTENTION; until then less memory "
        "is saved"
    )
    query, key, value = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    forward, backward = private_apis.cpu_flash_attention()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
    found, normalizers = forward(query, key, value, 0.0, True, attn_mask=None, scale=0.3)
    upstream = torch.randn_like(found)
    gradients = backward(upstream, query, key, value, found, normalizers, 0.0, True, attn_mask=None, scale=0.3)
    assert torch.equal(found, expected)
    for a, b in zip(gradients, torch.autograd.grad(expected, (query, key, value), upstream)):
        assert torch.allclose(a, b, atol=1e-6)


def test_the_attention_of_a_config_can_be_read():
    model = make("llama")
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert private_apis.attention_of(model.config) == name, "transformers keeps it elsewhere: attention_of"


def test_recurrent_models_are_known():
    assert private_apis.is_recurrent(make("mamba")) and not private_apis.is_recurrent(make("llama")), "is_recurrent"


def test_hooks_are_seen():
    module = torch.nn.Linear(2, 2)
    assert not private_apis.has_forward_pre_hooks(module)
    module.register_forward_pre_hook(lambda *_: None)
    assert private_apis.has_forward_pre_hooks(module), "torch keeps hooks elsewhere: has_forward_pre_hooks"


def test_modes_are_there():
    with private_apis.fake_tensor_mode() as mode:
        tensor = mode.from_tensor(torch.zeros(2, 3))
        assert (tensor @ tensor.T).shape == (2, 2) and tensor.device.type == "cpu", "fake_tensor_mode"
    seen = []

    class Mode(private_apis.dispatch_mode()):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2) + 1
    assert torch.ops.aten.add.Tensor in seen, "torch's dispatch modes work otherwise: dispatch_mode"


def test_importing_it_imports_no_library():
    code = "import sys, private_apis; print([n for n in ('torch', 'transformers', 'datasets') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


# ---- Doing without them gives the same ------------------------------------------------------------------------------


@pytest.fixture
def no_cpu_flash_attention(monkeypatch):
    signatures = list(private_apis.CPU_FLASH_ATTENTION.values())
    monkeypatch.setattr(private_apis, "CPU_FLASH_ATTENTION", dict(zip(("_no_such_operator", "_nor_this"), signatures)))


def test_other_operators_are_not_taken_for_ours(monkeypatch, no_cpu_flash_attention):
    assert private_apis.cpu_flash_attention() is None
    monkeypatch.setattr(private_apis, "CPU_FLASH_ATTENTION", {"addmm": "(Tensor self, Tensor other) -> Tensor"})
    assert private_apis.cpu_flash_attention() is None


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_neox"])
def test_attention_without_the_cpu_kernel_is_the_same(no_cpu_flash_attention, name):
    check_same(scored(make(name), "packed_sdpa", False, pack(UNITS)), true_scores(name))


def test_without_the_attributes_the_safe_answer_is_given(monkeypatch):
    from transformers import PreTrainedModel

    model = make("llama")
    monkeypatch.delattr(PreTrainedModel, "_is_stateful")
    assert private_apis.is_recurrent(model)
    assert private_apis.attention_of(SimpleNamespace()) == "eager"
    assert private_apis.has_forward_pre_hooks(SimpleNamespace())


@pytest.mark.parametrize("how", ["_init_weights", "_init_weights leaves them", "no _init_weights"])
@pytest.mark.parametrize("name", KINDS)
def test_computed_buffers_are_those_of_a_model_built_in_memory(monkeypatch, name, how):
    from transformers import AutoModelForCausalLM, PreTrainedModel

    expected = AutoModelForCausalLM.from_config(settings(name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings(name))
    model.to_empty(device="cpu")
    if how == "_init_weights leaves them":
        monkeypatch.setattr(type(model), "_init_weights", lambda self, module: None)
    if how == "no _init_weights":
        for kind in type(model).__mro__:
            if "_init_weights" in vars(kind):
                monkeypatch.delattr(kind, "_init_weights")
        assert not hasattr(model, "_init_weights")
        monkeypatch.setattr(PreTrainedModel, "init_weights", lambda self: None)  # it would call the missing one
    state = torch.get_rng_state()
    private_apis.fill_computed_buffers(model)
    assert how == "_init_weights" or torch.equal(torch.get_rng_state(), state)
    stored = model.state_dict().keys()
    computed = {name for name, _ in model.named_buffers() if name not in stored}
    assert computed == {name for name, _ in expected.named_buffers() if name not in expected.state_dict()}
    found, wanted = dict(model.named_buffers()), dict(expected.named_buffers())
    assert all(torch.equal(found[name], wanted[name]) for name in computed)


def placements():
    """Plain and uneven cuts, several mesh dimensions on one of the tensor's, replicas, FSDP over tensor parallelism."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return [
        ((10, 4), (4,), [Shard(0)]),
        ((3, 4), (4,), [Shard(0)]),
        ((10, 7), (2, 3), [Shard(0), Shard(1)]),
        ((10, 7), (2, 2), [Replicate(), Shard(1)]),
        ((11, 2), (2, 3), [Shard(0), Shard(0)]),
        ((16, 3), (2, 4), [_StridedShard(0, split_factor=4), Shard(0)]),
        ((16, 8), (2, 4), [Shard(0), Shard(1)]),
        ((5, 0), (2,), [Shard(0)]),
    ]


def test_shards_by_arithmetic_are_torchs():
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    for shape, mesh, places in placements():
        for coordinate in np.ndindex(*mesh):
            found = private_apis.shard_of(shape, mesh, coordinate, places)
            expected = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), places)
            # Where an empty part starts is of no use.
            assert found[0] == tuple(expected[0]) and (0 in found[0] or found[1] == tuple(expected[1])), (shape, places)


def test_the_part_of_a_sharded_tensor(pools):
    for found in pools(2).run(part_of_a_sharded_tensor):
        assert found


def part_of_a_sharded_tensor(world):
    """On each rank: the part, with the private functions and without."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(15.0).reshape(5, 3)
    tensor = distribute_tensor(whole, init_device_mesh("cpu", (world.size,)), [Shard(0)])
    rows = slice(0, 3) if world.rank == 0 else slice(3, 5)
    right = torch.equal(private_apis.local_tensor(tensor), whole[rows])
    expected = (tuple(whole[rows].shape), (rows.start, 0))
    right &= private_apis.local_shape_and_offset(tensor) == expected
    hidden = sys.modules["torch.distributed.tensor._utils"]
    try:
        sys.modules["torch.distributed.tensor._utils"] = None  # importing it now fails
        right &= private_apis.local_shape_and_offset(tensor) == expected
    finally:
        sys.modules["torch.distributed.tensor._utils"] = hidden
    return right


def test_any_other_tensor_is_its_own_part():
    tensor = torch.zeros(2)
    assert private_apis.local_tensor(tensor) is tensor


def test_modes_that_are_missing_are_named(monkeypatch):
    for name, function in (
        ("torch._subclasses.fake_tensor", private_apis.fake_tensor_mode),
        ("torch.utils._python_dispatch", private_apis.dispatch_mode),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(RuntimeError, match="plan=true needs: install a torch"):
            function()


def test_fingerprints_of_data_sets():
    import datasets

    one, same, other = (datasets.Dataset.from_dict({"text": texts}) for texts in (["a", "b"], ["a", "b"], ["a", "c"]))
    assert private_apis.dataset_fingerprint(one) == private_apis.dataset_fingerprint(same), "dataset_fingerprint"
    assert private_apis.dataset_fingerprint(one) != private_apis.dataset_fingerprint(other), "dataset_fingerprint"
    rows = [[dict(row) for row in dataset] for dataset in (one, same, other)]  # without a fingerprint
    found = [private_apis.dataset_fingerprint(each) for each in rows]
    assert found[0] == found[1] != found[2]
