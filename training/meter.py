"""What one log line holds: averages of the steps since the line before, throughput and peak memory."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from data.sampler import Step


class Meter:
    """Gathers steps and logs their averages, at most once an interval.

    Args:
        log: called as log(metrics, examples, updates) for each line.
        interval: least seconds between two lines; 0 logs each step.
        data_ranks: ranks that take different examples. This rank counts its own tokens; the others' are taken to be as
            many, which balanced micro-batches make nearly true, and which costs no communication.
        device: whose peak memory is logged.
        clock: seconds on a clock that never goes back.
    """

    def __init__(
        self,
        log: Callable[[dict[str, Any], int, int], None],
        *,
        interval: float,
        data_ranks: int,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.log, self.interval, self.data_ranks, self.device, self.clock = log, interval, data_ranks, device, clock
        self.examples = self.updates = 0
        self.restart()

    def restart(self) -> None:
        """Drop what was gathered and start the clock: called after work that is not training."""
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.tokens = self.n_examples = 0
        self.started = self.clock()

    def add(self, metrics: dict[str, tuple[float, float]] | None, step: Step, examples: int, updates: int) -> None:
        """Take in a step, and log if the interval has passed.

        Args:
            metrics: name -> (sum, count) over the step's examples of all ranks; None for a step that was skipped.
            examples, updates: those of the whole run so far, this step included.
        """
        for name, (value, count) in (metrics or {}).items():
            self.sums[name][0] += value
            self.sums[name][1] += count
        self.tokens += sum(batch.n_tokens for batch in step.micro_batches if batch is not None)
        self.n_examples += step.n_examples
        self.examples, self.updates = examples, updates
        if self.clock() - self.started >= self.interval:
            self.flush()

    def rates(self) -> dict[str, float]:
        """What a progress bar shows beside its own rate."""
        return {"tokens_per_second": self._tokens_per_second()}

    def flush(self) -> None:
        """Log the averages of what was gathered, if anything was."""
        if not self.n_examples:
            return
        metrics = {name: value / count for name, (value, count) in self.sums.items() if count}
        metrics["examples_per_second"] = self.n_examples / self._seconds()
        metrics["tokens_per_second"] = self._tokens_per_second()
        metrics["memory/peak_gb"] = peak_memory(self.device) / 1e9
        metrics["counters/examples"] = self.examples
        metrics["counters/updates"] = self.updates
        self.log(metrics, self.examples, self.updates)
        self.restart()

    def _seconds(self) -> float:
        return max(self.clock() - self.started, 1e-9)

    def _tokens_per_second(self) -> float:
        return self.tokens * self.data_ranks / self._seconds()


def peak_memory(device) -> int:
    """Most bytes in use so far: of the accelerator's allocator, or resident in this process on CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
