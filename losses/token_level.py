"""Losses of preference pairs that look at single tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from losses.inputs import CollisionPairLogps, DivergencePairLogps, FrontPairLogps
from losses.pairwise import LN2, Beta, log_ratios
from losses.registry import PAIR_REWARDS, LossOutput, Option, register_loss
from utils import LazyModule

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:
    torch, F = LazyModule("torch"), LazyModule("torch.nn.functional")


@register_loss("ld_dpo", start=lambda **_: LN2)
def ld_dpo(
    pairs: FrontPairLogps, *, beta: Beta, alpha: Annotated[float, Option("weight of the longer end", low=0, high=1)]
) -> LossOutput:
    """Length-desensitised DPO (LD-DPO, arXiv 2409.06411): DPO in which the tokens of a response beyond the length of
    the pair's shorter one weigh alpha.

    Args:
        alpha: 1 is DPO, 0 cuts both to the same length.
    Returns: losses [E]; rewards are beta * log(policy / reference) of whole responses.
    """
    chosen, rejected = log_ratios(pairs)
    chosen_front = pairs.policy_chosen_front - pairs.reference_chosen_front
    rejected_front = pairs.policy_rejected_front - pairs.reference_rejected_front
    h = (alpha * chosen + (1 - alpha) * chosen_front) - (alpha * rejected + (1 - alpha) * rejected_front)
    return LossOutput(-F.logsigmoid(beta * h), pairs.rewards(beta))


@register_loss("wpo", metrics=(*PAIR_REWARDS, "pair_weight"))
def wpo(pairs: CollisionPairLogps, *, beta: Beta) -> LossOutput:
    """Weighted preference optimisation (WPO, arXiv 2406.11827, eq. 2, with its sampled alignment): DPO whose pairs
    weigh as much as they look like the policy's own, so that data of another model count as if they were on-policy.

    A response's weight is exp of the mean over its tokens of log p(token) - log sum_v p(v)^2, without gradient; the
    weight of a pair is the product of both.

    Returns: losses [E]; rewards are beta * log(policy / reference).
    """
    chosen, rejected = log_ratios(pairs)
    log_weight = (pairs.policy_chosen - pairs.chosen_collision) / pairs.chosen_lengths
    log_weight = log_weight + (pairs.policy_rejected - pairs.rejected_collision) / pairs.rejected_lengths
    weight = log_weight.detach().exp()
    losses = -F.logsigmoid(beta * (chosen - rejected)) * weight
    return LossOutput(losses, pairs.rewards(beta) | {"pair_weight": weight})


@register_loss("tdpo", metrics=(*PAIR_REWARDS, "divergence/chosen", "divergence/rejected"), start=lambda **_: LN2)
def tdpo(
    pairs: DivergencePairLogps,
    *,
    beta: Beta,
    variant: Annotated[Literal["tdpo1", "tdpo2"], Option("what the divergence does")] = "tdpo2",
    alpha: Annotated[float, Option("weight of the divergence", low=0, only_with=("variant", "tdpo2"))] = 0.5,
) -> LossOutput:
    """Token-level DPO (TDPO, arXiv 2404.11999): DPO less the difference of the responses' sequential KL
    divergences, KL(reference || policy) summed over tokens.

    Args:
        variant: "tdpo1" takes the difference as it is; "tdpo2" alpha times it, without the gradient of the chosen
            response's divergence.
    Returns: losses [E]; rewards are beta * log(policy / reference).
    """
    chosen, rejected = log_ratios(pairs)
    of_chosen, of_rejected = pairs.chosen_divergence, pairs.rejected_divergence
    apart = of_rejected - of_chosen if variant == "tdpo1" else alpha * (of_rejected - of_chosen.detach())
    metrics = {"divergence/chosen": of_chosen.detach(), "divergence/rejected": of_rejected.detach()}
    return LossOutput(-F.logsigmoid(beta * (chosen - rejected - apart)), pairs.rewards(beta) | metrics)
