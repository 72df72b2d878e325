"""Log-probs of given tokens under a language-model head, without its full logits.

The head runs on the positions that predict response tokens only, a part of the vocabulary at a time, and each part's
logits are computed again in the backward pass.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import private_apis

# Bytes of fp32 logits that may exist at once. On a CPU they should stay in its cache.
HEAD_BYTES = {"cpu": 2 << 20, "cuda": 512 << 20, "mps": 256 << 20}


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right of half-precision matrices in float32: rounded to bfloat16, a logit of 20 moves by up to 0.06.
    Matrix units sum in float32 in any case, and hand it over if asked to; a CPU's have to be given it.
    """
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _log_normalizers(logits: torch.Tensor, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logsumexp, the logit of the target) of each row of [N, columns]."""
    return logits.logsumexp(-1), logits.gather(1, local[:, None]).squeeze(1)


def _logits_gradient(logits, slope, normalizers, upstream, local, inside, scale: float) -> torch.Tensor:
    """The gradient of log p[target] with respect to h W^T + b, in the place of the logits [N, columns]."""
    # d log p[target] / d logits = onehot(target) - softmax(logits)
    grad = logits.sub_(normalizers[:, None]).exp_().mul_(-upstream[:, None])
    # Each row has one target here, so this needs no sum of an order that differs from run to run, as scatter_add does.
    picked = grad.gather(1, local[:, None]) + torch.where(inside, upstream, 0.0)[:, None]
    grad.scatter_(1, local[:, None], picked)
    if slope is not None:
        grad.mul_(slope)
    return grad if scale == 1.0 else grad.mul_(scale)


@functools.cache
def _fused(function, kind: str):
    """`function` as one kernel on a GPU: by itself each of its operations reads and writes all logits once."""
    return torch.compile(function, dynamic=True) if kind == "cuda" else function


class _LinearLogps(torch.autograd.Function):
    """log softmax(softcap(scale * (h W^T + b)))[target], over a few columns of the vocabulary at a time.

    hidden [N, d], weight [V, d], bias [V] or None, targets int64 [N] -> float32 [N]; `columns` logits a row are alive
    at once. The backward pass recomputes them and turns them into the gradient in place. Cut along the vocabulary, not
    along the rows, each part of the weight is read once and its gradient written once, in one product over all rows.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, softcap, columns):
        normalizers = torch.full((len(hidden),), -torch.inf, dtype=torch.float32, device=hidden.device)
        chosen = torch.zeros_like(normalizers)
        for part, local, inside in _LinearLogps.parts(weight, targets, columns):
            logits, _ = _LinearLogps.logits(hidden, weight, bias, part, scale, softcap)
            of_part, logit = _fused(_log_normalizers, logits.device.type)(logits, local)
            normalizers = torch.logaddexp(normalizers, of_part)
            chosen = torch.where(inside, logit, chosen)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers)
        ctx.scale, ctx.softcap, ctx.columns = scale, softcap, columns
        return chosen - normalizers

    @staticmethod
    def parts(weight, targets, columns):
        """(slice of the vocabulary, targets counted from its start, which targets lie in it [N]) of each part."""
        for start in range(0, len(weight), columns):
            stop = min(start + columns, len(weight))
            yield (
                slice(start, stop),
                (targets - start).clamp(0, stop - start - 1),
                (targets >= start) & (targets < stop),
            )

    @staticmethod
    def logits(hidden, weight, bias, part, scale, softcap):
        """float32 logits [N, columns], and the soft-cap's slope [N, columns] (None without one)."""
        if hidden.dtype == torch.float32:
            logits = F.linear(hidden, weight[part], None if bias is None else bias[part])
        else:
            logits = _product(hidden, weight[part].T)
            if bias is not None:
                logits.add_(bias[part])
        if scale != 1.0:
            logits.mul_(scale)
        if softcap is None:
            return logits, None
        bounded = logits.div_(softcap).tanh_()
        slope = 1 - bounded * bounded
        return bounded.mul_(softcap), slope

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, bias, targets, normalizers = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # The parts' shares of a row are summed in fp32, whatever the weight's own precision.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for part, local, inside in _LinearLogps.parts(weight, targets, ctx.columns):
            logits, slope = _LinearLogps.logits(hidden, weight, bias, part, ctx.scale, ctx.softcap)
            gradient = _fused(_logits_gradient, logits.device.type)
            grad = gradient(logits, slope, normalizers, upstream, local, inside, ctx.scale)
            if grad_bias is not None:
                grad_bias[part] = grad.sum(0)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                if weight.dtype == torch.float32:
                    grad_hidden.addmm_(grad, weight[part])
                else:
                    grad_hidden += _product(grad, weight[part])
            if grad_weight is not None:
                torch.mm(grad.T, hidden, out=grad_weight[part])
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def target_logps(
    head: torch.nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    n_bytes: int | None = None,
) -> torch.Tensor:
    """Log-probs of given tokens under a language-model head.

    Args:
        head: output embeddings; hidden: [N, d]; targets: int64 [N].
        scale: factor on the logits; softcap: bound c of c * tanh(logits / c).
        n_bytes: of fp32 logits that may exist at once; None is the device's HEAD_BYTES.
    Returns: float32 [N].
    """
    if n_bytes is None:
        n_bytes = head_bytes(hidden.device.type)
    if (
        type(head) is torch.nn.Linear
        and not hasattr(head.weight, "placements")
        and not private_apis.has_forward_pre_hooks(head)
    ):
        return _LinearLogps.apply(
            hidden, head.weight, head.bias, targets, scale, softcap, head_columns(len(hidden), n_bytes)
        )

    # A head with hooks or a class of its own (tensor parallelism, adapters) is called as it is, on a few rows.
    def chunk_logps(rows, wanted):
        logits = head(rows).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits.log_softmax(-1).gather(1, wanted[:, None]).squeeze(1)

    vocabulary = getattr(head, "out_features", None) or head.weight.shape[0]
    chunk = max(16, n_bytes // (4 * vocabulary))
    parts = [
        checkpoint(chunk_logps, rows, wanted, use_reentrant=False)
        for rows, wanted in zip(hidden.split(chunk), targets.split(chunk))
    ]
    return torch.cat(parts)


def head_bytes(kind: str) -> int:
    """HEAD_BYTES of a kind of device."""
    return HEAD_BYTES.get(kind, HEAD_BYTES["cuda"])


def head_columns(rows: int, n_bytes: int) -> int:
    """Columns of the vocabulary whose fp32 logits for all rows fit n_bytes; enough for an efficient product."""
    return max(256, n_bytes // (4 * max(1, rows)))


def head_scaling(model) -> tuple[float, float | None]:
    """(scale, softcap) that a model applies to its logits after the head (Cohere, Granite, Gemma 2 and their kin)."""
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    if getattr(config, "logits_scaling", None):
        scale /= float(config.logits_scaling)
    return scale, getattr(config, "final_logit_softcapping", None)


# ---- More than the log-prob of one token -----------------------------------------------------------------------------


def row_logps(head, hidden: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """Log-probs of the whole vocabulary, float32 [N, V], of hidden states [N, d]."""
    logits = head(hidden).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.log_softmax(-1)


def in_parts(function, head, hidden: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    """function(hidden, *more) of a few rows at a time, [N], whose logits are computed again in the backward pass."""
    vocabulary = getattr(head, "out_features", None) or head.weight.shape[0]
    rows = max(16, head_bytes(hidden.device.type) // (4 * vocabulary))
    parts = zip(*(tensor.split(rows) for tensor in (hidden, *more)))
    return torch.cat([checkpoint(function, *part, use_reentrant=False) for part in parts])


def log_collisions(head, hidden: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """log sum_v p(v)^2 at each row, float32 [N]."""
    return in_parts(lambda rows: (2 * row_logps(head, rows, scale, softcap)).logsumexp(-1), head, hidden)


def divergence_from(
    head, hidden: torch.Tensor, reference: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """KL(reference || policy) at each row, float32 [N] with gradient.

    Args:
        hidden: [N, d], the policy's; reference: float32 [N, V], the reference's log-probs.
    """

    def of_rows(rows, theirs):
        return (theirs.exp() * (theirs - row_logps(head, rows, scale, softcap))).sum(-1)

    return in_parts(of_rows, head, hidden, reference)
