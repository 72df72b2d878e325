"""Weights read into the parts of a model that each rank holds."""

from __future__ import annotations

import json
import os

import torch
from torch.distributed.tensor import DTensor

import private_apis
from checkpoint.archives import read_state_dict
from checkpoint.names import check_keys, named_tensors
from modeling import loading
from settings import Settings
from utils import World, run_on_main


def load_weights(model, config: Settings, tokenizer, dtype: torch.dtype, world: World) -> None:
    """Fill a sharded model: from safetensors each rank reads its own slices; anything else through rank 0, one tensor
    at a time.
    """
    source = loading.source_of(config)
    found = None if config.model.archive or source is None else _safetensors(source)
    places = found and _find_in_files(model, found)
    if places:
        for names, tensor in named_tensors(model):
            file, key = places[names[0]]
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
        try:
            return cached_file(source, name)
        except OSError:  # the model has no such file, or it is out of reach
            return None

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


def _find_in_files(model, found: dict) -> dict | None:
    """In-memory name -> where it is on disk; None if the files are laid out otherwise (fused experts, say)."""
    prefix = model.base_model_prefix + "."
    places = {}
    for names, tensor in named_tensors(model):
        candidates = [
            c for name in names for c in (name, DISK_NAMES.get(name), name.removeprefix(prefix), prefix + name)
        ]
        key = next((c for c in candidates if c in found), None)
        if key is None or list(found[key][0].get_slice(key).get_shape()) != list(tensor.shape):
            return None
        places[names[0]] = found[key]
    return places


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


def _broadcast_weights(model, config: Settings, tokenizer, dtype: torch.dtype, world: World) -> None:
    import torch.distributed as dist

    state = {}

    def read() -> None:
        try:
            if config.model.archive and os.path.isfile(config.model.archive):
                # Memory-mapped: not even rank 0 holds it whole.
                state.update(check_keys(model, read_state_dict(config.model.archive), config.model.archive))
            else:
                state.update(loading.load_model(config, tokenizer, dtype, "cpu").state_dict())
        except (ValueError, OSError) as error:
            raise ValueError(str(error)) from error

    run_on_main(read, world)
    for names, tensor in named_tensors(model):
        # The backend of the mesh moves it: its own device, whatever the parameter's storage.
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
        if world.is_main:
            buffer.copy_(next(state[name] for name in names if name in state))
        dist.broadcast(buffer, src=0)
        _copy_part(tensor, buffer)


def count_held(model) -> tuple[int, int]:
    """(parameters on this rank, parameters of the whole model)."""
    tensors = [tensor for _, tensor in named_tensors(model)]
    here = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)
    return here, sum(t.numel() for t in tensors)
