"""A run reports each thing once, marks what is unusual, and goes on whatever its loggers do."""

import json
import math

import pytest
import torch

from report.logger import Logger
from report.loggers import LOGGERS
from report.reporter import Reporter
from report.spikes import SpikeWatch
from utils import World

QUIET = {"exp_name": "run", "wandb": {"enabled": False}}


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def lines(run_dir, name="metrics.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def test_other_ranks_are_silent(run_dir, capsys):
    reporter = Reporter(QUIET, run_dir, World(rank=1, size=2))
    reporter.log({"loss/train": 1.0}, 4, 1)
    reporter.notice("x")
    reporter.counts("hh", "train", {"rows": 1})
    reporter.samples(4, [{"prompt": "p", "policy": "a"}])
    with reporter.progress(10, "train", "pairs") as bar:
        bar.update(1, loss=1.0)
    reporter.load_state(reporter.state())
    reporter.finish(True)
    assert not run_dir.exists()
    assert capsys.readouterr() == ("", "")


def test_notices_are_reported_once_and_kept_over_a_resume(run_dir, capsys):
    first = Reporter(QUIET, run_dir)
    first.notice("no GPU")
    first.notice("no GPU")
    state = first.state()
    first.notice("after the checkpoint")
    assert capsys.readouterr().out.count("no GPU") == 1
    second = Reporter(QUIET, run_dir)
    second.load_state(state)
    second.notice("no GPU")
    assert second.notices == ["no GPU", "after the checkpoint"]
    assert [row["text"] for row in lines(run_dir, "notices.jsonl")] == ["no GPU", "after the checkpoint"]


def test_spikes_are_marked_alike_after_a_resume(run_dir, capsys):
    losses = [0.7, 0.6, 0.65, 0.72, 0.58, 0.66, 0.7, 0.61, 0.69, 0.64, 0.9, 0.63, 6.0, 0.62, math.nan]
    for reporters in (lambda one: [one] * len(losses), lambda one: [one] * 11 + [Reporter(QUIET, run_dir)] * 4):
        reporter = Reporter(QUIET, run_dir)
        reporter.load_state(None)
        for step, loss in enumerate(losses):
            reporters(reporter)[step].log({"loss/train": loss, "grad_norm": 3.0 + step % 2}, step, step)
        marked = {row["updates"]: row["marks"] for row in lines(run_dir) if "marks" in row}
        assert set(marked) == {12, 14}  # 0.9 is noise
        assert "spike: 6" in marked[12] and "nan" in marked[14]
        assert "! loss spike: 6" in capsys.readouterr().out


def test_gradient_spikes():
    watch = SpikeWatch({"grad_norm": 10.0 + step % 3} for step in range(20))
    assert watch.check({"grad_norm": 20.0}) == []
    assert "gradient norm spike" in watch.check({"grad_norm": 300.0})[0]


def test_finish_writes_the_report_and_how_the_run_ended(run_dir):
    reporter = Reporter(QUIET, run_dir)
    reporter.log({"loss/train": 1.0}, 1, 1)
    reporter.finish(False, "RuntimeError: out of memory")
    assert "out of memory" in (run_dir / "report.html").read_text()
    assert lines(run_dir, "notices.jsonl")[-1]["ok"] is False
    reporter.finish(True)  # a second time: nothing
    assert [row["ok"] for row in lines(run_dir, "notices.jsonl") if row["kind"] == "end"] == [False]


# -- loggers of other kinds -------------------------------------------------------------------------------------------


class Recorder(Logger):
    """Keeps what it is called with."""

    name = "recorder"

    def start(self, run):
        self.run, self.calls, self.resumed = run, [], None

    def metrics(self, values, examples, updates, marks):
        self.calls.append(("metrics", values, examples, updates, marks))

    def notice(self, text, examples):
        self.calls.append(("notice", text, examples))

    def state(self):
        return {"recorder": len(self.calls)}

    def load_state(self, state):
        self.resumed = state


class Broken(Logger):
    """Fails whatever it is asked for."""

    name = "broken"

    def _fail(self, *_):
        raise ConnectionError("no route")

    metrics = samples = notice = counts = show = state = load_state = finish = _fail


class Unstartable(Recorder):
    name = "unstartable"

    def start(self, run):
        raise ImportError("no module of that name")


class Unwanted(Recorder):
    @classmethod
    def wanted(cls, settings):
        return settings["wandb"]["enabled"]


def test_a_logger_is_given_the_run_and_its_records(run_dir):
    reporter = Reporter(QUIET, run_dir, loggers=[Recorder, Unwanted])
    [recorder] = reporter.loggers
    reporter.total_examples = 100
    assert recorder.run.settings == QUIET and recorder.run.run_dir == str(run_dir)
    assert recorder.run.total_examples == 100
    reporter.load_state(None)
    reporter.log({"loss/train": torch.tensor(0.5), "n": True}, 4, 1)
    reporter.notice("x")
    reporter.counts("hh", "train", {"rows": 1})  # it has no use for these
    assert recorder.calls == [("metrics", {"loss/train": 0.5, "n": 1}, 4, 1, []), ("notice", "x", 4)]
    state = reporter.state()
    assert recorder.resumed == {} and state == {"recorder": 2, "examples": 4, "updates": 1}
    reporter.load_state(state)
    assert recorder.resumed == state


def test_a_failing_logger_is_reported_once_and_ends_no_run(run_dir, capsys):
    reporter = Reporter(QUIET, run_dir, loggers=[Unstartable, Broken, *LOGGERS, Recorder])
    reporter.load_state(None)
    for step in range(3):
        reporter.log({"loss/train": 1.0}, step, step)
        reporter.samples(step, [{"prompt": "p", "policy": "a"}])
    state = reporter.state()
    assert state["examples"] == 2 and state["metrics_bytes"] == (run_dir / "metrics.jsonl").stat().st_size
    reporter.finish(True)
    out = capsys.readouterr().out
    assert out.count("unstartable could not start: ImportError: no module of that name") == 1
    for action in ("log", "log samples", "log a notice", "save its state", "resume", "finish"):
        assert out.count(f"broken failed to {action}: ConnectionError: no route; training goes on") == 1, action
    assert len(lines(run_dir)) == len(lines(run_dir, "samples.jsonl")) == 3
    assert [call[0] for call in reporter.loggers[-1].calls].count("metrics") == 3
    assert "broken failed to log:" in (run_dir / "report.html").read_text()


def test_files_are_not_cut_by_a_checkpoint_that_they_have_no_part_in(run_dir):
    Reporter(QUIET, run_dir).log({"loss/train": 1.0}, 4, 1)
    without_files = Reporter(QUIET, run_dir, loggers=[Recorder])
    without_files.log({"loss/train": 1.0}, 8, 2)
    Reporter(QUIET, run_dir).load_state(without_files.state())
    assert len(lines(run_dir)) == 1
