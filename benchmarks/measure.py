"""One measurement in a process of its own: `python -m benchmarks.measure '{"what": "ours", ...}'` prints one JSON line.

A process each, because peak memory is a number of the process. Time starts when model and tokens are loaded and ends
with the last step; the reference's log-probs count, wherever a method computes them.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time

# Beta, learning rate and optimizer are those of every method measured.
LR, BETA = 1e-5, 0.1


def compose(job: dict, folder: str, *overrides: str):
    """The project's own configuration of a job."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    import settings
    import train  # registers the resolvers that the configuration uses

    assert train.main

    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with initialize_config_dir(os.path.join(root, "config"), version_base="1.3"):
        config = hydra_compose(
            "config",
            overrides=[
                f"loss={job['loss']}",
                f"datasets=[{job['data']}]",
                f"max_length={job['max_length']}",
                f"max_prompt_length={job['max_length'] // 2}",
                f"batch_size={job['batch_size']}",
                f"n_examples={job['examples']}",
                f"local_dirs=[{folder}]",
                "wandb.enabled=false",
                "debug=true",
                "do_first_eval=false",
                "sample_during_eval=false",
                "optimizer=AdamW",
                "+optimizer_kwargs.weight_decay=0.0",
                f"lr={LR}",
                "warmup_steps=0",
                "eval_every=1000000000",
                "n_eval_examples=1",
                "data.test_fraction=0.01",
                *model_overrides(job),
                *job.get("overrides", []),
                *overrides,
            ],
        )
    settings.validate(config)
    return settings.finalize(config)


def model_overrides(job: dict) -> list[str]:
    if job.get("random_config"):
        return ["model=tiny"] + [f"++model.random_config.{key}={value}" for key, value in job["random_config"].items()]
    return ["model=blank_model", f"model.name_or_path={job['model']}"]


def trainer_of(job: dict, folder: str):
    import trainers
    from parallel.launch import visible_devices
    from utils import World

    config = compose(job, folder)
    kind, _ = visible_devices(config)
    return trainers.BasicTrainer(config, folder, World(device="cuda:0" if kind == "cuda" else kind))


def ours(job: dict) -> dict:
    """The project's trainer, as `train.py` runs it."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(job, folder)
        make_reference, spent = trainer.make_reference, []

        def timed():
            if job.get("pairwise"):  # before the reference's pass, which then shares no more either
                for sampler in (trainer.sampler, trainer.eval_sampler):
                    share_over_pairs_only(sampler.mixture)
            start = clock(torch)
            reference = make_reference()
            spent.append(clock(torch) - start)
            return reference

        trainer.make_reference = timed
        trainer.prepare()
        losses = []
        start = clock(torch)
        for step in trainer.sampler.steps():
            total, count = trainer.train_step(step)["loss/train"]
            losses.append(total / count)
        seconds = clock(torch) - start + sum(spent)
        result = {"seconds": seconds, "reference_seconds": sum(spent), "losses": losses, "kernel": trainer.kernel}
        result |= useful_work(trainer)
        trainer.reporter.finish(True)
    return result


def share_over_pairs_only(mixture) -> None:
    """Give every pair a row of its own: its prompt is shared by its two responses, but no response by two pairs."""
    units = mixture.units
    mixture.units = lambda numbers: [unit for number in numbers for unit in units([number])]


def clock(torch) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def useful_work(trainer) -> dict:
    """Tokens and floating-point operations that the job needs at the least: each prompt once, each response once.

    A matrix product of a token with W counts 2 |W| forward and 4 |W| backward; attention 4 d a (query, key) pair and
    layer forward and 8 d backward; the reference's forward pass is counted for preferences.
    """
    settings = trainer.policy.config.get_text_config()
    head = trainer.policy.get_output_embeddings().weight
    embeddings = {id(head), id(trainer.policy.get_input_embeddings().weight)}
    body = sum(p.numel() for p in trainer.policy.parameters() if id(p) not in embeddings)
    width = settings.num_attention_heads * (
        getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    )
    tokens = scored = attended = 0
    for number in range(trainer.sampler.n_steps):
        for unit in trainer.sampler.mixture.units(trainer.sampler.example_indices(number)):
            prompt, responses = len(unit.prompt), [len(response) for response in unit.responses]
            tokens += prompt + sum(responses)
            scored += sum(responses)
            attended += prompt * (prompt + 1) // 2 + sum(r * prompt + r * (r + 1) // 2 for r in responses)
    forward = 2 * body * tokens + 2 * head.numel() * scored + 4 * width * settings.num_hidden_layers * attended
    passes = 4 if trainer.loss.needs_reference(trainer.loss_options) else 3
    return {"tokens": tokens, "scored_tokens": scored, "useful_flops": passes * forward}


def textbook(job: dict) -> dict:
    """DPO as the DPO reference implementation (eric-mitchell/direct-preference-optimization) lays it out: chosen and
    rejected rows padded into one batch, full logits in fp32, a live reference. Plain PyTorch, written for this
    benchmark.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from data import batching

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(job, folder)
        trainer.choose_attention = lambda unit: ("plain", True)
        trainer.make_reference = lambda: None
        trainer.prepare()
        policy, device, sft = trainer.policy, trainer.device, job["loss"] == "sft"
        reference = None
        if not sft:
            reference = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).to(device).eval()

        def logps(model, batch):
            logits = model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
            ).logits.float()
            token_logps = logits.log_softmax(-1).flatten(0, 1)[batch.predictors, batch.targets]
            return torch.zeros(len(batch.lengths), device=device).index_add(0, batch.response_of, token_logps)

        losses = []
        start = clock(torch)
        for number in range(trainer.sampler.n_steps):
            units = trainer.sampler.mixture.units(trainer.sampler.example_indices(number))
            batch = batching.pad(units, trainer.tokenizer.eos_token_id).to(device)
            found = logps(policy, batch)
            chosen, rejected = batch.pairs.T
            if sft:
                loss = -found[chosen].mean()
            else:
                with torch.no_grad():
                    base = logps(reference, batch)
                margin = (found - base)[chosen] - (found - base)[rejected]
                loss = -torch.nn.functional.logsigmoid(BETA * margin).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
            trainer.optimizer.param_groups[0]["lr"] = LR
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            losses.append(loss.item())
        result = {"seconds": clock(torch) - start, "losses": losses} | useful_work(trainer)
        trainer.reporter.finish(True)
    return result


def trl(job: dict) -> dict:
    """TRL's trainer on the same pairs in the same order.

    Pairs are handed over as text in the order of this project's first epoch; those over max_length were left out.
    """
    import torch
    import trl as library
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    with tempfile.TemporaryDirectory() as folder:
        rows = job["rows"]
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(job["model"])
        common = {
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
            "optim": "adamw_torch",
            "disable_tqdm": True,
            "train_sampling_strategy": "sequential",
            "bf16": False,
            "use_cpu": not torch.cuda.is_available(),
            "per_device_train_batch_size": job["rows_at_once"],
            "gradient_accumulation_steps": job["batch_size"] // job["rows_at_once"],
            "gradient_checkpointing": job.get("checkpointing", False),
            "dataloader_pin_memory": False,
        }

        class Log(TrainerCallback):
            losses: list[float] = []
            start = None

            def on_train_begin(self, *_, **__):
                Log.start = Log.start or clock(torch)

            def on_log(self, args, state, control, logs=None, **_):
                if "loss" in (logs or {}):
                    Log.losses.append(logs["loss"])

        if job["loss"] == "sft":
            data = Dataset.from_list([{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows])
            trainer = library.SFTTrainer(
                model,
                library.SFTConfig(**common, packing=job.get("packing", False)),
                train_dataset=data,
                processing_class=tokenizer,
                callbacks=[Log()],
            )
        else:
            data = Dataset.from_list(rows)
            # Precomputed log-probs are worked out when training starts, or while the trainer is made: both are timed,
            # tokenising is not (on_train_begin comes after it).
            config = library.DPOConfig(
                **common,
                beta=BETA,
                precompute_ref_log_probs=job["precompute"],
                precompute_ref_batch_size=job["rows_at_once"],
            )
            precompute = (
                library.DPOTrainer._precompute_ref_logps
                if hasattr(library.DPOTrainer, "_precompute_ref_logps")
                else None
            )
            spent = []
            if precompute is not None:

                def timed(self, *args, **kwargs):
                    start = clock(torch)
                    found = precompute(self, *args, **kwargs)
                    spent.append(clock(torch) - start)
                    return found

                library.DPOTrainer._precompute_ref_logps = timed
            trainer = library.DPOTrainer(
                model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Log()]
            )
        trainer.train()
        seconds = clock(torch) - Log.start
        if job["loss"] != "sft":
            seconds += sum(spent)
    return {"seconds": seconds, "losses": Log.losses, "version": library.__version__}


def gemm(job: dict) -> dict:
    """The machine's rate of matrix products, in FLOP/s: the best over sizes of SmolLM2's layers and a square one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    best = 0.0
    for m, k, n in ((2048, 576, 1536), (2048, 1536, 576), (2048, 2048, 2048), (1024, 576, 8192)):
        a, b = torch.randn(m, k, device=device), torch.randn(k, n, device=device)
        for _ in range(3):
            a @ b
        start, count = clock(torch), 0
        while clock(torch) - start < job.get("seconds", 2.0):
            for _ in range(5):
                a @ b
            count += 5
        best = max(best, 2.0 * m * k * n * count / (clock(torch) - start))
    return {"flops_per_second": best, "threads": torch.get_num_threads()}


def tokenize(job: dict) -> dict:
    """Pairs read, tokenised and written in a second of one core: processor time counts that of every thread."""
    from data.tokenization import load_tokenized
    from modeling import loading

    with tempfile.TemporaryDirectory() as folder:  # a cache of its own: nothing is read from an earlier run
        config = compose(job | {"loss": "dpo"}, folder)
        tokenizer = loading.load_tokenizer(config)
        start = time.process_time()
        pairs = len(load_tokenized(job["data"], "train", tokenizer, config, "pairs"))
        return {"pairs": pairs, "pairs_per_core_second": pairs / (time.process_time() - start)}


def prepare(job: dict) -> dict:
    """The rows that every method gets: pairs that fit max_length, in this project's order of the first epoch."""
    with tempfile.TemporaryDirectory() as folder:
        from data.sources import get_dataset
        from modeling import loading

        config = compose(job | {"loss": "dpo"}, folder)
        tokenizer = loading.load_tokenizer(config)
        rows = []
        for prompt, group in get_dataset(job["data"], "train", config).items():
            for chosen, rejected in group["pairs"][:1]:  # one pair a prompt, so that a row number names it
                longest = max((group["responses"][i] for i in (chosen, rejected)), key=len)
                fits = len(tokenizer(prompt + longest)["input_ids"]) + 1 <= job["max_length"]
                if isinstance(prompt, str) and fits:
                    rows.append(
                        {
                            "prompt": prompt,
                            "chosen": group["responses"][chosen],
                            "rejected": group["responses"][rejected],
                        }
                    )
            if len(rows) >= 1.1 * job["examples"] + 8:  # a few are held out by a hash of their prompts
                break
        with open(job["write_to"], "w") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
        return {"rows": len(rows)}


def order(job: dict) -> dict:
    """Rows in the order in which this project trains on them, as text."""
    with tempfile.TemporaryDirectory() as folder:
        from data.sampler import DatasetMixture
        from data.tokenization import load_tokenized
        from losses import find_loss
        from modeling import loading

        config = compose(job, folder)
        tokenizer = loading.load_tokenizer(config)
        dataset = load_tokenized(job["data"], "train", tokenizer, config, find_loss(job["loss"]).inputs.kind)
        with open(job["data"]) as file:
            source = [json.loads(line) for line in file]
        wanted = DatasetMixture([dataset]).epoch_permutation(config.seed, 0)[: job["examples"]]
        return {
            "rows": [
                source[int(dataset.rows[dataset.examples[number, 0]]) - job.get("first_row", 1)] for number in wanted
            ]
        }


def main() -> None:
    job = json.loads(sys.argv[1])
    measurements = (ours, textbook, trl, gemm, tokenize, prepare, order)
    result = {function.__name__: function for function in measurements}[job["what"]](job)
    if "seconds" in result:  # a shared machine's rate moves from minute to minute
        result |= {"gemm": gemm({"seconds": 0.5})["flops_per_second"]}
    result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    import torch

    if torch.cuda.is_available():
        result["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    print("\nRESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
