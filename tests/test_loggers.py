"""Files are valid and complete after a resume, the console prints little, and a resumed run is one wandb run."""

import importlib.util
import io
import json
import math
import os
import pathlib
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

from report import background, console
from report.console import ConsoleLogger
from report.files import read_json_lines
from report.logger import Logger
from report.reporter import Reporter

QUIET = {"exp_name": "run", "wandb": {"enabled": False}}


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def settle(reporter):
    """Until the loggers that work in the background have done what they were given."""
    for logger in reporter.loggers:
        if hasattr(logger, "wait"):
            logger.wait(30)


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


def test_a_file_shorter_than_its_checkpoint_is_reported(run_dir, capsys):
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


def test_a_file_that_is_removed_replaced_or_cut_meanwhile_loses_no_line_that_can_be_kept(run_dir, capsys):
    reporter, path = Reporter(QUIET, run_dir), run_dir / "metrics.jsonl"
    reporter.log({"x": 1.0}, 1, 1)
    path.unlink()
    reporter.log({"x": 2.0}, 2, 2)
    assert [row["examples"] for row in lines(run_dir)] == [1, 2]
    (run_dir / "other").write_text("{}\n")
    os.replace(run_dir / "other", path)
    reporter.log({"x": 3.0}, 3, 3)
    assert [row["examples"] for row in lines(run_dir)] == [1, 2, 3]
    path.write_text("")
    reporter.log({"x": 4.0}, 4, 4)
    assert [row["examples"] for row in lines(run_dir)] == [4] and b"\0" not in path.read_bytes()
    said = capsys.readouterr().out
    assert "metrics.jsonl was removed or replaced by others" in said and "metrics.jsonl was cut by others" in said
    state = reporter.state()
    reporter.log({"x": 5.0}, 5, 5)
    Reporter(QUIET, run_dir).load_state(state)
    assert [row["examples"] for row in lines(run_dir)] == [4]


def test_reading_survives_rubbish(tmp_path):
    (tmp_path / "x").write_bytes(b'{"a": 1}\n\xff\xfe\n[1]\n\n{"b"')
    assert read_json_lines(tmp_path / "x") == [{"a": 1}]
    assert read_json_lines(tmp_path / "missing") == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_there_are_only_plain_lines(run_dir, monkeypatch, capsys):
    monkeypatch.setattr(console, "PLAIN_INTERVAL", -1.0)
    reporter = Reporter(QUIET, run_dir)
    with reporter.progress(100, "reference", "pairs") as bar:
        for _ in range(3):
            bar.update(10, tokens_per_second=12345.6)
    reporter.samples(4, [{"prompt": "a\x1b[31m\n\nb", "policy": "c\rd\x07\ud800", "reference": None}])
    out, err = capsys.readouterr()
    assert err == "" and "reference: 20/100 (20%), " in out and "12.3k" in out
    assert all(char.isprintable() or char == "\n" for char in out), out
    monkeypatch.setattr(console, "PLAIN_INTERVAL", 60.0)
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


def test_a_terminal_that_closes_does_not_end_the_run(run_dir, monkeypatch):
    class Closing(Terminal):
        open = True

        def write(self, text):
            if not self.open:
                raise OSError(5, "Input/output error")
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", Closing())
    monkeypatch.setenv("TERM", "xterm")
    with Reporter(QUIET, run_dir).progress(100, "train", "pairs") as bar:
        Closing.open = False
        for _ in range(3):
            bar.update(10, loss=0.5)
    assert bar.done == 30


def test_a_closed_pipe_does_not_end_the_run(run_dir, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    Reporter(QUIET, run_dir).log({"loss/train": 1.0}, 1, 1)
    monkeypatch.undo()
    assert len(lines(run_dir)) == 1


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
    settle(first)
    assert wandb.run.id == state["wandb_id"]
    assert (wandb.run.name, wandb.run.group, wandb.run.project) == ("tiny_dpo_hh", "sweep", WANDB["wandb"]["project"])
    assert wandb.run.config["loss"] == {"beta": 0.1} and wandb.run.config["lr"] == 5e-7
    first.samples(8, [{"prompt": "p", "policy": "lost", "reference": "ref"}])
    first.finish(True)
    assert wandb.run is None

    second = Reporter(WANDB, run_dir)
    second.load_state(state)
    settle(second)
    assert wandb.run.id == state["wandb_id"]
    second.log({"loss/train": 0.68}, 8, 2)
    second.samples(8, [{"prompt": "p", "policy": "two", "reference": "ref"}])
    second.finish(False)

    runs = sorted((run_dir / "wandb").glob("offline-run-*"))
    # wandb puts a number behind the folder's name where both begin in one second
    assert runs and all(state["wandb_id"] in run.name and list(run.glob("*.wandb")) for run in runs)
    tables = [json.loads(path.read_text()) for path in run_dir.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert {tuple(table["columns"]) for table in tables} == {("step", "prompt", "sample")}
    samples = [[row[2] for row in table["data"]] for table in tables]
    assert ["one", "two"] in samples  # the table goes on, without the row that was lost
    assert any(path.name.startswith("reference_samples") for path in run_dir.glob("wandb/*/files/media/table/*.json"))
    out, err = capfd.readouterr()
    assert out.count("wandb: offline") == 2 and "wandb" not in err


def test_a_failing_wandb_is_reported_once_and_survived(run_dir, monkeypatch, capsys, logged_out):
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
        if modes and modes[-1] != "ended":
            raise RuntimeError("run ID is in use")  # as long as the service of the failed start is there
        modes.append(settings["mode"])
        if settings["mode"] == "online":
            assert settings["settings"]["init_timeout"] <= 30
            raise ConnectionError("unreachable")
        return types.SimpleNamespace(
            define_metric=lambda *_, **__: None, finish=lambda **_: None, log=lambda *_, **__: None
        )

    wandb = types.SimpleNamespace(run=None, init=init, Settings=dict, setup=lambda _: None, login=lambda **_: True)
    wandb.teardown = lambda _: modes.append("ended")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    reporter = Reporter(WANDB, run_dir)
    assert modes == [], "a run without a record leaves no wandb run"
    reporter.log({"loss/train": 1.0}, 1, 1)
    reporter.finish(True)
    assert modes == ["online", "ended", "offline"]
    assert "unreachable" in capsys.readouterr().out


def logged_in(environment):
    """What wandb finds in a fresh process, whose first credentials stay with it, and what it prints there. No host can
    be reached, and a question would wait for an answer forever."""
    code = """
import socket, sys
connect = socket.socket.connect
def local_only(self, address):
    assert self.family == socket.AF_UNIX, address
    return connect(self, address)
socket.socket.connect = local_only
from report.wandb_logger import logged_in
try:
    print(logged_in())
except Exception as error:
    print(type(error).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=pathlib.Path(__file__).resolve().parent.parent,
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "False"),
        ({"NETRC": "netrc"}, "True"),
        ({"NETRC": "netrc", "WANDB_BASE_URL": "https://wandb.example.org"}, "False"),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "https://wandb.example.org"}, "True"),
        ({"WANDB_API_KEY": "x"}, "AuthenticationError"),
    ],
)
def test_logged_in_by_environment_or_netrc(environment, expected, tmp_path, logged_out):
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {'0' * 40}\n")
    if "NETRC" in environment:
        environment = environment | {"NETRC": str(tmp_path / "netrc")}
    assert logged_in(environment) == (expected, "")


def test_a_malformed_key_is_reported_and_the_run_is_offline(run_dir, monkeypatch, capsys, logged_out):
    modes = []

    def login(**_):
        raise ValueError("API key must have 40+ characters, has 1.")

    def init(**settings):
        modes.append(settings["mode"])
        return types.SimpleNamespace(
            define_metric=lambda *_, **__: None, finish=lambda **_: None, log=lambda *_, **__: None
        )

    wandb = types.SimpleNamespace(run=None, init=init, Settings=dict, setup=lambda _: None, login=login)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    reporter = Reporter(WANDB, run_dir)
    reporter.log({"loss/train": 1.0}, 1, 1)
    settle(reporter)
    assert modes == ["offline"]
    assert "wandb could not start online: ValueError: API key must have 40+" in capsys.readouterr().out


# ---- Loggers in the background ---------------------------------------------------------------------------------------


def test_a_logger_without_an_answer_keeps_neither_the_run_nor_its_end_waiting(run_dir, monkeypatch, capsys, logged_out):
    """A server that takes the connection and never answers: here, an init that does not return."""
    released = threading.Event()
    monkeypatch.setattr(background, "FINISH_SECONDS", 0.2)
    wandb = types.SimpleNamespace(run=None, init=lambda **_: released.wait(30), Settings=dict)
    wandb.setup, wandb.login = lambda _: None, lambda **_: True
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    reporter = Reporter(WANDB, run_dir)
    try:
        start = time.monotonic()
        for step in range(5):
            reporter.log({"loss/train": 1.0}, step, step)
        reporter.finish(True)
        assert time.monotonic() - start < 15
    finally:
        released.set()
    assert len(lines(run_dir)) == 5
    assert "wandb has not taken everything within 0 seconds" in capsys.readouterr().out
    assert (run_dir / "report.html").exists()


def test_calls_arrive_in_their_order_and_a_failure_is_reported_once(run_dir, monkeypatch, capsys):
    seen = []

    class Slow(Logger):
        name = "slow"

        def start(self, run):
            self.run = run

        def metrics(self, values, examples, updates, marks):
            time.sleep(0.01)
            seen.append(examples)
            if examples > 2:
                raise OSError("no room")

        def finish(self, ok, message):
            seen.append(ok)
            self.run.notice("the end")

        def state(self):
            return {"slow": 1}

    reporter = Reporter(QUIET, run_dir, loggers=(ConsoleLogger, background.in_background(Slow)))
    for step in range(1, 5):
        reporter.log({"x": 1.0}, step, step)
    assert reporter.state()["slow"] == 1
    reporter.finish(True)
    assert seen == [1, 2, 3, 4, True]
    out = capsys.readouterr().out
    assert out.count("slow failed to log: OSError: no room; training goes on") == 1 and "note: the end" in out


# ---- TensorBoard, MLflow, trackio ------------------------------------------------------------------------------------


def named(*names, **sections):
    return QUIET | {"loggers": list(names), "loss": {"beta": 0.1}} | sections


def test_tensorboard_has_every_number_once_after_a_resume(run_dir, capsys):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = Reporter(named("tensorboard"), run_dir)
    first.load_state(None)
    first.log({"loss/train": 0.5}, 4, 1)
    first.samples(4, [{"prompt": "p \ud800", "policy": "one", "reference": None}])
    state = first.state()
    first.log({"loss/train": 9.0}, 8, 2)  # lost
    first.finish(False)
    second = Reporter(named("tensorboard"), run_dir)
    second.load_state(state)
    second.log({"loss/train": 0.25}, 8, 2)
    second.finish(True)
    events = accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/train")] == [(4, 0.5), (8, 0.25)]
    assert "tensorboard --logdir" in capsys.readouterr().out


class Client:
    """What MlflowLogger calls of MLflow's client; keeps it."""

    calls: list = []

    def __init__(self, tracking_uri):
        self.calls.append(("uri", tracking_uri))

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return f"number of {name}"

    def create_run(self, experiment, run_name):
        self.calls.append(("run", experiment, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))

    def log_batch(self, run_id, metrics=(), params=()):
        self.calls += [(run_id, metric.args) for metric in metrics] + [(run_id, param.args) for param in params]

    def log_text(self, run_id, text, path):
        self.calls.append((run_id, path))

    def set_terminated(self, run_id, status):
        self.calls.append((run_id, status))


class Entity:
    def __init__(self, *args):
        self.args = args


def test_mlflow_goes_on_with_its_run_after_a_resume(run_dir, monkeypatch):
    monkeypatch.setattr(Client, "calls", calls := [])
    entities = types.SimpleNamespace(Metric=Entity, Param=Entity)
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=Client, entities=entities))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    settings = named("mlflow", mlflow={"tracking_uri": "file:here", "experiment": "mine"})
    for resumed in (False, True):
        reporter = Reporter(settings, run_dir)
        reporter.load_state({} if not resumed else reporter.state())
        reporter.log({"loss/train": 0.5}, 4, 1)
        reporter.samples(4, [{"prompt": "p", "policy": "one"}])
        reporter.finish(not resumed)
    assert calls.count(("run", "number of mine", "run")) == 1
    assert ("uri", "file:here") in calls and ("abc", ("loss.beta", "0.1")) in calls
    values = [(args[0], args[1], args[3]) for _, args in (c for c in calls if c[0] == "abc" and len(c[1]) == 4)]
    assert values == [("loss/train", 0.5, 4), ("updates", 1.0, 4)] * 2
    assert [c for c in calls if c[1] in ("FINISHED", "FAILED")] == [("abc", "FINISHED"), ("abc", "FAILED")]
    assert calls.count(("abc", "samples/4.json")) == 2


def test_trackio_is_named_after_the_folder_so_that_a_resume_goes_on(run_dir, monkeypatch):
    pytest.importorskip("pandas")
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end")
    )
    trackio = types.SimpleNamespace(Table=lambda dataframe: dataframe.to_dict("records"))
    trackio.init = lambda **settings: calls.append(settings) or run
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    reporter = Reporter(named("trackio", trackio={"project": "mine", "space_id": None}), run_dir)
    reporter.log({"loss/train": 0.5}, 4, 1)
    reporter.samples(4, [{"prompt": "p", "policy": "one", "reference": None}])
    reporter.finish(True)
    settings, *rest = calls
    assert (settings["project"], settings["name"], settings["resume"]) == ("mine", "run", "allow")
    assert rest == [
        (1, {"loss/train": 0.5, "examples": 4}),
        (1, {"samples": [{"prompt": "p", "policy": "one"}]}),
        "end",
    ]


@pytest.mark.parametrize(
    "words, message",
    [
        (["loggers=[wandb,tensorbord]"], "did you mean tensorboard"),
        (["loggers=[wandb,wandb]"], "names wandb twice"),
        (["loggers=[mlflow]", "debug=false"], "pip install mlflow"),
        (["mlflow.experiment=a"], "loggers does not name mlflow"),
        (["loggers=[]", "wandb.project=a"], "loggers does not name wandb"),
    ],
)
def test_loggers_that_cannot_be(compose, monkeypatch, words, message):
    import settings

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else find(name))
    with pytest.raises(ValueError, match=message):
        settings.validate(compose("model=tiny", *words), given=settings.named_keys(words))
