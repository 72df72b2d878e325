"""Supervised fine-tuning."""

from __future__ import annotations

from losses.inputs import ResponseLogps
from losses.registry import LossOutput, register_loss


@register_loss("sft")
def sft(responses: ResponseLogps) -> LossOutput:
    """Negative log-likelihood of a response, summed over its tokens: losses [E]."""
    return LossOutput(-responses.policy)
