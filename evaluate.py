"""Evaluate a checkpoint on preference pairs.

    python evaluate.py RUN_FOLDER
    python evaluate.py RUN_FOLDER 'datasets=[other_pairs.jsonl]' evals.split=all reference=OTHER_RUN
    python evaluate.py model=blank_model model.name_or_path=gpt2 'datasets=[pairs.jsonl]' evals.split=all

Takes the config groups and keys of train.py. A checkpoint brings the settings of its run; what the command line names
goes before them. config/config.yaml explains `evals`.
"""

import os
import sys

import hydra
from omegaconf import DictConfig, OmegaConf

import settings
import train
import utils
from settings import Settings, checkpoints
from settings.config_files import default

# What an evaluation reads of the settings; all else on a command line would have no effect.
SECTIONS = ("model", "data", "fsdp", "evals", "sampling")
READ = {
    *SECTIONS,
    *("datasets", "data_mix", "max_length", "max_prompt_length", "prefix_sharing", "experiment"),
    *("loss", "loss.beta", "reference.name_or_path", "reference.archive"),
    *("trainer", "tp_size", "world_size", "device", "precision", "compile", "fsdp_port"),
    *("tokens_per_microbatch", "eval_batch_size", "n_eval_examples", "seed"),
    *("sample_during_eval", "n_eval_model_samples", "guards.collective_timeout_minutes"),
    *("exp_name", "local_dirs", "local_run_dir"),
}


@hydra.main(version_base="1.3", config_path=settings.CONFIG_DIR, config_name="config")
def main(composed: DictConfig) -> float | None:
    """One evaluation: check the settings, score, write; returns the accuracy."""
    with train.reported(train.is_in_sweep()):
        given = settings.named_keys(train.overrides_of_job())
        settings.check_given(composed, given)
        check_read(given)
        composed = with_checkpoint(composed, given)
        settings.validate(composed, given=given)
        config = settings.finalize(composed)
        if not {"exp_name", "local_run_dir"} & {*given}:
            config = settings.replace(config, {"exp_name": utils.file_name(f"eval_{config.exp_name}")})
        train.check_devices(config, given)
        return train.run(config, evaluate, fresh_process=train.is_in_sweep())


def check_read(given: list[str]) -> None:
    """Refuse keys that only training reads."""
    for key in given:
        if key not in READ and not key.startswith(tuple(f"{section}." for section in SECTIONS)):
            raise ValueError(
                f"{key} has no effect on an evaluation: leave it out. evaluate.py reads what models, data, devices, "
                "sampling and evals are, and loss.beta"
            )


def with_checkpoint(composed: DictConfig, given: list[str]) -> DictConfig:
    """The settings with those of the checkpoint's run, and all held-out pairs unless the command says less."""
    path = composed.evals.checkpoint
    if path is not None:
        run = checkpoints.run_folder_of(path) if os.path.exists(os.path.expanduser(path)) else None
        if run is not None:
            composed = checkpoints.with_recorded(composed, run, given)
        elif OmegaConf.is_missing(composed.model, "name_or_path"):
            composed.model.name_or_path = path
    composed.data.streaming = False  # what is evaluated is read whole
    composed.data.shuffle_window = default("data.shuffle_window")
    if "n_eval_examples" not in given:
        composed.n_eval_examples = None
    return composed


def evaluate(config: Settings, run_dir: str, world: utils.World) -> float:
    """What every rank runs."""
    from training import pair_evaluation

    return pair_evaluation.run(config, run_dir, world)


def short_arguments(arguments: list[str]) -> list[str]:
    """A path alone is the checkpoint, and reference=X stands for evals.reference=X."""
    found = []
    for argument in arguments:
        if argument.startswith("reference="):
            argument = f"evals.{argument}"
        elif argument.startswith("loss."):
            argument = f"++{argument}"  # the loss that has this key may come with the checkpoint
        elif "=" not in argument and not argument.startswith("-"):
            argument = f"evals.checkpoint={argument}"
        found.append(argument)
    return found


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv[1:]}:
        sys.exit(__doc__)
    sys.argv[1:] = short_arguments(sys.argv[1:])
    code = train.command_line(main)
    train.streams.flush_streams()
    sys.exit(code)
