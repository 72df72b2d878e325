"""A weighted sum of losses: `loss=mix loss.parts=[{name: dpo, beta: 0.1}, {name: apo_zero, beta: 0.1}]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from losses.inputs import Inputs, PairLogps
from losses.registry import LOSSES, SFT_WEIGHT, Loss, LossOutput, Option, find_loss


@dataclass(frozen=True)
class Part:
    """One of the losses that are added up: its name in metrics, what it weighs, and its own options."""

    name: str
    loss: Loss
    weight: float
    options: dict[str, Any]


@dataclass(frozen=True)
class WeightedSum:
    """The function of a mixed loss. `metrics`: name -> (part, the part's metric; None for its loss)."""

    parts: list[Part]
    metrics: dict[str, tuple[int, str | None]]

    def __call__(self, inputs, parts=None, memory: Mapping[str, float] | None = None) -> LossOutput:
        outputs: list[LossOutput] = []
        for part in self.parts:
            kept = {key: memory[f"{part.name}.{key}"] for key in part.loss.memory} if memory else {}
            options: dict[str, Any] = part.options | ({"memory": kept} if kept else {})
            outputs.append(part.loss(inputs, **options))
        return LossOutput(
            sum(part.weight * output.losses for part, output in zip(self.parts, outputs)),
            {
                name: outputs[number].losses.detach() if own is None else outputs[number].metrics[own]
                for name, (number, own) in self.metrics.items()
            },
            {
                f"{part.name}.{key}": value
                for part, output in zip(self.parts, outputs)
                for key, value in output.memory.items()
            },
        )


def mix(options: Mapping[str, Any]) -> Loss:
    """The loss that is the weighted sum of others.

    Args:
        options: with `parts`, a list of {name, weight, and the options of that loss}; a weight left out is 1.
    Returns: its metrics are each part's losses before weights, under the part's name, and what the parts report: where
        two report the same, the first one's.
    Raises:
        ValueError: a part is not a loss or has wrong options, or the parts do not take the same data.
    """
    if not options["parts"]:
        raise ValueError("loss.parts is empty: give the losses to add up, [{name: dpo, beta: 0.1}, ...]")
    parts: list[Part] = []
    for number, given in enumerate(options["parts"]):
        parts.append(_part(number, given, taken=[part.name for part in parts]))
    inputs = _common_inputs([part.loss for part in parts])
    if options.get("sft_weight") and not inputs.has_chosen:
        raise ValueError(f"loss.sft_weight={options['sft_weight']} has no effect: these parts know no chosen responses")
    metrics: dict[str, tuple[int, str | None]] = {part.name: (number, None) for number, part in enumerate(parts)}
    for number, part in enumerate(parts):
        for name in part.loss.metrics:
            metrics.setdefault(name, (number, name))
    step_wide = [part.loss.name for part in parts if part.loss.step_wide]
    if step_wide and inputs.needs_tokens:
        raise ValueError(
            f"loss.parts: {step_wide[0]} compares whole responses of a step, and cannot be added to a loss that looks "
            "at single tokens"
        )
    return Loss(
        "mix",
        WeightedSum(parts, metrics),
        inputs,
        reads_reference=any(part.loss.needs_reference(part.options) for part in parts),
        metrics=tuple(metrics),
        options=OPTIONS,
        step_wide=bool(step_wide),
        memory={f"{part.name}.{key}": first for part in parts for key, first in part.loss.memory.items()},
    )


def _part(number: int, given: Any, taken: list[str]) -> Part:
    where = f"loss.parts[{number}]"
    if not isinstance(given, Mapping) or "name" not in given:
        raise ValueError(f"{where} must name a loss, as in {{name: dpo, beta: 0.1, weight: 1}}, not {given}")
    name = given["name"]
    allowed = [loss for loss in LOSSES if loss not in ("mix", "sft")]
    if name not in allowed:
        sft = "; for the likelihood of chosen responses set loss.sft_weight" if name == "sft" else ""
        raise ValueError(f"{where}: {name} is no loss to add up; there are {', '.join(allowed)}{sft}")
    loss, options = find_loss(name), {key: value for key, value in given.items() if key not in ("name", "weight")}
    try:
        loss.check_options(options)
        loss.check_values(options)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if "sft_weight" in options:
        raise ValueError(f"{where}: set loss.sft_weight, once for all parts, instead of a part's own")
    return Part(f"{name}_{number}" if name in taken else name, loss, float(given.get("weight", 1.0)), options)


def _common_inputs(losses: list[Loss]) -> type[Inputs]:
    """The input that has what each of them takes."""
    for loss in losses:
        if all(issubclass(loss.inputs, other.inputs) for other in losses):
            return loss.inputs
    examples = ", ".join(f"{loss.name} takes {loss.inputs.example}" for loss in losses)
    raise ValueError(f"loss.parts must take the same data: {examples}")


OPTIONS = {"parts": Option("the losses to add up, with their weights and options", type=list), "sft_weight": SFT_WEIGHT}
LOSSES["mix"] = Loss("mix", mix, PairLogps, reads_reference=True, metrics=(), options=OPTIONS, build=mix)
