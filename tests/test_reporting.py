"""What a run writes is valid, complete after a resume, calm on the console, and never the end of the training."""

import io
import json
import math
import os
import pathlib
import subprocess
import sys
import types

import pytest
import torch

import report.reporter as reporting
from report import wandb_run
from report.formatting import console_line, duration, metric_dataset, printable, short
from report.reporter import Reporter, SpikeWatch
from utils import World, read_json_lines

QUIET = {"exp_name": "run", "wandb": {"enabled": False}}


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def lines(run_dir, name="metrics.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def test_metrics_lines_are_flat_valid_json(run_dir):
    reporter = Reporter(QUIET, run_dir)
    reporter.log({"loss/train": torch.tensor(0.1), "n": 3, "bad": math.nan, "worse": -math.inf}, 32, 4)
    strict = {"parse_constant": lambda name: pytest.fail(f"{name} is not JSON")}
    [record] = [json.loads(line, **strict) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert record.pop("time") > 1.6e9
    loss = float(torch.tensor(0.1))
    assert record == {"examples": 32, "updates": 4, "loss/train": loss, "n": 3, "bad": "NaN", "worse": "-Infinity"}
    assert math.isnan(float(record["bad"])) and float(record["worse"]) == -math.inf


def test_resume_leaves_no_line_twice_and_none_missing(run_dir):
    first = Reporter(QUIET, run_dir)
    for step in range(3):
        first.log({"loss/train": step / 7}, step * 4, step)
    first.samples(8, [{"prompt": "p", "policy": "a", "reference": "b", "dataset": "hh"}])
    state = json.loads(json.dumps(first.state()))  # survives a checkpoint's JSON
    first.log({"loss/train": 3 / 7}, 12, 3)
    first.samples(12, [{"prompt": "p", "policy": "lost", "reference": "b", "dataset": "hh"}])
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"examples": 16, "upd')  # killed in the middle of a line

    second = Reporter(QUIET, run_dir)
    second.load_state(state)
    for step in range(3, 5):
        second.log({"loss/train": step / 7}, step * 4, step)
    assert [row["updates"] for row in lines(run_dir)] == [0, 1, 2, 3, 4]
    assert [row["loss/train"] for row in lines(run_dir)] == [step / 7 for step in range(5)]
    assert [row["policy"] for row in lines(run_dir, "samples.jsonl")] == ["a"]


def test_a_run_that_died_before_its_first_checkpoint_starts_over(run_dir):
    Reporter(QUIET, run_dir).log({"loss/train": 1.0}, 4, 1)
    second = Reporter(QUIET, run_dir)
    second.load_state(None)
    second.log({"loss/train": 1.0}, 4, 1)
    assert len(lines(run_dir)) == 1


def test_a_file_shorter_than_its_checkpoint_is_said(run_dir, capsys):
    reporter = Reporter(QUIET, run_dir)
    reporter.log({"x": 1.0}, 4, 1)
    state = reporter.state()
    (run_dir / "metrics.jsonl").unlink()
    Reporter(QUIET, run_dir).load_state(state)
    assert "metrics.jsonl is" in capsys.readouterr().out


def test_a_torn_line_is_cut_before_anything_is_appended(run_dir):
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"examples": 1}\n{"exam')
    Reporter(QUIET, run_dir).log({}, 2, 1)
    assert [row["examples"] for row in lines(run_dir)] == [1, 2]


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


def test_notices_are_said_once_and_kept_over_a_resume(run_dir, capsys):
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


def test_counts_are_kept_once(run_dir, capsys):
    for _ in range(2):
        Reporter(QUIET, run_dir).counts("hh", "train", {"rows": 1200, "dropped_empty": 3, "cut": 0})
    assert "data: hh train: rows 1,200, dropped empty 3\n" in capsys.readouterr().out
    assert len(lines(run_dir, "notices.jsonl")) == 1


def test_a_full_disk_costs_no_line_and_no_run(run_dir, monkeypatch, capsys):
    reporter = Reporter(QUIET, run_dir)
    reporter.log({"x": 1.0}, 1, 1)
    write = os.write

    def full(fd, data):
        write(fd, data[:5])  # a part fits
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    reporter.log({"x": 2.0}, 2, 2)
    reporter.log({"x": 3.0}, 3, 3)
    monkeypatch.setattr(os, "write", write)
    assert capsys.readouterr().out.count("No space left") == 1
    assert [row["examples"] for row in lines(run_dir)] == [1]
    reporter.log({"x": 4.0}, 4, 4)
    assert [row["examples"] for row in lines(run_dir)] == [1, 2, 3, 4]


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


def test_console_lines():
    train = {"loss/train": 0.68, "rewards_train/accuracies": 0.55, "rewards_train/margins": 0.012, "grad_norm": 32.14}
    train |= {"learning_rate": 4.9e-7, "examples_per_second": 41.23, "tokens_per_second": 12345.6}
    assert console_line(train, 12800, 160000) == (
        "train    12,800 (8%) | loss 0.6800  acc 0.5500  margin 0.0120  grad 32.1  lr 4.9e-07"
        " | 41.2 pairs/s  12.3k tok/s  59m 30s left"
    )
    evaluation = {"loss/eval": 0.6, "rewards_eval/accuracies": 0.7, "loss/eval/hh": 0.61, "loss/eval/shp": 0.59}
    assert (
        console_line(evaluation, 0, None)
        == "eval          0 | loss 0.6000  acc 0.7000 | hh: loss 0.6100 | shp: loss 0.5900"
    )
    assert console_line({"loss/eval": 0.6, "loss/eval/hh": 0.6}, 0, None).count("loss") == 1  # one data set says it all
    assert console_line({"something": 1.0}, 0, None) == ""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss/eval", ("loss/eval", "")),
        ("loss/eval/hh", ("loss/eval", "hh")),
        ("rewards_eval/accuracies", ("rewards_eval/accuracies", "")),
        ("rewards_eval/accuracies/my_data", ("rewards_eval/accuracies", "my_data")),
        ("lengths_eval/chosen/my/file.jsonl", ("lengths_eval/chosen", "my/file.jsonl")),
        ("logps_eval/chosen", ("logps_eval/chosen", "")),
        ("loss/eval/data/chosen", ("loss/eval", "data/chosen")),
        ("loss/train", None),
        ("grad_norm", None),
    ],
)
def test_metric_dataset(name, expected):
    assert metric_dataset(name, "eval") == expected


def test_numbers_for_people():
    numbers = [0, 0.693147, 41.23, 1234.5, 12345.6, 1.25e6, 7, math.nan]
    assert [short(x) for x in numbers] == ["0", "0.6931", "41.2", "1234", "12.3k", "1.25M", "7", "nan"]
    assert [duration(x) for x in (45, 750, 11100, 187200)] == ["45s", "12m 30s", "3h 5m", "2d 4h"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_there_are_only_plain_lines(run_dir, monkeypatch, capsys):
    monkeypatch.setattr(reporting, "PLAIN_INTERVAL", -1.0)
    reporter = Reporter(QUIET, run_dir)
    with reporter.progress(100, "reference", "pairs") as bar:
        for _ in range(3):
            bar.update(10, tokens_per_second=12345.6)
    reporter.samples(4, [{"prompt": "a\x1b[31m\n\nb", "policy": "c\rd\x07\ud800", "reference": None}])
    out, err = capsys.readouterr()
    assert err == "" and "reference: 20/100 (20%), " in out and "12.3k" in out
    assert all(char.isprintable() or char == "\n" for char in out), out
    monkeypatch.setattr(reporting, "PLAIN_INTERVAL", 60.0)
    with reporter.progress(100, "reference", "pairs") as bar:
        for _ in range(100):
            bar.update(1)
    assert capsys.readouterr() == ("", "")  # no wall of progress


def test_on_a_terminal_there_is_a_bar(run_dir, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with Reporter(QUIET, run_dir).progress(100, "train", "pairs", initial=40) as bar:
        bar.bar.mininterval = 0
        bar.update(10, tokens_per_second=12345.6)
        shown = sys.stderr.getvalue()
    assert "train:" in shown and "tok/s 12.3k" in shown and "50/100" in shown


def test_a_closed_pipe_does_not_end_the_run(run_dir, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    Reporter(QUIET, run_dir).log({"loss/train": 1.0}, 1, 1)
    monkeypatch.undo()
    assert len(lines(run_dir)) == 1


def test_control_characters_are_written_out():
    assert printable("a\x1b[2Jb\n\u202ec") == "a\\x1b[2Jb\\n\\u202ec"


def test_finish_writes_the_report_and_says_how_it_ended(run_dir):
    with pytest.raises(RuntimeError), Reporter(QUIET, run_dir) as reporter:
        reporter.log({"loss/train": 1.0}, 1, 1)
        raise RuntimeError("out of memory")
    assert "out of memory" in (run_dir / "report.html").read_text()
    assert lines(run_dir, "notices.jsonl")[-1]["ok"] is False
    reporter.finish(True)  # a second time: nothing
    assert [row["ok"] for row in lines(run_dir, "notices.jsonl") if row["kind"] == "end"] == [False]


# -- wandb ------------------------------------------------------------------------------------------------------------

WANDB = {"exp_name": "tiny_dpo_hh", "lr": 5e-7, "loss": {"beta": 0.1}, "debug": False}
WANDB |= {"wandb": {"enabled": True, "project": "direct-preference-optimization", "entity": None, "group": "sweep"}}


@pytest.fixture
def logged_out(monkeypatch, tmp_path):
    """No credentials, whoever runs the test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))


@pytest.mark.parametrize("change", [{"debug": True}, {"wandb": {"enabled": False}}])
def test_wandb_is_not_even_imported_when_off(change, tmp_path):
    config = WANDB | change
    code = f"import sys; from report import reporter; r = reporter.Reporter({config!r}, {str(tmp_path / 'run')!r})"
    code += "; r.log({'x': 1.0}, 1, 1)"
    code += "; r.finish(True); sys.exit('wandb' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=pathlib.Path(__file__).resolve().parent.parent)


def test_offline_run_of_real_wandb_and_the_same_run_after_a_resume(run_dir, logged_out, capfd):
    wandb = pytest.importorskip("wandb")
    first = Reporter(WANDB, run_dir)
    first.log({"loss/train": 0.69}, 4, 1)
    first.samples(4, [{"prompt": "p \ud800", "policy": "one", "reference": "ref"}])
    state = first.state()
    assert wandb.run.id == state["wandb_id"]
    assert (wandb.run.name, wandb.run.group, wandb.run.project) == ("tiny_dpo_hh", "sweep", WANDB["wandb"]["project"])
    assert wandb.run.config["loss"] == {"beta": 0.1} and wandb.run.config["lr"] == 5e-7
    first.samples(8, [{"prompt": "p", "policy": "lost", "reference": "ref"}])
    first.finish(True)
    assert wandb.run is None

    second = Reporter(WANDB, run_dir)
    second.load_state(state)
    assert wandb.run.id == state["wandb_id"]
    second.log({"loss/train": 0.68}, 8, 2)
    second.samples(8, [{"prompt": "p", "policy": "two", "reference": "ref"}])
    assert [row[2] for row in second._wandb.tables["policy"]] == ["one", "two"]  # the table goes on; no lost row
    second.finish(False)

    runs = sorted((run_dir / "wandb").glob("offline-run-*"))
    # wandb puts a number behind the folder's name where both begin in one second
    assert runs and all(state["wandb_id"] in run.name and list(run.glob("*.wandb")) for run in runs)
    tables = [json.loads(path.read_text()) for path in run_dir.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert {tuple(table["columns"]) for table in tables} == {("step", "prompt", "sample")}
    assert any(path.name.startswith("reference_samples") for path in run_dir.glob("wandb/*/files/media/table/*.json"))
    out, err = capfd.readouterr()
    assert out.count("wandb: offline") == 2 and "wandb" not in err


def test_a_failing_wandb_is_said_once_and_survived(run_dir, monkeypatch, capsys, logged_out):
    def fail(*_, **__):
        raise ConnectionError("no route")

    run = types.SimpleNamespace(log=fail, finish=fail, define_metric=lambda *_, **__: None, url=None)
    broken = types.SimpleNamespace(run=None, init=lambda **_: run, Settings=dict, Table=fail)
    monkeypatch.setitem(sys.modules, "wandb", broken)
    reporter = Reporter(WANDB, run_dir)
    for step in range(3):
        reporter.log({"loss/train": 1.0}, step, step)
        reporter.samples(step, [{"prompt": "p", "policy": "a"}])
    reporter.finish(True)
    out = capsys.readouterr().out
    assert out.count("wandb failed to log: ConnectionError") == 1 and out.count("wandb failed to finish") == 1
    assert len(lines(run_dir)) == 3


def test_wandb_that_cannot_go_online_goes_offline(run_dir, monkeypatch, capsys, logged_out):
    modes = []

    def init(**settings):
        modes.append(settings["mode"])
        if settings["mode"] == "online":
            raise ConnectionError("unreachable")
        return types.SimpleNamespace(
            define_metric=lambda *_, **__: None, finish=lambda **_: None, log=lambda *_, **__: None
        )

    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=None, init=init, Settings=dict))
    reporter = Reporter(WANDB, run_dir)
    assert modes == [], "a run that has nothing to say yet leaves no wandb run"
    reporter.log({"loss/train": 1.0}, 1, 1)
    reporter.finish(True)
    assert modes == ["online", "offline"]
    assert "unreachable" in capsys.readouterr().out


def test_logged_in_by_environment_or_netrc(monkeypatch, tmp_path, logged_out):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(setup=None))
    assert not wandb_run.logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0000\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_run.logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not wandb_run.logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "0000")
    assert wandb_run.logged_in()


def test_reading_survives_rubbish(tmp_path):
    (tmp_path / "x").write_bytes(b'{"a": 1}\n\xff\xfe\n[1]\n\n{"b"')
    assert read_json_lines(tmp_path / "x") == [{"a": 1}]
    assert read_json_lines(tmp_path / "missing") == []
