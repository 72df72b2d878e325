"""What a run will need before anything is spent: `python train.py ... plan=true`.

No weights are loaded and nothing is trained. memory_trace.py counts a pass of the run on tensors without content; this
file adds what the placement makes of it, the steps and tokens of the data, and what to change when it does not fit.
What is assumed rather than counted is said below the table.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
import re
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

import utils
from data.sampler import cpu_token_budget
from modeling import loading
from modeling.loading import DTYPES
from planning.memory_trace import (
    PHASES,
    Shapes,
    Work,
    logits_bytes,
    model_without_content,
    optimizer_needs,
    parameter_shapes,
    pass_peaks,
)
from settings import Settings, replace

GB = 1e9
# Share of a device's memory that the counted parts may take: the allocator leaves gaps between blocks of unlike size.
USABLE = 0.92
# Assumed: an accelerator's context, its libraries' workspaces and the communicator's buffers, bytes.
ACCELERATOR_OVERHEAD = int(1.2e9)
# Prompts that are tokenised to estimate the length of the rest, and seconds that counting them may take.
SAMPLE, PATIENCE = 512, 20.0


# ---------------------------------------------------------------------------------------------------------------------
# The plan


@dataclass
class Plan:
    """What one rank needs, in bytes.

    Attributes:
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
    work: Work
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


def target_device(config: Settings) -> tuple[str, int | None]:
    """(kind, bytes of one device) that is planned for: `plan_device_memory_gb`, else the device that is visible."""
    asked = (config.device or "").split(":")[0]
    given = config.plan_device_memory_gb
    visible = torch.cuda.is_available() and asked in ("", "cuda")
    if visible or asked == "cuda" or (given and not asked):
        found = torch.cuda.get_device_properties(0).total_memory if visible else None
        return "cuda", int(given * GB) if given else found
    if given:
        return asked, int(given * GB)
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return asked or "cpu", None
    return asked or "cpu", memory // (_world_size(config, "cpu") if asked != "mps" else 1)


def _world_size(config: Settings, kind: str) -> int:
    joined = utils.joined_world()
    if joined:
        return joined[1]
    if config.world_size:
        return config.world_size
    return max(1, torch.cuda.device_count()) if kind == "cuda" and config.trainer != "BasicTrainer" else 1


def _usual_work(config: Settings) -> Work:
    """The largest unit that the settings allow: a prompt and, but for SFT, two responses."""
    prompt = min(config.max_prompt_length, config.max_length - 1)
    n = 1 if config.loss.name == "sft" else 2
    return Work(prompt, (config.max_length - prompt,) * n, 1, config.prefix_sharing)


def fill(unit: Work, most: int, budget: int | None) -> Work:
    """A micro-batch of units like this one: at most `most`, and as many tokens as the budget allows.

    Real micro-batches mix lengths until the budget is full, so the unit is shortened to fill it to the brim.
    """
    if budget is None or unit.unit_tokens * most <= budget or unit.unit_tokens >= budget:
        units = most if budget is None or unit.unit_tokens * most <= budget else 1
        return dataclasses.replace(unit, units=units)
    units = min(most, -(-budget // unit.unit_tokens))
    share = min(1.0, budget / (units * unit.unit_tokens))
    return dataclasses.replace(
        unit,
        prompt=max(1, int(unit.prompt * share)),
        units=units,
        responses=tuple(max(1, int(n * share)) for n in unit.responses),
    )


def _shard_layout(config: Settings, world: int) -> tuple[int, int]:
    """(devices a parameter is split over, data-parallel ranks)."""
    ranks = world // config.tp_size
    if config.trainer == "BasicTrainer":
        return 1, 1
    strategy = config.fsdp.sharding_strategy
    if strategy == "NO_SHARD" and config.tp_size == 1:
        return 1, ranks
    if strategy == "HYBRID_SHARD":
        replicas = config.fsdp.replicas or max(1, world // int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        return ranks // replicas, ranks
    return ranks, ranks


def _tensor_parallel(shapes: Shapes, settings, tp: int) -> tuple[Shapes, object]:
    """Shapes of one rank's slices and a configuration whose blocks have one rank's widths."""
    with model_without_content(settings, torch.float32) as model:
        plan = getattr(model, "tp_plan", None) or getattr(model.config, "base_model_tp_plan", None) or {}
        prefix = model.base_model_prefix
    if not plan:
        raise ValueError(f"{shapes.model} comes with no tensor-parallel plan: use trainer=FSDPTrainer.")
    axis = {"colwise": 0, "rowwise": 1}

    def part(name, shape, size):
        path = name.rpartition(".")[0]
        for pattern, style in plan.items():
            words = re.escape(pattern).replace(r"\*", r"\d+")
            if style in axis and re.fullmatch(f"(?:{re.escape(prefix)}\\.)?{words}", path):
                split = axis[style] if len(shape) > 1 else (0 if style == "colwise" else None)
                if split is not None:
                    return name, tuple(-(-n // tp) if d == split else n for d, n in enumerate(shape)), size
        return name, shape, size

    # Embeddings and head, in the root group, stay whole.
    groups = [shapes.groups[0]] + [[part(*entry) for entry in group] for group in shapes.groups[1:]]
    narrow = copy.deepcopy(settings)
    inner = narrow.get_text_config()
    inner.head_dim = getattr(inner, "head_dim", None) or inner.hidden_size // inner.num_attention_heads
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(inner, key, None):
            setattr(inner, key, max(1, getattr(inner, key) // tp))
    return dataclasses.replace(shapes, groups=groups), narrow


def _rule_of_thumb(settings, work: Work, dtype: torch.dtype, every: int) -> np.ndarray:
    inner = settings.get_text_config()
    wide = getattr(inner, "intermediate_size", None) or 4 * inner.hidden_size
    a_block = (16 * inner.hidden_size + 4 * wide) * work.tokens * (dtype.itemsize)
    kept = inner.num_hidden_layers if not every else inner.num_hidden_layers * (1 - 1 / every) + 1
    return np.full(len(PHASES), float(a_block * kept))


def estimate(
    config: Settings,
    world_size: int | None = None,
    *,
    kind: str | None = None,
    capacity: int | None = None,
    work: Work | None = None,
    settings=None,
    single_pass: bool | None = None,
    advise: bool = False,
) -> Plan:
    """What a run with these settings needs on the fullest rank.

    Args:
        kind, capacity: device type and its bytes; None as `target_device` finds.
        work: a micro-batch's typical unit (its `units` are filled in here unless above 1); None: the longest allowed.
        settings: the transformers configuration; None reads it as the run would.
        single_pass: whether a step is one micro-batch, so that gradients only come into being while activations go;
            None works it out from batch size and token budget.
        advise: fill `advice` when it does not fit (costs some more traces).
    Raises:
        ValueError: the model's configuration cannot be found, or its block class.
    """
    found_kind, found_capacity = target_device(config)
    kind, capacity = kind or found_kind, capacity or found_capacity
    world = world_size or _world_size(config, kind)
    settings = settings or loading.model_config(config, loading.load_tokenizer(config))
    sharded = config.trainer != "BasicTrainer"
    own = DTYPES[config.model.policy_dtype]
    compute = DTYPES[config.model.fsdp_policy_mp or config.model.policy_dtype] if sharded else own
    block_name = config.model.block_name
    shapes = parameter_shapes(settings, own, block_name)
    n_parameters = shapes.n_parameters
    full_settings = settings
    if config.tp_size > 1:
        shapes, settings = _tensor_parallel(shapes, settings, config.tp_size)
    shards, ranks = _shard_layout(config, world)
    notes: list[str] = []

    # ---- What lasts
    local = [
        [((-(-shape[0] // shards), *shape[1:]) if shape else shape, size) for _, shape, size in group]
        for group in shapes.groups
    ]
    local_shapes = [entry for group in local for entry in group]
    sizes = [math.prod(shape) * size for shape, size in local_shapes]
    foreach = kind == "cuda" and not sharded  # torch takes DTensors one by one unless told otherwise
    needs = optimizer_needs(config.optimizer, dict(config.optimizer_kwargs), own, foreach)
    lasting = {
        "parameters": sum(sizes),
        "gradients": sum(sizes),
        "optimizer state": sum(needs.state_bytes(shape) for shape, _ in local_shapes),
    }
    step_parts = {"optimizer temporaries": needs.step_bytes(sizes)}
    preference = config.loss.name != "sft" and not config.loss.options.get("reference_free")
    online = preference and config.reference.mode == "online"
    reference_dtype = DTYPES[config.model.reference_dtype or config.model.policy_dtype]
    reference = sum(sizes) * reference_dtype.itemsize // own.itemsize
    lasting["reference"] = reference if online else 0

    # ---- One micro-batch
    unit = work or _usual_work(config)
    a_rank = max(1, math.ceil(config.batch_size / ranks))
    budget = config.tokens_per_microbatch
    filling = unit.units == 1
    if filling:
        most = max(1, math.ceil(a_rank / config.gradient_accumulation_steps))
        whole = most * unit.unit_tokens
        if budget == "auto":
            budget = cpu_token_budget(torch.get_num_threads()) if kind == "cpu" else None
        unit = fill(unit, most, budget)
        if single_pass is None:
            single_pass = most == a_rank and (budget is None or whole <= budget)
    gradients = "handed over" if sharded else "fresh" if single_pass else "kept"
    every = int(config.activation_checkpointing)
    options = dict(every=every, gradients=gradients, online=online, block_name=block_name)

    def peaks_of(work):
        failures = []
        for layout in [True, False] if config.model.attention != "plain" else [False]:
            try:
                return pass_peaks(settings, work, compute, packed=layout, **options)
            except Exception as problem:  # whatever a model's own code raises when it meets tensors without content
                failures.append(f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:100]}")
        notes.append(f"activations are by a rule of thumb: {shapes.model} cannot be traced ({failures[0]})")
        return _rule_of_thumb(settings, work, compute, every)

    group_elements = [sum(math.prod(shape) for _, shape, _ in group) for group in shapes.groups]
    communication = np.zeros(len(PHASES) + 1)
    if sharded:
        communication = _communication(
            config, group_elements, shapes, compute, own, shards, reference_dtype if online else None
        )

    def at_peak(work):
        held = np.append(peaks_of(work), 0.0)
        if gradients != "handed over":
            held[:-1] -= lasting["gradients"]  # counted there
        elif single_pass:
            # Shards of gradients come into being block by block, the root's last.
            root = sum(math.prod(shape) * size for shape, size in local[0]) / max(1, lasting["parameters"])
            missing = np.array([1, 1, 1, 1 - 1 / max(1, len(local) - 1), root, 0])
            held = held - missing * lasting["gradients"]
        forward, backward = logits_bytes(full_settings, work, kind, compute)
        logits = np.array([forward, forward if online else 0, backward, 0, 0, 0], dtype=np.float64)
        worst = int(np.argmax(held + logits + communication))
        return held[worst], logits[worst], communication[worst]

    if filling and budget is None and capacity and unit.units > 1:
        # As many units as fit; at small numbers of them another phase may be the highest, so by halving.
        stays = 0 if sharded and config.fsdp.cpu_offload else sum(lasting.values())
        room = 0.95 * USABLE * capacity - stays - ACCELERATOR_OVERHEAD
        low, high = 1, unit.units + 1
        while high - low > 1:
            middle = (low + high) // 2
            fitting = sum(at_peak(dataclasses.replace(unit, units=middle))) <= room
            low, high = (middle, high) if fitting else (low, middle)
        unit = dataclasses.replace(unit, units=low)
    activations, logits, buffers = at_peak(unit)

    if activations < 0:
        # At the peak some gradients are still to come; only the optimizer's step finds all of them.
        lasting["gradients"] += int(activations)
        step_parts["later gradients"] = -int(activations)
    parts = dict(
        lasting,
        activations=max(0, int(activations)),
        logits=int(logits),
        communication=int(buffers),
        buffers=shapes.buffers * (2 if online else 1),
    )
    host: dict[str, int] = {}
    offloaded = []
    if sharded and config.fsdp.cpu_offload:
        offloaded = list(lasting)
        # All gradients lie in host memory by then.
        lasting["gradients"] = parts["gradients"] = sum(sizes)
        host["optimizer temporaries"], step_parts = step_parts["optimizer temporaries"], {}
    elif sharded and config.fsdp.reference_cpu_offload and online:
        offloaded = ["reference"]
    if kind != "cpu":  # on a CPU there is no other memory to move to
        for name in offloaded:
            host[name], parts[name] = parts[name], 0
    parts["process"] = _resident() if kind == "cpu" else ACCELERATOR_OVERHEAD
    if kind == "cuda":
        notes.append(f"process: {ACCELERATOR_OVERHEAD / GB:.1f} GB for context, libraries and communicator is assumed")
    plan = Plan(
        shapes.model,
        n_parameters,
        world,
        kind,
        unit,
        parts,
        step_parts,
        ("parameters", "gradients", "optimizer state", "reference", "buffers", "process"),
        {name: n for name, n in host.items() if n},
        capacity,
        notes,
    )
    if advise and plan.fits is False:
        plan.advice = _advice(config, plan, full_settings)
    return plan


def _communication(
    config: Settings, group_elements: list[int], shapes: Shapes, compute, own, shards: int, reference_dtype
) -> np.ndarray:
    """Parameters and gradients that FSDP2 holds whole for a while, bytes in each of PHASES, and at the very end.

    Counted on FSDP2 over a simulated group: a gathered group exists twice while it is copied out, the one before it is
    freed only then, and the next is fetched early. The root's group (embeddings, norm, head) stays whole all along.
    """
    root, block = group_elements[0], max(group_elements[1:])
    every_group = sum(group_elements)
    c = compute.itemsize
    reduce = (
        DTYPES[config.fsdp.reduce_dtype].itemsize
        if config.fsdp.reduce_dtype
        else 4
        if config.model.fsdp_policy_mp
        else own.itemsize
    )
    # The head's gradient waits for the root's turn at the end; a tied one is still on its way there, and traced.
    vocabulary = 0 if shapes.tied else max((math.prod(shape) for _, shape, _ in shapes.groups[0]), default=0)
    early = 1 if config.fsdp.backward_prefetch else 0
    ahead = config.fsdp.forward_prefetch or 1
    gathered = shards > 1
    if config.fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD"):
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
    r = min(reference_dtype.itemsize, c) if reference_dtype else 0
    reference = held + 2 * root * r + 2 * block * r if reference_dtype else 0
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


# ---------------------------------------------------------------------------------------------------------------------
# What to change


def _advice(config: Settings, plan: Plan, settings) -> list[tuple[str, int, bool]]:
    """Changes that save memory, the cheapest first: each alone if it is enough, else on top of those before it."""
    sharded = config.trainer != "BasicTrainer"
    changes: list[dict] = []
    if config.loss.name != "sft" and config.reference.mode == "online":
        changes.append({"reference.mode": "cached"})
    tokens = plan.work.tokens
    while tokens > plan.work.unit_tokens:
        tokens = max(tokens // 2, plan.work.unit_tokens)
        change = {"tokens_per_microbatch": tokens}
        if tokens == plan.work.unit_tokens or _estimate_with(config, change, settings, plan).fits:
            changes.append(change)
            break
    if sharded and not config.model.fsdp_policy_mp and config.model.policy_dtype == "float32":
        changes.append({"model.fsdp_policy_mp": "bfloat16"})
    if int(config.activation_checkpointing) != 1:
        changes.append({"activation_checkpointing": True})
    if sharded and config.fsdp.sharding_strategy != "FULL_SHARD" and config.tp_size == 1:
        changes.append({"fsdp.sharding_strategy": "FULL_SHARD", "fsdp.replicas": None})
    if sharded:
        world = max(2, plan.world_size * 2)
        while world <= min(config.batch_size * config.tp_size, 1024):
            changes.append({"world_size": world})
            world *= 2
    elif plan.kind != "mps":
        world = 2
        while world <= min(config.batch_size, 64):
            changes.append({"trainer": "FSDPTrainer", "world_size": world})
            world *= 2
    if sharded and plan.kind == "cuda" and not config.fsdp.cpu_offload:
        changes.append({"fsdp.cpu_offload": True})
    lightest = {
        "Adam": "RMSprop",
        "AdamW": "RMSprop",
        "NAdam": "RMSprop",
        "RAdam": "RMSprop",
        "Adamax": "RMSprop",
        "RMSprop": "Adafactor",
        "Adagrad": "Adafactor",
    }.get(config.optimizer)
    if lightest:
        changes.append({"optimizer": lightest, **({"optimizer_kwargs": {}} if config.optimizer_kwargs else {})})
    results, gathered, enough_world = [], {}, False
    for change in changes:
        if "world_size" in change and enough_world:
            continue  # the smallest world that is enough has been found
        alone = _estimate_with(config, change, settings, plan)
        if alone.total >= 0.98 * plan.total:
            continue
        enough_world = enough_world or ("world_size" in change and bool(alone.fits))
        gathered.update(change)
        results.append((_as_arguments(change), alone.total, bool(alone.fits)))
    worlds = [r for r in results if "world_size" in r[0]]
    if worlds and not enough_world:
        results = [r for r in results if r not in worlds[:-1]]
    results.sort(key=lambda entry: not entry[2])
    if not any(fits for *_, fits in results) and len(results) > 1:
        together = _estimate_with(config, gathered, settings, plan)
        results.append((_as_arguments(gathered), together.total, bool(together.fits)))
    return results


def _estimate_with(config: Settings, change: dict, settings, plan: Plan) -> Plan:
    unit = dataclasses.replace(plan.work, units=1)
    capacity = plan.capacity
    if plan.kind == "cpu" and "world_size" in change and capacity and not config.plan_device_memory_gb:
        capacity = capacity * plan.world_size // change["world_size"]  # ranks share the host's memory
    return estimate(
        replace(config, change),
        change.get("world_size", plan.world_size),
        kind=plan.kind,
        capacity=capacity,
        work=unit,
        settings=settings,
    )


def _as_arguments(change: dict) -> str:
    show = {True: "true", False: "false", None: "null"}
    words = []
    for key, value in change.items():
        if isinstance(value, dict):
            value = "{}"
        words.append(f"{key}={show[value] if value is None or isinstance(value, bool) else value}")
    return " ".join(words)


# ---------------------------------------------------------------------------------------------------------------------
# Steps and tokens


class _NotCached(Exception):
    pass


@contextmanager
def _refuse(*_):
    raise _NotCached
    yield


@dataclass
class DataFigures:
    """examples, tokens: of one epoch (tokens: what passes over it compute, prompts shared within a step).
    unit: the prompt and responses of a long unit; source: how these were found."""

    examples: int
    tokens: int
    unit: Work
    source: str


def data_figures(config: Settings, tokenizer) -> DataFigures:
    """Size of the training data: exact if it is tokenised already, else estimated from its first prompts.

    Raises:
        ValueError, OSError: the data is not at hand.
    """
    from data.tokenization import load_tokenized

    sft = config.loss.name == "sft"
    try:
        # Tokenising starts by asking for a progress bar; without one coming, only what is cached is read.
        datasets = [
            load_tokenized(name, "train", tokenizer, config, "responses" if sft else "pairs", progress=_refuse)
            for name in config.datasets
        ]
    except _NotCached:
        return _sampled_figures(config, tokenizer, sft)
    return _cached_figures(config, datasets)


def _long_unit(units: list[tuple[int, tuple[int, ...]]], share: bool) -> Work:
    """The unit that stands for a full micro-batch: the middle of the longest tenth."""
    ordered = sorted((Work(prompt, responses, 1, share) for prompt, responses in units), key=lambda w: w.unit_tokens)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _cached_figures(config: Settings, datasets) -> DataFigures:
    from data.sampler import BatchSampler, DatasetMixture

    mixture = DatasetMixture(datasets, [float(config.data.weights.get(name, 1.0)) for name in config.datasets])
    sampler = BatchSampler(
        mixture,
        config.batch_size,
        seed=config.seed,
        shuffle=config.shuffle,
        make_batch=None,
        n_epochs=1,
        share_prefix=config.prefix_sharing,
    )
    tokens, seen = 0, []
    for step in range(sampler.n_steps):
        units = mixture.units(sampler.example_indices(step))
        tokens += sum(unit.cost(config.prefix_sharing) for unit in units)
        if len(seen) < 20_000:
            seen += [(len(unit.prompt), tuple(map(len, unit.responses))) for unit in units]
    return DataFigures(
        sampler.n_examples, tokens, _long_unit(seen, config.prefix_sharing), "exact, from the tokenised data"
    )


def _sampled_figures(config: Settings, tokenizer, sft: bool) -> DataFigures:
    from data.chat_templates import read_chat_template
    from data.sources import open_source
    from data.text_encoding import TextEncoder
    from data.tokenization import tokenized_chunks
    from data.truncation import Limits

    encoder = TextEncoder(tokenizer, read_chat_template(config.data.chat_template))
    examples = tokens = 0.0
    seen, said = [], []
    for name in config.datasets:
        source = open_source(name, "train", config, sft)
        limits = Limits(config.max_length, config.max_prompt_length, source.truncation, config.data.on_overlong)
        sample = dataclasses.replace(
            source, reader=lambda counts, read=source.reader: itertools.islice(read(counts), SAMPLE), counts=Counter()
        )
        n_pairs = sample_tokens = 0
        for group in itertools.chain.from_iterable(tokenized_chunks(sample, encoder, limits, sft, Counter())):
            for pair in group.pairs or [(0,)]:
                # Pairs of a prompt meet in a step by chance only, unless asked for; each is taken to come alone.
                work = Work(len(group.prompt), tuple(len(group.responses[i]) for i in pair), 1, config.prefix_sharing)
                sample_tokens += work.unit_tokens
                seen.append((work.prompt, work.responses))
                n_pairs += 1
        groups, until, complete = 0, time.monotonic() + PATIENCE, True
        for groups, _ in enumerate(source.groups(), start=1):
            if time.monotonic() > until:
                complete = False
                break
        factor = groups / max(1, min(groups, SAMPLE)) * float(config.data.weights.get(name, 1.0))
        examples += n_pairs * factor
        tokens += sample_tokens * factor
        least = "" if complete else "at least "
        said.append(f"{name}: {least}{groups} prompts, {min(groups, SAMPLE)} of them tokenised")
    if not seen:
        raise ValueError(f"datasets={list(config.datasets)} hold no usable training example")
    return DataFigures(
        round(examples), round(tokens), _long_unit(seen, config.prefix_sharing), f"estimated ({'; '.join(said)})"
    )


def whole_run(config: Settings, figures: DataFigures) -> tuple[int, int, int]:
    """(examples, optimizer steps, tokens) from the first to the last step."""
    in_epochs = None if config.n_epochs is None else config.n_epochs * figures.examples
    examples = min(n for n in (in_epochs, config.n_examples) if n is not None)
    epochs, rest = divmod(examples, max(1, figures.examples))
    steps = epochs * -(-figures.examples // config.batch_size) + -(-rest // config.batch_size)
    return examples, steps, round(figures.tokens * examples / max(1, figures.examples))


# ---------------------------------------------------------------------------------------------------------------------
# On the console


def make_plan(config: Settings) -> Plan:
    """The plan of a run, data included where it is at hand, with advice where it does not fit.

    Raises:
        ValueError: model configuration or tokenizer cannot be found.
    """
    tokenizer = loading.load_tokenizer(config)
    settings = loading.model_config(config, tokenizer)
    figures, why = None, ""
    try:
        figures = data_figures(config, tokenizer)
    except (ValueError, OSError) as problem:
        why = (str(problem).splitlines() or [type(problem).__name__])[0]
    plan = estimate(config, settings=settings, work=figures.unit if figures else None, advise=True)
    if figures:
        plan.examples, plan.steps, plan.tokens = whole_run(config, figures)
        plan.data = figures.source
    else:
        plan.data = f"unknown: data not at hand ({why}); the longest rows allowed are taken"
    return plan


def print_plan(config: Settings) -> None:
    """Print the plan of a run: a table, the total, the verdict and, if it does not fit, what to change."""
    print(describe(config, make_plan(config)))


def describe(config: Settings, plan: Plan) -> str:
    """The plan as text."""
    work = plan.work
    world = f"{plan.world_size} {'process' if plan.world_size == 1 else 'processes'} on {plan.kind}"
    lines = [
        f"Plan for {plan.model}, {plan.n_parameters / 1e6:,.1f} M parameters, {config.loss.name}, "
        f"{config.trainer}, {world}",
        "",
    ]
    batch = (
        f"{work.tokens:,} tokens a pass: {work.units} x (prompt {work.prompt} + {' + '.join(map(str, work.responses))})"
    )
    what = {
        "parameters": config.model.policy_dtype,
        "gradients": "",
        "optimizer state": config.optimizer,
        "reference": "online"
        if plan.parts["reference"] or plan.host.get("reference")
        else "none beside the policy while training",
        "activations": batch,
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
            f"Needs {plan.total / GB:.2f} GB; the device's memory is not known: plan_device_memory_gb=80 says it."
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
