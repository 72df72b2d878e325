"""The settings that the reference model is built with: the policy's, but for weights of its own."""

from __future__ import annotations

from typing import Any

from settings.convert import replace
from settings.schema import Settings


def has_own_weights(config: Settings) -> bool:
    """Whether the reference is another model than the policy before its first update."""
    return bool(config.reference.name_or_path or config.reference.archive)


def reference_settings(config: Settings) -> Settings:
    """The settings of a run whose policy would be this run's reference."""
    if not has_own_weights(config):
        return config
    changes: dict[str, Any] = {"model.archive": config.reference.archive}
    if config.reference.name_or_path:
        # What belongs to the policy's own files or classes does not hold for another model.
        changes |= {"model.name_or_path": config.reference.name_or_path, "model.tokenizer_name_or_path": None}
        changes |= dict.fromkeys(("model.local_copy", "model.random_config", "model.block_name"))
    return replace(config, changes)
