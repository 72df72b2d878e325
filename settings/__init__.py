"""The settings of a run: the typed schema (schema.py), the checks, and what the user reads about a mistake.

A setting that has no effect with the chosen loss, trainer or device is an error, never ignored: `validate` raises
ValueError with one message that names the key, its value, and what is allowed. Nothing here reads weights or imports
torch, so that a typing mistake costs a second. config/*.yaml hold the defaults and explain the keys.
"""

from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from settings.checks import check
from settings.checks.keys import check_keys, check_value, keys_of, unknown_key
from settings.command_line import named_keys, quoted
from settings.config_files import CONFIG_DIR, options
from settings.convert import as_dict, complete, flatten, from_dict, recorded_form, replace, resolve
from settings.foreign_keys import advice as foreign_advice
from settings.messages import near_miss, show
from settings.resume import recorded
from settings.schema import SCHEMA, ModelSettings, Settings

__all__ = [
    "CONFIG_DIR",
    "SCHEMA",
    "ModelSettings",
    "Settings",
    "as_dict",
    "check",
    "check_given",
    "finalize",
    "flatten",
    "foreign_advice",
    "keys_of",
    "complete",
    "named_keys",
    "near_miss",
    "options",
    "quoted",
    "from_dict",
    "recorded",
    "replace",
    "show",
    "unknown_key",
    "validate",
]


def check_given(config: DictConfig, given: Collection[str]) -> None:
    """Check the values of the keys that a command names, each alone, before anything is made of them.

    Raises:
        ValueError: a value that its key may not have.
    """
    for name in given:
        if name in SCHEMA:
            try:
                value = OmegaConf.select(config, name)
            except OmegaConfBaseException:
                continue  # an interpolation that leads nowhere, which `resolve` reports
            check_value(name, SCHEMA[name], OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)


def validate(config: DictConfig, device_count: int | None = None, given: Collection[str] = ()) -> None:
    """Check types, ranges and combinations of all settings, and that the files they name exist.

    config: as Hydra composes it. device_count, given: see `check`.

    Raises:
        ValueError: the first thing found wrong, with what is allowed.
    """
    values = resolve(config)
    check_keys(values)
    check(from_dict(values), device_count, given)


def finalize(config: DictConfig) -> Settings:
    """The settings as the run sees and records them: interpolations worked out, the run named, one block name.

    Raises:
        ValueError: a key or value that is not allowed.
    """
    values = recorded_form(config)
    check_keys(values)
    return from_dict(values)
