"""Checks of the optimizer and its arguments."""

from collections.abc import Callable
from typing import Any

from settings.key import is_number
from settings.messages import near_miss, show
from settings.optimizers import OPTIMIZERS
from settings.schema import Settings

_FLAGS = "amsgrad foreach capturable fused decoupled_weight_decay centered nesterov".split()
# (whether a value is allowed, in words) where that is not "a number from 0 up": torch's own ranges, and below 1 where 1
# divides by zero or never forgets. A test holds this against torch.
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "betas": (
        lambda betas: _pair(betas) and all(0 <= beta < 1 for beta in betas),
        "a list of two numbers from 0 and below 1",
    ),
    "etas": (
        lambda etas: _pair(etas) and 0 < etas[0] < 1 < etas[1],
        "a list of a number between 0 and 1, and one above 1",
    ),
    "step_sizes": (lambda sizes: _pair(sizes) and 0 < sizes[0] <= sizes[1], "a list of the least and the largest step"),
    "rho": (lambda rho: is_number(rho) and 0 <= rho < 1, "a number from 0 and below 1"),
    "beta2_decay": (lambda power: is_number(power) and power <= 0, "a number of 0 or below"),
    "d": (lambda d: is_number(d) and d >= 1, "a number from 1 up"),
}
_ADAFACTOR_EPS = (
    lambda eps: (
        isinstance(eps, list) and len(eps) == 2 and (eps[0] is None or _not_negative(eps[0])) and _not_negative(eps[1])
    ),
    "a list of a number from 0 up or null, and a number from 0 up",
)
_RMSPROP_ALPHA = (lambda alpha: is_number(alpha) and 0 <= alpha < 1, "a number from 0 and below 1")


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))


def _not_negative(value: Any) -> bool:
    return is_number(value) and value >= 0


def _wrong_argument(optimizer: str, key: str, value: Any) -> str | None:
    """What an argument may be, in words, if the value is something else; None if it is good."""
    good, allowed = _RANGES.get(key, (_not_negative, "a number from 0 up"))
    if key in _FLAGS:
        good, allowed = (lambda flag: isinstance(flag, bool) or flag is None), "true or false"
    elif (optimizer, key) == ("Adafactor", "eps"):
        good, allowed = _ADAFACTOR_EPS
    elif (optimizer, key) == ("RMSprop", "alpha"):
        good, allowed = _RMSPROP_ALPHA
    return None if good(value) else allowed


def check(settings: Settings) -> None:
    name = settings.optimizer
    if name not in OPTIMIZERS:
        why = {
            "LBFGS": " (LBFGS needs the loss several times a step)",
            "SparseAdam": " (SparseAdam needs sparse gradients)",
            "Muon": " (Muon takes matrices only)",
        }.get(name, "")
        raise ValueError(
            f"optimizer={name} is not one that can be used here{why}; allowed: {', '.join(OPTIMIZERS)}"
            + near_miss(name, OPTIMIZERS)
        )
    known = OPTIMIZERS[name].split()
    for key, value in settings.optimizer_kwargs.items():
        full = f"optimizer_kwargs.{key}"
        if key == "lr":
            raise ValueError("optimizer_kwargs.lr: the learning rate is a key of its own; use lr=...")
        if key not in known:
            raise ValueError(f"{full}: {name} has no such argument; it has {', '.join(known)}" + near_miss(key, known))
        allowed = _wrong_argument(name, key, value)
        if allowed:
            raise ValueError(f"{full}={show(value)} is not allowed; allowed: {allowed}")
    arguments = settings.optimizer_kwargs
    if arguments.get("fused") and arguments.get("foreach"):
        raise ValueError("optimizer_kwargs.fused and optimizer_kwargs.foreach exclude each other; set one of them")
    if arguments.get("nesterov") and not (arguments.get("momentum") and not arguments.get("dampening")):
        raise ValueError("optimizer_kwargs.nesterov=true needs optimizer_kwargs.momentum above 0 and no dampening")
    if settings.fsdp.cpu_offload:
        for key in ("fused", "capturable"):
            if arguments.get(key):
                raise ValueError(
                    f"optimizer_kwargs.{key}=true steps on the accelerator, and fsdp.cpu_offload=true "
                    "keeps the parameters in host memory; set one of them to false"
                )
