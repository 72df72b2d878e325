"""A step that runs out of memory is repeated in smaller micro-batches: the result is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from data.sampler import BatchSampler, Step
from data.streaming import StreamSampler

Result = TypeVar("Result")
PLAN_HINT = "plan=true shows what a run needs."


def out_of_memory_message(problem: str, budget: int | None = None, rank: int | None = None) -> str:
    """What to change after running out of memory.

    Args:
        problem: the allocator's own words; budget: tokens a pass may hold, None before the first pass; rank: which rank
            it was, None if there is one.
    """
    where = "" if rank is None else f" on rank {rank}"
    if budget is None:
        return (
            f"Out of memory{where} before the first pass ({problem}). Use trainer=FSDPTrainer on more devices, "
            f"fsdp.cpu_offload=true or a smaller model; {PLAN_HINT}"
        )
    return (
        f"Out of memory{where} ({problem}). Set tokens_per_microbatch={max(1, budget // 2)} (it was {budget}), "
        f"activation_checkpointing=true, or trainer=FSDPTrainer with fsdp.cpu_offload=true; {PLAN_HINT}"
    )


def within_memory(
    compute: Callable[[Step], Result],
    step: Step,
    sampler: BatchSampler | StreamSampler,
    optimizer: torch.optim.Optimizer,
    notice: Callable[[str], None],
    recover: Callable[[], None],
) -> Result:
    """`compute(step)`, again in smaller micro-batches where memory ran out.

    Args:
        compute: gradients of the optimizer's parameters, which are cleared after a try that failed.
        recover: makes the models ready for another pass after one that ended in the middle.
    Raises:
        ValueError: a single prompt with its responses does not fit.
    """
    while True:
        try:
            return compute(step)
        except torch.OutOfMemoryError as error:
            problem = str(error).splitlines()[0]
        # Outside the handler: the error holds on to the tensors of the pass that failed.
        recover()
        optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        step = in_smaller_micro_batches(step, sampler, problem)
        notice(
            f"Out of memory: passes now hold at most {sampler.budget:,} tokens, and the step is repeated. The result "
            f"is the same; tokens_per_microbatch={sampler.budget} saves the failed try."
        )


def in_smaller_micro_batches(step: Step, sampler: BatchSampler | StreamSampler, problem: str) -> Step:
    """The same step with more micro-batches, all later steps of the sampler with it.

    Raises:
        ValueError: each holds one prompt already.
    """
    again = sampler.step(step.number)  # an earlier step may have lowered the budget after this one was prepared
    while len(again.micro_batches) <= len(step.micro_batches):
        if sampler.budget <= 1 or all(batch is None or len(batch.units) == 1 for batch in step.micro_batches):
            raise ValueError(
                f"Out of memory with a single prompt and its responses in a pass ({problem}). Set "
                "activation_checkpointing=true, lower max_length, or use trainer=FSDPTrainer on more devices."
            )
        sampler.budget //= 2
        again = sampler.step(step.number)
    return again
