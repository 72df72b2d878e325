"""Trains a causal language model on preferences: python train.py model=pythia loss=dpo (python train.py --help).

This file composes the settings, checks them, makes the run's folder, and starts the trainer on every device. It imports
nothing heavy at the top, so that a mistake on the command line is reported within a second or two.
"""

import contextlib
import functools
import importlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import settings
import utils
from checkpoint import run_folder
from parallel import failures, launch
from report import streams
from settings import Settings, resume

USERS_MISTAKE = 2  # exit code
# Mappings with keys of the user's own. Hydra would want a + before a key that the files do not have.
FREE_KEYS = tuple(f"{name}{sign}" for name, key in settings.SCHEMA.items() if key.free for sign in (".", "={"))
OPTIONAL_GROUPS = ("data_mix", "experiment")  # may be null, which is the default
GROUPS = ("model", "loss", "fsdp", *OPTIONAL_GROUPS)
NO_OPTION = tuple(f"{group}=null" for group in OPTIONAL_GROUPS)

_on_command_line = False
_reported: list[Exception] = []
_sweep_dirs: list[str] = []  # the folder of this command's sweep, once it has one


class Ended(BaseException):
    """Carries an error past Hydra, which would print the command line before it. Never leaves command_line()."""


def sweep_dir(local_dirs) -> str:
    """A new folder for the record of a sweep, beside the run folders."""
    _sweep_dirs.append(utils.get_local_run_dir("sweep", local_dirs))
    return _sweep_dirs[-1]


OmegaConf.register_new_resolver("sweep_dir", sweep_dir, use_cache=True, replace=True)


@hydra.main(version_base="1.3", config_path=settings.CONFIG_DIR, config_name="config")
def main(composed: DictConfig) -> float | None:
    """One run: check the settings, train, and return the last evaluation's metric, which sweepers can optimise."""
    in_sweep = is_in_sweep()
    with reported(in_sweep):
        overrides = overrides_of_job()
        given = settings.named_keys(overrides)
        settings.check_given(composed, given)
        refuse_keys_of_evaluate(given)
        if composed.resume is not None:
            composed, notes = resume.resumed_config(composed, overrides)
            if notes and is_main_process():
                with contextlib.suppress(OSError):  # a pipe that is closed
                    print("\n".join(notes), flush=True)
        settings.validate(composed, given=given)
        config = settings.finalize(composed)
        if in_sweep and config.wandb.group is None and _sweep_dirs:
            config = settings.replace(config, {"wandb.group": os.path.basename(_sweep_dirs[-1])})
        if config.data.template_date is None:  # recorded, so that a run that is resumed keeps it
            config = settings.replace(config, {"data.template_date": time.strftime("%Y-%m-%d")})
        if config.plan:
            if is_main_process():
                from planning import command

                command.print_plan(config)
            return None
        if config.show is not None:
            if is_main_process():
                from training import inspection

                if not inspection.show(config):
                    raise SystemExit(1)
            return None
        check_devices(config, given)
        return run(config, fresh_process=in_sweep)


def is_in_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


@contextlib.contextmanager
def reported(in_sweep: bool) -> Iterator[None]:
    """Around a job: its errors are reported here, and not by Hydra, which prints the command line before them."""
    try:
        yield
    except Exception as error:
        if in_sweep:  # Hydra reports failed jobs only when all have ended
            report_error(error, f"job {HydraConfig.get().job.num}: ")
        elif _on_command_line:
            raise Ended(error) from error
        raise


def overrides_of_job() -> list[str]:
    """The arguments of this run as Hydra took them; in a sweep, those of this job. What ${...} they hold stays."""
    if not HydraConfig.initialized():
        return []
    return list(OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False))


def refuse_keys_of_evaluate(given: list[str]) -> None:
    """Training evaluates on held-out data and on the sets of evals.during_training."""
    for key in given:
        if key in ("evals.checkpoint", "evals.reference", "evals.against", "evals.split"):
            raise ValueError(f"{key} is read by evaluate.py only: leave it out, or run python evaluate.py")


def check_devices(config: Settings, given: list[str]) -> None:
    """The checks that depend on the devices of this machine, which only torch knows."""
    kind, count = launch.visible_devices(config)
    settings.check(settings.replace(config, {"device": config.device or kind}), count, given)


def run(config: Settings, work: Callable | None = None, fresh_process: bool = False) -> float | None:
    """Make the run's folder and work on every device. The folder is removed if the run ends before it starts.

    Args:
        work: what every rank calls with (config, run_dir, world); None: `train`.
    """
    work = importable(work or train)
    if utils.joined_world() is not None:
        # The ranks must agree first, and rank 0 makes the folder.
        return launch.launch(functools.partial(work_in_new_folder, work), config)
    run_dir = run_folder.make(config)
    try:
        return launch.launch(work, config, run_dir, fresh=fresh_process)
    except BaseException:
        run_folder.discard_unused(run_dir)
        raise


def importable(function):
    """A function of train.py or evaluate.py that new processes can find by its name.

    In a launcher's job (submitit) main() may have come as code, without a module to import, and `__main__` is then the
    launcher's own.
    """
    if getattr(sys.modules.get(function.__module__), function.__name__, None) is function:
        return function
    file = os.path.basename(function.__code__.co_filename)
    return getattr(importlib.import_module(file.removesuffix(".py")), function.__name__)


def train(config: Settings, run_dir: str, world: utils.World) -> float | None:
    """What every rank runs."""
    import trainers

    return trainers.run(config, run_dir, world)


def work_in_new_folder(work: Callable, config: Settings, _, world: utils.World) -> float | None:
    """What every rank of a world that others started runs."""
    made: str | ValueError | None = None
    if world.is_main:
        try:
            made = run_folder.make(config)
        except ValueError as error:
            made = error
    run_dir = utils.broadcast_object(made, world)
    if isinstance(run_dir, ValueError):
        raise ValueError(str(run_dir))
    try:
        return work(config, run_dir, world)
    except BaseException:
        if world.is_main:
            run_folder.discard_unused(run_dir)
        raise


# ---- The command line and its errors --------------------------------------------------------------------------------


def command_line(main: Callable[[], object] = main) -> int:
    """Run `main` on sys.argv. Mistakes of the user's become one message on stderr; returns the exit code."""
    global _on_command_line
    _on_command_line = True
    streams.open_standard_streams()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra hand its errors to us instead of printing them in its own way
    try:
        sys.argv[1:] = arguments_for_hydra(sys.argv[1:])
        main()
        return 0
    except KeyboardInterrupt:
        streams.write_error("stopped by Ctrl-C\n")
        return 130
    except (Exception, Ended) as error:
        error = error.args[0] if isinstance(error, Ended) else error
        discard_unused_sweep()
        return report_error(error, wants_traceback=wants_traceback)


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


def arguments_for_hydra(arguments: list[str]) -> list[str]:
    """The arguments with some of Hydra's peculiarities removed: keys of free mappings need no +, values need no quotes
    for ~, = and letters like ä, -m can stand anywhere, and experiment=null is no experiment, nor data_mix=null a mix.

    Raises:
        ValueError: an argument that is of another program, or a value that a config group cannot have.
    """
    for argument in arguments:
        _check_argument(argument)
    arguments = [settings.quoted(argument) for argument in arguments if argument not in NO_OPTION]
    arguments = [("++" + argument if argument.startswith(FREE_KEYS) else argument) for argument in arguments]
    return sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))  # the rest stays in order


def _check_argument(argument: str) -> None:
    shown = settings.show(argument)
    option = re.fullmatch(r"--([\w.-]+)(=.*)?", argument)
    if option:
        name = option[1].replace("-", "_")
        if name in settings.SCHEMA or name in GROUPS or settings.foreign_advice(name):
            raise ValueError(
                f"{shown}: settings are given as KEY=VALUE, without --{settings.foreign_advice(name) or ''}"
            )
    key, equals, value = argument.lstrip("+~").partition("=")
    if equals and not key:
        raise ValueError(f"cannot read the argument {shown}: write KEY=VALUE")
    if equals and key in GROUPS and argument not in NO_OPTION:
        if value in ("null", "true", "false", "") or re.fullmatch(r"[-+]?[\d._]+(e[-+]?\d+)?", value):
            raise ValueError(f"{shown} is not allowed; allowed: {key}={'|'.join(settings.options(key))}")


def report_error(error: Exception, where: str = "", wants_traceback: bool = False) -> int:
    """Write what went wrong to stderr, once for each error, and return the exit code."""
    message = explain(error)
    code = 1 if message is None else USERS_MISTAKE
    if message is None and failures.is_explained(error):
        message = str(error)
    if any(error is other for other in _reported):
        return code
    _reported.append(error)
    if not is_main_process() and (message is not None or failures.is_follower(error)):
        time.sleep(failures.FOLLOWER_DELAY_SECONDS)  # rank 0 most likely reports the same, and ends us meanwhile
    who = where if is_main_process() else f"{where}rank {joined_rank()}: "
    trace = getattr(error, "trace", "") or "".join(traceback.format_exception(error))
    if message is None or wants_traceback:
        streams.write_error(trace)
    streams.write_error(f"{who}error: {message}\n" if message else f"{who}{error or type(error).__name__}\n")
    return code


def joined_rank() -> int:
    """This process's rank in the world that torchrun or srun started, else 0."""
    joined = utils.joined_world()
    return joined[0] if joined else 0


def is_main_process() -> bool:
    return joined_rank() == 0


def explain(error: Exception) -> str | None:
    """The message for the user about an error, or None if it is no mistake of the user's."""
    if "Config group override must be a string" in str(error):
        groups = [argument for argument in sys.argv[1:] if re.search(r"=(null|true|false|[\d.e+-]*)$", argument)]
        return f"{' or '.join(groups)} is not allowed: a config group takes the name of one of its files"
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return explain_composition(error)
    if _raised_by_hydra(error):
        what = " ".join(str(error).split()) or "an argument has no meaning to Hydra"
        return f"the command line cannot be composed: {what}; write KEY=VALUE, or GROUP=OPTION with the name of a file"
    return str(error) if failures.is_users_mistake(error) else None


def _raised_by_hydra(error: Exception) -> bool:
    """Whether Hydra stumbled over the command line in a way that it has no error of its own for."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and os.path.dirname(hydra.__file__) in frames[-1].filename


def explain_composition(error: Exception) -> str:
    """Hydra's errors in words that name what is allowed and what was probably meant."""
    text = str(error)
    unknown_option = re.search(r"Could not find '([\w-]+)/(.*?)'", text)
    if unknown_option and unknown_option.group(1) in GROUPS:
        group, option = unknown_option.groups()
        options = settings.options(group)
        if group == "model" and ("/" in option or os.path.isdir(option)):
            return f"model={option} is no file of config/model; use model=blank_model model.name_or_path={option}"
        return f"{group}={option} does not exist; allowed: {', '.join(options)}" + settings.near_miss(option, options)
    unknown_key = re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", text)
    unknown_key = unknown_key or re.search(r"Key '([^']+)' is not in struct", text)
    if unknown_key and "is already at" not in text:
        key = unknown_key.group(1).lstrip("+~")
        if "." not in key and settings.near_miss(key, list(GROUPS)) and not settings.foreign_advice(key):
            return f"there is no key {key}{settings.near_miss(key, list(GROUPS))}"
        return settings.unknown_key(key, _composed_without(key))
    unreadable = _unreadable_argument()
    if unreadable:
        return (
            f"cannot read the argument {settings.show(unreadable)}: write KEY=VALUE, and put quotes around values with "
            "spaces or special signs: 'KEY=\"VALUE\"'"
        )
    merged = re.search(r"Error merging override '?[+~]*([\w.]+)=", text)
    inside = [key for key in settings.SCHEMA if merged and key.startswith(f"{merged[1]}.")]
    if merged and inside:
        return f"{merged[1]} holds keys of its own; set one of {', '.join(inside)}"
    if merged and merged[1] in settings.SCHEMA:
        return f"{merged[1]} takes another kind of value; allowed: {settings.SCHEMA[merged[1]].describe()}"
    cause = str(error.__cause__ or "")
    return " ".join(f"{text} {cause if cause not in text else ''}".split())


def _unreadable_argument() -> str | None:
    """The first argument of the command line that Hydra's grammar cannot read."""
    parser = OverridesParser.create()
    for argument in sys.argv[1:]:
        try:
            if not argument.startswith("-"):
                parser.parse_override(argument)
        except HydraException:
            return argument
    return None


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
    code = command_line()
    streams.flush_streams()
    sys.exit(code)
