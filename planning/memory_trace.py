"""Counts the memory of a pass without making it: shapes of parameters, peaks of activations, states of optimizers.

The model is built with its true widths from tensors that have a shape and no content, and a pass of the run itself (the
packed rows, the scoring, the backward pass) is carried out on them while every tensor that comes and goes is counted.
So the figures follow whatever the code does, and no table of constants per architecture has to be kept. Models with
many blocks are traced with few and the rest is added in proportion; a big micro-batch likewise.

What is not seen: buffers inside kernels (but for those in `_INSIDE_KERNELS`) and the allocator's fragments.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import weakref
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

import private_apis
from data.batching import PromptUnit, pack, pad
from modeling import attention, head
from modeling.blocks import checkpoint_activations, find_blocks

# Kernels that need room of their own, beyond what they return: bytes of temporaries as a function of their arguments.
_INSIDE_KERNELS = {torch.ops.aten.logsumexp.default: lambda args: args[0].numel() * args[0].element_size()}
PHASES = ("forward", "reference", "head", "late blocks", "early blocks")


# ---------------------------------------------------------------------------------------------------------------------
# Counting live bytes


class LiveBytes(private_apis.dispatch_mode()):
    """Counts the bytes of all tensors created while it is on, and their highest sum in each phase.

    Args:
        known: tensors made before, such as parameters, which are not counted when a view of them comes up.
    Attributes:
        live: bytes alive now; peaks: {phase: highest `live` seen while that phase was the current one}.
    """

    def __init__(self, known=(), phase: str = "forward"):
        super().__init__()
        self.live, self.phase = 0, phase
        self.peaks: dict[str, int] = {phase: 0}
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def enter(self, phase: str) -> None:
        """What is counted from now on belongs to `phase`."""
        self.phase = phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.live)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            # A DTensor is a shell around this rank's part.
            storage = private_apis.local_tensor(tensor).untyped_storage()
            if storage not in self._seen:
                self._seen.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        inside = _INSIDE_KERNELS.get(function)
        self.peaks[self.phase] = max(self.peaks[self.phase], self.live + (inside(args) if inside else 0))
        return result

    def _free(self, n: int) -> None:
        self.live -= n


def _tensors_in(result):
    """The tensors among what an operation returned."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _tensors_in(part)


# ---------------------------------------------------------------------------------------------------------------------
# The model's shapes, and a pass over it, without content


@contextmanager
def model_without_content(settings, dtype: torch.dtype):
    """A model of a transformers configuration that has shapes and no numbers; valid within the block."""
    with _contentless():
        yield _build(settings, dtype)


@contextmanager
def _contentless():
    with private_apis.fake_tensor_mode() as mode:
        yield mode


def _build(settings, dtype: torch.dtype):
    """The model of a transformers configuration; within `_contentless` its tensors take no memory."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(copy.deepcopy(settings), dtype=dtype).eval()


@dataclass
class Shapes:
    """Parameters of a model by the group that FSDP gathers at once: the root's first, then each block's.

    Attributes:
        groups: lists of (name, shape, bytes an element); buffers: bytes of all buffers; model: class name of the model.
    """

    groups: list[list[tuple[str, tuple[int, ...], int]]]
    buffers: int
    model: str
    tied: bool

    @property
    def n_parameters(self) -> int:
        return sum(math.prod(shape) for group in self.groups for _, shape, _ in group)


def parameter_shapes(settings, dtype: torch.dtype, block_name: str | None = None) -> Shapes:
    """Shapes of all parameters, tied ones once, of a transformers configuration's model.

    Raises:
        ValueError: `block_name` is no class of the model.
    """
    with _contentless():
        model = _build(settings, dtype)
        blocks = find_blocks(model, block_name)
        owner = {parameter: index for index, block in enumerate(blocks, start=1) for parameter in block.parameters()}
        groups: list[list] = [[] for _ in range(len(blocks) + 1)]
        for name, parameter in model.named_parameters():
            groups[owner.get(parameter, 0)].append((name, tuple(parameter.shape), parameter.element_size()))
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
        output = model.get_output_embeddings()
        tied = output is not None and output.weight is model.get_input_embeddings().weight
        return Shapes(groups, buffers, type(model).__name__, tied)


@dataclass(frozen=True)
class Work:
    """One micro-batch: `units` prompts of `prompt` tokens with responses of these lengths, on one rank."""

    prompt: int
    responses: tuple[int, ...]
    units: int
    share_prefix: bool = True

    @property
    def unit_tokens(self) -> int:
        return self.prompt * (1 if self.share_prefix else len(self.responses)) + sum(self.responses)

    @property
    def tokens(self) -> int:
        return self.units * self.unit_tokens

    @property
    def scored(self) -> int:
        return self.units * sum(self.responses)

    def batch(self, mode, packed: bool):
        """The micro-batch's tensors, without content where `mode` is given."""
        pair = (0, 1 if len(self.responses) > 1 else -1)
        tokens = functools.partial(np.arange, dtype=np.int32)
        units = [
            PromptUnit(
                0,
                number,
                tokens(self.prompt),
                [tokens(n) for n in self.responses],
                list(range(len(self.responses))),
                [pair],
            )
            for number in range(self.units)
        ]
        batch = pack(units, self.share_prefix) if packed else pad(units, 0)
        moved = {
            name: mode.from_tensor(value) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)
        }
        return dataclasses.replace(batch, **moved)


@contextmanager
def _head_bytes(n_bytes: int):
    before = dict(head.HEAD_BYTES)
    head.HEAD_BYTES["cpu"] = n_bytes
    try:
        yield
    finally:
        head.HEAD_BYTES.update(before)


def _trace(
    settings,
    blocks_wanted: int,
    work: Work,
    dtype: torch.dtype,
    every: int,
    gradients: str,
    online: bool,
    packed: bool,
    block_name: str | None,
) -> np.ndarray:
    """Highest live bytes of each of PHASES in a pass, parameters not counted; logits are cut as small as they can be.

    Args:
        blocks_wanted: blocks of the traced model; every: each n-th is checkpointed, 0 none.
        gradients: "fresh" (they come into being in this pass), "kept" (an earlier pass left them; they count from the
            start) or "handed over" (each leaves as soon as it is complete, as under FSDP).
    """
    settings = copy.deepcopy(settings)
    inner = settings.get_text_config()
    inner.num_hidden_layers = blocks_wanted
    if getattr(inner, "layer_types", None):
        inner.layer_types = list(inner.layer_types)[:blocks_wanted]
    with _contentless() as mode, _head_bytes(0):
        model = _build(settings, dtype)
        blocks = find_blocks(model, block_name)
        if len(blocks) != blocks_wanted:
            raise RuntimeError(f"{type(model).__name__} cannot be built with {blocks_wanted} blocks")
        if every:
            checkpoint_activations(blocks, every)
        attention.use_attention(model, "packed_sdpa" if packed else "plain", full_forward=False)
        batch = work.batch(mode, packed)
        counter = LiveBytes([*model.parameters(), *model.buffers()])

        def enter_when_reached(phase):
            def hook(module, arguments, output):
                hidden = output if isinstance(output, torch.Tensor) else output[0]
                if hidden.requires_grad:
                    hidden.register_hook(lambda gradient: counter.enter(phase))

            return hook

        # The backward pass meets the last block's output, then the first one's.
        blocks[-1].register_forward_hook(enter_when_reached("late blocks"))
        if len(blocks) > 1:
            blocks[0].register_forward_hook(enter_when_reached("early blocks"))
        parameters = list(model.parameters())
        if gradients == "handed over":
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with counter:
            if gradients == "kept":
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
            logps = model.response_logps(batch)
            if online:
                counter.enter("reference")
                with torch.no_grad():
                    model.response_logps(batch)
            counter.enter("head")
            logps.sum().backward()
            del logps
        return np.array([counter.peaks.get(phase, 0) for phase in PHASES], dtype=np.float64)


def _cached_trace(settings, *rest) -> np.ndarray:
    key = (settings.to_json_string(use_diff=False), *rest)
    if key not in _traces:
        _traces[key] = _trace(settings, *rest)
    return _traces[key]


_traces: dict[tuple, np.ndarray] = {}
MANY_UNITS = 3


def pass_peaks(
    settings,
    work: Work,
    dtype: torch.dtype,
    *,
    every: int = 0,
    gradients: str = "fresh",
    online: bool = False,
    packed: bool = True,
    block_name: str | None = None,
    n_blocks: int | None = None,
) -> np.ndarray:
    """`_trace` of the whole model and micro-batch, by proportion where they are large. float64 [len(PHASES)], bytes."""
    n_blocks = n_blocks or settings.get_text_config().num_hidden_layers

    def at(blocks, units):
        return _cached_trace(
            settings,
            blocks,
            dataclasses.replace(work, units=units),
            dtype,
            every,
            gradients,
            online,
            packed,
            block_name,
        )

    def over_units(blocks):
        if work.units <= MANY_UNITS:
            return at(blocks, work.units)
        few, more = at(blocks, MANY_UNITS - 1), at(blocks, MANY_UNITS)
        return more + (more - few) * (work.units - MANY_UNITS)

    period = every or 1
    few, more = 2 * period, 3 * period
    # Whole periods, so that the share of checkpointed blocks is the model's own; at worst the last period is not full.
    if n_blocks <= more + 1:
        return over_units(n_blocks)
    low, high = over_units(few), over_units(more)
    return high + (high - low) * (n_blocks - more) / period


def logits_bytes(settings, work: Work, kind: str, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the logits that exist at once, with their temporaries: (in the forward pass, in the backward pass)."""
    columns = head.head_columns(work.scored, head.head_bytes(kind))
    full = work.scored * min(columns, settings.get_text_config().vocab_size) * 4
    low = 0 if dtype == torch.float32 else full // 2
    return 2 * full, full + low


def activation_bytes_per_token(settings, work: Work, dtype: torch.dtype, **options) -> float:
    """What one more token in a micro-batch adds to a pass's peak (activations kept for the backward pass), bytes."""
    options.setdefault("gradients", "kept")
    few, more = (pass_peaks(settings, dataclasses.replace(work, units=n), dtype, **options).max() for n in (5, 8))
    return (more - few) / (3 * work.unit_tokens)


# ---------------------------------------------------------------------------------------------------------------------
# The optimizer


@dataclass(frozen=True)
class OptimizerNeeds:
    """What an optimizer keeps and uses, found by letting it step on small parameters.

    Attributes:
        states: {number of dimensions: ((dimensions kept of the parameter's, bytes an element), ...)}, one a tensor.
        temporaries: bytes used inside a step, a byte of the parameters that are worked on together.
        together: whether all parameters are worked on together (foreach), or one after the other.
    """

    states: dict[int, tuple[tuple[tuple[int, ...], int], ...]]
    temporaries: float
    together: bool

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        kept = self.states[min(len(shape), 3)]
        return sum(math.prod(shape[d] for d in dims) * size for dims, size in kept)

    def step_bytes(self, sizes: list[int]) -> int:
        """Temporaries of a step over parameters of these bytes."""
        return int(self.temporaries * (sum(sizes) if self.together else max(sizes, default=0)))


def optimizer_needs(name: str, arguments: dict, dtype: torch.dtype, foreach: bool) -> OptimizerNeeds:
    """Measure a class of torch.optim. foreach: whether it works on all parameters at once where it has the choice."""
    arguments = {key: value for key, value in arguments.items() if key not in ("fused", "capturable")}
    together = bool(arguments.pop("foreach", None) if arguments.get("foreach") is not None else foreach)
    kind = getattr(torch.optim, name)

    def stepped(shapes):
        parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
        optimizer = kind(parameters, lr=1e-9, foreach=together, **arguments)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1e-3)
            counter = LiveBytes(
                [
                    *parameters,
                    *(p.grad for p in parameters),
                    *(t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)),
                ]
            )
            with counter:
                optimizer.step()
        return parameters, optimizer, max(counter.peaks.values())

    # Dimensions that are different primes tell which of them a state tensor keeps.
    primes = {1: (13,), 2: (7, 11), 3: (3, 5, 17), 0: ()}
    states = {}
    for n, shape in primes.items():
        (parameter,), optimizer, _ = stepped([shape])
        states[n] = tuple(
            (tuple(shape.index(size) for size in value.shape if size != 1), value.element_size())
            for value in optimizer.state[parameter].values()
            if isinstance(value, torch.Tensor) and (value.ndim or n == 0)
        )
    shapes = [(64, 64)] * (6 if together else 1)
    parameters, _, peak = stepped(shapes)
    return OptimizerNeeds(states, peak / sum(p.numel() * p.element_size() for p in parameters), together)
