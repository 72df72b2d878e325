"""Weights in safetensors files, each of which can be read in part: where a model's tensors lie in them."""

from __future__ import annotations

import json

import torch

from checkpoint.names import HARMLESS, misfits, named_tensors

# Names on disk that differ from names in memory, beyond a missing or extra base-model prefix.
DISK_NAMES = {"lm_head.weight": "embed_out.weight"}  # GPT-NeoX


def safetensors_of(source: str) -> dict | None:
    """Tensor name -> (open file, name) of a folder or cached Hub model; None if it is not stored as safetensors."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    def locate(name):
        try:
            return cached_file(source, name)
        except OSError:  # the model has no such file, or it is out of reach
            return None

    try:
        single = locate("model.safetensors")
        if single:
            paths = [single]
        else:
            index = locate("model.safetensors.index.json")
            if not index:
                return None
            with open(index) as file:
                paths = [locate(name) for name in sorted(set(json.load(file)["weight_map"].values()))]
    except (OSError, ValueError):
        return None
    if not all(paths):
        return None
    opened = [safe_open(path, framework="pt") for path in paths]
    return {key: (file, key) for file in opened for key in file.keys()}


def find_in_files(model, found: dict) -> tuple[dict, list[str]] | None:
    """(in-memory name -> where it is on disk, stored names without a part in the model).

    None if the files are laid out otherwise (fused experts, say) or do not fit: what then is, the model library knows.
    """
    places: dict[str, tuple] = {}
    used = set()
    for names, tensor in named_tensors(model):
        stored = _stored_names(model, names, found)
        if not stored or list(found[stored[0]][0].get_slice(stored[0]).get_shape()) != list(tensor.shape):
            return None
        places[names[0]] = found[stored[0]]
        used.update(stored)
    unread = sorted(name for name in found.keys() - used if not HARMLESS.search(name))
    if misfits(model, unread) or tied_but_different(model, found):
        return None
    return places, unread


def _stored_names(model, names: list[str], found: dict) -> list[str]:
    """What the files call a tensor that has these names in the model: several if tied weights are stored twice."""
    prefix = model.base_model_prefix + "."
    candidates = [
        c for name in names for c in (name, DISK_NAMES.get(name, name), name.removeprefix(prefix), prefix + name)
    ]
    return list(dict.fromkeys(name for name in candidates if name in found))


def tied_but_different(model, found: dict) -> bool:
    """Whether the files hold two different tensors for one that the model has under several names."""
    for names, _ in named_tensors(model):
        stored = _stored_names(model, names, found) if len(names) > 1 else []
        for name in stored[1:]:
            one, other = (found[key][0].get_tensor(key) for key in (stored[0], name))
            if one.shape != other.shape or not torch.equal(one, other):
                return True
    return False
