"""What runs left in their folders, compared to the last bit: metrics, samples, states, files that should be gone."""

from __future__ import annotations

import json
import os
from pathlib import Path

CLOCKED = ("time", "examples_per_second", "tokens_per_second", "memory/peak_gb")


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """A run's lines without what the clock has a part in."""
    rows = [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in CLOCKED} for row in rows]


def tensors(step: Path) -> dict:
    """Everything that a step folder's state/ holds: weights, optimizer, generators, the trainer's numbers."""
    import torch
    import torch.distributed.checkpoint as dcp

    from checkpoint.archives import InertReader

    stored = InertReader(step / "state").read_metadata().state_dict_metadata
    found = {key: torch.empty(meta.size, dtype=meta.properties.dtype) for key, meta in stored.items()}
    dcp.load(found, storage_reader=InertReader(step / "state"), no_dist=True)
    saved = torch.load(step / "state" / "trainer.pt", weights_only=True)
    saved["trainer"].pop("reporter")  # sizes of files in which there are times
    found |= {f"rng {path.name}": torch.load(path, weights_only=True) for path in (step / "state").glob("rng-*.pt")}
    return found | {"trainer": saved}


def equal(one, other) -> bool:
    """Whether nested containers hold the same, tensors to the last bit."""
    import torch

    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def differences(one: Path, other: Path) -> list[str]:
    """In what two finished runs differ, in words: empty for the same run twice."""
    wrong = []
    for name in ("metrics.jsonl", "samples.jsonl"):
        if lines(one, name) != lines(other, name):
            wrong.append(f"{name} has other lines ({len(lines(one, name))} and {len(lines(other, name))})")
    last = [os.readlink(Path(folder) / "LATEST") for folder in (one, other)]
    if last[0] != last[1]:
        return [*wrong, f"LATEST is {last[0]} and {last[1]}"]
    first, second = (tensors(Path(folder) / last[0]) for folder in (one, other))
    wrong += [f"state of {key}" for key in sorted({*first, *second}) if not equal(first.get(key), second.get(key))]
    return wrong


def leftovers(folder: Path) -> list[str]:
    """Temporary files and folders below a folder."""
    return [
        str(path.relative_to(folder))
        for path in Path(folder).rglob("*")
        if ".tmp" in path.name or path.name.endswith(".replaced") or path.name == ".heartbeat"
    ]
