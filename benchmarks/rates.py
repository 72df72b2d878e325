"""What a machine can do: its name, its card's peak, and the rate of matrix products that it reaches."""

from __future__ import annotations

import gc
import math
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Sequence

# Dense bf16 FLOP/s with sums in fp32, from the makers' data sheets (without sparsity), by words of the device's name.
PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIE": 756e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 6000 ADA": 364e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
# Parts of a card, and cards of the same number that are slower.
OTHERS = {"MIG", "LAPTOP", "D", "MAX", "Q"}
CPU_SIZES = ((2048, 576, 1536), (2048, 1536, 576), (2048, 2048, 2048), (1024, 576, 8192))  # of SmolLM2's layers
TINY_SIZES = ((256, 256, 256),)  # to try the measurement itself
GPU_SIZES = tuple((n, n, n) for n in (4096, 8192, 16384))


def peak_of(name: str) -> float | None:
    """Dense bf16 FLOP/s that the maker states for a card; None if it is not in the table."""
    words = set(re.findall(r"[A-Z0-9]+", name.upper()))
    fitting = [card for card in PEAKS if set(card.split()) <= words and not words & OTHERS]
    return PEAKS[max(fitting, key=len)] if fitting else None


def gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def gpu_precision() -> str:
    """The precision that speed is measured in: bfloat16 on a GPU that has it, float32 elsewhere."""
    import torch

    return "bfloat16" if gpu() and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def card_peak() -> float | None:
    """`peak_of` the visible GPU; None without one."""
    import torch

    return peak_of(torch.cuda.get_device_name()) if gpu() else None


def hardware() -> str:
    """The GPU's name, or the processor's with its threads."""
    import torch

    if gpu():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), model)
    return f"{model}, {torch.get_num_threads()} threads"


def clock() -> float:
    """Seconds, once the GPU has done what it was given."""
    import torch

    if gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def matmul_rate(precision: str, seconds: float, sizes: Sequence[tuple[int, int, int]] = ()) -> float:
    """FLOP/s of matrix products: the best over a few sizes, each measured for so many seconds.

    Args:
        precision: float32, tf32 or bfloat16.
        sizes: (m, k, n) of each product; none: what suits the device.
    """
    import torch

    device = "cuda" if gpu() else "cpu"
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    before, best = torch.get_float32_matmul_precision(), 0.0
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        for m, k, n in sizes or (GPU_SIZES if gpu() else CPU_SIZES):
            try:
                best = max(best, _rate_of_size(m, k, n, device, dtype, seconds))
            except torch.OutOfMemoryError:  # the smaller sizes have to do
                break
    finally:
        torch.set_float32_matmul_precision(before)
    return best


def _rate_of_size(m: int, k: int, n: int, device: str, dtype, seconds: float) -> float:
    import torch

    a, b = (torch.randn(shape, device=device, dtype=dtype) for shape in ((m, k), (k, n)))
    for _ in range(3):
        a @ b
    start, count = clock(), 0
    while clock() - start < seconds:
        for _ in range(5):
            a @ b
        count += 5
    return 2.0 * m * k * n * count / (clock() - start)


def largest(values: Iterable[float]) -> float:
    """The largest value; NaN if one is, which max() passes over."""
    values = list(values)
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def free_device() -> None:
    """Give the memory of what is no longer used back to the GPU."""
    import torch

    gc.collect()
    if gpu():
        torch.cuda.empty_cache()


def peak_memory() -> dict:
    """Bytes that this process held at most: in host memory and, with a GPU, on the device."""
    import resource

    import torch

    found = {
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    }
    if gpu():
        found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    return found


def figures(result: dict, examples: int, work: dict) -> dict:
    """Speed and memory of a measurement.

    Args:
        result: of benchmarks.measure; examples: that its seconds are of.
        work: tokens and useful_flops of these examples; devices: that they were computed on.
    Returns: pairs_per_second, tokens_per_second, peak_gb, gemm (FLOP/s of a device), useful (share of that rate), and
        of_peak (share of the card's peak; None where that is not known).
    """
    rate = work["useful_flops"] / result["seconds"] / result.get("devices", 1)
    peak = result.get("card_peak")
    return {
        "pairs_per_second": examples / result["seconds"],
        "tokens_per_second": work["tokens"] / result["seconds"],
        "peak_gb": result.get("peak_device_bytes", result["peak_bytes"]) / 1e9,
        "gemm": result["gemm"],
        "useful": rate / result["gemm"],
        "of_peak": rate / peak if peak else None,
    }


def environment(small: bool):
    """Rows of what the machine is, and of its rates of matrix products."""
    import torch
    import transformers

    yield {"what": "Python, torch, transformers", "is": f"{platform.python_version()}, {torch.__version__}, "
           f"{transformers.__version__}"}  # fmt: skip
    yield {"what": "device", "is": hardware()}
    rates = ["float32"]
    if gpu():
        card = torch.cuda.get_device_properties(0)
        yield {
            "what": "devices, compute capability, memory",
            "is": f"{torch.cuda.device_count()}, {card.major}.{card.minor}, {card.total_memory / 1e9:.1f} GB",
        }
        yield {"what": "CUDA of torch, driver", "is": f"{torch.version.cuda}, {driver_version()}"}
        peak = card_peak()
        stated = f"{peak / 1e12:.0f} TFLOP/s" if peak else "not in the table: MFU is of the measured rate only"
        yield {"what": "stated peak, dense bf16", "is": stated}
        rates += ["tf32", "bfloat16"]
    for precision in rates:
        rate = matmul_rate(precision, 0.02, TINY_SIZES) if small else matmul_rate(precision, 2.0)
        yield {"what": f"matrix products in {precision}", "is": f"{rate / 1e12:.4g} TFLOP/s"}


def driver_version() -> str:
    """The GPU's driver as nvidia-smi names it."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "unknown (no nvidia-smi)"
