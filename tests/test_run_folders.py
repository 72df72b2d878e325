"""Which folder a run gets, what is recorded in it, and which one a resume goes on in."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from conftest import compose_config
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import settings
import utils
from checkpoint import run_folder, step_folders
from checkpoint.checkpointer import Checkpointer, resume_command
from settings import resume
from settings.messages import argument
from training import nonfinite
from training.run_saver import check_settings


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home and a current folder of the test's own."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_run(*overrides: str, examples: int | None = 8, state: bool = True) -> Path:
    """A run's folder, with a checkpoint at `examples`."""
    config = settings.finalize(compose_config("model=tiny", "local_dirs=[runs]", *overrides))
    folder = Path(run_folder.make(config))
    if examples is not None:
        a_step(folder, examples, state)
    return folder


def a_step(folder: Path, examples: int, state: bool = True) -> Path:
    step = folder / f"step-{examples}"
    (step / "state").mkdir(parents=True) if state else step.mkdir()
    step_folders.write_manifest(step, examples, {}, {})
    step_folders.point_latest(folder, step)
    return step


def resumed(*overrides: str):
    """(the config with which this command goes on, what it prints)."""
    words = ["model=tiny", "local_dirs=[runs]", *overrides]
    config, notes = resume.resumed_config(compose_config(*words), words)
    settings.validate(config)
    return settings.finalize(config), "\n".join(notes)


# ---- Settings that are recorded -------------------------------------------------------------------------------------


def test_the_recorded_settings_change_only_when_the_resume_is_accepted():
    folder = a_run("n_examples=100", "batch_size=4")
    before = (folder / "config.yaml").read_bytes()
    config, _ = resumed(f"resume={folder}", "n_examples=10")
    assert run_folder.make(config) == str(folder)
    assert (folder / "config.yaml").read_bytes() == before
    run_folder.record_changes(config, str(folder))
    assert resume.recorded(str(folder)).n_examples == 10
    assert resumed(f"resume={folder}")[0].n_examples == 10


def test_an_edited_config_is_noticed_by_what_the_checkpoint_was_made_with():
    config = settings.finalize(compose_config("model=tiny"))
    content = {"settings": resume.fixed_settings(config)}
    check_settings(Path("run/step-8"), content, settings.replace(config, {"eval_every": 4, "n_epochs": 3}))
    check_settings(Path("run/step-8"), {}, settings.replace(config, {"lr": 1.0}))  # of an older version
    with pytest.raises(ValueError, match=r"(?s)step-8 was made with.*lr: 5e-07 -> 0.1.*model.archive=run/step-8"):
        check_settings(Path("run/step-8"), content, settings.replace(config, {"lr": 0.1}))
    decaying = settings.replace(config, {"schedule": "linear"})
    content = {"settings": resume.fixed_settings(decaying)}
    with pytest.raises(ValueError, match="n_epochs: 1 -> 2\n.schedule=linear"):
        check_settings(Path("run/step-8"), content, settings.replace(decaying, {"n_epochs": 2}))


@pytest.mark.parametrize("content", [b"", b"{", b"- 1\n", b"5", b"\xff\xfe", b"model: 5", b"lr: 1", None])
def test_a_config_that_cannot_be_used_is_one_message_and_no_obstacle_for_auto(content):
    whole, broken = a_run(), a_run()
    path = broken / "config.yaml"
    path.write_bytes(path.read_bytes() + b"lr: ${nothing}\n" if content is None else content)
    with pytest.raises(ValueError, match=r"config.yaml cannot be used \(") as error:
        resumed(f"resume={broken}")
    assert str(broken) in str(error.value) and "model.archive=" in str(error.value)
    config, notes = resumed("resume=auto")
    assert config.resume == str(whole) and str(broken) in notes


def test_a_value_that_is_not_allowed_names_the_file():
    folder = a_run()
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("batch_size: 4", "batch_size: many"))
    with pytest.raises(ValueError, match="config.yaml: batch_size=many is not allowed"):
        resumed(f"resume={folder}")


def test_a_run_of_an_older_version_gets_the_defaults_of_new_keys():
    folder = a_run()
    values = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    del values["shuffle"], values["guards"]["on_nonfinite"]
    OmegaConf.save(OmegaConf.create(values), folder / "config.yaml")
    assert resumed(f"resume={folder}")[0].guards.on_nonfinite == "stop"


# ---- Paths ----------------------------------------------------------------------------------------------------------


def files(home) -> None:
    for name in ("gpt2", "home/model", "home/copy", "home/cache"):
        (home / name).mkdir()
    for name in ("pairs.jsonl", "home/other.jsonl", "weights.pt", "chat.jinja"):
        (home / name).write_text("{}\n")


PATHS = (
    "datasets=[pairs.jsonl,'~/other.jsonl',hh]",
    "++data.paths={hh: pairs.jsonl}",
    "model=blank_model",
    "model.name_or_path='~/model'",
    "model.tokenizer_name_or_path=gpt2",
    "model.local_copy='~/copy'",
    "model.archive=weights.pt",
    "data.chat_template=chat.jinja",
    "data.cache_dir='~/cache'",
    "local_dirs=['~/runs',runs]",
)


def test_paths_are_recorded_in_full(home):
    files(home)
    config = settings.finalize(compose_config(*PATHS))
    assert config.datasets == ("pairs.jsonl", "~/other.jsonl", "hh")
    assert config.data.paths == {
        "hh": f"{home}/pairs.jsonl",
        "pairs.jsonl": f"{home}/pairs.jsonl",
        "~/other.jsonl": f"{home}/home/other.jsonl",
    }
    assert config.model.name_or_path == f"{home}/home/model" and config.model.archive == f"{home}/weights.pt"
    assert config.model.tokenizer_name_or_path == f"{home}/gpt2" and config.model.local_copy == f"{home}/home/copy"
    assert config.data.chat_template == f"{home}/chat.jinja" and config.data.cache_dir == f"{home}/home/cache"
    assert config.local_dirs == (f"{home}/home/runs", f"{home}/runs")
    other = ("reference.cache_dir='~/ref'", "reference.archive=weights.pt", "reference.name_or_path='~/model'")
    ref = settings.finalize(compose_config("model=tiny", "loss=dpo", *other))
    assert ref.reference.archive == f"{home}/weights.pt" and ref.reference.name_or_path == f"{home}/home/model"
    assert ref.reference.cache_dir == f"{home}/home/ref" and ref.model.name_or_path == "tiny"
    assert settings.finalize(compose_config("model=tiny", "local_run_dir='~/r'")).local_run_dir == f"{home}/home/r"
    assert utils.get_local_dir("~/x") == f"{home}/home/x/{user()}", "as sweeps have it, before there are settings"


def test_names_that_are_no_files_stay(home):
    (home / "tiny").mkdir()
    (home / "gpt2").write_text("a file, which no model is")
    config = settings.finalize(compose_config("model=tiny", "model.tokenizer_name_or_path=gpt2", "datasets=[hh]"))
    assert (config.model.name_or_path, config.model.tokenizer_name_or_path) == ("tiny", "gpt2")
    assert config.data.paths == {} and config.data.chat_template is None
    with pytest.raises(ValueError, match="no home folder for ~nobody-here"):
        settings.finalize(compose_config("model=tiny", "local_dirs=['~nobody-here/x']"))


def test_a_run_is_resumed_from_another_folder(home, monkeypatch):
    files(home)
    folder = a_run("datasets=[pairs.jsonl]")
    command = ("resume=auto", "datasets=[pairs.jsonl]")
    assert resumed(*command)[0].resume == str(folder)
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    config, _ = resume.resumed_config(compose_config(f"resume=../runs/root/{folder.name}".replace("root", user())), [])
    settings.validate(config)
    assert config.data.paths == {"pairs.jsonl": f"{home}/pairs.jsonl"} and config.local_dirs == [f"{home}/runs"]


def user() -> str:
    return os.path.basename(utils.get_local_dir("x"))


def test_a_run_with_relative_paths_of_an_older_version_is_still_resumed(home):
    files(home)
    folder = a_run("datasets=[pairs.jsonl]")
    values = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    values |= {"local_dirs": ["runs"]}
    values["data"]["paths"] = {}
    OmegaConf.save(OmegaConf.create(values), folder / "config.yaml")
    assert resumed("resume=auto", "datasets=[pairs.jsonl]")[0].resume == str(folder)


def test_files_that_were_moved_may_be_named_anew(home):
    files(home)
    folder = a_run("datasets=[pairs.jsonl]")
    (home / "moved").mkdir()
    os.rename(home / "pairs.jsonl", home / "moved" / "pairs.jsonl")
    config, notes = resumed(f"resume={folder}", "++data.paths={pairs.jsonl: moved/pairs.jsonl}")
    assert config.data.paths == {"pairs.jsonl": f"{home}/moved/pairs.jsonl"} and "data.paths" in notes
    assert resumed(f"resume={folder}", "++data.paths.pairs=moved/pairs.jsonl")[0].data.paths == config.data.paths
    with pytest.raises(ValueError, match="data.paths.pairs.jsonl=.* If it was moved: data.paths.pairs.jsonl=NEW_PATH"):
        resumed(f"resume={folder}")
    (home / "pairs.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="may not change"):
        resumed(f"resume={folder}", "++data.paths={pairs.jsonl: moved/pairs.jsonl}")


@pytest.mark.parametrize("name", ["../../evil", "..", "/etc", "a/b"])
def test_a_users_name_cannot_lead_out_of_the_folder(home, monkeypatch, name):
    monkeypatch.setenv("LOGNAME", name)
    assert Path(utils.make_run_dir("x", [str(home / "runs")])).parent.parent == home / "runs"
    monkeypatch.setenv("LOGNAME", "j.doe")
    assert utils.get_local_dir(["runs"]) == "runs/j.doe"


# ---- Which folder is resumed ----------------------------------------------------------------------------------------


def test_resume_takes_what_lies_in_the_run_folder_too():
    folder = a_run(examples=8)
    a_step(folder, 16)
    for inside in ("", "LATEST", "LATEST/", "step-16", "step-16/state", "config.yaml", "LATEST/state/trainer.pt"):
        assert resumed(f"resume={folder}/{inside}")[0].resume == str(folder), inside
    with pytest.raises(ValueError, match=r"(?s)newest checkpoint, which is step-16.*model.archive=\S+/step-8"):
        resumed(f"resume={folder}/step-8")
    with pytest.raises(ValueError, match="not a run folder"):
        resumed(f"resume={folder.parent}")


def test_auto_goes_on_with_a_run_that_saves_state_at_a_signal_only():
    formats = "checkpoint.formats=[policy,hf]"
    folder = a_run(formats)
    assert resumed("resume=auto", formats)[0].resume == str(folder)
    newer = a_run(formats, state=False)
    config, notes = resumed("resume=auto", formats)
    assert config.resume == str(folder) and f"{newer}: it holds weights, but no state" in notes


# ---- LATEST ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_was_copied_with_links_followed_is_a_run_folder():
    folder = a_run(examples=8)
    os.remove(folder / "LATEST")
    os.rename(folder / "step-8", folder / "LATEST")
    assert step_folders.read_latest(folder) == folder / "LATEST"
    step_folders.recover(folder)
    assert step_folders.read_latest(folder) == folder / "step-8" and (folder / "LATEST").is_symlink()
    os.remove(folder / "LATEST")
    (folder / "LATEST").mkdir()
    with pytest.raises(ValueError, match="LATEST is a folder"):
        Checkpointer(folder, resume.recorded(str(folder)).checkpoint, utils.World())
    step_folders.write_manifest(folder / "LATEST", 8, {}, {})
    assert step_folders.read_latest(folder) == folder / "step-8"
    step_folders.recover(folder)
    step_folders.point_latest(folder, a_step(folder, 16))
    assert step_folders.read_latest(folder) == folder / "step-16"


@pytest.mark.parametrize("content", [b"\xff\xfe\0\1", b"", b"../..", b"x" * 5000, b"step-8\n", b"/"])
def test_a_latest_with_other_bytes_points_nowhere(content):
    folder = a_run(examples=8)
    os.remove(folder / "LATEST")
    (folder / "LATEST").write_bytes(content)
    assert step_folders.read_latest(folder) == (folder / "step-8" if content == b"step-8\n" else None)
    assert resumed(f"resume={folder}/LATEST")[0].resume == str(folder)
    step_folders.recover(folder)
    assert step_folders.read_latest(folder) == folder / "step-8"


# ---- Commands to paste ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["/a/b-c.d", "/tmp/ä", "/a b", "/a'b\"c", "/a\\b", '/a\\"b', "/a\\", "/a,b=[c]", "~/a#b", "/a$(b)`c`!d"]
)
def test_an_argument_comes_back_through_shell_and_hydra(value):
    (word,) = shlex.split(argument("resume", value))
    assert OverridesParser.create().parse_override(word).value() == value


def test_the_command_names_the_script_where_it_is_not_here(monkeypatch):
    assert resume_command("/runs/a") == f"python {shlex.quote(utils.PROJECT_DIR)}/train.py resume=/runs/a"
    monkeypatch.chdir(utils.PROJECT_DIR)
    assert resume_command("/runs/ä b") == "python train.py 'resume=\"/runs/ä b\"'"


# ---- Rows about steps that are taken again --------------------------------------------------------------------------


def test_rows_of_steps_that_are_taken_again_are_not_kept_twice(home):
    rows = [{"examples": examples, "row": examples} for examples in (0, 8, 8, 16)]
    nonfinite.append_rows(str(home / nonfinite.FILE), rows, print)
    nonfinite.forget_rows(str(home), 8)
    left = [json.loads(line)["row"] for line in (home / nonfinite.FILE).read_text().splitlines()]
    assert left == [0]
