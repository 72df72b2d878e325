"""The schema against the config files and torch, and every combination that is refused."""

import dataclasses
import functools
import inspect
import os
import pickle
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, compose_config
from omegaconf import OmegaConf

import settings
import train
import utils
from settings.foreign_keys import FOREIGN_KEYS, FSDP1_KEYS
from settings.optimizers import OPTIMIZERS

# The README commands of the DPO reference implementation (eric-mitchell/direct-preference-optimization):
# paths of weights are put in by the tests.
REFERENCE_COMMANDS = [
    "model=pythia69 datasets=[hh] loss=sft exp_name=anthropic_dpo_pythia69 gradient_accumulation_steps=2 batch_size=64 "
    "eval_batch_size=32 trainer=FSDPTrainer sample_during_eval=false",
    "model=blank_model model.name_or_path=WEIGHTS model.block_name=LlamaDecoderLayer datasets=[hh,shp] loss=sft "
    "exp_name=anthropic_shp_sft_llama_7b gradient_accumulation_steps=2 batch_size=64 eval_batch_size=32 "
    "trainer=FSDPTrainer sample_during_eval=false",
    "model=blank_model model.name_or_path=gpt2-xl model.block=GPT2Block",
    "model=pythia69 datasets=[hh] loss=dpo loss.beta=0.1 model.archive=ARCHIVE exp_name=anthropic_dpo_pythia69 "
    "gradient_accumulation_steps=2 batch_size=32 eval_batch_size=32 trainer=FSDPTrainer sample_during_eval=false",
    "model=pythia28 datasets=[hh] loss=sft exp_name=anthropic_dpo_pythia28 gradient_accumulation_steps=2 batch_size=64 "
    "eval_batch_size=32 trainer=FSDPTrainer sample_during_eval=false model.fsdp_policy_mp=bfloat16",
    "model=pythia28 datasets=[hh] loss=dpo loss.beta=0.1 exp_name=anthropic_dpo_pythia28 gradient_accumulation_steps=2 "
    "batch_size=64 eval_batch_size=32 trainer=FSDPTrainer sample_during_eval=false model.fsdp_policy_mp=bfloat16 "
    "model.archive=ARCHIVE",
]
REFERENCE_DEFAULTS = dict(
    seed=0,
    batch_size=4,
    eval_batch_size=16,
    debug=False,
    fsdp_port=None,
    datasets=["hh"],
    local_dirs=["/scr-ssd", "/scr", ".cache"],
    sample_during_eval=True,
    n_eval_model_samples=16,
    do_first_eval=True,
    lr=5e-7,
    gradient_accumulation_steps=1,
    max_grad_norm=10.0,
    max_length=512,
    max_prompt_length=256,
    n_epochs=1,
    n_examples=None,
    n_eval_examples=256,
    trainer="BasicTrainer",
    optimizer="RMSprop",
    warmup_steps=150,
    activation_checkpointing=False,
    eval_every=20_000,
    minimum_log_interval_secs=1.0,
)


def check(*overrides, device_count=None):
    config = compose_config(*overrides)
    settings.validate(config, device_count)
    return settings.finalize(config)


@functools.cache
def composed(*groups):
    return compose_config(*groups)


def check_quickly(line, device_count=None):
    """As check, but with Hydra for the groups only: it takes most of the time, and there are many cases."""
    words = ["model=tiny", *shlex.split(line)]
    is_group = [word.partition("=")[0] in ("model", "loss", "fsdp") for word in words]
    last = {word.partition("=")[0]: word for word, group in zip(words, is_group) if group}
    config = composed(*sorted(last.values())).copy()
    for word, group in zip(words, is_group):
        if not group:
            key, _, value = word.lstrip("+").partition("=")
            OmegaConf.update(config, key, OmegaConf.create(f"value: {value}").value, force_add=True)
    settings.validate(config, device_count, settings.named_keys(words))


@pytest.mark.parametrize("line", REFERENCE_COMMANDS)
def test_the_commands_of_the_dpo_reference_implementation_are_valid(line, tmp_path):
    (tmp_path / "policy.pt").write_bytes(b"weights")
    config = check(*shlex.split(line.replace("WEIGHTS", str(tmp_path)).replace("ARCHIVE", f"{tmp_path}/policy.pt")))
    assert config.model.block_name in ("GPTNeoXLayer", "LlamaDecoderLayer", "GPT2Block")


def test_the_defaults_of_the_dpo_reference_implementation():
    config = OmegaConf.to_container(compose_config("model=tiny"))
    assert {key: config[key] for key in REFERENCE_DEFAULTS} == REFERENCE_DEFAULTS
    assert config["wandb"]["enabled"] is True and config["wandb"]["project"] == "direct-preference-optimization"
    dpo = OmegaConf.to_container(compose_config("model=tiny", "loss=dpo"))["loss"]
    ours = [dpo.pop(key) for key in ("f_divergence", "alpha", "sft_weight")]
    assert dpo == {"name": "dpo", "beta": 0.1, "label_smoothing": 0, "reference_free": False}
    assert ours == ["reverse_kl", 0.5, 0]


@pytest.mark.parametrize("group, option", [(g, o) for g in ("model", "loss", "fsdp") for o in settings.options(g)])
def test_every_option_of_every_group(group, option):
    more = {
        "model": ["model.name_or_path=gpt2"] if option == "blank_model" else [],
        "loss": [
            "model=tiny",
            *(["reference.mode=online"] if option in ("ld_dpo", "tdpo") else []),
            *(["loss.parts=[{name: dpo, beta: 0.1}]"] if option == "mix" else []),
        ],
        "fsdp": ["model=tiny", "trainer=FSDPTrainer", "world_size=2"],
    }[group]
    check(f"{group}={option}", *more)


@pytest.mark.parametrize("name", settings.options("experiment"))
def test_experiments(name, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)  # the bundled data set is named by its path
    config = check(f"experiment={name}", *([f"model.archive={tmp_path}"] if name.endswith("_dpo") else []))
    assert config.exp_name
    other = check(
        f"experiment={name}",
        "lr=3e-6",
        "loss=sft" if name == "quickstart" else "seed=1",
        *([f"model.archive={tmp_path}"] if name.endswith("_dpo") else []),
    )
    assert other.lr == 3e-6, "the command line wins over the experiment"


def test_an_experiment_that_starts_from_an_archive_asks_for_it():
    with pytest.raises(ValueError) as error:
        settings.validate(compose_config("experiment=hh_pythia28_dpo"))
    assert "model.archive is missing: give model.archive=RUN_FOLDER" in str(error.value)
    assert "experiment=hh_pythia28_sft" in str(error.value)


def test_no_config_file_leaves_a_key_to_the_user_that_has_a_default():
    """??? laid over a value, even null, changes nothing."""
    for path in sorted((ROOT / "config").rglob("*.yaml")):
        asked = [key for key, value in settings.flatten(yaml.safe_load(path.read_text())).items() if value == "???"]
        assert asked == (["name_or_path"] if path.stem == "blank_model" else []), path


def test_a_local_copy_that_is_missing_or_of_another_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="model.local_copy=/no/such: there is no such"):
        check_quickly("model=smollm2 model.local_copy=/no/such")
    check_quickly("model=smollm2")  # its own may be missing: the Hub has it
    copy = tmp_path / compose_config("model=smollm2").model.local_copy
    copy.mkdir(parents=True)
    check_quickly("model=smollm2")
    with pytest.raises(ValueError, match="model.name_or_path=gpt2 would not be read.*model.local_copy=null"):
        check_quickly("model=smollm2 model.name_or_path=gpt2")
    check_quickly("model=smollm2 model.name_or_path=gpt2 model.local_copy=null")
    with pytest.raises(ValueError, match="model.random_config makes random weights"):
        check_quickly(f"model=tiny model.local_copy={tmp_path}")


def test_pythia_sizes():
    assert check("model=pythia", "model.size=410m").model.name_or_path == "EleutherAI/pythia-410m"


def test_run_names():
    assert check("model=pythia28", "loss=dpo", "datasets=[hh,shp]").exp_name == "pythia-2.8b_dpo_hh+shp"
    assert check("model=tiny", "exp_name=a/b c").exp_name == "a-b-c"


def test_every_key_has_an_admitted_default():
    """The schema and config/*.yaml have the same keys, and every default is one that the schema allows."""
    for overrides in (
        ["model=blank_model"],
        ["model=pythia"],
        *(["model=tiny", f"loss={name}"] for name in settings.options("loss")),
    ):
        flat = settings.flatten(OmegaConf.to_container(compose_config(*overrides)))
        keys = settings.keys_of(flat)
        assert set(flat) == set(keys), overrides
        refused = [key for key, value in flat.items() if value != "???" and not keys[key].admits(value)]
        assert refused == []
    assert settings.complete({"model": {}, "loss": {"name": "ipo"}})["loss"]["beta"] == 0.1
    usual = settings.complete({"model": {"name_or_path": "gpt2"}})  # not those of the loss before
    composed = OmegaConf.to_container(compose_config("model=blank_model", "model.name_or_path=gpt2"))
    assert usual == composed, "the defaults without Hydra are those with it"


def test_every_key_is_explained():
    """No key without a comment where it is set."""
    for path in (ROOT / "config").rglob("*.yaml"):
        for paragraph in path.read_text().split("\nhydra:")[0].split("\n\n"):
            keys = [line for line in paragraph.splitlines() if line and not line.startswith(("#", " ", "defaults:"))]
            assert not keys or "#" in paragraph or path.parent.name in ("model", "fsdp", "loss", "experiment"), keys


def test_what_is_recorded_is_what_was_composed():
    """config.yaml of a run has the keys and values that Hydra composed, in their order; old run folders have, too."""
    for overrides in (
        ["model=pythia", "loss=ipo"],
        ["model=tiny", "loss=dpo", "optimizer=AdamW", "+optimizer_kwargs.betas=[0.9,0.95]"],
    ):
        composed = OmegaConf.to_container(compose_config(*overrides), resolve=True)
        composed["exp_name"] = check(*overrides).exp_name
        composed["local_dirs"] = [os.path.abspath(folder) for folder in composed["local_dirs"]]
        recorded = settings.as_dict(check(*overrides))
        assert OmegaConf.to_yaml(OmegaConf.create(recorded)) == OmegaConf.to_yaml(OmegaConf.create(composed))


def test_settings_are_frozen_and_replaced_by_key():
    config = check("model=tiny", "loss=dpo")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.fsdp.cpu_offload = True
    changes = {"fsdp.cpu_offload": True, "loss.beta": 0.5, "data.weights.hh": 2, "datasets": ["hh", "shp"], "seed": 3}
    other = settings.replace(config, changes)
    assert other.fsdp.cpu_offload and other.loss.options["beta"] == 0.5 and other.data.weights == {"hh": 2}
    assert other.datasets == ("hh", "shp") and other.seed == 3
    assert config == check("model=tiny", "loss=dpo") == pickle.loads(pickle.dumps(config))
    with pytest.raises(AssertionError):
        settings.replace(config, {"fsdp.cpu_ofload": True})


def test_optimizers_match_torch():
    import torch

    for name, arguments in OPTIMIZERS.items():
        assert set(arguments.split()) <= set(inspect.signature(getattr(torch.optim, name)).parameters), name


VALUES = (-1, 0, 0.5, 1, 1.5, 5, None, [0.9, 0.99], [0, 0], [1.5, 0.9], [0.5, 1.2], [2, 3], [1e-6, 50], [None, 1e-3])


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_arguments_that_are_allowed_are_allowed_by_torch(name):
    """Each value that the checks let through builds an optimizer of torch, and a step of it is finite."""
    import torch

    from training.optimizer import make_optimizer

    usual = settings.finalize(composed("model=tiny"))
    for argument in OPTIMIZERS[name].split():
        for value in VALUES if argument not in ("fused", "foreach", "capturable") else ():
            config = settings.replace(usual, {"optimizer": name, f"optimizer_kwargs.{argument}": value})
            try:
                settings.check(config, device_count=0)
            except ValueError:
                continue
            weight = torch.nn.Parameter(torch.ones(3, 2))
            optimizer = make_optimizer(config, [{"params": [weight]}])
            for _ in range(2):
                weight.grad = torch.full_like(weight, 0.1)
                optimizer.step()
            assert torch.isfinite(weight).all(), (argument, value)


def test_foreign_keys_lead_to_keys_of_ours():
    for foreign, ours in {**FOREIGN_KEYS, **FSDP1_KEYS}.items():
        assert foreign not in settings.SCHEMA
        name = re.match(r"[\w.]+", ours)[0]
        section = name.rpartition(".")[0]
        assert (
            ours.startswith("not needed: ")
            or name in settings.SCHEMA
            or name in settings.keys_of({"loss.name": "dpo"})
            or name in ("loss", "fsdp")
            or section == "optimizer_kwargs"
        ), foreign
    table = (ROOT / "docs" / "sharding.md").read_text()
    named = re.findall(r"`(\w+)", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")))
    arguments = [name for name in named if name.islower()]
    assert [name for name in arguments if name not in FSDP1_KEYS] == [], "every argument of the table is known"


def test_long_names_of_runs_end_in_a_digest():
    """Eight data files with long names, say: the run's folder must have a name that file systems allow."""
    names = [f"preferences-of-annotators-{'x' * 40}-{n}" for n in range(8)]
    given = [f"exp_name={'+'.join(names)}", f"exp_name={'+'.join(names[::-1])}", f"exp_name={'ä' * 300}"]
    made = [check("model=tiny", *train.arguments_for_hydra([word])).exp_name for word in given]
    assert len(set(made)) == 3
    assert all(200 < len(name.encode()) <= 255 - len("_2026-01-31_23-59-59_123456") for name in made)
    assert check("model=tiny", "exp_name=" + "x" * 228).exp_name == "x" * 228, "what was short enough stays"


@pytest.mark.parametrize(
    "line, words",
    [
        # types and ranges
        ("lr=abc", ["lr=abc", "a number above 0"]),
        ("lr=0", ["lr=0", "above 0"]),
        ("lr=nan", ["lr=nan"]),
        ("batch_size=0", ["batch_size=0", "from 1 up"]),
        ("batch_size=2.5", ["batch_size=2.5", "whole number"]),
        ("batch_size=true", ["batch_size=true"]),
        ("debug=1", ["debug=1", "true or false"]),
        ("datasets=hh", ["datasets=hh", "list"]),
        ("datasets=[]", ["datasets"]),
        ("seed=-1", ["seed=-1"]),
        ("sampling.top_p=1.5", ["sampling.top_p=1.5", "to 1"]),
        ("schedule=cosin", ["schedule=cosin", "constant, linear or cosine", "did you mean cosine?"]),
        ("trainer=FSDPTrianer", ["trainer=FSDPTrianer", "did you mean FSDPTrainer?"]),
        ("tokens_per_microbatch=0", ["tokens_per_microbatch", "auto or a whole number"]),
        ("activation_checkpointing=0", ["activation_checkpointing=0"]),
        ("wandb=false", ["wandb=false", "wandb.enabled"]),
        ("device=gpu", ["device=gpu", "cuda"]),
        ("lr=1e308", ["lr=1e+308", "too large"]),
        (f"lr={'1' * 400}", ["lr=111111...111", "too large"]),
        (f"n_examples={'1' * 400}", ["n_examples=111111...111", "too large"]),
        ("loss=dpo loss.beta=1e308", ["loss.beta=1e+308", "too large"]),
        ("guards.collective_timeout_minutes=1e30 trainer=FSDPTrainer", ["collective_timeout_minutes", "below"]),
        ("datasets=hh", ["write datasets=[hh]"]),
        # arguments of optimizers
        ("optimizer=Adadelta +optimizer_kwargs.rho=5", ["rho=5", "below 1"]),
        ("optimizer=Rprop +optimizer_kwargs.etas=[2,3]", ["etas=[2,3]", "above 1"]),
        ("optimizer=Rprop +optimizer_kwargs.step_sizes=[1,0]", ["step_sizes=[1,0]", "least"]),
        ("+optimizer_kwargs.alpha=1.5", ["alpha=1.5", "below 1"]),
        ("optimizer=AdamW +optimizer_kwargs.betas=[null,0.9]", ["betas=[null,0.9]"]),
        ("optimizer=Adafactor +optimizer_kwargs.d=0", ["d=0", "from 1 up"]),
        ("optimizer=Adafactor +optimizer_kwargs.beta2_decay=5", ["beta2_decay=5", "0 or below"]),
        ("optimizer=Adafactor +optimizer_kwargs.eps=[null,-1]", ["eps=[null,-1]"]),
        ("optimizer=AdamW +optimizer_kwargs.capturable=true device=cpu", ["capturable=true needs CUDA"]),
        # names
        ("+foo=1", ["no key foo"]),
        ("+learning_rate=1", ["no key learning_rate", "here that is lr"]),
        ("+output_dir=x", ["here that is local_dirs"]),
        ("+gradient_checkpointing=true", ["here that is activation_checkpointing"]),
        ("+ref_model=x", ["the reference is the policy"]),
        ("+beta=0.1", ["loss.beta", "loss=dpo"]),
        ("+trainer_args.num_train_epochs=3", ["here that is n_epochs"]),
        ("+sharding_strategy=FULL_SHARD", ["fsdp.sharding_strategy", "docs/sharding.md"]),
        ("+fsdp.auto_wrap_policy=x", ["model.block_name", "docs/sharding.md"]),
        ("+fsdp.use_orig_params=true", ["not needed", "docs/sharding.md"]),
        ("+loss.bta=1 loss=dpo", ["loss.bta", "did you mean loss.beta?"]),
        ("+loss.beta=1", ["loss=sft has no key loss.beta", "dpo", "ipo"]),
        ("+loss.label_smoothing=0.1 loss=ipo", ["loss=ipo has no key loss.label_smoothing", "|dpo|"]),
        ("loss=dpo loss.label_smoothing=0.5", ["loss.label_smoothing=0.5"]),
        ("optimizer=Adamw", ["optimizer=Adamw", "did you mean AdamW?", "RMSprop"]),
        ("optimizer=LBFGS", ["several times a step"]),
        ("+optimizer_kwargs.weight_dekay=1", ["weight_dekay", "did you mean weight_decay?"]),
        ("+optimizer_kwargs.lr=1", ["lr=..."]),
        ("optimizer=AdamW +optimizer_kwargs.betas=[0.9,1.0]", ["betas"]),
        ("datasets=[hhh]", ["hhh"]),
        ("+data.weights.shp=1", ["data.weights.shp", "not among"]),
        ("+data.weights.hh=0", ["data.weights.hh=0", "above 0"]),
        ("+data.paths.hh=/no/such", ["/no/such"]),
        ("model.archive=/no/such/policy.pt", ["model.archive=/no/such/policy.pt", "no such file"]),
        ("model=blank_model", ["model.name_or_path is missing", "model=blank_model"]),
        ("model=blank_model model.name_or_path=./nowhere", ["./nowhere"]),
        ("model=pythia model.size=100m", ["model.size=100m", "2.8b"]),
        ("resume=/no/such", ["resume=/no/such"]),
        # combinations
        ("n_epochs=null", ["n_epochs and n_examples"]),
        ("max_length=256", ["max_prompt_length=256", "max_length=256"]),
        ("gradient_accumulation_steps=8", ["batch_size=4"]),
        ("model.block=A model.block_name=B", ["model.block_name"]),
        ("reference.mode=online", ["reference.mode=online", "loss=sft"]),
        ("loss=dpo loss.reference_free=true reference.mode=online", ["reference_free"]),
        ("early_stopping.patience=7", ["early_stopping.metric is null"]),
        ("early_stopping.metric=rewards_eval/acuracies loss=dpo", ["did you mean rewards_eval/accuracies?"]),
        ("early_stopping.metric=rewards_eval/accuracies", ["loss=sft", "loss/eval"]),
        ("checkpoint.formats=[stat]", ["did you mean state?"]),
        ("checkpoint.formats=[hf] checkpoint.async_save=true", ["add state"]),
        ("guards.max_nonfinite_steps=3", ["guards.on_nonfinite=skip"]),
        ("guards.on_nonfinite=skip", ["max_nonfinite_steps"]),
        ("prefix_sharing=false model.attention=flex", ["prefix_sharing=false"]),
        ("sample_during_eval=false sampling.top_p=0.5", ["sample_during_eval=false"]),
        ("early_stopping.metric=loss/eval/hh", ["single data set", "loss/eval alone"]),
        ("checkpoint.best_metric=loss/eval/hh", ["single data set", "loss/eval alone"]),
        ("datasets=[hh,shp] checkpoint.best_metric=loss/eval/se", ["METRIC/DATASET"]),
        ("data.apply_template=true data.allow_control_tokens=true", ["data.allow_control_tokens=true", "no effect"]),
        ("data.template_date=yesterday", ["data.template_date=yesterday", "YYYY-MM-DD"]),
        # given in this command, but left without effect by another setting
        ("guards.collective_timeout_minutes=5", ["guards.collective_timeout_minutes=5", "one process"]),
        ("guards.collective_timeout_minutes=5 trainer=FSDPTrainer world_size=1", ["one process"]),
        ("loss=dpo trainer=FSDPTrainer fsdp.reference_cpu_offload=true", ["reference_cpu_offload", "cached"]),
        (
            "loss=dpo reference.mode=online trainer=FSDPTrainer fsdp.cpu_offload=true fsdp.reference_cpu_offload=true",
            ["fsdp.reference_cpu_offload=true", "fsdp.cpu_offload=true"],
        ),
        ("trainer=FSDPTrainer fsdp=shard_grad_op fsdp.backward_prefetch=null", ["backward_prefetch=null", "keeps"]),
        ("checkpoint.best_metric=loss/eval checkpoint.keep_last=null", ["best_metric", "keep_last=null"]),
        ("checkpoint.keep_best=false checkpoint.keep_last=null", ["keep_best=false", "keep_last=null"]),
        ("wandb.enabled=false wandb.project=mine", ["wandb.project=mine", "wandb.enabled=false"]),
        ("debug=true wandb.entity=me", ["wandb.entity=me", "debug=true"]),
        ("debug=true checkpoint.every=100", ["checkpoint.every=100", "debug=true"]),
        ("sampling.temperature=0 sampling.top_p=0.9", ["sampling.top_p=0.9", "temperature=0"]),
        ("sampling.temperature=0 sampling.seed=1", ["sampling.seed=1", "temperature=0"]),
        ("optimizer=Rprop schedule=linear", ["schedule=linear", "Rprop"]),
        ("optimizer=Rprop max_grad_norm=1", ["max_grad_norm=1", "Rprop"]),
        ("data.template_date=\"'2026-12-01'\"", ["data.template_date=2026-12-01", "no effect", "no date"]),
        ("model.local_copy=.", ["model.local_copy", "random_config"]),
        # placement
        ("optimizer=Adafactor precision=bfloat16", ["precision=bfloat16", "Adafactor", "precision=float32"]),
        ("device=cpu precision=tf32", ["precision=tf32", "GPU"]),
        ("device=cpu precision=float16", ["precision=float16 needs a GPU"]),
        ("precision=float32 model.fsdp_policy_mp=bfloat16", ["two names", "precision"]),
        ("fsdp=no_shard", ["fsdp.sharding_strategy=NO_SHARD", "BasicTrainer"]),
        ("fsdp.cpu_offload=true", ["fsdp.cpu_offload=true", "BasicTrainer"]),
        ("world_size=2", ["BasicTrainer", "one device"]),
        ("tp_size=2", ["tp_size=2", "add trainer=TensorParallelTrainer"]),
        ("tp_size=2 world_size=2", ["tp_size=2", "add trainer=TensorParallelTrainer"]),
        ("fsdp_port=12355", ["fsdp_port"]),
        ("trainer=FSDPTrainer tp_size=2", ["TensorParallelTrainer"]),
        ("trainer=TensorParallelTrainer world_size=4", ["tp_size of 2", "add tp_size=2"]),
        ("trainer=TensorParallelTrainer world_size=9 batch_size=9", ["tp_size of 2", "add tp_size=3"]),
        ("trainer=TensorParallelTrainer world_size=4 tp_size=3", ["does not divide", "world_size=6"]),
        ("trainer=TensorParallelTrainer world_size=2 tp_size=2 fsdp=no_shard", ["none are left"]),
        ("trainer=FSDPTrainer world_size=8", ["batch_size=4", "8"]),
        ("trainer=FSDPTrainer fsdp=hybrid_shard world_size=3 fsdp.replicas=2", ["does not divide"]),
        ("trainer=FSDPTrainer fsdp.replicas=2", ["hybrid_shard"]),
        ("trainer=FSDPTrainer fsdp.backward_prefetch=BACKWARD_POST", ["BACKWARD_POST", "BACKWARD_PRE or null"]),
        ("trainer=FSDPTrainer device=cpu model.fsdp_policy_mp=float16", ["float16 needs a GPU"]),
        ("trainer=FSDPTrainer device=cuda:1", ["CUDA_VISIBLE_DEVICES"]),
        ("trainer=FSDPTrainer device=mps", ["BasicTrainer"]),
        ("device=cpu model.attention=flex", ["needs CUDA"]),
        (
            "trainer=FSDPTrainer fsdp.cpu_offload=true optimizer=AdamW +optimizer_kwargs.fused=true",
            ["fused", "offload"],
        ),
    ],
)
def test_refused(line, words):
    with pytest.raises(ValueError) as error:
        check_quickly(line)
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [
        "trainer=FSDPTrainer world_size=4 fsdp=hybrid_shard fsdp.replicas=2",
        "trainer=FSDPTrainer world_size=2 fsdp=no_shard fsdp.cpu_offload=true optimizer=SGD",
        "trainer=TensorParallelTrainer world_size=4 tp_size=2 fsdp=shard_grad_op",
        "trainer=TensorParallelTrainer world_size=1",
        "optimizer=AdamW +optimizer_kwargs.weight_decay=0.1 +optimizer_kwargs.betas=[0.9,0.95]",
        "activation_checkpointing=2",
        "activation_checkpointing=true",
        "tokens_per_microbatch=4096",
        "n_epochs=null n_examples=10",
        "loss=ipo loss.average_log_prob=true",
        "loss=dpo reference.mode=online",
        "loss=dpo datasets=[hh,shp] early_stopping.metric=rewards_eval/accuracies/hh early_stopping.patience=7",
        "debug=true wandb.enabled=false",
        "checkpoint.keep_best=false checkpoint.keep_last=null early_stopping.metric=loss/eval",
        "loss=dpo trainer=FSDPTrainer fsdp.reference_cpu_offload=true model.reference_dtype=bfloat16",
        "model.archive=.",
        "resume=auto",
        "+data.columns.chosen=better",
        "+data.weights.hh=2",
    ],
)
def test_accepted(line):
    check_quickly(line, device_count=0)


def test_what_waits_in_a_file_for_another_day_is_not_refused():
    """Keys that this command does not name: of an experiment file, or of the run that it resumes."""
    waiting = ["wandb.project=mine", "checkpoint.every=100", "guards.collective_timeout_minutes=5", "sampling.seed=1"]
    config = compose_config("model=tiny", *waiting, "debug=true", "wandb.enabled=false", "sampling.temperature=0")
    settings.validate(config, 0, given=["experiment", "model", "debug", "wandb.enabled", "sampling.temperature"])
    for key in settings.named_keys(waiting):
        with pytest.raises(ValueError, match=key):
            settings.validate(config, 0, given=[key])


def test_tensor_parallelism_alone_needs_a_tp_size_and_processes():
    for devices, advice in (
        (0, "add tp_size=2 world_size=2"),
        (1, "add tp_size=2 world_size=2"),
        (4, "add tp_size=2;"),
    ):
        with pytest.raises(ValueError, match=advice):
            check("model=tiny", "trainer=TensorParallelTrainer", device_count=devices)
    with pytest.raises(ValueError, match="tp_size=2 does not divide the world of 1 processes; use world_size=2"):
        check("model=tiny", "trainer=TensorParallelTrainer", "tp_size=2", device_count=0)


def test_device_count_is_used():
    with pytest.raises(ValueError, match="0 CUDA devices"):
        check("model=tiny", "device=cuda", device_count=0)
    with pytest.raises(ValueError, match="no MPS device here; use device=cpu"):
        check("model=tiny", "device=mps", device_count=0)
    check("model=tiny", "device=mps", device_count=1)
    with pytest.raises(ValueError, match="only 2 CUDA devices"):
        check("model=tiny", "device=cuda", "trainer=FSDPTrainer", "world_size=4", device_count=2)
    with pytest.raises(ValueError, match="16 processes|batch_size"):
        check("model=tiny", "trainer=FSDPTrainer", "device=cuda", device_count=16)
    with pytest.raises(ValueError, match="float16 needs a GPU"):
        check("model=tiny", "loss=dpo", "model.reference_dtype=float16", device_count=0)


def test_a_joined_world_overrides_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for line, word in (
        ("world_size=4 trainer=FSDPTrainer", "torchrun started 2"),
        ("", "BasicTrainer"),
        ("fsdp_port=1234 trainer=FSDPTrainer", "MASTER_PORT"),
    ):
        with pytest.raises(ValueError, match=word):
            check("model=tiny", *line.split())
    check("model=tiny", "trainer=FSDPTrainer")


def test_when_a_process_is_a_task_of_srun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert utils.joined_world() is None, "the shell of a batch script is no task"
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    assert utils.joined_world() == (0, 4, 0, "srun")


def test_the_settings_need_no_torch():
    """A mistake has to be reported quickly: nothing that is imported until then imports torch or transformers."""
    code = "import sys, train; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_yaml_files_have_one_document_each():
    for path in (ROOT / "config").rglob("*.yaml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


def test_settings_of_an_older_run_get_the_keys_that_their_loss_has_today():
    usual = settings.complete({"model": {"name_or_path": "gpt2"}, "loss": {"name": "dpo", "beta": 0.3}})["loss"]
    assert usual["beta"] == 0.3 and (usual["f_divergence"], usual["alpha"], usual["sft_weight"]) == (
        "reverse_kl",
        0.5,
        0,
    )
