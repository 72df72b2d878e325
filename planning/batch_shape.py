"""The shape of a micro-batch, without its tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from data.batching import PromptUnit, pack, pad
from losses import find_loss
from settings import Settings


@dataclass(frozen=True)
class BatchShape:
    """One micro-batch: `units` prompts of `prompt` tokens with responses of these lengths, on one rank."""

    prompt: int
    responses: tuple[int, ...]
    units: int
    share_prefix: bool = True

    @property
    def unit_tokens(self) -> int:
        return self.prompt * (1 if self.share_prefix else len(self.responses)) + sum(self.responses)

    @property
    def tokens(self) -> int:
        return self.units * self.unit_tokens

    @property
    def scored(self) -> int:
        return self.units * sum(self.responses)

    def batch(self, mode, packed: bool):
        """The micro-batch's tensors, without content where `mode` is given."""
        pair = (0, 1 if len(self.responses) > 1 else -1)
        tokens: Callable[[int], np.ndarray] = functools.partial(np.arange, dtype=np.int32)
        units = [
            PromptUnit(
                0,
                number,
                tokens(self.prompt),
                [tokens(n) for n in self.responses],
                list(range(len(self.responses))),
                [pair],
            )
            for number in range(self.units)
        ]
        batch = pack(units, self.share_prefix) if packed else pad(units, 0)
        assert batch is not None  # there are units
        moved = {
            name: mode.from_tensor(value) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)
        }
        return dataclasses.replace(batch, **moved)


def largest_unit(config: Settings) -> BatchShape:
    """The largest example that the settings allow: a prompt and two responses, or the one that the loss takes."""
    prompt = min(config.max_prompt_length, config.max_length - 1)
    n = 1 if find_loss(config.loss.name, config.loss.options).inputs.kind in ("responses", "unpaired") else 2
    return BatchShape(prompt, (config.max_length - prompt,) * n, 1, config.prefix_sharing)


def fill(unit: BatchShape, most: int, budget: int | None) -> BatchShape:
    """A micro-batch of units like this one: at most `most`, and as many tokens as the budget allows.

    Real micro-batches mix lengths until the budget is full, so the unit is shortened to fill it exactly.
    """
    if budget is None or unit.unit_tokens * most <= budget or unit.unit_tokens >= budget:
        units = most if budget is None or unit.unit_tokens * most <= budget else 1
        return dataclasses.replace(unit, units=units)
    units = min(most, -(-budget // unit.unit_tokens))
    share = min(1.0, budget / (units * unit.unit_tokens))
    return dataclasses.replace(
        unit,
        prompt=max(1, int(unit.prompt * share)),
        units=units,
        responses=tuple(max(1, int(n * share)) for n in unit.responses),
    )
