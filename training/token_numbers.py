"""What losses that look at single tokens are given beside the sums of log-probs: by `needs_tokens` of their input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from data.batching import MicroBatch


@dataclass
class TokenNumbers:
    """Of the tokens of all responses of a micro-batch, [N] each.

    Attributes:
        policy, reference: log-probs; reference None where they need not be known token by token.
        numbers: what the input's `select` is given.
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
    return TokenNumbers(own, None, (found,))


def divergence(policy, reference, batch: MicroBatch) -> TokenNumbers:
    with torch.no_grad():
        distributions = reference.token_distributions(batch)
    own, found = policy.token_divergence(batch, distributions)
    theirs = distributions.gather(1, batch.targets[:, None]).squeeze(1)
    return TokenNumbers(own, theirs, (found,))


TOKEN_NUMBERS: dict[str, Callable[..., TokenNumbers]] = {
    function.__name__: function for function in (logps, collisions, divergence)
}


def sum_responses(tokens: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sums [K] over the tokens [N] of each response."""
    return torch.stack([part.sum() for part in tokens.split(batch.lengths_list)])
