"""The folder of a run and the config.yaml in it: made before training starts, removed if training never did."""

import os
import shutil
from typing import Any

from omegaconf import OmegaConf

import atomic_files
import settings
import utils
from checkpoint import step_folders
from settings.resume import CONFIG

# What lies in a run folder before the first step.
FROM_THE_START = {CONFIG, "metrics.jsonl", "samples.jsonl", "notices.jsonl", "report.html", ".lock", ".heartbeat"}


def make(config: settings.Settings) -> str:
    """The folder of this run: a new one with its config.yaml, or that of the run being resumed, as it is.

    Raises:
        ValueError: it cannot be made or written, or another run has it.
    """
    if config.resume is not None:
        try:
            step_folders.lock(config.resume).close()  # asked here, because it is soon answered
        except OSError:
            pass  # no locks on this file system, which the checkpointer reports
        return config.resume
    if config.local_run_dir is not None:
        run_dir = config.local_run_dir
        try:
            os.makedirs(run_dir, exist_ok=True)
        except OSError as error:
            raise ValueError(f"local_run_dir={run_dir} cannot be made: {error.strerror}") from error
    else:
        assert config.exp_name is not None  # finalized settings have one
        run_dir = utils.make_run_dir(config.exp_name, config.local_dirs)
    try:
        # Of two runs that start in one folder in the same instant, it gives the folder to one.
        _write(run_dir, _recorded(config), replace=False)
    except FileExistsError:
        raise ValueError(
            f"{run_dir}: another run has just begun in this folder; name another one with local_run_dir=..."
        ) from None
    return run_dir


def record_changes(config: settings.Settings, run_dir: str) -> None:
    """Record the settings of a resumed run. Only once it is accepted: one that is refused changes nothing.

    Raises:
        ValueError: they cannot be written.
    """
    before = settings.as_dict(settings.recorded(run_dir))
    now = _recorded(config) | {"local_run_dir": before["local_run_dir"]}
    if now != before:
        _write(run_dir, now, replace=True)


def _recorded(config: settings.Settings) -> dict[str, Any]:
    return settings.as_dict(config) | {"resume": None}


def _write(run_dir: str, values: dict[str, Any], replace: bool) -> None:
    """Write config.yaml: whole or not at all, since a run is resumed by it. FileExistsError unless `replace`."""
    content = OmegaConf.to_yaml(OmegaConf.create(values)).encode()
    try:
        atomic_files.write_atomically(os.path.join(run_dir, CONFIG), content, replace=replace)
    except FileExistsError:
        raise
    except OSError as error:
        raise ValueError(f"the run folder {run_dir} cannot be written: {error.strerror}") from error


def discard_unused(run_dir: str) -> None:
    """Remove a run folder in which nothing was measured or saved yet: a mistake leaves no folder behind."""
    try:
        names = set(os.listdir(run_dir))
        sizes = [os.path.getsize(os.path.join(run_dir, name)) for name in names & {"metrics.jsonl", "samples.jsonl"}]
    except OSError:
        return
    if names <= FROM_THE_START and not any(sizes):
        try:
            step_folders.lock(run_dir, patience=0).close()
        except ValueError:
            return  # another run is alive in it
        except OSError:
            pass  # no locks on this file system
        shutil.rmtree(run_dir, ignore_errors=True)
