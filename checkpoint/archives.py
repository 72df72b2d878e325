"""Reading weights from files: policy.pt, Hugging Face folders, step folders and run folders, ours and other people's.

    read_state_dict(path)            -> {name: tensor} from any of them, nothing in the file being able to run code
    read_fitting(model, path)        -> the same, with exactly the names of a model (names.check_keys)
    locate(path)                     -> (kind, path) if a caller would rather read it by itself; kind is one of
                                        'torch' (a .pt or .bin file), 'safetensors' (a file), 'hf', 'state' (folders)

Names: policy.pt carries the names of `model.state_dict()`. Some of them differ from those in Hugging Face files
(GPT-NeoX has `lm_head.weight` in memory and `embed_out.weight` on disk, and before transformers 5 in memory too): both
are understood.
"""

import json
import os
import pickle
import re
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from checkpoint import step_folders
from checkpoint.names import check_keys, clean_names, listing
from data.files import check_no_pipes

# Saving without a process group is what a run on one device does: nothing to warn of.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

HF_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


# ---- reading --------------------------------------------------------------------------------------------------------


def locate(path, verify=True):
    """Finds what an archive path means. Returns (kind, path), see the top of the file.

    A run folder means the step of its LATEST, a step folder its policy.pt, else its hf/, else its state/. With `verify`
    a file that lies in one of our step folders is compared with its checksum first.
    Raises ValueError if there is nothing usable, naming the step before it if a step is damaged.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"no archive at {path}: give a policy.pt, or a Hugging Face, step or run folder")
    check_no_pipes(path)
    if path.is_file():
        found = ("safetensors" if path.suffix == ".safetensors" else "torch"), path
    elif (path / step_folders.MANIFEST).exists() or re.fullmatch(r"step-\d+", path.name):
        found = _locate_in_step(path)
    elif any((path / name).exists() for name in HF_WEIGHTS):
        found = "hf", path
    elif (path / step_folders.LATEST).is_symlink() or any(path.glob("step-*")) or (path / step_folders.LATEST).exists():
        steps = [folder for _, folder in step_folders.complete_steps(path)]
        latest = step_folders.read_latest(path) or (steps[-1] if steps else None)
        if latest is None:
            raise ValueError(f"the run folder {path} holds no complete checkpoint")
        return locate(latest, verify)
    elif (path / ".metadata").exists():
        found = "state", path
    elif (path / "adapter_config.json").exists():
        raise ValueError(adapter_message(path))
    else:
        raise ValueError(f"{path} is no archive: it holds none of {', '.join(HF_WEIGHTS)}, LATEST, step-*, policy.pt")
    if verify:
        _verify(found[1])
    return found


def adapter_message(folder: Path) -> str:
    """Why a PEFT folder is no model, and what to do."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = "its base model"
    return (
        f"{folder} holds an adapter (PEFT) of {base}, not a whole model. Merge it into that model and give the new "
        "folder, with the tokenizer's files in it: "
        f'AutoPeftModelForCausalLM.from_pretrained("{folder}").merge_and_unload().save_pretrained("NEW_FOLDER")'
    )


def is_lfs_pointer(file: Path) -> bool:
    """Whether a file is what git leaves in place of a large one that it did not fetch (Git LFS)."""
    start = b"version https://git-lfs"
    if not file.is_file() or file.stat().st_size > 1024:
        return False
    with open(file, "rb") as stream:
        return stream.read(len(start)) == start


def _locate_in_step(folder):
    for kind, name in (("torch", "policy.pt"), ("hf", "hf"), ("state", "state")):
        if (folder / name).exists():
            return kind, folder / name
    raise ValueError(f"the step folder {folder} holds none of policy.pt, hf/, state/")


def _verify(path):
    """Checks a part of a step folder against that folder's manifest. Raises ValueError offering the step before it."""
    for step, only in ((path.parent, path.name), (path.parent.parent, f"{path.parent.name}/{path.name}")):
        if (step / step_folders.MANIFEST).exists():
            problem = step_folders.damage(step, only)
            if problem:
                others = [f for _, f in reversed(step_folders.complete_steps(step.parent)) if f.name != step.name]
                good = next((f for f in others if step_folders.damage(f) is None), None)
                offer = f"use the step before it: {good}" if good else "there is no other complete step beside it"
                raise ValueError(f"{path} is damaged ({problem}); {offer}")
            return


def read_state_dict(path, verify=True):
    """Returns {name: tensor}, on the CPU, mapped from the file where its format allows (memory stays near one copy).

    `path`: a policy.pt ({'step_idx', 'state', 'metrics'}, as the DPO reference implementation writes it), a bare state
    dict (.pt, .bin, .safetensors), a Hugging Face folder (names as on disk), a step folder or a run folder.
    Raises ValueError for a file that is missing, truncated, damaged, no checkpoint, or that holds more than tensors.
    """
    kind, path = locate(path, verify)
    if is_lfs_pointer(path):
        raise ValueError(f"{path} is a Git LFS pointer, not the weights: fetch them with `git lfs pull` in its folder")
    if kind == "state":
        return _read_distributed(path)
    if kind == "torch":
        return _unwrap(_torch_load(path), path)
    if kind == "safetensors":
        return _read_safetensors(path)
    return _read_hf(path)


def _torch_load(path):
    def load(mmap):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)

    try:
        try:
            return load(mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return load(mmap=False)  # the format from before torch 1.6, which is no zip file
    except pickle.UnpicklingError as error:
        if re.search(r"Unsupported (global|class)|GLOBAL|not an allowed global", str(error)):
            named = re.search(r"GLOBAL (\S+)", str(error))
            what = f" ({named.group(1)})" if named else ""
            raise ValueError(
                f"{path} is refused: it holds Python objects besides tensors{what}, and loading those "
                "could run code. Save its state dict alone: torch.save({'state': model.state_dict()}, "
                "path)"
            ) from None
        reason: Exception = error
    except PermissionError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except Exception as error:  # RuntimeError, OSError (a seek behind the end), EOFError, KeyError, ...
        reason = error
    first_line = str(reason).partition("\n")[0]
    raise ValueError(f"{path} is truncated or no PyTorch checkpoint ({type(reason).__name__}: {first_line})")


def _unwrap(content, path):
    for key in ("state", "state_dict", "model_state_dict", "module", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} holds no state dict: expected {{'state': {{name: tensor}}}} or {{name: tensor}}")
    strangers = [str(key) for key, value in content.items() if not isinstance(value, torch.Tensor)]
    if strangers:
        raise ValueError(f"{path} holds no plain state dict: not tensors: {listing(strangers)}")
    return clean_names(content)


def _read_safetensors(path):
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return clean_names(load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error})") from None


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a Hugging Face folder, in the order of preference of transformers.

    Raises ValueError for an index that cannot be read, leads out of its folder or names files that are not there.
    """
    name = next(name for name in HF_WEIGHTS if (folder / name).exists())
    if not name.endswith(".json"):
        return [folder / name]
    try:
        shards = sorted(set(json.loads((folder / name).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, OSError):
        raise ValueError(f"{folder / name} is no readable index of weights") from None
    # an index names files of its own folder; anything else would be a way out of it
    if any(not isinstance(shard, str) or shard != os.path.basename(shard) for shard in shards):
        raise ValueError(f"{folder / name} names files outside its folder")
    missing = [shard for shard in shards if not (folder / shard).exists()]
    if missing:
        raise ValueError(f"{folder} lacks {listing(missing)}, which {name} names: copy it again")
    return [folder / shard for shard in shards]


def _read_hf(folder):
    state = {}
    for file in weight_files(folder):
        state.update(_read_safetensors(file) if file.suffix == ".safetensors" else _unwrap(_torch_load(file), file))
    return state


class InertReader(dcp.FileSystemReader):
    """Reads a torch.distributed.checkpoint folder whose `.metadata` (a pickle) may name nothing but data classes.

    The tensors themselves are read with weights_only by torch.
    """

    class _Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            allowed = (
                re.fullmatch(r"torch\.distributed\.checkpoint\.(metadata|filesystem|api|planner)", module)
                or module in ("pathlib", "pathlib._local")
                or (module, name)
                in {
                    ("torch.serialization", "_get_layout"),
                    ("collections", "OrderedDict"),
                    ("builtins", "set"),
                    ("builtins", "frozenset"),
                    ("torch", "Size"),
                }
                or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
            )
            if not allowed or "." in name:
                raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's .metadata")
            found = super().find_class(module, name)
            data = isinstance(found, (type, torch.dtype)) or (module, name) == ("torch.serialization", "_get_layout")
            if not data:
                raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's .metadata")
            return found

    def read_metadata(self, *args, **kwargs):
        file = Path(self.path) / ".metadata"
        try:
            with open(file, "rb") as stream:
                self._Unpickler(stream).load()
            return super().read_metadata(*args, **kwargs)
        except FileNotFoundError:
            raise ValueError(f"{file} is missing: {self.path} is no complete resume state") from None
        except Exception as error:
            raise ValueError(f"{file} is damaged or not ours ({error})") from None


def _read_distributed(folder):
    reader = InertReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        key.removeprefix("model."): torch.empty(meta.size, dtype=meta.properties.dtype)
        for key, meta in stored.items()
        if key.startswith("model.")
    }
    if not state:
        raise ValueError(f"{folder} holds no model")
    dcp.load({"model." + name: tensor for name, tensor in state.items()}, storage_reader=reader, no_dist=True)
    return state


def read_fitting(model, path, verify=True):
    """An archive's weights under exactly the names of a model's state dict; the model may be on the meta device.

    Raises ValueError (see read_state_dict and check_keys).
    """
    return check_keys(model, read_state_dict(path, verify), path)
