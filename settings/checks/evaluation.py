"""Checks of the loss, evaluations, early stopping and what happens at values that are not finite."""

from data.dataset_names import short_names
from losses import find_loss
from settings.checks.common import looks_like_path, must_exist, refuse_change
from settings.messages import near_miss
from settings.schema import Settings


def check(settings: Settings) -> None:
    loss = find_loss(settings.loss.name, settings.loss.options)
    loss.check_values(settings.loss.options)
    if not loss.needs_reference(settings.loss.options):
        why = "loss.reference_free=true" if loss.reads_reference else f"loss={loss.name}"
        keys = [f"reference.{name}" for name in vars(settings.reference)]
        for key in (*keys, "model.reference_dtype", "fsdp.reference_cpu_offload"):
            refuse_change(settings, key, f"{why} uses no reference model")
    else:
        _check_reference(settings)
        if loss.inputs.reference_by_token and settings.reference.mode != "online":
            raise ValueError(
                f"loss={loss.name} reads the reference's log-probs token by token, and kept are those of whole "
                "responses: set reference.mode=online"
            )
    for key, metric in (
        ("early_stopping.metric", settings.early_stopping.metric),
        ("checkpoint.best_metric", settings.checkpoint.best_metric),
    ):
        if metric is None:
            continue
        allowed = loss.metric_names("eval", settings.loss.options)
        if metric in allowed:
            continue
        of_one = [
            m
            for m in allowed
            for data in short_names(settings.datasets, settings.data.paths)
            if metric == f"{m}/{data}"
        ]
        if of_one and len(settings.datasets) > 1:
            continue
        # With several data sets each metric also comes for each of them alone, under <metric>/<data set>.
        if of_one:
            raise ValueError(
                f"{key}={metric}: of a single data set there is {of_one[0]} alone; {of_one[0]}/DATASET is for several"
            )
        each = ", each also as METRIC/DATASET" if len(settings.datasets) > 1 else ""
        raise ValueError(
            f"{key}={metric} is not a metric of loss={loss.name}; allowed: "
            f"{', '.join(allowed)}{each}{near_miss(metric, allowed)}"
        )
    if settings.early_stopping.metric is None:
        for key in ("early_stopping.patience", "early_stopping.min_delta", "early_stopping.mode"):
            refuse_change(settings, key, "early_stopping.metric is null, so nothing is watched")
    if not settings.sample_during_eval:
        for key in (
            "n_eval_model_samples",
            "sampling.temperature",
            "sampling.top_p",
            "sampling.max_new_tokens",
            "sampling.seed",
        ):
            refuse_change(settings, key, "sample_during_eval=false draws no samples")
    if settings.sampling.top_p == 0:
        raise ValueError("sampling.top_p=0 leaves no token to draw; for the likeliest token use sampling.temperature=0")
    if settings.guards.on_nonfinite == "stop" and settings.guards.max_nonfinite_steps:
        raise ValueError("guards.max_nonfinite_steps counts skipped steps: it needs guards.on_nonfinite=skip")
    if settings.guards.on_nonfinite == "skip" and not settings.guards.max_nonfinite_steps:
        raise ValueError("guards.on_nonfinite=skip needs guards.max_nonfinite_steps of 1 or more")


def _check_reference(settings: Settings) -> None:
    reference = settings.reference
    if reference.mode == "online" and reference.cache_dir:
        raise ValueError("reference.cache_dir is for reference.mode=cached; with online nothing is kept on disk")
    for key, path in (("reference.name_or_path", reference.name_or_path), ("reference.archive", reference.archive)):
        if path and (key == "reference.archive" or looks_like_path(path)):
            must_exist(key, path)
    if reference.sync_every is None:
        refuse_change(settings, "reference.sync_mix", "reference.sync_every is null, so the reference stays as it is")
        return
    if reference.mode != "online":
        raise ValueError(
            f"reference.sync_every={reference.sync_every} changes the reference while training, so its log-probs "
            "cannot be computed once: set reference.mode=online"
        )
    if reference.name_or_path:
        raise ValueError(
            f"reference.sync_every={reference.sync_every} mixes the policy's weights into the reference, which "
            "reference.name_or_path makes another model; leave one of them out"
        )
    if reference.sync_mix == 0:
        raise ValueError("reference.sync_mix=0 leaves the reference as it is; leave reference.sync_every=null instead")
