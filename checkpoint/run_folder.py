"""The folder of a run and the config.yaml in it: made before training starts, removed if training never did."""

import os
import shutil
from typing import Any

from omegaconf import OmegaConf

import settings
import utils
from checkpoint import step_folders

# What lies in a run folder before the first step.
FROM_THE_START = {
    "config.yaml",
    "metrics.jsonl",
    "samples.jsonl",
    "notices.jsonl",
    "report.html",
    ".lock",
    ".heartbeat",
}


def make(config: settings.Settings) -> str:
    """The folder of this run with its config.yaml: a new one, or that of the run being resumed.

    Raises:
        ValueError: it cannot be made or written, or another run has it.
    """
    if config.resume is not None:
        run_dir = config.resume
    elif config.local_run_dir is not None:
        run_dir = config.local_run_dir
        try:
            os.makedirs(run_dir, exist_ok=True)
        except OSError as error:
            raise ValueError(f"local_run_dir={run_dir} cannot be made: {error.strerror}") from error
    else:
        assert config.exp_name is not None  # finalized settings have one
        run_dir = utils.make_run_dir(config.exp_name, config.local_dirs)
    run_dir = os.path.abspath(run_dir)
    recorded: dict[str, Any] = settings.as_dict(config) | {"resume": None}
    path = os.path.join(run_dir, "config.yaml")
    try:
        if config.resume is not None:
            step_folders.lock(run_dir).close()  # the settings of a run that is alive must not change
            before = OmegaConf.load(path)
            recorded["local_run_dir"] = before.get("local_run_dir")
            if before == recorded:
                return run_dir
        # Whole or not at all, since a run is resumed by this file; of two runs that start in one folder in the same
        # instant, it gives the folder to one.
        content = OmegaConf.to_yaml(OmegaConf.create(recorded)).encode()
        utils.write_atomically(path, content, replace=config.resume is not None)
    except FileExistsError:
        raise ValueError(
            f"{run_dir}: another run has just begun in this folder; name another one with local_run_dir=..."
        ) from None
    except OSError as error:
        raise ValueError(f"the run folder {run_dir} cannot be written: {error.strerror}") from error
    return run_dir


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
