"""Counts the memory of a pass without making it: shapes of parameters and peaks of activations.

The model is built with its true widths from tensors that have a shape and no content, and a pass of the run itself (the
packed rows, the scoring, the backward pass) is carried out on them while every tensor that comes and goes is counted.
So the figures follow whatever the code does, and no table of constants per architecture has to be kept. Models with
many blocks are traced with few and the rest is added in proportion; a big micro-batch likewise.

What is not seen: buffers inside kernels (but for those in `_INSIDE_KERNELS`) and the allocator's fragments.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

import private_apis
from modeling import attention, head
from modeling.blocks import checkpoint_activations, find_blocks
from planning.batch_shape import BatchShape

# Kernels that need room of their own, beyond what they return: bytes of temporaries as a function of their arguments.
_INSIDE_KERNELS = {torch.ops.aten.logsumexp.default: lambda args: args[0].numel() * args[0].element_size()}
PHASES = ("forward", "reference", "head", "late blocks", "early blocks")


class LiveBytes(private_apis.dispatch_mode()):  # type: ignore[misc]
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


@contextmanager
def model_without_content(model_config, dtype: torch.dtype):
    """A model of a transformers configuration that has shapes and no numbers; valid within the block."""
    with _contentless():
        yield build_model(model_config, dtype)


@contextmanager
def _contentless():
    with private_apis.fake_tensor_mode() as mode:
        yield mode


def build_model(model_config, dtype: torch.dtype):
    """The model of a transformers configuration with random weights; within `_contentless` they take no memory."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(copy.deepcopy(model_config), dtype=dtype).eval()


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


def parameter_shapes(model_config, dtype: torch.dtype, block_name: str | None = None) -> Shapes:
    """Shapes of all parameters, tied ones once, of a transformers configuration's model.

    Raises:
        ValueError: `block_name` is no class of the model.
    """
    with _contentless():
        model = build_model(model_config, dtype)
        blocks = find_blocks(model, block_name)
        owner = {parameter: index for index, block in enumerate(blocks, start=1) for parameter in block.parameters()}
        groups: list[list] = [[] for _ in range(len(blocks) + 1)]
        for name, parameter in model.named_parameters():
            groups[owner.get(parameter, 0)].append((name, tuple(parameter.shape), parameter.element_size()))
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
        output = model.get_output_embeddings()
        tied = output is not None and output.weight is model.get_input_embeddings().weight
        return Shapes(groups, buffers, type(model).__name__, tied)


@contextmanager
def _head_bytes(n_bytes: int):
    before = dict(head.HEAD_BYTES)
    head.HEAD_BYTES["cpu"] = n_bytes
    try:
        yield
    finally:
        head.HEAD_BYTES.update(before)


def trace_pass(
    model_config,
    blocks_wanted: int,
    shape: BatchShape,
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
    model_config = copy.deepcopy(model_config)
    inner = model_config.get_text_config()
    inner.num_hidden_layers = blocks_wanted
    if getattr(inner, "layer_types", None):
        inner.layer_types = list(inner.layer_types)[:blocks_wanted]
    with _contentless() as mode, _head_bytes(0):
        model = build_model(model_config, dtype)
        blocks = find_blocks(model, block_name)
        if len(blocks) != blocks_wanted:
            raise RuntimeError(f"{type(model).__name__} cannot be built with {blocks_wanted} blocks")
        if every:
            checkpoint_activations(blocks, every)
        attention.use_attention(model, "packed_sdpa" if packed else "plain", full_forward=False)
        batch = shape.batch(mode, packed)
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


def _cached_trace(model_config, *rest) -> np.ndarray:
    key = (model_config.to_json_string(use_diff=False), *rest)
    if key not in _traces:
        _traces[key] = trace_pass(model_config, *rest)
    return _traces[key]


_traces: dict[tuple, np.ndarray] = {}
MANY_UNITS = 3


def pass_peaks(
    model_config,
    shape: BatchShape,
    dtype: torch.dtype,
    *,
    every: int = 0,
    gradients: str = "fresh",
    online: bool = False,
    packed: bool = True,
    block_name: str | None = None,
    n_blocks: int | None = None,
) -> np.ndarray:
    """`trace_pass` of the whole model and micro-batch, in proportion where they are large: float64 [len(PHASES)]."""
    n_blocks = n_blocks or model_config.get_text_config().num_hidden_layers

    def at(blocks, units):
        return _cached_trace(
            model_config,
            blocks,
            dataclasses.replace(shape, units=units),
            dtype,
            every,
            gradients,
            online,
            packed,
            block_name,
        )

    def over_units(blocks):
        if shape.units <= MANY_UNITS:
            return at(blocks, shape.units)
        few, more = at(blocks, MANY_UNITS - 1), at(blocks, MANY_UNITS)
        return more + (more - few) * (shape.units - MANY_UNITS)

    period = every or 1
    few, more = 2 * period, 3 * period
    # Whole periods, so that the share of checkpointed blocks is the model's own; at worst the last period is not full.
    if n_blocks <= more + 1:
        return over_units(n_blocks)
    low, high = over_units(few), over_units(more)
    return high + (high - low) * (n_blocks - more) / period


def logits_bytes(model_config, shape: BatchShape, kind: str, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the logits that exist at once, with their temporaries: (in the forward pass, in the backward pass)."""
    columns = head.head_columns(shape.scored, head.head_bytes(kind))
    full = shape.scored * min(columns, model_config.get_text_config().vocab_size) * 4
    low = 0 if dtype == torch.float32 else full // 2
    return 2 * full, full + low
