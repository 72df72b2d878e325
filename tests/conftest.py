"""What all tests share: the project on the path, few threads, no network, and short ways to compose and run."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest  # noqa: E402


def compose_config(*overrides: str):
    """The settings as the command line `python train.py OVERRIDES` composes them."""
    import hydra

    with hydra.initialize_config_dir(str(ROOT / "config"), version_base="1.3"):
        return hydra.compose("config", overrides=list(overrides))


@pytest.fixture
def compose():
    return compose_config


@pytest.fixture
def command(tmp_path):
    """Runs `python train.py ARGUMENTS` in an empty folder; gives the completed process."""

    def run(*arguments: str, cwd=tmp_path, timeout: float = 60, **environment: str):
        return subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *arguments],
            cwd=cwd,
            timeout=timeout,
            text=True,
            capture_output=True,
            env={**os.environ, **environment},
        )

    return run


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the training runs of the tests keep their files, with a small data set in it (runs.write_data)."""
    from runs import write_data

    path = tmp_path_factory.mktemp("runs")
    write_data(path / "data")
    return path


@pytest.fixture(scope="session")
def pools():
    """Processes that train together, by world size (runs.Pool): started when first asked for, and kept."""
    from runs import Pool

    made = {}
    yield lambda size: made.setdefault(size, Pool(size))
    for pool in made.values():
        pool.stop()


@pytest.fixture
def sharded(folder, pools):
    """Trains as `baseline` does but for the placement and what else is given; the runs that the ranks saw."""

    from runs import MODELS, STRONG, new_run_dir, placement, train_together

    from losses import find_loss

    def run(size, name, *more, model="llama", loss="dpo", prepare=None, timeout=120):
        options = [*STRONG]
        reads_reference = loss == "mix" or find_loss(loss).reads_reference
        if reads_reference and "reference.mode=online" not in more:
            # A cold cache, or these ranks would read what BasicTrainer computed.
            options.append(f"reference.cache_dir={new_run_dir(folder)}")
        return train_together(
            pools(size),
            folder,
            *MODELS[model],
            f"loss={loss}",
            *options,
            *placement(name, size),
            *more,
            prepare=prepare,
            timeout=timeout,
        )

    return run


def free_port() -> int:
    """A TCP port of this host that is free now; another program may still take it, so prefer a file store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def forge(tmp_path_factory):
    from fault_runs import Forge

    with Forge(tmp_path_factory.mktemp("faults")) as forge:
        yield forge


@pytest.fixture
def calm(forge, request):
    """Makes the undisturbed run of some settings, once; gives its folder."""
    made = forge.__dict__.setdefault("made", {})

    def make(*settings):
        if settings not in made:
            made[settings] = forge.folder / f"calm-{len(made)}"
            forge.run(*settings, f"local_run_dir={made[settings]}")
        return made[settings]

    return make


@pytest.fixture
def place(forge, request):
    """A run folder of this test's own."""
    return forge.folder / "".join(c if c.isalnum() else "-" for c in request.node.name)
