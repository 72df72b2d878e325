"""What differs between training on one device and on many, in one object that holds no trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from checkpoint.names import listing
from modeling.sharded import reshard_after_eval
from parallel.build import build_model
from parallel.gradients import clip_gradients, group_by_mesh
from parallel.weights import count_held
from settings import Settings
from settings.shard_layout import ShardLayout, layout_of, reduces_every_pass
from utils import World, all_reduce_sum, gather_objects


@dataclass(frozen=True)
class Placement:
    """Where a model's parts lie, and what follows for a step.

    Attributes:
        world: this process among those that train together.
        layout: how they share the model and the data.
        mesh: the same with process groups; None on one device.
        reduces_every_pass: whether each micro-batch's gradients are summed over the shards at once.
        owns_group: whether the process group is this object's own, for a mesh of one device.
    """

    world: World
    layout: ShardLayout
    mesh: DeviceMesh | None = None
    reduces_every_pass: bool = True
    owns_group: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device(self.world.device)

    @property
    def sharded(self) -> bool:
        return self.mesh is not None

    @property
    def data_rank(self) -> int:
        """Which part of each step's examples this rank takes, of `data_ranks`."""
        return self.layout.data_rank(self.world.rank)

    @property
    def data_ranks(self) -> int:
        return self.layout.data_ranks

    @property
    def retries_out_of_memory(self) -> bool:
        # FSDP2 can give up a pass that ended in the middle from torch 2.13 on.
        return self.layout.retries_out_of_memory and (not self.sharded or hasattr(FSDPModule, "reset_iter_state"))

    def build_model(self, config: Settings, tokenizer, dtype: torch.dtype, frozen: bool = False) -> torch.nn.Module:
        """A model with its weights, ready to compute here: see parallel/build.py."""
        return build_model(config, tokenizer, dtype, self.world, self.mesh, frozen)

    def parameter_groups(self, model) -> list[dict]:
        """Trainable parameters for an optimizer of torch, which works on each group's parameters together."""
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [{"params": group} for group in group_by_mesh(trainable)]

    def clip_gradients(self, model, max_norm: float) -> torch.Tensor:
        """Scale gradients to a 2-norm of at most `max_norm`; their norm over all parameters before that, float32 []."""
        return clip_gradients(model, max_norm)

    def sync_gradients(self, model, last: bool) -> None:
        """Call before each micro-batch of a step: gradients are summed on each rank, over the shards of a copy of the
        model after each or after the last (`reduces_every_pass`), and over copies after the last.
        """
        if self.sharded:
            model.set_requires_gradient_sync(last or self.reduces_every_pass)
            if self.layout.replicas > 1:
                model.set_requires_all_reduce(last)

    def reduce(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that take different examples."""
        if self.world.size == 1:
            return sums
        return all_reduce_sum(sums, self.world) / self.layout.tp  # ranks of a tensor-parallel group have seen the same

    def gather(self, obj) -> list:
        """The object of each rank that takes different examples, in the order of `data_rank`, on every rank."""
        every = gather_objects(obj, self.world)
        of_data_rank = {self.layout.data_rank(rank): part for rank, part in reversed(list(enumerate(every)))}
        return [of_data_rank[rank] for rank in range(self.data_ranks)]

    def reshard_after_eval(self, *models) -> None:
        """Call after forward passes without a backward pass, which leave FSDP2's parameters whole. Takes None, too."""
        if self.sharded:
            for model in models:
                if model is not None:
                    reshard_after_eval(model)

    def close(self) -> None:
        """Call once at the end of a run."""
        if self.owns_group:
            dist.destroy_process_group()

    def recover(self, *models) -> None:
        """Call after a pass that ended in the middle: what FSDP2 has gathered or not yet summed is given up."""
        for model in models:
            if self.sharded and model is not None:
                model.reset_iter_state()

    def describe(self, model) -> list[str]:
        """What a model is and, on many devices, what each rank holds of it, in words. All ranks call it together."""
        count = sum(parameter.numel() for parameter in model.parameters())
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        name = type(model).__name__.removeprefix("FSDP")  # which sharding puts before the class's name
        lines = [f"{name}: {count / 1e6:,.1f} M parameters, {dtype}, on {self.device}"]
        unread = getattr(model, "left_unread", [])
        if unread:
            lines.append(f"Stored tensors that have no part in this model are left unread: {listing(unread, 8)}.")
        if self.world.size > 1:
            here, whole = count_held(model)
            parts = gather_objects(here, self.world)
            held = ", ".join(f"rank {rank} holds {part / 1e6:,.1f} M" for rank, part in enumerate(parts))
            lines.append(f"{self.mesh}: {held} of {whole / 1e6:,.1f} M parameters; {model.loaded_from}.")
        return lines


def make_placement(config: Settings, world: World) -> Placement:
    """The placement of a run on this rank; all ranks call it together.

    Raises:
        ValueError: the world does not divide as the settings ask.
    """
    layout = layout_of(config, world.size)
    if not layout.sharded:
        return Placement(world, layout)
    owns_group = world.size == 1 and not dist.is_initialized()
    if owns_group:
        # One device that computes in another type than its weights': FSDP2 wants a group, if only of this process.
        backend = "cpu:gloo,cuda:nccl" if torch.device(world.device).type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    names, sizes = zip(*layout.grid)
    mesh = init_device_mesh(torch.device(world.device).type, sizes, mesh_dim_names=names)
    return Placement(world, layout, mesh, reduces_every_pass(config), owns_group)
