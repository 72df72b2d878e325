"""What is wrong with a run's model, found before its data is tokenised and its weights are read."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch

from checkpoint.archives import locate, read_fitting
from checkpoint.names import listing, refuse_misfit, untied
from modeling import loading, stored_weights
from modeling.blocks import choose_trainable, find_blocks
from modeling.model_files import cannot_load, check_gguf_tensors, check_weight_files
from settings import Settings


@dataclass(frozen=True)
class ModelLimits:
    """embeddings: token ids are below it; positions: tokens a row can have, None where there is no limit."""

    embeddings: int
    positions: int | None


def check_model(config: Settings, tokenizer, weights: bool = True) -> ModelLimits:
    """Check that the model can be built, takes rows as long as the run's, and that its weights are there and fit.

    Args:
        weights: False leaves the weights out, which a plan does not need.
    Raises:
        ValueError: with what to change.
    """
    settings = loading.model_config(config, tokenizer)
    skeleton = loading.build_on_meta(config, settings, torch.float32)
    find_blocks(skeleton, config.model.block_name)
    choose_trainable(skeleton, False, config.model.frozen)
    limits = ModelLimits(skeleton.get_input_embeddings().weight.shape[0], learned_positions(skeleton))
    _check_token(tokenizer.eos_token_id, limits, tokenizer)
    if limits.positions is not None and config.max_length > limits.positions:
        raise ValueError(
            f"max_length={config.max_length} is more than the {limits.positions} positions that {_name(config)} has: "
            f"set max_length={limits.positions} or less, and max_prompt_length below it"
        )
    if weights:
        check_weights(config, skeleton)
    return limits


def _name(config: Settings) -> str:
    return loading.source_of(config) or "this random model"


def learned_positions(model) -> int | None:
    """Tokens a row can have in a model that looks positions up in a table of its own; None if it computes them.

    GPT-2's wpe, OPT's embed_positions with two rows more, GPT-J's table of sines.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not limit:
        return None
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_table = tensor.ndim == 2 and limit <= tensor.shape[0] <= limit + 8
        if is_table and any(word in name for word in ("wpe", "position", "pos_emb")):
            return limit
    return None


def check_same_tokenizer(tokenizer, reference: Settings, key: str = "reference.name_or_path") -> None:
    """Refuse a reference model whose tokens are others than the policy's.

    Args:
        reference: the settings that it is built with; key: the setting that names it.
    Raises:
        ValueError: it has no tokenizer, or one with other tokens.
    """
    name = loading.source_of(reference)
    ours, theirs = tokenizer.get_vocab(), loading.load_tokenizer(reference).get_vocab()
    other = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if other:
        raise ValueError(
            f"{key}={name}: its tokenizer has other tokens than the policy's ({len(other):,} of "
            f"{len(ours):,} differ, such as {sorted(other)[0]!r}), so that its log-probs would be of other texts. "
            "Choose a model with the same tokenizer"
        )


# ---- Token ids ------------------------------------------------------------------------------------------------------


def check_token_ids(datasets, limits: ModelLimits, tokenizer) -> None:
    """Refuse tokenised data with ids that the model has no embedding for.

    Args:
        datasets: TokenizedDatasets.
    Raises:
        ValueError: naming the data set and the tokens.
    """
    for dataset in datasets:
        for start in range(0, len(dataset.tokens), 1 << 24):
            part = np.asarray(dataset.tokens[start : start + (1 << 24)])
            if len(part) and part.max() >= limits.embeddings:
                ids = np.unique(part[part >= limits.embeddings])
                raise ValueError(f"data set {dataset.name}: {_too_large(ids, limits, tokenizer)}")


def _check_token(token: int, limits: ModelLimits, tokenizer) -> None:
    if token >= limits.embeddings:
        raise ValueError(f"The end-of-sequence token does not fit: {_too_large([token], limits, tokenizer)}")


def _too_large(ids, limits: ModelLimits, tokenizer) -> str:
    shown = [f"{token} ({tokenizer.convert_ids_to_tokens(int(token))!r})" for token in ids]
    return (
        f"the tokenizer makes token ids that the model has no embedding for: {listing(shown, 5)}; it has "
        f"{limits.embeddings}. Take the model's own tokenizer (model.tokenizer_name_or_path=null), or resize the "
        "model's embeddings to the tokenizer first (resize_token_embeddings, save_pretrained)"
    )


# ---- Weights --------------------------------------------------------------------------------------------------------


def check_weights(config: Settings, skeleton) -> None:
    """Check that the weights are there, whole, and those of the model, reading names and shapes only.

    Raises:
        ValueError: naming the file, or the tensors.
    """
    if config.model.archive:
        kind, path = locate(config.model.archive)
        if kind != "hf":
            read_fitting(skeleton, config.model.archive, verify=False)
            return
    name = loading.weights_folder(config)
    if name is None:
        return
    folder, gguf = loading.files_of(name)
    if gguf:
        check_gguf_tensors(os.path.join(folder, gguf["gguf_file"]))
        return
    if os.path.isdir(folder):
        check_weight_files(folder)
    _try_loading(config, skeleton, name)
    found = stored_weights.safetensors_of(name)
    if found and stored_weights.tied_but_different(skeleton, found):
        raise untied(name)


def _try_loading(config: Settings, skeleton, name: str) -> None:
    """Have the model library find a place for every stored tensor, without reading one."""
    try:
        with loading.library_warnings_off():
            _, report = type(skeleton).from_pretrained(
                name,
                config=skeleton.config,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=config.model.trust_remote_code,
            )
    except Exception as problem:  # of the library or the model's own code, at files of the user's
        raise cannot_load(name, problem) from problem
    refuse_misfit(skeleton, report, name)
