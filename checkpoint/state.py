"""What a run is resumed from, taken out of model, optimizer and random generators, and put back.

    state/  *.distcp, .metadata   the tensors of model and optimizer, sharded: torch.distributed.checkpoint
            trainer.pt            world size, the optimizer's description, the trainer's own state
            rng-<rank>.pt         each rank's random generators

Parameters are known by their names in state_dict(), so a state saved on one world loads on any other.

torch's own get_optimizer_state_dict is not used: for an optimizer that has not stepped yet it takes a step with zero
gradients, and so invents the state that such a checkpoint should not have.
"""

import io
import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from checkpoint.archives import InertReader
from checkpoint.names import listing, named_tensors
from utils import World

# Choices of an optimizer's implementation that belong to the machine, not to the run: the new process keeps its own.
MACHINE_OPTIONS = ("fused", "foreach", "capturable", "differentiable")


# ---- taking out -----------------------------------------------------------------------------------------------------


def model_tensors(model, part="model"):
    """{'<part>.<name>': tensor (as sharded)}: parameters and persistent buffers, tied ones once."""
    return {f"{part}.{names[0]}": tensor.detach() for names, tensor in named_tensors(model)}


def optimizer_tensors(model, optimizer):
    """Takes an optimizer's state apart.

    Returns ({'optimizer.<entry>.<parameter name>': tensor}, description), the description being made of plain values:
    class, hyperparameters and parameter names of each group, entries that are no tensors, and entries without
    dimensions that live on an accelerator.
    """
    name_of = {id(tensor): names[0] for names, tensor in named_tensors(model)}
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict] = {}
    on_device: list[str] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = name_of[id(parameter)]
            for entry, value in optimizer.state.get(parameter, {}).items():
                assert "." not in entry
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{entry}.{name}"] = value.detach()
                    if value.dim() == 0 and value.device.type != "cpu" and entry not in on_device:
                        on_device.append(entry)
                else:
                    values.setdefault(name, {})[entry] = value
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "names": [name_of[id(parameter)] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "values": values, "on_device": on_device}


def full_state(model, world, copy=False):
    """{name: full CPU tensor} on rank 0, {} elsewhere.

    Gathered one parameter after the other, so that only rank 0 ever holds a whole model.
    On one CPU process these are the model's own tensors, unless `copy`.
    """
    state = {}
    for names, tensor in named_tensors(model):
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            if tensor.device.type != tensor.device_mesh.device_type:  # offloaded: gather where the mesh communicates
                tensor = tensor.to(tensor.device_mesh.device_type)
            gathered = tensor.full_tensor()
        else:
            gathered = tensor
        if world.is_main:
            value = gathered.cpu()
            # a copy too where the tensor is a window on a larger storage: torch.save would write all of that
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if (copy and value.data_ptr() == own.data_ptr()) or value.untyped_storage().nbytes() > value.nbytes:
                value = value.clone(memory_format=torch.contiguous_format)
            state.update(dict.fromkeys(names, value))
    return state


def to_host(tensor):
    """A copy in host memory that later steps do not touch, sharded as before."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def rng_state():
    """The state of every random generator of this process, in plain values and tensors."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, gauss = numpy_state
    state: dict = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state):
    """Puts back what rng_state() gave. An accelerator's state is skipped where there is no such accelerator."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def packed_trainer_state(examples: int, world: World, optimizer: dict | None, trainer_state: dict) -> bytes:
    """The bytes of trainer.pt, read back at once: one that cannot be read must not wait for the resume to show.

    optimizer: the description from `optimizer_tensors`. Raises TypeError for a state that could not be read back.
    """
    content = {"format": 1, "examples": examples, "world": world.size, "optimizer": optimizer, "trainer": trainer_state}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError(f"trainer_state must be made of numbers, strings, tensors, lists and dicts: {error}") from None
    return buffer.getvalue()


# ---- putting back ---------------------------------------------------------------------------------------------------


def read_trainer_state(folder: Path) -> dict:
    """The content of trainer.pt of a state/ folder: plain values and tensors, nothing that could run code."""
    return torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)


@dataclass
class StateLoad:
    """A checked state/ folder, ready to be read into the model and the optimizer that it was checked against.

    saved: the content of trainer.pt. tensors: {stored name: tensor to read into}: the model's own, and new ones for the
    optimizer. optimizer_state: {parameter name: {entry: value}}. rng: None when another number of processes saved it.
    """

    folder: Path
    saved: dict
    tensors: dict
    optimizer_state: dict
    rng: dict | None

    def read_into(self, model, optimizer, group) -> None:
        """Overwrites model, optimizer (or None) and random generators. Collective over the process group."""
        dcp.load(self.tensors, storage_reader=InertReader(self.folder), process_group=group, no_dist=group is None)
        if optimizer is not None:
            parameter_of = {names[0]: tensor for names, tensor in named_tensors(model)}
            optimizer.state.clear()
            for name, state in self.optimizer_state.items():
                optimizer.state[parameter_of[name]] = state
            for group_now, group_then in zip(optimizer.param_groups, self.saved["optimizer"]["groups"]):
                kept = {key: value for key, value in group_then.items() if key not in ("names", *MACHINE_OPTIONS)}
                group_now.update(kept)
        if self.rng is not None:
            set_rng_state(self.rng)


def check_state(folder: Path, world: World, model, optimizer, reference=None) -> StateLoad:
    """Finds everything that can be wrong with a state/ folder before anything is overwritten; raises ValueError.

    reference: a model that changes while training, whose tensors are stored as the model's are.
    """
    rng = None
    try:
        saved = read_trainer_state(folder)
        if saved["world"] == world.size:
            rng = torch.load(folder / f"rng-{world.rank}.pt", map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{folder} is damaged ({type(error).__name__}: {error})") from None
    stored = InertReader(folder).read_metadata().state_dict_metadata
    request: dict[str, torch.Tensor] = {}
    wrong: list[str] = []
    by_name = _check_model("model", model, stored, request, wrong)
    if reference is not None:
        _check_model("reference", reference, stored, request, wrong)
    states = {}
    if optimizer is not None:
        states = _check_optimizer(saved["optimizer"], stored, by_name, model, optimizer, request, wrong)
    if wrong:
        raise ValueError(listing(wrong))
    return StateLoad(folder, saved, request, states, rng)


def _check_model(part: str, model, stored, request, wrong) -> dict[str, torch.Tensor]:
    """Adds to `request` the tensors of a model that are to be read, and to `wrong` what does not fit; all by name."""
    by_name: dict[str, torch.Tensor] = {}
    for names, tensor in named_tensors(model):
        key = next((f"{part}.{name}" for name in names if f"{part}.{name}" in stored), None)
        by_name.update(dict.fromkeys(names, tensor))
        if key is None:
            wrong.append(f"{names[0]} is missing" if part == "model" else f"{names[0]} of the {part} is missing")
        elif tuple(stored[key].size) != tuple(tensor.shape) or stored[key].properties.dtype != tensor.dtype:
            wrong.append(
                f"{names[0]} is {tuple(stored[key].size)} {stored[key].properties.dtype}, "
                f"the {part} has {tuple(tensor.shape)} {tensor.dtype}"
            )
        else:
            request[key] = tensor.detach()
    wrong += [
        f"{key.removeprefix(part + '.')} is not in the {part}"
        for key in stored
        if key.startswith(f"{part}.") and key not in request and key.removeprefix(f"{part}.") not in by_name
    ]
    return by_name


def _check_optimizer(description, stored, by_name, model, optimizer, request, wrong):
    if description is None:
        raise ValueError("it holds no optimizer")
    if description["class"] != type(optimizer).__name__:
        raise ValueError(f"it holds the state of {description['class']}, not of {type(optimizer).__name__}")
    now = optimizer_tensors(model, optimizer)[1]["groups"]
    if [group["names"] for group in now] != [group["names"] for group in description["groups"]]:
        raise ValueError("its optimizer trains other parameters, or groups them differently")
    group_of = {name: group for group, named in zip(optimizer.param_groups, now) for name in named["names"]}
    states: dict[str, dict] = {}
    for key, meta in stored.items():
        if not key.startswith("optimizer."):
            continue
        _, entry, name = key.split(".", 2)
        if name not in group_of:
            wrong.append(f"the optimizer's {entry} of {name} has no parameter")
            continue
        parameter, dtype = by_name[name].detach(), meta.properties.dtype
        if tuple(meta.size) == tuple(parameter.shape):
            tensor = torch.empty_like(parameter, dtype=dtype)  # sharded as the parameter is
        else:  # counters, and the factored moments of Adafactor
            group = group_of[name]
            resident = (
                len(meta.size) > 0 or entry in description["on_device"] or group.get("fused") or group.get("capturable")
            )
            tensor = torch.empty(meta.size, dtype=dtype, device=parameter.device if resident else "cpu")
        request[key] = states.setdefault(name, {})[entry] = tensor
    for name, values in description["values"].items():
        states.setdefault(name, {}).update(values)
    return states
