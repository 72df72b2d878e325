"""TRL's trainers on the same pairs in the same order."""

from __future__ import annotations

import copy
import tempfile

from benchmarks.rates import clock


def trl(job: dict) -> dict:
    """TRL's trainer on the job's rows: text in the order of this project's first epoch, none longer than max_length.

    `job["trl"]` holds more arguments of its configuration. The first `warm_steps` of the job are not timed.

    Raises:
        ValueError: this release of TRL does not do what the arguments ask for.
    """
    import trl as library
    from datasets import Dataset

    warm, rows = job.get("warm_steps", 0), job["rows"]
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = model_and_tokenizer(job, folder)
        log = make_log(warm)
        common = arguments(job, folder)
        spent: list[float] = []
        if job["loss"] == "sft":
            data = Dataset.from_list([{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows])
            trainer = library.SFTTrainer(
                model,
                library.SFTConfig(**common, packing=job.get("packing", False)),
                train_dataset=data,
                processing_class=tokenizer,
                callbacks=[log],
            )
        else:
            from benchmarks.measure import BETA

            config = library.DPOConfig(
                **common,
                beta=BETA,
                precompute_ref_log_probs=job["precompute"],
                precompute_ref_batch_size=job["rows_at_once"],
            )
            time_precomputing(library.DPOTrainer, spent)
            # Of a model from a folder TRL loads the reference by itself.
            live = job.get("random_config") and not job["precompute"]
            trainer = library.DPOTrainer(
                model,
                ref_model=copy.deepcopy(model) if live else None,
                args=config,
                train_dataset=Dataset.from_list(rows),
                processing_class=tokenizer,
                callbacks=[log],
            )
            if config.padding_free and not getattr(trainer, "padding_free", True):
                raise ValueError(f"TRL {library.__version__} switches padding_free off")
        trainer.train()
        seconds = clock() - log.start + sum(spent) * (1 - warm * job["batch_size"] / len(rows))
    return {"seconds": seconds, "losses": log.losses, "version": library.__version__}


def model_and_tokenizer(job: dict, folder: str):
    """The job's model with float32 weights: those of a folder, or the random ones that this project trains, too."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    attention = {"attn_implementation": job["attention"]} if "attention" in job else {}
    if not job.get("random_config"):
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, **attention)
        return model, AutoTokenizer.from_pretrained(job["model"])
    from benchmarks.measure import compose
    from modeling import loading
    from utils import seed_everything

    config = compose(job, folder)
    seed_everything(config.seed)
    tokenizer = loading.load_tokenizer(config)
    model = loading.load_model(config, tokenizer, torch.float32, "cpu")
    if attention:
        model.set_attn_implementation(job["attention"])
    return model, tokenizer


def arguments(job: dict, folder: str) -> dict:
    """What TRL's configurations of all losses take."""
    from benchmarks.measure import LR
    from benchmarks.rates import gpu

    return {
        "output_dir": folder,
        "max_steps": -1,
        "num_train_epochs": 1,
        "learning_rate": LR,
        "weight_decay": 0.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 10.0,
        "logging_steps": 1,
        "report_to": [],
        "seed": 0,
        "save_strategy": "no",
        "max_length": job["max_length"],
        "optim": "adamw_torch_fused" if gpu() else "adamw_torch",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "bf16": job.get("precision") == "bfloat16",
        "use_cpu": not gpu(),
        "per_device_train_batch_size": job["rows_at_once"],
        "gradient_accumulation_steps": job["batch_size"] // job["rows_at_once"],
        "gradient_checkpointing": job.get("checkpointing", False),
        "dataloader_pin_memory": gpu(),
        **job.get("trl", {}),
    }


def make_log(warm: int):
    """A callback that keeps the losses, and as `start` the time when `warm` steps were done."""
    from transformers import TrainerCallback

    class Log(TrainerCallback):
        def __init__(self):
            self.losses: list[float] = []
            self.start: float | None = None

        def on_train_begin(self, *_, **__):
            self.start = self.start or clock()

        def on_step_end(self, args, state, control, **_):
            if state.global_step == warm:
                self.start = clock()

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in (logs or {}):
                self.losses.append(logs["loss"])

    return Log()


def time_precomputing(trainer, spent: list[float]) -> None:
    """Note how long precomputing takes: it is done when training starts, or while the trainer is made, and both count.
    Tokenising does not: on_train_begin comes after it.
    """
    precompute = getattr(trainer, "_precompute_ref_logps", None)
    if precompute is None:
        return

    def timed(self, *args, **kwargs):
        start = clock()
        found = precompute(self, *args, **kwargs)
        spent.append(clock() - start)
        return found

    trainer._precompute_ref_logps = timed
