"""The memory plan of a run (plan=true): what one rank needs, the verdict, and the same as text."""

from __future__ import annotations

from dataclasses import dataclass, field

from planning.batch_shape import BatchShape
from settings import Settings

GB = 1e9
# Share of a device's memory that the counted parts may take: the allocator leaves gaps between blocks of unlike size.
USABLE = 0.92


@dataclass
class Plan:
    """What one rank needs, in bytes.

    Attributes:
        batch: the micro-batch that is planned for.
        parts: {what: bytes} that are there at the same time when a pass is at its peak.
        step_parts: what the optimizer's step adds to the lasting parts once activations are gone.
        lasting: names of the parts that stay between passes.
        host: {what: bytes} in host memory (offloading).
        capacity: a device's bytes, None if not known. steps, tokens: of the whole run, None if not known.
        advice: what to change when it does not fit, best first: (settings, total bytes with them, fits).
    """

    model: str
    n_parameters: int
    world_size: int
    kind: str
    batch: BatchShape
    parts: dict[str, int]
    step_parts: dict[str, int]
    lasting: tuple[str, ...]
    host: dict[str, int]
    capacity: int | None
    notes: list[str] = field(default_factory=list)
    examples: int | None = None
    steps: int | None = None
    tokens: int | None = None
    data: str = "unknown: data not at hand"
    advice: list[tuple[str, int, bool]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The highest of a pass's peak and the optimizer step's."""
        stay = sum(self.parts[name] for name in self.lasting)
        return max(sum(self.parts.values()), stay + sum(self.step_parts.values()))

    @property
    def fits(self) -> bool | None:
        return None if self.capacity is None else self.total <= USABLE * self.capacity


def describe(config: Settings, plan: Plan) -> str:
    """The plan as text."""
    batch = plan.batch
    world = f"{plan.world_size} {'process' if plan.world_size == 1 else 'processes'} on {plan.kind}"
    lines = [
        f"Plan for {plan.model}, {plan.n_parameters / 1e6:,.1f} M parameters, {config.loss.name}, "
        f"{config.trainer}, {world}",
        "",
    ]
    unit = " + ".join([f"prompt {batch.prompt}", *map(str, batch.responses)])
    a_pass = f"{batch.tokens:,} tokens a pass: {batch.units} x ({unit})"
    what = {
        "parameters": config.model.policy_dtype,
        "gradients": "",
        "optimizer state": config.optimizer,
        "reference": "online"
        if plan.parts["reference"] or plan.host.get("reference")
        else "none beside the policy while training",
        "activations": a_pass,
        "logits": "a part of the vocabulary at a time",
        "communication": "what FSDP holds whole for a while",
        "buffers": "",
        "process": "assumed" if plan.kind != "cpu" else "Python and the libraries",
    }
    lines.append(f"{'A rank, at the peak of a pass':<32}{'GB':>10}")
    for name, size in plan.parts.items():
        note = f"   {what[name]}" if what[name] else ""
        lines.append(f"  {name:<30}{size / GB:>10.3f}{note}")
    lasting = sum(plan.parts[name] for name in plan.lasting)
    lines.append(f"  {'sum':<30}{sum(plan.parts.values()) / GB:>10.3f}")
    if plan.step_parts:
        more = " and ".join(f"{size / GB:.3f} of {name}" for name, size in plan.step_parts.items())
        step = lasting + sum(plan.step_parts.values())
        lines.append(f"  {'in the optimizer step instead':<30}{step / GB:>10.3f}   with {more}")
    if plan.host:
        lines.append(f"  {'host memory besides':<30}{sum(plan.host.values()) / GB:>10.3f}   {', '.join(plan.host)}")
    lines.append("")
    if plan.steps is None:
        lines.append(f"Steps and tokens: {plan.data}")
    else:
        lines.append(f"{plan.examples:,} examples, {plan.steps:,} steps, {plan.tokens:,} tokens ({plan.data})")
    if plan.capacity is None:
        lines.append(
            f"Needs {plan.total / GB:.2f} GB; the device's memory is not known: set plan_device_memory_gb, such as 80."
        )
    else:
        verdict = "fits" if plan.fits else "does NOT fit"
        lines.append(
            f"{verdict[0].upper()}{verdict[1:]}: {plan.total / GB:.2f} GB of {plan.capacity / GB:.2f} GB, of "
            f"which {USABLE:.0%} can be filled."
        )
    if plan.advice:
        lines.append("What to change:")
        for arguments, total, fits in plan.advice:
            lines.append(f"  {arguments}   {total / GB:.2f} GB{'' if fits else ', which is not enough by itself'}")
    elif plan.fits is False:
        lines.append("No setting helps: choose a smaller model, or devices with more memory.")
    notes = list(plan.notes)
    if plan.kind == "cpu":
        notes.append(
            "on Linux, freed memory is kept for the next pass, which is faster and not in this count; "
            "MALLOC_MMAP_THRESHOLD_=131072 in the environment gives it back and costs about a quarter of the speed"
        )
    return "\n".join([*lines, *(f"Note: {note}." for note in notes)])
