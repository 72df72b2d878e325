"""What losses that look at single tokens are given beside the sums of log-probs: by `needs_tokens` of their input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from data.batching import MicroBatch
from modeling.scoring import sum_responses


@dataclass
class TokenNumbers:
    """Of the tokens of all responses of a micro-batch, [N] each.

    Attributes:
        policy, reference: log-probs; reference None where they need not be known token by token.
        numbers: what the input's `select` is given: sums over each response's tokens [K], or numbers of tokens [N].
    """

    policy: torch.Tensor
    reference: torch.Tensor | None
    numbers: tuple[torch.Tensor, ...]


def logps(policy, reference, batch: MicroBatch) -> TokenNumbers:
    own = policy.token_logps(batch)
    with torch.no_grad():
        theirs = reference.token_logps(batch)
    return TokenNumbers(own, theirs, (own, theirs))


def collisions(policy, reference, batch: MicroBatch) -> TokenNumbers:
    own, found = policy.token_collisions(batch)
    return TokenNumbers(own, None, (sum_responses(found, batch),))


def divergence(policy, reference, batch: MicroBatch) -> TokenNumbers:
    with torch.no_grad():
        distributions = reference.token_distributions(batch)
    own, found = policy.token_divergence(batch, distributions)
    theirs = distributions.gather(1, batch.targets[:, None]).squeeze(1)
    return TokenNumbers(own, theirs, (sum_responses(found, batch),))


TOKEN_NUMBERS: dict[str, Callable[..., TokenNumbers]] = {
    function.__name__: function for function in (logps, collisions, divergence)
}
