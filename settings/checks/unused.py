"""Keys that the user changed in this command although another setting leaves them without effect.

Only what the command line names is looked at. A value that stands in an experiment file, or in the folder of a run that
is resumed, may wait there for another day: `wandb.enabled=false` must not make a file unusable that names a project.
"""

from collections.abc import Collection, Iterator

from losses import find_loss
from settings.checks.common import refuse_change
from settings.schema import CheckpointSettings, MlflowSettings, Settings, TrackioSettings, WandbSettings, keys_in

_CHECKPOINT_KEYS = tuple(keys_in(CheckpointSettings, "checkpoint."))
_WANDB_KEYS = tuple(key for key in keys_in(WandbSettings, "wandb.") if key != "wandb.enabled")
_MLFLOW_KEYS, _TRACKIO_KEYS = tuple(keys_in(MlflowSettings, "mlflow.")), tuple(keys_in(TrackioSettings, "trackio."))


def check(settings: Settings, given: Collection[str], world: int | None) -> None:
    """Refuse keys among `given` that have no effect.

    given: keys or sections that this command sets (`command_line.named_keys`). world: processes; None: not known.

    Raises:
        ValueError: the first such key, and what leaves it without effect.
    """
    for keys, why in _unused(settings, world):
        for key in keys:
            if any(key == name or key.startswith(name + ".") for name in given):
                refuse_change(settings, key, why)


def _unused(settings: Settings, world: int | None) -> Iterator[tuple[tuple[str, ...], str]]:
    """(keys, why they have no effect) with these settings."""
    loss, model, checkpoint = find_loss(settings.loss.name, settings.loss.options), settings.model, settings.checkpoint
    if settings.debug:
        yield _CHECKPOINT_KEYS, "debug=true writes no checkpoint"
        yield _WANDB_KEYS, "debug=true logs nothing to wandb"
    if not settings.wandb.enabled:
        yield _WANDB_KEYS, "wandb.enabled=false logs nothing there"
    for name, keys in {"wandb": _WANDB_KEYS, "mlflow": _MLFLOW_KEYS, "trackio": _TRACKIO_KEYS}.items():
        if name not in settings.loggers:
            yield keys, f"loggers does not name {name}"
    if settings.trainer == "BasicTrainer" or world == 1:
        yield ("guards.collective_timeout_minutes",), "one process waits for no other"
    if settings.sample_during_eval and settings.sampling.temperature == 0:
        yield ("sampling.top_p", "sampling.seed"), "sampling.temperature=0 always takes the likeliest token"
    if checkpoint.keep_last is None:
        why = "checkpoint.keep_last=null keeps every checkpoint"
        yield ("checkpoint.best_metric",), why
        if settings.early_stopping.metric is None:  # else a checkpoint is also written when it is the best
            yield ("checkpoint.keep_best",), why
    if settings.fsdp.cpu_offload:
        yield ("fsdp.reference_cpu_offload",), "fsdp.cpu_offload=true keeps the reference in host memory, too"
    own_precision = model.reference_dtype not in (None, model.policy_dtype)
    if loss.reads_reference and settings.reference.mode == "cached" and not own_precision:
        why = "with reference.mode=cached the policy itself computes the reference's log-probs, once"
        yield ("fsdp.reference_cpu_offload",), why
    if settings.fsdp.sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD"):
        why = f"{settings.fsdp.sharding_strategy} keeps blocks whole until the backward pass: nothing is left to fetch"
        yield ("fsdp.backward_prefetch",), why
    if settings.optimizer == "Rprop":
        yield ("schedule",), "optimizer=Rprop finds its step sizes by itself: lr is only the first"
        yield ("max_grad_norm",), "optimizer=Rprop goes by the signs of gradients alone"
    own_template = settings.data.chat_template
    if own_template and "{" in own_template and "strftime_now" not in own_template:
        yield ("data.template_date",), "data.chat_template writes no date (it has no strftime_now)"
    if model.random_config is not None and not (own_template or model.tokenizer_name_or_path):
        yield ("data.template_date",), "the chat template of random models writes no date"
    if model.random_config is not None:
        yield ("model.local_copy",), "model.random_config makes the weights, so none are read"
