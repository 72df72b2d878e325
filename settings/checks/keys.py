"""The first check: every key is known, none is missing, and each value is of its type and in its range."""

from typing import Any

from losses import Option, find_loss, registry
from settings.config_files import options, read
from settings.convert import flatten
from settings.foreign_keys import advice
from settings.key import Key, kind_of, too_large
from settings.messages import near_miss, show
from settings.schema import SCHEMA


def keys_of(flat: dict[str, Any]) -> dict[str, Key]:
    """The keys of these settings: some exist for one loss or one model only."""
    schema = {**SCHEMA, **loss_keys(flat.get("loss.name"))}
    schema["loss.name"] = Key("objective", choices=tuple(options("loss")))
    return {name: key for name, key in schema.items() if not key.optional or name in flat}


def loss_keys(name: str | None) -> dict[str, Key]:
    """A loss's own keys: the options that its function declares. One that its yaml leaves out may be left out."""
    loss = registry.LOSSES.get(name or "")
    if loss is None:
        return {}
    written = (read(f"loss/{name}.yaml") or {}) if name in options("loss") else {}
    return {f"loss.{key}": _key_of_option(option, key not in written) for key, option in loss.options.items()}


def _key_of_option(option: Option, optional: bool) -> Key:
    kind, choices, null = kind_of(option.type)
    return Key(
        option.meaning or "an option of the loss",
        "" if option.choices else kind,
        option.choices or choices,
        option.low,
        option.high,
        option.open,
        null,
        optional=optional,
    )


def check_keys(values: dict[str, Any]) -> None:
    """Check nested values, as YAML has them.

    Raises:
        ValueError: a key that does not exist, is missing, or has a value that is not allowed.
    """
    flat = flatten(values)
    _check_loss_file(flat.get("loss.name"))
    schema = keys_of(flat)
    for key in flat:
        inside = [name for name in schema if name.startswith(key + ".")]
        if inside:
            raise ValueError(f"{key}={show(flat[key])}: {key} holds keys of its own; set one of {', '.join(inside)}")
        if key not in schema:
            raise ValueError(unknown_key(key, flat))
    for key in schema:
        if key not in flat:
            raise ValueError(f"{key} is missing: {schema[key].meaning}; allowed: {schema[key].describe()}")
    for key, value in flat.items():
        check_value(key, schema[key], value)
    for number, part in enumerate(flat.get("loss.parts") or []):
        _check_part(f"loss.parts[{number}]", part)


def check_value(name: str, key: Key, value: Any) -> None:
    """Raise ValueError if the setting `name` may not have a value, as YAML has it."""
    if key.admits(value):
        return
    hint = near_miss(show(value), [str(choice) for choice in key.choices])
    if key.kind == "names" and isinstance(value, str):
        hint += f"; write {name}=[{value}]"
    hint += "; this one is too large" if too_large(value) else ""
    raise ValueError(f"{name}={show(value)} is not allowed ({key.meaning}); allowed: {key.describe()}{hint}")


def _check_part(where: str, part: dict[str, Any]) -> None:
    """The values of a part of a mixed loss; which keys it may have, the loss itself knows."""
    own = {key.removeprefix("loss."): value for key, value in loss_keys(part.get("name")).items()}
    for name, value in part.items():
        schema = Key("weight of the part", "number") if name == "weight" else own.get(name)
        if schema is not None:
            check_value(f"{where}.{name}", schema, value)


def _check_loss_file(name: str | None) -> None:
    """A loss has a function and a yaml with its options, which may have been written by the user."""
    if name in options("loss"):
        find_loss(name).check_options([key for key in read(f"loss/{name}.yaml") if key != "name"])
        return
    for file in options("loss"):
        if (read(f"loss/{file}.yaml") or {}).get("name") == name:
            found = "no name" if name is None else f"the name {name}"
            raise ValueError(f"config/loss/{file}.yaml has {found}: it must say  name: {file}")


def unknown_key(key: str, flat: dict[str, Any]) -> str:
    """The message about a key that does not exist, given the settings that do."""
    holders = [name for name in options("loss") if key in loss_keys(name)]
    if holders:
        return (
            f"loss={flat.get('loss.name')} has no key {key}; it belongs to loss={'|'.join(holders)}. "
            f"Leave it out, or choose one of these losses."
        )
    if key == "model.size":
        return "model.size belongs to model=pythia; other models have one size. Leave it out, or choose model=pythia."
    schema = keys_of(flat)
    foreign = advice(key)
    if foreign is not None:
        return f"there is no key {key}{foreign}"
    message = f"there is no key {key}" + near_miss(key, list(schema), cut=0.7)
    if "did you mean" not in message:
        group, _, leaf = key.rpartition(".")
        inside = [k for k in schema if group and k.startswith(group + ".")]
        elsewhere = [k for k in schema if k.rpartition(".")[2] == leaf]
        if elsewhere:
            message += f"; did you mean {' or '.join(elsewhere)}?"
        elif inside:
            message += f"; {group} has {', '.join(k[len(group) + 1 :] for k in inside)}"
        else:
            message += "; config/config.yaml lists them all, as does python train.py --cfg job"
    return message
