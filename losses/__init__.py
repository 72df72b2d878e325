"""Losses as pure functions of response log-probabilities. This file knows no model, no batch and no device.

A loss takes, for E preference pairs, the summed log-probs of chosen and rejected responses under policy and reference,
the responses' lengths, and its settings from `config/loss/<name>.yaml`. It returns per-pair losses and detached rewards.
To add one: write the function, decorate it with `@register_loss`, and add its yaml; every keyword that the yaml names
is passed on, and a keyword that the function does not take is an error before any weight is read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class PairLogps:
    """Summed response log-probs of E pairs (nats), and response lengths (tokens); every field is a tensor [E]."""

    policy_chosen: torch.Tensor
    policy_rejected: torch.Tensor
    reference_chosen: torch.Tensor
    reference_rejected: torch.Tensor
    chosen_lengths: torch.Tensor
    rejected_lengths: torch.Tensor

    def averaged(self) -> PairLogps:
        """The same pairs with log-probs averaged over each response's tokens."""
        return PairLogps(
            self.policy_chosen / self.chosen_lengths,
            self.policy_rejected / self.rejected_lengths,
            self.reference_chosen / self.chosen_lengths,
            self.reference_rejected / self.rejected_lengths,
            self.chosen_lengths,
            self.rejected_lengths,
        )


LossOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
LOSSES: dict[str, Callable[..., LossOutput]] = {}


def register_loss(name: str):
    """Decorator: makes a function available as `loss=<name>` (with a `config/loss/<name>.yaml` beside it)."""

    def add(function):
        LOSSES[name] = function
        return function

    return add


def options(name: str, needed: bool = False) -> list[str]:
    """Settings that a registered loss takes, or only those it cannot do without; `sft` takes none."""
    if name == "sft":
        return []
    return [
        p.name
        for p in inspect.signature(LOSSES[name]).parameters.values()
        if p.kind is p.KEYWORD_ONLY and not (needed and p.default is not p.empty)
    ]


def sft(policy: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of E responses, summed over each response's tokens: [E] -> [E]."""
    return -policy


@register_loss("dpo")
def dpo(
    pairs: PairLogps,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    reference_free: bool = False,
    f_divergence: str = "reverse_kl",
) -> LossOutput:
    """Direct preference optimisation (arXiv 2305.18290, eq. 7): -log sigmoid(beta h).

    h is the policy's log-ratio of chosen to rejected less the reference's.

    Args:
        beta: strength of the implicit KL penalty, > 0.
        label_smoothing: probability that a preference label is flipped, in [0, 0.5): conservative DPO
            (Mitchell, "A note on DPO with noisy preferences", eq. 3).
        reference_free: take a reference that gives every response the same probability.
        f_divergence: "reverse_kl", or "js" for the Jensen-Shannon divergence (f-DPO, arXiv 2309.16240, table 1).
    Returns: losses, chosen rewards, rejected rewards, each [E]; rewards are beta * log(policy / reference), detached.
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
    return losses, *_rewards(pairs, beta)


@register_loss("ipo")
def ipo(pairs: PairLogps, *, beta: float, average_log_prob: bool = False, reference_free: bool = False) -> LossOutput:
    """Identity preference optimisation (arXiv 2310.12036, eq. 17): (h - 1 / (2 beta))^2.

    Args:
        beta: the paper's tau, > 0.
        average_log_prob: h of log-probs averaged over tokens, which keeps the target 1 / (2 beta) independent of
            response length; false (the default) sums, as the DPO paper's reference implementation does.
        reference_free: as for `dpo`.
    Returns: as `dpo`; rewards are of the averaged log-probs when `average_log_prob`.
    """
    if average_log_prob:
        pairs = pairs.averaged()
    h = pairs.policy_chosen - pairs.policy_rejected
    if not reference_free:
        h = h - (pairs.reference_chosen - pairs.reference_rejected)
    return (h - 1 / (2 * beta)) ** 2, *_rewards(pairs, beta)


def _rewards(pairs: PairLogps, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Implicit rewards beta * log(policy / reference), up to a constant of the prompt (arXiv 2305.18290, eq. 5)."""
    return (
        beta * (pairs.policy_chosen - pairs.reference_chosen).detach(),
        beta * (pairs.policy_rejected - pairs.reference_rejected).detach(),
    )


def reward_accuracies(chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor) -> torch.Tensor:
    """1 where the chosen response has the higher reward, 0 where the lower, one half for a tie: [E] -> [E]."""
    return ((chosen_rewards > rejected_rewards).float() + (chosen_rewards >= rejected_rewards).float()) / 2


def preference_loss(
    policy_chosen_logps: torch.Tensor,
    policy_rejected_logps: torch.Tensor,
    reference_chosen_logps: torch.Tensor,
    reference_rejected_logps: torch.Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    ipo: bool = False,
    reference_free: bool = False,
) -> LossOutput:
    """DPO or IPO of summed log-probs, under the DPO paper's reference implementation's name and signature.

    Args: log-probs are [E], summed over response tokens; the rest as for `dpo` and `ipo`.
    Returns: losses, chosen rewards, rejected rewards, each [E].
    """
    ones = torch.ones_like(policy_chosen_logps)
    pairs = PairLogps(
        policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps, ones, ones
    )
    if ipo:
        return LOSSES["ipo"](pairs, beta=beta, reference_free=reference_free)
    return LOSSES["dpo"](pairs, beta=beta, label_smoothing=label_smoothing, reference_free=reference_free)
