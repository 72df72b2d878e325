"""scripts/compare_commits finds a difference between two checkouts where there is one, and none where there is none."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT


def compare(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "compare_commits"), *map(str, arguments)],
        text=True,
        capture_output=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A second checkout of the present files, without git."""
    folder = tmp_path_factory.mktemp("checkout") / "copy"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests", "docs", "wandb"))
    return folder


ONE_CASE = ("--models", "tiny", "--losses", "dpo", "--trainers", "BasicTrainer", "--steps", "2")


def test_the_same_code_gives_the_same_bits_also_when_resumed(copy):
    done = compare(ROOT, copy, *ONE_CASE, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 1 cases are equal" in done.stdout


def test_a_changed_number_is_found_in_the_step_where_it_first_shows(copy):
    config = copy / "config" / "config.yaml"
    before = config.read_text(encoding="utf-8")
    config.write_text(before.replace("max_grad_norm: 10.0", "max_grad_norm: 0.1"), encoding="utf-8")
    try:
        done = compare(ROOT, copy, *ONE_CASE)
    finally:
        config.write_text(before, encoding="utf-8")
    assert done.returncode == 1, done.stdout + done.stderr
    # The first step's loss and norm are taken before the update that differs.
    assert "step 1: loss/eval" in done.stdout and "1 of 1 cases differ" in done.stdout


def test_help_and_mistakes():
    assert "--resume" in compare("--help").stdout
    for arguments, words in (
        (("no-such-commit", ROOT), "no-such-commit: neither a commit nor a folder with a train.py"),
        ((ROOT, ROOT, "--steps", "1"), "--steps: 2 to 100"),
    ):
        done = compare(*arguments)
        assert done.returncode == 2 and words in done.stderr, done.stderr
