"""What to change in the settings of a run that does not fit."""

from __future__ import annotations

import dataclasses

from losses import find_loss
from parallel.launch import has_bfloat16
from planning.estimate import estimate
from planning.plan import Plan
from settings import Settings, replace
from settings.optimizers import WHOLE_TENSORS_ONLY
from settings.precision import compute_dtype, resolve_precision
from settings.shard_layout import layout_of


def advise(config: Settings, plan: Plan, model_config) -> list[tuple[str, int, bool]]:
    """Changes that save memory, the cheapest first: each alone if it is enough, else on top of those before it."""
    config = replace(config, {"precision": resolve_precision(config, plan.kind, has_bfloat16(plan.kind))})
    sharded = config.trainer != "BasicTrainer"
    whole_tensors = not layout_of(config, plan.world_size).sharded
    changes: list[dict] = []
    if (
        find_loss(config.loss.name, config.loss.options).needs_reference(config.loss.options)
        and config.reference.mode == "online"
    ):
        changes.append({"reference.mode": "cached"})
    tokens = plan.batch.tokens
    while tokens > plan.batch.unit_tokens:
        tokens = max(tokens // 2, plan.batch.unit_tokens)
        change = {"tokens_per_microbatch": tokens}
        if tokens == plan.batch.unit_tokens or _estimate_with(config, change, model_config, plan).fits:
            changes.append(change)
            break
    castable = plan.kind != "mps" and config.optimizer not in WHOLE_TENSORS_ONLY
    if castable and compute_dtype(config) == "float32":
        changes.append({"precision": "bfloat16"})
    if int(config.activation_checkpointing) != 1:
        changes.append({"activation_checkpointing": True})
    if sharded and config.fsdp.sharding_strategy != "FULL_SHARD" and config.tp_size == 1:
        changes.append({"fsdp.sharding_strategy": "FULL_SHARD", "fsdp.replicas": None})
    if sharded:
        world = max(2, plan.world_size * 2)
        while world <= min(config.batch_size * config.tp_size, 1024):
            changes.append({"world_size": world})
            world *= 2
    elif plan.kind != "mps":
        world = 2
        while world <= min(config.batch_size, 64):
            changes.append({"trainer": "FSDPTrainer", "world_size": world})
            world *= 2
    if sharded and plan.kind == "cuda" and not config.fsdp.cpu_offload:
        changes.append({"fsdp.cpu_offload": True})
    lightest = {
        "Adam": "RMSprop",
        "AdamW": "RMSprop",
        "NAdam": "RMSprop",
        "RAdam": "RMSprop",
        "Adamax": "RMSprop",
        "RMSprop": "Adafactor",
        "Adagrad": "Adafactor",
    }.get(config.optimizer)
    if lightest and (whole_tensors or lightest not in WHOLE_TENSORS_ONLY):
        changes.append({"optimizer": lightest, **({"optimizer_kwargs": {}} if config.optimizer_kwargs else {})})
    results, gathered, enough_world = [], {}, False
    for change in changes:
        if "world_size" in change and enough_world:
            continue  # the smallest world that is enough has been found
        alone = _estimate_with(config, change, model_config, plan)
        if alone.total >= 0.98 * plan.total:
            continue
        enough_world = enough_world or ("world_size" in change and bool(alone.fits))
        gathered.update(change)
        results.append((_as_arguments(change), alone.total, bool(alone.fits)))
    worlds = [r for r in results if "world_size" in r[0]]
    if worlds and not enough_world:
        results = [r for r in results if r not in worlds[:-1]]
    results.sort(key=lambda entry: not entry[2])
    if not any(fits for *_, fits in results) and len(results) > 1:
        together = _estimate_with(config, gathered, model_config, plan)
        results.append((_as_arguments(gathered), together.total, bool(together.fits)))
    return results


def _estimate_with(config: Settings, change: dict, model_config, plan: Plan) -> Plan:
    unit = dataclasses.replace(plan.batch, units=1)
    capacity = plan.capacity
    if plan.kind == "cpu" and "world_size" in change and capacity and not config.plan_device_memory_gb:
        capacity = capacity * plan.world_size // change["world_size"]  # ranks share the host's memory
    return estimate(
        replace(config, change),
        change.get("world_size", plan.world_size),
        kind=plan.kind,
        capacity=capacity,
        batch=unit,
        model_config=model_config,
    )


def _as_arguments(change: dict) -> str:
    show = {True: "true", False: "false", None: "null"}
    words = []
    for key, value in change.items():
        if isinstance(value, dict):
            value = "{}"
        words.append(f"{key}={show[value] if value is None or isinstance(value, bool) else value}")
    return " ".join(words)
