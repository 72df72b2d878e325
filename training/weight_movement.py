"""Whether low-precision weights move at all."""

from __future__ import annotations

import torch

from settings import Settings
from utils import World, gather_objects


class MovementWatch:
    """Measures what share of low-precision weights an optimizer really changes.

    A bfloat16 weight has 8 bits of mantissa: an update smaller than 1/256 of it is rounded away, and at preference
    learning's rates most are. Looked at once, over the first `after` updates.
    """

    UPDATES = 20

    def __init__(self, model: torch.nn.Module, after: int = UPDATES):
        self.left = after
        low = [p for p in model.parameters() if p.requires_grad and p.element_size() < 4]
        self.samples = [(p, self._part(p).clone()) for p in low]

    @staticmethod
    def _part(parameter: torch.Tensor) -> torch.Tensor:
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        return local.detach().flatten()[:4096]

    def update(self, config: Settings, world: World) -> str | None:
        """Called after each update by all ranks; once, when due, what the user should know if most weights stay."""
        if self.left == 0 or not self.samples:
            return None
        self.left -= 1
        if self.left:
            return None
        moved = sum(int((self._part(p) != before).sum()) for p, before in self.samples)
        looked_at = sum(before.numel() for _, before in self.samples)
        self.samples = []
        moved, looked_at = (sum(part) for part in zip(*gather_objects((moved, looked_at), world)))
        share = moved / max(1, looked_at)
        if share >= 0.5:
            return None
        return (
            f"Only {share:.1%} of the {config.model.policy_dtype} weights changed in the first {self.UPDATES} updates: "
            f"at lr={config.lr} most updates are rounded away. Use model.policy_dtype=float32 (with "
            "precision=bfloat16 to compute in bfloat16)."
        )
