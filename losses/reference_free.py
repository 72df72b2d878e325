"""Losses of preference pairs that need no reference model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from losses.inputs import Metric, PairLogps
from losses.pairwise import LabelSmoothing, smoothed_logistic
from losses.registry import PAIR_REWARDS, LossOutput, Option, register_loss
from utils import LazyModule

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:
    torch, F = LazyModule("torch"), LazyModule("torch.nn.functional")

Scale = Annotated[float, Option("scale of the reward", low=0, open=True)]


def own_rewards(pairs: PairLogps, beta: float) -> dict[str, Metric]:
    """The metrics of `PairLogps.rewards` for rewards beta * log(policy), without a reference."""
    nothing = torch.zeros_like(pairs.policy_chosen)
    return PairLogps(
        pairs.policy_chosen, pairs.policy_rejected, nothing, nothing, pairs.chosen_lengths, pairs.rejected_lengths
    ).rewards(beta)


@register_loss("simpo", reference=False)
def simpo(
    pairs: PairLogps,
    *,
    beta: Scale,
    gamma: Annotated[float, Option("target reward margin", low=0)],
    label_smoothing: LabelSmoothing = 0.0,
) -> LossOutput:
    """Simple preference optimisation (SimPO, arXiv 2405.14734, eq. 6): -log sigmoid(r_chosen - r_rejected - gamma),
    where r is beta times the mean log-prob of a response's tokens.

    Args:
        beta: 2.0 to 2.5 in the paper; gamma: in the units of the reward, 0.5 to 1.6 in the paper.
    Returns: losses [E]; rewards are r.
    """
    pairs = pairs.averaged()
    logits = beta * (pairs.policy_chosen - pairs.policy_rejected) - gamma
    return LossOutput(smoothed_logistic(logits, label_smoothing), own_rewards(pairs, beta))


@register_loss("cpo", reference=False)
def cpo(pairs: PairLogps, *, beta: Scale, label_smoothing: LabelSmoothing = 0.0) -> LossOutput:
    """Contrastive preference optimisation (CPO, arXiv 2401.08417, eq. 3): -log sigmoid(beta log(chosen / rejected)).
    The paper adds the likelihood of the chosen response: loss.sft_weight.

    Returns: losses [E]; rewards are beta * log(policy).
    """
    logits = beta * (pairs.policy_chosen - pairs.policy_rejected)
    return LossOutput(smoothed_logistic(logits, label_smoothing), own_rewards(pairs, beta))


@register_loss("orpo", reference=False, metrics=(*PAIR_REWARDS, "log_odds_ratio"))
def orpo(
    pairs: PairLogps, *, beta: Annotated[float, Option("weight of the odds ratio", low=0, open=True)]
) -> LossOutput:
    """Odds ratio preference optimisation (ORPO, arXiv 2403.07691, eq. 6): the chosen response's mean negative
    log-likelihood, plus beta (the paper's lambda) times -log sigmoid of the log odds ratio (eq. 7), both of
    probabilities averaged over tokens.

    Returns: losses [E]; rewards are beta times mean log-probs.
    """
    averaged = pairs.averaged()
    ratio = log_odds(averaged.policy_chosen) - log_odds(averaged.policy_rejected)
    losses = -averaged.policy_chosen - beta * F.logsigmoid(ratio)
    return LossOutput(losses, own_rewards(averaged, beta) | {"log_odds_ratio": ratio.detach()})


def log_odds(log_prob: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of log p < 0: [E] -> [E], finite also where p rounds to 1 or 0."""
    log_prob = log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)
    # 1 - p is computed from what is left of it where p is near 1, and from p where that is near 0.
    near_one = log_prob > -math.log(2)
    rest = torch.where(
        near_one,
        torch.log(-torch.expm1(torch.where(near_one, log_prob, -1.0))),
        torch.log1p(-torch.exp(torch.where(near_one, -1.0, log_prob))),
    )
    return log_prob - rest
