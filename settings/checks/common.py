"""What several checks use."""

import functools
import os

from settings.config_files import default
from settings.messages import near_miss, show
from settings.schema import Settings


def refuse_change(settings: Settings, key: str, why: str) -> None:
    """Raise ValueError if the value of `key` (dotted) is not its default, because it has no effect: `why`."""
    value = functools.reduce(getattr, key.split("."), settings)
    if value != default(key):
        raise ValueError(f"{key}={show(value)} has no effect: {why}. Leave {key}={show(default(key))}.")


def must_exist(key: str, path: str, given: str = "", advice: str = "") -> None:
    """Raise ValueError if the file or folder that the setting `key` names is not there; `given`: as one writes it."""
    if not os.path.exists(os.path.expanduser(path)):
        folder = os.path.dirname(os.path.abspath(path))
        near = near_miss(os.path.basename(path), os.listdir(folder), cut=0.8) if os.path.isdir(folder) else ""
        raise ValueError(f"{given or f'{key}={path}'}: there is no such file or folder{near}{advice}")


def looks_like_path(name: str) -> bool:
    """Whether a model is given by its path: Hub names are NAME or OWNER/NAME, all else that can be a path is one."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((".gguf", ".jinja", ".pt", "/"))
