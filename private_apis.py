"""Everything here that depends on private interfaces of torch, transformers and datasets.

A private interface may change with any release. So each has one function with a plain name, a way of doing without it,
and a test in tests/test_private_apis.py that fails when the interface changes. All were checked with torch 2.13,
transformers 5.24 and datasets 5.2. The libraries are imported where they are needed: importing this module is cheap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

# ---- Attention ------------------------------------------------------------------------------------------------------

CPU_FLASH_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, "
        "bool is_causal, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}


def cpu_flash_attention():
    """The CPU's fused attention and its backward pass, as (forward, backward); None if this torch has none like them.

    The public scaled_dot_product_attention runs the same kernel but does not return the normalizers that a backward
    pass of our own needs. Where it is missing the pieces go through the public function: the same results, more memory.
    """
    return _operators(tuple(CPU_FLASH_ATTENTION.items()))


@functools.cache
def _operators(signatures: tuple[tuple[str, str], ...]):
    """The aten operators of these names; None unless all exist with these signatures."""
    import torch

    found = []
    for name, signature in signatures:
        packet = getattr(torch.ops.aten, name, None)
        if packet is None or "default" not in packet.overloads():
            return None
        if str(packet.default._schema) != f"aten::{name}{signature}":
            return None
        found.append(packet)
    return tuple(found)


def attention_of(config) -> str:
    """Name of the attention that a transformers model uses (`_attn_implementation` of its config).

    There is a public way to set it and none to read it. Where it cannot be read it is taken to be "eager", which every
    model has.
    """
    return getattr(config, "_attn_implementation", None) or "eager"


def is_recurrent(model) -> bool:
    """Whether a transformers model keeps a state that has read the padding too (`_is_stateful`: Mamba and its kin).

    No public attribute tells. Where this one is missing every model is taken to be recurrent: samples are then written
    without a cache, which is right for all and slower.
    """
    from transformers import PreTrainedModel

    if not hasattr(PreTrainedModel, "_is_stateful"):
        return True
    return bool(getattr(model, "_is_stateful", False))


def has_forward_pre_hooks(module) -> bool:
    """Whether something runs before a module's forward (`_forward_pre_hooks`): using its weight alone would skip it.

    torch has no public list of hooks. Where this one is missing a module is taken to have some, and is called as it is.
    """
    return bool(getattr(module, "_forward_pre_hooks", True))


# ---- Sharded tensors ------------------------------------------------------------------------------------------------


def local_shape_and_offset(tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's part of a DTensor, and where it starts in each dimension of the whole.

    torch.distributed.tensor._utils.compute_local_shape_and_global_offset; there is no public one.
    """
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:
        mesh = tensor.device_mesh
        return shard_of(tensor.shape, mesh.shape, mesh.get_coordinate(), tensor.placements)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def shard_of(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`local_shape_and_offset` by arithmetic: each placement cuts a dimension as torch.chunk does.

    A strided placement (FSDP over tensor parallelism: it has a split_factor) cuts what the plain ones have left.
    """
    local, offset = list(shape), [0] * len(shape)
    cuts = [number for number, placement in enumerate(placements) if hasattr(placement, "dim")]
    for number in sorted(cuts, key=lambda number: hasattr(placements[number], "split_factor")):
        dim, index = placements[number].dim, coordinate[number]
        chunk = math.ceil(local[dim] / mesh_shape[number])
        start = min(index * chunk, local[dim])
        offset[dim] += start
        local[dim] = min(chunk, local[dim] - start)
    return tuple(local), tuple(offset)


def local_tensor(tensor):
    """This rank's part of a DTensor (`_local_tensor`), any other tensor as it is.

    The public to_local() is an operation that autograd records; it serves where the attribute is missing.
    """
    if not hasattr(tensor, "placements"):
        return tensor
    local = getattr(tensor, "_local_tensor", None)
    return tensor.detach().to_local() if local is None else local


# ---- Tensors without content, and seeing every operation ------------------------------------------------------------


def dispatch_mode():
    """The class TorchDispatchMode, whose subclasses see every operation (torch.utils._python_dispatch).

    torch documents it for extensions but gives it no public path.
    Raises:
        RuntimeError: this torch has none.
    """
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError as problem:
        raise RuntimeError(_no_plan("TorchDispatchMode")) from problem
    return TorchDispatchMode


def fake_tensor_mode():
    """A mode under which tensors have a shape and no content (torch._subclasses.FakeTensorMode).

    Tensors on torch's public meta device would not do: kernels are chosen by device, and the plan counts the run's.
    Raises:
        RuntimeError: this torch has none.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as problem:
        raise RuntimeError(_no_plan("FakeTensorMode")) from problem
    return FakeTensorMode(allow_non_fake_inputs=True)


def _no_plan(name: str) -> str:
    import torch

    return (
        f"torch {torch.__version__} has no {name}, which plan=true needs: install a torch that requirements.txt names."
    )


# ---- A model built without memory -----------------------------------------------------------------------------------


def fill_computed_buffers(model) -> None:
    """Compute in place the buffers that no weights file holds (rotary frequencies, say) of a model built on meta.

    transformers computes them in `_init_weights(module)`, which also draws weights. So that no weight is touched,
    sharded or not, it runs on a second model whose parameters stay on meta. No public function does this. Buffers that
    it leaves alone, all of them where it is missing or fails, are copied from a third model that is built in memory.
    """
    import torch

    stored = model.state_dict().keys()
    computed = {name: buffer for name, buffer in model.named_buffers() if name not in stored and buffer.numel()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        twin = _unsharded_class(model)
        found = _buffers_of_initialization(twin, model.config, computed)
        if len(found) < len(computed):
            found = {**dict(twin(model.config).named_buffers()), **found}
        for name, buffer in computed.items():
            buffer.copy_(found[name])


def _buffers_of_initialization(kind: type, config, names) -> dict:
    """Buffers as `_init_weights` computes them, for those that it does."""
    import torch

    with torch.device("meta"):
        model = kind(config)
    if not hasattr(model, "_init_weights"):
        return {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        buffer = model.get_buffer(name)
        empty = torch.empty_like(buffer, device="cpu")
        _bytes_of(empty).fill_(_UNTOUCHED)
        setattr(model.get_submodule(owner), leaf, empty)
    try:
        # All modules: FalconH1 computes buffers of its layers where it initializes the whole.
        for module in model.modules():
            model._init_weights(module)
    except Exception:  # written for tensors with numbers
        return {}
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in names if not bool((_bytes_of(buffers[name]) == _UNTOUCHED).all())}


_UNTOUCHED = 0xA5  # a byte that, repeated, is no frequency, no position and no True or False


def _bytes_of(buffer):
    import torch

    return buffer.view(torch.uint8) if buffer.ndim else buffer.reshape(1).view(torch.uint8)


def _unsharded_class(model) -> type:
    """The class a model had before FSDP2 put its own in front of it."""
    from torch.distributed.fsdp import FSDPModule

    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


# ---- Data -----------------------------------------------------------------------------------------------------------


def dataset_fingerprint(dataset) -> str:
    """What identifies the content of a `datasets.Dataset` (`_fingerprint`): part of the key of the token cache.

    There is no public one. Where it is missing the rows themselves are hashed, which takes a while.
    """
    fingerprint = getattr(dataset, "_fingerprint", None)
    if fingerprint:
        return fingerprint
    import hashlib
    import json

    content = hashlib.sha256()
    for row in dataset:
        content.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return content.hexdigest()[:16]


# ---- Chat templates -------------------------------------------------------------------------------------------------


def compiled_chat_template(template: str):
    """A chat template as `apply_chat_template` compiles it (`_compile_jinja_template`): a Jinja template to render.

    `apply_chat_template` takes nothing but JSON values, so the function `strftime_now` cannot be replaced through it.
    None where it is missing: templates then write the date of the day on which they are rendered.
    """
    from transformers.utils import chat_template_utils

    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    return compile_template(template) if compile_template else None
