"""Every attention kernel against dense attention in float64, by itself and through the scoring of a model."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.rates import largest
from data.batching import MicroBatch, PromptUnit, pack, pad
from modeling import attention_kernels
from modeling.attention import use_attention
from modeling.attention_kernels import Kernel, is_packed, kernel_names, row_multiple
from modeling.packed_layout import PackedLayout
from modeling.scoring import token_logps

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Largest |found - truth| / |truth|: of a kernel's output and of its gradients; of a model's log-probs and of the
# gradients of its weights. A wrong mask gives some 0.1 and more.
KERNEL_TOLERANCE = {"float32": (2e-5, 5e-5), "bfloat16": (1e-2, 2e-2)}
SCORING_TOLERANCE = {"float32": (2e-5, 2e-4), "bfloat16": (2e-2, 6e-2)}
EXPLANATION = (
    "Largest |found - truth| / |truth| over random prompts with 1 to 4 responses, windows and grouped heads. The "
    "truth: for a kernel by itself, dense attention in float64 on the same inputs; for a model, the same weights in "
    "float64 under the model library's own attention, one padded row a response. A kernel that does not run on a card "
    "is passed over by model.attention=auto; one must run in each precision."
)


def kernels(small: bool) -> Iterator[dict]:
    """Rows of all kernels that are registered for the device, in both precisions."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, dtype in DTYPES.items():
        right = []
        for kernel in attention_kernels.KERNELS:
            if kernel.layout == "packed" and kernel.runs_on(device.type, dtype):
                row = by_itself(kernel, name, device, small)
                right.append(row["ok"])
                yield row
        for kernel_name in kernel_names():
            of_name = [k for k in attention_kernels.KERNELS if k.name == kernel_name]
            if any(k.runs_on(device.type, dtype) and (k.automatic or k.layout == "padded") for k in of_name):
                yield in_a_model(kernel_name, name, device, small)
        yield {"kernel": "any packed kernel", "dtype": name, "ok": any(right)}


def random_units(rng: np.random.Generator, longest: int, vocabulary: int = 200) -> list[PromptUnit]:
    """A few prompts with 1 to 4 responses of random lengths up to `longest`, down to a single token."""

    def draw() -> np.ndarray:
        return rng.integers(5, vocabulary, int(rng.integers(1, longest + 1))).astype(np.int32)

    units = []
    for number in range(3):
        responses = [draw() for _ in range(int(rng.integers(1, 5)))]
        units.append(PromptUnit(0, number, draw(), responses, list(range(len(responses)))))
    return units


def verdict(row: dict, forward: float, backward: float | None, tolerance: tuple[float, float]) -> dict:
    """The row with what was found: NaN is not within a tolerance."""
    ok = forward <= tolerance[0] and (backward is None or backward <= tolerance[1])
    found = {"forward": forward, "allowed": tolerance[0], "gradients": backward, "allowed for them": tolerance[1]}
    return row | found | {"ok": ok}


def does_not_run(row: dict, problem: Exception) -> dict:
    """A notice and no failed check: what a card lacks is no error of the kernel, and others do its work."""
    text = (str(problem).strip().splitlines() or [""])[0][:120]
    return row | {"note": f"does not run here: {type(problem).__name__}: {text}", "ok": None}


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    truth = truth.double()
    return ((found.double() - truth).norm() / truth.norm().clamp(min=1e-12)).item()


# ---- A kernel by itself ---------------------------------------------------------------------------------------------


def by_itself(kernel: Kernel, dtype: str, device: torch.device, small: bool) -> dict:
    """A kernel's function on random queries, keys and values."""
    row = {"kernel": getattr(kernel.function, "__name__", kernel.name), "dtype": dtype, "what": "by itself"}
    longest, width = (24, 16) if small else (200, 64)
    worst = [0.0, 0.0]
    # The uncompiled FlexAttention of a CPU, which auto never takes, has no backward pass.
    backward = kernel.automatic
    cases = [(window, groups) for window in (None, 1, 7, 64) for groups in (1, 4)]
    try:
        for seed, (window, groups) in enumerate(cases):
            if groups == 1:
                torch.compiler.reset()  # beyond a few graphs of one function the compiler leaves it uncompiled
            rng = np.random.default_rng(seed)
            batch = pack(random_units(rng, longest), multiple=kernel.row_multiple)
            assert batch is not None
            for index, error in enumerate(
                errors_of_call(kernel, batch.to(device), window, groups, width, dtype, backward)
            ):
                worst[index] = largest((worst[index], error))
    except AssertionError:
        raise
    except Exception as problem:  # whatever a compiler or a driver raises
        return does_not_run(row, problem)
    return verdict(row, worst[0], worst[1] if backward else None, KERNEL_TOLERANCE[dtype])


def errors_of_call(
    kernel: Kernel, batch: MicroBatch, window: int | None, groups: int, width: int, dtype: str, backward: bool
) -> Iterator[float]:
    """Relative errors of one call: of its output, then the largest of its gradients."""
    assert batch.trees is not None and kernel.function is not None
    heads, total, device = 4, batch.input_ids.numel(), batch.input_ids.device
    generator = torch.Generator().manual_seed(total)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, DTYPES[dtype])

    tensors = [draw(1, n, total, width) for n in (heads, heads // groups, heads // groups)]
    upstream = draw(1, total, heads, width)
    layout = PackedLayout(batch.trees, batch.position_ids[0], kernel.name)
    scale = width**-0.5
    if not backward:
        with torch.no_grad():
            yield relative(
                kernel.function(*tensors, layout, scale, window),
                dense(*map(torch.Tensor.double, tensors), batch, scale, window),
            )
        return
    leaves, true_leaves = (
        [t.detach().to(kind).requires_grad_() for t in tensors] for kind in (DTYPES[dtype], torch.float64)
    )
    found = kernel.function(*leaves, layout, scale, window)
    truth = dense(*true_leaves, batch, scale, window)
    yield relative(found, truth)
    gradients = torch.autograd.grad(found, leaves, upstream)
    true_gradients = torch.autograd.grad(truth, true_leaves, upstream.double())
    # Keys of a window of one have no gradient: their size is that of all gradients together.
    size = torch.stack([gradient.norm() for gradient in true_gradients]).norm().item()
    yield largest(
        (g.double() - t).norm().item() / max(t.norm().item(), 0.1 * size) for g, t in zip(gradients, true_gradients)
    )


def dense(query, key, value, batch: MicroBatch, scale: float, window: int | None) -> torch.Tensor:
    """Attention by the definition, [1, T, H, D]: the own prompt and the own response, no later token, in the window."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~visible(batch, window).to(query.device), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def visible(batch: MicroBatch, window: int | None) -> torch.Tensor:
    """bool [T, T]: which key each query sees."""
    assert batch.trees is not None
    places = []  # (tree, response or 0 for the prompt, position)
    for number, tree in enumerate(batch.trees):
        places += [(number, 0, i) for i in range(tree.prompt)]
        places += [(number, k, tree.prompt + i) for k, n in enumerate(tree.responses, 1) for i in range(n)]
    tree, branch, place = torch.tensor(places).T
    seen = (tree[:, None] == tree) & ((branch == 0) | (branch[:, None] == branch))
    back = place[:, None] - place
    return seen & (back >= 0) & (back < (window or len(places) + 1))


# ---- A kernel through the scoring of a model ------------------------------------------------------------------------


def in_a_model(kernel: str, dtype: str, device: torch.device, small: bool) -> dict:
    """The log-probs of responses and the gradients of all weights, with a window in every layer and without."""
    row = {"kernel": kernel, "dtype": dtype, "what": "in a model"}
    worst = [0.0, 0.0]
    try:
        for seed, window in enumerate((None, 12)):
            model = random_model(window, small).to(device, DTYPES[dtype])
            units = random_units(np.random.default_rng(seed), 24 if small else 150)
            true_model = copy.deepcopy(model).double()
            padded = pad(units, 0)
            batch = pack(units, multiple=row_multiple(kernel)) if is_packed(kernel) else padded
            assert batch is not None and padded is not None
            truth = scored(true_model, "plain", True, padded.to(device))
            found = scored(model, kernel, False, batch.to(device))
            worst = [largest((w, relative(f, t))) for w, f, t in zip(worst, found, truth)]
    except AssertionError:
        raise
    except Exception as problem:
        return does_not_run(row, problem)
    return verdict(row, worst[0], worst[1], SCORING_TOLERANCE[dtype])


def random_model(window: int | None, small: bool):
    """A Llama with grouped heads, or the same with a sliding window in every layer (Mistral)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    width, layers = (32, 2) if small else (256, 2)
    settings = AutoConfig.for_model(
        "mistral" if window else "llama",
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        initializer_range=0.85 * width**-0.5,  # large enough for scores to depend on what attention sees
        **({"sliding_window": window} if window else {}),
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()


def scored(model, kernel: str, full_forward: bool, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [N] of the scored tokens, and the gradient of a weighting of them, flat over all weights."""
    use_attention(model, kernel, full_forward)
    logps = token_logps(model, batch)
    weights = torch.linspace(-1, 2, len(logps), device=logps.device)
    gradients = torch.autograd.grad((logps * weights).sum(), list(model.parameters()))
    return logps.detach(), torch.cat([gradient.flatten().double() for gradient in gradients])
