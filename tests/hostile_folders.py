"""Hostile folders: data, models, archives and run folders with files that are torn, odd, missing or of another sort."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

from hostile_commands import command_line
from hostile_rows import ROWS, SUFFIXES, read_and_check, settings_with, tokenizers, write
from hostile_values import spoiled, text, torn

NAMES = (
    "train.jsonl", "test.jsonl", "train.json", "train.csv", "train.parquet", "train.jsonl.gz", "train.jsonl.zst",
    "train.tsv", "train.arrow", "validation.jsonl",
    "eval.jsonl", "data.jsonl", "extra.jsonl", "training.jsonl", "train_prefs.jsonl", "train_sft.jsonl",
    "train_gen.jsonl", "test_prefs.jsonl", "train-00000-of-00002.parquet",
    "train-00001-of-00002.parquet", "TRAIN.JSONL", "train (1).jsonl", ".train.jsonl", "README.md", "data/train.jsonl",
    "train/a.jsonl", "test/b.jsonl", "a\nb.jsonl", "é.jsonl",
    "dataset_dict.json", "dataset_info.json", "state.json", "train.txt", "train.bin", "train.pkl", "a.tar.gz",
)  # fmt: skip
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@functools.cache
def prepare() -> None:
    """Make what all cases share."""
    import hostile_commands
    import hostile_rows

    hostile_commands.prepare(), hostile_rows.prepare()
    sound_model(), sound_archives(), sound_run()


def make(chance: random.Random, folder: Path):
    """A folder of one of the four sorts, and what a run does with it."""
    return chance.choice((data_folder, data_folder, model_folder, model_folder, archive, run_to_resume, run_to_resume))(
        chance, folder
    )


# ---- Spoiling a folder ----------------------------------------------------------------------------------------------


def spoil(chance: random.Random, path: Path) -> str:
    """Do something to one file; what was done, in words."""
    if path.exists() and not path.is_file():  # spoiled before, or LATEST
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return f"{path.name}: removed"
    way = chance.choice(
        ("tear", "tear", "remove", "empty", "folder", "loop", "dangling", "fifo", "json", "pointer", "locked")
    )
    if way == "json" and path.suffix not in (".json", ".jsonl"):
        way = "tear"
    data = path.read_bytes() if path.is_file() else b""
    if way in ("tear", "json", "empty", "pointer"):
        if way == "json":
            try:
                data = json.dumps(spoiled(chance, json.loads(data), 0.15)).encode()
            except ValueError:
                data = b"{}"
        elif way == "tear":
            data = torn(chance, data)
        else:
            pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
            data = b"" if way == "empty" else pointer
        if path.is_symlink():  # else what it points at would change, which may be a folder
            path.unlink()
        path.write_bytes(data)
        return f"{path.name}: {way}"
    path.unlink(missing_ok=True)
    if way == "folder":
        path.mkdir()
        if chance.random() < 0.5:
            (path / "x").write_bytes(data)
    elif way == "loop":
        path.symlink_to(path.name)
    elif way == "dangling":
        path.symlink_to("nowhere")
    elif way == "fifo":
        os.mkfifo(path)
    elif way == "locked":
        path.write_bytes(data)
        path.chmod(0)
    return f"{path.name}: {way}"


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())


# ---- Data -----------------------------------------------------------------------------------------------------------


def data_folder(chance: random.Random, folder: Path):
    """A folder named as a data set, with files of odd names and sorts."""
    data = folder / "data"
    data.mkdir()
    rows = [ROWS["pairs"](chance) for _ in range(chance.randrange(1, 5))]
    done = []
    for name in chance.sample(NAMES, chance.randrange(0, 4)) + ["train.jsonl"] * (chance.random() < 0.4):
        path = data / name
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            continue
        write(chance, path, rows) if path.suffix in "".join(SUFFIXES) else path.write_bytes(
            torn(chance, b"some text\n")
        )
        done.append(name)
    written = files_of(data)
    if written and chance.random() < 0.6:
        done.append(spoil(chance, chance.choice(written)))
    if chance.random() < 0.1:
        (data / "inside").symlink_to(data)
        done.append("a link to itself")
    named = chance.choice((data, data, data, data / chance.choice(NAMES), data / "train"))
    kind = chance.choice(("pairs", "responses"))

    def run() -> None:
        config = settings_with(chance, folder, str(named), max_length=512, max_prompt_length=256)
        # Files that are read together may hold other rows than `rows`, torn ones.
        read_and_check(config, tokenizers()["bytes"], kind, [], chance)

    return f"data folder with {done}, named {named.name}", run


# ---- Models and archives --------------------------------------------------------------------------------------------


@functools.cache
def sound_model() -> Path:
    """The folder of a tiny model, made once a process."""
    from runs import save_model

    folder = Path(tempfile.mkdtemp(prefix="fuzz-model-"))
    save_model(folder, "llama")
    return folder


def model_folder(chance: random.Random, folder: Path):
    """A model folder in which something is wrong."""
    place = folder / "model"
    shutil.copytree(sound_model(), place)
    done = [spoil(chance, place / chance.choice(MODEL_FILES)) for _ in range(chance.choice((0, 1, 1, 1, 2)))]
    if chance.random() < 0.3 and (place / "config.json").is_file() and os.access(place / "config.json", os.R_OK):
        done.append(odd_config(chance, place / "config.json"))
    return f"model folder with {done}", lambda: load_model(folder, "model")


def load_model(folder: Path, name: str, *more: str) -> str:
    """Load a model as a run does; what is said about it if it is refused."""
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = [
        "model=blank_model",
        f"model.name_or_path={name}",
        "datasets=[rows.jsonl]",
        "local_dirs=[runs]",
        "loss=dpo",
    ]

    def start(config) -> None:
        import torch

        from modeling import loading

        tokenizer = loading.load_tokenizer(config)
        model = loading.load_model(config, tokenizer, torch.float32, "cpu")
        check_weights(model, sound_model())

    return command_line([*words, "device=cpu", "wandb.enabled=false", *more], start)


def odd_config(chance: random.Random, path: Path) -> str:
    """Another value for a key of config.json."""
    try:
        config = json.loads(path.read_text())
        key = chance.choice(sorted(config))
    except (ValueError, IndexError, TypeError):
        return "config.json as it is"
    config[key] = chance.choice(
        (None, 0, -1, 1, 3, 7, 2**40, 0.5, "x", [], {}, True, "bert", "t5", "gpt2", ["T5ForConditionalGeneration"])
    )
    if chance.random() < 0.15:
        config["quantization_config"] = {
            "quant_method": chance.choice(("bitsandbytes", "gptq", "awq", "x")),
            "load_in_4bit": True,
        }
    path.write_text(json.dumps(config))
    return f"config.json: {key}={config[key]!r}"


def check_weights(model, folder: Path) -> None:
    """A model that was loaded has the stored weights, none of them random or missing."""
    import torch
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    for name, value in model.state_dict().items():
        if name in stored:
            assert torch.isfinite(value).all(), f"{name} is not finite"
    assert sum(name in stored for name in model.state_dict()), "none of the stored weights"


@functools.cache
def sound_archives() -> Path:
    """Archives of the model: policy.pt, bare .pt and .safetensors, a Hugging Face folder."""
    import torch
    from safetensors.torch import load_file

    folder = Path(tempfile.mkdtemp(prefix="fuzz-archives-"))
    state = load_file(sound_model() / "model.safetensors")
    torch.save({"step_idx": 1, "state": state, "metrics": {}}, folder / "policy.pt")
    torch.save(state, folder / "bare.pt")
    shutil.copy(sound_model() / "model.safetensors", folder / "w.safetensors")
    shutil.copytree(sound_model(), folder / "hf")
    torch.save({"state": {"x": object()}}, folder / "objects.pt")
    torch.save({"state": {**state, "strange.weight": torch.ones(2)}}, folder / "more.pt")
    torch.save({"state": dict(list(state.items())[1:])}, folder / "fewer.pt")
    torch.save({"state": {name: value[:1] for name, value in state.items()}}, folder / "shapes.pt")
    torch.save([1, 2], folder / "list.pt")
    return folder


def archive(chance: random.Random, folder: Path):
    """An archive that does not fit or is broken, and putting its weights into a model."""
    place = folder / "archive"
    shutil.copytree(sound_archives(), place)
    name = chance.choice(sorted(os.listdir(place)))
    found = place / name
    done = [] if chance.random() < 0.3 else [spoil(chance, chance.choice(files_of(found)) if found.is_dir() else found)]

    def run() -> str:
        return load_model(folder, str(sound_model()), f"model.archive=archive/{name}")

    return f"archive {name}, {done}", run


# ---- Run folders ----------------------------------------------------------------------------------------------------


@functools.cache
def sound_run() -> Path:
    """A run folder with two checkpoints, and its data beside it: made once a process."""
    from conftest import compose_config

    import settings
    import trainers
    from checkpoint import run_folder
    from utils import World

    folder = Path(tempfile.mkdtemp(prefix="fuzz-run-"))
    rows = [{"prompt": f"say {n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "model=tiny", "model.random_config.hidden_size=8", "model.random_config.intermediate_size=8",
        "model.random_config.num_attention_heads=2",
        "model.random_config.num_key_value_heads=2", "loss=dpo", f"datasets=[{folder}/rows.jsonl]",
        f"local_dirs=[{folder}/runs]", f"local_run_dir={folder}/run", "device=cpu",
        "wandb.enabled=false", "n_examples=8", "batch_size=2", "eval_every=4", "sample_during_eval=false",
        "data.num_workers=1",
        "minimum_log_interval_secs=0",
    ]  # fmt: skip
    config = compose_config(*words)
    settings.validate(config)
    finalized = settings.finalize(config)
    trainers.run(finalized, run_folder.make(finalized), World())
    return folder


def run_to_resume(chance: random.Random, folder: Path):
    """A run folder in which something is wrong, and resuming it up to its first step."""
    whole = sound_run()
    place = folder / "run"
    # Copying a run with links followed turns LATEST into a folder.
    shutil.copytree(whole / "run", place, symlinks=chance.random() < 0.8)
    done = []
    for _ in range(chance.choice((0, 1, 1, 1, 2))):
        found = [*files_of(place), place / "config.yaml", place / "LATEST"]
        path = chance.choice(found)
        if path.exists() or path.is_symlink():
            done.append(str(path.parent.relative_to(folder)) + "/" + spoil(chance, path))
    if chance.random() < 0.15 and (place / "config.yaml").is_file():
        (place / "config.yaml").write_text(
            chance.choice(
                (
                    "",
                    "a",
                    "[]",
                    "a: [",
                    "model: 1\n",
                    "{}",
                    "\x00",
                    text(chance).replace("\ud800", "").encode("utf-8", "replace").decode(),
                )
            ),
            encoding="utf-8",
        )
        done.append("config.yaml: another text")
    target = chance.choice(("run", "run", "run", "run/LATEST", "run/step-8", "run/step-4", "run/config.yaml", "."))
    more = (
        []
        if chance.random() < 0.7
        else [
            chance.choice(
                (
                    "lr=1e-3",
                    "n_examples=12",
                    "n_examples=null",
                    "loss=ipo",
                    "batch_size=4",
                    "seed=1",
                    "resume=auto",
                    "debug=true",
                )
            )
        ]
    )
    deep = chance.random() < 0.3

    def start(config) -> None:
        import trainers
        from checkpoint import run_folder
        from utils import World

        run_dir = run_folder.make(config)
        trainer = trainers.TRAINERS[config.trainer](config, run_dir, World())
        try:
            if deep:
                trainer.prepare()
            else:
                trainer.saver.find_point()
        finally:
            trainer.checkpointer.close()
            trainer.heartbeat.close()
            trainer.reporter.finish(True)

    return f"run folder with {done}, resume={target} {more}", lambda: command_line([f"resume={target}", *more], start)
