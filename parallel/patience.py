"""Collectives that may take longer than one of training: others wait while ranks read files of many GB."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import torch.distributed as dist

from checkpoint.checkpointer import PATIENCE
from utils import World


@contextmanager
def patient_group(world: World):
    """A process group of all ranks that waits for hours; None in a world of one. All ranks enter it together.

    A rank that dies is noticed at once all the same, by its closed connection.
    """
    if world.size == 1:
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def on_all(function: Callable[[], object], world: World, group) -> None:
    """Call function() on every rank; return when all have, and raise the first rank's ValueError or OSError on all.

    Raises:
        ValueError: with the message of that error.
    """
    problem = None
    try:
        function()
    except (ValueError, OSError) as error:
        if world.size == 1:
            raise
        problem = str(error)
    if world.size == 1:
        return
    problems: list[str | None] = [None] * world.size
    dist.all_gather_object(problems, problem, group=group)
    first = next((text for text in problems if text is not None), None)
    if first is not None:
        raise ValueError(first)
