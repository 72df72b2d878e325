"""A run folder, a step folder or a bare policy.pt becomes a Hugging Face folder (scripts/export)."""

import os
import shutil
from pathlib import Path

import torch

from atomic_files import remove_leftovers, temporary_beside
from checkpoint import step_folders
from checkpoint.archives import locate, read_state_dict
from checkpoint.hf_folder import write_hf_folder
from checkpoint.names import check_keys, refuse_misfit
from modeling.loading import library_warnings_off, load_tokenizer, model_config, source_of
from settings import Settings, complete, from_dict, recorded, replace


def _run_config(source, base, trust_remote_code) -> Settings:
    """The settings of the run that bare weights come from, or one that names `base` or the hf/ folder beside them."""
    source = Path(source).expanduser().absolute()
    places = [source, *source.parents[:2]]
    places += [place / step_folders.LATEST for place in places]
    run = next((str(place) for place in places if (place / "config.yaml").exists()), None)
    # A folder with a tokenizer of the run's own has its chat template; a base that is named may have another.
    template = recorded(run).data.chat_template if run and base is not None else None
    for place in (place / name for place in places for name in ("", "hf")):
        if base is None and (place / "config.json").exists():
            base = str(place)
    if base is not None:
        model = {"name_or_path": base, "trust_remote_code": trust_remote_code}
        return from_dict(complete({"model": model, "data": {"chat_template": template}}))
    if run:
        return replace(recorded(run), {"model.trust_remote_code": trust_remote_code})
    raise ValueError(
        f"{source} holds weights only, and no hf/ or config.yaml lies beside it: name the model that it "
        "was trained from with --base"
    )


def _open_base(source, base, trust_remote_code):
    """Returns (config, generation config or None, tokenizer) for the weights at `source`. Raises ValueError."""
    from transformers import GenerationConfig

    run = _run_config(source, base, trust_remote_code)
    tokenizer = load_tokenizer(run)
    try:
        generation = GenerationConfig.from_pretrained(source_of(run)) if source_of(run) else None
    except (OSError, ValueError):
        generation = None
    return model_config(run, tokenizer), generation, tokenizer


def export(source, folder, dtype=None, base=None, trust_remote_code=False):
    """Turns a run folder, a step folder or a policy.pt into a Hugging Face folder.

    `dtype` is a torch dtype's name (null: as stored). `base` names the model whose config and tokenizer belong to the
    weights; without it they come from an hf/ or from the run's config.yaml beside them.
    Raises ValueError for a source that cannot be read or an output folder that is not empty.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty: give a new folder")
    wanted = getattr(torch, dtype, None) if dtype else None
    if dtype and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise ValueError(f"dtype {dtype} is not known: float32, bfloat16 or float16")
    kind, found = locate(source)
    if kind == "hf":
        with library_warnings_off():
            model, report = AutoModelForCausalLM.from_pretrained(
                found,
                dtype=wanted or "auto",
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        refuse_misfit(model, report, found)
        tokenizer = AutoTokenizer.from_pretrained(base or found, trust_remote_code=trust_remote_code)
        template = Path(found) / "chat_template.jinja"
        if template.exists():
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        state = model.state_dict()
    else:
        config, generation, tokenizer = _open_base(source, base, trust_remote_code)
        state = read_state_dict(found, verify=False)
        stored = next((t.dtype for t in state.values() if t.is_floating_point()), torch.float32)
        for key in ("quantization_config", "distributed_config"):
            if hasattr(config, key):
                delattr(config, key)
        with torch.device("meta"):  # names and shapes only: the weights exist once
            model = AutoModelForCausalLM.from_config(
                config, dtype=wanted or stored, trust_remote_code=trust_remote_code
            )
        if generation is not None:
            model.generation_config = generation
        state = check_keys(model, state, source)
        if wanted is not None:
            cast = {id(t): t.to(wanted) if t.is_floating_point() else t for t in state.values()}
            state = {name: cast[id(tensor)] for name, tensor in state.items()}  # tied ones stay one
    temporary = Path(temporary_beside(folder))  # exports to one folder at once do not share it
    temporary.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(temporary.parent)
    try:
        write_hf_folder(model, state, tokenizer, temporary)
        if folder.exists():
            folder.rmdir()
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
