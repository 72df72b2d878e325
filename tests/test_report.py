"""report.html: complete, self-contained, and safe to open whatever a model or a data file wrote."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from report.changed_settings import changed_settings
from report.charts import MOST_POINTS, Series, chart, thin
from report.page import write_report
from report.recorded_run import Run, earlier_stages

EVIL = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


def make_run(folder, loss="dpo", archive=None, rows=40, evil="", config=()):
    folder.mkdir(parents=True)
    settings = {"exp_name": f"{folder.name}{evil}", "lr": 1e-6, "datasets": ["hh" + evil], "loss": {"name": loss}}
    settings |= {"model": {"name_or_path": "tiny" + evil, "archive": archive}} | dict(config)
    if loss == "dpo":
        settings["loss"] |= {"beta": 0.1, "label_smoothing": 0, "reference_free": False}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(rows):
            row = {"examples": step * 32, "updates": step, "time": 1.8e9 + step, "loss/train": 0.7 - step / 400}
            row |= {
                "grad_norm": 20.0 + step % 5,
                "learning_rate": 1e-6,
                "custom" + evil: step / 3,
                "peak_memory_gib": 3.5,
            }
            if step % 10 == 0:
                row |= {"loss/eval": 0.693147 - step / 400, f"loss/eval/hh{evil}": 0.69, "loss/eval/shp": 0.68}
            if step % 10 == 0 and loss == "dpo":
                row |= {
                    "rewards_eval/accuracies": 0.5 + step / 300,
                    "rewards_eval/chosen": 0.1,
                    "rewards_eval/rejected": 0.0,
                }
            if step == 25:
                row |= {
                    "loss/train": "NaN",
                    "grad_norm": 900.0,
                    "marks": f"loss is nan; gradient norm spike: 900{evil}",
                }
            file.write(json.dumps(row) + "\n")
    with open(folder / "samples.jsonl", "w") as file:
        for examples, text in ((0, "early"), (640, "late")):
            for number in range(6):
                row = {"examples": examples, "prompt": f"prompt {number}{evil}", "policy": f"{text} {number}{evil}"}
                row |= {"reference": f"frozen {number}{evil}" if loss == "dpo" else None, "dataset": "hh" + evil}
                file.write(json.dumps(row) + "\n")
    with open(folder / "notices.jsonl", "w") as file:
        for row in (
            {"kind": "notice", "text": f"no GPU {evil}"},
            {
                "kind": "counts",
                "dataset": "hh" + evil,
                "split": "train",
                "counts": {"rows": 12345, "dropped_empty": 7, "cut": 0},
            },
            {"kind": "end", "ok": True, "message": f"done {evil}", "time": 1.9e9},
        ):
            file.write(json.dumps(row) + "\n")
    return folder


class Page(HTMLParser):
    """Checks that tags nest, and collects what would be loaded and what would run."""

    VOID = {"meta", "br", "img", "link", "input"}

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(path):
    return Page(Path(path).read_text(encoding="utf-8"))


def test_shows_what_a_reader_looks_for(tmp_path):
    page = read(write_report(str(make_run(tmp_path / "run"))))
    for words in ("60.0%", "from 50.0%", "0.6181", "from 0.6931", "ln 2", "finished", "no GPU", "12,345"):
        assert words in page.text, words
    for words in (
        "dropped empty",
        "prompt 0",
        "early 0",
        "late 0",
        "frozen 0",
        "policy at 640 examples",
        "1 unusual log lines",
    ):
        assert words in page.text, words
    assert page.tags.count("svg") == 7  # loss, accuracy, rewards, gradient, rate, memory, and `custom` folded away
    assert page.tags.count("article") == 6


def test_everything_is_escaped_and_nothing_is_loaded(tmp_path):
    earlier = make_run(tmp_path / "sft", "sft", evil=EVIL)
    path = write_report(str(make_run(tmp_path / "run", evil=EVIL)), earlier=[str(earlier)])
    page = read(path)
    assert not {"script", "img", "link", "iframe", "object", "a"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on") and name not in ("src", "href", "action", "background"), (tag, name, value)
        assert "url(" not in value
    html = Path(path).read_text()
    assert "url(" not in html and "@import" not in html and not re.search(r"(?:https?:)?//\w", html)
    assert "default-src 'none'" in html
    assert page.text.count(EVIL) > 30  # the text is shown as it is


def test_earlier_stages_are_found_and_shown(tmp_path):
    make_run(tmp_path / "sft", "sft")
    run = make_run(tmp_path / "dpo", archive=str(tmp_path / "sft" / "step-640" / "policy.pt"))
    page = read(write_report(str(run)))
    assert "Stage 1" in page.text and "SFT: loss, held out" in page.text and "DPO: reward accuracy" in page.text
    assert "Stage 1" not in read(write_report(str(run), earlier=[])).text


def test_earlier_stages_end_in_a_loop_and_at_foreign_archives(tmp_path):
    one = make_run(tmp_path / "one", archive=str(tmp_path / "two"))
    make_run(tmp_path / "two", archive=str(tmp_path / "one"))
    assert earlier_stages(Run(str(one))) == [str(tmp_path / "two")]
    assert earlier_stages(Run(str(make_run(tmp_path / "x", archive="/nowhere/policy.pt")))) == []


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl", "samples.jsonl", "notices.jsonl"])
def test_a_missing_file_leaves_out_its_part_only(tmp_path, missing):
    run = make_run(tmp_path / "run")
    (run / missing).unlink()
    assert len(read(write_report(str(run))).text) > 500


def test_odd_runs(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ValueError, match="give the folder of a run"):
        write_report(str(run))
    (run / "metrics.jsonl").write_text(
        '{"examples": 0, "loss/train": "Infinity"}\n{"examples": 5, "loss/train": 0.5}\n{"loss'
    )
    (run / "samples.jsonl").write_text('{"policy": "\\ud800"}\n')
    (run / "config.yaml").write_text("{broken")
    page = read(write_report(str(run)))
    assert "not finished" in page.text and page.tags.count("svg") == 1
    command = [sys.executable, "-m", "report.page", str(run)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().endswith("report.html")
    broken = subprocess.run([*command[:3], str(tmp_path)], capture_output=True, text=True)
    assert broken.returncode == 1 and "Traceback" not in broken.stderr


def test_a_failed_run_that_was_resumed_is_not_called_failed(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "notices.jsonl").write_text('{"kind": "end", "ok": false, "message": "killed", "time": 1.8e9}\n')
    assert "not finished" in read(write_report(str(run))).text


def test_where_the_loss_of_ipo_starts(tmp_path):
    run = make_run(tmp_path / "run", "ipo", config={"loss": {"name": "ipo", "beta": 0.1}})
    assert "= 25" in read(write_report(str(run))).text
    for odd in ("ten", 0, None):
        run = make_run(tmp_path / f"{odd}", "ipo", config={"loss": {"name": "ipo", "beta": odd}})
        assert "(2 beta)" not in read(write_report(str(run))).text


def test_changed_settings(tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "config.yaml").write_text(
        "defaults: [{loss: sft}, _self_]\nlr: 5e-7\neval_every: 20_000\ndata: {paths: {}, x: 1}\nz: null\n"
    )
    (tmp_path / "loss" / "sft.yaml").write_text("name: sft\n")
    (tmp_path / "loss" / "dpo.yaml").write_text("name: dpo\nbeta: 0.1\nrate: ${lr}\n")
    same = {"lr": 5e-7, "eval_every": 20000, "data": {"paths": {}, "x": 1}, "loss": {"name": "sft"}, "z": None}
    assert changed_settings(same, str(tmp_path)) == []
    other = same | {
        "lr": 1e-6,
        "data": {"paths": {"hh": "/x"}, "x": 2},
        "loss": {"name": "dpo", "beta": 0.2, "rate": 5e-7},
        "new": 1,
    }
    assert changed_settings(other, str(tmp_path)) == [
        ("lr", 1e-6, "5e-7"),
        ("data.paths", {"hh": "/x"}, {}),
        ("data.x", 2, 1),
        ("loss", "dpo", "sft"),
        ("loss.beta", 0.2, 0.1),
        ("new", 1, None),
    ]


# -- charts -----------------------------------------------------------------------------------------------------------


def numbers(svg, attribute):
    return [float(value) for value in re.findall(rf'{attribute}="(-?[\d.]+)"', svg)]


def test_points_lie_at_their_values():
    svg = chart([Series("x", [(0, 0.0), (50, 0.5), (100, 1.0)], dots=True)], fixed=(0, 1))
    assert numbers(svg, "cx") == pytest.approx([50, 239, 428]) and numbers(svg, "cy") == pytest.approx([196, 103, 10])


@pytest.mark.parametrize(
    "points",
    [
        [(0, 1.0)],
        [(5, 0.0), (5, 0.0)],
        [(0, -1e-9), (1, 1e9)],
        [(i, 2.0) for i in range(500)],
        [(i, 10.0**i) for i in range(40)],
    ],
)
def test_charts_stay_inside_their_frame(points):
    svg = chart([Series("x", points, dots=True, marks=[(*points[-1], "spike")])], level=(0.693, "ln 2"))
    assert "nan" not in svg and "inf" not in svg
    assert all(0 <= x <= 440 for x in numbers(svg, "cx")) and all(0 <= y <= 230 for y in numbers(svg, "cy"))


def test_a_spike_does_not_flatten_the_curve():
    calm = [(float(i), 0.6 + 0.1 * math.sin(i)) for i in range(100)]
    calm[50] = (50.0, 40.0)
    heights = numbers(chart([Series("x", calm, dots=True)]), "cy")
    assert max(heights) - sorted(heights)[1] > 40


def test_long_curves_are_thinned_without_losing_extremes():
    points = [(float(i), float(i % 7)) for i in range(10_000)]
    points[3333] = (3333.0, 99.0)
    means, bands = thin(points)
    assert len(means) == len(bands) == MOST_POINTS and max(most for _, _, most in bands) == 99.0
    assert sum(y for _, y in means) / len(means) == pytest.approx(sum(y for _, y in points) / len(points), rel=1e-3)
    assert thin(points[:5]) == (points[:5], [])
