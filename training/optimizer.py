"""The optimizer, its learning-rate schedule, and the factor on float16 losses."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from settings import Settings
from settings.optimizers import optimizer_arguments


def make_optimizer(config: Settings, parameter_groups: list[dict]) -> torch.optim.Optimizer:
    """The class of torch.optim that the settings name, over these groups of parameters.

    Raises:
        ValueError: its keyword arguments do not fit.
    """
    kind = getattr(torch.optim, config.optimizer)
    device = next(parameter.device for group in parameter_groups for parameter in group["params"])
    arguments = optimizer_arguments(config, device.type)
    if "betas" in arguments:
        arguments["betas"] = [float(beta) for beta in arguments["betas"]]  # torch refuses [0, 0]
    try:
        return kind(parameter_groups, lr=config.lr, **arguments)
    except TypeError as problem:
        raise ValueError(
            f"optimizer_kwargs={dict(config.optimizer_kwargs)} do not fit torch.optim.{config.optimizer}: {problem}"
        ) from problem


def learning_rate(config: Settings, updates: int, step: int, n_steps: int) -> float:
    """Learning rate of the step with number `step` (0-based) of `n_steps`: linear warm-up, then the schedule's decay.

    Warm-up counts updates made so far, for it is the optimizer's statistics that have to warm up. The decay goes by the
    step's number, which also counts steps that were skipped, so that the rate is zero at the last step in any case.
    It is lr at step `warmup_steps`, and 0 at step n_steps - 1: a straight line, or half a cosine, in between.
    """
    warm = config.warmup_steps
    rate = config.lr * min(1.0, (updates + 1) / (warm + 1))
    if config.schedule == "constant" or step <= warm:
        return rate
    left = (n_steps - 1 - step) / (n_steps - 1 - warm)
    return rate * (left if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))


def warm_up_problem(config: Settings, n_steps: int) -> str | None:
    """What a warm-up that is not over when the run ends leaves undone, in words; None if it is over in time."""
    decays = config.schedule != "constant"
    if config.warmup_steps < n_steps - decays:
        return None
    reached = config.lr * min(1.0, n_steps / (config.warmup_steps + 1))
    never = f", and schedule={config.schedule} never begins to fall" if decays else ""
    return (
        f"The run has {n_steps} steps and warmup_steps={config.warmup_steps}: the learning rate comes to {reached:.2g} "
        f"of lr={config.lr:g}{never}. Set warmup_steps below {max(1, n_steps - decays)}, or train longer."
    )


class LossScale:
    """A factor on the loss, without which float16 gradients underflow; it adapts (arXiv 1710.03740, section 3.2).

    Args:
        enabled: whether gradients are float16; otherwise the factor is 1 and nothing here does anything.
    """

    START, GROWTH_STEPS = 2.0**16, 2000

    def __init__(self, enabled: bool):
        self.active = enabled
        self.value, self.good_steps = (self.START if enabled else 1.0), 0

    def unscale(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Take the factor out of the gradients, in place."""
        if self.active:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.value)

    def lower(self) -> None:
        """Halve the factor after gradients overflowed.

        Raises:
            FloatingPointError: it is below 1: the gradients themselves overflow.
        """
        self.value, self.good_steps = self.value / 2, 0
        if self.value < 1.0:
            raise FloatingPointError("float16 gradients overflow at every loss scale: use precision=bfloat16.")

    def stepped(self) -> None:
        """Count a step without overflow; after many the factor doubles."""
        if self.active:
            self.good_steps += 1
            if self.good_steps % self.GROWTH_STEPS == 0:
                self.value *= 2

    def state(self) -> dict:
        return {"loss_scale": self.value, "good_steps": self.good_steps}

    def load_state(self, state: dict) -> None:
        self.value, self.good_steps = state["loss_scale"], state["good_steps"]
