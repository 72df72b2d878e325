"""Sharding with FSDP2: each block of a model is one group of parameters that is gathered when it computes."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from modeling.loading import DTYPES
from settings import Settings
from settings.precision import mixed_dtype
from settings.shard_layout import reduce_dtype_of, reshards_after_forward


def apply_fsdp(model, blocks, mesh: DeviceMesh, config: Settings, frozen: bool, offload: bool) -> None:
    """Wrap each block and the root with FSDP2, in place.

    Norm, head and embeddings stay together in the root's group, so that tied weights are in one group.
    """
    fsdp = config.fsdp
    dtypes = {"param_dtype": mixed_dtype(config), "reduce_dtype": reduce_dtype_of(config)}
    precision = {key: DTYPES[dtype] for key, dtype in dtypes.items() if dtype}
    pinned = mesh.device_type != "cpu"
    reshard = frozen or reshards_after_forward(config)
    options = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(**precision),
    }

    def shard(module, again: bool) -> None:
        fully_shard(module, reshard_after_forward=again, **options)
        module.reshards_after_forward = again  # FSDP2 does not tell, and modeling/sharded.py changes it for a while

    for block in blocks:
        shard(block, reshard)
    shard(model, frozen)
    if fsdp.forward_prefetch:
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + fsdp.forward_prefetch])
    if fsdp.backward_prefetch is None:
        # FSDP2 takes an empty list for its default, the block before. A module that is to fetch itself fetches nothing:
        # its own parameters are there by then. The root counts, too: by default it fetches the last block.
        for module in (*blocks, model):
            module.set_modules_to_backward_prefetch([module])
