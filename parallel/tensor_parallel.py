"""Tensor parallelism: a model's matrices split over devices, as the plan that comes with the model asks."""

from __future__ import annotations

import re

import torch
from torch.distributed.device_mesh import DeviceMesh

SPLITS = ("colwise", "rowwise")  # a matrix's output or its input dimension is cut
WHOLE = "replicated_with_grad_allreduce"  # a norm over one head's width: see `_sum_gradients`


def tensor_parallel_styles(model, size: int) -> dict[str, str]:
    """{module name: style} of the modules that the model's own tensor-parallel plan names, on `size` devices.

    Embeddings, norms and the head stay whole on every rank, also where a plan would split them: they may be tied, and
    the head is computed on response positions only.
    Raises:
        ValueError: the model has no such plan, one that asks for other styles, or head counts that do not divide.
    """
    name = type(model).__name__
    wanted = getattr(model, "tp_plan", None) or getattr(model.config, "base_model_tp_plan", None)
    if not wanted:
        raise ValueError(f"{name} comes with no tensor-parallel plan: use trainer=FSDPTrainer.")
    settings = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(settings, key, None)
        if heads and heads % size:
            raise ValueError(f"tp_size={size} does not divide {key}={heads} of {name}; use a tp_size that does.")
    # Patterns such as "model.layers.*.mlp.up_proj", with or without the base model's prefix.
    prefix = f"(?:{re.escape(model.base_model_prefix)}\\.)?"
    patterns = [(re.compile(prefix + re.escape(path).replace(r"\*", r"\d+")), style) for path, style in wanted.items()]
    whole = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    styles = {}
    for path, module in model.named_modules():
        style = next((style for pattern, style in patterns if pattern.fullmatch(path)), None)
        if style is not None and id(module) not in whole:
            styles[path] = style
    unknown = sorted(set(styles.values()) - {*SPLITS, WHOLE})
    if unknown:
        raise ValueError(
            f"The tensor-parallel plan of {name} asks for {', '.join(unknown)}, which is not "
            "supported here: use trainer=FSDPTrainer."
        )
    return styles


def apply_tensor_parallel(model, mesh: DeviceMesh) -> None:
    """Split a model's matrices over the ranks of `mesh` (DTensor), as `tensor_parallel_styles` finds."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    split = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    for path, style in tensor_parallel_styles(model, mesh.size()).items():
        module = model.get_submodule(path)
        if style == WHOLE:
            _sum_gradients(module, mesh)
        else:
            parallelize_module(module, mesh, split[style]())


def _sum_gradients(module, mesh: DeviceMesh) -> None:
    """Norms over one head's width are whole on every rank but see that rank's heads only: their gradients are summed.

    Done on the module's output's way back, before any sharding reduces the parameter's gradient over other ranks.
    """
    import torch.distributed as dist

    class SumBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=mesh.get_group())
            return grad

    forward = module.forward

    def summed_forward(*args, **kwargs):
        own = dict(module.named_parameters(recurse=False))
        try:
            for name, parameter in own.items():
                delattr(module, name)
                setattr(module, name, SumBackward.apply(parameter))
            return forward(*args, **kwargs)
        finally:
            for name, parameter in own.items():
                delattr(module, name)
                setattr(module, name, parameter)

    module.forward = summed_forward
