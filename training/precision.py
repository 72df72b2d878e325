"""The precision of a run, on the device that it has."""

from __future__ import annotations

import torch

from parallel.launch import has_bfloat16
from settings import Settings, replace
from settings.precision import resolve_precision


def on_device(config: Settings, device: str) -> Settings:
    """The settings with `precision` as it is on this device, and matrix products of float32 tensors set to it."""
    kind = torch.device(device).type
    precision = resolve_precision(config, kind, has_bfloat16(kind))
    # "high" is TF32: 10 bits of mantissa in the factors, sums in float32.
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    return replace(config, {"precision": precision, "model.fsdp_policy_mp": None})
