"""Weights read into the parts of a model that each rank holds."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import private_apis
from checkpoint.archives import InertReader, read_fitting
from checkpoint.names import check_keys, named_tensors
from modeling import loading
from modeling.stored_weights import find_in_files, safetensors_of
from parallel.patience import on_all, patient_group
from settings import Settings
from utils import World, run_on_main


def load_weights(model, config: Settings, tokenizer, dtype: torch.dtype, world: World) -> None:
    """Fill a sharded model: each rank reads its own part where the files allow it (safetensors, policy.pt, a sharded
    state); anything else goes through rank 0, one tensor at a time.

    Of an archive and the model that it was trained from, only the archive's weights are read. Ranks wait for each other
    for as long as it takes, whatever the time limit of training's collectives.
    Raises:
        ValueError: on all ranks alike, if weights cannot be found or do not fit.
    """
    with patient_group(world) as group:
        archive = loading.archive_of(config)
        folder = loading.weights_folder(config)
        files = safetensors_of(folder) if folder else None
        found = find_in_files(model, files) if files else None
        if found:
            places, model.left_unread = found
            on_all(lambda: _read_slices(model, places), world, group)
            how = "each rank read its own part of the safetensors files"
        elif archive and archive[0] == "state":
            on_all(lambda: _read_sharded_state(model, archive[1], group), world, group)
            how = "each rank read its own part of the archive's sharded state"
        elif archive and archive[0] != "hf":
            on_all(lambda: _read_mapped(model, archive[1]), world, group)
            how = "each rank read its own part of the archive"
        else:
            _send_from_main(model, config, tokenizer, dtype, world, group)
            how = "rank 0 read the weights and sent each rank its part"
    model.loaded_from = how


def _read_slices(model, places: dict) -> None:
    for names, tensor in named_tensors(model):
        file, key = places[names[0]]
        _copy_part(tensor, file.get_slice(key))


def _read_mapped(model, archive: str) -> None:
    state = read_fitting(model, archive, verify=False)  # mapped: what is not copied is not read
    for names, tensor in named_tensors(model):
        _copy_part(tensor, state[names[0]])


def _read_sharded_state(model, folder: str, group) -> None:
    reader = InertReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    shapes = {
        key.removeprefix("model."): torch.empty(meta.size, device="meta")
        for key, meta in stored.items()
        if key.startswith("model.")
    }
    check_keys(model, shapes, folder)
    wanted = {
        next(f"model.{name}" for name in names if f"model.{name}" in stored): tensor.detach()
        for names, tensor in named_tensors(model)
    }
    dcp.load(wanted, storage_reader=reader, process_group=group, no_dist=group is None)


@torch.no_grad()
def _copy_part(tensor: torch.Tensor, whole) -> None:
    """Copy this rank's part out of a lazily read slice, or a tensor."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole[:] if not isinstance(whole, torch.Tensor) else whole)
        return
    shape, offset = private_apis.local_shape_and_offset(tensor)
    local = tensor.to_local()
    assert tuple(local.shape) == shape
    if local.numel():
        local.copy_(whole[tuple(slice(start, start + n) for start, n in zip(offset, shape))])


def _send_from_main(model, config: Settings, tokenizer, dtype: torch.dtype, world: World, group) -> None:
    state = {}
    run_on_main(lambda: state.update(_whole_state(model, config, tokenizer, dtype)), world, group)
    for names, tensor in named_tensors(model):
        # The backend of the mesh moves it: its own device, whatever the parameter's storage.
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
        if world.is_main:
            buffer.copy_(next(state[name] for name in names if name in state))
        dist.broadcast(buffer, src=0)
        _copy_part(tensor, buffer)


def _whole_state(model, config: Settings, tokenizer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    whole = loading.load_model(config, tokenizer, dtype, "cpu")
    model.left_unread = whole.left_unread
    return whole.state_dict()


def count_held(model) -> tuple[int, int]:
    """(parameters on this rank, parameters of the whole model)."""
    tensors = [tensor for _, tensor in named_tensors(model)]
    here = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)
    return here, sum(t.numel() for t in tensors)
