"""The settings that reading and tokenising data depend on: what `settings.Settings` has, and data/ knows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class DataSection(Protocol):
    """The keys under `data`; config/config.yaml explains them."""

    @property
    def weights(self) -> Mapping[str, float]: ...
    @property
    def paths(self) -> Mapping[str, str]: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...
    @property
    def plugins(self) -> Sequence[str]: ...
    @property
    def test_fraction(self) -> float: ...
    @property
    def truncation(self) -> str | None: ...
    @property
    def on_overlong(self) -> str: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def cache_dir(self) -> str | None: ...
    @property
    def num_workers(self) -> int | None: ...


class DataOptions(Protocol):
    """The keys of a run that data/ reads."""

    @property
    def data(self) -> DataSection: ...
    @property
    def datasets(self) -> Sequence[str]: ...
    @property
    def local_dirs(self) -> Sequence[str]: ...
    @property
    def max_length(self) -> int: ...
    @property
    def max_prompt_length(self) -> int: ...


def mixture_weights(config: DataOptions) -> list[float]:
    """How often the examples of each of `datasets` are seen in an epoch: data.weights, 1 where it names none."""
    return [float(config.data.weights.get(name, 1.0)) for name in config.datasets]
