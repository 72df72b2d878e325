"""Trains a causal language model on preferences: python train.py model=pythia loss=dpo (python train.py --help).

This file composes the settings, checks them, makes the run's folder, and starts the trainer on every device. It imports
nothing heavy at the top, so that a mistake on the command line is told within a second or two.
"""

import glob
import os
import re
import shutil
import sys
import time
import traceback

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import settings
import utils
from checkpoint import step_folders
from parallel import launch

USERS_MISTAKE = 2  # exit code
# Mappings whose keys are the user's. Hydra would want a + before a key that the files do not have.
FREE_KEYS = ("optimizer_kwargs.", "data.paths.", "data.columns.", "data.weights.", "model.random_config.")
GROUPS = ("model", "loss", "fsdp", "experiment")

_on_command_line = False
_sweep_dirs = []  # the folder of this command's sweep, once it has one


class Ended(BaseException):
    """Carries an error past Hydra, which would print the command line before it. Never leaves command_line()."""


def sweep_dir(local_dirs) -> str:
    """A new folder for the record of a sweep, beside the run folders."""
    _sweep_dirs.append(utils.get_local_run_dir("sweep", local_dirs))
    return _sweep_dirs[-1]


OmegaConf.register_new_resolver("sweep_dir", sweep_dir, use_cache=True, replace=True)


@hydra.main(version_base="1.3", config_path=settings.CONFIG_DIR, config_name="config")
def main(config: DictConfig) -> float | None:
    """One run: check the settings, train, and return the last evaluation's metric, which sweepers can optimise."""
    in_sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        if config.resume is not None:
            config = resumed_config(config, list(HydraConfig.get().overrides.task))
        settings.validate(config)
        config = settings.finalize(config)
        if in_sweep and config.wandb.group is None and _sweep_dirs:
            config.wandb.group = os.path.basename(_sweep_dirs[-1])
        if config.plan:
            if is_main_process():
                from planning import memory_plan

                memory_plan.print_plan(config)
            return None
        check_devices(config)
        return run(config, fresh_process=in_sweep)
    except Exception as error:
        if in_sweep:  # Hydra tells of failed jobs only when all have ended
            tell(error, f"job {HydraConfig.get().job.num}: ")
        elif _on_command_line:
            raise Ended(error) from error
        raise


def check_devices(config: DictConfig) -> None:
    """The checks that depend on the devices of this machine, which only torch knows."""
    known = config.copy()
    kind, count = launch.visible_devices(config)
    known.device = config.device or kind
    settings.validate(known, device_count=count)


def run(config: DictConfig, fresh_process: bool = False) -> float | None:
    """Make the run's folder and train on every device. The folder is removed if the run ends before it starts."""
    if utils.joined_world() is not None:
        return launch.launch(train_in_new_folder, config)  # the ranks must agree first, and rank 0 makes the folder
    run_dir = make_run_folder(config)
    try:
        return launch.launch(train, config, run_dir, fresh=fresh_process)
    except BaseException:
        discard_unused(run_dir)
        raise


def train(config: DictConfig, run_dir: str, world: utils.World) -> float | None:
    """What every rank runs."""
    import trainers

    return trainers.run(config, run_dir, world)


def train_in_new_folder(config: DictConfig, _, world: utils.World) -> float | None:
    """What every rank of a world that others started runs."""
    run_dir = None
    if world.is_main:
        try:
            run_dir = make_run_folder(config)
        except ValueError as error:
            run_dir = error
    run_dir = utils.broadcast_object(run_dir, world)
    if isinstance(run_dir, ValueError):
        raise ValueError(str(run_dir))
    try:
        return train(config, run_dir, world)
    except BaseException:
        if world.is_main:
            discard_unused(run_dir)
        raise


# ---- The run's folder -----------------------------------------------------------------------------------------------


def make_run_folder(config: DictConfig) -> str:
    """The folder of this run with its config.yaml: a new one, or that of the run being resumed."""
    if config.resume is not None:
        run_dir = config.resume
    elif config.local_run_dir is not None:
        run_dir = config.local_run_dir
        try:
            os.makedirs(run_dir, exist_ok=True)
        except OSError as error:
            raise ValueError(f"local_run_dir={run_dir} cannot be made: {error.strerror}") from error
    else:
        run_dir = utils.make_run_dir(config.exp_name, config.local_dirs)
    run_dir = os.path.abspath(run_dir)
    recorded = config.copy()
    recorded.resume = None
    path = os.path.join(run_dir, "config.yaml")
    try:
        if config.resume is not None:
            step_folders.lock(run_dir).close()  # a live run's settings are not to be touched
            before = OmegaConf.load(path)
            recorded.local_run_dir = before.get("local_run_dir")
            if before == recorded:
                return run_dir
        # Whole or not at all, since a run is resumed by this file; of two runs that start in one folder in the same
        # instant, it gives the folder to one.
        utils.write_atomically(path, OmegaConf.to_yaml(recorded).encode(), replace=config.resume is not None)
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
    from_the_start = {
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "notices.jsonl",
        "report.html",
        ".lock",
        ".heartbeat",
    }
    if names <= from_the_start and not any(sizes):
        try:
            step_folders.lock(run_dir, patience=0).close()
        except ValueError:
            return  # another run is alive in it
        except OSError:
            pass  # no locks on this file system
        shutil.rmtree(run_dir, ignore_errors=True)


def discard_unused_sweep() -> None:
    """Remove the folder of a sweep that ended before its first run."""
    for folder in _sweep_dirs:
        record = os.path.join(folder, "multirun.yaml")
        if os.path.isdir(folder) and set(os.listdir(folder)) <= {"multirun.yaml"}:
            if os.path.exists(record):
                os.remove(record)
            _remove_empty(folder, levels=3)


def _remove_empty(folder: str, levels: int) -> None:
    for _ in range(levels):
        try:
            os.rmdir(folder)
        except OSError:  # not empty
            return
        folder = os.path.dirname(folder)


# ---- Resuming -------------------------------------------------------------------------------------------------------


def resumed_config(config: DictConfig, overrides: list[str]) -> DictConfig:
    """The settings of the run to resume, with those that this command gives on top, if they may change.

    `overrides` are the arguments as Hydra saw them: only what they name is compared, so that `resume=FOLDER` alone goes
    on with the recorded settings, and the whole command of the first run with resume=auto does, too.

    Raises:
        ValueError: no such run, or settings changed that make another run of it; all of them are named.
    """
    if config.resume == "auto":
        folder = config.local_run_dir
        if folder is None:
            folder = newest_run(config, overrides)
        elif not os.path.isfile(os.path.join(folder, "config.yaml")):
            folder = None
        if folder is None:
            fresh = config.copy()
            fresh.resume = None
            return fresh
    else:
        folder = os.path.expanduser(config.resume)
        if not os.path.isfile(os.path.join(folder, "config.yaml")):
            raise ValueError(f"resume={config.resume}: this is not a run folder (it has no config.yaml)")
    saved = OmegaConf.load(os.path.join(folder, "config.yaml"))
    changed = changed_keys(config, saved, overrides)
    refused = [key for key in changed if not may_change(key)]
    if saved.schedule != "constant":  # steps already taken would have had other learning rates
        refused += [key for key in ("n_epochs", "n_examples") if key in changed]
    if refused:
        lines = "".join(
            f"\n  {key}: {settings.show(old)} -> {settings.show(new)}"
            for key, (old, new) in changed.items()
            if key in refused
        )
        raise ValueError(
            f"resume={folder}: these settings differ from those of the run and may not change:{lines}\n"
            + (
                f"(schedule={saved.schedule} decays over the whole run, so its length is fixed.) "
                if {"n_epochs", "n_examples"} & set(refused)
                else ""
            )
            + "Leave them as they were, or start a new run from its weights with model.archive="
            + folder
        )
    for key, (old, new) in changed.items():
        OmegaConf.update(saved, key, new, force_add=True)
        if is_main_process() and key not in ("local_run_dir", "exp_name"):
            print(f"note: resumed with {key}={settings.show(new)}; it was {settings.show(old)}")
    saved.resume = os.path.abspath(folder)
    saved.local_run_dir = None
    return saved


def changed_keys(config: DictConfig, saved: DictConfig, overrides: list[str]) -> dict[str, tuple]:
    """{key: (old, new)} of the settings named by `overrides` that differ from the recorded ones."""
    named = [override.lstrip("+~").partition("=")[0].split("@")[0] for override in overrides]
    if "experiment" in named:
        named = [""]
    if OmegaConf.is_missing(config.model, "name_or_path"):  # this command names no model: it means the recorded one
        config = config.copy()
        config.model = saved.model
    now = settings.flatten(settings.as_dict(settings.finalize(config)))
    old = settings.flatten(settings.as_dict(saved))
    changed = {}
    for key in sorted({*now, *old} - {"resume", "plan"}):
        if any(name in ("", key) or key.startswith(name + ".") or name.startswith(key + ".") for name in named):
            if now.get(key) != old.get(key):
                changed[key] = old.get(key), now.get(key)
    return changed


def may_change(key: str) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in settings.MAY_CHANGE_ON_RESUME)


def newest_run(config: DictConfig, overrides: list[str]) -> str | None:
    """The newest run folder under local_dirs with the name of this run, its settings, and a checkpoint; else None."""
    if OmegaConf.is_missing(config.model, "name_or_path"):
        return None  # validation will tell
    name = settings.finalize(config).exp_name
    base = utils.get_local_dir(config.local_dirs)
    dated = re.compile(re.escape(name) + r"_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+")
    folders = [
        f
        for f in glob.glob(os.path.join(glob.escape(base), glob.escape(name) + "_*"))
        if dated.fullmatch(os.path.basename(f))
    ]
    for folder in sorted(folders, reverse=True):
        recorded = os.path.join(folder, "config.yaml")
        if os.path.lexists(os.path.join(folder, "LATEST")) and os.path.isfile(recorded):
            if all(may_change(key) for key in changed_keys(config, OmegaConf.load(recorded), [""])):
                return folder
    return None


# ---- The command line and its errors --------------------------------------------------------------------------------


def command_line() -> int:
    """Run main() on sys.argv. Mistakes of the user's become one message on stderr; returns the exit code."""
    global _on_command_line
    _on_command_line = True
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra hand its errors to us instead of printing them in its own way
    sys.argv[1:] = arguments_for_hydra(sys.argv[1:])
    try:
        main()
        return 0
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        return 130
    except (Exception, Ended) as error:
        error = error.args[0] if isinstance(error, Ended) else error
        discard_unused_sweep()
        return tell(error, wants_traceback=wants_traceback)


def arguments_for_hydra(arguments: list[str]) -> list[str]:
    """The arguments with two of Hydra's peculiarities taken away: keys of free mappings need no +, and -m can stand
    anywhere."""
    arguments = [("++" + argument if argument.startswith(FREE_KEYS) else argument) for argument in arguments]
    return sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))  # the rest stays in order


def tell(error: Exception, where: str = "", wants_traceback: bool = False) -> int:
    """Write what went wrong to stderr, once for each error, and return the exit code."""
    message = explain(error)
    code = 1 if message is None else USERS_MISTAKE
    if getattr(error, "was_told", False):
        return code
    error.was_told = True
    if not is_main_process() and (message is not None or launch.is_follower(error)):
        time.sleep(launch.FOLLOWER_DELAY_SECONDS)  # rank 0 most likely says the same, and ends us meanwhile
    who = where if is_main_process() else f"{where}rank {utils.joined_world()[0]}: "
    trace = getattr(error, "trace", "") or "".join(traceback.format_exception(error))
    if message is None or wants_traceback:
        sys.stderr.write(trace)
    sys.stderr.write(f"{who}error: {message}\n" if message else f"{who}{error or type(error).__name__}\n")
    sys.stderr.flush()
    return code


def is_main_process() -> bool:
    return (utils.joined_world() or (0,))[0] == 0


def explain(error: Exception) -> str | None:
    """What to tell the user about an error, or None if it is no mistake of the user's."""
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return explain_composition(error)
    return str(error) if launch.is_users_mistake(error) else None


def explain_composition(error: Exception) -> str:
    """Hydra's errors in words that name what is allowed and what was probably meant."""
    said = str(error)
    unknown_option = re.search(r"Could not find '([\w-]+)/(.*?)'", said)
    if unknown_option and unknown_option.group(1) in GROUPS:
        group, option = unknown_option.groups()
        options = settings.options(group)
        return f"{group}={option} does not exist; allowed: {', '.join(options)}" + settings.near_miss(option, options)
    unknown_key = re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", said)
    unknown_key = unknown_key or re.search(r"Key '([^']+)' is not in struct", said)
    if unknown_key and "is already at" not in said:
        key = unknown_key.group(1).lstrip("+~")
        if "." not in key and settings.near_miss(key, list(GROUPS)):
            return f"there is no key {key}{settings.near_miss(key, list(GROUPS))}"
        return settings.unknown_key(key, _composed_without(key))
    if "Error parsing override" in said or "mismatched input" in said or "LexerNoViableAlt" in said:
        argument = re.search(r"override '(.*)'", said)
        return (
            f"cannot read the argument {argument.group(1) if argument else ''}: write KEY=VALUE, and put quotes "
            "around values with spaces or special signs: 'KEY=\"VALUE\"'"
        )
    cause = str(error.__cause__ or "")
    return " ".join(f"{said} {cause if cause not in said else ''}".split())


def _composed_without(key: str) -> dict:
    """The settings that the rest of the command line gives, flat; {} if it cannot be composed either."""
    rest = [a for a in sys.argv[1:] if "=" in a and not a.startswith("-") and a.lstrip("+~").partition("=")[0] != key]
    try:
        with hydra.initialize_config_dir(settings.CONFIG_DIR, version_base="1.3"):
            config = hydra.compose("config", overrides=rest)
        return settings.flatten(OmegaConf.to_container(config, resolve=False))
    except (HydraException, OmegaConfBaseException):
        return {}


if __name__ == "__main__":
    sys.exit(command_line())
