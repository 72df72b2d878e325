"""Hostile command lines: every key with odd values, odd syntax, misspellings; composed and checked as train.py does."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import sys
from pathlib import Path

from hostile_values import text

VALUES = (
    "null", "true", "false", "0", "1", "-1", "2", "3", "1.5", "-0.0", "nan", "inf", "-inf", "1e308", "1e-320", "1e400",
    "9" * 400, "0x10", "1_000", "''", '""', "' '", "abc", "a b", "'a b'", "[]", "[1]", "[a,b]", "[null]", "[[]]",
    "[a,a]",
    "[a=b.jsonl]", "{}", "{a:1}", "{a:b}", "{a:{b:1}}", "{1:2}", "{null:1}", "[{a:1}]", "???", "${lr}", "${nothing}",
    "${oc.env:HOME}",
    "${lr", "$", "~", "~/x", "ä", "日本", "\u202e", "\x00", "\n", "'", '"', "\\", "a\\", "1,2", "a,b", "range(1,3)",
    "choice(1,2)",
    "interval(0,1)", "glob(*)", "cast", "int(3.5)", "str(1)", "float(x)", "json_str({})", "shuffle(1,2)", "sort(1)",
    "tag(x)", "=", "==", "a=b", "+1", "~1",
    "../../x", "/", "/dev/null", "/nonexistent/x", ".", "x" * 300, "<|endoftext|>", "loss/eval",
    "rewards_eval/accuracies", "auto",
    "float32", "bfloat16", "float16", "cpu", "cuda", "cuda:1", "cuda:x", "mps", "meta", "AdamW", "SGD", "LBFGS",
    "Adafactor", "Rprop", "Optimizer",
    "SparseAdam", "NAdam", "RAdam", "Muon", "dpo", "ipo", "sft", "full_shard", "tiny", "pythia", "gpt2", "hh",
)  # fmt: skip
# Whole overrides, some right and many not, of the sorts that people type.
ARGUMENTS = (
    "", "=", "=5", "==", "+", "~", "++", "+=", "-", "--", "---", "lr", "lr=", "lr==1", "=lr", "+lr=1", "++lr=1", "~lr",
    "~lr=5e-7", "+new=1",
    "++new.deep.key=1", "loss=null", "loss=", "loss=[dpo]", "loss=[dpo,ipo]", "loss=dpo,ipo", "loss@x=dpo",
    "+loss@x=dpo", "~loss", "loss.name=dpo",
    "loss.nothing=1", "loss={name:dpo}", "loss={}", "model={}", "model=null", "model=[]", "model=x/y",
    "model=Qwen/Qwen2-0.5B", "model@a.b=tiny", "data=5", "data={}", "data=null",
    "fsdp=null", "fsdp=5", "hydra=5", "hydra.run.dir=x", "hydra.verbose=true", "hydra/launcher=x", "hydra.job.name=x",
    "hydra.mode=MULTIRUN", "experiment=quickstart", "experiment=x",
    "experiment=[quickstart]", "experiment=null", "--help", "--version", "--hydra-help", "--info", "--info=all",
    "--cfg", "--cfg=job", "--cfg=hydra", "--cfg=x", "--resolve", "-c",
    "-m", "--multirun", "-p", "--package=x", "--config-name=x", "--config-path=x", "--config-dir=x", "-cn", "-h", "-x",
    "--unknown", "--shell-completion", "--run",
    "learning_rate=1", "output_dir=x", "gradient_checkpointing=true", "ref_model=x", "datasets=hh", "datasets=[hh,hh]",
    "datasets=[]", "datasets=[[hh]]", "datasets=[nothing]",
    "datasets=[a=b.jsonl]", "datasets=['a b.jsonl']", "datasets=[~]", "datasets=[ä.jsonl]", "data.weights={hh:2}",
    "data.weights.hh=-1", "data.weights.hh=nan", "data.weights.hh=0",
    "data.weights.x.y=1", "data.columns={a:{b:{c:1}}}", "data.columns.prompt=question", "data.paths.hh=x",
    "data.paths={hh:[x]}", "data.plugins=[os]", "data.plugins=[x.py]",
    "optimizer_kwargs={betas:[0.8,0.9]}", "optimizer_kwargs.betas=[0.8,0.9]", "optimizer_kwargs.betas=[2,3]",
    "optimizer_kwargs.lr=1", "optimizer_kwargs.params=1",
    "optimizer_kwargs.capturable=true", "optimizer_kwargs.foreach=true", "optimizer_kwargs.fused=true",
    "optimizer_kwargs.maximize=true", "optimizer_kwargs.differentiable=true",
    "optimizer_kwargs.weight_decay=-1", "optimizer_kwargs.eps=0", "optimizer_kwargs={1:2}", "optimizer_kwargs.rho=5",
    "optimizer_kwargs.etas=[2,3]", "optimizer_kwargs.eps=[1,2]",
    "model.random_config={}", "model.random_config={model_type:llama}", "model.random_config.model_type=nothing",
    "model.random_config.hidden_size=65",
    "model.random_config.num_attention_heads=0", "model.random_config.hidden_size=x",
    "model.random_config.hiden_size=64", "model.frozen=['*']", "model.frozen=[nothing]",
    "model.local_copy=x", "model.archive=x", "model.archive=.", "model.tokenizer_name_or_path=x", "model.size=410m",
    "resume=x", "resume=.", "resume=auto", "resume=''",
    "local_run_dir=/dev/null/x", "local_run_dir=.", "local_dirs=[/dev/null]", "local_dirs=[]", "exp_name=../x",
    "exp_name=a/b", "exp_name='\x00'", "exp_name=${seed}",
    "trainer=FSDPTrainer", "trainer=TensorParallelTrainer", "trainer=BasicTrainer", "world_size=2", "tp_size=2",
    "plan=true", "plan_device_memory_gb=80", "debug=true",
    "wandb=null", "wandb.enabled=false", "sampling={}", "checkpoint.formats=[]", "checkpoint.formats=[state,state]",
    "checkpoint.formats=[x]", "early_stopping.metric=loss/eval",
    "early_stopping.metric=x", "guards={}", "reference=online", "reference.mode=online", "lr=1e308", "lr=1e400",
    "lr=[1]", "seed=-1", "seed=9223372036854775808",
    "n_epochs=null", "n_examples=null", "n_examples=5", "max_length=1", "max_length=1e3", "warmup_steps=1.0",
    "schedule=cosine", "batch_size=1e2", "tokens_per_microbatch=auto",
)  # fmt: skip
CALM = (
    "model=tiny",
    "wandb.enabled=false",
    "device=cpu",
    "local_dirs=[runs]",
    "datasets=[rows.jsonl]",
    "data.num_workers=1",
)


@functools.cache
def known_keys() -> tuple[str, ...]:
    import settings
    from losses import registry

    own = {f"loss.{option}" for loss in registry.LOSSES.values() for option in loss.options}
    return tuple(
        sorted(
            {*settings.SCHEMA, *own, "loss", "model", "fsdp", "data_mix", "experiment", "data", "checkpoint", "hydra"}
        )
    )


def misspelt(chance: random.Random, key: str) -> str:
    at = chance.randrange(len(key))
    return chance.choice(
        (
            key[:at] + key[at + 1 :],
            key[:at] + key[at] + key[at:],
            key.upper(),
            key + "s",
            key.replace("_", "-"),
            key.replace(".", ""),
        )
    )


def fitting(chance: random.Random, key: str) -> str:
    """A value of the type that a key has."""
    import settings

    declared = settings.SCHEMA.get(key)
    if declared is None:
        return chance.choice(("0.1", "0.2", "true", "false"))
    values = [str(choice) for choice in declared.choices] + ["null"] * declared.null
    low, high = declared.low or 0, min(declared.high or 1000, 1000)
    if declared.kind == "integer":
        values += [str(int(low)), str(int(low) + 1), str(chance.randrange(int(low), int(high) + 1))]
    elif declared.kind == "number":
        values += [repr(low + (high - low) * chance.random()), repr(low), "1e-3"]
    elif declared.kind == "flag":
        values += ["true", "false"]
    elif declared.kind == "names":
        values += ["[]", "[a]", "[rows.jsonl]", "['*']", "[state]", "[policy,hf]"]
    elif declared.kind == "mapping":
        values += ["{}", "{a:1}", "{rows.jsonl:2}", "{prompt:chosen}"]
    elif not values or declared.kind == "text":
        values += ["AdamW", "loss/eval", "rows.jsonl", "runs", "x"]
    return chance.choice(values)


def argument(chance: random.Random) -> str:
    way = chance.random()
    if way < 0.3:
        return chance.choice(ARGUMENTS)
    key = chance.choice(known_keys())
    if chance.random() < 0.1:
        key = misspelt(chance, key)
    if chance.random() < 0.1:
        key = chance.choice(("+", "++", "~", "-", "--", " ", "@", "a.", ".")) + key
    way = chance.random()
    value = fitting(chance, key) if way < 0.5 else chance.choice(VALUES) if way < 0.9 else text(chance)
    if chance.random() < 0.1:
        value = f"'{value}'"
    return f"{key}={value}"


@functools.cache
def prepare() -> None:
    """Import what all cases share."""
    import torch  # noqa: F401

    import planning.command  # noqa: F401
    import train  # noqa: F401
    import trainers  # noqa: F401


def make(chance: random.Random, folder: Path):
    """A command line of a run that would work, with one to three odd arguments more."""
    odd = [argument(chance) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
    words = [*CALM, f"loss={chance.choice(('sft', 'dpo', 'ipo'))}", *odd]
    if chance.random() < 0.1:
        words = odd
    if chance.random() < 0.2:
        chance.shuffle(words)
    # Null bytes and lone surrogates cannot be in a command line that a shell starts.
    words = [word.replace("\x00", "").encode("utf-8", "replace").decode() for word in words]
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")

    def run() -> str:
        return command_line(words)

    return f"python train.py {words}", run


def command_line(words: list[str], start=None) -> str:
    """train.py's own command line in this process, up to the start of training; what it says to the user if it refuses.

    start: called with the settings of a run in place of training.
    """
    import hydra

    import train

    os.environ.pop("HYDRA_FULL_ERROR", None)  # as an earlier run in this process left it
    out, errors = io.StringIO(), io.StringIO()
    ended: list[Exception] = []
    original = train.run, sys.argv, train.report_error, os.environ.get("HYDRA_FULL_ERROR")

    def started(config, fresh_process=False):
        (start or would_train)(config)

    def noted(error, *rest, **more):
        ended.append(error)
        return original[2](error, *rest, **more)

    train.run, train.report_error, sys.argv = started, noted, ["train.py", *words]
    train._reported.clear()
    train._sweep_dirs.clear()
    code = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = train.command_line()
    except SystemExit as end:  # argparse, --help
        code = end.code
    finally:
        train.run, sys.argv, train.report_error = original[:3]
        os.environ.pop("HYDRA_FULL_ERROR", None)
        hydra.core.global_hydra.GlobalHydra.instance().clear()
    for error in ended:
        if train.explain(error) is None:
            raise error
    said = errors.getvalue()
    assert code in (0, None, 2), f"exit code {code}: {said[:2000]}"
    assert "Traceback" not in said, said
    assert code != 2 or said.strip(), "it ended without a word"
    return said if code == 2 else ""


def would_train(config) -> None:
    """What a run does with accepted settings before its models: record them, read them back, make an optimizer."""
    import torch

    import settings
    from checkpoint import run_folder
    from training import optimizer

    assert settings.from_dict(settings.complete(settings.as_dict(config))) == config, (
        "settings do not survive being recorded"
    )
    run_dir = run_folder.make(config)
    assert settings.as_dict(settings.recorded(run_dir)) | {"resume": None} == settings.as_dict(config) | {
        "resume": None
    }
    weight = torch.nn.Parameter(torch.ones(2, 2))
    made = optimizer.make_optimizer(config, [{"params": [weight]}])
    for step in (0, 1, 7):
        rate = optimizer.learning_rate(config, step, step, 10)
        assert 0 <= rate <= config.lr, f"learning rate {rate}"
    weight.grad = torch.full_like(weight, 0.1)
    made.step()
    run_folder.discard_unused(run_dir)
