"""The first check: every key is known, none is missing, and each value is of its type and in its range."""

from typing import Any

from settings.config_files import options, read
from settings.convert import flatten
from settings.key import Key
from settings.messages import near_miss, show
from settings.schema import SCHEMA

# A loss without an entry here has the keys of its yaml, see `loss_keys`.
LOSS_KEYS: dict[str, dict[str, Key]] = {
    "sft": {},
    "dpo": {
        "loss.beta": Key("pull to the reference", "number", low=0, open=True),
        "loss.label_smoothing": Key("share of swapped labels", "number", low=0, high=0.4999999999999999),
        "loss.reference_free": Key("no reference model", "flag"),
        "loss.f_divergence": Key("how distance to the reference is measured", choices=("reverse_kl", "js")),
    },
    "ipo": {
        "loss.beta": Key("pull to the reference", "number", low=0, open=True),
        "loss.average_log_prob": Key("mean over tokens, not sum", "flag"),
        "loss.reference_free": Key("no reference model", "flag"),
    },
}


def keys_of(flat: dict[str, Any]) -> dict[str, Key]:
    """The keys of these settings: some exist for one loss or one model only."""
    schema = {name: key for name, key in SCHEMA.items() if not key.optional or name in flat}
    schema["loss.name"] = Key("objective", choices=tuple(options("loss")))
    schema.update(loss_keys(flat.get("loss.name")))
    return schema


def loss_keys(name: str | None) -> dict[str, Key]:
    """A loss's own keys. Of one that was added by a yaml and a function alone: each key is of the kind of its value in
    the yaml, and the function checks the range."""
    if name is None or name in LOSS_KEYS or name not in options("loss"):
        return LOSS_KEYS.get(name or "", {})
    values = flatten(read(f"loss/{name}.yaml"), "loss.")
    kinds = {bool: "flag", int: "number", float: "number", list: "names"}
    return {
        key: Key(f"see config/loss/{name}.yaml", kinds.get(type(value), "text"), null=value is None)
        for key, value in values.items()
        if key != "loss.name"
    }


def check_keys(values: dict[str, Any]) -> None:
    """Check nested values, as YAML has them.

    Raises:
        ValueError: a key that does not exist, is missing, or has a value that is not allowed.
    """
    flat = flatten(values)
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
        if not schema[key].admits(value):
            near = near_miss(str(value), [str(c) for c in schema[key].choices])
            raise ValueError(
                f"{key}={show(value)} is not allowed ({schema[key].meaning}); allowed: {schema[key].describe()}{near}"
            )


def unknown_key(key: str, flat: dict[str, Any]) -> str:
    """The message about a key that does not exist, given the settings that do."""
    holders = [name for name in options("loss") if key in loss_keys(name)]
    if holders:
        return (
            f"loss={flat.get('loss.name')} has no key {key}; it belongs to loss={' and loss='.join(holders)}. "
            f"Leave it out, or choose one of these losses."
        )
    if key == "model.size":
        return "model.size belongs to model=pythia; other models have one size. Leave it out, or choose model=pythia."
    schema = keys_of(flat)
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
