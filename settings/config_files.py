"""The files under config/: the options of each group, and the defaults."""

import functools
import os
import re
from typing import Any

import yaml

import utils

CONFIG_DIR = os.path.join(utils.PROJECT_DIR, "config")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads 5e-7 as a number, as Hydra does; plain YAML 1.1 wants 5.0e-7."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def options(group: str) -> list[str]:
    """The options of a config group, such as model or loss."""
    return sorted(name[:-5] for name in os.listdir(os.path.join(CONFIG_DIR, group)) if name.endswith(".yaml"))


def read(name: str) -> dict[str, Any]:
    """The content of a file under config/, as it is written: without the groups that it is composed with."""
    with open(os.path.join(CONFIG_DIR, name), encoding="utf-8") as file:
        return yaml.load(file, _Loader) or {}


@functools.cache
def defaults() -> dict[str, Any]:
    """The default of every key: of config.yaml, and of the blank model, SFT and the default fsdp group."""
    own = {name: value for name, value in read("config.yaml").items() if name not in ("defaults", "hydra")}
    groups = {"model": "model/blank_model.yaml", "loss": "loss/sft.yaml", "fsdp": "fsdp/full_shard.yaml"}
    return {**{group: read(name) for group, name in groups.items()}, **own}


def default(key: str) -> Any:
    """The default of a dotted key."""
    value: Any = defaults()
    for name in key.split("."):
        value = value[name]
    return value
