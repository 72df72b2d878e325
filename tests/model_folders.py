"""Folders of tiny models, spoiled in ways that real ones are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch


def edit_config(folder: Path, **changes) -> None:
    """Change config.json; None removes a key."""
    file = folder / "config.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_weights(folder: Path, change) -> None:
    """Rewrite model.safetensors as change(state) leaves it."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


def as_bin(folder: Path) -> None:
    """Store the weights as pytorch_model.bin instead."""
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut(file: Path, part: float = 0.5) -> None:
    """Leave the first part of a file only."""
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * part)])


def pointer(file: Path) -> None:
    """What git leaves in place of a large file without its LFS extension."""
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 5347\n")


class Folders:
    """Copies of tiny models, each saved once: folders("llama") gives a fresh copy's path."""

    def __init__(self, made: Path):
        self.made, self.number = made, 0

    def __call__(self, kind: str = "llama") -> Path:
        from runs import save_model

        original = self.made / kind
        if not original.exists():
            save_model(original, kind)
        self.number += 1
        return Path(shutil.copytree(original, self.made / f"copy-{self.number}"))
