"""Every setting of a run on one page: type, meaning and range. config/*.yaml hold the defaults and explain the keys.

Attributes have the names of the keys: `lr`, `fsdp.cpu_offload`. This is the only list of keys. The annotation says what
a value may be: a Literal lists the choices, `None` allows null, a dict is a mapping with keys of the user's. `low` and
`high` are included in the range unless it is `open`. `may_change` marks what a resumed run may change: what is logged,
saved and evaluated, and how long it trains; nothing that has an influence on the weights of a step. `per_node` marks
what may differ between the processes of a run.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from settings.key import LARGEST_INTEGER, Key, key, key_of, rest

A_YEAR = 60 * 24 * 366  # minutes


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Where the policy and the reference come from, and the types they are kept and computed in."""

    name_or_path: str = key("Hub name, local folder or .gguf")
    local_copy: str | None = key("folder used instead of name_or_path when it exists")
    random_config: dict[str, Any] | None = key("random weights: a transformers config")
    tokenizer_name_or_path: str | None = key("null: the model's")
    archive: str | None = key("initial weights: policy.pt, hf folder or run folder")
    block_name: str | None = key("class of the repeated block; null: found")
    block: str | None = key("older name of block_name")  # always None in finalized settings
    frozen: tuple[str, ...] = key("parameters that are not trained, by name with * and ?")
    policy_dtype: Literal["float32", "bfloat16"] = key("type of the policy's weights")
    fsdp_policy_mp: Literal["bfloat16", "float16"] | None = key("older name of precision")  # None once finalized
    reference_dtype: Literal["float32", "bfloat16", "float16"] | None = key("null: policy_dtype")
    trust_remote_code: bool = key("run the model's own code")
    attention: Literal["auto", "packed_sdpa", "flex", "varlen", "plain"] = key("kernel of packed rows")
    size: Literal["14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b"] | None = key(
        "size of Pythia", optional=True
    )  # model=pythia only, else None


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The objective, and the options that its function declares (losses/)."""

    name: str = key("objective")
    options: dict[str, Any] = rest("the loss's own keys, by name")


@dataclass(frozen=True, kw_only=True)
class FsdpSettings:
    """How FSDP2 splits the model over devices."""

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = key("what is split")
    replicas: int | None = key("HYBRID_SHARD: copies of the model; null: one a node", low=1)
    cpu_offload: bool = key("parameters, gradients, optimizer in host memory")
    reference_cpu_offload: bool = key("the reference in host memory")
    backward_prefetch: Literal["BACKWARD_PRE"] | None = key("when the next block is fetched")
    forward_prefetch: int | None = key("blocks fetched ahead; null: implicit", low=1)
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = key("type gradients are summed in")
    reduce_every_micro_batch: bool = key("gradients are sharded after each pass, not only after a step's last")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """How data sets are found, read, cut and cached."""

    paths: dict[str, str] = key("local copies: name: path")
    columns: dict[str, Any] = key("your column names: usual name: yours, for all or under a data set's name")
    plugins: tuple[str, ...] = key("modules or .py files that register data sets of your own")
    weights: dict[str, float] = key("mixing: name: relative weight")
    test_fraction: float = key("rows held out where a source has no test split", low=0, high=1, open=True)
    truncation: Literal["keep_end", "keep_start"] | None = key("end of a long prompt that stays; null: by source")
    on_overlong: Literal["truncate", "drop", "error"] = key("an example too long after its prompt was cut")
    on_bad_row: Literal["stop", "skip"] = key("a row that cannot be read")
    train_on: Literal["last", "all"] = key("turns of the assistant's that SFT learns")
    pairs: Literal["all", "best_worst", "adjacent", "random"] = key("pairs that a ranking of responses gives")
    min_score_gap: float = key("pairs whose scores differ by less are left out", low=0)
    score: str | None = key("column that rates the only response of a row; null: none")
    streaming: bool = key("read and tokenise while the run trains; no token cache")
    shuffle_window: int = key("streaming: examples that are shuffled together", low=1)
    chat_template: str | None = key("a Jinja template or its path; null: the tokenizer's")
    template_date: str | None = key(
        "YYYY-MM-DD that a template with strftime_now writes; null: the day the run began", may_change=True, pinned=True
    )
    apply_template: bool = key("lay text prompts out with the chat template, too")
    allow_control_tokens: bool = key("control tokens written in text prompts are real ones")
    cache_dir: str | None = key("tokenised data sets; null: under the local dir", may_change=True, per_node=True)
    num_workers: int | None = key("processes that tokenise; null: one a core", low=1, may_change=True, per_node=True)


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings:
    """The frozen model that the policy is compared with."""

    mode: Literal["cached", "online"] = key("log-probs computed once, or a live model")
    cache_dir: str | None = key("where they are kept; null: under the local dir", may_change=True, per_node=True)
    name_or_path: str | None = key("another model; null: the policy's")
    archive: str | None = key("weights to start it from; null: those that the policy starts from")
    sync_every: int | None = key("updates after which it follows the policy; null: it stays", low=1)
    sync_mix: float = key("share of the policy in what it then is", low=0, high=1)


@dataclass(frozen=True, kw_only=True)
class EvalsSettings:
    """What evaluate.py compares, and what else is evaluated while a run trains."""

    checkpoint: str | None = key("evaluate.py: a run folder, step folder, policy.pt, hf folder or Hub name")
    reference: str | None = key("evaluate.py: the same; none; null: what the checkpoint's run had")
    against: str | None = key("evaluate.py: another checkpoint on the same pairs")
    split: Literal["test", "train", "all"] = key("evaluate.py: rows of the data sets")


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How held-out prompts are continued at evaluations."""

    temperature: float = key("0: the likeliest token", low=0, may_change=True)
    top_p: float = key("probability mass drawn from", low=0, high=1, may_change=True)
    max_new_tokens: int = key("longest continuation, tokens", low=1, may_change=True)
    seed: int = key("of the draws", low=0, high=LARGEST_INTEGER, may_change=True)


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingSettings:
    """When to stop before the end."""

    metric: str | None = key("stop when it no longer gets better; null: never", may_change=True)
    patience: int = key("evaluations without improvement", low=1, may_change=True)
    min_delta: float = key("a smaller change is none", low=0, may_change=True)
    mode: Literal["min", "max"] | None = key("which way is better; null: by metric", may_change=True)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What is saved, when, and how much of it is kept."""

    formats: tuple[str, ...] = key("what is written: state, policy, hf", may_change=True)
    every: int | None = key("examples between checkpoints; null: eval_every", low=1, may_change=True)
    every_minutes: float | None = key("and also after this many minutes", low=0, open=True, may_change=True)
    keep_last: int | None = key("older ones are removed; null: none is", low=1, may_change=True)
    keep_best: bool = key("keep the best one as well", may_change=True)
    best_metric: str | None = key("best by this evaluation metric; null: loss/eval", may_change=True)
    async_save: bool = key("write while training goes on", may_change=True)


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """Weights & Biases."""

    enabled: bool = key("online if logged in, else offline", may_change=True)
    entity: str | None = key("wandb team or user", may_change=True)
    project: str = key("wandb project", may_change=True)
    group: str | None = key("wandb group; null: none, in a sweep a common one", may_change=True)
    name: str | None = key("name there; null: exp_name", may_change=True)
    tags: tuple[str, ...] = key("wandb tags", may_change=True)
    notes: str | None = key("a longer description", may_change=True)


@dataclass(frozen=True, kw_only=True)
class MlflowSettings:
    """MLflow."""

    tracking_uri: str | None = key(
        "server or place; null: MLFLOW_TRACKING_URI, or MLflow's own default", may_change=True
    )
    experiment: str = key("MLflow experiment", may_change=True)


@dataclass(frozen=True, kw_only=True)
class TrackioSettings:
    """trackio."""

    project: str = key("trackio project", may_change=True)
    space_id: str | None = key("Hugging Face Space that shows it; null: this machine", may_change=True)


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """What ends a run, or a step, that goes wrong."""

    on_nonfinite: Literal["stop", "skip"] = key("at a loss or gradient that is not finite", may_change=True)
    max_nonfinite_steps: int = key("how often to skip", low=0, may_change=True)
    collective_timeout_minutes: float = key(
        "longest wait for another rank", low=0, high=A_YEAR, open=True, may_change=True
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run, checked by type and range. Sections come in the order of the recorded config.yaml."""

    model: ModelSettings
    loss: LossSettings
    fsdp: FsdpSettings
    # The run
    exp_name: str | None = key("name of the run; null: <model>_<loss>_<datasets>", may_change=True)
    seed: int = key("fixes data order, samples, random initial weights", low=0, high=LARGEST_INTEGER)
    debug: bool = key("no wandb, no checkpoints")
    local_dirs: tuple[str, ...] = key(
        "where runs are kept: the first that exists and can be written, else the last", may_change=True, per_node=True
    )
    local_run_dir: str | None = key("exactly this run folder", may_change=True)
    resume: str | None = key("continue this run folder; auto: the newest run of the same name", may_change=True)
    plan: bool = key("print the memory and time a run needs, and end", may_change=True)
    plan_device_memory_gb: float | None = key(
        "plan=true: memory of a device, 10^9 bytes; null: a visible one's", low=0, open=True, may_change=True
    )
    show: int | None = key(
        "print so many examples as they are trained, figures of the data, and end", low=1, may_change=True
    )
    show_files: tuple[str, ...] = key("show: .html and .json files to write it to", may_change=True)
    # Devices
    trainer: Literal["BasicTrainer", "FSDPTrainer", "TensorParallelTrainer"] = key("placement")
    device: str | None = key("cpu, cuda, cuda:1, mps; null: the best there is", may_change=True)
    precision: Literal["auto", "float32", "tf32", "bfloat16", "float16"] = key("type that models compute in")
    world_size: int | None = key("processes, one a device; null: every visible device", low=1, may_change=True)
    tp_size: int = key("devices that share one tensor-parallel copy", low=1)
    fsdp_port: int | None = key(
        "TCP port where a node's processes meet; null: a private file", low=1, high=65535, may_change=True
    )
    # Data
    datasets: tuple[str, ...] = key("names, Hub names or paths")
    data: DataSettings
    max_length: int = key("longest prompt + response, tokens", low=2)
    max_prompt_length: int = key("a longer prompt is cut to it when max_length is exceeded, tokens", low=1)
    shuffle: Literal["pairs", "prompts"] = key("what is permuted")
    n_epochs: int | None = key("passes over the data", low=1, may_change=True)
    n_examples: int | None = key("examples to train on", low=1, may_change=True)
    # Batches
    batch_size: int = key("examples (pairs; sft: responses) an optimizer step, all devices", low=1)
    gradient_accumulation_steps: int = key("least passes a step", low=1)
    tokens_per_microbatch: Literal["auto"] | int = key("tokens a pass on a device", low=1, may_change=True)
    eval_batch_size: int = key("examples an evaluation pass, all devices", low=1, may_change=True)
    prefix_sharing: bool = key("compute a prompt once for all its responses")
    # Optimisation
    optimizer: str = key("a class of torch.optim")
    optimizer_kwargs: dict[str, Any] = key("its keyword arguments")
    lr: float = key("peak learning rate", low=0, open=True)
    warmup_steps: int = key("steps of linear warm-up", low=0)
    schedule: Literal["constant", "linear", "cosine"] = key("after warm-up")
    max_grad_norm: float = key("gradients are scaled down to this 2-norm", low=0, open=True)
    activation_checkpointing: Literal[False, True] | int = key("recompute each block (true) or each n-th", low=1)
    compile: bool = key("torch.compile each block")
    # Reference model, evaluation, checkpoints, reports, guards
    reference: ReferenceSettings
    eval_every: int = key("examples between evaluations", low=1, may_change=True)
    do_first_eval: bool = key("evaluate before the first step")
    n_eval_examples: int | None = key("held-out examples; null: all", low=1, may_change=True)
    sample_during_eval: bool = key("continue held-out prompts at evaluations", may_change=True)
    n_eval_model_samples: int = key("how many", low=1, may_change=True)
    sampling: SamplingSettings
    evals: EvalsSettings
    early_stopping: EarlyStoppingSettings
    checkpoint: CheckpointSettings
    minimum_log_interval_secs: float = key("seconds between two log lines", low=0, may_change=True)
    loggers: tuple[str, ...] = key("beside the run's own files: wandb, tensorboard, mlflow, trackio", may_change=True)
    wandb: WandbSettings
    mlflow: MlflowSettings
    trackio: TrackioSettings
    guards: GuardSettings


def keys_in(section: Any, prefix: str = "") -> dict[str, Key]:
    """{'fsdp.cpu_offload': Key, ...} of a settings dataclass and those in it."""
    found = {}
    for declared in fields(section):
        name = prefix + declared.name
        if is_dataclass(declared.type):
            found.update(keys_in(declared.type, name + "."))
        elif "key" in declared.metadata:
            found[name] = key_of(declared)
    return found


SCHEMA = keys_in(Settings)
