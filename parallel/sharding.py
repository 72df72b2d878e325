"""Where parameters live on many devices: FSDP2 shards, tensor-parallel slices, and weights read straight into them.

The order is stated once, in `build_model`: build without memory, split matrices (tensor parallelism), recompute activations,
compile, shard (FSDP2), give memory, load. Models know nothing of it; their forward code is untouched.
"""

from __future__ import annotations

import json
import os
import re

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from checkpoint.archives import check_keys, named_tensors, read_state_dict
from modeling import loading
from modeling.loading import DTYPES
from utils import World, broadcast_object


def build_mesh(config, world: World) -> DeviceMesh:
    """The ranks as a grid with named dimensions: "replicate" and "shard" for FSDP2, "tp" for tensor parallelism.

    Raises:
        ValueError: the world does not divide as the settings ask.
    """
    kind = torch.device(world.device).type
    if config.tp_size > 1:
        if world.size % config.tp_size:
            raise ValueError(f"tp_size={config.tp_size} does not divide the world of {world.size} processes.")
        return init_device_mesh(kind, (world.size // config.tp_size, config.tp_size), mesh_dim_names=("shard", "tp"))
    strategy = config.fsdp.sharding_strategy
    if strategy == "NO_SHARD":
        return init_device_mesh(kind, (world.size, 1), mesh_dim_names=("replicate", "shard"))
    if strategy == "HYBRID_SHARD":
        replicas = config.fsdp.replicas or max(1, world.size // int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
        if world.size % replicas:
            raise ValueError(f"fsdp.replicas={replicas} does not divide the world of {world.size} processes.")
        return init_device_mesh(kind, (replicas, world.size // replicas), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))


def build_model(
    config, tokenizer, dtype: torch.dtype, world: World, mesh: DeviceMesh, block_name: str | None, frozen: bool = False
) -> torch.nn.Module:
    """A model with its weights, each rank holding its part.

    Args:
        frozen: a reference: no gradients, and parameters given back after every forward pass.
    Raises:
        ValueError: weights, archive or block class cannot be found or do not fit; the model has no tensor-parallel plan.
    """
    device = torch.device(world.device)
    model = build_on_meta(config, tokenizer, dtype)
    blocks = loading.find_blocks(model, block_name)  # before wrapping, which renames classes
    sharded = mesh if "tp" not in mesh.mesh_dim_names else mesh["shard"]
    if "tp" in mesh.mesh_dim_names:
        apply_tensor_parallel(model, mesh["tp"])
    every = int(config.activation_checkpointing)
    if every and not frozen:
        loading.checkpoint_activations(blocks, every)
    if config.compile:
        for block in blocks:
            block.compile(dynamic=True)  # rows differ in length
    loading.choose_trainable(model, frozen, config.model.frozen)
    offload = config.fsdp.cpu_offload or (frozen and config.fsdp.reference_cpu_offload)
    apply_fsdp(model, blocks, sharded, config, frozen, offload)
    materialize(model, device, torch.device("cpu") if offload else device)
    load_weights(model, config, tokenizer, dtype, world)
    return model.eval()


def build_on_meta(config, tokenizer, dtype: torch.dtype) -> torch.nn.Module:
    """The model on the meta device: shapes, no numbers."""
    from transformers import AutoModelForCausalLM

    settings = loading.model_config(config, tokenizer)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            settings, dtype=dtype, trust_remote_code=config.model.get("trust_remote_code", False)
        )
    return model


def apply_fsdp(model, blocks, mesh: DeviceMesh, config, frozen: bool, offload: bool) -> None:
    """Wrap each block and the root with FSDP2, in place.

    Norm, head and embeddings stay together in the root's group, so that tied weights are in one group.
    """
    fsdp = config.fsdp
    compute = config.model.fsdp_policy_mp
    precision = {}
    if compute:
        precision = {"param_dtype": DTYPES[compute], "reduce_dtype": DTYPES[fsdp.reduce_dtype or "float32"]}
    elif fsdp.reduce_dtype:
        precision = {"reduce_dtype": DTYPES[fsdp.reduce_dtype]}
    pinned = mesh.device_type != "cpu"
    # SHARD_GRAD_OP and NO_SHARD keep parameters whole between forward and backward. A frozen model has no backward
    # pass to keep them for.
    reshard = frozen or fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
    options = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(**precision),
    }
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=frozen, **options)
    if fsdp.forward_prefetch:
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + fsdp.forward_prefetch])
    if fsdp.backward_prefetch is None:
        # An explicit, empty list takes the place of the implicit prefetch of the block before.
        for block in blocks:
            block.set_modules_to_backward_prefetch([])


def materialize(model, device: torch.device, storage: torch.device) -> None:
    """Allocate a sharded meta model: parameters on `storage`, buffers on `device`; buffers get their values."""
    model.to_empty(device=storage)
    model.tie_weights()  # to_empty makes one parameter of each name
    with torch.no_grad():
        for module in model.modules():
            if module._non_persistent_buffers_set:
                # Rotary frequencies and the like are in no file; the model library computes them here.
                model._init_weights(module)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def load_weights(model, config, tokenizer, dtype: torch.dtype, world: World) -> None:
    """Fill a sharded model: from safetensors each rank reads its own slices; anything else through rank 0, one tensor
    at a time.
    """
    source = loading.source_of(config)
    found = None if config.model.get("archive") or source is None else _safetensors(source)
    plan = found and _match(model, found)
    if plan:
        for names, tensor in named_tensors(model):
            file, key = plan[names[0]]
            _copy_part(tensor, file.get_slice(key))
        model.loaded_from = "each rank read its own part of the safetensors files"
        return
    _broadcast_weights(model, config, tokenizer, dtype, world)
    model.loaded_from = "rank 0 read the weights and sent each rank its part"


def _safetensors(source: str) -> dict | None:
    """Tensor name -> (open file, name) of a folder or cached Hub model; None if it is not stored as safetensors."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    def locate(name):
        return cached_file(
            source,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )

    try:
        index = locate("model.safetensors.index.json")
        if index:
            with open(index) as file:
                files = sorted(set(json.load(file)["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        paths = [locate(name) for name in files]
    except (OSError, ValueError):
        return None
    if not all(paths):
        return None
    opened = [safe_open(path, framework="pt") for path in paths]
    return {key: (file, key) for file in opened for key in file.keys()}


# Names on disk that differ from names in memory, beyond a missing or extra base-model prefix.
DISK_NAMES = {"lm_head.weight": "embed_out.weight"}  # GPT-NeoX


def _match(model, found: dict) -> dict | None:
    """In-memory name -> where it is on disk; None if the files are laid out otherwise (fused experts, say)."""
    prefix = model.base_model_prefix + "."
    plan = {}
    for names, tensor in named_tensors(model):
        candidates = [
            c for name in names for c in (name, DISK_NAMES.get(name), name.removeprefix(prefix), prefix + name)
        ]
        key = next((c for c in candidates if c in found), None)
        if key is None or list(found[key][0].get_slice(key).get_shape()) != list(tensor.shape):
            return None
        plan[names[0]] = found[key]
    return plan


@torch.no_grad()
def _copy_part(tensor: torch.Tensor, whole) -> None:
    """Copy this rank's part out of a lazily read slice, or a tensor."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole[:] if not isinstance(whole, torch.Tensor) else whole)
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    assert tuple(local.shape) == tuple(shape)
    if local.numel():
        local.copy_(whole[tuple(slice(start, start + n) for start, n in zip(offset, shape))])


def _broadcast_weights(model, config, tokenizer, dtype: torch.dtype, world: World) -> None:
    import torch.distributed as dist

    state, problem = {}, None
    if world.is_main:
        try:
            if config.model.get("archive") and os.path.isfile(config.model.archive):
                # Memory-mapped: not even rank 0 holds it whole.
                state = check_keys(model, read_state_dict(config.model.archive), config.model.archive)
            else:
                state = loading.load_model(config, tokenizer, dtype, "cpu").state_dict()
        except (ValueError, OSError) as error:
            problem = str(error)
    problem = broadcast_object(problem, world)
    if problem:
        raise ValueError(problem)
    for names, tensor in named_tensors(model):
        # The backend of the mesh moves it: its own device, whatever the parameter's storage.
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
        if world.is_main:
            buffer.copy_(next(state[name] for name in names if name in state))
        dist.broadcast(buffer, src=0)
        _copy_part(tensor, buffer)


def held_here(model) -> tuple[int, int]:
    """(parameters on this rank, parameters of the whole model)."""
    tensors = [tensor for _, tensor in named_tensors(model)]
    return sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors), sum(
        t.numel() for t in tensors
    )


# ---------------------------------------------------------------------------------------------------------------------
# Gradient norm


def by_mesh(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters grouped by the mesh they lie on: an operation on many tensors at once takes tensors of one mesh only."""
    groups: dict[object, list] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


@torch.no_grad()
def clip_gradients(model, max_norm: float) -> torch.Tensor:
    """Scale gradients to a 2-norm of at most `max_norm`, taken over all parameters of all ranks.

    Parameters are grouped by the mesh they lie on, since one call cannot total over several; a part that several ranks
    hold alike counts once.
    Returns: the norm before scaling, float32 [].
    """
    groups = by_mesh([parameter for parameter in model.parameters() if parameter.grad is not None])
    norms = []
    for parameters in groups:
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    device = norms[0].device
    total = torch.linalg.vector_norm(torch.stack([norm.float().to(device) for norm in norms]))
    for parameters in groups:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Tensor parallelism


def apply_tensor_parallel(model, mesh: DeviceMesh) -> None:
    """Split a model's matrices over the ranks of `mesh` by the plan that comes with the model (DTensor).

    Embeddings, norms and the head stay whole on every rank, also where a plan would split them: they may be tied, and
    the head is computed on response positions only.
    Raises:
        ValueError: the model has no plan, a plan that asks for more than this, or head counts that do not divide.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    name = type(model).__name__
    plan = getattr(model, "tp_plan", None) or getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(f"{name} comes with no tensor-parallel plan: use trainer=FSDPTrainer.")
    settings = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(settings, key, None)
        if heads and heads % mesh.size():
            raise ValueError(f"tp_size={mesh.size()} does not divide {key}={heads} of {name}; use a tp_size that does.")
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    whole = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    unknown = set()
    for path, module in model.named_modules():
        style = next(
            (
                plan[p]
                for p in plan
                if re.fullmatch(_pattern(p), path) or re.fullmatch(_pattern(f"{model.base_model_prefix}.{p}"), path)
            ),
            None,
        )
        if style is None or id(module) in whole:
            continue
        if style in styles:
            parallelize_module(module, mesh, styles[style]())
        elif style == "replicated_with_grad_allreduce":
            _sum_gradients(module, mesh)
        else:
            unknown.add(style)
    if unknown:
        raise ValueError(
            f"The tensor-parallel plan of {name} asks for {', '.join(sorted(unknown))}, which is not "
            "supported here: use trainer=FSDPTrainer."
        )


def _pattern(path: str) -> str:
    return re.escape(path).replace(r"\*", r"\d+")


def _sum_gradients(module, mesh: DeviceMesh) -> None:
    """Norms over one head's width are whole on every rank but see that rank's heads only: their gradients are summed.

    Done on the module's output's way back, before any sharding reduces the parameter's gradient over other ranks.
    """
    import torch.distributed as dist

    class SumBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=mesh.get_group())
            return grad

    forward = module.forward

    def summed_forward(*args, **kwargs):
        own = dict(module._parameters)
        try:
            for name, parameter in own.items():
                if parameter is not None:
                    del module._parameters[name]
                    object.__setattr__(module, name, SumBackward.apply(parameter))
            return forward(*args, **kwargs)
        finally:
            for name, parameter in own.items():
                if parameter is not None:
                    object.__delattr__(module, name)
                    module._parameters[name] = parameter

    module.forward = summed_forward
