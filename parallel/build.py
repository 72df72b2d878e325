"""A model built where it will compute: whole on one device, or its parts on many.

On one device the whole model fits, so the model library's own loader builds it with its weights, and it moves there. On
many no rank may hold the whole: each builds it without content (on the meta device), cuts it, allocates its part and
reads its part of the weights. One device does not go that way because it needs none of it, and because what no weights
file holds (rotary frequencies, say) then has to be computed through a private function of the library
(`private_apis.fill_computed_buffers`), where the loader does it by itself.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

import private_apis
from modeling import loading
from modeling.blocks import checkpoint_activations, choose_trainable, compile_blocks, find_blocks
from parallel.fsdp import apply_fsdp
from parallel.tensor_parallel import apply_tensor_parallel
from parallel.weights import load_weights
from settings import Settings
from settings.shard_layout import offloads
from utils import World


def build_model(
    config: Settings, tokenizer, dtype: torch.dtype, world: World, mesh: DeviceMesh | None = None, frozen: bool = False
) -> torch.nn.Module:
    """A model with its weights, in evaluation mode; on many devices each rank holds its part.

    The order matters: blocks are found before sharding renames their classes, matrices are split before FSDP2 cuts
    what is left of them, and blocks are compiled before checkpointing wraps them.

    Args:
        mesh: the ranks that share the model, with dimensions named as in `ShardLayout.grid`; None: one device.
        frozen: a reference: no gradients, and parameters given back after every forward pass.
    Raises:
        ValueError: weights, archive or block class cannot be found or do not fit; the model has no tensor-parallel
            plan; model.frozen matches no parameter.
    """
    device = torch.device(world.device)
    if mesh is None:
        model = loading.load_model(config, tokenizer, dtype, device)
    else:
        model = loading.build_on_meta(config, loading.model_config(config, tokenizer), dtype)
    blocks = find_blocks(model, config.model.block_name)
    if mesh is not None and "tp" in mesh.mesh_dim_names:
        apply_tensor_parallel(model, mesh["tp"])
    if config.compile:
        compile_blocks(blocks)
    every = int(config.activation_checkpointing)
    if every and not frozen:
        checkpoint_activations(blocks, every)
    choose_trainable(model, frozen, config.model.frozen)
    if mesh is not None:
        offload = offloads(config, frozen)
        data_dims = tuple(name for name in mesh.mesh_dim_names if name != "tp")
        fsdp_mesh = mesh[data_dims] if "tp" in mesh.mesh_dim_names else mesh
        apply_fsdp(model, blocks, fsdp_mesh, config, frozen, offload)
        materialize(model, device, torch.device("cpu") if offload else device)
        load_weights(model, config, tokenizer, dtype, world)
    return model.eval()


def materialize(model, device: torch.device, storage: torch.device) -> None:
    """Allocate a sharded meta model: parameters on `storage`, buffers on `device`; buffers get their values."""
    model.to_empty(device=storage)
    model.tie_weights()  # to_empty makes one parameter of each name
    private_apis.fill_computed_buffers(model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
