"""Every setting of a run on one page, and the check that a run's settings can be honoured.

A setting that the chosen loss, trainer or device cannot honour is an error, never ignored: `validate` raises ValueError
with one message that names the key, the value it has, and what is allowed. It reads no weights and does not import
torch, so that a typing mistake costs a second. config/*.yaml holds the defaults and explains the keys.
"""

import difflib
import functools
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

import utils
from data import sources
from settings.shard_layout import shard_layout

CONFIG_DIR = os.path.join(utils.PROJECT_DIR, "config")


@dataclass(frozen=True)
class Key:
    """What a setting may be: one of `choices`, or a `kind` within low..high (bounds included unless `open`)."""

    meaning: str
    kind: str = ""
    choices: tuple = ()
    low: float | None = None
    high: float | None = None
    open: bool = False
    null: bool = False
    free: bool = False  # kind "mapping": any keys

    def describe(self) -> str:
        allowed = [show(choice) for choice in self.choices]
        if self.kind:
            text = {
                "integer": "a whole number",
                "number": "a number",
                "text": "text",
                "names": "a list of names",
                "mapping": "a mapping KEY: VALUE",
                "flag": "true or false",
            }[self.kind]
            if self.low is not None:
                text += f" {'above' if self.open else 'from'} {show(self.low)}"
            if self.high is not None:
                text += f" {'and below' if self.open else 'to'} {show(self.high)}"
            elif self.low is not None and not self.open:
                text += " up"
            allowed.append(text)
        if self.null:
            allowed.append("null")
        return allowed[0] if len(allowed) == 1 else ", ".join(allowed[:-1]) + " or " + allowed[-1]

    def admits(self, value) -> bool:
        if value is None:
            return self.null
        if any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in self.choices):
            return True
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if self.kind == "flag":
            return isinstance(value, bool)
        if self.kind == "text":
            return isinstance(value, str) and bool(value)
        if self.kind == "names":
            return isinstance(value, list) and all(isinstance(item, str) and item for item in value)
        if self.kind == "mapping":
            return isinstance(value, dict)
        if self.kind in ("integer", "number"):
            if not number or not math.isfinite(value) or (self.kind == "integer" and not isinstance(value, int)):
                return False
            above = self.low is None or (value > self.low if self.open else value >= self.low)
            below = self.high is None or (value < self.high if self.open else value <= self.high)
            return above and below
        return False


def integer(meaning, low=0, **more):
    return Key(meaning, "integer", low=low, **more)


def number(meaning, low=0, **more):
    return Key(meaning, "number", low=low, **more)


def text(meaning, **more):
    return Key(meaning, "text", **more)


def flag(meaning):
    return Key(meaning, "flag")


def choice(meaning, *choices, **more):
    return Key(meaning, choices=choices, **more)


def mapping(meaning, **more):
    return Key(meaning, "mapping", free=True, **more)


SCHEMA = {
    "exp_name": text("name of the run; null: <model>_<loss>_<datasets>", null=True),
    "seed": integer("fixes data order, samples, random initial weights", high=2**63 - 1),
    "debug": flag("no wandb, no checkpoints"),
    "local_dirs": Key("where runs are kept: the first that exists and can be written, else the last", "names"),
    "local_run_dir": text("exactly this run folder", null=True),
    "resume": text("continue this run folder; auto: the newest run of the same name", null=True),
    "plan": flag("print the memory and time a run needs, and end"),
    "plan_device_memory_gb": number(
        "plan=true: memory of a device, 10^9 bytes; null: a visible one's", open=True, null=True
    ),
    "trainer": choice("placement", "BasicTrainer", "FSDPTrainer", "TensorParallelTrainer"),
    "device": text("cpu, cuda, cuda:1, mps; null: the best there is", null=True),
    "world_size": integer("processes, one a device; null: every visible device", 1, null=True),
    "tp_size": integer("devices that share one tensor-parallel copy", 1),
    "fsdp_port": integer("TCP port where a node's processes meet; null: a private file", 1, high=65535, null=True),
    "datasets": Key("names, Hub names or paths", "names"),
    "data.paths": mapping("local copies: name: path"),
    "data.columns": mapping("your column names: usual name: yours, for all or under a data set's name"),
    "data.weights": mapping("mixing: name: relative weight"),
    "data.plugins": Key("modules or .py files that register data sets of your own", "names"),
    "data.test_fraction": number("rows held out where a source has no test split", high=1, open=True),
    "data.truncation": choice("end of a long prompt that stays; null: by source", "keep_end", "keep_start", null=True),
    "data.on_overlong": choice("an example too long after its prompt was cut", "truncate", "drop", "error"),
    "data.chat_template": text("a Jinja template or its path; null: the tokenizer's", null=True),
    "data.cache_dir": text("tokenised data sets; null: under the local dir", null=True),
    "data.num_workers": integer("processes that tokenise; null: one a core", 1, null=True),
    "max_length": integer("longest prompt + response, tokens", 2),
    "max_prompt_length": integer("a longer prompt is cut to it when max_length is exceeded, tokens", 1),
    "shuffle": choice("what is permuted", "pairs", "prompts"),
    "n_epochs": integer("passes over the data", 1, null=True),
    "n_examples": integer("examples to train on", 1, null=True),
    "batch_size": integer("examples (pairs; sft: responses) an optimizer step, all devices", 1),
    "gradient_accumulation_steps": integer("least passes a step", 1),
    "tokens_per_microbatch": integer("tokens a pass on a device", 1, choices=("auto",)),
    "eval_batch_size": integer("examples an evaluation pass, all devices", 1),
    "prefix_sharing": flag("compute a prompt once for all its responses"),
    "optimizer": text("a class of torch.optim"),
    "optimizer_kwargs": mapping("its keyword arguments"),
    "lr": number("peak learning rate", open=True),
    "warmup_steps": integer("steps of linear warm-up"),
    "schedule": choice("after warm-up", "constant", "linear", "cosine"),
    "max_grad_norm": number("gradients are scaled down to this 2-norm", open=True),
    "activation_checkpointing": integer("recompute each block (true) or each n-th", 1, choices=(False, True)),
    "compile": flag("torch.compile each block"),
    "reference.mode": choice("log-probs computed once, or a live model", "cached", "online"),
    "reference.cache_dir": text("where they are kept; null: under the local dir", null=True),
    "eval_every": integer("examples between evaluations", 1),
    "do_first_eval": flag("evaluate before the first step"),
    "n_eval_examples": integer("held-out examples; null: all", 1, null=True),
    "sample_during_eval": flag("continue held-out prompts at evaluations"),
    "n_eval_model_samples": integer("how many", 1),
    "sampling.temperature": number("0: the likeliest token"),
    "sampling.top_p": number("probability mass drawn from", high=1),
    "sampling.max_new_tokens": integer("longest continuation, tokens", 1),
    "sampling.seed": integer("of the draws", high=2**63 - 1),
    "early_stopping.metric": text("stop when it no longer gets better; null: never", null=True),
    "early_stopping.patience": integer("evaluations without improvement", 1),
    "early_stopping.min_delta": number("a smaller change is none"),
    "early_stopping.mode": choice("which way is better; null: by metric", "min", "max", null=True),
    "checkpoint.formats": Key("what is written: state, policy, hf", "names"),
    "checkpoint.every": integer("examples between checkpoints; null: eval_every", 1, null=True),
    "checkpoint.every_minutes": number("and also after this many minutes", open=True, null=True),
    "checkpoint.keep_last": integer("older ones are removed; null: none is", 1, null=True),
    "checkpoint.keep_best": flag("keep the best one as well"),
    "checkpoint.best_metric": text("best by this evaluation metric; null: loss/eval", null=True),
    "checkpoint.async_save": flag("write while training goes on"),
    "minimum_log_interval_secs": number("seconds between two log lines"),
    "wandb.enabled": flag("online if logged in, else offline"),
    "wandb.entity": text("wandb team or user", null=True),
    "wandb.project": text("wandb project"),
    "wandb.group": text("wandb group; null: none, in a sweep a common one", null=True),
    "guards.on_nonfinite": choice("at a loss or gradient that is not finite", "stop", "skip"),
    "guards.max_nonfinite_steps": integer("how often to skip"),
    "guards.collective_timeout_minutes": number("longest wait for another rank", open=True),
    "fsdp.sharding_strategy": choice("what is split", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"),
    "fsdp.replicas": integer("HYBRID_SHARD: copies of the model; null: one a node", 1, null=True),
    "fsdp.cpu_offload": flag("parameters, gradients, optimizer in host memory"),
    "fsdp.reference_cpu_offload": flag("the reference in host memory"),
    "fsdp.backward_prefetch": choice("when the next block is fetched", "BACKWARD_PRE", null=True),
    "fsdp.forward_prefetch": integer("blocks fetched ahead; null: implicit", 1, null=True),
    "fsdp.reduce_dtype": choice("type gradients are summed in", "float32", "bfloat16", "float16", null=True),
    "model.name_or_path": text("Hub name, local folder or .gguf"),
    "model.local_copy": text("folder used instead of name_or_path when it exists", null=True),
    "model.random_config": mapping("random weights: a transformers config", null=True),
    "model.tokenizer_name_or_path": text("null: the model's", null=True),
    "model.archive": text("initial weights: policy.pt, hf folder or run folder", null=True),
    "model.block_name": text("class of the repeated block; null: found", null=True),
    "model.block": text("older name of block_name", null=True),
    "model.frozen": Key("parameters that are not trained, by name with * and ?", "names"),
    "model.policy_dtype": choice("type of the policy's weights", "float32", "bfloat16"),
    "model.fsdp_policy_mp": choice("type sharded trainers compute in", "bfloat16", "float16", null=True),
    "model.reference_dtype": choice("null: policy_dtype", "float32", "bfloat16", "float16", null=True),
    "model.trust_remote_code": flag("run the model's own code"),
    "model.attention": choice("kernel of packed rows", "auto", "packed_sdpa", "flex", "plain"),
    "loss.name": text("objective"),
}
# Keys that exist for some choices only. A loss without an entry here has the keys of its yaml, see `loss_keys`.
LOSS_KEYS = {
    "sft": {},
    "dpo": {
        "loss.beta": number("pull to the reference", open=True),
        "loss.label_smoothing": number("share of swapped labels", high=0.4999999999999999),
        "loss.reference_free": flag("no reference model"),
        "loss.f_divergence": choice("how distance to the reference is measured", "reverse_kl", "js"),
    },
    "ipo": {
        "loss.beta": number("pull to the reference", open=True),
        "loss.average_log_prob": flag("mean over tokens, not sum"),
        "loss.reference_free": flag("no reference model"),
    },
}
PYTHIA_SIZES = ("14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")

# torch.optim without those that need a closure (LBFGS), sparse gradients (SparseAdam) or only matrices (Muon), and
# without arguments that make no sense here (lr is a key of its own; maximize, differentiable). A test holds this
# against torch itself.
OPTIMIZERS = {
    "ASGD": "lambd alpha t0 weight_decay foreach capturable",
    "Adadelta": "rho eps weight_decay foreach capturable",
    "Adafactor": "beta2_decay eps d weight_decay foreach",
    "Adagrad": "lr_decay weight_decay initial_accumulator_value eps foreach fused",
    "Adam": "betas eps weight_decay amsgrad foreach capturable fused decoupled_weight_decay",
    "AdamW": "betas eps weight_decay amsgrad foreach capturable fused",
    "Adamax": "betas eps weight_decay foreach capturable",
    "NAdam": "betas eps weight_decay momentum_decay decoupled_weight_decay foreach capturable",
    "RAdam": "betas eps weight_decay decoupled_weight_decay foreach capturable",
    "RMSprop": "alpha eps weight_decay momentum centered foreach capturable",
    "Rprop": "etas step_sizes foreach capturable",
    "SGD": "momentum dampening weight_decay nesterov foreach fused",
}
# Their steps use operations that DTensor does not have.
WHOLE_TENSORS_ONLY = ("Adafactor", "Rprop")
_FLAGS = "amsgrad foreach capturable fused decoupled_weight_decay centered nesterov".split()
_SEVERAL = {"betas": 2, "etas": 2, "step_sizes": 2}

# Metrics of an evaluation, by which a run can stop early or keep its best checkpoint; and whether less is better.
EVAL_METRICS = {
    "loss/eval": "min",
    "logps_eval/chosen": "max",
    "logps_eval/rejected": "min",
    "rewards_eval/chosen": "max",
    "rewards_eval/rejected": "min",
    "rewards_eval/accuracies": "max",
    "rewards_eval/margins": "max",
}

# A resumed run may change what is logged, saved and looked at, and how long it goes on; nothing that makes the weights.
MAY_CHANGE_ON_RESUME = (
    "resume",
    "plan",
    "plan_device_memory_gb",
    "exp_name",
    "local_dirs",
    "local_run_dir",
    "device",
    "world_size",
    "fsdp_port",
    "data.cache_dir",
    "data.num_workers",
    "reference.cache_dir",
    "n_epochs",
    "n_examples",
    "eval_every",
    "eval_batch_size",
    "n_eval_examples",
    "sample_during_eval",
    "n_eval_model_samples",
    "sampling.",
    "early_stopping.",
    "checkpoint.",
    "minimum_log_interval_secs",
    "wandb.",
    "guards.",
    "tokens_per_microbatch",
)


# ---- Checking -------------------------------------------------------------------------------------------------------


def validate(config: DictConfig, device_count: int | None = None) -> None:
    """Check types, ranges and combinations of all settings, and that the files they name exist.

    device_count: accelerators visible here, 0 on a machine with CPUs only, None while that is not known; checks that
    need it are then left out, and train.py calls again when it knows.

    Raises:
        ValueError: the first thing found wrong, in words for the user.
    """
    settings = _plain(config)
    _check_keys(settings)
    flat = flatten(settings)
    _check_data(flat)
    sources.check_dataset_names(flat["datasets"], OmegaConf.create(settings))
    _check_model(flat)
    _check_optimizer(flat)
    _check_loss_and_evaluation(flat)
    _check_placement(flat, device_count)
    _check_run(flat)


def keys_of(flat: dict) -> dict:
    """The schema of these settings: some keys exist for one loss or one model only."""
    schema = dict(SCHEMA)
    schema["loss.name"] = choice("objective", *options("loss"))
    schema.update(loss_keys(flat.get("loss.name")))
    if "model.size" in flat:
        schema["model.size"] = choice("size of Pythia", *PYTHIA_SIZES)
    return schema


def loss_keys(name: str | None) -> dict:
    """The schema of a loss's own keys. Of one that was added by a yaml and a function alone: each key is of the kind of
    its value in the yaml, and the function looks at the range."""
    if name in LOSS_KEYS or name not in options("loss"):
        return LOSS_KEYS.get(name, {})
    with open(os.path.join(CONFIG_DIR, "loss", f"{name}.yaml"), encoding="utf-8") as file:
        values = flatten(yaml.safe_load(file) or {}, "loss.")
    kinds = {bool: "flag", int: "number", float: "number", list: "names"}
    return {
        key: Key(f"see config/loss/{name}.yaml", kinds.get(type(value), "text"), null=value is None)
        for key, value in values.items()
        if key != "loss.name"
    }


def _plain(config: DictConfig) -> dict:
    missing = sorted(OmegaConf.missing_keys(config))
    if "model.name_or_path" in missing:
        raise ValueError(
            "model.name_or_path is missing: give a Hub name or a local folder, as in model=blank_model "
            f"model.name_or_path=gpt2, or choose one of model={'|'.join(options('model'))}"
        )
    if missing:
        raise ValueError(f"{missing[0]} is missing: this run needs a value for it ({missing[0]}=...)")
    try:
        return as_dict(config)
    except Exception as error:  # omegaconf has a dozen classes for a bad ${...}; each message names the key
        raise ValueError(f"a setting cannot be worked out: {' '.join(str(error).split())}") from error


def flatten(settings: dict, prefix: str = "") -> dict:
    """{'a.b': value} of nested settings; mappings with free keys stay whole."""
    flat = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        inside = isinstance(value, dict) and not (key in SCHEMA and SCHEMA[key].free)
        flat.update(flatten(value, key + ".") if inside and value else {key: value})
    return flat


def _check_keys(settings: dict) -> None:
    flat = flatten(settings)
    schema = keys_of(flat)
    for key in flat:
        inside = [name for name in schema if name.startswith(key + ".")]
        if inside:
            raise ValueError(f"{key}={show(flat[key])}: {key} holds keys of its own; set one of {', '.join(inside)}")
        if key not in schema:
            raise ValueError(unknown_key(key, flat))
    for key in schema:
        if key not in flat:
            raise ValueError(f"{key} is missing: {schema[key].meaning}; allowed: {schema[key].describe()}")
    for key, value in flat.items():
        if not schema[key].admits(value):
            near = near_miss(str(value), [str(c) for c in schema[key].choices])
            raise ValueError(
                f"{key}={show(value)} is not allowed ({schema[key].meaning}); allowed: {schema[key].describe()}{near}"
            )


def unknown_key(key: str, flat: dict) -> str:
    """What to tell about a key that does not exist, given the settings that do."""
    holders = [name for name in options("loss") if key in loss_keys(name)]
    if holders:
        return (
            f"loss={flat.get('loss.name')} has no key {key}; it belongs to loss={' and loss='.join(holders)}. "
            f"Leave it out, or choose one of these losses."
        )
    if key == "model.size":
        return "model.size belongs to model=pythia; other models have one size. Leave it out, or choose model=pythia."
    schema = keys_of(flat)
    message = f"there is no key {key}" + near_miss(key, list(schema), cut=0.7)
    if "did you mean" not in message:
        group, _, leaf = key.rpartition(".")
        inside = [k for k in schema if group and k.startswith(group + ".")]
        elsewhere = [k for k in schema if k.rpartition(".")[2] == leaf]
        if elsewhere:
            message += f"; did you mean {' or '.join(elsewhere)}?"
        elif inside:
            message += f"; {group} has {', '.join(k[len(group) + 1 :] for k in inside)}"
        else:
            message += "; config/config.yaml lists them all, as does python train.py --cfg job"
    return message


def near_miss(word: str, known: list, cut: float = 0.6) -> str:
    """'; did you mean ...?' for the nearest known word, or nothing."""
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=cut)
    return f"; did you mean {lower[near[0]]}?" if near else ""


def _check_data(flat: dict) -> None:
    if not flat["datasets"]:
        raise ValueError("datasets=[] names no data: give at least one, such as datasets=[hh]")
    for name in flat["datasets"]:
        if flat["datasets"].count(name) > 1:
            raise ValueError(f"datasets names {name} twice; to draw it more often use data.weights.{name}=2")
    for key in ("data.paths", "data.weights"):
        for name, value in flat[key].items():
            if name not in flat["datasets"]:
                raise ValueError(
                    f"{key}.{name}: {name} is not among datasets={show(flat['datasets'])}"
                    + near_miss(name, flat["datasets"])
                )
            if key == "data.paths":
                if not isinstance(value, str) or not value:
                    raise ValueError(f"data.paths.{name}={show(value)} is not allowed; allowed: a path")
                _must_exist(f"data.paths.{name}", value)
            elif not number("", open=True).admits(value):
                raise ValueError(f"data.weights.{name}={show(value)} is not allowed; allowed: a number above 0")
    for name, value in flat["data.columns"].items():
        if isinstance(value, dict) and name not in flat["datasets"]:
            raise ValueError(
                f"data.columns.{name}: {name} is not among datasets={show(flat['datasets'])}"
                + near_miss(name, flat["datasets"])
            )
    if flat["max_prompt_length"] >= flat["max_length"]:
        raise ValueError(
            f"max_prompt_length={flat['max_prompt_length']} leaves no room for a response within "
            f"max_length={flat['max_length']}; set max_prompt_length below max_length"
        )
    if flat["n_epochs"] is None and flat["n_examples"] is None:
        raise ValueError("n_epochs and n_examples are both null, so the run would never end; set one of them")


def _check_model(flat: dict) -> None:
    for name in ("model.name_or_path", "model.tokenizer_name_or_path"):
        value = flat[name]
        replaced = flat["model.random_config"] or (flat["model.local_copy"] and os.path.isdir(flat["model.local_copy"]))
        if value and _looks_like_path(value) and not (replaced and name == "model.name_or_path"):
            _must_exist(name, value)
    if flat["model.archive"]:
        _must_exist("model.archive", flat["model.archive"])
    block, name = flat["model.block"], flat["model.block_name"]
    if block and name and block != name:
        raise ValueError(
            f"model.block={block} and model.block_name={name} are one key under two names and differ; "
            "set only model.block_name"
        )
    random_config = flat["model.random_config"]
    if random_config is not None and not isinstance(random_config.get("model_type"), str):
        raise ValueError("model.random_config needs model_type, such as model.random_config.model_type=llama")
    if not flat["prefix_sharing"] and flat["model.attention"] in ("packed_sdpa", "flex"):
        raise ValueError(
            f"model.attention={flat['model.attention']} is for rows that share a prompt, and "
            "prefix_sharing=false makes none; leave model.attention=auto"
        )
    if flat["data.chat_template"] and _looks_like_path(flat["data.chat_template"]):
        _must_exist("data.chat_template", flat["data.chat_template"])


def _check_optimizer(flat: dict) -> None:
    name = flat["optimizer"]
    if name not in OPTIMIZERS:
        why = {
            "LBFGS": " (LBFGS needs the loss several times a step)",
            "SparseAdam": " (SparseAdam needs sparse gradients)",
            "Muon": " (Muon takes matrices only)",
        }.get(name, "")
        raise ValueError(
            f"optimizer={name} is not one that can be used here{why}; allowed: {', '.join(OPTIMIZERS)}"
            + near_miss(name, list(OPTIMIZERS))
        )
    known = OPTIMIZERS[name].split()
    for key, value in flat["optimizer_kwargs"].items():
        full = f"optimizer_kwargs.{key}"
        if key == "lr":
            raise ValueError("optimizer_kwargs.lr: the learning rate is a key of its own; use lr=...")
        if key not in known:
            raise ValueError(f"{full}: {name} has no such argument; it has {', '.join(known)}" + near_miss(key, known))
        if key in _FLAGS:
            good, allowed = isinstance(value, bool) or value is None, "true or false"
        elif key in _SEVERAL or (name == "Adafactor" and key == "eps"):
            good = isinstance(value, list) and len(value) == 2 and all(v is None or _is_number(v) for v in value)
            allowed = "a list of two numbers"
        else:
            negative = key == "beta2_decay"  # an exponent
            good, allowed = _is_number(value) and (value >= 0 or negative), "a number from 0 up"
        if key == "betas" and good:
            good, allowed = all(0 <= beta < 1 for beta in value), "a list of two numbers from 0 and below 1"
        if not good:
            raise ValueError(f"{full}={show(value)} is not allowed; allowed: {allowed}")
    arguments = flat["optimizer_kwargs"]
    if arguments.get("fused") and arguments.get("foreach"):
        raise ValueError("optimizer_kwargs.fused and optimizer_kwargs.foreach exclude each other; set one of them")
    if arguments.get("nesterov") and not (arguments.get("momentum") and not arguments.get("dampening")):
        raise ValueError("optimizer_kwargs.nesterov=true needs optimizer_kwargs.momentum above 0 and no dampening")
    if flat["fsdp.cpu_offload"]:
        for key in ("fused", "capturable"):
            if arguments.get(key):
                raise ValueError(
                    f"optimizer_kwargs.{key}=true steps on the accelerator, and fsdp.cpu_offload=true "
                    "keeps the parameters in host memory; set one of them to false"
                )


def _check_loss_and_evaluation(flat: dict) -> None:
    uses_reference = flat["loss.name"] != "sft" and not flat.get("loss.reference_free")
    if not uses_reference:
        why = "loss=sft" if flat["loss.name"] == "sft" else "loss.reference_free=true"
        for key in ("reference.mode", "reference.cache_dir", "model.reference_dtype", "fsdp.reference_cpu_offload"):
            _refuse_change(flat, key, f"{why} uses no reference model")
    elif flat["reference.mode"] == "online" and flat["reference.cache_dir"]:
        raise ValueError("reference.cache_dir is for reference.mode=cached; with online nothing is kept on disk")
    for key in ("early_stopping.metric", "checkpoint.best_metric"):
        metric = flat[key]
        if metric is None:
            continue
        allowed = [m for m in EVAL_METRICS if flat["loss.name"] != "sft" or m in ("loss/eval", "logps_eval/chosen")]
        # With several data sets each metric also comes for each of them alone, under <metric>/<data set>.
        if metric not in allowed and not any(metric == f"{m}/{data}" for m in allowed for data in flat["datasets"]):
            raise ValueError(
                f"{key}={metric} is not a metric of loss={flat['loss.name']}; allowed: "
                f"{', '.join(allowed)}, each also as METRIC/DATASET{near_miss(metric, allowed)}"
            )
    if flat["early_stopping.metric"] is None:
        for key in ("early_stopping.patience", "early_stopping.min_delta", "early_stopping.mode"):
            _refuse_change(flat, key, "early_stopping.metric is null, so nothing is watched")
    if not flat["sample_during_eval"]:
        for key in (
            "n_eval_model_samples",
            "sampling.temperature",
            "sampling.top_p",
            "sampling.max_new_tokens",
            "sampling.seed",
        ):
            _refuse_change(flat, key, "sample_during_eval=false draws no samples")
    if flat["sampling.top_p"] == 0:
        raise ValueError("sampling.top_p=0 leaves no token to draw; for the likeliest token use sampling.temperature=0")
    if flat["guards.on_nonfinite"] == "stop" and flat["guards.max_nonfinite_steps"]:
        raise ValueError("guards.max_nonfinite_steps counts skipped steps: it needs guards.on_nonfinite=skip")
    if flat["guards.on_nonfinite"] == "skip" and not flat["guards.max_nonfinite_steps"]:
        raise ValueError("guards.on_nonfinite=skip needs guards.max_nonfinite_steps of 1 or more")


def _check_placement(flat: dict, device_count: int | None) -> None:
    trainer, device = flat["trainer"], flat["device"]
    if device is not None and not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise ValueError(
            f"device={device} is not allowed; allowed: cpu, cuda, cuda:N, mps or null"
            + near_miss(device, ["cpu", "cuda", "mps"])
        )
    kind = (device or "").split(":")[0] or ("cpu" if device_count == 0 else "")  # empty: not known yet
    if device_count is not None and kind == "cuda":
        index = int(device.partition(":")[2] or 0) if device else 0
        if index >= device_count:
            devices = "is 1 CUDA device" if device_count == 1 else f"are {device_count} CUDA devices"
            raise ValueError(f"device={device}: there {devices} here{'' if device_count else '; use device=cpu'}")
    if kind == "cpu":
        for key in ("model.fsdp_policy_mp", "model.reference_dtype", "fsdp.reduce_dtype"):
            if flat[key] == "float16":
                raise ValueError(f"{key}=float16 needs a GPU: on a CPU use bfloat16 or float32")
        if flat["model.attention"] == "flex":
            raise ValueError("model.attention=flex needs CUDA; on a CPU use packed_sdpa or auto")
    elif kind == "mps" and flat["model.attention"] == "flex":
        raise ValueError("model.attention=flex needs CUDA; on mps use packed_sdpa or auto")

    world = flat["world_size"]
    joined = utils.joined_world()
    if joined is not None:
        if world is not None and world != joined[1]:
            raise ValueError(
                f"world_size={world}, but {joined[3]} started {joined[1]} processes; leave world_size=null"
            )
        if flat["fsdp_port"] is not None:
            raise ValueError(
                f"fsdp_port={flat['fsdp_port']}: under {joined[3]} the meeting point comes from "
                "MASTER_ADDR and MASTER_PORT; leave fsdp_port=null"
            )
        world = joined[1]
    if trainer == "BasicTrainer":
        if world is not None and world > 1:
            raise ValueError(
                f"world size {world}: BasicTrainer trains on one device; choose trainer=FSDPTrainer or "
                "trainer=TensorParallelTrainer" + ("" if joined else ", or world_size=1")
            )
        for key in ("tp_size", "fsdp_port", "model.fsdp_policy_mp", *(k for k in SCHEMA if k.startswith("fsdp."))):
            more = "; for a lower precision use model.policy_dtype=bfloat16" if key == "model.fsdp_policy_mp" else ""
            _refuse_change(
                flat,
                key,
                f"trainer=BasicTrainer holds the whole model on one device; it belongs to trainer=FSDPTrainer{more}",
            )
        return
    if kind == "mps":
        raise ValueError(f"trainer={trainer} runs on cuda and cpu; for device=mps use trainer=BasicTrainer")
    if device and ":" in device:
        raise ValueError(
            f"device={device}: trainer={trainer} uses all visible devices; write device=cuda, and choose "
            "among them with CUDA_VISIBLE_DEVICES"
        )
    if world is None and device_count is not None:
        world = 1 if kind == "cpu" else device_count
    if kind == "cuda" and device_count is not None and not joined and world > device_count:
        raise ValueError(
            f"world_size={world}, but only {device_count} CUDA devices are visible here; there is one process a device"
        )
    _check_sharding(flat, world)


def _check_sharding(flat: dict, world: int | None) -> None:
    """Combinations of a sharded trainer; `world` is None while it is not known."""
    if flat["optimizer"] in WHOLE_TENSORS_ONLY:
        usable = [name for name in OPTIMIZERS if name not in WHOLE_TENSORS_ONLY]
        raise ValueError(
            f"optimizer={flat['optimizer']} cannot work on sharded parameters (its computation needs whole "
            f"tensors); use trainer=BasicTrainer, or one of {', '.join(usable)}"
        )
    trainer, strategy, tp = flat["trainer"], flat["fsdp.sharding_strategy"], flat["tp_size"]
    if trainer == "FSDPTrainer" and tp > 1:
        raise ValueError(
            f"tp_size={tp} needs trainer=TensorParallelTrainer, which also shards over the devices that "
            "tp_size leaves (world_size / tp_size)"
        )
    if trainer == "TensorParallelTrainer":
        if tp == 1 and world is not None and world > 1:
            raise ValueError(
                "trainer=TensorParallelTrainer needs tp_size of 2 or more; to shard without splitting "
                "matrices choose trainer=FSDPTrainer"
            )
        if strategy == "HYBRID_SHARD":
            raise ValueError(
                "fsdp.sharding_strategy=HYBRID_SHARD does not go with TensorParallelTrainer; use "
                "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD"
            )
        if world == tp:
            for key in (k for k in SCHEMA if k.startswith("fsdp.")):
                _refuse_change(
                    flat,
                    key,
                    f"tp_size={tp} takes the whole world of {world} processes, so that none are left to shard over",
                )
    replicas = flat["fsdp.replicas"]
    if strategy != "HYBRID_SHARD" and replicas is not None:
        raise ValueError(f"fsdp.replicas={replicas} needs fsdp=hybrid_shard; {strategy} decides the copies itself")
    if world is None:
        return
    ranks = shard_layout(trainer, world, tp, strategy, replicas).data_ranks
    if flat["batch_size"] < ranks:
        raise ValueError(
            f"batch_size={flat['batch_size']} is less than the {ranks} processes that share it, which "
            f"would leave some without an example; use batch_size={ranks} or more, or fewer processes"
        )


def _check_run(flat: dict) -> None:
    if flat["gradient_accumulation_steps"] > flat["batch_size"]:
        raise ValueError(
            f"gradient_accumulation_steps={flat['gradient_accumulation_steps']} is more than "
            f"batch_size={flat['batch_size']}: a pass needs an example at least"
        )
    if flat["plan_device_memory_gb"] is not None and not flat["plan"]:
        raise ValueError(
            f"plan_device_memory_gb={show(flat['plan_device_memory_gb'])} is what a plan is made for: it "
            "needs plan=true"
        )
    if not flat["local_dirs"]:
        raise ValueError("local_dirs is empty: name at least one folder for runs, such as local_dirs=[.cache]")
    formats, known = flat["checkpoint.formats"], ["state", "policy", "hf"]
    for name in formats:
        if name not in known:
            raise ValueError(
                f"checkpoint.formats={show(formats)}: {name} is not allowed; allowed: state, policy, hf"
                + near_miss(name, known)
            )
    if not formats:
        raise ValueError("checkpoint.formats=[] would save nothing; name state, policy or hf, or use debug=true")
    if flat["checkpoint.async_save"] and "state" not in formats:
        raise ValueError(
            "checkpoint.async_save=true writes the state in the background: add state to checkpoint.formats"
        )
    if not flat["checkpoint.keep_best"] and flat["checkpoint.best_metric"]:
        raise ValueError(f"checkpoint.best_metric={flat['checkpoint.best_metric']} needs checkpoint.keep_best=true")
    if flat["resume"] is not None:
        if flat["resume"] != "auto":
            _must_exist("resume", flat["resume"])
        if "state" not in formats:
            raise ValueError("resume needs state among checkpoint.formats, or the run could not be resumed again")
        if flat["local_run_dir"] is not None:
            raise ValueError("resume goes on in the folder of the old run; leave local_run_dir=null")
        if flat["debug"]:
            raise ValueError("debug=true writes no checkpoint, so there is nothing to resume; leave resume=null")
    if flat["local_run_dir"] and not flat["resume"]:
        folder = flat["local_run_dir"]
        # What a run leaves that was killed in its first instant does not count.
        if os.path.exists(folder) and not (
            os.path.isdir(folder) and all(name.endswith(".tmp") for name in os.listdir(folder))
        ):
            raise ValueError(
                f"local_run_dir={folder} exists and is not an empty folder; name a new one, or use "
                f"resume={folder} to continue the run in it"
            )


# ---- Small parts ----------------------------------------------------------------------------------------------------


@functools.cache
def _defaults() -> dict:
    """Values of all keys in config.yaml and of the default fsdp group and blank model, flat."""
    flat = {}
    for name, prefix in (("config.yaml", ""), ("fsdp/full_shard.yaml", "fsdp."), ("model/blank_model.yaml", "model.")):
        with open(os.path.join(CONFIG_DIR, name), encoding="utf-8") as file:
            content = yaml.safe_load(file)
        flat.update({k: v for k, v in flatten(content, prefix).items() if k in SCHEMA})
    return flat


def _refuse_change(flat: dict, key: str, why: str) -> None:
    """Raise ValueError if `key` no longer has its default although `why`."""
    default = _defaults()[key]
    if flat[key] != default:
        raise ValueError(f"{key}={show(flat[key])} cannot be honoured: {why}. Leave {key}={show(default)}.")


def _must_exist(key: str, path: str) -> None:
    if not os.path.exists(os.path.expanduser(path)):
        folder = os.path.dirname(os.path.abspath(path))
        near = near_miss(os.path.basename(path), os.listdir(folder), cut=0.8) if os.path.isdir(folder) else ""
        raise ValueError(f"{key}={path}: there is no such file or folder{near}")


def _looks_like_path(name: str) -> bool:
    """Hub names are NAME or OWNER/NAME; all else that could be a path is meant as one."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((".gguf", ".jinja", ".pt", "/"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def options(group: str) -> list:
    return sorted(name[:-5] for name in os.listdir(os.path.join(CONFIG_DIR, group)) if name.endswith(".yaml"))


def show(value) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ",".join(map(show, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{show(v)}" for k, v in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_dict(config: DictConfig) -> dict:
    """The settings as plain nested containers, interpolations worked out."""
    return OmegaConf.to_container(config, resolve=True)


def finalize(config: DictConfig) -> DictConfig:
    """The settings as the run sees and records them: interpolations worked out, the run named, one block name."""
    settings = OmegaConf.create(as_dict(config))
    settings.model.block_name = settings.model.block_name or settings.model.block
    settings.model.block = None
    if settings.exp_name is None:
        parts = [
            os.path.basename(name.rstrip("/")).split(".jsonl")[0]
            for name in (settings.model.name_or_path, settings.loss.name, *settings.datasets)
        ]
        settings.exp_name = "_".join(map(utils.file_name, [*parts[:2], "+".join(parts[2:])]))
    settings.exp_name = utils.file_name(settings.exp_name)
    return settings
