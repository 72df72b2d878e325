"""Checks of the model and its weights."""

import os

from settings.checks.common import looks_like_path, must_exist
from settings.config_files import options, read
from settings.schema import Settings


def check(settings: Settings) -> None:
    model = settings.model
    replaced = model.random_config or (model.local_copy and os.path.isdir(model.local_copy))
    if looks_like_path(model.name_or_path) and not replaced:
        must_exist("model.name_or_path", model.name_or_path)
    if model.tokenizer_name_or_path and looks_like_path(model.tokenizer_name_or_path):
        must_exist("model.tokenizer_name_or_path", model.tokenizer_name_or_path)
    if model.archive:
        must_exist("model.archive", model.archive)
    block, name = model.block, model.block_name
    if block and name and block != name:
        raise ValueError(
            f"model.block={block} and model.block_name={name} are one key under two names and differ; "
            "set only model.block_name"
        )
    _check_local_copy(settings)
    if model.random_config is not None and not isinstance(model.random_config.get("model_type"), str):
        raise ValueError("model.random_config needs model_type, such as model.random_config.model_type=llama")
    if not settings.prefix_sharing and model.attention not in ("auto", "plain"):
        raise ValueError(
            f"model.attention={model.attention} is for rows that share a prompt, and "
            "prefix_sharing=false makes none; leave model.attention=auto"
        )


def _check_local_copy(settings: Settings) -> None:
    """A local copy may be missing only where a model's own file names it, for machines with and without a network."""
    model = settings.model
    if model.local_copy is None:
        return
    copied = {}
    for option in options("model"):
        written = read(f"model/{option}.yaml")
        if written.get("local_copy"):
            copied[os.path.abspath(written["local_copy"])] = written.get("name_or_path")
    place = os.path.abspath(model.local_copy)
    if place not in copied:
        if model.random_config:
            raise ValueError(
                f"model.local_copy={model.local_copy} has no effect: model.random_config makes random weights. "
                "Leave model.local_copy=null"
            )
        must_exist("model.local_copy", model.local_copy)
        if not os.path.isdir(model.local_copy):
            raise ValueError(f"model.local_copy={model.local_copy} is no folder")
    elif model.name_or_path != copied[place] and os.path.isdir(model.local_copy) and not model.random_config:
        raise ValueError(
            f"model.name_or_path={model.name_or_path} would not be read: model.local_copy={model.local_copy} "
            f"holds {copied[place]} and comes first. Set model.local_copy=null, or choose model=blank_model"
        )
