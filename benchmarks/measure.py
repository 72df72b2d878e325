"""One measurement in a process of its own: `python -m benchmarks.measure '{"what": "ours", ...}'` prints one JSON line.

A process each, because peak memory is a number of the process. Time starts when model and tokens are loaded and the
job's `warm_steps` are done, and ends with the last step; the reference's log-probs count, wherever a method computes
them. `precision` (float32, tf32, bfloat16) is that of every method and of the matrix products that it is compared with.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

from benchmarks import rates
from benchmarks.pages import ROOT
from benchmarks.peer import trl
from benchmarks.rates import clock

# Beta, learning rate and optimizer are those of every method measured.
LR, BETA = 1e-5, 0.1


def compose(job: dict, folder: str, *overrides: str):
    """The project's own configuration of a job."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    import settings
    import train  # registers the resolvers that the configuration uses

    assert train.main

    with initialize_config_dir(os.path.join(ROOT, "config"), version_base="1.3"):
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
                f"precision={job.get('precision', 'float32')}",
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


def launched(job: dict, function) -> dict:
    """What `function(job, config, folder, world)` returns on rank 0, on the device or devices that the job means."""
    from parallel.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        return launch(functools.partial(function, job), compose(job, folder), folder)


@contextlib.contextmanager
def trainer_of(config, folder: str, world):
    """The run's trainer, which is closed at the end, so that a process may have several."""
    from trainers import TRAINERS
    from training.precision import on_device

    trainer = TRAINERS[config.trainer](on_device(config, world.device), folder, world)
    try:
        yield trainer
        trainer.reporter.finish(True)
    finally:
        trainer.heartbeat.close()
        trainer.placement.close()


def ours(job: dict) -> dict:
    """The project's trainer, as `train.py` runs it.

    The first `warm_steps` of the job are not timed, nor is what the reference's pass compiles: it is then done twice.
    """
    return launched(job, timed_run)


def timed_run(job: dict, config, folder: str, world) -> dict:
    from torch._dynamo.utils import counters

    from modeling.digest import weights_digest

    warm = job.get("warm_steps", 0)
    with trainer_of(config, folder, world) as trainer:
        make_reference, spent = trainer.make_reference, []

        def timed():
            if job.get("pairwise"):  # before the reference's pass, which then shares no more either
                for sampler in (trainer.sampler, trainer.eval_sampler):
                    share_over_pairs_only(sampler.mixture)
            if warm and config.reference.mode == "cached" and make_reference() is not None:
                forget_reference(config, world)
            start = clock()
            reference = make_reference()
            spent.append(clock() - start)
            return reference

        trainer.make_reference = timed
        trainer.prepare()
        losses, margins, graphs = [], [], counters["stats"]["unique_graphs"]
        start = clock()
        for step in trainer.sampler.steps():
            if step.number == warm:
                start = clock()
            metrics = trainer.train_step(step)
            losses.append(mean(metrics["loss/train"]))
            margins.append(mean(metrics.get("rewards_train/margins", (0.0, 1.0))))
        before = trainer.sampler.examples_before(min(warm, trainer.sampler.n_steps))
        reference_seconds = sum(spent) * (1 - before / trainer.sampler.n_examples)
        result = {
            "seconds": clock() - start + reference_seconds,
            "reference_seconds": reference_seconds,
            "examples": trainer.sampler.n_examples - before,
            "losses": losses,
            "margins": margins,
            "kernel": trainer.kernel,
            "graphs": counters["stats"]["unique_graphs"] - graphs,
            "devices": world.size,
        }
        if job.get("digest"):
            result["digest"] = weights_digest(trainer.policy, world)
        result |= useful_work(trainer, warm) | rates.peak_memory()
    return result


def mean(sum_and_count: tuple[float, float]) -> float:
    return sum_and_count[0] / sum_and_count[1]


def forget_reference(config, world) -> None:
    """Remove the reference's log-probs from disk."""
    from utils import get_local_dir, run_on_main

    folder = os.path.join(get_local_dir(config.local_dirs), "reference")
    run_on_main(lambda: shutil.rmtree(folder, ignore_errors=True), world)


def share_over_pairs_only(mixture) -> None:
    """Give every pair a row of its own: its prompt is shared by its two responses, but no response by two pairs."""
    units = mixture.units
    mixture.units = lambda numbers: [unit for number in numbers for unit in units([number])]


def useful_work(trainer, first: int = 0) -> dict:
    """Tokens and floating-point operations that steps from `first` on need at the least: each prompt and response once.

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
    for number in range(first, trainer.sampler.n_steps):
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
    return launched(job, textbook_run)


def textbook_run(job: dict, config, folder: str, world) -> dict:
    import torch
    from transformers import AutoModelForCausalLM

    from data import batching

    with trainer_of(config, folder, world) as trainer:
        trainer.choose_attention = lambda unit: ("plain", True)
        trainer.make_reference = lambda: None
        trainer.prepare()
        policy, device, sft = trainer.policy, trainer.device, job["loss"] == "sft"
        reference = None
        if not sft:
            reference = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).to(device).eval()
        mixed = torch.autocast(device.type, torch.bfloat16, enabled=job.get("precision") == "bfloat16")

        def logps(model, batch):
            with mixed:
                logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
            token_logps = logits.float().log_softmax(-1).flatten(0, 1)[batch.predictors, batch.targets]
            return torch.zeros(len(batch.lengths), device=device).index_add(0, batch.response_of, token_logps)

        warm, losses = job.get("warm_steps", 0), []
        start = clock()
        for number in range(trainer.sampler.n_steps):
            if number == warm:
                start = clock()
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
        return {"seconds": clock() - start, "losses": losses} | useful_work(trainer, warm) | rates.peak_memory()


def gemm(job: dict) -> dict:
    """The machine's rate of matrix products in the job's precision, FLOP/s."""
    import torch

    rate = rates.matmul_rate(job.get("precision", "float32"), job.get("seconds", 2.0))
    return {"flops_per_second": rate, "threads": torch.get_num_threads()}


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


def plan(job: dict) -> dict:
    """What plan=true says of the job: bytes of a device in all, those assumed rather than counted, and the verdict."""
    from planning.command import make_plan

    with tempfile.TemporaryDirectory() as folder:
        found = make_plan(compose(job, folder))
    return {"total": found.total, "assumed": found.parts["process"], "fits": found.fits, "capacity": found.capacity}


MEASUREMENTS = {function.__name__: function for function in (ours, textbook, trl, gemm, plan, tokenize, prepare, order)}


def take(job: dict) -> dict:
    """One measurement in this process."""
    result = MEASUREMENTS[job["what"]](job)
    result = rates.peak_memory() | result  # of this process, unless the measurement was taken in others
    if "seconds" in result:  # a shared machine's rate moves from minute to minute
        precision = job.get("precision", "float32")
        rates.free_device()
        result["gemm"] = rates.matmul_rate(precision, 0.5, job.get("gemm_sizes", ()))
        result["card_peak"] = rates.card_peak() if precision == "bfloat16" else None
    return result


def measure(job: dict) -> dict:
    """The same in a process of its own. A method that fails is reported, not hidden."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    if job["what"] == "trl":  # which would spread over all GPUs that it sees, in its own slow way
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.measure", json.dumps(job)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env=environment,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        # The last line is the error, unless its message has several.
        return {
            "failed": ((run.stderr or run.stdout).strip().splitlines() or [f"exit code {run.returncode}"])[-1][:300]
        }
    return json.loads(lines[-1].removeprefix("RESULT "))


def main() -> None:
    print("\nRESULT " + json.dumps(take(json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
