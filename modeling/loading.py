"""Where tokenizer and weights come from: a Hub name, a local folder, a GGUF file, a policy.pt, a random tiny model."""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
from contextlib import contextmanager

import torch

from checkpoint.archives import locate, read_fitting
from checkpoint.names import refuse_misfit, untied
from data.template_calls import read_chat_template
from modeling.model_files import (
    cannot_load,
    check_architecture,
    check_model_path,
    check_tokenizer_files,
    gguf_files,
    no_tokenizer,
)
from settings import Settings, near_miss

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def go_offline_if_cut_off() -> bool:
    """Where the Hub's address does not even resolve, use local copies only, instead of minutes of retries.

    Returns whether the Hub is out of reach.
    """
    import socket
    import urllib.request
    from urllib.parse import urlparse

    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not urllib.request.getproxies():
        try:
            socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
        except OSError:
            constants.HF_HUB_OFFLINE = True
    return constants.HF_HUB_OFFLINE


def source_of(config: Settings) -> str | None:
    """Hub name or folder of the model's weights; None for a random model."""
    if config.model.random_config:
        return None
    local = config.model.local_copy
    return local if local and os.path.isdir(local) else config.model.name_or_path


def origin_of(config: Settings) -> str:
    """What a model's weights are, in words."""
    return str(config.model.archive or source_of(config) or "a random model")


def archive_of(config: Settings) -> tuple[str, str] | None:
    """(kind, path) of `model.archive`, see checkpoint.archives.locate; None if the run has none."""
    if not config.model.archive:
        return None
    kind, path = locate(config.model.archive, verify=False)
    return kind, str(path)


def weights_folder(config: Settings) -> str | None:
    """Where the weights are read from by the model library: a Hub name, a folder or a .gguf file.

    None where they come from elsewhere: random ones, and archives under the names that a model has in memory.
    """
    archive = archive_of(config)
    if archive:
        return archive[1] if archive[0] == "hf" else None
    return source_of(config)


def files_of(name: str) -> tuple[str, dict]:
    """What from_pretrained takes for a Hub name, a folder or a .gguf file: (name or folder, more arguments).

    A folder that holds a .gguf file and no config.json is read as that file.
    """
    if name.endswith(".gguf"):
        return os.path.dirname(name) or ".", {"gguf_file": os.path.basename(name)}
    files = gguf_files(name)
    return name, {"gguf_file": files[0]} if files else {}


def load_tokenizer(config: Settings):
    """The run's tokenizer, with the chat template that the run gives it.

    Raises:
        ValueError: it cannot be found (with what to do), has no vocabulary, or no end-of-sequence token.
    """
    tokenizer = _load_tokenizer(config)
    template = read_chat_template(config.data.chat_template)
    if template:
        tokenizer.chat_template = template  # so that it is saved with the weights
    return tokenizer


def _load_tokenizer(config: Settings):
    name = config.model.tokenizer_name_or_path or source_of(config)
    if name is None:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    if not os.path.exists(name):
        go_offline_if_cut_off()
    elif config.model.tokenizer_name_or_path is None:
        check_model_path(name)
    folder, gguf = files_of(name)
    if not gguf:
        check_tokenizer_files(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code, **gguf)
        # transformers makes an empty tokenizer where the files of the vocabulary are missing.
        tried = tokenizer.encode(" ".join(["a 1", *list(tokenizer.get_vocab())[:100]]))
    except Exception as problem:  # of the library or the tokenizer's own code, at files of the user's
        key = "model.tokenizer_name_or_path" if config.model.tokenizer_name_or_path else "model.name_or_path"
        raise cannot_load(name, problem, key) from problem
    if set(tried) <= set(tokenizer.all_special_ids):
        raise ValueError(no_tokenizer(name))
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer of {name!r} has no end-of-sequence token; give one that has with "
            "model.tokenizer_name_or_path=..."
        )
    return tokenizer


def padding_id(tokenizer) -> int:
    """The id that plain rows are padded with, which nothing attends to. The tokenizer is saved as it came."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def byte_tokenizer():
    """A tokenizer of the 256 bytes with chat markers, for random models: it reads any text and needs no file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(specials + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def model_config(config: Settings, tokenizer):
    """The transformers configuration of the run's model, without its weights.

    Raises:
        ValueError: there is none, it cannot be read, or it is not that of a model that can be trained here.
    """
    from transformers import AutoConfig

    if config.model.random_config:
        return random_model_config(config.model.random_config, tokenizer)
    name = source_of(config)
    assert name is not None
    check_model_path(name)
    folder, gguf = files_of(name)
    try:
        settings = AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code, **gguf)
    except Exception as problem:  # the configuration's own class may raise anything at a value that it cannot take
        raise cannot_load(name, problem) from problem
    check_architecture(settings, name, is_gguf=bool(gguf))
    return settings


def random_model_config(values: dict, tokenizer):
    """The transformers configuration that `model.random_config` describes.

    Raises:
        ValueError: an unknown model type or key, or a value that the configuration refuses.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    settings = copy.deepcopy(values)
    settings.setdefault("vocab_size", len(tokenizer))
    kind = settings.pop("model_type")
    try:
        usual = AutoConfig.for_model(kind)
    except ValueError:
        near = near_miss(kind, CONFIG_MAPPING)
        raise ValueError(f"model.random_config.model_type={kind} is not known to transformers{near}") from None
    check_architecture(usual, f"model.random_config.model_type={kind}")
    known = {*vars(usual), *usual.attribute_map, *_TOKEN_IDS}
    code = _code_of(usual)
    for key in settings:
        if key not in known and not re.search(rf"\b{re.escape(str(key))}\b", code):
            raise ValueError(
                f"model.random_config.{key}: the configuration of a {kind} has no such key{near_miss(key, known)}"
            )
    token_ids = {key: getattr(tokenizer, key) for key in _TOKEN_IDS} | {"pad_token_id": padding_id(tokenizer)}
    try:
        found = AutoConfig.for_model(kind, **{**token_ids, **settings})
    except Exception as problem:
        raise refuse_random_config(problem) from problem
    check_architecture(found, "model.random_config")
    return found


def _code_of(settings) -> str:
    """The source of a configuration and its model: what they read beyond the declared keys (head_dim, say)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, modeling_rope_utils

    kinds = type(settings), MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    modules = [*(sys.modules[kind.__module__] for kind in kinds), modeling_rope_utils]
    return "\n".join(map(inspect.getsource, modules))


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def refuse_random_config(problem: Exception) -> ValueError:
    """The error for a random configuration that makes no working model."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
    return ValueError(
        f"model.random_config describes no model that works: {type(problem).__name__}: {' '.join(lines[:2])}"
    )


def build_on_meta(config: Settings, settings, dtype: torch.dtype) -> torch.nn.Module:
    """The model of a transformers configuration on the meta device: shapes, no numbers.

    Raises:
        ValueError: no model can be built from it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(settings), dtype=dtype, trust_remote_code=config.model.trust_remote_code
            )
    except Exception as problem:  # raised in the model's own code, about its configuration
        if config.model.random_config:
            raise refuse_random_config(problem) from problem
        raise cannot_load(source_of(config) or "", problem) from problem
    use_generation_config(model, config)
    return model


def use_generation_config(model, config: Settings) -> None:
    """Give a model that was built from a configuration the generation settings that come with the run's weights."""
    from transformers import GenerationConfig

    source = source_of(config)
    if source is None:
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(files_of(source)[0])
    except (OSError, ValueError):  # it has none: the configuration's own token ids stay
        pass


def load_model(config: Settings, tokenizer, dtype: torch.dtype, device: str | torch.device):
    """The whole model with its weights on one device, in evaluation mode.

    `model.left_unread` names stored tensors that have no part in it.
    Raises:
        ValueError: weights or archive cannot be found or do not fit.
    """
    settings = model_config(config, tokenizer)
    folder = weights_folder(config)
    if folder is not None:
        model = _from_folder(config, settings, dtype, folder)
    elif config.model.archive:
        model = _from_archive(config, settings, dtype)
    else:
        model = _from_random_numbers(config, settings, dtype)
    # Evaluation mode for good: dropout, also the functional kind, would make policy and reference differ at step 0.
    return model.to(device).eval()


def _from_folder(config: Settings, settings, dtype: torch.dtype, name: str):
    from transformers import AutoModelForCausalLM, GgufConfig

    folder, more = files_of(name)
    is_gguf = bool(more)
    if is_gguf:
        more["quantization_config"] = GgufConfig(dequantize=True)
    elif config.model.archive:
        more["config"] = settings  # the archive holds weights of this model, whatever config.json lies beside them
    try:
        with library_warnings_off():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=config.model.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report, and refused below
                **more,
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # torn files, and values of a configuration that the model's code stumbles over
        raise cannot_load(name, problem) from problem
    model.left_unread = refuse_misfit(model, report, name)
    if hasattr(model.config, "quantization_config"):  # of a GGUF file, whose weights are plain now
        del model.config.quantization_config
    if settings.get_text_config().tie_word_embeddings and not _is_tied(model):
        raise untied(name)
    if config.model.archive:
        use_generation_config(model, config)
    return model


@contextmanager
def library_warnings_off():
    """Within the block transformers does not print its own table of tensors that do not fit: errors name them."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _is_tied(model) -> bool:
    output = model.get_output_embeddings()
    return output is None or output.weight is model.get_input_embeddings().weight


def _from_archive(config: Settings, settings, dtype: torch.dtype):
    """The archive's weights in a model that is built around them: those that it was trained from are not read."""
    name = config.model.archive
    skeleton = build_on_meta(config, settings, dtype)
    copies: dict[int, torch.Tensor] = {}
    state = read_fitting(skeleton, name, verify=False)
    # Copied, because a mapped file may change under the model; tied ones stay one.
    state = {key: copies.setdefault(id(tensor), tensor.clone()) for key, tensor in state.items()}
    model, report = type(skeleton).from_pretrained(
        None, config=settings, state_dict=state, dtype=dtype, output_loading_info=True
    )
    model.left_unread = refuse_misfit(model, report, name)
    use_generation_config(model, config)
    return model


def _from_random_numbers(config: Settings, settings, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM

    try:
        with seeded(config.seed):
            model = AutoModelForCausalLM.from_config(settings, dtype=dtype).eval()
        with torch.no_grad():  # some configurations only fail when they compute
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except Exception as problem:
        raise refuse_random_config(problem) from problem
    model.left_unread = []
    return model


@contextmanager
def seeded(seed: int):
    """Torch's CPU generator seeded within the block and as it was after it."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)
