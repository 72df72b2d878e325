"""The memory that a run needs on one rank, from shapes and a traced pass: no weights are loaded, nothing is trained."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from dataclasses import dataclass, field

import numpy as np
import torch

import utils
from losses import find_loss
from modeling import loading
from modeling.loading import DTYPES
from parallel.launch import has_bfloat16, visible_devices
from parallel.rank_process import threads_of_rank
from parallel.tensor_parallel import SPLITS, tensor_parallel_styles
from planning.batch_shape import BatchShape, fill, largest_unit
from planning.optimizer_memory import optimizer_needs
from planning.plan import GB, Plan
from planning.token_budget import activation_bytes, token_budget
from planning.trace import PHASES, Shapes, logits_bytes, model_without_content, parameter_shapes, pass_peaks
from settings import Settings, replace
from settings.optimizers import optimizer_arguments
from settings.precision import compute_dtype, resolve_precision
from settings.reference import reference_settings
from settings.shard_layout import (
    ShardLayout,
    layout_of,
    offloads,
    reduce_dtype_of,
    reduces_every_pass,
    reshards_after_forward,
    world_size_of,
)

# Assumed: an accelerator's context, its libraries' workspaces and the communicator's buffers, bytes.
ACCELERATOR_OVERHEAD = int(1.2e9)


def target_device(config: Settings) -> tuple[str, int | None]:
    """(kind, bytes of one device) that is planned for: `plan_device_memory_gb`, else the device that is visible."""
    asked = (config.device or "").split(":")[0]
    given = config.plan_device_memory_gb
    kind, count = visible_devices(config)
    visible = kind == "cuda"
    if visible or asked == "cuda" or (given and not asked):
        found = torch.cuda.get_device_properties(0).total_memory if visible else None
        return "cuda", int(given * GB) if given else found
    if given:
        return asked, int(given * GB)
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return kind, None
    return kind, memory // (world_size_of(config, kind, count) if kind == "cpu" else 1)


# ---- The model on a rank --------------------------------------------------------------------------------------------


@dataclass
class _Model:
    """A model and what one rank holds of it.

    Attributes:
        whole: the transformers configuration; part: the same with the widths of one tensor-parallel rank.
        shapes: parameters of a tensor-parallel rank, by FSDP group; local: (shape, bytes an element) of what FSDP2
            leaves of them on a rank.
    """

    whole: object
    part: object
    n_parameters: int
    shapes: Shapes
    local: list[list[tuple[tuple[int, ...], int]]]

    @property
    def local_shapes(self) -> list[tuple[int, ...]]:
        return [shape for group in self.local for shape, _ in group]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each parameter on a rank."""
        return [math.prod(shape) * size for group in self.local for shape, size in group]


def _model_on_a_rank(config: Settings, layout: ShardLayout, model_config) -> _Model:
    shapes = parameter_shapes(model_config, DTYPES[config.model.policy_dtype], config.model.block_name)
    n_parameters, part = shapes.n_parameters, model_config
    if layout.tp > 1:
        shapes, part = _split_matrices(shapes, model_config, layout.tp)
    local = [
        [((-(-shape[0] // layout.shards), *shape[1:]) if shape else shape, size) for _, shape, size in group]
        for group in shapes.groups
    ]
    return _Model(model_config, part, n_parameters, shapes, local)


def _split_matrices(shapes: Shapes, model_config, tp: int) -> tuple[Shapes, object]:
    """Shapes of one tensor-parallel rank's slices, and a configuration whose blocks have one rank's widths."""
    with model_without_content(model_config, torch.float32) as model:
        styles = tensor_parallel_styles(model, tp)

    def part(name, shape, size):
        style = styles.get(name.rpartition(".")[0])
        if style not in SPLITS or (style == "rowwise" and len(shape) == 1):  # its bias stays whole
            return name, shape, size
        cut = 1 if style == "rowwise" else 0
        return name, tuple(-(-n // tp) if dim == cut else n for dim, n in enumerate(shape)), size

    groups = [[part(*entry) for entry in group] for group in shapes.groups]
    narrow = copy.deepcopy(model_config)
    inner = narrow.get_text_config()
    inner.head_dim = getattr(inner, "head_dim", None) or inner.hidden_size // inner.num_attention_heads
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(inner, key, None):
            setattr(inner, key, max(1, getattr(inner, key) // tp))
    return dataclasses.replace(shapes, groups=groups), narrow


# ---- A pass and a step ----------------------------------------------------------------------------------------------


@dataclass
class _Estimator:
    """Counts the parts of a plan.

    Attributes:
        reference: the model that is kept beside the policy with reference.mode=online; mostly the same.
        kind, capacity: type of the device and its bytes.
        online: whether a live reference is kept beside the policy.
        offloads: whether parameters and optimizer lie in host memory.
        reduce_bytes: of one number of a gradient that is summed over devices.
        notes: takes what could not be counted.
    """

    config: Settings
    layout: ShardLayout
    model: _Model
    reference: _Model
    kind: str
    capacity: int | None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        own = self.config.model.policy_dtype
        self.own, self.compute = DTYPES[own], DTYPES[compute_dtype(self.config)]
        self.reference_dtype = DTYPES[self.config.model.reference_dtype or own]
        loss = find_loss(self.config.loss.name, self.config.loss.options)
        self.whole_vocabulary = loss.inputs.needs_tokens == "divergence"
        self.online = loss.needs_reference(self.config.loss.options) and self.config.reference.mode == "online"
        self.offloads = self.layout.sharded and offloads(self.config, frozen=False)
        reduce_dtype = reduce_dtype_of(self.config)
        self.reduce_bytes = DTYPES[reduce_dtype].itemsize if reduce_dtype else self.own.itemsize

    def token_budget(self) -> int | None:
        """Tokens a micro-batch as the trainer will choose them; None: it depends on a memory that is not known."""
        free = None
        if self.kind == "cuda" and self.config.tokens_per_microbatch == "auto":
            if self.capacity is None:
                return None
            weights = self.model.shapes.buffers + (0 if self.offloads else sum(self.model.sizes))
            free = max(0, self.capacity - ACCELERATOR_OVERHEAD - weights)
        local = utils.processes_on_node(self.layout.world_size)
        threads = threads_of_rank(local) if self.layout.sharded else torch.get_num_threads()
        return token_budget(self.config, self.model.whole, self.kind, free, threads)

    def plan(self, shape: BatchShape, single_pass: bool | None) -> Plan:
        """The plan for micro-batches of this shape. single_pass: whether a step is one of them."""
        sizes = self.model.sizes
        arguments = optimizer_arguments(self.config, "cpu" if self.offloads else self.kind)
        needs = optimizer_needs(self.config.optimizer, arguments, self.own, foreach=False)
        lasting = {
            "parameters": sum(sizes),
            "gradients": sum(sizes),
            "optimizer state": sum(needs.state_bytes(shape) for shape in self.model.local_shapes),
            "reference": self._reference_bytes() if self.online else 0,
        }
        step_parts = {"optimizer temporaries": needs.step_bytes(sizes)}
        activations, logits, held_whole = self.peak(shape, single_pass)
        if activations < 0:
            # At the peak some gradients are still to come; only the optimizer's step finds all of them.
            lasting["gradients"] += int(activations)
            step_parts["later gradients"] = -int(activations)
        parts = dict(
            lasting,
            activations=max(0, int(activations)),
            logits=int(logits),
            communication=int(held_whole),
            buffers=self.model.shapes.buffers + (self.reference.shapes.buffers if self.online else 0),
        )
        if self.whole_vocabulary:  # the reference's log-probs of a pass, which the policy is compared with
            parts["logits"] += 4 * shape.scored * self.model.whole.get_text_config().vocab_size  # type: ignore
        if self.layout.shards > 1 and not single_pass and not reduces_every_pass(self.config):
            parts["unsharded gradients"] = self._unsharded_gradients()
        host: dict[str, int] = {}
        offloaded = []
        if self.offloads:
            offloaded = list(lasting)
            # All gradients lie in host memory by then.
            parts["gradients"] = sum(sizes)
            host["optimizer temporaries"], step_parts = step_parts["optimizer temporaries"], {}
        elif self.layout.sharded and offloads(self.config, frozen=True) and self.online:
            offloaded = ["reference"]
        notes = list(self.notes)
        if self.kind != "cpu":  # on a CPU there is no other memory to move to
            for name in offloaded:
                host[name], parts[name] = parts[name], 0
        parts["process"] = _resident() if self.kind == "cpu" else ACCELERATOR_OVERHEAD
        if self.kind == "cuda":
            notes.append(
                f"process: {ACCELERATOR_OVERHEAD / GB:.1f} GB for context, libraries and communicator is assumed"
            )
        return Plan(
            model=self.model.shapes.model,
            n_parameters=self.model.n_parameters,
            world_size=self.layout.world_size,
            kind=self.kind,
            batch=shape,
            parts=parts,
            step_parts=step_parts,
            lasting=(*lasting, "buffers", "process"),
            host={name: size for name, size in host.items() if size},
            capacity=self.capacity,
            notes=notes,
        )

    def _reference_bytes(self) -> int:
        return sum(self.reference.sizes) * self.reference_dtype.itemsize // self.own.itemsize

    def peak(self, shape: BatchShape, single_pass: bool | None) -> tuple[float, float, float]:
        """(activations, logits, what FSDP2 holds whole) when their sum is highest in a pass, bytes."""
        gradients = "handed over" if self.layout.sharded else "fresh" if single_pass else "kept"
        all_gradients = sum(self.model.sizes)
        held: np.ndarray = np.append(self._traced(shape, gradients), 0.0)
        if gradients != "handed over":
            held[:-1] -= all_gradients  # they count among what lasts
        elif single_pass:
            # Shards of gradients come into being block by block, the root's last.
            local = self.model.local
            root = sum(math.prod(shape) * size for shape, size in local[0]) / max(1, all_gradients)
            missing = np.array([1, 1, 1, 1 - 1 / max(1, len(local) - 1), root, 0])
            held = held - missing * all_gradients
        forward, backward = logits_bytes(self.model.whole, shape, self.kind, self.compute)
        logits = np.array([forward, forward if self.online else 0, backward, 0, 0, 0], dtype=np.float64)
        whole = self._held_whole() if self.layout.sharded else np.zeros(len(PHASES) + 1)
        worst = int(np.argmax(held + logits + whole))
        return float(held[worst]), float(logits[worst]), float(whole[worst])

    def _traced(self, shape: BatchShape, gradients: str) -> np.ndarray:
        """Bytes of activations and, but for "handed over", gradients in each of PHASES."""
        every, failures = int(self.config.activation_checkpointing), []
        for packed in [True, False] if self.config.model.attention != "plain" else [False]:
            try:
                return pass_peaks(
                    self.model.part,
                    shape,
                    self.compute,
                    every=every,
                    gradients=gradients,
                    online=self.online,
                    packed=packed,
                    block_name=self.config.model.block_name,
                )
            except Exception as problem:  # whatever a model's own code raises when it meets tensors without content
                failures.append(f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:100]}")
        note = f"activations are by a rule of thumb: {self.model.shapes.model} cannot be traced ({failures[0]})"
        if note not in self.notes:
            self.notes.append(note)
        counted = 0 if gradients == "handed over" else sum(self.model.sizes)
        a_token = activation_bytes(self.model.part, every, self.compute.itemsize)
        return np.full(len(PHASES), float(a_token * shape.tokens + counted))

    def _unsharded_gradients(self) -> int:
        """Bytes of the gradients that each rank keeps whole until a step's last pass, summed in the reduce dtype."""
        return self.model.shapes.n_parameters * self.reduce_bytes

    def _held_whole(self) -> np.ndarray:
        """Parameters and gradients that FSDP2 holds whole for a while, bytes in each of PHASES, and at the very end.

        Counted on FSDP2 over a simulated group: a gathered group exists twice while it is copied out, the one before it
        is freed only then, and the next is fetched early. The root's group (embeddings, norm, head) stays whole all
        along.
        """
        shapes, fsdp = self.model.shapes, self.config.fsdp
        elements = [sum(math.prod(shape) for _, shape, _ in group) for group in shapes.groups]
        root, block, every_group = elements[0], max(elements[1:]), sum(elements)
        c = self.compute.itemsize
        reduce = self.reduce_bytes
        # The head's gradient waits for the root's turn at the end; a tied one is still on its way there, and traced.
        vocabulary = 0 if shapes.tied else max((math.prod(shape) for _, shape, _ in shapes.groups[0]), default=0)
        early = 1 if fsdp.backward_prefetch else 0
        ahead = fsdp.forward_prefetch or 1
        gathered = self.layout.shards > 1
        if reshards_after_forward(self.config):
            forward = root * c * (1 + gathered) + (1 + ahead) * block * c
            head = (root + vocabulary + block) * c
            late = (root + vocabulary + (3 + early) * block) * c + block * reduce
            held = root * c
        else:
            forward = every_group * c + gathered * root * c
            head = (every_group + vocabulary) * c
            late = (every_group + vocabulary + block) * c + (0 if gathered else block * reduce)
            held = every_group * c
        early_blocks = (root + vocabulary) * c
        end = 2 * root * c + gathered * root * reduce  # no activation is left when the root's gradients are reduced
        r = min(self.reference_dtype.itemsize, c)
        reference = held + 2 * root * r + 2 * block * r if self.online else 0
        return np.array([forward, reference, head, late, early_blocks, end], dtype=np.float64)


def _resident() -> int:
    """Bytes that this process holds now: what Python, torch and transformers take by themselves."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


# ---- All of it ------------------------------------------------------------------------------------------------------


def estimate(
    config: Settings,
    world_size: int | None = None,
    *,
    kind: str | None = None,
    capacity: int | None = None,
    batch: BatchShape | None = None,
    model_config=None,
    single_pass: bool | None = None,
) -> Plan:
    """What a run with these settings needs on the fullest rank.

    Args:
        kind, capacity: device type and its bytes; None as `target_device` finds.
        batch: a micro-batch's typical unit (its `units` are filled in here unless above 1); None: the longest allowed.
        model_config: the transformers configuration; None reads it as the run would.
        single_pass: whether a step is one micro-batch, so that gradients only come into being while activations go;
            None works it out from batch size and token budget.
    Raises:
        ValueError: the model's configuration cannot be found, or its block class; the world does not divide as the
            settings ask; the model cannot be split so.
    """
    found_kind, found_capacity = target_device(config)
    kind, capacity = kind or found_kind, capacity or found_capacity
    config = replace(config, {"precision": resolve_precision(config, kind, has_bfloat16(kind))})
    world = world_size or world_size_of(config, kind, torch.cuda.device_count())
    layout = layout_of(config, world)
    tokenizer = loading.load_tokenizer(config) if model_config is None or config.reference.name_or_path else None
    model_config = model_config or loading.model_config(config, tokenizer)
    model = reference = _model_on_a_rank(config, layout, model_config)
    if config.reference.name_or_path:
        other = reference_settings(config)
        reference = _model_on_a_rank(other, layout, loading.model_config(other, tokenizer))
    estimator = _Estimator(config, layout, model, reference, kind, capacity)
    unit = batch or largest_unit(config)
    if unit.units > 1:
        return estimator.plan(unit, single_pass)
    a_rank = max(1, math.ceil(config.batch_size / layout.data_ranks))
    most = max(1, math.ceil(a_rank / config.gradient_accumulation_steps))

    def filled(budget: int | None) -> Plan:
        in_one = most == a_rank and (budget is None or most * unit.unit_tokens <= budget)
        return estimator.plan(fill(unit, most, budget), in_one if single_pass is None else single_pass)

    budget = first_budget = estimator.token_budget()
    plan = filled(budget)
    # A step that does not fit is repeated in smaller micro-batches where that can be; elsewhere the run would end.
    repeats = kind == "cuda" and layout.retries_out_of_memory and config.tokens_per_microbatch == "auto"
    while repeats and plan.fits is False and plan.batch.units > 1:
        assert budget is not None  # the memory is known, or there would be no verdict
        budget //= 2
        plan = filled(budget)
    if budget != first_budget:
        plan.notes.append(
            f"the first steps run out of memory with {first_budget:,} tokens a pass and are repeated with {budget:,}; "
            f"tokens_per_microbatch={budget} saves the failed tries"
        )
    return plan
