"""What evaluate.py leaves in its folder: metrics.json, evaluation.html, pairs.jsonl and samples for AlpacaEval."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

from atomic_files import write_atomically
from report import pair_figures
from report.charts import Series, chart
from report.formatting import well_formed
from report.page import page_template
from report.pair_figures import ScoredPairs

METRICS, PAGE, PAIRS = "metrics.json", "evaluation.html", "pairs.jsonl"
SHOWN_PAIRS, SHOWN_SAMPLES = 8, 16


@dataclass
class Evaluated:
    """What was found.

    Attributes:
        titles: what was evaluated, in words.
        pairs: of "policy" and, where two are compared, of "against".
        texts: number of a pair -> its prompt, chosen and rejected.
        samples: {"dataset", "prompt", <model>: text} a prompt.
        kl: of each text that the policy wrote, its log-prob less the reference's, nats; None where it is not known.
        notices: what came up on the way.
    """

    titles: dict[str, str]
    pairs: dict[str, ScoredPairs]
    texts: Callable[[int], dict[str, str]]
    samples: list[dict[str, str]] = field(default_factory=list)
    kl: np.ndarray | None = None
    notices: list[str] = field(default_factory=list)


def metrics_of(found: Evaluated) -> dict[str, Any]:
    """The content of metrics.json: every share and mean with its 95% interval, log-probs in nats."""
    policy = found.pairs["policy"]
    metrics: dict[str, Any] = {
        **found.titles,
        "pairs": len(policy),
        "prompts": len(np.unique(policy.prompt)),
        "beta": policy.beta,
        **pair_figures.figures(policy),
        "by_dataset": pair_figures.by_dataset(policy),
        "by_length": pair_figures.by_length(policy),
        "calibration": pair_figures.calibration(policy),
    }
    if found.kl is not None and len(found.kl):
        metrics["kl"] = pair_figures.average(found.kl, np.arange(len(found.kl)))
    if "against" in found.pairs:
        other = found.pairs["against"]
        metrics["against"] = pair_figures.figures(other)
        metrics["difference"] = pair_figures.comparison(policy, other)
    return metrics


def write(found: Evaluated, folder: str, show: Callable[[str], None]) -> float:
    """Write everything into a folder and show the result in a few lines; the accuracy."""
    metrics = metrics_of(found)

    def put(name: str, text: str) -> None:
        write_atomically(os.path.join(folder, name), well_formed(text).encode(), durable=False)

    put(METRICS, json.dumps(metrics, indent=1, ensure_ascii=False) + "\n")
    put(PAIRS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(found)))
    for model in [name for name in ("policy", "reference", "against") if any(name in row for row in found.samples)]:
        put(f"{model}_outputs.json", json.dumps(alpaca(found, model), indent=1, ensure_ascii=False) + "\n")
    put(PAGE, page(found, metrics, folder))
    for line in summary(metrics):
        show(line)
    show(f"written: {os.path.join(folder, PAGE)}")
    return float(metrics["accuracy"]["value"])


def rows(found: Evaluated) -> list[dict[str, Any]]:
    """A line for each pair: where it comes from, its lengths (tokens), margins and log-probs (nats)."""
    pairs, lines = found.pairs["policy"], []
    margins = {name: of.margins for name, of in found.pairs.items()}
    for number in range(len(pairs)):
        line: dict[str, Any] = {
            "dataset": pairs.names[pairs.dataset[number]],
            "row": int(pairs.row[number]),
            "chosen_tokens": int(pairs.chosen_lengths[number]),
            "rejected_tokens": int(pairs.rejected_lengths[number]),
            "margin": float(margins["policy"][number]),
            "chosen_logp": float(pairs.chosen[number]),
            "rejected_logp": float(pairs.rejected[number]),
        }
        if pairs.reference_chosen is not None and pairs.reference_rejected is not None:
            line["reference_chosen_logp"] = float(pairs.reference_chosen[number])
            line["reference_rejected_logp"] = float(pairs.reference_rejected[number])
        if "against" in margins:
            line["against_margin"] = float(margins["against"][number])
        lines.append(line)
    return lines


def alpaca(found: Evaluated, model: str) -> list[dict[str, str]]:
    """Texts of a model in the form that AlpacaEval reads as model_outputs or reference_outputs."""
    titles = {"against": "compared with"}
    generator = found.titles.get(titles.get(model, model), model)
    return [
        {"instruction": row["prompt"], "output": row[model], "generator": generator, "dataset": row["dataset"]}
        for row in found.samples
    ]


def interval(figure: dict, percent: bool = False) -> str:
    """0.6123 [0.58, 0.64], in words that a table shows."""

    def form(value: float) -> str:
        return f"{value:.1%}" if percent else f"{value:.4g}"

    if figure["low"] is None:
        return form(figure["value"])
    return f"{form(figure['value'])} [{form(figure['low'])}, {form(figure['high'])}]"


def summary(metrics: dict[str, Any]) -> list[str]:
    """The result in lines of at most 80 columns."""
    lines = [
        f"{metrics['pairs']:,} pairs of {metrics['prompts']:,} prompts; in brackets: 95% intervals",
        f"accuracy   {interval(metrics['accuracy'], percent=True)}",
        f"margin     {interval(metrics['margin'])}",
    ]
    if "kl" in metrics:
        lines.append(f"KL         {interval(metrics['kl'])} nats a text ({metrics['kl']['n']} texts)")
    lines.append(f"calibration error {metrics['calibration']['error']:.3f}")
    if "difference" in metrics:
        difference = metrics["difference"]
        lines += [
            f"compared with: accuracy {interval(metrics['against']['accuracy'], percent=True)}",
            f"difference     {interval(difference['accuracy'], percent=True)}, better on "
            f"{difference['better_prompts']:,} prompts,",
            f"               worse on {difference['worse_prompts']:,} (sign test: p = {difference['p_value']:.3g})",
        ]
    return lines


def page(found: Evaluated, metrics: dict[str, Any], folder: str) -> str:
    pairs = found.pairs["policy"]
    shown = pair_figures.most_telling(pairs, SHOWN_PAIRS)
    margins = pairs.margins
    return page_template("evaluation.html").render(
        titles=found.titles,
        metrics=metrics,
        interval=interval,
        summary=summary(metrics),
        tables=[("Data", metrics["by_dataset"]), ("Length of the responses", metrics["by_length"])],
        calibration=Markup(calibration_chart(metrics["calibration"])),
        wrong={
            kind: [
                {"dataset": pairs.names[pairs.dataset[n]], "row": int(pairs.row[n]), "margin": float(margins[n])}
                | found.texts(n)
                for n in numbers
            ]
            for kind, numbers in shown.items()
        },
        samples=found.samples[:SHOWN_SAMPLES],
        models=[name for name in ("policy", "reference", "against") if any(name in row for row in found.samples)],
        notices=found.notices,
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        folder=folder,
    )


def calibration_chart(calibration: dict[str, Any]) -> str:
    points = [(one["confidence"], one["accuracy"]) for one in calibration["bins"]]
    return chart(
        [
            Series("share that is right", points, style=1, dots=True),
            Series("perfectly calibrated", [(0.5, 0.5), (1.0, 1.0)], style=3),
        ],
        fixed=(0.0, 1.0),
        across="confidence",
    )
