"""What a loss is given. The first argument of a loss is annotated with one of these classes, which declares its input.

Each class names its example: what a step counts, what `batch_size` is made of, and what one entry of the returned
losses belongs to. `select` takes a class's tensors out of the log-probs of a MicroBatch (data/batching.py); of a class
with `needs_tokens` it is given numbers of tokens, too, which training/token_numbers.py makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from utils import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

# A metric of E examples: values [E], or values and weights [E] where it is of some examples only.
Metric: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


@dataclass
class ResponseLogps:
    """Summed log-probs of E responses (nats) and their lengths (tokens); tensors [E]. An example is one response."""

    policy: torch.Tensor
    lengths: torch.Tensor

    kind: ClassVar[str] = "responses"
    example: ClassVar[str] = "responses"
    own_metrics: ClassVar[tuple[str, ...]] = ("logps/chosen", "lengths/chosen")
    has_chosen: ClassVar[bool] = False  # beside others, so that loss.sft_weight has a meaning
    needs_scores: ClassVar[bool] = False
    needs_tokens: ClassVar[str] = ""
    reference_by_token: ClassVar[bool] = False  # so that its log-probs of whole responses do not suffice

    @classmethod
    def select(cls, policy: torch.Tensor, reference: torch.Tensor, batch, tokens=()) -> ResponseLogps:
        """From log-probs [K] of a micro-batch's responses."""
        chosen = batch.pairs[:, 0]
        return cls(policy[chosen], batch.lengths[chosen])

    @property
    def n_examples(self) -> int:
        return len(self.policy)

    def metrics(self) -> dict[str, Metric]:
        """Values of `own_metrics`."""
        return {"logps/chosen": self.policy, "lengths/chosen": self.lengths}


@dataclass
class PairLogps:
    """Summed response log-probs of E pairs (nats) and response lengths (tokens); tensors [E]. An example is a pair."""

    policy_chosen: torch.Tensor
    policy_rejected: torch.Tensor
    reference_chosen: torch.Tensor
    reference_rejected: torch.Tensor
    chosen_lengths: torch.Tensor
    rejected_lengths: torch.Tensor

    kind: ClassVar[str] = "pairs"
    example: ClassVar[str] = "pairs"
    own_metrics: ClassVar[tuple[str, ...]] = ("logps/chosen", "logps/rejected", "lengths/chosen", "lengths/rejected")
    has_chosen: ClassVar[bool] = True
    needs_scores: ClassVar[bool] = False
    needs_tokens: ClassVar[str] = ""
    reference_by_token: ClassVar[bool] = False  # so that its log-probs of whole responses do not suffice

    @classmethod
    def select(cls, policy: torch.Tensor, reference: torch.Tensor, batch, tokens=()) -> PairLogps:
        """From log-probs [K] of a micro-batch's responses."""
        chosen, rejected = batch.pairs[:, 0], batch.pairs[:, 1]
        return cls(
            policy[chosen],
            policy[rejected],
            reference[chosen],
            reference[rejected],
            batch.lengths[chosen],
            batch.lengths[rejected],
        )

    def chosen_nll(self) -> tuple[torch.Tensor, None]:
        """Mean negative log-likelihood of the chosen response's tokens, [E] with gradient, of all examples."""
        return -self.policy_chosen / self.chosen_lengths, None

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

    def rewards(self, beta: float) -> dict[str, Metric]:
        """Metrics of the implicit rewards beta * log(policy / reference), up to a constant of the prompt (arXiv
        2305.18290, eq. 5): chosen, rejected, accuracies (a tie counts one half), margins; without gradient."""
        chosen = beta * (self.policy_chosen - self.reference_chosen).detach()
        rejected = beta * (self.policy_rejected - self.reference_rejected).detach()
        return {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": reward_accuracies(chosen, rejected),
            "rewards/margins": chosen - rejected,
        }

    @property
    def n_examples(self) -> int:
        return len(self.policy_chosen)

    def metrics(self) -> dict[str, Metric]:
        """Values of `own_metrics`."""
        return {
            "logps/chosen": self.policy_chosen,
            "logps/rejected": self.policy_rejected,
            "lengths/chosen": self.chosen_lengths,
            "lengths/rejected": self.rejected_lengths,
        }


@dataclass
class ScoredPairLogps(PairLogps):
    """The same with the scores that the data give the responses: `chosen_scores`, `rejected_scores` [E]."""

    chosen_scores: torch.Tensor
    rejected_scores: torch.Tensor

    needs_scores: ClassVar[bool] = True

    @classmethod
    def select(cls, policy: torch.Tensor, reference: torch.Tensor, batch, tokens=()) -> ScoredPairLogps:
        """From log-probs [K] of a micro-batch's responses."""
        own = PairLogps.select(policy, reference, batch)
        chosen, rejected = batch.pairs[:, 0], batch.pairs[:, 1]
        return cls(**vars(own), chosen_scores=batch.scores[chosen], rejected_scores=batch.scores[rejected])


@dataclass
class FrontPairLogps(PairLogps):
    """The same, and the log-probs of each response's first n tokens, n the length of the pair's shorter one; [E]."""

    policy_chosen_front: torch.Tensor
    policy_rejected_front: torch.Tensor
    reference_chosen_front: torch.Tensor
    reference_rejected_front: torch.Tensor

    needs_tokens: ClassVar[str] = "logps"
    reference_by_token: ClassVar[bool] = True

    @classmethod
    def select(cls, policy: torch.Tensor, reference: torch.Tensor, batch, tokens=()) -> FrontPairLogps:
        """tokens: log-probs [N] of the tokens of all responses under the policy, and under the reference."""
        own = PairLogps.select(policy, reference, batch)
        lengths = batch.lengths.long()
        first = lengths.cumsum(0) - lengths
        shorter = lengths[batch.pairs].amin(dim=1)
        fronts = []
        for of_model in tokens:
            # In float64, or differences of sums over a whole micro-batch would show its rounding.
            sums = torch.nn.functional.pad(of_model.double().cumsum(0), (1, 0))
            for side in (0, 1):
                start = first[batch.pairs[:, side]]
                fronts.append((sums[start + shorter] - sums[start]).to(of_model.dtype))
        return cls(*vars(own).values(), *fronts)


@dataclass
class CollisionPairLogps(PairLogps):
    """The same, and the sum over each response's tokens of log sum_v p(v)^2 under the policy, [E] without gradient: the
    log of the probability that two tokens drawn there are the same one."""

    chosen_collision: torch.Tensor
    rejected_collision: torch.Tensor

    needs_tokens: ClassVar[str] = "collisions"

    @classmethod
    def select(cls, policy: torch.Tensor, reference: torch.Tensor, batch, tokens=()) -> CollisionPairLogps:
        """tokens: the log of that probability, summed over each response's tokens, [K]."""
        (collision,) = tokens
        own = PairLogps.select(policy, reference, batch)
        chosen, rejected = batch.pairs[:, 0], batch.pairs[:, 1]
        return cls(**vars(own), chosen_collision=collision[chosen], rejected_collision=collision[rejected])


@dataclass
class DivergencePairLogps(PairLogps):
    """The same, and the sum over each response's tokens of the KL divergence of the policy's distribution from the
    reference's, KL(reference || policy), [E] with gradient."""

    chosen_divergence: torch.Tensor
    rejected_divergence: torch.Tensor

    needs_tokens: ClassVar[str] = "divergence"
    reference_by_token: ClassVar[bool] = True

    @classmethod
    def select(cls, policy: torch.Tensor, reference: torch.Tensor, batch, tokens=()) -> DivergencePairLogps:
        """tokens: the divergence, summed over each response's tokens, [K]."""
        (divergence,) = tokens
        own = PairLogps.select(policy, reference, batch)
        chosen, rejected = batch.pairs[:, 0], batch.pairs[:, 1]
        return cls(**vars(own), chosen_divergence=divergence[chosen], rejected_divergence=divergence[rejected])


@dataclass
class UnpairedLogps:
    """Summed log-probs of E responses (nats), each labelled good or bad by itself; tensors [E], `desirable` boolean.

    An example is one labelled response. Of preference pairs, a chosen response is a desirable example and a rejected
    one an undesirable one, each once however many pairs it is in.
    """

    policy: torch.Tensor
    reference: torch.Tensor
    desirable: torch.Tensor
    lengths: torch.Tensor

    kind: ClassVar[str] = "unpaired"
    example: ClassVar[str] = "responses"
    own_metrics: ClassVar[tuple[str, ...]] = ("logps/chosen", "logps/rejected", "lengths/chosen", "lengths/rejected")
    has_chosen: ClassVar[bool] = True
    needs_scores: ClassVar[bool] = False
    needs_tokens: ClassVar[str] = ""
    reference_by_token: ClassVar[bool] = False  # so that its log-probs of whole responses do not suffice

    @classmethod
    def select(cls, policy: torch.Tensor, reference: torch.Tensor, batch, tokens=()) -> UnpairedLogps:
        """From log-probs [K] of a micro-batch's responses; an example is (k, -1) if good, (-1, k) if bad."""
        desirable = batch.pairs[:, 0] >= 0
        response = torch.where(desirable, batch.pairs[:, 0], batch.pairs[:, 1])
        return cls(policy[response], reference[response], desirable, batch.lengths[response])

    def chosen_nll(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean negative log-likelihood of a good response's tokens, [E] with gradient and 0 for a bad one; and whether
        it is a good one, as 1 or 0."""
        good = self.desirable.to(self.policy.dtype)
        return -good * self.policy / self.lengths, good

    def rewards(self, beta: float) -> dict[str, Metric]:
        """Metrics of the implicit rewards beta * log(policy / reference), good and bad responses apart; no gradient."""
        reward = beta * (self.policy - self.reference).detach()
        good = self.desirable.to(reward.dtype)
        return {"rewards/chosen": (reward, good), "rewards/rejected": (reward, 1 - good)}

    @property
    def n_examples(self) -> int:
        return len(self.policy)

    def metrics(self) -> dict[str, Metric]:
        """Values of `own_metrics`."""
        good = self.desirable.to(self.policy.dtype)
        return {
            "logps/chosen": (self.policy, good),
            "logps/rejected": (self.policy, 1 - good),
            "lengths/chosen": (self.lengths, good),
            "lengths/rejected": (self.lengths, 1 - good),
        }


@dataclass
class UnpairedWithMismatched(UnpairedLogps):
    """The same, and M responses scored after prompts that they do not belong to: what the KL divergence from the
    reference is estimated with (KTO, arXiv 2402.01306). One for each prompt of the step.

    Attributes:
        mismatched_policy, mismatched_reference: [M], summed log-probs (nats).
    """

    mismatched_policy: torch.Tensor
    mismatched_reference: torch.Tensor

    kind: ClassVar[str] = "unpaired_mismatched"

    @classmethod
    def select(cls, policy: torch.Tensor, reference: torch.Tensor, batch, tokens=()) -> UnpairedWithMismatched:
        """From log-probs [K] of a micro-batch's responses."""
        own = UnpairedLogps.select(policy, reference, batch)
        return cls(
            **vars(own), mismatched_policy=policy[batch.mismatched], mismatched_reference=reference[batch.mismatched]
        )

    def kl(self, beta: float) -> torch.Tensor:
        """beta times the estimated KL divergence of the policy from the reference, at least 0; [] without gradient."""
        return (beta * (self.mismatched_policy - self.mismatched_reference).detach().mean()).clamp(min=0)


@dataclass
class GroupLogps:
    """Summed log-probs (nats) of all K responses of E prompts, and which of them were preferred to which.

    An example is one prompt with all its responses.

    Attributes:
        policy, reference, lengths: [K]; group: int64 [K], the prompt (0..E-1) of each response.
        preferences: int64 [P, 2], (preferred, other) indices into the responses, always of one prompt.
        scores: [K], as the data rate each response; NaN where they do not.
        n_groups: E.
    """

    policy: torch.Tensor
    reference: torch.Tensor
    lengths: torch.Tensor
    group: torch.Tensor
    preferences: torch.Tensor
    scores: torch.Tensor
    n_groups: int

    kind: ClassVar[str] = "group"
    example: ClassVar[str] = "prompts"
    own_metrics: ClassVar[tuple[str, ...]] = ("logps/responses", "lengths/responses")
    has_chosen: ClassVar[bool] = True  # the best ones
    needs_scores: ClassVar[bool] = False
    needs_tokens: ClassVar[str] = ""
    reference_by_token: ClassVar[bool] = False  # so that its log-probs of whole responses do not suffice

    @classmethod
    def select(cls, policy: torch.Tensor, reference: torch.Tensor, batch, tokens=()) -> GroupLogps:
        """From log-probs [K] of a micro-batch's responses."""
        return cls(policy, reference, batch.lengths, batch.group, batch.preferences, batch.scores, len(batch.pairs))

    def sum_by_group(self, values: torch.Tensor, group: torch.Tensor | None = None) -> torch.Tensor:
        """Sums [E] of values over the responses (or what else `group` says belongs to which prompt) of each prompt."""
        members = self.group if group is None else group
        # A product with a one-hot matrix adds in a fixed order, which index_add on a GPU would not.
        return values @ torch.nn.functional.one_hot(members, self.n_groups).to(values.dtype)

    def chosen_nll(self) -> tuple[torch.Tensor, None]:
        """Mean negative log-likelihood of the tokens of a prompt's best response, [E] with gradient: of those to which
        none is preferred, the mean where there are several."""
        worse = torch.zeros_like(self.policy).index_fill(0, self.preferences[:, 1], 1.0)
        better = torch.zeros_like(self.policy).index_fill(0, self.preferences[:, 0], 1.0)
        best = better * (1 - worse)
        return self.sum_by_group(-best * self.policy / self.lengths) / self.sum_by_group(best).clamp(min=1), None

    @property
    def n_examples(self) -> int:
        return self.n_groups

    def metrics(self) -> dict[str, Metric]:
        """Values of `own_metrics`: the mean over a prompt's responses."""
        count = self.sum_by_group(torch.ones_like(self.policy)).clamp(min=1)
        return {
            "logps/responses": self.sum_by_group(self.policy) / count,
            "lengths/responses": self.sum_by_group(self.lengths) / count,
        }


@dataclass
class ScoredGroupLogps(GroupLogps):
    """The same of prompts whose responses all have a score."""

    needs_scores: ClassVar[bool] = True


INPUTS = (
    ResponseLogps,
    PairLogps,
    ScoredPairLogps,
    FrontPairLogps,
    CollisionPairLogps,
    DivergencePairLogps,
    UnpairedLogps,
    UnpairedWithMismatched,
    GroupLogps,
    ScoredGroupLogps,
)
Inputs: TypeAlias = ResponseLogps | PairLogps | UnpairedLogps | GroupLogps


def reward_accuracies(chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor) -> torch.Tensor:
    """1 where the chosen response has the higher reward, 0 where the lower, one half for a tie: [E] -> [E]."""
    return ((chosen_rewards > rejected_rewards).float() + (chosen_rewards >= rejected_rewards).float()) / 2
