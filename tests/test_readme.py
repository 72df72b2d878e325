"""The README's worked examples, done as a reader does them: files written as shown, commands run as shown.

A fenced block below a comment is an example: `<!-- example: FILE -->` is that file's content,
`<!-- example: append FILE -->` goes to its end, and `<!-- example: run -->` holds commands.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"<!-- example: (?P<what>[^\n]+?) -->\s*\n```\w*\n(?P<text>.*?)\n```", re.DOTALL)
# Runs of seconds, kept inside the copy.
QUICK = [
    "device=cpu",
    "wandb.enabled=false",
    "local_dirs=[runs]",
    "n_examples=4",
    "n_eval_examples=4",
    "sampling.max_new_tokens=2",
    "data.num_workers=1",
]


def examples() -> list[tuple[str, str]]:
    return [(match["what"].strip(), match["text"] + "\n") for match in EXAMPLE.finditer(README)]


def commands(text: str) -> list[list[str]]:
    """The argument lists of a shell block: comments left out, continued lines joined."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The project's own files elsewhere, as from a clean clone."""
    folder = tmp_path_factory.mktemp("project")
    done = subprocess.run(["git", "ls-files", "-z", "--cached"], cwd=ROOT, capture_output=True, text=True)
    names = (
        [name for name in done.stdout.split("\0") if name]
        if done.returncode == 0
        else [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and ".git" not in path.parts]
    )
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def test_every_marked_block_is_found():
    assert README.count("<!-- example:") == len(examples())
    kinds = [what.split()[0] for what, _ in examples()]
    assert kinds.count("run") >= 3 and "append" in kinds  # a data set, a model, a loss


def test_the_worked_examples_work(copy):
    ran = 0
    for what, text in examples():
        if what == "run":
            for words in commands(text):
                assert words[0] == "python" and words[1] == "train.py", words
                done = subprocess.run(
                    [sys.executable, *words[1:], *QUICK],
                    cwd=copy,
                    capture_output=True,
                    text=True,
                    timeout=200,
                    env=os.environ,
                )
                assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
                ran += 1
                runs = list(copy.glob("runs/*/*/metrics.jsonl"))
                assert len(runs) == ran, "each command makes a run"
        elif what.startswith("append "):
            with open(copy / what.removeprefix("append "), "a", encoding="utf-8") as file:
                file.write("\n\n" + text)
        else:
            path = copy / what
            assert not path.exists(), f"{what} exists already"
            path.write_text(text, encoding="utf-8")
    configs = [yaml.safe_load(path.read_text()) for path in copy.glob("runs/*/*/config.yaml")]
    assert {config["loss"]["name"] for config in configs} >= {"squared_hinge", "sft", "dpo"}
    (hinge,) = [config["loss"] for config in configs if config["loss"]["name"] == "squared_hinge"]
    assert hinge == {"name": "squared_hinge", "beta": 0.1, "margin": 0.5}
    # What the example's function does not take is refused before weights are read, and a wrong type before that.
    for override, words in (
        ("loss.margin=wide", "loss.margin=wide is not allowed"),
        ("+loss.tau=1", "no key loss.tau"),
    ):
        done = subprocess.run(
            [
                sys.executable,
                "train.py",
                "model=tiny",
                "loss=hinge",
                "datasets=[capitals]",
                "data.plugins=[my_data.py]",
                *QUICK,
                override,
            ],
            cwd=copy,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 2 and words in done.stderr, done.stderr[-2000:]


def commands_outside_examples() -> list[list[str]]:
    """Every other `python train.py` line of the README that is meant to be typed."""
    found = []
    for line in README.splitlines():
        line = line.strip().removeprefix("$ ")
        if re.match(r"python (-u )?train\.py [^.]", line) and "GROUP=" not in line and "..." not in line:
            found.append(shlex.split(line, comments=True))
    return found


def test_the_other_commands_of_the_readme_are_valid(tmp_path):
    """Composed and checked as train.py would, with a folder in place of RUN_FOLDER."""
    from conftest import compose_config

    import settings

    (tmp_path / "policy.pt").write_bytes(b"weights")
    shown = [words[words.index("train.py") + 1 :] for words in commands_outside_examples()]
    assert len(shown) >= 5
    for words in shown:
        words = [word.replace("RUN_FOLDER", str(tmp_path)) for word in words if word not in ("-m", "--help")]
        words = [re.sub(r"=([^\[\],=]+),.*", r"=\1", word) for word in words]  # the first value of a sweep
        if any(word.startswith(("resume=", "data.plugins=")) for word in words) or not words:
            continue
        settings.validate(compose_config(*words))


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()


def test_scripts_that_are_named_exist():
    for name in set(re.findall(r"\bscripts/[\w./-]*\w", README)):
        assert (ROOT / name).exists(), name


def test_the_table_of_groups_is_complete():
    import settings

    for group in ("model", "loss", "fsdp", "data_mix", "experiment"):
        row = next(line for line in README.splitlines() if line.startswith(f"| `{group}` |"))
        assert [option for option in settings.options(group) if f"`{option}`" not in row] == []
