"""What holds of training on a device: precision, determinism, recompiles, and the memory plan, by the real trainer."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from unittest import mock

from benchmarks import measure
from benchmarks.random_runs import LLAMA_1B, SMALL, TINY, job_of, write_pairs
from benchmarks.rates import gpu, gpu_precision, largest

STEPS = 4
# Largest difference to the losses of float32 over the first steps. DPO's first loss is ln 2 = 0.6931 in all of them.
LOSS_TOLERANCE = {"float32": 0.0, "tf32": 5e-3, "bfloat16": 2e-2, "float16": 2e-2}
# Allowed while training on rows of 50 lengths: where attention is part of the compiled block, and where it cuts it.
GRAPHS, GRAPHS_CUT = 3, 6
MEMORY = 0.75, 1.1  # allowed measured peak, as a share of the planned one
EXPLANATIONS = {
    "precision": f"DPO, {STEPS} steps of a random Llama. The policy starts as the reference, so the first margin is 0 "
    "exactly. The difference is the largest to the losses in float32.",
    "determinism": "The same steps twice in one process, from the same seed: are all bits of the weights the same? It "
    "must be so on a CPU, and with deterministic=true where this version has the key.",
    "recompiles": "Graphs that torch.compile makes while training on 50 rows of different length, a pair each, after "
    f"the reference's pass: at most {GRAPHS}, and {GRAPHS_CUT} where a kernel other than flex cuts each block in two.",
    "memory": "The highest memory that tensors took in three training steps against what plan=true counts for the same "
    f"command, without what it assumes for context and libraries. {MEMORY[0]:.0%} to {MEMORY[1]:.0%} of it is right; "
    "on a CPU both are of the whole process, and only more than planned is wrong.",
}


def device_overrides() -> list[str]:
    return [] if gpu() else ["device=cpu"]


def small_job(folder: str, small: bool, *overrides: str, **more) -> dict:
    """A few steps of a small model, 8 pairs each."""
    path = write_pairs(os.path.join(folder, "pairs.jsonl"), 8 * STEPS + 8, (10, 60), (5, 60))
    return job_of(path, TINY if small else SMALL, 8 * STEPS, 8, 256, *device_overrides(), *overrides, **more)


def precision(small: bool) -> Iterator[dict]:
    modes = ["float32", "bfloat16"]
    if gpu():
        modes = ["float32", "tf32", *(["bfloat16"] if gpu_precision() == "bfloat16" else []), "float16"]
    with tempfile.TemporaryDirectory() as folder:
        truth = None
        for mode in modes:
            found = measure.ours(small_job(folder, small, precision=mode))
            truth = truth or found["losses"]
            difference = largest(abs(a - b) for a, b in zip(found["losses"], truth))
            yield {
                "precision": mode,
                "kernel": found["kernel"],
                "first margin": found["margins"][0],
                "difference of losses": difference,
                "allowed": LOSS_TOLERANCE[mode],
                "last loss": found["losses"][-1],
                "ok": found["margins"][0] == 0.0 and difference <= LOSS_TOLERANCE[mode],
            }


def determinism(small: bool) -> Iterator[dict]:
    import settings

    ways: list[list[str]] = [[]]
    if "deterministic" in settings.SCHEMA:
        ways.append(["deterministic=true"])
    with tempfile.TemporaryDirectory() as folder:
        for mode in dict.fromkeys(["float32", gpu_precision()]):
            for overrides in ways:
                job = small_job(folder, small, *overrides, precision=mode, digest=True)
                first, second = (measure.ours(job) for _ in range(2))
                same = (first["digest"], first["losses"]) == (second["digest"], second["losses"])
                yield {
                    "precision": mode,
                    "setting": " ".join(overrides) or "as it comes",
                    "kernel": first["kernel"],
                    "same bits": same,
                    "ok": same if overrides or not gpu() else None,
                }
    if len(ways) == 1:
        yield {"setting": "deterministic=true", "note": "not an option of this version", "ok": None}


def recompiles(small: bool) -> Iterator[dict]:
    """On a CPU with the compiler's eager backend, which makes the same graphs and needs no C++ compiler."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "pairs.jsonl")
        write_pairs(path, 60, (5, 100) if small else (50, 1500), (5, 60) if small else (20, 500))
        ways = [[], ["compile=true"], ["compile=true", "activation_checkpointing=true"]]
        for overrides in ways[2:] if small else ways:
            job = job_of(
                path, TINY if small else SMALL, 50, 1, 4096, *device_overrides(), *overrides, precision=gpu_precision()
            )
            torch.compiler.reset()
            eager = functools.partial(torch.compile, backend="eager")
            with mock.patch("torch.compile", eager if small else torch.compile):
                found = measure.ours(job)
            yield {
                "setting": " ".join(overrides) or "as it comes",
                "kernel": found["kernel"],
                "rows": len(found["losses"]),
                "graphs": found["graphs"],
                "ok": found["graphs"] <= (GRAPHS if found["kernel"] == "flex" else GRAPHS_CUT),
            }


def memory(small: bool) -> Iterator[dict]:
    tokens = 512 if small else 8192
    ways: list[list[str]] = [[]] if small else [[], ["activation_checkpointing=true"], ["reference.mode=online"]]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "pairs.jsonl")
        write_pairs(path, 110, (10, 100) if small else (50, 500), (5, 60) if small else (20, 500))
        for overrides in ways:
            job = job_of(
                path,
                TINY if small else LLAMA_1B,
                12 if small else 96,
                4 if small else 32,
                1024,
                f"tokens_per_microbatch={tokens}",
                *device_overrides(),
                *overrides,
                precision=gpu_precision(),
            )
            planned = measure.measure(job | {"what": "plan"}) if gpu() else measure.plan(job)
            row = {"setting": " ".join(overrides) or "as it comes", "planned GB": planned["total"] / 1e9}
            if planned["fits"] is False:
                yield row | {"note": "does not fit here", "ok": None}
                continue
            found = measure.measure(job)  # in a process of its own: earlier sections left their peak in this one
            if "failed" in found:
                yield row | {"note": found["failed"], "ok": False}
                continue
            counted = planned["total"] - (planned["assumed"] if gpu() else 0)
            share = found.get("peak_device_bytes", found["peak_bytes"]) / counted
            yield row | {
                "planned GB": counted / 1e9,
                "measured GB": share * counted / 1e9,
                "measured of planned": f"{share:.0%}",
                "ok": (MEMORY[0] if gpu() else 0.0) <= share <= MEMORY[1],
            }
