"""How a run's model is scored: the fastest attention kernel that is right for it, tried at the start."""

from __future__ import annotations

from collections.abc import Callable

from data.batching import PromptUnit
from modeling import loading, scoring_check
from modeling.loading import DTYPES
from modeling.rotary import length_limit, unknown_scaling
from parallel.placement import Placement
from settings import Settings
from settings.precision import compute_dtype


def choose_attention(
    config: Settings,
    tokenizer,
    placement: Placement,
    model,
    unit: PromptUnit,
    share_prefix: bool,
    notice: Callable[[str], None],
) -> tuple[str, bool]:
    """(kernel, full_forward) for `attention.use_attention`; all ranks call it together and get one answer.

    Args:
        model: the policy; unit: a prompt with several responses to try it on; share_prefix: see `shares_prefix`.
    Raises:
        ValueError: model.attention names a kernel that this model cannot use; the model is not causal.
    """
    kernel, full_forward, why = scoring_check.choose_attention(
        model,
        unit,
        config.model.attention,
        loading.padding_id(tokenizer),
        placement.device,
        share_prefix=share_prefix,
        dtype=DTYPES[compute_dtype(config)],
        world=placement.world,
    )
    if why:
        notice(why)
    return kernel, full_forward


def shares_prefix(config: Settings, model, longest: int, notice: Callable[[str], None]) -> bool:
    """Whether packed rows hold a prompt once for all its responses.

    Rotary frequencies that depend on a row's length make a prompt another one for each response.

    Args:
        longest: tokens of the longest prompt + response of the run.
    Raises:
        ValueError: code that comes with the model chooses frequencies by the longest row of a pass.
    """
    limit, unknown = length_limit(model), unknown_scaling(model.config)
    if limit is None and unknown is not None and longest > unknown:
        raise ValueError(
            f"The rotary frequencies of {type(model).__name__.removeprefix('FSDP')} depend on the longest row of a "
            f"pass, and the longest here has {longest} tokens: losses would depend on how examples meet in a batch. "
            f"Set max_length={unknown}, up to which they are the same for all."
        )
    if limit is None or longest <= limit or not config.prefix_sharing:
        return config.prefix_sharing
    notice(
        f"The longest row has {longest} tokens, and rows of more than {limit} get rotary frequencies by their length: "
        f"prompts are not shared between responses. max_length={limit} is faster."
    )
    return False
