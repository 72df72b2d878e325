"""How the processes of a run share a model and its data: numbers only, known before any process starts.

The checks of the settings, the trainers and the memory plan all ask here, so that they cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import utils
from settings.precision import mixed_dtype
from settings.schema import Settings


@dataclass(frozen=True)
class ShardLayout:
    """The processes of a run as a grid.

    Attributes:
        grid: (name, size) of each dimension, outermost first; empty when the whole model lies on one device.
            "replicate": copies of the model, whose gradients are averaged; "shard": devices that a parameter is split
            over by FSDP2; "tp": devices that a matrix is split over by tensor parallelism.
    """

    grid: tuple[tuple[str, int], ...] = ()

    @property
    def sharded(self) -> bool:
        return bool(self.grid)

    @property
    def replicas(self) -> int:
        return dict(self.grid).get("replicate", 1)

    @property
    def shards(self) -> int:
        return dict(self.grid).get("shard", 1)

    @property
    def tp(self) -> int:
        return dict(self.grid).get("tp", 1)

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.grid)

    @property
    def data_ranks(self) -> int:
        """Parts that each step's examples are cut into: devices of one tensor-parallel group share theirs."""
        return self.world_size // self.tp

    @property
    def retries_out_of_memory(self) -> bool:
        """Whether a step can be repeated when memory runs out. Not on many devices: the others are inside collectives
        that this rank has left, and there is no way back to the step's beginning."""
        return self.world_size == 1

    def data_rank(self, rank: int) -> int:
        """Which of these parts process `rank` takes."""
        return rank // self.tp


def world_size_of(config: Settings, kind: str, count: int) -> int:
    """Processes of a run: those that joined through torchrun or srun, else `world_size`, else one a device.

    Args:
        kind, count: type of the devices and how many are visible, as `parallel.launch.visible_devices` finds them.
    """
    joined = utils.joined_world()
    if joined:
        return joined[1]
    if config.trainer == "BasicTrainer":
        return 1
    return config.world_size or (max(1, count) if kind == "cuda" else 1)


def offloads(config: Settings, frozen: bool) -> bool:
    """Whether a sharded model's parameters lie in host memory; frozen: it is the reference."""
    return config.fsdp.cpu_offload or (frozen and config.fsdp.reference_cpu_offload)


def reshards_after_forward(config: Settings) -> bool:
    """Whether blocks that are trained give their gathered parameters back between forward and backward.

    SHARD_GRAD_OP and NO_SHARD keep them whole. A frozen model has no backward pass to keep them for.
    """
    return config.fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")


def reduces_every_pass(config: Settings) -> bool:
    """Whether a step's gradients are summed over the shards after each pass. Copies of a whole model keep all gradients
    in any case, and save nothing by it.
    """
    return config.fsdp.reduce_every_micro_batch and config.fsdp.sharding_strategy != "NO_SHARD"


def reduce_dtype_of(config: Settings) -> str | None:
    """Name of the dtype that gradients are reduced in; None: that of the parameters."""
    return config.fsdp.reduce_dtype or ("float32" if mixed_dtype(config) else None)


def layout_of(config: Settings, world_size: int) -> ShardLayout:
    """The grid of a world of processes under a run's settings.

    Raises:
        ValueError: the world does not divide as the settings ask.
    """
    tp, strategy, replicas = config.tp_size, config.fsdp.sharding_strategy, config.fsdp.replicas
    if config.trainer == "BasicTrainer":
        # What it computes in another type than its weights' goes through FSDP2, too: on a mesh of one.
        return ShardLayout((("shard", 1),)) if mixed_dtype(config) else ShardLayout()
    if tp > 1:
        if world_size % tp:
            raise ValueError(
                f"tp_size={tp} does not divide the world of {world_size} processes; use "
                f"world_size={-(-world_size // tp) * tp}, or another tp_size"
            )
        groups = world_size // tp
        if strategy == "NO_SHARD" and groups > 1:
            return ShardLayout((("replicate", groups), ("shard", 1), ("tp", tp)))
        return ShardLayout((("shard", groups), ("tp", tp)))
    if strategy == "NO_SHARD":
        return ShardLayout((("replicate", world_size), ("shard", 1)))
    if strategy == "HYBRID_SHARD":
        replicas = replicas or max(1, world_size // utils.processes_on_node(world_size))  # one a node
        if world_size % replicas:
            raise ValueError(
                f"fsdp.replicas={replicas} does not divide the world of {world_size} processes: HYBRID_SHARD "
                "shards each copy over world_size / replicas of them"
            )
        return ShardLayout((("replicate", replicas), ("shard", world_size // replicas)))
    return ShardLayout((("shard", world_size),))
