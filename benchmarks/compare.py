"""Run all measurements one after another, check that the methods compute the same thing, and write a page about it."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile

from benchmarks.measure import ROOT, measure
from benchmarks.rates import card_peak, figures, gpu, gpu_precision, hardware

WARM_STEPS = 2  # on a GPU: what is compiled in them is not timed
FOLDER = os.path.join(ROOT, "docs", "benchmarks")
GROWTH_MODEL = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


class Table:
    """Rows of one comparison, printed as they come."""

    def __init__(self, title: str, examples: int, work: dict | None = None):
        self.title, self.examples, self.work, self.rows = title, examples, work, []
        print(f"\n{title}\n{'':58} pairs/s  tokens/s  peak GB  GFLOP/s of GEMM  useful of it  first losses", flush=True)

    def add(self, name: str, result: dict) -> dict:
        if "failed" in result:
            print(f"{name:58} failed: {result['failed']}", flush=True)
            self.rows.append({"name": name, **result})
            return result
        self.work = self.work or result
        row = {"name": name, **figures(result, self.examples, self.work), "losses": result["losses"][:4]}
        self.rows.append(row)
        print(
            f"{name:58} {row['pairs_per_second']:7.3f} {row['tokens_per_second']:9.1f} {row['peak_gb']:8.2f} "
            f"{row['gemm'] / 1e9:16.0f} {row['useful']:13.1%}  {' '.join(f'{loss:.4f}' for loss in row['losses'])}",
            flush=True,
        )
        return result

    def check_losses(self, tolerance: float) -> None:
        """The methods must have computed the same losses, or their speeds are not comparable."""
        good = [row for row in self.rows if "losses" in row]
        for row in good[1:]:
            for step, (theirs, ours) in enumerate(zip(row["losses"], good[0]["losses"])):
                if abs(theirs - ours) > tolerance * max(1.0, abs(ours)):
                    print(f"  ! {row['name']}: the loss of step {step} is {theirs:.6f}, not {ours:.6f}")

    def markdown(self) -> str:
        base = next((row for row in self.rows if "losses" in row), None)
        lines = [
            f"### {self.title}",
            "",
            "| method | pairs/s | times the first | useful tokens/s | peak GB | GEMM GFLOP/s after it "
            f"| {'MFU (of that rate)' if gpu() else 'useful FLOPs of that rate'} | losses of the first steps |",
            "|---|" + 7 * "---|",
        ]
        for row in self.rows:
            if "failed" in row:
                lines.append(f"| {row['name']} | failed: {row['failed']} | | | | | | |")
                continue
            times = row["pairs_per_second"] / base["pairs_per_second"]
            of_peak = f", {row['of_peak']:.0%} of the card's peak" if row["of_peak"] else ""
            lines.append(
                f"| {row['name']} | {row['pairs_per_second']:.3f} | {times:.2f} "
                f"| {row['tokens_per_second']:.0f} | {row['peak_gb']:.2f} | {row['gemm'] / 1e9:.0f} "
                f"| {row['useful']:.0%}{of_peak} | {', '.join(f'{loss:.4f}' for loss in row['losses'])} |"
            )
        return "\n".join(lines) + "\n"


def job_of(arguments, data: str, loss: str) -> dict:
    """What all measurements of a table have in common."""
    return {
        "model": arguments.model,
        "data": data,
        "loss": loss,
        "max_length": arguments.max_length,
        "batch_size": arguments.batch_size,
        "examples": arguments.pairs,
        "precision": arguments.precision,
        "warm_steps": WARM_STEPS if gpu() else 0,
    }


def preferences(arguments, data: str) -> Table:
    base = job_of(arguments, data, "dpo")
    table = Table(
        f"DPO, {arguments.pairs} pairs, batch {arguments.batch_size}, max_length {arguments.max_length}",
        arguments.pairs - base["warm_steps"] * arguments.batch_size,
    )
    table.add("ours", measure(base | {"what": "ours"}))
    for name, overrides in (
        ("ours, prefix_sharing=false", ["prefix_sharing=false"]),
        ("ours, padded rows (model.attention=plain)", ["model.attention=plain"]),
        ("ours, reference.mode=online", ["reference.mode=online"]),
        ("ours, tokens_per_microbatch=512", ["tokens_per_microbatch=512"]),
        ("ours, tokens_per_microbatch=8192", ["tokens_per_microbatch=8192"]),
        ("ours, activation_checkpointing=true", ["activation_checkpointing=true"]),
    ):
        if not arguments.quick:
            table.add(name, measure(base | {"what": "ours", "overrides": overrides}))
    rows = measure(base | {"what": "order"})["rows"]
    for precompute in (True, False):
        for at_once in (arguments.batch_size, max(1, arguments.batch_size // 4)):
            if arguments.quick and at_once == arguments.batch_size:
                continue
            job = base | {"what": "trl", "rows": rows, "precompute": precompute, "rows_at_once": at_once}
            table.add(
                f"TRL DPOTrainer, {'precomputed' if precompute else 'live'} reference, {at_once} pairs at once",
                measure(job),
            )
    table.add("textbook: two rows a pair, full logits, live reference", measure(base | {"what": "textbook"}))
    table.add("ours, once more", measure(base | {"what": "ours"}))  # how large the machine's noise is
    table.check_losses(2e-3)
    return table


def supervised(arguments, data: str) -> Table:
    base = job_of(arguments, data, "sft")
    table = Table(
        f"SFT, {arguments.pairs} responses, batch {arguments.batch_size}, max_length {arguments.max_length} "
        "(TRL's loss is a mean over tokens, ours a sum over each response: losses differ by that factor)",
        arguments.pairs - base["warm_steps"] * arguments.batch_size,
    )
    table.add("ours", measure(base | {"what": "ours"}))
    rows = measure(base | {"what": "order"})["rows"]
    table.add("TRL SFTTrainer", measure(base | {"what": "trl", "rows": rows, "rows_at_once": arguments.batch_size}))
    table.add("textbook: padded rows, full logits", measure(base | {"what": "textbook"}))
    return table


def many_responses(arguments, data: str, folder: str) -> Table:
    """A prompt of four responses and all six pairs, as UltraFeedback has: 120 + 4 x 100 tokens."""
    words = " ".join(json.loads(line)["chosen"] for line in open(data)).split()
    draw = random.Random(0)
    prompts = max(4 * (1 + WARM_STEPS), arguments.pairs // 8) if gpu() else max(4, arguments.pairs // 8)
    path = os.path.join(folder, "responses.jsonl")
    rows = []  # the same pairs one by one, for a trainer that knows only those
    with open(path, "w") as file:
        for number in range(prompts + 2):
            some = lambda n: " ".join(draw.choice(words) for _ in range(n))  # noqa: E731
            responses = [" " + some(75) for _ in range(4)]
            pairs = [[i, j] for i in range(4) for j in range(i + 1, 4)]
            prompt = "\n\nHuman: " + some(85) + "\n\nAssistant:"
            file.write(
                json.dumps({"prompt": prompt, "responses": responses, "pairs": pairs, "sft_target": responses[0]})
                + "\n"
            )
            if number < prompts:
                rows += [{"prompt": prompt, "chosen": responses[i], "rejected": responses[j]} for i, j in pairs]
    examples = 6 * prompts
    base = job_of(arguments, path, "dpo") | {
        "max_length": 512,
        "batch_size": 24,
        "examples": examples,
        "overrides": ["shuffle=prompts"],
    }
    timed = examples - 24 * base["warm_steps"]
    table = Table(f"4 responses and 6 pairs a prompt, {examples} pairs, batch 24", timed)
    table.add("ours, shuffle=prompts", measure(base | {"what": "ours"}))
    table.add("ours, prompt shared over each pair only", measure(base | {"what": "ours", "pairwise": True}))
    table.add(
        "ours, no sharing",
        measure(base | {"what": "ours", "pairwise": True, "overrides": base["overrides"] + ["prefix_sharing=false"]}),
    )
    table.add(
        "TRL DPOTrainer, live reference, 2 pairs at once",
        measure(base | {"what": "trl", "rows": rows, "precompute": False, "rows_at_once": 2}),
    )
    table.check_losses(2e-3)
    return table


def growth(folder: str, loss: str, precision: str) -> dict:
    """Time and peak memory against sequence length, vocabulary, batch and data-set size, on a small random model."""

    def write(name: str, rows: int, length: int) -> str:
        path = os.path.join(folder, f"{name}.jsonl")
        draw = random.Random(0)
        with open(path, "w") as file:
            for number in range(rows):
                letters = lambda n: "".join(draw.choice("abcdefgh ") for _ in range(n))  # noqa: E731
                file.write(
                    json.dumps(
                        {
                            "prompt": f"{number:06d}" + letters(length // 3 - 6),
                            "chosen": letters(length // 3),
                            "rejected": letters(length // 3 - 2),
                        }
                    )
                    + "\n"
                )
        return path

    base = {"loss": loss, "examples": 32, "batch_size": 8, "max_length": 2048, "what": "ours"}
    base["precision"] = precision
    series = {"tokens a pair": [], "vocabulary": [], "batch size": [], "pairs in the data set": []}
    small = write("small", 64, 384)
    for length in (96, 192, 384, 768, 1536):
        job = base | {"data": write(f"length-{length}", 64, length), "random_config": GROWTH_MODEL}
        series["tokens a pair"].append((length, measure(job)))
    for vocabulary in (1024, 8192, 32768, 131072):
        series["vocabulary"].append(
            (vocabulary, measure(base | {"data": small, "random_config": GROWTH_MODEL | {"vocab_size": vocabulary}}))
        )
    for batch in (4, 8, 16, 32):
        series["batch size"].append(
            (batch, measure(base | {"data": small, "batch_size": batch, "random_config": GROWTH_MODEL}))
        )
    for rows in (1000, 4000, 16000, 64000):
        job = base | {"data": write(f"rows-{rows}", rows, 96), "random_config": GROWTH_MODEL}
        series["pairs in the data set"].append((rows, measure(job)))
    return series


def plot(series: dict, path: str) -> None:
    """`series`: {loss: what `growth` found}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(next(iter(series.values())))
    figure, axes = plt.subplots(2, len(names), figsize=(4 * len(names), 6), squeeze=False)
    for loss, found in series.items():
        for column, name in enumerate(names):
            points = [(x, result) for x, result in found[name] if "failed" not in result]
            values = [
                ("seconds for 32 examples", [result["seconds"] for _, result in points]),
                (
                    "peak memory, GB",
                    [result.get("peak_device_bytes", result["peak_bytes"]) / 1e9 for _, result in points],
                ),
            ]
            for axis, (label, ys) in zip(axes[:, column], values):
                axis.plot([x for x, _ in points], ys, marker="o", label=loss)
                axis.set_xlabel(name)
                axis.set_ylabel(label)
                axis.set_xscale("log", base=2)
                axis.grid(alpha=0.3)
    for axis in axes.flat:
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/benchmark", description=__doc__)
    parser.add_argument("--data", default="examples/quickstart", help="HH dialogues: a file or folder")
    parser.add_argument("--model", default=".cache/models/SmolLM2-135M-Instruct", help="a Hugging Face folder")
    parser.add_argument("--pairs", type=int, default=None, help="pairs of a measurement: 32, and 256 on a GPU")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument(
        "--precision",
        choices=["float32", "bfloat16"],
        default=None,
        help="that every method computes in: float32, and bfloat16 on a GPU that has it",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=["dpo", "sft", "responses", "growth"],
        default=["dpo", "sft", "responses", "growth"],
        help="parts to measure",
    )
    parser.add_argument("--quick", action="store_true", help="ours, TRL at its best setting and the textbook loop only")
    parser.add_argument("--name", default=None, help="name of the page under docs/benchmarks")
    arguments = parser.parse_args()
    arguments.pairs = arguments.pairs or (256 if gpu() else 32)
    arguments.precision = arguments.precision or gpu_precision()
    arguments.model = os.path.abspath(arguments.model)
    arguments.data = os.path.abspath(arguments.data)

    commit = git("rev-parse", "--short", "HEAD") + (
        " with uncommitted changes" if git("status", "--porcelain", "-uno") else ""
    )
    date = datetime.date.today().isoformat()
    rate = measure({"what": "gemm", "precision": arguments.precision})["flops_per_second"]
    peak = card_peak()
    stated = f" of {peak / 1e9:.0f} that the maker states (bf16, dense)" if peak else ""
    head = f"{hardware()}; commit {commit}; {date}; GEMM rate {rate / 1e9:.0f} GFLOP/s ({arguments.precision}){stated}"
    print(head)
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "pairs.jsonl")
        job = {
            "data": arguments.data,
            "model": arguments.model,
            "examples": arguments.pairs,
            "max_length": arguments.max_length,
            "batch_size": arguments.batch_size,
        }
        prepared = measure(job | {"what": "prepare", "write_to": data})
        tokenized = measure(job | {"what": "tokenize"})
        for result in (prepared, tokenized):
            if "failed" in result:
                sys.exit(result["failed"])
        tokenizing = (
            f"tokenising {tokenized['pairs']} pairs: {60 * tokenized['pairs_per_core_second']:.0f} a minute and core"
        )
        print(tokenizing)
        only = ["dpo"] if arguments.quick else arguments.only
        parts = {
            "dpo": lambda: preferences(arguments, data),
            "sft": lambda: supervised(arguments, data),
            "responses": lambda: many_responses(arguments, data, folder),
        }
        tables = [measure_part() for name, measure_part in parts.items() if name in only]
        series = (
            {loss: growth(folder, loss, arguments.precision) for loss in ("dpo", "sft")} if "growth" in only else None
        )
    name = arguments.name or f"{date}-{'gpu' if gpu() else 'cpu'}"
    os.makedirs(FOLDER, exist_ok=True)
    with open(os.path.join(FOLDER, name + ".md"), "w") as file:
        file.write(
            f"# Benchmark of {date}\n\n{head}; {tokenizing}.\n\nWritten by `scripts/benchmark`. "
            '"Useful" counts each prompt and each response once, and the forward pass of the reference. '
            f"Peak memory is of {'the device' if gpu() else 'the whole process'}.\n\n"
        )
        file.write("\n".join(table.markdown() for table in tables))
        if series:
            plot(series, os.path.join(FOLDER, name + ".svg"))
            file.write(
                "\n### Growth\n\nA random Llama (4 layers, width 256), 32 pairs or, for SFT, 32 responses.\n\n"
                f"![growth]({name}.svg)\n"
            )
    with open(os.path.join(FOLDER, name + ".json"), "w") as file:
        json.dump(
            {"head": head, "tokenizing": tokenized, "tables": [table.rows for table in tables], "growth": series},
            file,
            indent=1,
        )
    print(f"\nwritten: docs/benchmarks/{name}.md")


if __name__ == "__main__":
    main()
