"""Tokens of a micro-batch where tokens_per_microbatch=auto: one rule for the trainers and for the memory plan."""

from __future__ import annotations

import torch

from settings import Settings
from settings.precision import compute_dtype

# Bytes taken to be free on an accelerator that does not report them (MPS).
ASSUMED_FREE = 8 << 30


def activation_bytes(model_config, every: int, size: int) -> float:
    """Bytes that a token of a pass takes, by a rule of thumb.

    A layer keeps some 18 hidden-sized and 3 MLP-sized activations for its backward pass. Where every n-th block is
    recomputed, the other layers keep theirs, one is being recomputed, and of each recomputed block its input stays.

    Args:
        model_config: the transformers configuration.
        every: each n-th block is recomputed, 0 none.
        size: bytes of a number.
    """
    text = model_config.get_text_config()
    n, hidden = text.num_hidden_layers, text.hidden_size
    wide = getattr(text, "intermediate_size", None) or 4 * hidden
    layers, inputs = (n * (1 - 1 / every) + 1, n / every) if every else (n, 0)
    return (layers * (18 * hidden + 3 * wide) + inputs * hidden) * size


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device now, on a CPU for all processes together; None where that is not reported."""
    if device.type == "cpu":
        return _free_host_memory()
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _free_host_memory() -> int | None:
    """By the kernel, and within the limit of a container; None where it is not Linux."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            free = 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            return min(free, int(limit.read()) - int(used.read()))
    except (OSError, ValueError):  # there is none
        return free


def cpu_token_budget(threads: int) -> int:
    """Tokens a micro-batch on a CPU: enough that summing up its gradients is a small part of it; more costs memory."""
    return min(4096, max(512, 384 * threads))


def token_budget(config: Settings, model_config, kind: str, free: int | None, threads: int) -> int:
    """Most tokens of a micro-batch on one device.

    On an accelerator: what fits, by `activation_bytes`, into half of the memory that is free once the weights are
    there. Gradients and the optimizer's state take theirs from the other half.

    Args:
        config: the run's settings; model_config: the transformers configuration.
        kind: type of the device; free: its free bytes, None if not known; threads: of this process, for a CPU.
    """
    wanted = config.tokens_per_microbatch
    if wanted != "auto":
        return int(wanted)
    if kind == "cpu":
        return cpu_token_budget(threads)
    size = 2 if compute_dtype(config) != "float32" else 4
    a_token = activation_bytes(model_config, int(config.activation_checkpointing), size)
    budget = int(0.5 * (ASSUMED_FREE if free is None else free) / a_token)
    return max(1024, min(budget, 65536) // 256 * 256)
