"""Law 5 for every key of the configuration, with each trainer and loss: a change is refused, or something comes of it.

`CASES` has a changed value for each key. With every pair of trainer and loss the change is either refused by a message
that names the key, or the key is read in a run of that pair; and with each trainer, and each loss once, a run with the
change is held against one without it: what is seen must differ (watched_run.py says what is looked at). A key of the
schema that has no case fails here.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from runs import SUBJECTS, new_run_dir, save_model, spoil, write_data
from watched_run import compose, launched, planned, watched_run, words_of

import settings
from modeling import loading

TRAINERS = {
    "BasicTrainer": "trainer=BasicTrainer",
    "FSDPTrainer": "trainer=FSDPTrainer world_size=4",
    "TensorParallelTrainer": "trainer=TensorParallelTrainer world_size=4 tp_size=2",
}
ALONE = {name: "" if name == "BasicTrainer" else "world_size=1 tp_size=1" for name in TRAINERS}  # this process's world
LOSSES = ("sft", "dpo", "ipo")
PAIRS = [(trainer, loss) for trainer in TRAINERS for loss in LOSSES]
RUN_WITH = {"BasicTrainer": "dpo", "FSDPTrainer": "ipo", "TensorParallelTrainer": "sft"}
# What happens before and after the model is one device's own code with every trainer, and what tensor parallelism does
# not place is FSDPTrainer's: it is run there, and elsewhere it is enough that it is read.
UNPLACED = ("data.", "sampling.", "early_stopping.", "wandb.", "loggers", "mlflow.", "trackio.")
PLACED = (
    "fsdp.",
    "model.fsdp_policy_mp",
    "precision",
    "trainer",
    "device",
    "world_size",
    "tp_size",
    "compile",
    "activation_",
    "guards.",
)

BASE = (
    "model=tiny device=cpu debug=true wandb.enabled=false sample_during_eval=false do_first_eval=false "
    "data.num_workers=1 minimum_log_interval_secs=0 eval_every=1000 n_eval_examples=2 n_examples=8 batch_size=4 "
    "lr=1e-2 warmup_steps=0 local_dirs=[{folder}/runs] datasets=[{folder}/data]"
)
# What else is switched on in the run whose reads count, so that everything that can be read is.
RICH = (
    "debug=false wandb.enabled=true sample_during_eval=true do_first_eval=true sampling.max_new_tokens=2 "
    "checkpoint.every=4 checkpoint.every_minutes=1000 early_stopping.metric=loss/eval eval_every=4 "
    "model.random_config=null model.name_or_path={folder}/llama1 guards.on_nonfinite=skip guards.max_nonfinite_steps=9"
)
SAVING = "debug=false n_examples=16 checkpoint.formats=[policy] eval_every=4"
SAMPLING = "sample_during_eval=true n_eval_model_samples=1 sampling.max_new_tokens=4 n_examples=4"
STUCK = "lr=1e-30 n_epochs=8 n_examples=32 eval_every=4"  # no evaluation is better than the one before
MOVING = (
    "datasets=[{folder}/alike] lr=1e-4 n_epochs=8 n_examples=32 eval_every=4 early_stopping.metric=loss/eval "
    "early_stopping.patience=1"
)
ONLINE = "reference.mode=online"
LOGGED = "debug=false wandb.enabled=true checkpoint.every=1000"


@dataclass(frozen=True)
class Case:
    """A change of one key.

    Attributes:
        change: on the command line, by trainer or loss where it is not the same for all. It may take a second key
            along, where one makes no sense without the other.
        context: what both runs have beside it.
        see: parts of `watched_run` in which the change must be seen; empty: any that does not depend on caches.
        spoiled: numbers of the examples whose losses are not finite in both runs.
        how: "run"; "launch": only what starting it would ask for; "plan": what is planned; "show": what is
            shown; "evaluate": what evaluate.py would score; "settings": another key.
        unseen_with: the loss with which the change is allowed and changes nothing.
        read: whether a run reads the key from the settings; False where it goes by another way, which `see` shows.
    """

    change: str | dict[str, str]
    context: str = ""
    see: tuple[str, ...] = ()
    spoiled: tuple[int, ...] = ()
    how: str = "run"
    unseen_with: str = ""
    read: bool = True

    def changes(self, trainer: str, loss: str) -> str:
        return self.change if isinstance(self.change, str) else self.change.get(trainer) or self.change[loss]


FILES = ("files",)
STREAMED = "data.streaming=true n_epochs=null"
STREAMED_ONLINE = f"{STREAMED} reference.mode=online"
CASES = {
    "model.name_or_path": Case("model.name_or_path=other", see=("run folder",)),
    "model.local_copy": Case(
        "model.local_copy={folder}/llama2", "model.random_config=null model.name_or_path={folder}/llama1"
    ),
    "model.random_config": Case("model.random_config.hidden_size=32"),
    "model.tokenizer_name_or_path": Case("model.tokenizer_name_or_path={folder}/tokenizer"),
    "model.archive": Case(
        "model.archive={folder}/llama1", "model.random_config=null model.name_or_path={folder}/llama2"
    ),
    "model.block_name": Case("model.block_name=LlamaMLP", "activation_checkpointing=true", see=("calls",)),
    "model.block": Case(
        "model.block=LlamaMLP", "activation_checkpointing=true model.block_name=null", see=("calls",), read=False
    ),
    "model.frozen": Case("model.frozen=[model.embed_tokens.weight]", see=("weights",)),
    "model.policy_dtype": Case("model.policy_dtype=bfloat16", see=("steps",)),
    "model.fsdp_policy_mp": Case("model.fsdp_policy_mp=bfloat16", see=("steps",), read=False),
    "precision": Case("precision=bfloat16", see=("steps",)),
    "model.reference_dtype": Case("model.reference_dtype=bfloat16", see=("steps",)),
    "model.trust_remote_code": Case("model.trust_remote_code=true", see=("notices",)),
    "model.attention": Case("model.attention=plain", see=("parts", "steps")),
    "model.size": Case("model.size=410m", "model=pythia", how="settings", read=False),
    "loss.name": Case({"sft": "loss=dpo", "dpo": "loss=sft", "ipo": "loss=sft"}, see=("steps",)),
    "loss.beta": Case("loss.beta=0.7", see=("steps",)),
    "loss.label_smoothing": Case("loss.label_smoothing=0.2", see=("steps",)),
    "loss.reference_free": Case("loss.reference_free=true", see=("steps",)),
    "loss.alpha": Case("loss.alpha=0.9", "loss.f_divergence=alpha", see=("steps",)),
    "loss.sft_weight": Case("loss.sft_weight=0.5", see=("steps",)),
    "loss.f_divergence": Case("loss.f_divergence=js", see=("steps",)),
    "loss.average_log_prob": Case("loss.average_log_prob=true", see=("steps",)),
    "fsdp.sharding_strategy": Case("fsdp.sharding_strategy=NO_SHARD", see=("launch",)),
    "fsdp.replicas": Case("fsdp.replicas=2", "fsdp.sharding_strategy=HYBRID_SHARD", how="launch"),
    "fsdp.cpu_offload": Case("fsdp.cpu_offload=true", see=("calls",)),
    "fsdp.reference_cpu_offload": Case("fsdp.reference_cpu_offload=true", ONLINE, see=("calls",)),
    "fsdp.backward_prefetch": Case("fsdp.backward_prefetch=null", see=("calls",)),
    "fsdp.forward_prefetch": Case("fsdp.forward_prefetch=1", see=("calls",)),
    "fsdp.reduce_every_micro_batch": Case(
        "fsdp.reduce_every_micro_batch=false", "tokens_per_microbatch=64", see=("calls",)
    ),
    "fsdp.reduce_dtype": Case("fsdp.reduce_dtype=bfloat16", see=("calls",)),
    "exp_name": Case("exp_name=mine", see=("run folder",)),
    "seed": Case("seed=1", see=("steps",)),
    "debug": Case("debug=false", see=FILES),
    "local_dirs": Case("local_dirs=[{folder}/elsewhere]", see=("run folder",)),
    "local_run_dir": Case("local_run_dir={new}", see=("run folder",)),
    "resume": Case("resume={stopped}", "debug=false checkpoint.formats=[state]", see=("steps",)),
    "plan": Case("plan=true", how="plan", read=False),
    "plan_device_memory_gb": Case("plan_device_memory_gb=7", "plan=true", how="plan", read=False),
    "data.streaming": Case({"sft": STREAMED, "dpo": STREAMED_ONLINE, "ipo": STREAMED_ONLINE}, see=("notices",)),
    "data.shuffle_window": Case(
        {
            "sft": f"data.shuffle_window=3 {STREAMED}",
            "dpo": f"data.shuffle_window=3 {STREAMED_ONLINE}",
            "ipo": f"data.shuffle_window=3 {STREAMED_ONLINE}",
        },
        see=("notices",),
    ),
    "evals.checkpoint": Case("evals.checkpoint={folder}/llama1", how="evaluate", read=False),
    "evals.reference": Case("evals.reference={folder}/llama1", how="evaluate", read=False),
    "evals.against": Case("evals.against={folder}/llama1", how="evaluate", read=False),
    "evals.split": Case("evals.split=all", how="evaluate", read=False),
    "show": Case("show=2", how="show", read=False),
    "show_files": Case("show_files=[{folder}/data.json]", "show=1", how="show", read=False),
    "trainer": Case(
        {
            "BasicTrainer": "trainer=FSDPTrainer world_size=1",
            "FSDPTrainer": "trainer=BasicTrainer world_size=1",
            "TensorParallelTrainer": "trainer=FSDPTrainer tp_size=1",
        },
        how="launch",
        read=False,
    ),
    "device": Case("device=cpu", "device=null", how="settings"),
    "world_size": Case("world_size=8 batch_size=8", how="launch"),
    "tp_size": Case("tp_size=4", how="launch"),
    "fsdp_port": Case("fsdp_port=12345", see=("launch",)),
    "datasets": Case("datasets=[{folder}/other]", see=("steps",)),
    "data.paths": Case(
        "data.paths.mine={folder}/other", "datasets=[mine] data.paths.mine={folder}/data", see=("steps",)
    ),
    "data.columns": Case(
        "data.columns.prompt=question", "datasets=[{folder}/columns.jsonl] data.columns.prompt=prompt", see=("steps",)
    ),
    "data.plugins": Case("data.plugins=[{plugin}]", see=("caches",), read=False),
    "data.weights": Case("data.weights.a=2", "datasets=[a] data.paths.a={folder}/data n_examples=100", see=("steps",)),
    "data.test_fraction": Case("data.test_fraction=0.6", "datasets=[{folder}/columns.jsonl]", see=("steps",)),
    "data.truncation": Case("data.truncation=keep_start", "max_length=40 max_prompt_length=10", see=("steps",)),
    "data.on_overlong": Case("data.on_overlong=error", "max_length=20 max_prompt_length=10"),
    "data.on_bad_row": Case("data.on_bad_row=skip", "datasets=[{folder}/broken.jsonl]"),
    "data.train_on": Case("data.train_on=all", "datasets=[{folder}/turns.jsonl]", see=("steps",)),
    "data.pairs": Case("data.pairs=best_worst", "datasets=[{folder}/scored.jsonl]", see=("steps",)),
    "data.min_score_gap": Case("data.min_score_gap=1.5", "datasets=[{folder}/scored.jsonl]", see=("steps",)),
    "data.score": Case("data.score=length", "datasets=[{folder}/rated.jsonl] data.score=helpfulness", see=("steps",)),
    "data.chat_template": Case(
        "data.chat_template={folder}/template.jinja", "datasets=[{folder}/chat.jsonl]", see=("steps",)
    ),
    "data.apply_template": Case(
        "data.apply_template=true", "data.chat_template={folder}/template.jinja", see=("steps",)
    ),
    "data.template_date": Case(
        "data.template_date=2001-02-03",
        "datasets=[{folder}/chat.jsonl] data.chat_template={folder}/dated.jinja",
        see=("steps",),
    ),
    "data.allow_control_tokens": Case(
        "data.allow_control_tokens=true", "datasets=[{folder}/control.jsonl]", see=("steps",)
    ),
    "data.cache_dir": Case("data.cache_dir={new}", see=("caches",)),
    "data.num_workers": Case("data.num_workers=2 data.cache_dir={new}", "data.cache_dir={new}/1", see=("workers",)),
    "max_length": Case("max_length=20", "max_prompt_length=10", see=("steps",)),
    "max_prompt_length": Case("max_prompt_length=10", "max_length=30 max_prompt_length=20", see=("steps",)),
    "shuffle": Case("shuffle=prompts", see=("steps",)),
    "n_epochs": Case("n_epochs=2", "n_examples=null", see=("steps",)),
    "n_examples": Case("n_examples=4", see=("steps",)),
    "batch_size": Case("batch_size=8", see=("steps",)),
    "gradient_accumulation_steps": Case("gradient_accumulation_steps=2", see=("steps",)),
    "tokens_per_microbatch": Case("tokens_per_microbatch=10", see=("steps",)),
    "eval_batch_size": Case("eval_batch_size=1", see=("parts",)),
    "prefix_sharing": Case("prefix_sharing=false", see=("steps",), unseen_with="sft"),  # a prompt has one response
    "optimizer": Case("optimizer=SGD", see=("weights",)),
    "optimizer_kwargs": Case("optimizer_kwargs.weight_decay=0.5", see=("weights",)),
    "lr": Case("lr=2e-2", see=("weights",)),
    "warmup_steps": Case("warmup_steps=3", see=("weights",)),
    "schedule": Case("schedule=linear", see=("weights",)),
    "max_grad_norm": Case("max_grad_norm=1e-3", "optimizer=SGD", see=("weights",)),
    "activation_checkpointing": Case("activation_checkpointing=2", see=("calls",)),
    "compile": Case("compile=true", see=("calls",)),
    "reference.mode": Case("reference.mode=online", see=("calls",)),
    "reference.name_or_path": Case("reference.name_or_path={folder}/llama1", see=("steps",)),
    "reference.archive": Case(
        "reference.archive={folder}/llama1",
        "model.random_config=null model.name_or_path={folder}/llama2",
        see=("steps",),
    ),
    "reference.sync_every": Case("reference.sync_every=1", ONLINE, see=("steps",)),
    "reference.sync_mix": Case("reference.sync_mix=0.5", f"{ONLINE} reference.sync_every=1", see=("steps",)),
    "reference.cache_dir": Case("reference.cache_dir={new}", see=("caches",)),
    "eval_every": Case("eval_every=4", see=("evaluations",)),
    "do_first_eval": Case("do_first_eval=true", see=("evaluations",)),
    "n_eval_examples": Case("n_eval_examples=1", see=("evaluations",)),
    "sample_during_eval": Case("sample_during_eval=true", see=("samples",)),
    "n_eval_model_samples": Case("n_eval_model_samples=2", SAMPLING, see=("samples",)),
    "sampling.temperature": Case("sampling.temperature=0", SAMPLING, see=("samples",)),
    "sampling.top_p": Case("sampling.top_p=0.01", SAMPLING, see=("samples",)),
    "sampling.max_new_tokens": Case("sampling.max_new_tokens=2", SAMPLING, see=("samples",)),
    "sampling.seed": Case("sampling.seed=1", SAMPLING, see=("samples",)),
    "early_stopping.metric": Case("early_stopping.metric=loss/eval", STUCK, see=("evaluations",)),
    "early_stopping.patience": Case(
        "early_stopping.patience=1", f"{STUCK} early_stopping.metric=loss/eval", see=("evaluations",)
    ),
    "early_stopping.min_delta": Case("early_stopping.min_delta=1000", MOVING, see=("evaluations",)),
    "early_stopping.mode": Case("early_stopping.mode=max", MOVING, see=("evaluations",)),
    "checkpoint.formats": Case("checkpoint.formats=[policy,state]", SAVING, see=FILES),
    "checkpoint.every": Case("checkpoint.every=8", f"{SAVING} checkpoint.keep_last=null", see=FILES),
    "checkpoint.every_minutes": Case(
        "checkpoint.every_minutes=1e-9", f"{SAVING} eval_every=100 checkpoint.keep_last=null", see=FILES
    ),
    "checkpoint.keep_last": Case("checkpoint.keep_last=1", f"{SAVING} checkpoint.keep_best=false", see=FILES),
    "checkpoint.keep_best": Case("checkpoint.keep_best=false", f"{SAVING} checkpoint.keep_last=1 lr=1", see=FILES),
    "checkpoint.best_metric": Case(
        # The first is the best where all are alike; the loss gets better.
        "checkpoint.best_metric=lengths_eval/chosen",
        f"{SAVING} checkpoint.keep_last=1 lr=1e-4",
        see=FILES,
    ),
    "checkpoint.async_save": Case("checkpoint.async_save=true", f"{SAVING} checkpoint.formats=[state]", see=("calls",)),
    "minimum_log_interval_secs": Case("minimum_log_interval_secs=1000", see=("metrics",)),
    "loggers": Case("loggers=[]", "debug=false wandb.enabled=true checkpoint.every=1000", see=("wandb",), read=False),
    "mlflow.tracking_uri": Case("mlflow.tracking_uri=file:mine", read=False),  # refused: loggers does not name it
    "mlflow.experiment": Case("mlflow.experiment=mine", read=False),
    "trackio.project": Case("trackio.project=mine", read=False),
    "trackio.space_id": Case("trackio.space_id=me/mine", read=False),
    "wandb.enabled": Case("wandb.enabled=true", "debug=false checkpoint.every=1000", see=("wandb",), read=False),
    "wandb.entity": Case("wandb.entity=me", LOGGED, see=("wandb",), read=False),
    "wandb.project": Case("wandb.project=mine", LOGGED, see=("wandb",), read=False),
    "wandb.name": Case("wandb.name=mine", LOGGED, see=("wandb",), read=False),
    "wandb.tags": Case("wandb.tags=[mine]", LOGGED, see=("wandb",), read=False),
    "wandb.notes": Case("wandb.notes=mine", LOGGED, see=("wandb",), read=False),
    "wandb.group": Case("wandb.group=mine", LOGGED, see=("wandb",), read=False),
    "guards.on_nonfinite": Case("guards.on_nonfinite=skip guards.max_nonfinite_steps=1", spoiled=(1,), see=("steps",)),
    "guards.max_nonfinite_steps": Case(
        "guards.max_nonfinite_steps=2",
        "guards.on_nonfinite=skip guards.max_nonfinite_steps=1",
        spoiled=(1, 5),
        see=("notices", "error"),
    ),
    "guards.collective_timeout_minutes": Case("guards.collective_timeout_minutes=3", see=("launch",)),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the cases name, in a process group of one."""
    folder = tmp_path_factory.mktemp("keys")
    write_data(folder / "data", prompts=6, held_out=2)
    write_data(folder / "other", prompts=9, held_out=3)
    for name, prompt in (("train", "Tell me of"), ("test", "Tell me about")):  # what is learnt holds for both
        rows = [
            {"prompt": f"{prompt} {it}:", "chosen": f" {it} is good.", "rejected": f" No {it}."} for it in SUBJECTS[:4]
        ]
        (folder / "alike").mkdir(exist_ok=True)
        (folder / "alike" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [
        {"prompt": f"Say {n}:", "question": f"Tell me of {n}.", "chosen": " yes " * n, "rejected": " no"}
        for n in range(1, 13)
    ]
    (folder / "columns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [" yes " * n for n in (1, 2, 3)]
    scored = [{"prompt": row["prompt"], "responses": texts, "scores": [3, 2, 1]} for row in rows]
    rated = [
        {"prompt": row["prompt"], "response": text, "helpfulness": place_, "length": -place_}
        for row in rows
        for place_, text in enumerate(texts)
    ]
    talks = [
        {"messages": [{"role": role, "content": f"{row['prompt']} {role}"} for role in ("user", "assistant") * 2]}
        for row in rows
    ]
    for name, of in (("scored", scored), ("rated", rated), ("turns", talks)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of))
    (folder / "broken.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    turns = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    answers = [{word: [{"role": "assistant", "content": row[word]}] for word in ("chosen", "rejected")} for row in rows]
    chats = [{"prompt": turn, **answer} for turn, answer in zip(turns, answers)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (folder / "template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant> {% endif %}"
    )
    (folder / "dated.jinja").write_text("{{ strftime_now('%Y') }} " + (folder / "template.jinja").read_text())
    tokenizer = loading.byte_tokenizer()
    marked = [{**row, "prompt": f"{tokenizer.eos_token} {row['prompt']}"} for row in rows]
    (folder / "control.jsonl").write_text("".join(json.dumps(row) + "\n" for row in marked))
    for number in (1, 2):
        save_model(folder / f"llama{number}", "llama", seed=number)
    tokenizer.add_tokens(["Tell", "me"])
    tokenizer.save_pretrained(folder / "tokenizer")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield folder
    dist.destroy_process_group()


READS: dict[tuple[str, str], set[str]] = defaultdict(set)


def lines(folder: Path, trainer: str, loss: str, case: Case, changed: bool, alone: bool) -> list[str]:
    """The command line of a case; alone: for a world of this process."""
    texts = [BASE, TRAINERS[trainer], ALONE[trainer] if alone else "", f"loss={loss}", case.context]
    text = " ".join(texts + ([case.changes(trainer, loss)] if changed else []))
    new = Path(new_run_dir(folder))
    if "{plugin}" in text:
        (new / "plugin.py").write_text(f"open({str(new / 'imported')!r}, 'w').close()\n")
    if "{stopped}" in text:
        shutil.copytree(stopped_run(folder, trainer, loss), new / "stopped", symlinks=True)
    named = {"folder": folder, "new": new / "new", "plugin": new / "plugin.py", "stopped": new / "stopped"}
    for name, path in named.items():
        text = text.replace(f"{{{name}}}", str(path))
    return words_of(text)


@functools.cache
def stopped_run(folder: Path, trainer: str, loss: str) -> Path:
    """The folder of a run that ended after its first step."""
    run_dir = Path(new_run_dir(folder)) / "stopped"
    case = Case("", f"debug=false checkpoint.formats=[state] n_examples=4 local_run_dir={run_dir}")
    watched_run(folder, lines(folder, trainer, loss, case, changed=False, alone=True), set())
    return run_dir


@functools.cache
def allowed(folder: Path, trainer: str, loss: str, context: str) -> bool:
    """Whether a context is, without any change."""
    try:
        settings.validate(compose(lines(folder, trainer, loss, Case("", context), changed=False, alone=False)))
    except ValueError:
        return False
    return True


@functools.cache
def refusal(folder: Path, trainer: str, loss: str, key: str) -> str | None:
    """The message that refuses the change of a key; None if it is accepted."""
    case = CASES[key]
    given = settings.named_keys(words_of(case.changes(trainer, loss)))
    for here in (case, Case(case.change)):  # the second, where not even the context is allowed
        if not allowed(folder, trainer, loss, here.context):
            continue
        try:
            settings.validate(compose(lines(folder, trainer, loss, here, changed=True, alone=False)), 0, given)
        except ValueError as error:
            return str(error)
        return None
    raise AssertionError(f"{key} cannot be tried with {trainer} and {loss}: {case.context}")


def test_every_key_has_a_case():
    keys = set(settings.SCHEMA)
    for loss in LOSSES:  # the options of the others are tried in test_loss_family.py
        keys |= {key for key in settings.keys_of({"loss.name": loss}) if key.startswith("loss.")}
    assert set(CASES) == keys


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_change_that_is_accepted_is_seen(place, trainer):
    loss, unseen = RUN_WITH[trainer], {}
    without: dict[tuple, dict] = {}

    def run(case: Case, changed: bool) -> dict:
        words = lines(place, trainer, loss, case, changed, alone=True)
        prepare = spoil(*case.spoiled) if case.spoiled else None
        return watched_run(place, words, READS[trainer, loss], prepare)

    run(Case(""), changed=False)  # fills the caches
    for key, case in CASES.items():
        if trainer == "TensorParallelTrainer" and not key.startswith(PLACED):
            continue
        if trainer == "FSDPTrainer" and key.startswith(UNPLACED):
            continue
        if case.unseen_with == loss or refusal(place, trainer, loss, key) is not None:
            continue
        if case.how != "run":
            see = {
                "launch": lambda words: launched(settings.finalize(compose(words))),
                "plan": planned,
                "show": shown,
                "evaluate": evaluated,
                "settings": finalized,
            }
            one, other = (see[case.how](lines(place, trainer, loss, case, c, alone=False)) for c in (False, True))
            if one == other:
                unseen[key] = one
            continue
        at = case.context, case.spoiled
        if at not in without:
            without[at] = run(case, changed=False)
        one, other = without[at], run(case, changed=True)
        parts = case.see or tuple(part for part in one if part not in ("caches", "workers"))
        if all(one.get(part) == other.get(part) for part in parts):
            unseen[key] = {part: one.get(part) for part in parts}
    assert not unseen, "\n".join(f"{key}: {what}"[:500] for key, what in unseen.items())
    again, (first, *_) = run(Case(""), changed=False), (without[at] for at in without if at == ("", ()))
    assert {
        part: again[part] for part in again if first[part] != again[part] and part not in ("caches", "workers")
    } == {}


def shown(words: list[str]) -> list:
    """The examples that a command would show, and the files that are there afterwards."""
    from training import inspection

    config = settings.finalize(compose(words))
    if config.show is None:
        return []
    inspection.show(config)
    return [inspection.inspect(config, config.show).examples, [Path(path).exists() for path in config.show_files]]


def evaluated(words: list[str]) -> list:
    """The models that evaluate.py would score, and the splits."""
    from settings.checkpoints import model_of, reference_of
    from training.pair_evaluation import SPLITS

    config = settings.finalize(compose(words))
    evals, reference = config.evals, reference_of(config)
    named = [model_of(path, config).model if path else None for path in (evals.checkpoint, evals.against)]
    return [named, reference and reference.model, SPLITS[evals.split]]


def finalized(words: list[str]) -> dict:
    return settings.flatten(settings.as_dict(settings.finalize(compose(words))))


@pytest.mark.parametrize("trainer, loss", PAIRS)
def test_a_change_is_refused_or_the_key_is_read(place, trainer, loss):
    words = lines(place, trainer, loss, Case("", RICH), changed=False, alone=True)
    watched_run(place, words, READS[trainer, loss], spoil(1))
    if loss != "sft":
        watched_run(place, [*words, ONLINE], READS[trainer, loss])
    wrong = {}
    for key, case in CASES.items():
        message = refusal(place, trainer, loss, key)
        if message is not None and key not in message and key.partition(".")[0] + "=" not in message:
            wrong[key] = message
        if message is None and case.read and key not in READS[trainer, loss]:
            wrong[key] = "accepted, and never read"
    assert not wrong, wrong
