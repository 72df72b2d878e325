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
LabelSmoothing = Annotated[float, Option("share of swapped labels", low=0, high=0.4999999999999999)]
LN2 = Start(math.log(2), "ln 2")


def log_ratios(pairs: PairLogps, reference_free: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """log(policy / reference) of the chosen and of the rejected responses, [E] each (nats)."""
    if reference_free:
        return pairs.policy_chosen, pairs.policy_rejected
    return pairs.policy_chosen - pairs.reference_chosen, pairs.policy_rejected - pairs.reference_rejected


def smoothed_logistic(logits: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """-log sigmoid(logits), of labels that are swapped with this probability: [E] -> [E]."""
    return -F.logsigmoid(logits) * (1 - label_smoothing) - F.logsigmoid(-logits) * label_smoothing


@register_loss("dpo", start=lambda **_: LN2)
def dpo(
    pairs: PairLogps,
    *,
    beta: Beta,
    label_smoothing: LabelSmoothing = 0.0,
    reference_free: ReferenceFree = False,
    f_divergence: Annotated[
        Literal["reverse_kl", "forward_kl", "js", "alpha"], Option("how distance to the reference is measured")
    ] = "reverse_kl",
    alpha: Annotated[
        float, Option("order of the alpha-divergence", low=0, high=1, open=True, only_with=("f_divergence", "alpha"))
    ] = 0.5,
) -> LossOutput:
    """Direct preference optimisation (arXiv 2305.18290, eq. 7): -log sigmoid(beta h).

    h is the policy's log-ratio of chosen to rejected less the reference's.

    Args:
        beta: strength of the implicit KL penalty, > 0.
        label_smoothing: probability that a preference label is flipped, in [0, 0.5): conservative DPO
            (Mitchell, "A note on DPO with noisy preferences", eq. 3).
        reference_free: take a reference that gives every response the same probability.
        f_divergence: whose derivative takes the place of the log-ratio (f-DPO, arXiv 2309.16240, table 1).
        alpha: of the alpha-divergence, between the forward KL (1) and the reverse KL (0).
    Returns: losses [E]; rewards are beta * log(policy / reference).
    Raises:
        ValueError: an unknown f_divergence.
    """
    chosen, rejected = (divergence_score(ratio, f_divergence, alpha) for ratio in log_ratios(pairs, reference_free))
    return LossOutput(smoothed_logistic(beta * (chosen - rejected), label_smoothing), pairs.rewards(beta))


def divergence_score(log_ratio: torch.Tensor, f_divergence: str, alpha: float) -> torch.Tensor:
    """f'(u) of u = policy / reference without its constant, which cancels between chosen and rejected: [E] -> [E]."""
    if f_divergence == "reverse_kl":
        return log_ratio
    if f_divergence == "js":
        return log_ratio - F.softplus(log_ratio)  # log(u / (1 + u))
    if f_divergence == "forward_kl":
        return -bounded_exp(-log_ratio)
    if f_divergence == "alpha":
        return -bounded_exp(-alpha * log_ratio) / alpha
    raise ValueError(f"loss.f_divergence={f_divergence!r} is not known; choose reverse_kl, forward_kl, js or alpha.")


def bounded_exp(exponent: torch.Tensor, limit: float = 30.0) -> torch.Tensor:
    """exp, continued beyond `limit` by its tangent there: neither value nor gradient overflows, and none vanishes."""
    inner = exponent.clamp(max=limit)
    return inner.exp() * (1 + exponent - inner)


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


@register_loss("hinge", start=lambda margin=1.0, **_: Start(margin, "loss.margin"))
def hinge(
    pairs: PairLogps,
    *,
    beta: Beta,
    margin: Annotated[float, Option("wanted reward margin", low=0, open=True)] = 1.0,
    reference_free: ReferenceFree = False,
) -> LossOutput:
    """Hinge loss on DPO's logits (SLiC-HF, arXiv 2305.10425, eq. 3; as in RSO, arXiv 2309.06657, section 3):
    max(0, margin - beta h).

    Returns: losses [E], as for `dpo`.
    """
    chosen, rejected = log_ratios(pairs, reference_free)
    return LossOutput(F.relu(margin - beta * (chosen - rejected)), pairs.rewards(beta))


@register_loss("robust", start=lambda **_: LN2)
def robust(pairs: PairLogps, *, beta: Beta, label_smoothing: LabelSmoothing) -> LossOutput:
    """DPO whose mean over noisy labels is that over true ones (robust DPO, arXiv 2403.00409).

    Args:
        label_smoothing: probability that a preference label is flipped, in [0, 0.5).
    Returns: losses [E], which may be negative.
    """
    chosen, rejected = log_ratios(pairs)
    logits = beta * (chosen - rejected)
    right, swapped = -F.logsigmoid(logits), -F.logsigmoid(-logits)
    losses = ((1 - label_smoothing) * right - label_smoothing * swapped) / (1 - 2 * label_smoothing)
    return LossOutput(losses, pairs.rewards(beta))


def _exo_start(label_smoothing: float, **_) -> Start:
    return Start(-math.log(2) - math.log(label_smoothing * (1 - label_smoothing)) / 2, "KL((½, ½), (1−ε, ε))")


@register_loss("exo", start=_exo_start)
def exo(
    pairs: PairLogps,
    *,
    beta: Beta,
    label_smoothing: Annotated[float, Option("share of swapped labels", low=0, high=0.5, open=True)] = 1e-3,
) -> LossOutput:
    """Efficient exact optimisation of pairs (arXiv 2402.00856, eq. 16): the reverse KL from the policy's preference,
    sigmoid(beta h), to the label's, 1 - label_smoothing.

    Args:
        label_smoothing: in (0, 0.5); with 0 the loss would be infinite.
    Returns: losses [E].
    """
    chosen, rejected = log_ratios(pairs)
    logits = beta * (chosen - rejected)
    right = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-label_smoothing))
    swapped = torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(label_smoothing))
    return LossOutput(right + swapped, pairs.rewards(beta))


@register_loss("nca", start=lambda **_: Start(2 * math.log(2), "2 ln 2"))
def nca(pairs: PairLogps, *, beta: Beta) -> LossOutput:
    """Noise contrastive alignment of pairs (arXiv 2402.05369): the chosen reward is
    raised by itself, not only against the rejected one.

    Returns: losses [E].
    """
    chosen, rejected = (beta * ratio for ratio in log_ratios(pairs))
    losses = -F.logsigmoid(chosen) - (F.logsigmoid(-chosen) + F.logsigmoid(-rejected)) / 2
    return LossOutput(losses, pairs.rewards(beta))


@register_loss("sppo", start=lambda beta, **_: Start(1 / (2 * beta**2), "1 / (2 beta²)"))
def sppo(pairs: PairLogps, *, beta: Beta) -> LossOutput:
    """Self-play preference optimisation with hard labels (arXiv 2405.00675, eq. 4.7, eta = 1 / beta): the log-ratio of
    the chosen response is drawn to 1 / (2 beta), that of the rejected one to -1 / (2 beta).

    Returns: losses [E].
    """
    chosen, rejected = log_ratios(pairs)
    return LossOutput((chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2, pairs.rewards(beta))


@register_loss("cal_dpo", start=lambda beta, **_: Start(math.log(2) + 1 / (2 * beta**2), "ln 2 + 1 / (2 beta²)"))
def cal_dpo(pairs: PairLogps, *, beta: Beta) -> LossOutput:
    """Calibrated DPO (arXiv 2412.14516): -log sigmoid(h), and each log-ratio drawn to +-1 / (2 beta), so that
    the chosen response's probability does not fall.

    Returns: losses [E]; rewards are beta * log(policy / reference).
    """
    chosen, rejected = log_ratios(pairs)
    calibration = (chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2
    return LossOutput(-F.logsigmoid(chosen - rejected) + calibration, pairs.rewards(beta))


@register_loss("apo_zero", start=lambda **_: Start(1.0, "½ + ½"))
def apo_zero(pairs: PairLogps, *, beta: Beta) -> LossOutput:
    """Anchored preference optimisation, zero (arXiv 2408.06266, eq. 7): chosen up, rejected down. For chosen responses
    that are better than the model's own.

    Returns: losses [E].
    """
    chosen, rejected = (beta * ratio for ratio in log_ratios(pairs))
    return LossOutput(torch.sigmoid(-chosen) + torch.sigmoid(rejected), pairs.rewards(beta))


@register_loss("apo_down", start=lambda **_: Start(1.0, "½ + ½"))
def apo_down(pairs: PairLogps, *, beta: Beta) -> LossOutput:
    """Anchored preference optimisation, down (arXiv 2408.06266, eq. 8): chosen down, rejected down further. For chosen
    responses that are worse than the model's own.

    Returns: losses [E].
    """
    chosen, rejected = (beta * ratio for ratio in log_ratios(pairs))
    return LossOutput(torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen), pairs.rewards(beta))


@register_loss("discopop", start=lambda **_: Start((math.log(2) + 1) / 2, "(ln 2 + 1) / 2"))
def discopop(
    pairs: PairLogps,
    *,
    beta: Beta,
    tau: Annotated[float, Option("width of the blend", low=0, high=0.9999999999, open=True)] = 0.05,
) -> LossOutput:
    """Discovered preference optimisation (arXiv 2406.08414, eq. 5): DPO's loss and exp(-beta h), blended by
    sigmoid(beta h / tau).

    Args:
        tau: in (0, 1): from 1 on the loss of a wrong pair would not be finite.
    Returns: losses [E].
    """
    chosen, rejected = log_ratios(pairs)
    logits = beta * (chosen - rejected)
    # The factor of exp(-logits) goes into its exponent: apart, 0 times infinity would come of a large wrong margin.
    exponential = torch.exp(F.logsigmoid(logits / tau) - logits)
    return LossOutput(-F.logsigmoid(logits) * torch.sigmoid(-logits / tau) + exponential, pairs.rewards(beta))


@register_loss("dpo_norm", start=lambda **_: LN2)
def dpo_norm(pairs: PairLogps, *, beta: Beta, label_smoothing: LabelSmoothing = 0.0) -> LossOutput:
    """Length-normalised DPO (Tulu 3, arXiv 2411.15124, eq. 6): DPO on log-probs averaged over tokens.

    Returns: losses [E]; rewards are of the averaged log-probs.
    """
    return dpo(pairs.averaged(), beta=beta, label_smoothing=label_smoothing)


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
