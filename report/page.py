"""report.html: a finished or running run on one page that needs nothing but itself.

    python -m report.page RUN_FOLDER [--earlier RUN_FOLDER ...]

It is made of the run folder's config.yaml, metrics.jsonl, samples.jsonl and notices.jsonl; whatever is missing is left
out. This file prepares what the page shows, and templates/ has its HTML. All text in it comes from models, data and
settings, and is escaped. The page refers to nothing outside itself, and a Content-Security-Policy in its head keeps it
so.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from atomic_files import write_atomically
from report.changed_settings import changed_settings
from report.charts import chart
from report.curves import Card, cards
from report.formatting import duration, metric_dataset, short, well_formed
from report.recorded_run import Run, earlier_stages

TEMPLATES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates")
MOST_MARKS, MOST_PROMPTS = 200, 16


def write_report(run_dir: str, earlier: list[str] | None = None) -> str:
    """Write run_dir/report.html and return its path.

    Args:
        earlier: run folders of the stages before, oldest first, shown in sections of their own. None takes the run that
            `model.archive` points to, and so on back.
    Raises:
        ValueError: run_dir is not a folder with metrics.
    """
    run = Run(run_dir)
    if not run.metrics and not run.config:
        raise ValueError(f"{run_dir} holds neither metrics.jsonl nor config.yaml: give the folder of a run")
    stages = [Run(folder) for folder in (earlier if earlier is not None else earlier_stages(run))]
    path = os.path.join(run_dir, "report.html")
    write_atomically(path, well_formed(render(run, stages)).encode(), durable=False)
    return path


def page_template(name: str) -> Template:
    """A template of the folder templates/, which escapes what it is given; `style` is the style sheet of all pages."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": short, "chart": draw}
    with open(os.path.join(TEMPLATES, "report.css"), encoding="utf-8") as file:
        environment.globals["style"] = Markup(file.read())
    return environment.get_template(name)


def render(run: Run, stages: list[Run]) -> str:
    """The page of a run and of the stages before it, oldest first."""
    return page_template("page.html").render(
        title=run.name,
        folder=run.folder,
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        run=sections(run, stages),
        stages=[sections(stage, []) for stage in stages],
        settings=settings(run),
    )


def draw(card: Card) -> Markup:
    """A card's chart; charts.py escapes the texts in it."""
    return Markup(chart(card.series, level=card.level, fixed=card.fixed))


def sections(run: Run, stages: list[Run]) -> dict[str, Any]:
    """What the templates show of one run, under the names that they use."""
    curves, more_curves = cards(run)
    return {
        **header(run),
        "tiles": tiles(run, stages),
        "notices": [str(row.get("text", "")) for row in run.notices if row.get("kind") == "notice"],
        "marked": [(row["examples"], str(row["marks"])) for row in run.metrics if row.get("marks")],
        "most_marks": MOST_MARKS,
        "curves": curves,
        "more_curves": more_curves,
        "by_dataset": by_dataset(run),
        "samples": samples(run),
        "counts": counts(run),
    }


def header(run: Run) -> dict[str, Any]:
    """Name, state and facts of a run."""
    end = run.end()
    message = str(end.get("message") or "")
    state, word = ("good", "finished") if end.get("ok") else ("bad", "failed") if end else ("idle", "not finished")
    if word == "failed" and message.startswith(("SystemExit", "KeyboardInterrupt")):
        state, word = "idle", "stopped"  # by a signal, to be resumed
    model = run.config.get("model") or {}
    name, archive = model.get("name_or_path"), model.get("archive")
    facts = [
        ("model", f"{name} from {archive}" if archive else name),
        ("loss", run.loss),
        ("data", ", ".join(map(str, run.config.get("datasets") or []))),
        ("trainer", run.config.get("trainer")),
    ]
    times = [row["time"] for row in run.metrics if isinstance(row.get("time"), (int, float))]
    if times:
        facts.append(("started", time.strftime("%Y-%m-%d %H:%M", time.localtime(times[0]))))
        facts.append(("wall time", duration(max(times) - times[0])))
    return {
        "name": run.name,
        "state": state,
        "state_word": word,
        "message": message,
        "facts": [(what, str(value)) for what, value in facts if value],
    }


@dataclass
class Tile:
    """A number that a reader looks for first; `first`, `change` and `kind` where it is the last of several."""

    title: str
    value: str
    first: str = ""
    change: str = ""
    kind: str = ""  # good, bad or same


def tiles(run: Run, stages: list[Run]) -> list[Tile]:
    found = []
    for stage in [*stages, run]:
        prefix = f"{stage.loss.upper()}: " if stages and stage.loss else ""
        for name, title, better in (
            ("rewards_eval/accuracies", "reward accuracy, held out", 1),
            ("loss/eval", "loss, held out", -1),
            ("rewards_eval/margins", "reward margin, held out", 1),
        ):
            ends = stage.ends(name)
            if ends:
                found.append(_change_tile(prefix + title, name, ends, better))
    last = run.metrics[-1] if run.metrics else {}
    for title, value in (
        ("examples", f"{last['examples']:,.0f}" if last else None),
        ("updates", f"{last['updates']:,.0f}" if isinstance(last.get("updates"), (int, float)) else None),
        ("examples per second, median", _median(run, "examples_per_second")),
        ("tokens per second, median", _median(run, "tokens_per_second")),
    ):
        if value:
            found.append(Tile(title, value))
    return found


def _change_tile(title: str, name: str, ends: tuple[float, float], better: int) -> Tile:
    first, last = (_result(name, value) for value in ends)
    change = ends[1] - ends[0]
    kind = "same" if abs(change) < 1e-9 else "good" if change * better > 0 else "bad"
    moved = f"{change * 100:+.1f} pts" if name.endswith("accuracies") else f"{change:+.4f}"
    return Tile(title, last, first, moved, kind)


def _result(name: str, value: float) -> str:
    return f"{value:.1%}" if name.endswith("accuracies") else f"{value:.4f}"


def _median(run: Run, name: str) -> str | None:
    values = sorted(value for _, value in run.points(name))
    return short(values[len(values) // 2]) if values else None


def by_dataset(run: Run) -> dict[str, Any] | None:
    """First and last evaluation of each data set, where there are several: {"titles", "rows"}."""
    table: dict[str, dict[str, tuple[str, str]]] = {}
    for name in run.names():
        base, dataset = metric_dataset(name, "eval") or ("", "")
        ends = run.ends(name)
        if dataset and ends:
            table.setdefault(dataset, {})[base] = (_result(base, ends[0]), _result(base, ends[1]))
    if len(table) < 2:
        return None
    titles = {
        "loss/eval": "loss",
        "rewards_eval/accuracies": "reward accuracy",
        "rewards_eval/margins": "reward margin",
    }
    shown = {base: title for base, title in titles.items() if any(base in row for row in table.values())}
    return {
        "titles": list(shown.values()),
        "rows": [(dataset, [row.get(base) for base in shown]) for dataset, row in sorted(table.items())],
    }


def samples(run: Run) -> list[dict[str, Any]]:
    """For each prompt the policy's first and last continuation, and the reference's: {"prompt", "dataset", "texts"}."""
    prompts: dict[str, list[dict[str, Any]]] = {}
    for row in run.samples:
        prompts.setdefault(str(row.get("prompt", "")), []).append(row)
    found = []
    for prompt, rows in list(prompts.items())[:MOST_PROMPTS]:
        first, last = rows[0], rows[-1]
        texts = [(f"policy at {first.get('examples', 0):,} examples", first.get("policy"))]
        if last is not first:
            texts.append((f"policy at {last.get('examples', 0):,} examples", last.get("policy")))
        texts.append(("reference", last.get("reference")))
        shown = [(title, str(text)) for title, text in texts if text is not None]
        found.append({"prompt": prompt, "dataset": str(first.get("dataset") or ""), "texts": shown})
    return found


def counts(run: Run) -> dict[str, Any] | None:
    """Rows read, dropped and cut, by data set: {"names", "rows"}."""
    rows = {(r.get("dataset"), r.get("split")): r.get("counts") or {} for r in run.notices if r.get("kind") == "counts"}
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows.values() for name, value in row.items() if value))
    names.sort(key=lambda name: name != "rows")  # what was read comes first
    return {
        "names": [str(name).replace("_", " ") for name in names],
        "rows": [
            (dataset, split, [f"{row.get(name, 0):,}" for name in names]) for (dataset, split), row in rows.items()
        ],
    }


def settings(run: Run) -> dict[str, Any] | None:
    """{"changed": (key, value, default) a setting that is not the default, "all": the whole as YAML}."""
    if not run.config:
        return None
    return {
        "changed": [(str(key), _yaml(value), _yaml(usual)) for key, value, usual in changed_settings(run.config)],
        "all": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
    }


def _yaml(value: Any) -> str:
    if value is None or value == "???":  # OmegaConf's mark of a value that must be given
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write report.html of a run folder.")
    parser.add_argument("run_dir", help="the run's folder")
    parser.add_argument(
        "--earlier", nargs="*", help="run folders of the stages before it; default: where model.archive leads"
    )
    arguments = parser.parse_args()
    try:
        print(write_report(arguments.run_dir, arguments.earlier))
    except ValueError as error:
        raise SystemExit(str(error)) from None
