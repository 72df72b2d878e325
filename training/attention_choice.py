"""Which attention kernel a run scores with: the fastest that is right for its model, tried at the start."""

from __future__ import annotations

from collections.abc import Callable

from data.batching import PromptUnit
from modeling import attention, loading
from parallel.placement import Placement
from settings import Settings
from utils import run_on_main


def choose_attention(
    config: Settings, tokenizer, placement: Placement, model, unit: PromptUnit, notice: Callable[[str], None]
) -> tuple[str, bool]:
    """(kernel, full_forward) for `attention.use_attention`; all ranks call it together and get one answer.

    Args:
        model: the policy; unit: a prompt with several responses to try it on.
    Raises:
        ValueError: model.attention names a kernel that this model cannot use.
    """
    # In low precision rounding could hide a small leak between responses, and shards complicate a try: a float32 copy
    # of two layers with random weights shows it as well.
    exact = config.model.policy_dtype == "float32" and not placement.sharded

    def choose() -> tuple[str, bool, str | None]:
        tried = model if exact else loading.sample_of(config, tokenizer, placement.device)
        return attention.choose_attention(
            tried, unit, config.model.attention, loading.padding_id(tokenizer), placement.device
        )

    kernel, full_forward, why = run_on_main(choose, placement.world)
    if why:
        notice(why)
    return kernel, full_forward
