"""Which settings of a run differ from the defaults in config/."""

from __future__ import annotations

import os
from typing import Any

from report.recorded_run import read_yaml
from utils import PROJECT_DIR


def changed_settings(
    config: dict[str, Any], config_dir: str = os.path.join(PROJECT_DIR, "config")
) -> list[tuple[str, Any, Any]]:
    """(key, value, default) of the settings that are not the defaults. The default of a config group is the option in
    it that the run is nearest to: choosing loss=dpo is shown as that one line, and then only what differs from
    dpo.yaml."""
    usual = read_yaml(os.path.join(config_dir, "config.yaml"))
    chosen = {
        key: value for entry in usual.pop("defaults", []) if isinstance(entry, dict) for key, value in entry.items()
    }
    usual.pop("hydra", None)
    found: list[tuple[str, Any, Any]] = []
    for key, value in config.items():
        folder = os.path.join(config_dir, str(key))
        if key == "experiment" or key == "hydra":
            continue
        if isinstance(value, dict) and os.path.isdir(folder):
            options = {
                name[:-5]: read_yaml(os.path.join(folder, name))
                for name in sorted(os.listdir(folder))
                if name.endswith(".yaml")
            }
            distances = {name: _differences(value, option, f"{key}.") for name, option in options.items()}
            if distances:
                best = min(distances, key=lambda name: (len(distances[name]), name != chosen.get(key)))
                if best != chosen.get(key):
                    found.append((key, best, chosen.get(key)))
                found += distances[best]
                continue
        found += _differences({key: value}, {key: usual.get(key)} if key in usual else {}, "")
    return found


def _differences(value: dict[str, Any], usual: dict[str, Any], prefix: str) -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for key in value:
        here, there = value[key], usual.get(key)
        if isinstance(here, dict) and isinstance(there, dict) and there:
            found += _differences(here, there, f"{prefix}{key}.")
        elif not _same(here, there) and "${" not in str(there):
            found.append((prefix + str(key), here, there))
    return found


def _same(here: Any, there: Any) -> bool:
    if here == there or (not here and not there and isinstance(here, (dict, list, type(None)))):
        return True
    try:  # YAML 1.1 reads 5e-7 as text, and 20_000 is a number
        return float(here) == float(str(there).replace("_", "")) and not isinstance(here, bool)
    except (TypeError, ValueError):
        return False
