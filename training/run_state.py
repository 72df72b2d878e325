"""Where a run is: what its checkpoints keep beside weights and optimizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from settings import Settings


@dataclass
class TrainState:
    """Where a run is.

    Attributes:
        examples, updates: trained on and made so far; skipped: steps that were not finite.
        step_number: the next step's number; it grows at skipped steps too, which make no update.
        evaluated_at, saved_at: the step_number at which the last evaluation, and the last save, were made.
        last_eval: the last evaluation's metrics; reference_samples: what the reference wrote, once it did.
        loss_memory: what a step-wide loss keeps from step to step. stream: where a streamed run's window starts.
    """

    examples: int = 0
    updates: int = 0
    step_number: int = 0
    skipped: int = 0
    evaluated_at: int | None = None
    saved_at: int | None = None
    last_eval: dict[str, float] = field(default_factory=dict)
    reference_samples: list[str] | None = None
    loss_memory: dict[str, float] = field(default_factory=dict)
    stream: dict | None = None

    def has_passed(self, every: int, done_at: int | None, sampler) -> bool:
        """Whether the last step passed a multiple of `every` examples and what is due then was not done yet."""
        if self.step_number == 0 or done_at == self.step_number or self.step_number == sampler.n_steps:
            return False
        return self.examples // every > sampler.examples_before(self.step_number - 1) // every

    def evaluation_due(self, config: Settings, sampler, last: bool) -> bool:
        """Whether to evaluate now: every `eval_every` examples, before the first step if asked for, and at the end."""
        first = self.step_number == 0 and config.do_first_eval and self.evaluated_at is None
        at_end = last and self.evaluated_at != self.step_number
        return first or at_end or self.has_passed(config.eval_every, self.evaluated_at, sampler)

    def as_dict(self) -> dict:
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    @classmethod
    def of(cls, content: dict) -> TrainState:
        """The state that `as_dict` gave, among other entries."""
        # Checkpoints of earlier versions lack what came later.
        return cls(**{each.name: content[each.name] for each in dataclasses.fields(cls) if each.name in content})
