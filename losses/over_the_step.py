"""Losses of preference pairs that compare a step's pairs with each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from losses.inputs import PairLogps
from losses.pairwise import LN2, Beta, LabelSmoothing, log_ratios, smoothed_logistic
from losses.registry import PAIR_REWARDS, LossOutput, Option, register_loss
from utils import LazyModule

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:
    torch, F = LazyModule("torch"), LazyModule("torch.nn.functional")


def _at_own_places(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Sorted values, each at the place of the example that `order` took it from."""
    return torch.empty_like(values).scatter(0, order, values)


@register_loss("aot", step_wide=True, start=lambda **_: LN2)
def aot(pairs: PairLogps, *, beta: Beta, label_smoothing: LabelSmoothing = 0.0) -> LossOutput:
    """Alignment by optimal transport of pairs (AOT, arXiv 2406.05882): over a step, the sorted log-ratios of
    chosen to rejected under the policy are to lie above the sorted ones under the reference.

    Returns: losses [E], each at its policy log-ratio's pair; rewards are beta * log(policy / reference).
    """
    policy, order = (pairs.policy_chosen - pairs.policy_rejected).sort()
    reference = (pairs.reference_chosen - pairs.reference_rejected).sort().values
    losses = smoothed_logistic(beta * (policy - reference), label_smoothing)
    return LossOutput(_at_own_places(losses, order), pairs.rewards(beta))


@register_loss("aot_unpaired", step_wide=True, start=lambda **_: LN2)
def aot_unpaired(pairs: PairLogps, *, beta: Beta, label_smoothing: LabelSmoothing = 0.0) -> LossOutput:
    """Alignment by optimal transport without pairing (AOT, arXiv 2406.05882): over a step, the sorted rewards of
    chosen responses are to lie above the sorted rewards of rejected ones.

    Returns: losses [E], each at its chosen response's pair; rewards are beta * log(policy / reference).
    """
    chosen, rejected = log_ratios(pairs)
    chosen, order = chosen.sort()
    losses = smoothed_logistic(beta * (chosen - rejected.sort().values), label_smoothing)
    return LossOutput(_at_own_places(losses, order), pairs.rewards(beta))


@register_loss("beta_dpo", metrics=(*PAIR_REWARDS, "beta"), step_wide=True, memory={"margin_mean": 0.0, "steps": 0.0})
def beta_dpo(
    pairs: PairLogps,
    *,
    beta: Beta,
    alpha: Annotated[float, Option("how far beta follows the margins", low=0)] = 0.6,
    momentum: Annotated[float, Option("of the running mean of margins", low=0, high=0.9999999)] = 0.9,
    keep: Annotated[float, Option("share of a step's pairs that is trained on", low=0, high=1)] = 0.8,
    memory: dict[str, float],
) -> LossOutput:
    """beta-DPO (arXiv 2407.08639): DPO whose beta follows the step's mean reward margin, and which leaves
    out the pairs whose margins are least typical.

    The margin of a pair is beta times its log-ratio of chosen to rejected, less the reference's. A running mean of them
    says what is typical. The step's beta is beta * (1 + alpha * (mean margin - running mean)), at least a thousandth of
    beta, so that it never turns round.

    Args:
        pairs: of the whole step; memory: of earlier steps.
        keep: the share of pairs that is trained on: those nearest to the running mean, which have the largest weights
            in the paper, too, where they are drawn at random. Their losses are scaled up by 1 / share.
    Returns: losses [E]; rewards are with the given beta.
    """
    chosen, rejected = log_ratios(pairs)
    margins = (beta * (chosen - rejected)).detach()
    # Nothing is known before the first step.
    before = memory["margin_mean"] if memory["steps"] else margins.mean()
    mean = momentum * before + (1 - momentum) * margins.mean()
    kept = max(1, round(keep * len(margins)))
    nearest = (margins - mean).abs().argsort(stable=True)[:kept]
    mask = torch.zeros_like(margins).index_fill(0, nearest, len(margins) / kept)
    adapted = beta * (1 + alpha * (margins[nearest].mean() - mean)).clamp(min=1e-3)
    losses = -F.logsigmoid(adapted * (chosen - rejected)) * mask
    return LossOutput(
        losses,
        pairs.rewards(beta) | {"beta": adapted.expand_as(losses)},
        {"margin_mean": mean, "steps": torch.tensor(memory["steps"] + 1.0)},
    )
