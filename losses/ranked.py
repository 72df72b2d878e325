"""Losses that rank all responses of a prompt, and pairs whose scores say how far they lie apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from losses.inputs import GroupLogps, ScoredGroupLogps, ScoredPairLogps
from losses.pairwise import Beta, log_ratios
from losses.registry import LossOutput, Option, register_loss
from utils import LazyModule

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:
    torch, F = LazyModule("torch"), LazyModule("torch.nn.functional")


@register_loss("odpo")
def odpo(
    pairs: ScoredPairLogps,
    *,
    beta: Beta,
    alpha: Annotated[float, Option("weight of the offset", low=0)] = 1.0,
    offset: Annotated[Literal["log", "difference"], Option("how far apart the scores ask rewards to be")] = "log",
) -> LossOutput:
    """DPO with an offset (ODPO, arXiv 2402.10571): -log sigmoid(beta h - offset), where the offset grows with
    the difference of the scores.

    Args:
        alpha: the offset is alpha times f(score of chosen - score of rejected), f as `offset` says: log(1 + x), which
            is finite where scores are equal, or x itself.
    Returns: losses [E]; rewards are beta * log(policy / reference).
    """
    chosen, rejected = log_ratios(pairs)
    gap = (pairs.chosen_scores - pairs.rejected_scores).clamp(min=0)
    wanted = alpha * (torch.log1p(gap) if offset == "log" else gap)
    return LossOutput(-F.logsigmoid(beta * (chosen - rejected) - wanted), pairs.rewards(beta))


@register_loss("plackett_luce", metrics=("ranked_right",))
def plackett_luce(responses: GroupLogps, *, beta: Beta) -> LossOutput:
    """DPO of whole rankings (arXiv 2305.18290, appendix A.3): the negative log-likelihood of a prompt's ranking under
    the Plackett-Luce model of rewards beta * log(policy / reference). With two responses it is DPO.

    A response's place is the number of responses that are preferred to it; of responses in one place none is compared
    with the other.

    Returns: losses [E]; ranked_right is the share of a prompt's preferences that rewards agree with.
    """
    rewards = beta * (responses.policy - responses.reference)
    same = responses.group[:, None] == responses.group[None, :]
    place = torch.zeros_like(responses.group).index_add(
        0, responses.preferences[:, 1], torch.ones_like(responses.preferences[:, 1])
    )
    # Each response is chosen among itself and those in later places.
    behind = same & (place[None, :] > place[:, None])
    among = behind | torch.eye(len(place), dtype=torch.bool, device=place.device)
    chosen = rewards - torch.logsumexp(rewards.expand_as(among).masked_fill(~among, -torch.inf), dim=1)
    losses = responses.sum_by_group(-chosen)
    return LossOutput(losses, {"ranked_right": ranked_right(responses, rewards.detach())})


@register_loss("listwise_softmax", metrics=("ranked_right",))
def listwise_softmax(
    responses: ScoredGroupLogps,
    *,
    beta: Beta,
    temperature: Annotated[float, Option("of the softmax over scores", low=0, open=True)] = 1.0,
) -> LossOutput:
    """Cross-entropy from the softmax of a prompt's scores to the softmax of its rewards (InfoNCA, arXiv 2402.05369):
    rewards are beta * log(policy / reference).

    Args:
        temperature: scores are divided by it (the paper's alpha).
    Returns: losses [E]; ranked_right is the share of a prompt's preferences that rewards agree with.
    """
    rewards = beta * (responses.policy - responses.reference)
    target = _log_softmax(responses, responses.scores / temperature).exp()
    losses = responses.sum_by_group(-target * _log_softmax(responses, rewards))
    return LossOutput(losses, {"ranked_right": ranked_right(responses, rewards.detach())})


def _log_softmax(responses: GroupLogps, values: torch.Tensor) -> torch.Tensor:
    """log softmax over the responses of each prompt: [K] -> [K]."""
    same = responses.group[:, None] == responses.group[None, :]
    return values - torch.logsumexp(values.expand_as(same).masked_fill(~same, -torch.inf), dim=1)


def ranked_right(responses: GroupLogps, rewards: torch.Tensor) -> torch.Tensor:
    """The share of each prompt's preferences that rewards [K] agree with, [E]; a tie counts one half."""
    better, worse = responses.preferences.T
    group = responses.group[better]
    right = (torch.sign(rewards[better] - rewards[worse]) + 1) / 2
    count = responses.sum_by_group(torch.ones_like(right), group).clamp(min=1)
    return responses.sum_by_group(right, group) / count
