"""Which metrics share a chart, under which title, with which words on what is normal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from losses import LOSSES, ResponseLogps
from report.charts import Series
from report.formatting import metric_dataset, short
from report.recorded_run import Run


@dataclass
class Card:
    """A chart and what stands above it."""

    title: str
    series: list[Series]
    normal: str = ""  # what a reader should expect to see
    level: tuple[float, str] | None = None  # a dashed line (value, label)
    fixed: tuple[float, float] | None = None  # range of the y axis


def cards(run: Run) -> tuple[list[Card], list[Card]]:
    """Cards of everything that was measured: those that matter first, and the rest, which is folded away."""
    found: list[Card] = []
    used: set[str] = set()
    for bases, title, normal, level, fixed in _known(run):
        pairs = [_eval_train(run, base, len(bases) > 1, style) for style, base in enumerate(bases, start=1)]
        series = [one for pair in pairs for one in pair]
        used.update(_name(base, split) for base in bases for split in ("train", "eval"))
        if series:
            found.append(Card(title, series, normal, level, fixed))
    names = run.names()
    for fits, title, normal in SINGLE:
        matching = [name for name in names if fits(name) and run.points(name)][:6]
        used.update(matching)
        series = [
            _series(run, name, title if len(matching) == 1 else name, style, dots="eval" in name)
            for style, name in enumerate(matching, start=1)
        ]
        if series:
            found.append(Card(title, series, normal))
    rest = [
        Card(name, [_series(run, name, name, 1, dots="eval" in name)])
        for name in names
        if name not in used and not name.startswith("counters/") and run.points(name) and not _of_dataset(name)
    ]
    return found, rest


# (which metrics, title, what is normal)
SINGLE = (
    (
        lambda name: name == "grad_norm",
        "Gradient norm",
        "Before clipping. Lone spikes are clipped and harmless; steady growth is not.",
    ),
    (lambda name: name == "learning_rate", "Learning rate", "Warm-up, then the schedule."),
    (lambda name: name == "examples_per_second", "Examples per second", "Without evaluation and saving."),
    (lambda name: name == "tokens_per_second", "Tokens per second", "Tokens computed, each shared prompt once."),
    (lambda name: "memory" in name, "Peak memory", "The most that was in use on a device."),
    (lambda name: "length" in name, "Response length", "Tokens of a response."),
)


def _known(run: Run) -> list[tuple]:
    """(metrics without _train or _eval, title, what is normal, dashed line, fixed range)."""
    level, start = _loss_start(run)
    return [
        (
            ("loss",),
            "Loss",
            f"Lower is better.{start} If the held-out loss turns up while the other falls, it overfits.",
            level,
            None,
        ),
        (
            ("rewards:accuracies",),
            "Reward accuracy",
            "Share of pairs whose chosen response has the higher reward; a tie counts one "
            "half, so it starts at 50%. 60 to 75% is usual on noisy human preferences.",
            (0.5, "chance"),
            (0, 1),
        ),
        (
            ("rewards:margins",),
            "Reward margin",
            "Chosen minus rejected reward. It starts at 0 and grows; how far depends on beta.",
            (0, ""),
            None,
        ),
        (
            ("rewards:chosen", "rewards:rejected"),
            "Rewards",
            "beta times the log-ratio of policy and reference. The "
            "chosen reward may fall as well: normal, as long as the rejected one falls faster.",
            (0, ""),
            None,
        ),
        (
            ("logps:chosen", "logps:rejected"),
            "Log-probabilities",
            "Of whole responses under the policy, in nats; longer responses "
            "are lower. A steep fall of both is a sign of too high a learning rate or too small a beta.",
            None,
            None,
        ),
    ]


def _loss_start(run: Run) -> tuple[tuple[float, str] | None, str]:
    """Where the loss starts: a dashed line, and words for it."""
    options = {name: value for name, value in (run.config.get("loss") or {}).items() if name != "name"}
    loss = LOSSES.get(run.loss)
    if loss is None:
        return None, ""
    if loss.inputs is ResponseLogps:
        return None, " Negative log-probability of a whole response, in nats; longer responses have more."
    try:
        start = loss.starting_point(options)
    except (TypeError, ArithmeticError):  # the folder's settings are not those of a run of ours
        return None, ""
    if start is None:
        return None, ""
    words = f" It starts at {start.formula} = {short(start.value)}, where the policy still is the reference, and falls."
    return (start.value, start.formula), words


def _eval_train(run: Run, base: str, several: bool, style: int) -> list[Series]:
    """The curves of a metric in training and held out; a chart with several metrics gives each a colour of its own."""
    found = []
    for split, word in (("train", "training"), ("eval", "held out")):
        name = _name(base, split)
        label = f"{base.partition(':')[2]}, {word}" if several else word
        colour = style if several else (1 if split == "eval" else 3)
        if run.points(name):
            found.append(_series(run, name, label, colour, dots=split == "eval"))
    return found


def _name(base: str, split: str) -> str:
    """rewards:chosen -> rewards_eval/chosen, loss -> loss/eval"""
    group, _, leaf = base.partition(":")
    return f"{group}_{split}/{leaf}" if leaf else f"{group}/{split}"


def _series(run: Run, name: str, label: str, style: int, dots: bool) -> Series:
    word = {"loss/train": "loss", "grad_norm": "gradient norm"}.get(name, "")
    marks = []
    for row in run.metrics if word else ():
        fitting = [mark for mark in str(row.get("marks") or "").split("; ") if mark.startswith(word)]
        if fitting and isinstance(row.get(name), float) and math.isfinite(row[name]):
            marks.append((row["examples"], row[name], fitting[0]))
    return Series(label, run.points(name), style, dots, marks)


def _of_dataset(name: str) -> bool:
    return any((metric_dataset(name, split) or ("", ""))[1] for split in ("train", "eval"))
