"""What a resumed run takes from the run before: its recorded settings, with the few that this command may change."""

import glob
import os
import re
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

import utils
from settings.command_line import named_keys
from settings.convert import complete, flatten, from_dict, recorded_form
from settings.messages import show
from settings.schema import SCHEMA, Settings


def resumed_config(config: DictConfig, overrides: list[str]) -> tuple[DictConfig, list[str]]:
    """The settings of the run to resume, with those that this command gives on top, if they may change.

    `overrides` are the arguments as Hydra saw them: only what they name is compared, so that `resume=FOLDER` alone goes
    on with the recorded settings, and the whole command of the first run with resume=auto does, too.

    Returns: the config, and a line for the user about each setting that changed.

    Raises:
        ValueError: no such run, or settings changed that make another run of it; all of them are named.
    """
    folder = _folder_to_resume(config)
    if folder is None:
        fresh = config.copy()
        fresh.resume = None
        return fresh, []
    saved = load(folder)
    changed = changed_keys(config, saved, overrides)
    refused = [key for key in changed if not may_change(key)]
    if saved.schedule != "constant":  # steps already taken would have had other learning rates
        refused += [key for key in ("n_epochs", "n_examples") if key in changed]
    if refused:
        lines = "".join(
            f"\n  {key}: {show(old)} -> {show(new)}" for key, (old, new) in changed.items() if key in refused
        )
        fixed_length = f"(schedule={saved.schedule} decays over the whole run, so its length is fixed.) "
        raise ValueError(
            f"resume={folder}: these settings differ from those of the run and may not change:{lines}\n"
            + (fixed_length if {"n_epochs", "n_examples"} & set(refused) else "")
            + f"Leave them as they were, or start a new run from its weights with model.archive={folder}"
        )
    notes = []
    for key, (old, new) in changed.items():
        OmegaConf.update(saved, key, new, force_add=True)
        if key not in ("local_run_dir", "exp_name"):
            notes.append(f"note: resumed with {key}={show(new)}; it was {show(old)}")
    saved.resume = os.path.abspath(folder)
    saved.local_run_dir = None
    return saved, notes


def _folder_to_resume(config: DictConfig) -> str | None:
    """The run folder that `resume` names; None if it is auto and there is none yet."""
    if config.resume != "auto":
        folder = os.path.expanduser(config.resume)
        if not os.path.isfile(os.path.join(folder, "config.yaml")):
            raise ValueError(f"resume={config.resume}: this is not a run folder (it has no config.yaml)")
        return folder
    if config.local_run_dir is None:
        return newest_run(config)
    return config.local_run_dir if os.path.isfile(os.path.join(config.local_run_dir, "config.yaml")) else None


def load(folder: str) -> DictConfig:
    """The config recorded in a run folder."""
    return cast(DictConfig, OmegaConf.load(os.path.join(folder, "config.yaml")))


def recorded(folder: str) -> Settings:
    """The settings recorded in a run folder, with the default of every key that its version did not have."""
    return from_dict(complete(cast(dict, OmegaConf.to_container(load(folder), resolve=True))))


def changed_keys(config: DictConfig, saved: DictConfig, overrides: list[str]) -> dict[str, tuple[Any, Any]]:
    """{key: (old, new)} of the settings named by `overrides` that differ from the recorded ones."""
    named = named_keys(overrides)
    if "experiment" in named:
        named = [""]
    if OmegaConf.is_missing(config.model, "name_or_path"):  # this command names no model: it means the recorded one
        config = config.copy()
        config.model = saved.model
    now = flatten(recorded_form(config))
    old = flatten(cast(dict, OmegaConf.to_container(saved, resolve=True)))
    changed = {}
    for key in sorted({*now, *old} - {"resume", "plan"}):
        if any(name in ("", key) or key.startswith(name + ".") or name.startswith(key + ".") for name in named):
            if now.get(key) != old.get(key):
                changed[key] = old.get(key), now.get(key)
    return changed


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value of this key."""
    return key in SCHEMA and SCHEMA[key].may_change


def newest_run(config: DictConfig) -> str | None:
    """The newest run folder under local_dirs with the name of this run, its settings, and a checkpoint; else None."""
    if OmegaConf.is_missing(config.model, "name_or_path"):
        return None  # which validation reports
    name = recorded_form(config)["exp_name"]
    base = utils.get_local_dir(config.local_dirs)
    dated = re.compile(re.escape(name) + r"_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+")
    folders = [
        folder
        for folder in glob.glob(os.path.join(glob.escape(base), glob.escape(name) + "_*"))
        if dated.fullmatch(os.path.basename(folder))
    ]
    for folder in sorted(folders, reverse=True):
        recorded = os.path.join(folder, "config.yaml")
        if os.path.lexists(os.path.join(folder, "LATEST")) and os.path.isfile(recorded):
            if all(may_change(key) for key in changed_keys(config, load(folder), [""])):
                return folder
    return None
