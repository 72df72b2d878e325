"""Checks of the run's folders, checkpoints and resuming."""

import importlib.util
import os

from settings.checks.common import must_exist
from settings.messages import near_miss, show
from settings.schema import Settings


def check(settings: Settings) -> None:
    if settings.plan_device_memory_gb is not None and not settings.plan:
        raise ValueError(
            f"plan_device_memory_gb={show(settings.plan_device_memory_gb)} is what a plan is made for: it "
            "needs plan=true"
        )
    if settings.plan and settings.show is not None:
        raise ValueError("plan=true and show both end before a run: give one of them")
    if settings.show_files and settings.show is None:
        raise ValueError(f"show_files={show(settings.show_files)} is where show writes to: give show=5, too")
    for path in settings.show_files:
        if not path.endswith((".html", ".json")):
            raise ValueError(f"show_files: {path} is not allowed; allowed: names that end with .html or .json")
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise ValueError(f"show_files: there is no folder {os.path.dirname(path)}")
    _check_loggers(settings)
    if not settings.local_dirs:
        raise ValueError("local_dirs is empty: name at least one folder for runs, such as local_dirs=[.cache]")
    formats, known = settings.checkpoint.formats, ["state", "policy", "hf"]
    for name in formats:
        if name not in known:
            raise ValueError(
                f"checkpoint.formats={show(formats)}: {name} is not allowed; allowed: state, policy, hf"
                + near_miss(name, known)
            )
    if not formats:
        raise ValueError("checkpoint.formats=[] would save nothing; name state, policy or hf, or use debug=true")
    if settings.checkpoint.async_save and "state" not in formats:
        raise ValueError(
            "checkpoint.async_save=true writes the state in the background: add state to checkpoint.formats"
        )
    if not settings.checkpoint.keep_best and settings.checkpoint.best_metric:
        raise ValueError(f"checkpoint.best_metric={settings.checkpoint.best_metric} needs checkpoint.keep_best=true")
    if settings.resume is not None:
        if settings.resume != "auto":
            must_exist("resume", settings.resume)
        if settings.local_run_dir is not None:
            raise ValueError("resume goes on in the folder of the old run; leave local_run_dir=null")
        if settings.debug:
            raise ValueError("debug=true writes no checkpoint, so there is nothing to resume; leave resume=null")
    if settings.local_run_dir and not settings.resume:
        folder = settings.local_run_dir
        # What a run leaves that was killed in its first instant does not count.
        if os.path.exists(folder) and not (
            os.path.isdir(folder) and all(name.endswith(".tmp") for name in os.listdir(folder))
        ):
            raise ValueError(
                f"local_run_dir={folder} exists and is not an empty folder; name a new one, or use "
                f"resume={folder} to continue the run in it"
            )


LOGGERS = ("wandb", "tensorboard", "mlflow", "trackio")  # each needs the package of its name


def _check_loggers(settings: Settings) -> None:
    for name in settings.loggers:
        given = f"loggers={show(settings.loggers)}"
        if name not in LOGGERS:
            raise ValueError(
                f"{given}: {name} is not allowed; allowed: {', '.join(LOGGERS)}" + near_miss(name, LOGGERS)
            )
        if settings.loggers.count(name) > 1:
            raise ValueError(f"{given} names {name} twice")
        if name != "wandb" and not settings.debug and importlib.util.find_spec(name) is None:
            raise ValueError(f"{given}: {name} is not installed: pip install {name}, or leave it out")
