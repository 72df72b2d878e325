"""Losses of single responses, each labelled good or bad."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from losses.inputs import UnpairedLogps, UnpairedWithMismatched
from losses.pairwise import LN2, Beta
from losses.registry import UNPAIRED_REWARDS, LossOutput, Option, Start, register_loss
from utils import LazyModule

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:
    torch, F = LazyModule("torch"), LazyModule("torch.nn.functional")

Weight = Annotated[float, Option("weight of such responses", low=0)]


@register_loss("kto", metrics=(*UNPAIRED_REWARDS, "kl"), step_wide=True)
def kto(
    responses: UnpairedWithMismatched, *, beta: Beta, desirable_weight: Weight = 1.0, undesirable_weight: Weight = 1.0
) -> LossOutput:
    """Kahneman-Tversky optimisation (KTO, arXiv 2402.01306, eq. 7): a good response's reward is to be above, a bad
    one's below, the KL divergence of the policy from the reference.

    Args:
        responses: of the whole step; the divergence is estimated over all of it and carries no gradient.
        desirable_weight, undesirable_weight: the paper's lambdas. With n good and m bad responses, keep the ratio
            desirable_weight * n / (undesirable_weight * m) between 1 and 3/2 (eq. 8).
    Returns: losses [E]; rewards are beta * log(policy / reference).
    """
    kl = responses.kl(beta)
    reward = beta * (responses.policy - responses.reference)
    sign = torch.where(responses.desirable, 1.0, -1.0)
    weight = torch.where(responses.desirable, desirable_weight, undesirable_weight)
    losses = weight * torch.sigmoid(-sign * (reward - kl))
    return LossOutput(losses, responses.rewards(beta) | {"kl": kl.expand_as(losses)})


@register_loss(
    "bco",
    metrics=(*UNPAIRED_REWARDS, "reward_baseline"),
    step_wide=True,
    memory={"reward_sum": 0.0, "reward_count": 0.0},
    start=lambda **_: LN2,
)
def bco(responses: UnpairedLogps, *, beta: Beta, memory: dict[str, float]) -> LossOutput:
    """Binary classifier optimisation (BCO, arXiv 2404.04656): a response's reward is to be above or below
    a baseline, the mean reward of all responses trained on so far, this step's included.

    Args:
        responses: of the whole step; memory: sum and count of the rewards of earlier steps.
    Returns: losses [E]; rewards are beta * log(policy / reference).
    """
    reward = beta * (responses.policy - responses.reference)
    total = reward.detach().double().sum() + memory["reward_sum"]
    count = memory["reward_count"] + len(reward)
    baseline = (total / count).to(reward.dtype)
    sign = torch.where(responses.desirable, 1.0, -1.0)
    losses = -F.logsigmoid(sign * (reward - baseline))
    return LossOutput(
        losses,
        responses.rewards(beta) | {"reward_baseline": baseline.expand_as(losses)},
        {"reward_sum": total, "reward_count": torch.tensor(count)},
    )


@register_loss("apo_zero_unpaired", start=lambda **_: Start(0.5, "½"))
def apo_zero_unpaired(responses: UnpairedLogps, *, beta: Beta) -> LossOutput:
    """Anchored preference optimisation, zero (arXiv 2408.06266, eq. 7), of single responses: good up, bad down.

    Returns: losses [E]; rewards are beta * log(policy / reference).
    """
    sign = torch.where(responses.desirable, 1.0, -1.0)
    reward = beta * (responses.policy - responses.reference)
    return LossOutput(torch.sigmoid(-sign * reward), responses.rewards(beta))
