"""Speed of DPO on random Llamas: ours, ours with each idea off in turn, on all devices, and TRL at its best setting."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator

from benchmarks import measure
from benchmarks.random_runs import LLAMA_1B, LLAMA_8B, TINY, job_of, write_pairs
from benchmarks.rates import TINY_SIZES, figures, gpu, gpu_precision
from benchmarks.training_checks import device_overrides

WARM = 3  # steps that are not timed: they compile, and fill the allocator
# Allowed difference to our first loss, which is ln 2, and to our second, which follows the first update: Adam turns the
# rounding of small gradients into whole steps.
LOSSES = 5e-3, 1e-1
EXPLANATION = (
    "DPO on random pairs with prompts of 50 to 500 tokens and responses of 20 to 500, of which most are short. MFU "
    "counts each prompt and each response once, and the forward pass of the reference, against the rate of matrix "
    "products measured right after the run, and against the peak that the maker states. Steps that compile are not "
    "timed. The reference's log-probs count, however a method computes them. The first two losses must be ours. With "
    "--cpu a tiny model takes shorter rows."
)
ON_GPU_ONLY = ("model.attention=varlen", "compile=true")
# Each idea off, or what is off by default on.
CHANGES = (
    ("prefix_sharing=false",),
    ("model.attention=packed_sdpa",),
    ("model.attention=varlen",),
    ("model.attention=plain",),
    ("compile=true",),
    ("+optimizer_kwargs.fused=false", "+optimizer_kwargs.foreach=false"),
    ("activation_checkpointing=true",),
    ("reference.mode=online",),
)


def speed(small: bool) -> Iterator[dict]:
    """Rows of each shape that fits the device, or all devices together."""
    import torch

    devices = max(1, torch.cuda.device_count()) if gpu() else 1
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "pairs.jsonl")
        if small:
            write_pairs(path, 40, (10, 60), (5, 60))
            yield from one_shape("tiny", job_of(path, TINY, 16, 4, 256), 1, True)
            return
        write_pairs(path, 1100, (50, 500), (20, 500))
        yield from one_shape("1B", job_of(path, LLAMA_1B, 640, 64, 1024), devices, False)
        yield from one_shape("8B", job_of(path, LLAMA_8B, 448, 64, 1024), devices, False)


def one_shape(shape: str, job: dict, devices: int, small: bool) -> Iterator[dict]:
    job |= {"precision": gpu_precision(), "warm_steps": 1 if small else WARM}
    if small:
        job["gemm_sizes"] = TINY_SIZES
    job["overrides"] = [*job["overrides"], *device_overrides()]
    table = Rows(shape, small)
    if fits(job):
        yield table.ours("ours", job)
        for overrides in CHANGES:
            if gpu() or overrides[0] not in ON_GPU_ONLY:
                yield table.ours("ours, " + " ".join(overrides).replace("+", ""), with_overrides(job, *overrides))
        yield from trl_rows(table, job)
    else:
        yield {"shape": shape, "method": "ours on one device", "note": "does not fit by plan=true", "ok": None}
    if devices > 1:
        n = 64 * devices * (WARM + 4)
        path = write_pairs(job["data"].replace(".jsonl", "-of-all.jsonl"), int(1.1 * n), (50, 500), (20, 500))
        many = with_overrides(job, "trainer=FSDPTrainer") | {"data": path, "batch_size": 64 * devices, "examples": n}
        for overrides in ((), ("activation_checkpointing=true",)):
            method = ", ".join([f"ours on {devices} devices (FSDPTrainer)", *overrides])
            if fits(with_overrides(many, *overrides)):
                yield table.ours(method, with_overrides(many, *overrides), same_steps=False)


def with_overrides(job: dict, *overrides: str) -> dict:
    return job | {"overrides": [*job["overrides"], *overrides]}


def fits(job: dict) -> bool:
    """Whether plan=true says so; on a CPU everything here does."""
    return not gpu() or bool(measure.measure(job | {"what": "plan"}).get("fits"))


class Rows:
    """Makes rows of measurements and compares their losses with those of the first."""

    def __init__(self, shape: str, small: bool):
        self.shape, self.small = shape, small
        self.first: dict | None = None

    def take(self, job: dict) -> dict:
        """In a process of its own, but for small jobs: starting one takes longer than they do."""
        if not self.small:
            return measure.measure(job)
        try:
            return measure.take(job)
        except Exception as problem:
            return {"failed": f"{type(problem).__name__}: {problem}"}

    def ours(self, method: str, job: dict, same_steps: bool = True) -> dict:
        result = self.take(job)
        row = {"shape": self.shape, "method": method}
        if "failed" in result:
            # A kernel need not run on every card, nor every way within its memory.
            expected = "model.attention" in method or "out of memory" in result["failed"]
            return row | {"note": result["failed"], "ok": None if expected else False}
        if same_steps:
            self.first = self.first or result
        return self.row(row | {"kernel": result["kernel"]}, result, result, same_steps)

    def row(self, row: dict, result: dict, work: dict, same_steps: bool) -> dict:
        found = figures(result, work["examples"], work)
        ok = None
        if same_steps and self.first is not None:
            pairs = zip(result["losses"], self.first["losses"], LOSSES)
            ok = all(abs(theirs - ours) <= allowed for theirs, ours, allowed in pairs)
        return row | {
            "pairs/s": found["pairs_per_second"],
            "tokens/s": found["tokens_per_second"],
            "peak GB": found["peak_gb"],
            "MFU of measured": f"{found['useful']:.1%}",
            "MFU of peak": f"{found['of_peak']:.1%}" if found["of_peak"] else None,
            "losses": ", ".join(f"{loss:.4f}" for loss in result["losses"][:2]),
            "ok": ok,
        }


def trl_rows(table: Rows, job: dict) -> Iterator[dict]:
    """TRL's DPOTrainer in each of its ways, and which is the fastest."""
    if table.first is None:
        return
    name = {"shape": table.shape, "method": "TRL"}
    missing = [package for package in ("trl", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        note = f"skipped: {', '.join(missing)} not installed (benchmarks/requirements.txt)"
        yield name | {"note": note, "ok": None}
        return
    for package, gives in (("liger_kernel", "Liger's kernels"), ("flash_attn", "padding-free rows")):
        if importlib.util.find_spec(package) is None:
            yield name | {"note": f"without {gives}: {package} is not installed", "ok": None}
    rows, best = measure.order(job)["rows"], None
    for method, more in trl_ways(table.small):
        for at_once in (2,) if table.small else (16, 4, 1):
            result = table.take(job | {"what": "trl", "rows": rows, "rows_at_once": at_once} | more)
            if "out of memory" not in result.get("failed", ""):
                break
        row = {"shape": table.shape, "method": f"TRL, {method}, {at_once} pairs at once"}
        if "failed" in result:
            yield row | {"note": result["failed"], "ok": None}
            continue
        row = table.row(row, result, table.first, True)
        best = max(best, row, key=lambda each: each["pairs/s"]) if best else row
        yield row
    if best is not None:
        ours = table.first["examples"] / table.first["seconds"]
        yield name | {"note": f"best: {best['method']}; ours is {ours / best['pairs/s']:.2f} times as fast", "ok": None}


def trl_ways(small: bool) -> Iterator[tuple[str, dict]]:
    """(name, what is added to the job) of each way that the installed packages allow."""
    yield "live reference", {"precompute": False}
    if small:
        return
    yield "precomputed reference", {"precompute": True}
    yield "live reference, checkpointing", {"precompute": False, "checkpointing": True}
    if importlib.util.find_spec("flash_attn") is not None:
        flash = {"precompute": False, "attention": "flash_attention_2"}
        yield "flash attention", flash
        yield "flash attention, padding-free", flash | {"trl": {"padding_free": True}}
    if importlib.util.find_spec("liger_kernel") is not None:
        yield "Liger", {"precompute": False, "trl": {"use_liger_kernel": True}}
