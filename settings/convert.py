"""Settings between their forms: the config that Hydra composes, plain nested dicts, flat {"a.b": value}, Settings."""

import os
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

import atomic_files
import utils
from data.dataset_names import by_full_name, short_names
from settings import paths
from settings.config_files import defaults, options, read
from settings.schema import SCHEMA, Settings

LONGEST_NAME = 255 - len("_2026-01-31_23-59-59_123456")  # bytes: what file systems allow, less what a run folder adds


class NeededSetting(ValueError):
    """A config file leaves a setting to the user."""


def needed(what: str) -> None:
    """The resolver of ${needed:"..."}, for a value that a config file asks of the user.

    Hydra's ??? cannot say it where the key has a default: laid over a value, even null, it changes nothing.
    """
    raise NeededSetting(what)


OmegaConf.register_new_resolver("needed", needed, replace=True)


def resolve(config: DictConfig) -> dict:
    """The composed config as plain nested containers, interpolations worked out and paths in full.

    Raises:
        ValueError: a value that must be given is missing, or an interpolation leads nowhere.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        values = cast(dict, OmegaConf.to_container(config, resolve=True))
    except Exception as error:  # omegaconf has a dozen classes for a bad ${...}; each message names the key
        asked = re.search(rf"{NeededSetting.__name__} raised.*?: (.*)\s+full_key: (\S+)", str(error))
        if asked:
            raise ValueError(f"{asked[2]} is missing: give {asked[2]}={asked[1]}") from None
        raise ValueError(f"a setting cannot be worked out: {' '.join(str(error).split())}") from error
    if "model.name_or_path" in missing:
        raise ValueError(
            "model.name_or_path is missing: give a Hub name or a local folder, as in model=blank_model "
            f"model.name_or_path=gpt2, or choose one of model={'|'.join(options('model'))}"
        )
    if missing:
        raise ValueError(f"{missing[0]} is missing: this run needs a value for it ({missing[0]}=...)")
    names, data = values.get("datasets"), values.get("data")
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names) and isinstance(data, dict)):
        paths.in_full(values)
        return values  # the check of types reports it
    _name_datasets(names, data)
    paths.in_full(values)
    _name_metrics(names, data, values)
    return values


def _name_datasets(names: list[str], data: dict) -> None:
    """Put the settings of a data set, by whatever name, under the one name that is used."""
    for key in ("paths", "columns", "weights"):
        if isinstance(data.get(key), dict):
            # A column of all data sets may have the name of one of them; it has a text for its value.
            flat = {name: value for name, value in data[key].items() if key == "columns" and isinstance(value, str)}
            data[key] = flat | by_full_name({name: data[key][name] for name in data[key] if name not in flat}, names)


def _name_metrics(names: list[str], data: dict, values: dict) -> None:
    """Put metrics of a data set under its short name, which they have whatever it was called."""
    shorts = short_names(names, data.get("paths") or ())
    for section, key in (("early_stopping", "metric"), ("checkpoint", "best_metric")):
        metric = values[section].get(key) if isinstance(values[section], dict) else None
        for name, short in zip(names, shorts, strict=True):
            if isinstance(metric, str) and metric.endswith(f"/{name}"):
                values[section][key] = metric.removesuffix(name) + short


def recorded_form(config: DictConfig) -> dict:
    """The composed config as a run records it in config.yaml: resolved, the run named, one name for the block."""
    values = resolve(config)
    model = values["model"]
    model["block_name"] = model["block_name"] or model["block"]
    model["block"] = None
    values["precision"] = model["fsdp_policy_mp"] or values["precision"]
    model["fsdp_policy_mp"] = None
    if values["exp_name"] is None:
        parts = [
            os.path.basename(name.rstrip("/")).split(".jsonl")[0]
            for name in (model["name_or_path"], values["loss"]["name"], *values["datasets"])
        ]
        values["exp_name"] = "_".join(map(utils.file_name, [*parts[:2], "+".join(parts[2:])]))
    values["exp_name"] = _short_enough(utils.file_name(values["exp_name"]))
    return values


def _short_enough(name: str) -> str:
    """A name that a folder can have together with the time after it; a longer one ends in a digest of itself."""
    content = name.encode()
    if len(content) <= LONGEST_NAME:
        return name
    kept = content[: LONGEST_NAME - 9].decode(errors="ignore")
    return f"{kept}-{atomic_files.checksum(content)[:8]}"


def from_dict(values: Mapping[str, Any]) -> Settings:
    """Settings of plain values, whose keys and types were checked (settings.checks.keys)."""
    return _build(Settings, values)


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain nested settings with the default of every key that `values` do not have, the loss's own keys included."""
    lower, loss = dict(defaults()), values.get("loss")
    if isinstance(loss, Mapping) and loss.get("name") in options("loss"):
        lower["loss"] = read(f"loss/{loss['name']}.yaml")
    return _laid_over(lower, values)


def _laid_over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    merged = _copy(lower)
    for name, value in upper.items():
        inside = isinstance(value, dict) and isinstance(lower.get(name), dict)
        merged[name] = _laid_over(lower[name], value) if inside else _copy(value)
    return merged


def _build(section: Any, values: Mapping[str, Any]) -> Any:
    given: dict[str, Any] = {}
    known = [declared.name for declared in fields(section)]
    for declared in fields(section):
        name, kind = declared.name, cast(Any, declared.type)
        if "rest" in declared.metadata:
            given[name] = {key: value for key, value in values.items() if key not in known}
        elif is_dataclass(kind):
            given[name] = _build(kind, values[name])
        elif declared.metadata["key"].optional:
            given[name] = values.get(name)
        else:
            given[name] = tuple(values[name]) if isinstance(values[name], list) else values[name]
    return section(**given)


def as_dict(settings: Any) -> dict:
    """The plain nested dict that config.yaml is written from. It shares nothing with the settings."""
    values: dict[str, Any] = {}
    for declared in fields(settings):
        value = getattr(settings, declared.name)
        if "rest" in declared.metadata:
            values.update(_copy(value))
        elif is_dataclass(value):
            values[declared.name] = as_dict(value)
        elif value is not None or not declared.metadata["key"].optional:
            values[declared.name] = _copy(value)
    return values


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy(inner) for name, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def replace(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with other values, by dotted key: replace(settings, {"fsdp.cpu_offload": True})."""
    values = as_dict(settings)
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = values
        for section in sections:
            place = place[section]
        assert name in place or SCHEMA.get(".".join(sections), SCHEMA["lr"]).free, f"there is no key {key}"
        place[name] = _copy(value)
    return from_dict(values)


def flatten(values: Mapping, prefix: str = "") -> dict[str, Any]:
    """{'a.b': value} of nested settings; mappings with keys of the user's stay whole."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        inside = isinstance(value, dict) and not (key in SCHEMA and SCHEMA[key].free)
        flat.update(flatten(value, key + ".") if inside and value else {key: value})
    return flat
