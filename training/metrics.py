"""Metrics as sums and counts over distinct examples: added up over micro-batches, reduced over ranks once, divided last."""

from __future__ import annotations

import torch

from losses import PairLogps, reward_accuracies

# The columns of a metric matrix [examples, columns]; `{}` becomes train or eval.
PREFERENCE_METRICS = (
    "loss/{}",
    "rewards_{}/chosen",
    "rewards_{}/rejected",
    "rewards_{}/accuracies",
    "rewards_{}/margins",
    "logps_{}/chosen",
    "logps_{}/rejected",
    "lengths_{}/chosen",
    "lengths_{}/rejected",
)
SFT_METRICS = ("loss/{}", "logps_{}/chosen", "lengths_{}/chosen")


def preference_columns(
    losses: torch.Tensor, pairs: PairLogps, chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor
) -> torch.Tensor:
    """PREFERENCE_METRICS of E pairs, [E, 9], without gradient."""
    return _columns(
        losses,
        chosen_rewards,
        rejected_rewards,
        reward_accuracies(chosen_rewards, rejected_rewards),
        chosen_rewards - rejected_rewards,
        pairs.policy_chosen,
        pairs.policy_rejected,
        pairs.chosen_lengths,
        pairs.rejected_lengths,
    )


def sft_columns(losses: torch.Tensor, logps: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """SFT_METRICS of E responses, [E, 3], without gradient."""
    return _columns(losses, logps, lengths)


def _columns(*columns: torch.Tensor) -> torch.Tensor:
    return torch.stack([column.detach().float() for column in columns], dim=1)


class MetricAccumulator:
    """Sums of metrics for each data set of a split, and how many examples they are of.

    Args:
        split: "train" or "eval"; datasets: the split's data sets; names: PREFERENCE_METRICS or SFT_METRICS.

    Attributes:
        sums: [data sets, metrics + 1]; the last column counts.
    """

    def __init__(self, split: str, datasets: list, names: tuple[str, ...], device: torch.device):
        self.split, self.datasets, self.names = split, datasets, names
        precision = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(len(datasets), len(names) + 1, device=device, dtype=precision)

    def add(self, batch, columns: torch.Tensor) -> None:
        """Take in a micro-batch's metric matrix."""
        rows = torch.cat([columns, torch.ones_like(columns[:, :1])], dim=1).to(self.sums.dtype)
        # A product with a one-hot matrix adds in a fixed order, which index_add on a GPU would not.
        members = torch.nn.functional.one_hot(batch.datasets, len(self.sums)).to(self.sums.dtype)
        self.sums += members.T @ rows

    def by_name(self, total: torch.Tensor) -> dict[str, tuple[float, float]]:
        """Metric name -> (sum, count), of all data sets together and, if there are several, of each.

        Args:
            total: `sums` of all ranks, on the host.
        """
        parts = [("", total.sum(0))]
        if len(total) > 1:
            parts += [(f"/{dataset.name}", row) for dataset, row in zip(self.datasets, total)]
        named = {}
        for suffix, row in parts:
            *values, count = row.tolist()
            if count:
                named |= {name.format(self.split) + suffix: (value, count) for name, value in zip(self.names, values)}
        return named
