"""One forward pass: a micro-batch of rows in, log-probabilities of its responses out.

Three ideas make this cheap, and each is exact:

* A prompt is computed once for all its responses: a packed row holds the prompt, then its responses, whose positions
  restart after it (packed_layout.py), and the model's attention is replaced by one that knows them (attention.py).
* The language-model head runs only on positions that predict response tokens, and full logits never exist (head.py).
* There is no padding: all linear layers see one long row.
"""

from __future__ import annotations

import torch

from data.batching import MicroBatch
from modeling.head import divergence_from, head_scaling, log_collisions, row_logps, target_logps
from modeling.packed_layout import PackedLayout


def response_logps(model, batch: MicroBatch) -> torch.Tensor:
    """Summed log-prob of each response of a micro-batch.

    Bound to the model as `model.response_logps(batch)` by `use_attention`, so that a sharded model can treat it as a
    forward method of its own.

    Returns: float32 [K], in the batch's response order, differentiable.
    """
    return sum_responses(token_logps(model, batch), batch)


def sum_responses(tokens: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sums [K] over the scored tokens [N] of each response."""
    return torch.stack([part.sum() for part in tokens.split(batch.lengths_list)])


def token_logps(model, batch: MicroBatch, layout: PackedLayout | None = None) -> torch.Tensor:
    """Log-prob of every scored token, float32 [N], in the order of `batch.targets`.

    Args:
        layout: of a packed batch, for callers that want to see who has read it.
    Raises:
        NotImplementedError: the model's own code takes part in attention in a way that packed rows would leave out.
    """
    if model.full_forward:
        rows = _scored_logits(model, batch)
        return rows.log_softmax(-1).gather(1, batch.targets[:, None]).squeeze(1)
    hidden = _scored_hidden(model, batch, layout)
    return target_logps(model.get_output_embeddings(), hidden, batch.targets, *head_scaling(model))


def token_collisions(model, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logps`, and log sum_v p(v)^2 at each of these tokens, float32 [N] without gradient."""
    if model.full_forward:
        logps = _scored_logits(model, batch).log_softmax(-1)
        return logps.gather(1, batch.targets[:, None]).squeeze(1), (2 * logps.detach()).logsumexp(-1)
    hidden, head = _scored_hidden(model, batch), model.get_output_embeddings()
    with torch.no_grad():
        collisions = log_collisions(head, hidden, *head_scaling(model))
    return target_logps(head, hidden, batch.targets, *head_scaling(model)), collisions


def token_distributions(model, batch: MicroBatch) -> torch.Tensor:
    """Log-probs of the whole vocabulary at each scored token, float32 [N, V]."""
    if model.full_forward:
        return _scored_logits(model, batch).log_softmax(-1)
    return row_logps(model.get_output_embeddings(), _scored_hidden(model, batch), *head_scaling(model))


def token_divergence(model, batch: MicroBatch, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logps`, and KL(reference || model) at each of these tokens, float32 [N], both with gradient.

    Args:
        reference: `token_distributions` of the reference.
    """
    if model.full_forward:
        logps = _scored_logits(model, batch).log_softmax(-1)
        return logps.gather(1, batch.targets[:, None]).squeeze(1), (reference.exp() * (reference - logps)).sum(-1)
    hidden, head = _scored_hidden(model, batch), model.get_output_embeddings()
    divergence = divergence_from(head, hidden, reference, *head_scaling(model))
    return target_logps(head, hidden, batch.targets, *head_scaling(model)), divergence


def _scored_logits(model, batch: MicroBatch) -> torch.Tensor:
    """float32 logits [N, V] of the model's own forward pass."""
    assert batch.trees is None, "packed rows are scored without the whole logits"
    model.rotary_rows.set(batch)
    logits = model(input_ids=batch.input_ids, use_cache=False, attention_mask=batch.attention_mask).logits
    return logits.reshape(-1, logits.shape[-1])[batch.predictors].float()


def _scored_hidden(model, batch: MicroBatch, layout: PackedLayout | None = None) -> torch.Tensor:
    """Hidden states [N, d] that predict the scored tokens."""
    arguments = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.trees is not None:
        layout = layout or PackedLayout(batch.trees, batch.position_ids[0], model.attention_kernel)
        for window in model.attention_windows:
            layout.block_mask(window)  # before the first block, so that making it is no part of a compiled block
        # A ready 4-D mask stops the library from making one; the packed attention never reads it.
        mask = batch.input_ids.new_ones((1, 1, 1, 1), dtype=torch.bool)
        arguments |= {"position_ids": batch.position_ids, "layout": layout, "attention_mask": mask}
    else:
        # Positions are the model's own: some do not start at 0, as those of RoBERTa and its kin.
        arguments["attention_mask"] = batch.attention_mask
    model.rotary_rows.set(batch)
    hidden = model.base_model(**arguments).last_hidden_state
    if layout is not None:
        # Code with attention of its own drops the layout without a word and scores something else.
        problem = layout.unread if layout.used else "its attention is not replaceable"
        if problem:
            raise NotImplementedError(problem)
    return hidden.reshape(-1, hidden.shape[-1])[batch.predictors]
