"""The norm of gradients whose parts lie on many devices."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def group_by_mesh(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters grouped by the mesh they lie on: an operation on many tensors at once takes those of one mesh only."""
    groups: dict[object, list] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


@torch.no_grad()
def clip_gradients(model, max_norm: float) -> torch.Tensor:
    """Scale gradients to a 2-norm of at most `max_norm`, taken over all parameters of all ranks.

    Parameters are grouped by the mesh they lie on, since one call cannot total over several; a part that several ranks
    hold alike counts once.
    Returns: the norm before scaling, float32 [].
    """
    groups = group_by_mesh([parameter for parameter in model.parameters() if parameter.grad is not None])
    norms = []
    for parameters in groups:
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        norms.append(norm.full_tensor().float() if isinstance(norm, DTensor) else norm)
    if len(norms) == 1:
        total = norms[0]
    else:
        device = norms[0].device
        total = torch.linalg.vector_norm(torch.stack([norm.float().to(device) for norm in norms]))
    for parameters in groups:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total.float()
