"""The settings that a checkpoint was made with, for building its model beside those of a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from typing import Any

from omegaconf import DictConfig, OmegaConf

from settings import resume
from settings.checks.common import looks_like_path
from settings.convert import replace
from settings.reference import has_own_weights, reference_settings
from settings.schema import Settings

# What belongs to the files or classes of one model and does not hold for another.
OF_ONE_MODEL = ("model.local_copy", "model.random_config", "model.block_name", "model.archive")


# Of a recorded run, what an evaluation of it goes by.
RECORDED = (
    *("model", "loss", "datasets", "data", "max_length", "max_prompt_length", "prefix_sharing", "precision"),
    *("trainer", "tp_size", "fsdp", "eval_batch_size", "seed"),
    *("sample_during_eval", "n_eval_model_samples", "sampling", "local_dirs"),
)
OF_DATASETS = ("data.paths", "data.weights", "data.columns", "data.score")


def run_folder_of(path: str) -> str | None:
    """The run folder that a checkpoint lies in: itself, or up to four folders above it; None if it lies in none."""
    place = os.path.abspath(os.path.expanduser(path))
    for _ in range(5):
        if os.path.isfile(os.path.join(place, resume.CONFIG)):
            return place
        place = os.path.dirname(place)
    return None


def model_of(path: str, like: Settings) -> Settings:
    """`like`, with the model of a checkpoint.

    Args:
        path: a run folder, one of its step folders or a policy.pt; a Hugging Face folder, or a name on the Hub. A
            policy.pt that lies in no run is taken to be of the model of `like`.
    Raises:
        ValueError: the run's settings cannot be read.
    """
    here = os.path.abspath(os.path.expanduser(path))
    if looks_like_path(path) and not os.path.exists(here):
        raise ValueError(f"{path}: there is no such checkpoint; give a run folder, policy.pt, hf folder or Hub name")
    run = run_folder_of(path) if os.path.exists(here) else None
    if run is not None:
        recorded = resume.recorded(run).model
        return dataclasses.replace(like, model=dataclasses.replace(recorded, archive=here))
    if os.path.isfile(here):
        return replace(like, {"model.archive": here})
    changes: dict[str, Any] = dict.fromkeys((*OF_ONE_MODEL, "model.tokenizer_name_or_path"))
    return replace(like, changes | {"model.name_or_path": here if os.path.isdir(here) else path})


def with_recorded(composed: DictConfig, run: str, given: Collection[str]) -> DictConfig:
    """A composed config with the recorded settings of a run where the command line names none.

    Only what an evaluation reads is taken over. Other data sets than the run's have other files, columns and weights;
    and the devices are those of this machine.

    Raises:
        ValueError: the run's settings cannot be read.
    """
    saved, config = resume.load(run), composed.copy()
    given = {*given, "datasets", "data.weights"} if "data_mix" in given else given
    for section in RECORDED:
        inner = [key for key in given if key.startswith(section + ".")]
        if section in given:
            continue
        chosen = {key: OmegaConf.select(composed, key) for key in inner}
        OmegaConf.update(config, section, OmegaConf.select(saved, section), merge=False, force_add=True)
        for key, value in chosen.items():
            OmegaConf.update(config, key, value, force_add=True)
    if "datasets" in given:
        for key in OF_DATASETS:
            OmegaConf.update(config, key, OmegaConf.select(composed, key), merge=False)
    if "sample_during_eval" in given:
        config.n_eval_model_samples, config.sampling = composed.n_eval_model_samples, composed.sampling
    return config


def reference_of(config: Settings) -> Settings | None:
    """The model that an evaluated policy is compared with; None for none.

    evals.reference says which; else reference.name_or_path or reference.archive; else it is the reference of the run
    that the policy comes from: what that compared with, or started from.
    """
    wanted, checkpoint = config.evals.reference, config.evals.checkpoint
    if wanted == "none":
        return None
    if wanted is not None:
        return model_of(wanted, config)
    if has_own_weights(config):
        return reference_settings(config)
    run = run_folder_of(checkpoint) if checkpoint else None
    if run is None:
        return None
    before = resume.recorded(run)
    return reference_settings(dataclasses.replace(config, model=before.model, reference=before.reference))
