"""Losses of preference pairs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from losses.inputs import PairLogps
from losses.registry import LOSSES, LossOutput, Option, Start, register_loss
from utils import LazyModule

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:
    torch, F = LazyModule("torch"), LazyModule("torch.nn.functional")

Beta = Annotated[float, Option("pull to the reference", low=0, open=True)]
ReferenceFree = Annotated[bool, Option("no reference model")]


@register_loss("dpo", start=lambda **_: Start(math.log(2), "ln 2"))
def dpo(
    pairs: PairLogps,
    *,
    beta: Beta,
    label_smoothing: Annotated[float, Option("share of swapped labels", low=0, high=0.4999999999999999)] = 0.0,
    reference_free: ReferenceFree = False,
    f_divergence: Annotated[
        Literal["reverse_kl", "js"], Option("how distance to the reference is measured")
    ] = "reverse_kl",
) -> LossOutput:
    """Direct preference optimisation (arXiv 2305.18290, eq. 7): -log sigmoid(beta h).

    h is the policy's log-ratio of chosen to rejected less the reference's.

    Args:
        beta: strength of the implicit KL penalty, > 0.
        label_smoothing: probability that a preference label is flipped, in [0, 0.5): conservative DPO
            (Mitchell, "A note on DPO with noisy preferences", eq. 3).
        reference_free: take a reference that gives every response the same probability.
        f_divergence: "reverse_kl", or "js" for the Jensen-Shannon divergence (f-DPO, arXiv 2309.16240, table 1).
    Returns: losses [E]; rewards are beta * log(policy / reference).
    Raises:
        ValueError: an unknown f_divergence.
    """
    chosen = pairs.policy_chosen - (0 if reference_free else pairs.reference_chosen)
    rejected = pairs.policy_rejected - (0 if reference_free else pairs.reference_rejected)
    if f_divergence == "js":
        # log(2u / (1 + u)) with u = policy / reference; the log 2 cancels between chosen and rejected.
        chosen, rejected = chosen - F.softplus(chosen), rejected - F.softplus(rejected)
    elif f_divergence != "reverse_kl":
        raise ValueError(f"loss.f_divergence={f_divergence!r} is not known; choose reverse_kl or js.")
    logits = beta * (chosen - rejected)
    losses = -F.logsigmoid(logits) * (1 - label_smoothing) - F.logsigmoid(-logits) * label_smoothing
    return LossOutput(losses, pairs.rewards(beta))


@register_loss("ipo", start=lambda beta, **_: Start(1 / (2 * beta) ** 2, "1 / (2 beta)²"))
def ipo(
    pairs: PairLogps,
    *,
    beta: Beta,
    average_log_prob: Annotated[bool, Option("mean over tokens, not sum")] = False,
    reference_free: ReferenceFree = False,
) -> LossOutput:
    """Identity preference optimisation (arXiv 2310.12036, eq. 17): (h - 1 / (2 beta))^2.

    Args:
        beta: the paper's tau, > 0.
        average_log_prob: h of log-probs averaged over tokens, which keeps the target 1 / (2 beta) independent of
            response length; false (the default) sums, as the DPO reference implementation
            (eric-mitchell/direct-preference-optimization) does.
        reference_free: as for `dpo`.
    Returns: losses [E]; rewards are of the averaged log-probs when `average_log_prob`.
    """
    if average_log_prob:
        pairs = pairs.averaged()
    h = pairs.policy_chosen - pairs.policy_rejected
    if not reference_free:
        h = h - (pairs.reference_chosen - pairs.reference_rejected)
    return LossOutput((h - 1 / (2 * beta)) ** 2, pairs.rewards(beta))


def preference_loss(
    policy_chosen_logps: torch.Tensor,
    policy_rejected_logps: torch.Tensor,
    reference_chosen_logps: torch.Tensor,
    reference_rejected_logps: torch.Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    ipo: bool = False,
    reference_free: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """DPO or IPO of summed log-probs, under the name and signature of the DPO reference implementation.

    Args: log-probs are [E], summed over response tokens; the rest as for `dpo` and `ipo`.
    Returns: losses, chosen rewards, rejected rewards, each [E].
    """
    ones = torch.ones_like(policy_chosen_logps)
    pairs = PairLogps(
        policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps, ones, ones
    )
    options = {"beta": beta, "reference_free": reference_free}
    if ipo:
        output = LOSSES["ipo"](pairs, **options)
    else:
        output = LOSSES["dpo"](pairs, label_smoothing=label_smoothing, **options)
    return output.losses, output.metrics["rewards/chosen"], output.metrics["rewards/rejected"]
