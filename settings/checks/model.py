"""Checks of the model and its weights."""

import os

from settings.checks.common import looks_like_path, must_exist
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
    if model.random_config is not None and not isinstance(model.random_config.get("model_type"), str):
        raise ValueError("model.random_config needs model_type, such as model.random_config.model_type=llama")
    if not settings.prefix_sharing and model.attention not in ("auto", "plain"):
        raise ValueError(
            f"model.attention={model.attention} is for rows that share a prompt, and "
            "prefix_sharing=false makes none; leave model.attention=auto"
        )
