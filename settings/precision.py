"""The type that models compute in, which may be another than that of their weights.

Weights, gradients' sums, optimizer, logits and log-probs stay float32 (with model.policy_dtype=float32) whatever this
is: blocks compute on copies of their parameters that FSDP2 casts as it gathers them, on one device as on many.
"""

from __future__ import annotations

from settings.optimizers import WHOLE_TENSORS_ONLY
from settings.schema import Settings

HALF = ("bfloat16", "float16")


def asked_precision(config: Settings) -> str:
    """What the user asked for, under the key's name or its older one."""
    return config.model.fsdp_policy_mp or config.precision


def resolve_precision(config: Settings, kind: str, has_bfloat16: bool) -> str:
    """What `precision` is on a kind of device: "auto" is bfloat16 on a GPU that has it, else float32.

    Args:
        kind: "cuda", "cpu" or "mps"; has_bfloat16: whether the GPU computes in bfloat16.
    """
    asked = asked_precision(config)
    if asked != "auto":
        return asked
    if config.model.policy_dtype in HALF:
        return config.model.policy_dtype
    if config.trainer == "BasicTrainer" and config.optimizer in WHOLE_TENSORS_ONLY:
        return "float32"  # parameters that FSDP2 manages are no whole tensors, even on one device
    return "bfloat16" if kind == "cuda" and has_bfloat16 else "float32"


def compute_dtype(config: Settings) -> str:
    """Name of the dtype that models compute in, once `precision` is resolved."""
    asked = asked_precision(config)
    return {"auto": config.model.policy_dtype, "tf32": "float32"}.get(asked, asked)


def mixed_dtype(config: Settings) -> str | None:
    """The same where it is not the type of the weights: FSDP2 then casts them. None: nothing is cast."""
    found = compute_dtype(config)
    return None if found == config.model.policy_dtype else found
