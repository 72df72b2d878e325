"""How a run's model is scored, found out by scoring a few rows in every way there is.

The measure is the model's own forward on one row at a time, without padding, mask or positions. It is taken on the
run's own weights, in the precision that it computes in, by all ranks together. Models that cannot share a prompt
between responses (ALiBi, recurrent, code with attention of its own) are scored one response a row; models that see
later tokens, or score a row differently beside others, are refused.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

import numpy as np
import torch

import private_apis
from data.batching import MicroBatch, PromptUnit, pack, pad
from modeling.attention import use_attention
from modeling.attention_kernels import candidates, is_packed
from modeling.blocks import find_blocks
from modeling.packed_layout import PackedLayout
from modeling.sharded import reshard_after_eval
from utils import World, gather_objects

SHORT = 8  # tokens of the response that stands beside the long rows
CAUSAL_ROW = 64  # tokens of the row that is tried for causality
LONGEST = 1536, 512  # tokens of a prompt and of a response that are tried: whole logits of one row must fit
# Kinds of layer whose attention packed rows reproduce (`layer_types` of a configuration).
ATTENTION_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Tolerance:
    """Relative differences of log-probs that rounding explains.

    Attributes:
        least, most: between two right ways of computing; in between, a few times what padded and single rows differ by.
        still: of scores that depend on nothing that was changed. Without experts they are the same to the last bit;
            experts compute the tokens they are given together, in other shapes when some of these change.
    """

    least: float
    most: float
    still: float

    def between(self, noise: float) -> float:
        return min(max(self.least, 10 * noise), self.most)


def tolerance_of(model, dtype: torch.dtype) -> Tolerance:
    names = {type(module).__name__.lower() for module in model.modules()}
    experts = any(part in name for name in names for part in ("expert", "moe"))
    if dtype in (torch.float32, torch.float64):
        return Tolerance(2e-5, 2e-4, 1e-4 if experts else 1e-6)
    return Tolerance(1e-2, 5e-2, 5e-2 if experts else 1e-5)


def choose_attention(
    model,
    unit: PromptUnit,
    wanted: str,
    pad_token_id: int,
    device,
    *,
    share_prefix: bool = True,
    dtype: torch.dtype | None = None,
    world: World | None = None,
) -> tuple[str, bool, str | None]:
    """The first attention kernel in order of preference that scores as the model itself does.

    Args:
        unit: a prompt with (if possible) several responses, as long as any of the run.
        wanted: model.attention of the config: a kernel's name, or "auto" for all that fit the device and the dtype.
        share_prefix: whether packed rows of the run share a prompt between its responses.
        dtype: that the model computes in; None for that of its parameters.
        world: the ranks that hold the model together; all call this, and get one answer.
    Returns: (kernel, full_forward, notice): the notice says why prompts are not shared, None if they are.
    Raises:
        ValueError: `wanted` names a packed kernel that this model cannot use; the model is not causal, or scores a row
            differently beside others.
    """
    dtype = dtype or next(model.parameters()).dtype
    check = _Check(model, unit, pad_token_id, device, share_prefix, dtype, world or World())
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return check.choose(wanted, candidates(torch.device(device).type, dtype))
    finally:
        reshard_after_eval(model)


class _Check:
    """A few rows, their true scores, and what other ways of scoring make of them. See `choose_attention`."""

    def __init__(self, model, unit: PromptUnit, pad_token_id: int, device, share_prefix: bool, dtype, world: World):
        self.model, self.pad_token_id, self.device = model, pad_token_id, device
        self.share_prefix, self.world = share_prefix, world
        self.name = type(model).__name__.removeprefix("FSDP")
        self.own = private_apis.attention_of(model.config)
        self.tolerance = tolerance_of(model, dtype)
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        prompt, responses = unit.prompt[-LONGEST[0] :], [response[: LONGEST[1]] for response in unit.responses[:2]]
        # Two responses and a short neighbour: what could leak from one to the other, or be chosen by the longest.
        self.long = PromptUnit(0, 0, prompt, responses, list(range(len(responses))))
        self.short = PromptUnit(0, 1, prompt[:1], [responses[0][:SHORT]], [0])

    def choose(self, wanted: str, automatic: list[str]) -> tuple[str, bool, str | None]:
        units = [self.long, self.short]
        use_attention(self.model, "plain", full_forward=True)
        self.require_causal()
        self.truth = torch.cat([self.score_alone(row) for row in _single_rows(units)])
        plain = pad(units, self.pad_token_id)
        assert plain is not None  # there are units
        self.noise = _difference(self.scores(plain), self.truth)
        self.require_independent_rows()
        kernels = automatic if wanted == "auto" else [wanted] if is_packed(wanted) else []
        reasons = []
        for kernel in kernels:
            problem = self.agreed(self.packed_problem(kernel))
            if problem is None:
                use_attention(self.model, kernel, windows=self.windows)
                return kernel, False, None
            reasons.append(f"{kernel}: {problem}")
        if reasons and wanted != "auto":
            raise ValueError(
                f"model.attention={wanted} does not work for {self.name} ({reasons[0]}). Use model.attention=auto."
            )
        full_forward = self.agreed(self.problem(plain, "plain")) is not None
        use_attention(self.model, "plain", full_forward)
        notice = None
        if reasons:
            notice = (
                f"{self.name} cannot share a prompt between responses ({'; '.join(reasons)}): "
                "scoring one response a row, which is right but slower."
            )
        return "plain", full_forward, notice

    # ---- The model

    def require_causal(self) -> None:
        """Other tokens in the second half of a row may not move the log-probs of the first."""
        tokens = np.concatenate([self.long.prompt, self.long.responses[0]])[:CAUSAL_ROW]
        half = len(tokens) // 2
        row = PromptUnit(0, 0, tokens[:1], [tokens[1:]], [0])
        other = PromptUnit(0, 0, tokens[:1], [np.concatenate([tokens[1:half], self.changed(tokens[half:])])], [0])
        before, again, after = (self.score_alone(one)[: half - 1] for one in (row, row, other))
        moved, noise = _difference(after, before), _difference(again, before)
        if any(gather_objects(moved > self.tolerance.still + 10 * noise, self.world)):
            raise ValueError(
                f"{self.name} is not causal: log-probs of tokens change by {moved:.1e} with the tokens after them, so "
                "it sees what it is to predict. Use a causal language model; for a BERT that was trained as a decoder "
                'set "is_decoder": true in its config.json.'
            )

    def require_independent_rows(self) -> None:
        worst = max(gather_objects(self.noise, self.world))
        if worst > 10 * self.tolerance.most:
            raise ValueError(
                f"{self.name} scores a row differently beside other rows (log-probs differ by {worst:.1e}): its losses "
                "would depend on how examples meet in a batch. Use a model that reads each row by itself."
            )

    # ---- Ways to score it

    def packed_problem(self, kernel: str) -> str | None:
        """What is wrong with packed rows under a kernel, in words; None if nothing."""
        if problem := structural_problem(self.model):
            return problem
        try:
            return self.problem(self.packed(self.long), kernel) or self.leak_problem()
        finally:
            if private_apis.attention_of(self.model.config) != self.own:
                self.model.set_attn_implementation(self.own)

    def problem(self, batch: MicroBatch, kernel: str) -> str | None:
        """What is wrong with scoring a batch under a kernel and the chunked head; None if nothing."""
        try:
            use_attention(self.model, kernel, full_forward=False)
            layout, batch = None, batch.to(self.device)
            if batch.trees is not None:
                layout = PackedLayout(batch.trees, batch.position_ids[0], kernel)
            self.found = self.scores(batch, layout)
            self.windows = layout.windows if layout is not None else ()
            difference = _difference(self.found, self.truth)
            if not difference < self.tolerance.between(self.noise):
                return f"log-probs differ by {difference:.1e}"
            if layout is not None:
                for block in find_blocks(self.model, None):
                    if layout.readers.isdisjoint(block.modules()):
                        return f"{type(block).__name__} passes tokens on without attention"
        except (
            ValueError,
            TypeError,
            RuntimeError,
            AttributeError,
            NotImplementedError,
            KeyError,
            IndexError,
        ) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}" if str(error) else repr(error)
        return None

    def leak_problem(self) -> str | None:
        """What is wrong if the scores just found move with the first response when they belong to others."""
        first, *others = self.long.responses
        other = replace(self.long, responses=[self.changed(first), *others])
        moved = _difference(self.scores(self.packed(other))[len(first) :], self.found[len(first) :])
        return f"log-probs change by {moved:.1e} with other responses" if moved > self.tolerance.still else None

    def packed(self, long: PromptUnit) -> MicroBatch:
        batch = pack([long, self.short], self.share_prefix)
        assert batch is not None
        return batch

    def score_alone(self, row: PromptUnit) -> torch.Tensor:
        """Log-probs [n] of a unit's one response: the model reads this row only, and token ids only."""
        batch = pad([row], self.pad_token_id)
        assert batch is not None
        return self.scores(replace(batch, attention_mask=None))

    def scores(self, batch: MicroBatch, layout: PackedLayout | None = None) -> torch.Tensor:
        return self.model.token_logps(batch.to(self.device), layout).float()

    def changed(self, tokens: np.ndarray) -> np.ndarray:
        """As many other tokens."""
        return ((tokens + 1) % self.vocabulary).astype(tokens.dtype)

    def agreed(self, problem: str | None) -> str | None:
        """The first problem that any rank has found."""
        return next((found for found in gather_objects(problem, self.world) if found), None)


def structural_problem(model) -> str | None:
    """Why a model cannot share prompts by its structure: no positions, or what passes tokens on beside attention.

    Its terms may be small in a new model, or in low precision, and not show in scores. Returns words, or None.
    """
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return "it takes no positions"
    if private_apis.is_recurrent(model):
        return "it keeps a state from token to token"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - {*ATTENTION_KINDS}
    if kinds:
        return f"it has layers of kind {', '.join(sorted(map(str, kinds)))}"
    mixers = [
        module
        for block in find_blocks(model, None)
        for module in block.modules()
        if isinstance(module, (torch.nn.Conv1d, torch.nn.RNNBase))
    ]
    return f"its {type(mixers[0]).__name__} passes tokens on" if mixers else None


def _single_rows(units: list[PromptUnit]) -> list[PromptUnit]:
    return [replace(unit, responses=[r], response_ids=[0], pairs=[]) for unit in units for r in unit.responses]


def _difference(found: torch.Tensor, truth: torch.Tensor) -> float:
    """|found - truth| / |truth|, by token, so that errors of opposite sign cannot hide in a sum."""
    return ((found - truth).norm() / truth.norm().clamp(min=1.0)).item()
