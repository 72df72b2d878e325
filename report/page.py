"""report.html: a finished or running run on one page that needs nothing but itself.

    python -m report.page RUN_FOLDER [--earlier RUN_FOLDER ...]

It is drawn from the run folder's config.yaml, metrics.jsonl, samples.jsonl and notices.jsonl; whatever is missing is
left out. All text in it comes from models, data and settings, and is escaped. The page refers to nothing outside
itself, and a Content-Security-Policy in its head keeps it so.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from html import escape
from typing import Any

import yaml

from report.charts import Series, chart, legend
from report.formatting import duration, metric_dataset, short, well_formed
from utils import PROJECT_DIR, read_json_lines, write_atomically

HERE = os.path.dirname(os.path.abspath(__file__))


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
    write_atomically(path, well_formed(page(run, stages)).encode(), durable=False)
    return path


class Run:
    """What a run folder tells."""

    def __init__(self, folder: str):
        self.folder = folder
        self.config = _read_yaml(os.path.join(folder, "config.yaml"))
        self.metrics = [
            {name: value if name == "marks" else _float(value) for name, value in row.items()}
            for row in read_json_lines(os.path.join(folder, "metrics.jsonl"))
        ]
        self.metrics = [row for row in self.metrics if isinstance(row.get("examples"), (int, float))]
        self.samples = read_json_lines(os.path.join(folder, "samples.jsonl"))
        self.notices = read_json_lines(os.path.join(folder, "notices.jsonl"))

    @property
    def name(self) -> str:
        return str(self.config.get("exp_name") or os.path.basename(os.path.normpath(self.folder)))

    @property
    def loss(self) -> str:
        return str((self.config.get("loss") or {}).get("name", ""))

    def points(self, name: str) -> list[tuple[float, float]]:
        """(examples, value) of a metric, where it is a finite number."""
        pairs = ((row["examples"], row.get(name)) for row in self.metrics)
        return [(x, y) for x, y in pairs if isinstance(y, (int, float)) and math.isfinite(y)]

    def ends(self, name: str) -> tuple[float, float] | None:
        points = self.points(name)
        return (points[0][1], points[-1][1]) if points else None

    def names(self) -> list[str]:
        """All metric names, in the order of their first appearance."""
        return [
            n
            for n in dict.fromkeys(n for row in self.metrics for n in row)
            if n not in ("examples", "updates", "time", "marks")
        ]

    def end(self) -> dict[str, Any]:
        """The last thing said about its end: {} while it runs, or if it was killed."""
        last = [row for row in self.notices if row.get("kind") == "end"]
        newer = self.metrics and last and (self.metrics[-1].get("time") or 0) > last[-1].get("time", 0) + 1
        return last[-1] if last and not newer else {}


def earlier_stages(run: Run, most: int = 5) -> list[str]:
    """The folders of the runs that this one started from, oldest first: model.archive names the last of them."""
    folders: list[str] = []
    seen = {os.path.realpath(run.folder)}
    while len(folders) < most:
        folder = str((run.config.get("model") or {}).get("archive") or "")
        for _ in range(2):  # RUN, RUN/step-N and RUN/step-N/policy.pt are all archives
            if folder and not os.path.isfile(os.path.join(folder, "metrics.jsonl")):
                folder = os.path.dirname(folder)
        if not os.path.isfile(os.path.join(folder, "metrics.jsonl")) or os.path.realpath(folder) in seen:
            break
        seen.add(os.path.realpath(folder))
        folders.append(folder)
        run = Run(folder)
    return folders[::-1]


# -- the page ---------------------------------------------------------------------------------------------------------


def page(run: Run, stages: list[Run]) -> str:
    title = escape(run.name)
    body = [header(run), tiles(run, stages), notices(run), curves(run), by_dataset(run), samples(run), counts(run)]
    for number, stage in enumerate(stages, start=1):
        inner = header(stage, level=2) + tiles(stage, []) + curves(stage) + samples(stage)
        body.append(f'<section class="stage"><p class="eyebrow">Stage {number}, before this one</p>{inner}</section>')
    body.append(settings(run))
    made = time.strftime("%Y-%m-%d %H:%M:%S")
    with open(os.path.join(HERE, "report.css"), encoding="utf-8") as file:
        style = file.read()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>{style}</style></head>
<body><main>{"".join(body)}<footer>Written {made} from {escape(run.folder)}</footer></main></body></html>
"""


def header(run: Run, level: int = 1) -> str:
    end = run.end()
    message = str(end.get("message") or "")
    state, word = ("good", "finished") if end.get("ok") else ("bad", "failed") if end else ("idle", "not finished")
    if word == "failed" and message.startswith(("SystemExit", "KeyboardInterrupt")):
        state, word = "idle", "stopped"  # by a signal, to be resumed
    model = run.config.get("model") or {}
    facts = [
        (
            "model",
            model.get("archive")
            and f"{model.get('name_or_path')} from {model['archive']}"
            or model.get("name_or_path"),
        ),
        ("loss", run.loss),
        ("data", ", ".join(map(str, run.config.get("datasets") or []))),
        ("trainer", run.config.get("trainer")),
    ]
    times = [row["time"] for row in run.metrics if isinstance(row.get("time"), (int, float))]
    if times:
        facts.append(("started", time.strftime("%Y-%m-%d %H:%M", time.localtime(times[0]))))
        facts.append(("wall time", duration(max(times) - times[0])))
    shown = "".join(f"<span><em>{name}</em> {escape(str(value))}</span>" for name, value in facts if value)
    message = f'<p class="message">{escape(message)}</p>' if message else ""
    return (
        f'<header><h{level}>{escape(run.name)} <span class="chip {state}">{word}</span></h{level}>'
        f'<p class="facts">{shown}</p>{message}</header>'
    )


def tiles(run: Run, stages: list[Run]) -> str:
    """The numbers that a reader looks for first."""
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
                found.append(_change_tile(prefix + title, ends, better, percent=name.endswith("accuracies")))
    last = run.metrics[-1] if run.metrics else {}
    for title, value in (
        ("examples", f"{last['examples']:,.0f}" if last else None),
        ("updates", f"{last['updates']:,.0f}" if isinstance(last.get("updates"), (int, float)) else None),
        ("examples per second, median", _median(run, "examples_per_second")),
        ("tokens per second, median", _median(run, "tokens_per_second")),
    ):
        if value:
            found.append(f'<div class="tile"><p>{title}</p><strong>{value}</strong></div>')
    return f'<div class="tiles">{"".join(found)}</div>' if found else ""


def _change_tile(title: str, ends: tuple[float, float], better: int, percent: bool) -> str:
    first, last = (f"{value:.1%}" if percent else f"{value:.4f}" for value in ends)
    change = ends[1] - ends[0]
    kind = "same" if abs(change) < 1e-9 else "good" if change * better > 0 else "bad"
    moved = f"{change * 100:+.1f} pts" if percent else f"{change:+.4f}"
    return (
        f'<div class="tile"><p>{escape(title)}</p><strong>{last}</strong>'
        f'<small>from {first} <span class="{kind}">{moved}</span></small></div>'
    )


def _median(run: Run, name: str) -> str | None:
    values = sorted(value for _, value in run.points(name))
    return short(values[len(values) // 2]) if values else None


def notices(run: Run) -> str:
    texts = [row.get("text", "") for row in run.notices if row.get("kind") == "notice"]
    marked = [(row["examples"], row["marks"]) for row in run.metrics if row.get("marks")]
    items = [f"<li>{escape(str(text))}</li>" for text in texts]
    if marked:
        listed = "".join(f"<li>{examples:,.0f} examples: {escape(str(what))}</li>" for examples, what in marked[:200])
        items.append(
            f'<li class="plain"><details><summary>{len(marked)} unusual log lines</summary>'
            f"<ul>{listed}</ul></details></li>"
        )
    return f'<section><h2>Worth knowing</h2><ul class="notices">{"".join(items)}</ul></section>' if items else ""


def counts(run: Run) -> str:
    """Rows read, dropped and cut, by data set."""
    rows = {(r.get("dataset"), r.get("split")): r.get("counts") or {} for r in run.notices if r.get("kind") == "counts"}
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows.values() for name, value in row.items() if value))
    names.sort(key=lambda name: name != "rows")  # what was read comes first
    head = "".join(f"<th>{escape(str(name).replace('_', ' '))}</th>" for name in names)
    body = "".join(
        f"<tr><th>{escape(str(dataset))}</th><td>{escape(str(split))}</td>"
        + "".join(f"<td>{row.get(name, 0):,}</td>" for name in names)
        + "</tr>"
        for (dataset, split), row in rows.items()
    )
    return (
        f"<section><h2>Data</h2><p>What was read, and what was dropped or cut before training.</p>"
        f'<div class="wide"><table><tr><th></th><th></th>{head}</tr>{body}</table></div></section>'
    )


# -- charts -----------------------------------------------------------------------------------------------------------


def curves(run: Run) -> str:
    """The charts of everything that was measured, the ones that matter first, the rest folded away."""
    config = run.config.get("loss") or {}
    beta = config.get("beta")
    level, start = None, ""
    if run.loss == "dpo" and not config.get("reference_free"):
        level = (math.log(2), "ln 2")
        start = " It starts at ln 2 = 0.693, where the policy still is the reference, and falls."
    elif run.loss == "ipo" and isinstance(beta, (int, float)) and beta > 0:
        value = 1 / (2 * beta) ** 2
        level = (value, f"start {short(value)}")
        start = (
            f" It starts at 1 / (2 beta)&sup2; = {short(value)}, where the policy still is the reference, and falls."
        )
    elif run.loss == "sft":
        start = " Negative log-probability of a response token; on text like its own a good model is near 1 to 2."
    # metrics without _train or _eval, (title, what is normal, dashed line, fixed range)
    known = [
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
    cards, used = [], set()
    names = run.names()
    for bases, title, normal, line, fixed in known:
        found = [_eval_train(run, base, len(bases) > 1, style) for style, base in enumerate(bases, start=1)]
        series = [one for pair in found for one in pair]
        used.update(
            f"{base}/{split}" if base == "loss" else base.replace(":", f"_{split}/")
            for base in bases
            for split in ("train", "eval")
        )
        if series:
            cards.append(_card(title, normal, series, line, fixed))
    single = [
        (
            lambda n: n == "grad_norm",
            "Gradient norm",
            "Before clipping. Lone spikes are clipped and harmless; steady growth is not.",
        ),
        (lambda n: n == "learning_rate", "Learning rate", "Warm-up, then the schedule."),
        (lambda n: n == "examples_per_second", "Examples per second", "Without evaluation and saving."),
        (lambda n: n == "tokens_per_second", "Tokens per second", "Tokens computed, each shared prompt once."),
        (lambda n: "memory" in n, "Peak memory", "The most that was in use on a device."),
        (lambda n: "length" in n, "Response length", "Tokens of a response."),
    ]
    for fits, title, normal in single:
        matching = [name for name in names if fits(name) and run.points(name)][:6]
        used.update(matching)
        series = [
            _series(run, name, title if len(matching) == 1 else name, style, dots="eval" in name)
            for style, name in enumerate(matching, start=1)
        ]
        if series:
            cards.append(_card(title, normal, series))
    rest = [
        _card(name, "", [_series(run, name, name, 1, dots="eval" in name)])
        for name in names
        if name not in used and not name.startswith("counters/") and run.points(name) and not _of_dataset(name)
    ]
    more = (
        f'<details><summary>{len(rest)} more measures</summary><div class="charts">{"".join(rest)}</div></details>'
        if rest
        else ""
    )
    return (
        f'<section><h2>Curves</h2><div class="charts">{"".join(cards)}</div>{more}</section>' if cards or rest else ""
    )


def _card(title: str, normal: str, series: list[Series], level=None, fixed=None) -> str:
    about = f"<p>{normal}</p>" if normal else ""
    picture = chart(series, level=level, fixed=fixed)
    return f'<figure><h3>{escape(title)}</h3>{about}<div class="keys">{legend(series)}</div>{picture}</figure>'


def _eval_train(run: Run, base: str, several: bool, style: int) -> list[Series]:
    """The curves of a metric in training and held out; a chart with several metrics gives each a colour of its own."""
    group, _, leaf = base.partition(":")
    found = []
    for split, word in (("train", "training"), ("eval", "held out")):
        name = f"{group}_{split}/{leaf}" if leaf else f"{group}/{split}"
        label = f"{leaf}, {word}" if several else word
        colour = style if several else (1 if split == "eval" else 3)
        if run.points(name):
            found.append(_series(run, name, label, colour, dots=split == "eval"))
    return found


def _series(run: Run, name: str, label: str, style: int, dots: bool) -> Series:
    word = {"loss/train": "loss", "grad_norm": "gradient norm"}.get(name)
    marks = []
    for row in run.metrics if word else ():
        said = [mark for mark in str(row.get("marks") or "").split("; ") if mark.startswith(word)]
        if said and isinstance(row.get(name), float) and math.isfinite(row[name]):
            marks.append((row["examples"], row[name], said[0]))
    return Series(label, run.points(name), style, dots, marks)


def _of_dataset(name: str) -> bool:
    return any((metric_dataset(name, split) or ("", ""))[1] for split in ("train", "eval"))


def by_dataset(run: Run) -> str:
    """First and last evaluation of each data set, where there are several."""
    table: dict[str, dict[str, tuple[float, float]]] = {}
    for name in run.names():
        base, dataset = metric_dataset(name, "eval") or ("", "")
        if dataset and run.points(name):
            table.setdefault(dataset, {})[base] = run.ends(name)
    if len(table) < 2:
        return ""
    titles = {
        "loss/eval": "loss",
        "rewards_eval/accuracies": "reward accuracy",
        "rewards_eval/margins": "reward margin",
    }
    shown = {base: title for base, title in titles.items() if any(base in row for row in table.values())}

    def cell(base: str, ends: tuple[float, float] | None) -> str:
        if ends is None:
            return "<td></td>"
        first, last = (f"{value:.1%}" if base.endswith("accuracies") else f"{value:.4f}" for value in ends)
        return f'<td>{first} <span class="arrow">&rarr;</span> <b>{last}</b></td>'

    head = "".join(f"<th>{title}</th>" for title in shown.values())
    body = "".join(
        f"<tr><th>{escape(dataset)}</th>{''.join(cell(base, row.get(base)) for base in shown)}</tr>"
        for dataset, row in sorted(table.items())
    )
    return (
        f"<section><h2>Held out, by data set</h2><p>First evaluation and last.</p>"
        f'<div class="wide"><table><tr><th></th>{head}</tr>{body}</table></div></section>'
    )


# -- samples ----------------------------------------------------------------------------------------------------------


def samples(run: Run, most: int = 16) -> str:
    """For each prompt the policy's first and last continuation, and the reference's."""
    prompts: dict[str, list[dict[str, Any]]] = {}
    for row in run.samples:
        prompts.setdefault(str(row.get("prompt", "")), []).append(row)
    cards = []
    for prompt, rows in list(prompts.items())[:most]:
        first, last = rows[0], rows[-1]
        columns = [(f"policy at {first.get('examples', 0):,} examples", first.get("policy"))]
        if last is not first:
            columns.append((f"policy at {last.get('examples', 0):,} examples", last.get("policy")))
        columns.append(("reference", last.get("reference")))
        boxes = "".join(
            f"<div><h4>{escape(title)}</h4><pre>{escape(str(text)) or '<i>(nothing)</i>'}</pre></div>"
            for title, text in columns
            if text is not None
        )
        origin = f' <span class="chip">{escape(str(first["dataset"]))}</span>' if first.get("dataset") else ""
        cards.append(
            f'<article><h4>prompt{origin}</h4><pre class="prompt">{escape(prompt)}</pre>'
            f'<div class="side">{boxes}</div></article>'
        )
    if not cards:
        return ""
    shown = "".join(cards[:4])
    folded = (
        f"<details><summary>{len(cards) - 4} more prompts</summary>{''.join(cards[4:])}</details>"
        if len(cards) > 4
        else ""
    )
    return f"<section><h2>Samples</h2><p>The same prompts, before and after.</p>{shown}{folded}</section>"


# -- settings ---------------------------------------------------------------------------------------------------------


def settings(run: Run) -> str:
    if not run.config:
        return ""
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(_yaml(value))}</td><td>{escape(_yaml(usual))}</td></tr>"
        for key, value, usual in changed_settings(run.config)
    )
    whole = escape(yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True))
    table = f'<div class="wide"><table class="left"><tr><th></th><th>here</th><th>default</th></tr>{rows}</table></div>'
    intro = "<p>What differs from the defaults.</p>" + table if rows else "<p>All settings are the defaults.</p>"
    everything = f"<details><summary>All settings</summary><pre>{whole}</pre></details>"
    return f"<section><h2>Settings</h2>{intro}{everything}</section>"


def changed_settings(
    config: dict[str, Any], config_dir: str = os.path.join(PROJECT_DIR, "config")
) -> list[tuple[str, Any, Any]]:
    """(key, value, default) of the settings that are not the defaults. The default of a config group is the option in
    it that the run is nearest to: choosing loss=dpo is shown as that one line, and then only what differs from
    dpo.yaml."""
    usual = _read_yaml(os.path.join(config_dir, "config.yaml"))
    chosen = {
        key: value for entry in usual.pop("defaults", []) if isinstance(entry, dict) for key, value in entry.items()
    }
    usual.pop("hydra", None)
    found: list[tuple[str, Any, Any]] = []
    for key, value in config.items():
        folder = os.path.join(config_dir, str(key))
        if key == "experiment" or key == "hydra":
            continue
        if isinstance(value, dict) and os.path.isdir(folder):
            options = {
                name[:-5]: _read_yaml(os.path.join(folder, name))
                for name in sorted(os.listdir(folder))
                if name.endswith(".yaml")
            }
            distances = {name: _differences(value, option, f"{key}.") for name, option in options.items()}
            if distances:
                best = min(distances, key=lambda name: (len(distances[name]), name != chosen.get(key)))
                if best != chosen.get(key):
                    found.append((key, best, chosen.get(key)))
                found += distances[best]
                continue
        found += _differences({key: value}, {key: usual.get(key)} if key in usual else {}, "")
    return found


def _differences(value: dict[str, Any], usual: dict[str, Any], prefix: str) -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for key in value:
        here, there = value[key], usual.get(key)
        if isinstance(here, dict) and isinstance(there, dict) and there:
            found += _differences(here, there, f"{prefix}{key}.")
        elif not _same(here, there) and "${" not in str(there):
            found.append((prefix + str(key), here, there))
    return found


def _same(here: Any, there: Any) -> bool:
    if here == there or (not here and not there and isinstance(here, (dict, list, type(None)))):
        return True
    try:  # YAML 1.1 reads 5e-7 as text, and 20_000 is a number
        return float(here) == float(str(there).replace("_", "")) and not isinstance(here, bool)
    except (TypeError, ValueError):
        return False


def _yaml(value: Any) -> str:
    if value is None or value == "???":  # OmegaConf's mark of a value that must be given
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            content = yaml.safe_load(file)
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _float(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


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
