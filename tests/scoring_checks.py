"""Prompts with responses, scores of them by the models of architectures.py, and what counts as the same scores."""

import numpy as np
import torch
from architectures import VOCABULARY, make

import private_apis
from data.batching import PromptUnit, pad
from modeling.attention import ATTENTION_NAME, use_attention
from modeling.scoring import response_logps

PAD = 0


def unit_of(group, prompt, responses, seed=0):
    rng = np.random.default_rng([seed, group])
    draw = lambda n: rng.integers(5, VOCABULARY, n).astype(np.int32)  # noqa: E731
    return PromptUnit(
        0,
        group,
        draw(prompt),
        [draw(n) for n in responses],
        list(range(len(responses))),
        [(i, (i + 1) % len(responses)) for i in range(len(responses))],
    )


# One to four responses a prompt; prompts and responses shorter and longer than the sliding window; single tokens.
UNITS = [unit_of(0, 22, (12, 7, 20)), unit_of(1, 9, (3, 1)), unit_of(2, 1, (5,)), unit_of(3, 6, (2, 30, 1, 4))]


def scored(model, kernel, full_forward, batch):
    """Log-probs [K] and the gradient of a weighting of them, by parameter."""
    use_attention(model, kernel, full_forward)
    model.zero_grad(set_to_none=True)
    logps = response_logps(model, batch)
    (logps * torch.linspace(-1, 2, len(logps))).sum().backward()
    return logps.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def true_scores(name, units=UNITS, **options):
    """The model's own code, a fresh model: full logits of padded rows under its own attention."""
    model = make(name, **options)
    assert private_apis.attention_of(model.config) != ATTENTION_NAME
    return scored(model, "plain", True, pad(units, PAD))


def relative(found, truth):
    """|found - truth| / |truth| over all gradients together."""
    assert found.keys() == truth.keys()
    difference = sum((found[name] - truth[name]).double().pow(2).sum() for name in truth)
    return (difference / sum(g.double().pow(2).sum() for g in truth.values())).sqrt().item()


def check_same(found, truth, logps=1e-5, gradients=1e-5):
    assert ((found[0] - truth[0]).abs() <= logps * truth[0].abs().clamp(min=1.0)).all(), (found[0], truth[0])
    assert relative(found[1], truth[1]) <= gradients
