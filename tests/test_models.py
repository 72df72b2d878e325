"""Where weights come from and where they go: architectures, the Hub's cache, archives, and what opens the results."""

import json
import math
import os

import pytest
import torch
from runs import LLAMA, distance, save_model, train

from modeling import loading

LN2 = math.log(2)


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "gptj", "llama", "qwen2", "qwen3", "gemma", "phi"])
def test_every_architecture_trains_a_step(folder, tmp_path, kind):
    model = save_model(tmp_path / "model", kind)
    run = train(
        folder,
        "model=blank_model",
        f"model.name_or_path={tmp_path}/model",
        "batch_size=4",
        "n_examples=8",
        "lr=1e-4",
        "warmup_steps=0",
    )
    assert run.losses[0] == pytest.approx(LN2, abs=1e-6) and run.losses[1] != run.losses[0]
    assert not any("cannot share" in notice for notice in run.notices)
    assert 0 < distance(model.state_dict(), run.weights) < 0.1


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A run with all outputs, of a model that came from a folder with a chat template."""
    path = tmp_path_factory.mktemp("trained")
    save_model(path / "model", "gpt_neox")
    run = train(
        folder,
        "model=blank_model",
        f"model.name_or_path={path}/model",
        "loss=sft",
        "lr=1e-3",
        "batch_size=4",
        "n_examples=8",
        "warmup_steps=0",
        "debug=false",
        "sample_during_eval=true",
        "sampling.max_new_tokens=4",
        "n_eval_model_samples=2",
    )
    return path, run


def test_policy_pt_loads_as_the_dpo_reference_implementation_loads_it(trained):
    _, run = trained
    content = torch.load(os.path.join(run.run_dir, "LATEST", "policy.pt"), weights_only=True)
    assert content["step_idx"] == 8 and set(content) == {"step_idx", "state", "metrics"}
    assert content["metrics"]["loss/eval"] == run.result
    assert all(torch.equal(run.weights[name], content["state"][name]) for name in run.weights)


def test_the_hugging_face_folder_opens_and_generates(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, run = trained
    hf = os.path.join(run.run_dir, "LATEST", "hf")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(hf), AutoTokenizer.from_pretrained(hf)
    assert tokenizer.chat_template == loading.byte_tokenizer().chat_template
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**chat, max_new_tokens=3, do_sample=False).shape[1] > chat["input_ids"].shape[1]
    assert all(torch.equal(run.weights[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("what", ["", "LATEST", "LATEST/policy.pt", "LATEST/hf"])
@pytest.mark.parametrize("mode", ["cached", "online"])
def test_an_archive_sets_policy_and_reference_alike(folder, trained, what, mode):
    path, sft = trained
    start = {}

    def note(trainer):
        prepare = trainer.prepare
        trainer.prepare = lambda: (
            prepare(),
            start.update({name: value.clone() for name, value in trainer.policy.state_dict().items()}),
        )

    run = train(
        folder,
        "model=blank_model",
        f"model.name_or_path={path}/model",
        "n_examples=4",
        f"reference.mode={mode}",
        f"model.archive={os.path.join(sft.run_dir, what)}",
        prepare=note,
    )
    assert run.losses[0] == pytest.approx(LN2, abs=1e-6) and run.steps[0]["rewards_train/margins"] == 0
    assert all(torch.equal(sft.weights[name], value) for name, value in start.items())


def test_samples_of_policy_and_reference_are_written(folder):
    run = train(
        folder,
        *LLAMA,
        "lr=1e-2",
        "warmup_steps=0",
        "n_examples=12",
        "sample_during_eval=true",
        "do_first_eval=true",
        "eval_every=4",
        "sampling.max_new_tokens=8",
        "n_eval_model_samples=3",
    )
    rows = [json.loads(line) for line in open(os.path.join(run.run_dir, "samples.jsonl"))]
    times = sorted({row["examples"] for row in rows})
    assert times == [0, 4, 8, 12] and all(sum(row["examples"] == t for row in rows) == 3 for t in times)
    first, last = ([row for row in rows if row["examples"] == t] for t in (0, 12))
    assert all(row["policy"] == row["reference"] for row in first)
    assert [row["reference"] for row in first] == [row["reference"] for row in last]
    assert [row["policy"] for row in first] != [row["policy"] for row in last]


def test_pythia_from_a_hub_cache_without_a_network(folder, tmp_path, command):
    """HF_HUB_OFFLINE=1 python train.py model=pythia loss=dpo, with the cache laid out as the Hub's client does."""
    repository = tmp_path / "hub" / "models--EleutherAI--pythia-160m"
    commit = "0123456789abcdef0123456789abcdef01234567"
    save_model(repository / "snapshots" / commit, "gpt_neox")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    options = [
        "model=pythia",
        "loss=dpo",
        "device=cpu",
        f"datasets=[{folder}/data]",
        "n_examples=8",
        "batch_size=4",
        "wandb.enabled=false",
        "sampling.max_new_tokens=2",
        "local_dirs=[runs]",
    ]
    done = command(*options, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path), HF_HUB_CACHE=str(tmp_path / "hub"), timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for path in tmp_path.glob("runs/*/*/metrics.jsonl") for line in open(path)]
    assert [line["loss/train"] for line in lines if "loss/train" in line][0] == pytest.approx(LN2, abs=1e-3)
    assert lines[0]["loss/eval"] == pytest.approx(LN2, abs=1e-6)


def test_without_a_model_the_message_says_how_to_get_one(folder, tmp_path, command):
    done = command(
        "model=pythia",
        "loss=dpo",
        "device=cpu",
        f"datasets=[{folder}/data]",
        "local_dirs=[runs]",
        HF_HUB_OFFLINE="1",
        HF_HOME=str(tmp_path / "empty"),
        timeout=200,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for words in ("EleutherAI/pythia-160m", "To get one:", "hf download EleutherAI/pythia-160m", "model=tiny"):
        assert words in done.stderr
    assert not list(tmp_path.glob("runs/**/metrics.jsonl"))
