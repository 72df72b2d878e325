"""The registry of losses: `@register_loss("name")` reads what a loss needs off its function.

    @register_loss("hinge", metrics=REWARDS)
    def hinge(pairs: PairLogps, *, beta: float, margin: float = 1.0) -> LossOutput: ...

- The class of the first argument is the loss's input (inputs.py): pairs, single responses, prompts, ...
- The keyword arguments are its options. `loss.KEY=VALUE` is checked against their types and, with
  `Annotated[float, Option(...)]`, their ranges before anything is loaded; config/loss/<name>.yaml gives their values.
- An input with reference log-probs makes the loss need a reference, unless its option `reference_free` is true, or
  `@register_loss(..., reference=False)` says that it never reads them.
- `metrics` names what it reports beside its losses.
- `step_wide` losses compare examples with each other: they are given all examples of a step, over all micro-batches and
  ranks, and of an evaluation all that there are. So the update does not depend on how a step is cut up.
- `memory` names numbers that a step-wide loss keeps from one training step to the next, with their first values. It is
  given them as its keyword `memory` and returns the new ones. They are part of a run's saved state.
- `start` is the loss's value while the policy still is the reference, for the report; it may be left out.

torch is not imported here: the command line is checked without it.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from losses.inputs import INPUTS, Inputs, Metric, PairLogps, UnpairedLogps

# Metrics that `PairLogps.rewards` and `UnpairedLogps.rewards` give.
PAIR_REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
UNPAIRED_REWARDS = ("rewards/chosen", "rewards/rejected")

# Types of options, beside Literal.
OPTION_TYPES = (float, int, bool, str)


@dataclass
class LossOutput:
    """What a loss returns.

    Attributes:
        losses: [E], one an example, with gradient.
        metrics: name -> values [E], or (values [E], weights [E]) where a metric is of some examples only.
            "rewards/chosen" is logged as rewards_train/chosen and rewards_eval/chosen, a plain name such as "kl" as
            kl/train and kl/eval.
        memory: name -> new value, tensors [] without gradient, of a loss that is registered with a memory.
    """

    losses: Any
    metrics: dict[str, Metric] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Option:
    """An option of a loss. In an annotation, `Annotated[float, Option("what it does", low=0)]`, it adds what the type
    leaves out: the meaning in a few words, and bounds, which are allowed values themselves unless `open`. `only_with`
    names another option and the value of it without which this one is not read.
    """

    meaning: str = ""
    low: float | None = None
    high: float | None = None
    open: bool = False
    only_with: tuple[str, Any] | None = None
    # What the signature says:
    type: Any = None  # float, int, bool or str
    choices: tuple = ()
    required: bool = True
    default: Any = None


# An option of every loss that knows chosen responses.
SFT_WEIGHT = Option("weight of the likelihood of chosen responses", low=0, type=float, required=False, default=0.0)


@dataclass(frozen=True)
class Start:
    """Where a loss starts: its value where the policy has the reference's log-probs, and the formula of that value."""

    value: float
    formula: str


@dataclass(frozen=True)
class Loss:
    """A registered loss.

    Attributes:
        function: (input, **options) -> LossOutput; of a loss that is made of others, only `build` is called.
        inputs: the class of its input, one of inputs.INPUTS; `inputs.kind` names the kind of example it is of.
        reads_reference: whether it ever reads the reference's log-probs.
        metrics: names of the metrics that it reports, in order.
        options: its options by name.
        start: (**options) -> Start; None if the value depends on the data.
        step_wide: whether it is given all examples of a step at once.
        memory: first values of what it keeps from step to step.
        build: options -> the loss, of one that is made of others; None of all others.
    """

    name: str
    function: Callable[..., Any]
    inputs: type[Inputs]
    reads_reference: bool
    metrics: tuple[str, ...]
    options: dict[str, Option]
    start: Callable[..., Start] | None = None
    step_wide: bool = False
    memory: dict[str, float] = field(default_factory=dict)
    build: Callable[[Mapping[str, Any]], Loss] | None = None

    def __call__(self, inputs, sft_weight: float = 0.0, **options) -> LossOutput:
        """Losses and metrics of E examples.

        Args:
            sft_weight: what the mean negative log-likelihood of a chosen response's tokens weighs beside the loss
                (RPO, arXiv 2404.19733); with its own metric "sft".
        Raises:
            ValueError: the function did not return a LossOutput of tensors [E] with the metrics that it declared.
        """
        output = self._checked_output(inputs, options)
        if sft_weight:
            nll, weights = inputs.chosen_nll()
            output.losses = output.losses + sft_weight * nll
            output.metrics |= {"sft": nll.detach() if weights is None else (nll.detach(), weights)}
        return output

    def _checked_output(self, inputs, options: Mapping[str, Any]) -> LossOutput:
        output = self.function(inputs, **options)
        if not isinstance(output, LossOutput):
            raise ValueError(f"loss={self.name} returned a {type(output).__name__}: it must return a LossOutput.")
        if tuple(output.metrics) != self.metrics:
            raise ValueError(
                f"loss={self.name} returned the metrics {', '.join(output.metrics) or 'none'}, but is registered with "
                f"{', '.join(self.metrics) or 'none'}: name them in order with @register_loss(..., metrics=...)."
            )
        if output.memory.keys() != self.memory.keys():
            raise ValueError(
                f"loss={self.name} returned the memory {', '.join(output.memory) or 'none'}, but is registered with "
                f"{', '.join(self.memory) or 'none'}."
            )
        tensors = {"losses": output.losses}
        for metric, value in output.metrics.items():
            tensors |= dict(zip((metric, f"weights of {metric}"), value if isinstance(value, tuple) else (value,)))
        for what, value in tensors.items():
            shape = getattr(value, "shape", None)
            if shape is None or len(shape) != 1 or len(value) != inputs.n_examples:
                found = type(value).__name__ if shape is None else f"shape {list(shape)}"
                raise ValueError(
                    f"loss={self.name}: its {what} must be a tensor of one number an example, shape "
                    f"[{inputs.n_examples}], not {found}."
                )
        return output

    def needs_reference(self, options: Mapping[str, Any]) -> bool:
        """Whether log-probs of a reference are to be computed, given the loss's options."""
        return self.reads_reference and not options.get("reference_free", False)

    def metric_names(self, split: str, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Names under which this loss is logged for a split ("train" or "eval"), its loss first."""
        sft = ("sft",) if options.get("sft_weight") else ()
        names = ("loss", *self.metrics, *sft, *self.inputs.own_metrics)
        return tuple(metric_name(name, split) for name in names)

    def starting_point(self, options: Mapping[str, Any]) -> Start | None:
        """Where the loss starts with these options; None if that depends on the data or the policy."""
        if self.start is None or options.get("sft_weight") or not self.needs_reference(options):
            return None
        return self.start(**{name: value for name, value in options.items() if name != "sft_weight"})

    def check_options(self, given: Collection[str]) -> None:
        """Refuse options that the loss does not take, and miss those that it cannot do without.

        Raises:
            ValueError: with the key's name and the options that there are.
        """
        required = {name for name, option in self.options.items() if option.required}
        for keys, what in (
            (set(given) - set(self.options), "is a key that its function does not take"),
            (required - set(given), "is missing"),
        ):
            if keys:
                raise ValueError(
                    f"loss.{sorted(keys)[0]} {what}; loss={self.name} takes {', '.join(self.options) or 'no keys'}."
                )

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Refuse a value of an option that is not read beside the others.

        Raises:
            ValueError: with what to change.
        """
        for name, option in self.options.items():
            other, wanted = option.only_with or (None, None)
            if other is None or values.get(name, option.default) == option.default:
                continue
            if values.get(other, self.options[other].default) != wanted:
                raise ValueError(
                    f"loss.{name}={values[name]} has no effect without loss.{other}={wanted}: set that, or leave "
                    f"loss.{name} at {option.default}."
                )


def metric_name(name: str, split: str) -> str:
    """ "rewards/chosen" of "eval" -> "rewards_eval/chosen"; "loss" -> "loss/eval"."""
    group, _, leaf = name.partition("/")
    return f"{group}_{split}/{leaf}" if leaf else f"{group}/{split}"


LOSSES: dict[str, Loss] = {}
BROKEN: dict[str, Exception] = {}  # files of losses/ that could not be imported, and why


def register_loss(
    name: str,
    *,
    metrics: tuple[str, ...] | None = None,
    reference: bool | None = None,
    start: Callable[..., Start] | None = None,
    step_wide: bool = False,
    memory: Mapping[str, float] | None = None,
):
    """Decorator: makes a function available as `loss=<name>` (with a `config/loss/<name>.yaml` beside it).

    Args:
        metrics: names of the metrics that it returns, in order; None: those of `rewards` of its input, if it has any.
        reference: whether it reads the reference's log-probs; None: if its input has some.
        start: given the loss's options as keywords, where it starts while the policy is the reference.
        step_wide, memory: see the top of this file.
    Raises:
        ValueError: the first argument is not annotated with a class of inputs.py; an option has no type, or one that
            no value on the command line has; the name belongs to another function.
    """

    def add(function):
        known = LOSSES.get(name)
        if known is not None and _origin(known.function) != _origin(function):
            raise ValueError(
                f"loss={name} is registered already, by {'.'.join(_origin(known.function))}: give "
                f"{'.'.join(_origin(function))} another name."
            )
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())
        rest = [p for p in parameters[1:] if not (memory and p.name == "memory")]
        inputs = hints.get(parameters[0].name) if parameters else None
        if inputs not in INPUTS:
            raise ValueError(
                f"loss={name}: annotate the first argument of {function.__name__} with what it takes, one of "
                f"{', '.join(cls.__name__ for cls in INPUTS)}."
            )
        unnamed = next((p.name for p in rest if p.kind is not p.KEYWORD_ONLY), None)
        if unnamed:
            raise ValueError(f"loss={name}: put its option {unnamed} behind a *, so that it is given by name.")
        untyped = next((p.name for p in rest if p.kind is p.KEYWORD_ONLY and p.name not in hints), None)
        if untyped:
            raise ValueError(f"loss={name}: annotate its option {untyped} with a type, such as {untyped}: float.")
        if isinstance(metrics, str):
            raise ValueError(f"loss={name}: give metrics as a tuple, metrics=({metrics!r},).")
        if memory and not step_wide:
            raise ValueError(f"loss={name}: only a step-wide loss has a memory; register it with step_wide=True.")
        if "sft_weight" in (p.name for p in rest):
            raise ValueError(f"loss={name}: sft_weight is an option of every loss already; give its own another name.")
        taken = {"loss", "sft", *inputs.own_metrics} & set(metrics or ())
        if taken:
            raise ValueError(
                f"loss={name}: every loss of {inputs.__name__} reports {', '.join(sorted(taken))} already; give its "
                "own metric another name."
            )
        usual: tuple[str, ...] = ()
        for base, rewards in ((PairLogps, PAIR_REWARDS), (UnpairedLogps, UNPAIRED_REWARDS)):
            usual = rewards if issubclass(inputs, base) else usual
        has_reference = any("reference" in field.name for field in dataclasses.fields(inputs))
        options = {p.name: _option(name, p, hints) for p in rest if p.kind is p.KEYWORD_ONLY}
        if inputs.has_chosen:
            options["sft_weight"] = SFT_WEIGHT
        LOSSES[name] = Loss(
            name,
            function,
            inputs,
            has_reference if reference is None else reference,
            usual if metrics is None else metrics,
            options,
            start,
            step_wide,
            dict(memory or {}),
        )
        return function

    return add


def _origin(function: Callable) -> tuple[str, str]:
    """Module and name of a function: a module that is imported a second time makes equal ones."""
    return function.__module__, function.__qualname__


def _option(loss: str, parameter: inspect.Parameter, hints: dict[str, Any]) -> Option:
    annotation, described = hints[parameter.name], Option()
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *more = typing.get_args(annotation)
        described = next((extra for extra in more if isinstance(extra, Option)), described)
    choices: tuple = ()
    if typing.get_origin(annotation) is typing.Literal:
        choices, annotation = typing.get_args(annotation), str
    elif annotation not in OPTION_TYPES:
        raise ValueError(
            f"loss={loss}: its option {parameter.name} is a {getattr(annotation, '__name__', annotation)}; "
            "give it one of the types float, int, bool or str, or a Literal of its values."
        )
    required = parameter.default is parameter.empty
    return dataclasses.replace(
        described, type=annotation, choices=choices, required=required, default=None if required else parameter.default
    )


def find_loss(name: str, options: Mapping[str, Any] | None = None) -> Loss:
    """The loss of that name; given the run's options, as these make it where it is made of others.

    Raises:
        ValueError: it has a yaml, but no function; a file of losses/ cannot be imported; or its parts do not fit.
    """
    for file, error in BROKEN.items():
        raise ValueError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    if name not in LOSSES:
        raise ValueError(
            f"loss={name} has a file in config/loss, but no module in losses/ has @register_loss({name!r})."
        )
    loss = LOSSES[name]
    return loss if loss.build is None or options is None else loss.build(options)
