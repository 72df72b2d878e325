"""What reference log-probs are kept under: all that changes them, so that a cache is either right or not found.

The key describes the computation: weights, precision, the model's configuration and buffers, the libraries, our own
scoring code. What no description covers (hardware, threads, kernels, tensor parallelism, code that comes with a model)
shows in the result: the file of a data set also carries a digest of the bits of its probe, a prompt with two responses
scored alone. A computation that differs at all thus reads no other's values, in low precision as in float32.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import torch

from atomic_files import checksum
from data.batching import PromptUnit
from utils import digest

SCORING_CODE = ("attention", "attention_kernels", "block_masks", "head", "packed_layout", "rotary", "scoring")
PROBE_GROUPS = 64  # the probe is the longest of so many first prompts of a data set

# How far two right values of a token's log-prob may lie apart (nats): the most by which two attention kernels differed
# on random Llama models of up to 24 layers and 512 channels, rounded up. Other micro-batches differ by less.
TOKEN_ROUNDING = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


def computation_digest(model, dtype: str, compute_dtype: str) -> str:
    """Fingerprint of how a model's log-probs are computed, its weights left out."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    code = [checksum((Path(__file__).parent / f"{name}.py").read_bytes()) for name in SCORING_CODE]
    buffers = {name: _bits(buffer) for name, buffer in model.named_buffers()}
    config = without_places(model.config.to_dict())
    precision = [dtype, compute_dtype, torch.get_float32_matmul_precision()]
    return digest([config, buffers, precision, versions, code])


def without_places(config):
    """A model's configuration without the folder or name that it was read from."""
    if isinstance(config, dict):
        return {str(key): without_places(value) for key, value in config.items() if key != "_name_or_path"}
    return [without_places(value) for value in config] if isinstance(config, (list, tuple)) else config


def _bits(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if hasattr(tensor, "placements") else tensor
    return checksum(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def probe_unit(dataset) -> PromptUnit | None:
    """The longest of a data set's first prompts, with up to two of its responses; None without any."""
    units = []
    for group in range(min(dataset.n_groups, PROBE_GROUPS)):
        numbers = range(min(2, dataset.n_group_responses(group)))
        responses = [dataset.response(group, number) for number in numbers]
        ids = [dataset.response_id(group, number) for number in numbers]
        units.append(PromptUnit(0, group, dataset.prompt(group), responses, ids, [(0, len(responses) - 1)]))
    return max(units, key=PromptUnit.cost, default=None)


def allowed_rounding(lengths: torch.Tensor, compute_dtype: str) -> torch.Tensor:
    """How far two right values of a response's log-prob may lie apart (nats), for lengths [K] in tokens.

    Errors of tokens are taken as independent, so that they add up like the root of their number.
    """
    exact = compute_dtype == "float32" and torch.get_float32_matmul_precision() == "highest"
    # TensorFloat-32 has float16's mantissa.
    return TOKEN_ROUNDING[compute_dtype if exact or compute_dtype != "float32" else "float16"] * lengths.sqrt()
