"""What a resumed run takes from the run before: its recorded settings, with the few that this command may change."""

import glob
import os
import re
from collections.abc import Mapping
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

import utils
from data.files import check_no_pipes
from settings import paths
from settings.checks.keys import check_keys
from settings.command_line import named_keys
from settings.convert import as_dict, complete, flatten, from_dict, recorded_form
from settings.messages import argument, show
from settings.schema import SCHEMA, Settings

CONFIG, LATEST = "config.yaml", "LATEST"
LENGTH = ("n_epochs", "n_examples")


def resumed_config(config: DictConfig, overrides: list[str]) -> tuple[DictConfig, list[str]]:
    """The settings of the run to resume, with those that this command gives on top, if they may change.

    `overrides` are the arguments as Hydra saw them: only what they name is compared, so that `resume=FOLDER` alone goes
    on with the recorded settings, and the whole command of the first run with resume=auto does, too.

    Returns: the config, and lines for the user: each setting that changed, each folder that resume=auto passed over.

    Raises:
        ValueError: no such run, or settings changed that make another run of it; all of them are named.
    """
    folder, notes = _folder_to_resume(config)
    if folder is None:
        fresh = config.copy()
        fresh.resume = None
        return fresh, notes
    saved = load(folder)
    changed = changed_keys(config, saved, overrides)
    if refused := not_allowed(changed, saved.schedule):
        raise ValueError(
            f"resume={folder}: these settings differ from those of the run and may not change:{refused}\n"
            f"Leave them as they were, or start a new run from its weights with {argument('model.archive', folder)}"
        )
    for key, (old, new) in changed.items():
        OmegaConf.update(saved, key, new, force_add=True)
        if key not in ("local_run_dir", "exp_name"):
            notes.append(f"note: resumed with {key}={show(new)}; it was {show(old)}")
    saved.resume = folder
    saved.local_run_dir = None
    return saved, notes


def fixed_settings(settings: Settings) -> dict[str, Any]:
    """{dotted key: value} of the settings that a resumed run must have, too."""
    length = LENGTH if settings.schedule != "constant" else ()
    return {key: value for key, value in flatten(as_dict(settings)).items() if not may_change(key) or key in length}


def not_allowed(changed: Mapping[str, tuple[Any, Any]], schedule: str) -> str:
    """The lines of a message about changes {key: (old, new)} that would make another run; "" if there are none."""
    refused = [key for key, (old, new) in changed.items() if not (may_change(key) or paths.moved(key, old, new))]
    length = [key for key in LENGTH if key in changed] if schedule != "constant" else []
    lines = [f"\n  {key}: {show(old)} -> {show(new)}" for key, (old, new) in changed.items() if key in refused + length]
    if length:  # steps already taken would have had other learning rates
        lines.append(f"\n(schedule={schedule} decays over the whole run, so its length is fixed.)")
    return "".join(lines)


def _folder_to_resume(config: DictConfig) -> tuple[str | None, list[str]]:
    """The run folder that `resume` names, None if it is auto and there is none yet; and notes for the user."""
    here = config.local_run_dir and os.path.abspath(os.path.expanduser(config.local_run_dir))
    if config.resume != "auto":
        folder = _run_folder(os.path.abspath(os.path.expanduser(config.resume)))
        if here and os.path.realpath(here) != os.path.realpath(folder):
            raise ValueError(
                f"local_run_dir={here} has no effect: a resumed run goes on in its own folder, {folder}. Leave "
                f"local_run_dir=null; or begin a new run from its weights with {argument('model.archive', folder)}"
            )
        return folder, []
    if not here:
        return newest_run(config)
    folder = here
    return (folder if os.path.isfile(os.path.join(folder, CONFIG)) else None), []


def _run_folder(path: str) -> str:
    """The run folder that is meant by its own path, or by that of its LATEST, its config.yaml or its newest step.

    Raises:
        ValueError: it is none of these, with what to give.
    """
    run, name = path, ""
    for _ in range(4):  # such as RUN/LATEST/state/trainer.pt
        if os.path.isfile(os.path.join(run, CONFIG)):
            break
        run, name = os.path.split(run)
    else:
        raise ValueError(f"resume={path}: this is not a run folder (it has no config.yaml)")
    check_no_pipes(run)
    if re.fullmatch(r"step-\d+", name) and name != (newest := latest_name(run) or name):
        raise ValueError(
            f"resume={path}: a run goes on from its newest checkpoint, which is {newest}: {argument('resume', run)}. "
            f"To begin a new run from {name}, give {argument('model.archive', os.path.join(run, name))}"
        )
    return run


def latest_name(run: str) -> str | None:
    """The name of the step that LATEST of a run folder points to, unchecked; None where there is none to read.

    LATEST is a link or, where there are none, a file with the name.
    """
    pointer = os.path.join(run, LATEST)
    try:
        if os.path.islink(pointer):
            return os.path.basename(os.readlink(pointer))
        with open(pointer, "rb") as file:
            return file.read(256).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None


def load(folder: str) -> DictConfig:
    """The config recorded in a run folder, with the default of every key that its version did not have.

    Raises:
        ValueError: it cannot be read, or is not the config of a run.
    """
    values = _read(folder)
    paths.in_full(values)
    try:
        check_keys(values)
    except ValueError as error:
        raise ValueError(f"{os.path.join(folder, CONFIG)}: {error}") from None
    return cast(DictConfig, OmegaConf.create(values))


def recorded(folder: str) -> Settings:
    """The settings recorded in a run folder, with the default of every key that its version did not have.

    Raises:
        ValueError: they cannot be read.
    """
    return from_dict(_read(folder))


def _read(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, CONFIG)
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        problem = None if isinstance(values, dict) and values else "it is empty"
    except Exception as error:  # of the file system, of yaml, of omegaconf, of the decoding of text
        problem = " ".join(str(error).split()) or type(error).__name__
    if problem is None:
        # Without a loss the defaults have one; a run always records it, a config written for an export need not.
        sections = {"loss": {}, **values}
        missing = [name for name in ("model", "loss") if not isinstance(sections.get(name), dict)]
        problem = f"it has no section {missing[0]}" if missing else None
    if problem is not None:
        raise ValueError(
            f"{path} cannot be used ({problem}), and without a run's settings it cannot be resumed. Put back a copy of "
            f"it; or begin a new run from its weights with {argument('model.archive', folder)}"
        )
    return complete(cast(dict, values))


def changed_keys(config: DictConfig, saved: DictConfig, overrides: list[str]) -> dict[str, tuple[Any, Any]]:
    """{key: (old, new)} of the settings named by `overrides` that differ from the recorded ones."""
    named = named_keys(overrides)
    if "experiment" in named:
        named = [""]
    if "data_mix" in named:
        named += ["datasets", "data.weights"]
    if "datasets" in named:
        named.append("data.paths")  # where those of the names lie that are files
    config = config.copy()
    if OmegaConf.is_missing(config.model, "name_or_path"):  # this command names no model: it means the recorded one
        config.model = saved.model
    if not {"", "datasets"} & {*named}:  # nor data sets: short names in data.* are those of the recorded ones
        config.datasets = saved.datasets
    now = flatten(recorded_form(config))
    old = flatten(cast(dict, OmegaConf.to_container(saved, resolve=True)))
    kept = {key for key, declared in SCHEMA.items() if declared.pinned and OmegaConf.select(config, key) is None}
    changed = {}
    for key in sorted({*now, *old} - {"resume", "plan", "show", "show_files"} - kept):
        if any(name in ("", key) or key.startswith(name + ".") or name.startswith(key + ".") for name in named):
            if now.get(key) != old.get(key):
                changed[key] = old.get(key), now.get(key)
    return changed


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value of this key."""
    return key in SCHEMA and SCHEMA[key].may_change


def newest_run(config: DictConfig) -> tuple[str | None, list[str]]:
    """The newest run folder under local_dirs with the name of this run, its settings and a state to resume from, else
    None; and notes about folders that were passed over."""
    if OmegaConf.is_missing(config.model, "name_or_path"):
        return None, []  # which validation reports
    values = recorded_form(config)
    name = values["exp_name"]
    base = utils.get_local_dir(values["local_dirs"])
    dated = re.compile(re.escape(name) + r"_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+")
    folders = [
        folder
        for folder in glob.glob(os.path.join(glob.escape(base), glob.escape(name) + "_*"))
        if dated.fullmatch(os.path.basename(folder)) and os.path.isfile(os.path.join(folder, CONFIG))
    ]
    notes: list[str] = []
    for folder in sorted(folders, reverse=True):
        if not os.path.lexists(os.path.join(folder, LATEST)):
            continue
        try:
            changed = changed_keys(config, load(folder), [""])
        except ValueError as error:
            notes.append(f"note: resume=auto passes over a folder: {error}")
            continue
        if not all(may_change(key) for key in changed):
            continue
        if glob.glob(os.path.join(glob.escape(folder), "step-*", "state")):
            return folder, notes
        notes.append(
            f"note: resume=auto passes over {folder}: it holds weights, but no state to resume from "
            "(checkpoint.formats had no state)"
        )
    return None, notes
