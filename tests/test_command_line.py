"""The command line from outside, and the launcher with real processes over gloo."""

import json
import os
import pickle
import re
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, compose_config, free_port
from omegaconf import OmegaConf
from test_settings import REFERENCE_COMMANDS

import settings
import train
import utils
from checkpoint import run_folder
from parallel import launch, spawn
from parallel.failures import RankFailure
from settings import resume

# ---- Messages -------------------------------------------------------------------------------------------------------


def seconds_of_children() -> float:
    """Processor time: unlike the wall clock it does not depend on what else the machine does."""
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["model=pythai28"], ["model=pythai28", "did you mean pythia28?", "blank_model"]),
        (["mdel=tiny"], ["did you mean model?"]),
        (["model=tiny", "loss=dpo", "loss.bta=0.2"], ["there is no key loss.bta", "did you mean loss.beta?"]),
        (["model=tiny", "loss.beta=0.2"], ["loss=sft has no key loss.beta", "dpo", "ipo"]),
        (["model=tiny", "lr=fast"], ["lr=fast", "a number above 0"]),
        (["model=tiny", "batch_size"], ["batch_size", "KEY=VALUE"]),
        (["-m", "model=tiny", "loss=dpo", "loss.bta=0.1,0.2"], ["did you mean loss.beta?"]),
    ],
)
def test_one_message_and_nothing_left(command, tmp_path, arguments, words):
    began = seconds_of_children()
    done = command(*arguments)
    assert seconds_of_children() - began < 5
    assert done.returncode == 2
    assert [word for word in words if word not in done.stderr] == []
    assert done.stderr.count("error:") == 1 and len(done.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "argument, key, value",
    [
        ("datasets=[a=b.jsonl,~/ä.jsonl,plain.jsonl]", "datasets", ["a=b.jsonl", "~/ä.jsonl", "plain.jsonl"]),
        ("local_dirs=[~/runs, ö]", "local_dirs", ["~/runs", "ö"]),
        ("model.archive=~/runs/x", "model.archive", "~/runs/x"),
        ("exp_name=größe", "exp_name", "größe"),
        ('exp_name="a=b"', "exp_name", "a=b"),
        ("exp_name=${seed}", "exp_name", 0),
        ("optimizer_kwargs={betas:[0.9,0.99],eps:1e-6}", "optimizer_kwargs", {"betas": [0.9, 0.99], "eps": 1e-6}),
        ("optimizer_kwargs.betas=[0.9,0.99]", "optimizer_kwargs", {"betas": [0.9, 0.99]}),
        ("data.weights={hh:2}", "data.weights", {"hh": 2}),
        ("model.random_config={hidden_size:32}", "model.random_config.hidden_size", 32),
        ("experiment=null", "experiment", None),
        ("data_mix=null", "data_mix", None),
    ],
)
def test_values_are_taken_as_they_are_written(argument, key, value):
    config = compose_config("model=tiny", *train.arguments_for_hydra([argument]))
    found = OmegaConf.select(config, key)
    assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value


@pytest.mark.parametrize(
    "argument, words",
    [
        ("=5", ["=5", "KEY=VALUE"]),
        ("+=5", ["+=5", "KEY=VALUE"]),
        ("loss=null", ["loss=null", "|dpo|"]),
        ("model=3", ["model=3", "|tiny"]),
        ("fsdp=", ["fsdp=", "fsdp=full_shard"]),
        ("--learning_rate=3", ["without --", "here that is lr"]),
        ("--batch-size", ["without --"]),
    ],
)
def test_arguments_that_hydra_could_not_read_are_refused(argument, words):
    with pytest.raises(ValueError) as error:
        train.arguments_for_hydra(["model=tiny", argument])
    assert [word for word in words if word not in str(error.value)] == []
    assert train.explain(error.value) == str(error.value)


@pytest.mark.parametrize(
    "argument, words",
    [
        ("model=Qwen/Qwen2-0.5B", ["model=blank_model model.name_or_path=Qwen/Qwen2-0.5B"]),
        ("ref_model=x", ["no key ref_model", "the reference is the policy"]),
        ("optimizer_kwargs=[1]", ["optimizer_kwargs", "a mapping"]),
        ("sampling=[1]", ["sampling holds keys of its own", "sampling.top_p"]),
        ("hydra=true", ["hydra=true", "the name of one of its files"]),
        ("lr=(1", ["cannot read the argument lr=(1"]),
    ],
)
def test_what_hydra_refuses_is_explained(argument, words, monkeypatch):
    arguments = train.arguments_for_hydra(["model=tiny", argument])
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(Exception) as error:
        compose_config(*arguments)
    message = train.explain(error.value)
    assert [word for word in words if word not in message] == [] and len(message.splitlines()) == 1


def test_a_sweep_of_bad_values(command, tmp_path):
    done = command("-m", "model=tiny", "loss=dpo", "loss.beta=-1,-2", "local_dirs=[runs]")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "job 0: error: loss.beta=-1" in done.stderr and "job 1: error: loss.beta=-2" in done.stderr
    assert not any(files for _, _, files in os.walk(tmp_path))


def test_a_traceback_on_request(command):
    done = command("model=tiny", "lr=fast", HYDRA_FULL_ERROR="1")
    assert done.returncode == 2 and "Traceback" in done.stderr


def test_help_and_cfg(command, tmp_path):
    help_text = command("--help").stdout
    for word in ("experiment=quickstart", "loss.beta", "batch_size", "model: blank_model", "resume=RUN_FOLDER"):
        assert word in help_text
    shown = command(*REFERENCE_COMMANDS[3].split(), "--cfg", "job").stdout
    assert OmegaConf.create(shown).model.name_or_path == "EleutherAI/pythia-6.9b"
    assert os.listdir(tmp_path) == []


# ---- Sweeps and results, with a trainer that only writes down what it was given -------------------------------------

SCRIPT = """
import os, sys
sys.path.insert(0, {root!r})
import train

def fake(config, run_dir, world):
    with open(os.path.join(run_dir, "metrics.jsonl"), "a") as file:
        print(os.getpid(), config.wandb.group, world.size, config.optimizer_kwargs["weight_decay"], file=file)
    if config.seed == 13:
        raise RuntimeError("bad luck")
    if config.seed == 14:
        raise OSError("")
    return config.loss.options['beta'] * 10

if __name__ == "__main__":
    train.train = fake
    results = []
    main = train.main.__wrapped__
    sys.exit(train.command_line())
"""


@pytest.fixture
def fake_command(tmp_path):
    (tmp_path / "fake.py").write_text(SCRIPT.format(root=str(ROOT)))

    def run(*arguments):
        return subprocess.run(
            [
                sys.executable,
                "fake.py",
                "model=tiny",
                "loss=dpo",
                "local_dirs=[runs]",
                "optimizer_kwargs.weight_decay=0.1",
                *arguments,
            ],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            timeout=100,
        )

    return run


def test_sweep_jobs_share_nothing_but_their_group(fake_command, tmp_path):
    done = fake_command("-m", "loss.beta=0.1,0.2", "trainer=FSDPTrainer", "world_size=2")
    assert done.returncode == 0, done.stderr
    runs = sorted((tmp_path / "runs").glob("*/tiny_dpo_hh_*"))
    lines = [line.split() for run in runs for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(runs) == 2 and len({pid for pid, *_ in lines}) == 4, "a process for each rank of each job"
    assert {size for _, _, size, _ in lines} == {"2"}
    assert len({group for _, group, _, _ in lines}) == 1 and lines[0][1].startswith("sweep_")
    assert [OmegaConf.load(run / "config.yaml").loss.beta for run in runs] == [0.1, 0.2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fake.py", "runs"]


def test_a_failure_that_is_no_mistake_shows_its_traceback_first(fake_command):
    done = fake_command("seed=13", "trainer=FSDPTrainer", "world_size=2")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.count("RuntimeError: bad luck") <= 2
    assert "rank" in done.stderr.splitlines()[-1]


def test_main_returns_the_metric(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(train.launch, "launch", lambda function, config, run_dir, fresh: seen.append(run_dir) or 0.25)
    config = compose_config("model=tiny", f"local_dirs=[{tmp_path}]")
    assert train.main.__wrapped__(config) == 0.25
    assert OmegaConf.load(os.path.join(seen[0], "config.yaml")).exp_name == "tiny_sft_hh"


def test_main_can_start_processes_from_a_launcher_that_was_sent_its_code(monkeypatch, tmp_path):
    """As submitit does: main() runs in a process whose __main__ is another program."""
    sent = []
    monkeypatch.setattr(train.launch, "launch", lambda function, *arguments, **more: sent.append(function))
    elsewhere = runpy.run_path(str(ROOT / "train.py"), run_name="no module of this name")
    elsewhere["main"].__wrapped__(compose_config("model=tiny", f"local_dirs=[{tmp_path}]"))
    assert pickle.loads(pickle.dumps(sent[0])) is train.train


# ---- The launcher ---------------------------------------------------------------------------------------------------


def sharded_config(**changes):
    config = settings.finalize(compose_config("model=tiny", "trainer=FSDPTrainer", "device=cpu", "world_size=2"))
    return settings.replace(config, changes)


def total_rank(config, run_dir, world):
    import torch

    assert utils.broadcast_object({"from": world.rank}, world, src=1) == {"from": 1}
    assert utils.gather_objects("x" * world.rank, world) == ["", "x"]
    total = utils.all_reduce_sum(torch.tensor([1.0, world.rank]), world)
    utils.check_same("equal", "the data", world)
    return total.tolist() + [run_dir]


def only_rank_1_fails(config, run_dir, world):
    if world.rank == 1:
        raise RuntimeError("this is where it began")
    utils.barrier(world)


def only_rank_1_is_mistaken(config, run_dir, world):
    if world.rank == 1:
        raise ValueError("lr=7 is not allowed; allowed: less")
    utils.barrier(world)


def rank_1_is_killed(config, run_dir, world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    utils.barrier(world)


def rank_0_is_stuck(config, run_dir, world):
    if world.rank == 1:
        raise RuntimeError("this is where it began")
    time.sleep(600)


def ranks_differ(config, run_dir, world):
    utils.check_same(str(world.rank), "the data", world)


def ask_for_a_code(config, run_dir, world):
    utils.barrier(world)
    raise SystemExit(75)


def test_results_and_collectives():
    assert launch.launch(total_rank, sharded_config(), "folder") == [2.0, 1.0, "folder"]


@pytest.mark.slow
def test_results_over_a_port():
    assert launch.launch(total_rank, sharded_config(fsdp_port=free_port()), "folder")[0] == 2.0


def test_the_rank_that_failed_first_is_shown():
    began = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 of 2 failed: this is where it began") as failure:
        launch.launch(only_rank_1_fails, sharded_config())
    assert "only_rank_1_fails" in failure.value.trace and time.monotonic() - began < 40
    with pytest.raises(RankFailure, match="rank 1 of 2 .*SIGKILL") as failure:
        launch.launch(rank_1_is_killed, sharded_config())
    assert failure.value.is_explained and not failure.value.trace


def test_a_stuck_rank_is_ended(monkeypatch):
    monkeypatch.setattr(spawn, "FAILURE_GRACE_SECONDS", 1.0)
    with pytest.raises(RankFailure, match="rank 1 of 2 failed: this is where it began"):
        launch.launch(rank_0_is_stuck, sharded_config())


def test_a_users_mistake_in_a_rank_is_reported_as_one():
    with pytest.raises(ValueError, match="^lr=7 is not allowed; allowed: less$") as error:
        launch.launch(only_rank_1_is_mistaken, sharded_config())
    assert error.value.trace.startswith("Traceback")
    with pytest.raises(ValueError, match="the data differs between the processes: rank 1 not the same as rank 0"):
        launch.launch(ranks_differ, sharded_config())


def test_an_exit_code_comes_through():
    with pytest.raises(SystemExit) as request:
        launch.launch(ask_for_a_code, sharded_config())
    assert request.value.code == 75


PARENT = """
import sys, time
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from parallel import launch
from test_command_line import sharded_config

def wait(config, run_dir, world):
    import os, subprocess
    helper = subprocess.Popen(["sleep", "600"])
    os.write(1, b"pid %d\\n" % os.getpid())  # in one piece, unlike print
    time.sleep(600)

if __name__ == "__main__":
    launch.launch(wait, sharded_config())
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_no_orphans(tmp_path, number):
    (tmp_path / "parent.py").write_text(PARENT.format(root=str(ROOT)))
    parent = subprocess.Popen(
        [sys.executable, "parent.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    pids = [int(parent.stdout.readline().split()[1]) for _ in range(2)]
    parent.send_signal(number)
    code = parent.wait(timeout=20)
    assert code == {signal.SIGKILL: -9, signal.SIGINT: -2, signal.SIGTERM: 128 + 15}[number] or code == 130
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, pids))
    assert os.listdir(tmp_path) == ["parent.py"]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


JOINED = """
import os, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from parallel import launch
from test_command_line import sharded_config, total_rank

if __name__ == "__main__":
    config = sharded_config(seed=int(os.environ["RANK"]) if sys.argv[1] == "differ" else 0)
    try:
        text = f"result {{launch.launch(total_rank, config, 'folder')}}"
    except ValueError as error:
        text = f"refused {{error}}"
    os.write(1, (text + "\\n").encode())  # in one piece
"""


@pytest.mark.parametrize(
    "how, expected",
    [
        ("same", "result [2.0, 1.0, 'folder']"),
        pytest.param("differ", "refused the configuration differs between the processes", marks=pytest.mark.slow),
    ],
)
def test_joining_torchrun(tmp_path, how, expected):
    (tmp_path / "joined.py").write_text(JOINED.format(root=str(ROOT)))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "--master_port",
            str(free_port()),
            "joined.py",
            how,
        ],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=100,
    )
    assert done.stdout.count(expected) == 2, done.stdout + done.stderr


# ---- Folders and resuming -------------------------------------------------------------------------------------------


def test_two_runs_never_share_a_folder(tmp_path, monkeypatch):
    names = iter(["a", "a", "a", "b"])
    monkeypatch.setattr(utils, "get_local_run_dir", lambda *_: str(tmp_path / next(names)))
    assert utils.make_run_dir("x", []) != utils.make_run_dir("x", [])


def test_local_dirs(tmp_path):
    (tmp_path / "second").mkdir()
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    assert utils.get_local_dir([first, second, third]).startswith(second + "/")
    assert utils.get_local_dir([first, third]).startswith(third + "/")
    assert re.fullmatch(r".*/run_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{6}", utils.get_local_run_dir("run", [first]))
    assert sorted(os.listdir(tmp_path)) == ["second"], "names only: nothing is made"


def test_an_unwritable_place_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="local_dirs"):
        utils.make_run_dir("x", [str(tmp_path / "file")])


def a_run(tmp_path, *overrides):
    config = settings.finalize(compose_config("model=tiny", f"local_dirs=[{tmp_path}]", *overrides))
    folder = run_folder.make(config)
    os.makedirs(os.path.join(folder, "step-8", "state"))
    os.symlink("step-8", os.path.join(folder, "LATEST"))
    return folder


def resumed(tmp_path, *overrides):
    overrides = ["model=tiny", f"local_dirs=[{tmp_path}]", *overrides]
    config = compose_config(*overrides)
    found, _ = resume.resumed_config(config, overrides)
    settings.validate(found)
    return found


def test_another_folder_for_a_run_that_is_resumed_is_refused(tmp_path):
    folder = a_run(tmp_path)
    with pytest.raises(
        ValueError, match="local_run_dir=.*/else has no effect: .* Leave local_run_dir=null; or .*archive="
    ):
        resumed(tmp_path, f"resume={folder}", f"local_run_dir={tmp_path}/else")
    assert resumed(tmp_path, f"resume={folder}/LATEST", f"local_run_dir={folder}/").resume == str(folder)


def test_resume_takes_the_recorded_settings(tmp_path):
    folder = a_run(tmp_path, "lr=3e-5", "batch_size=8")
    alone, notes = resume.resumed_config(compose_config(f"resume={folder}"), [f"resume={folder}"])
    assert notes == []
    assert alone.lr == 3e-5 and alone.resume == folder and alone.model.name_or_path == "tiny"
    longer = resumed(tmp_path, f"resume={folder}", "n_epochs=2")
    assert longer.n_epochs == 2 and longer.lr == 3e-5


def test_resume_refuses_another_run(tmp_path):
    folder = a_run(tmp_path, "loss=dpo")
    with pytest.raises(ValueError, match=r"(?s)batch_size: 4 -> 16.*loss.beta: 0.1 -> 0.2"):
        resumed(tmp_path, f"resume={folder}", "loss=dpo", "loss.beta=0.2", "batch_size=16")
    with pytest.raises(ValueError, match="not a run folder"):
        resumed(tmp_path, f"resume={tmp_path}")


@pytest.mark.parametrize("word", ["resume=[1]", "resume=3", "local_dirs=3", "exp_name=[a]", "datasets=hh"])
def test_values_of_another_type_are_refused_before_a_run_is_looked_for(monkeypatch, word):
    words = ["model=tiny", "resume=auto", word]
    hydra = SimpleNamespace(overrides=SimpleNamespace(task=OmegaConf.create(words)), mode=None)
    monkeypatch.setattr(train, "HydraConfig", SimpleNamespace(initialized=lambda: True, get=lambda: hydra))
    config = compose_config(*{each.partition("=")[0]: each for each in words}.values())
    with pytest.raises(ValueError, match="is not allowed") as error:
        train.main.__wrapped__(config)
    assert word.partition("=")[0] in str(error.value)


def test_arguments_with_interpolations_stay_as_they_are(monkeypatch):
    words = OmegaConf.create(["lr=${nowhere}", "exp_name=${seed}"])
    hydra = SimpleNamespace(overrides=SimpleNamespace(task=words))
    monkeypatch.setattr(train, "HydraConfig", SimpleNamespace(initialized=lambda: True, get=lambda: hydra))
    assert train.overrides_of_job() == ["lr=${nowhere}", "exp_name=${seed}"]


def test_resume_auto(tmp_path):
    assert resumed(tmp_path, "resume=auto").resume is None, "nothing there: a fresh run"
    first = a_run(tmp_path)
    newest = a_run(tmp_path)
    a_run(tmp_path, "lr=1e-3")
    os.remove(os.path.join(a_run(tmp_path), "LATEST"))
    assert resumed(tmp_path, "resume=auto").resume == newest != first


def test_a_resumed_run_keeps_the_date_of_its_chat_template(tmp_path):
    folder = a_run(tmp_path, "data.template_date=2026-11-30")
    for how in ("resume=auto", f"resume={folder}"):
        found = resumed(tmp_path, how)
        assert found.resume == folder and found.data.template_date == "2026-11-30"
    assert compose_config("model=tiny").data.template_date is None, "a new run has its own date"
    assert resumed(tmp_path, f"resume={folder}", "data.template_date=2026-12-01").data.template_date == "2026-12-01"


def test_a_run_records_the_date_on_which_it_begins(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(train, "run", lambda config, **_: ran.append(config))
    monkeypatch.setattr(train, "check_devices", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "model=tiny", f"local_dirs=[{tmp_path}]"])
    assert train.command_line() == 0
    assert ran[0].data.template_date == time.strftime("%Y-%m-%d")


def test_a_run_that_wrote_nothing_leaves_no_folder(tmp_path):
    folder = a_run(tmp_path)
    run_folder.discard_unused(folder)
    assert os.path.isdir(folder), "it has a checkpoint"
    os.remove(os.path.join(folder, "LATEST"))
    shutil.rmtree(os.path.join(folder, "step-8"))
    run_folder.discard_unused(folder)
    assert not os.path.exists(folder)


def test_the_open_files_limit_is_raised():
    code = textwrap.dedent("""
        import resource
        from parallel import launch
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        launch.raise_open_files_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    """)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "argument",
    [
        "hydra=0.2",
        "+=",
        "@loss.average_log_prob=false",
        "--resolve",
        "loss=" + "<" * 9000,
        "--lr=" + "1" * 9000,
        "=" + "1" * 9000,
        "loss=" + "1" * 9000,
    ],
)
def test_what_hydra_stumbles_over_is_answered_in_one_line(monkeypatch, tmp_path, argument):
    from hostile_commands import command_line

    monkeypatch.chdir(tmp_path)
    message = command_line(["model=tiny", argument])
    assert message.startswith("error: ") and message.count("\n") == 1 and len(message) < 600


@pytest.mark.parametrize(
    "argument", ["optimizer_kwargs={1:2}", "optimizer_kwargs={null:2}", "+loss={1:2}", "data.weights={1:2}"]
)
def test_keys_of_a_mapping_that_are_no_text_are_refused(monkeypatch, tmp_path, argument):
    from hostile_commands import command_line

    monkeypatch.chdir(tmp_path)
    assert command_line(["model=tiny", "loss=dpo", argument]).startswith("error: ")


# ---- Mixes of data sets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", settings.options("data_mix"))
def test_a_mix_names_data_sets_that_are_known_and_weights_of_these(name):
    config = compose_config("model=tiny", f"data_mix={name}")
    settings.validate(config, device_count=0)
    assert set(config.data.weights) <= set(config.datasets) and len(config.datasets) > 1


def test_the_command_line_goes_before_a_mix_and_what_then_fits_nothing_is_refused():
    config = compose_config("model=tiny", "data_mix=hh_shp", "data.weights.shp=2")
    assert config.data.weights == {"shp": 2}
    with pytest.raises(ValueError, match="shp is not among datasets"):
        settings.validate(compose_config("model=tiny", "data_mix=hh_shp", "datasets=[hh]"), device_count=0)


def test_a_mix_of_ones_own_and_a_misspelt_one(command, tmp_path):
    (tmp_path / "mine" / "data_mix").mkdir(parents=True)
    for name in ("a", "b"):
        rows = [{"prompt": f"{name}{n}", "chosen": "yes", "rejected": "no"} for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"# @package _global_\ndatasets: [{tmp_path}/a.jsonl, {tmp_path}/b.jsonl]\ndata: {{weights: {{b: 0.5}}}}\n"
    (tmp_path / "mine" / "data_mix" / "ours.yaml").write_text(text)
    done = command(f"--config-dir={tmp_path}/mine", "model=tiny", "loss=dpo", "data_mix=ours", "--cfg", "job")
    assert done.returncode == 0 and "b: 0.5" in done.stdout and "b.jsonl" in done.stdout, done.stderr
    wrong = command("model=tiny", "data_mix=hh_sph")
    assert wrong.returncode == 2 and "did you mean hh_shp?" in wrong.stderr


def test_a_resumed_run_keeps_its_mix():
    saved = compose_config("model=tiny", "data_mix=hh_shp")
    same = resume.changed_keys(compose_config("model=tiny", "data_mix=hh_shp"), saved, ["data_mix=hh_shp"])
    assert same == {}
    other = resume.changed_keys(compose_config("model=tiny", "data_mix=hh_shp_se"), saved, ["data_mix=hh_shp_se"])
    assert {"datasets", "data.weights"} == set(other)
