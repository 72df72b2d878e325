"""What an optimizer keeps and uses, found by letting it step on small parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from planning.trace import LiveBytes


@dataclass(frozen=True)
class OptimizerNeeds:
    """What an optimizer keeps and uses, found by letting it step on small parameters.

    Attributes:
        states: {number of dimensions: ((dimensions kept of the parameter's, bytes an element), ...)}, one a tensor.
        temporaries: bytes used inside a step, a byte of the parameters that are worked on together.
        together: whether all parameters are worked on together (foreach), or one after the other.
    """

    states: dict[int, tuple[tuple[tuple[int, ...], int], ...]]
    temporaries: float
    together: bool

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        kept = self.states[min(len(shape), 3)]
        return sum(math.prod(shape[d] for d in dims) * size for dims, size in kept)

    def step_bytes(self, sizes: list[int]) -> int:
        """Temporaries of a step over parameters of these bytes."""
        return int(self.temporaries * (sum(sizes) if self.together else max(sizes, default=0)))


def optimizer_needs(name: str, arguments: dict, dtype: torch.dtype, foreach: bool) -> OptimizerNeeds:
    """Measure a class of torch.optim. foreach: whether it works on all parameters at once where it has the choice."""
    arguments = {key: value for key, value in arguments.items() if key not in ("fused", "capturable")}
    together = bool(arguments.pop("foreach", None) if arguments.get("foreach") is not None else foreach)
    kind = getattr(torch.optim, name)

    def stepped(shapes):
        parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
        optimizer = kind(parameters, lr=1e-9, foreach=together, **arguments)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1e-3)
            counter = LiveBytes(
                [
                    *parameters,
                    *(p.grad for p in parameters),
                    *(t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)),
                ]
            )
            with counter:
                optimizer.step()
        return parameters, optimizer, max(counter.peaks.values())

    # Dimensions that are different primes tell which of them a state tensor keeps.
    primes = {1: (13,), 2: (7, 11), 3: (3, 5, 17), 0: ()}
    states = {}
    for n, shape in primes.items():
        (parameter,), optimizer, _ = stepped([shape])
        states[n] = tuple(
            (tuple(shape.index(size) for size in value.shape if size != 1), value.element_size())
            for value in optimizer.state[parameter].values()
            if isinstance(value, torch.Tensor) and (value.ndim or n == 0)
        )
    shapes = [(64, 64)] * (6 if together else 1)
    parameters, _, peak = stepped(shapes)
    return OptimizerNeeds(states, peak / sum(p.numel() * p.element_size() for p in parameters), together)
