"""The language-model head without full logits, against full logits."""

from functools import partial

import pytest
import torch
from architectures import make
from scoring_checks import PAD, unit_of

import private_apis
from data.batching import pack, pad
from modeling.attention import use_attention
from modeling.head import HEAD_BYTES, head_scaling, target_logps
from modeling.scoring import response_logps

HEADS = [dict(), dict(scale=0.3), dict(softcap=5.0), dict(scale=0.5, softcap=3.0)]


def head_case(bias, dtype=torch.float32, n=37, width=24, vocabulary=101):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = torch.nn.Linear(width, vocabulary, bias=bias)
        head.weight.data.mul_(5)
        hidden = torch.randn(n, width)
        targets = torch.randint(0, vocabulary, (n,))
        weights = torch.randn(n)
    return head.to(dtype), hidden.to(dtype).requires_grad_(), targets, weights


def full(head, hidden, targets, scale=1.0, softcap=None):
    logits = head(hidden).float() * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def with_gradients(function, head, hidden, targets, weights, **options):
    for tensor in (hidden, *head.parameters()):
        tensor.grad = None
    logps = function(head, hidden, targets, **options)
    (logps * weights).sum().backward()
    return [logps.detach(), *(x.grad.clone() for x in (hidden, *head.parameters()))]


class OwnHead(torch.nn.Linear):
    """A head that is not plain nn.Linear, as adapters have: it must be called as the module it is."""

    def forward(self, hidden):
        return super().forward(hidden)


@pytest.mark.parametrize("kind", [torch.nn.Linear, OwnHead])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", HEADS)
def test_any_chunk_gives_what_full_logits_give(kind, bias, options):
    head, *rest = head_case(bias, vocabulary=1111)  # not a multiple of any part
    head.__class__ = kind
    expected = with_gradients(full, head, *rest, **options)
    for n_bytes in (1, 20 * 1111 * 4, 37 * 300 * 4, 1 << 20, None):
        found = with_gradients(partial(target_logps, n_bytes=n_bytes), head, *rest, **options)
        for a, b in zip(found, expected):
            assert a.dtype == b.dtype
            assert (a - b).norm() <= 1e-6 * b.norm()


@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_frozen_parts_get_no_gradient_and_the_others_do(frozen):
    head, hidden, targets, weights = head_case(True)
    expected = with_gradients(full, head, hidden, targets, weights)
    hidden = hidden.detach().requires_grad_(frozen != "hidden")
    head.requires_grad_(frozen != "head").zero_grad()
    (target_logps(head, hidden, targets, n_bytes=1) * weights).sum().backward()
    if frozen == "head":
        assert head.weight.grad is None and torch.allclose(hidden.grad, expected[1], atol=1e-5)
    else:
        assert hidden.grad is None and torch.allclose(head.weight.grad, expected[2], atol=1e-5)


@pytest.mark.parametrize("options", HEADS)
def test_bfloat16_is_as_near_the_truth_as_full_logits_are(options):
    head, hidden, targets, weights = head_case(True, torch.bfloat16, n=200, width=64, vocabulary=1000)
    exact = torch.nn.Linear(64, 1000)
    exact.load_state_dict({name: value.float() for name, value in head.state_dict().items()})
    truth = with_gradients(full, exact, hidden.detach().float().requires_grad_(), targets, weights, **options)
    usual = with_gradients(full, head, hidden, targets, weights, **options)
    found = with_gradients(partial(target_logps, n_bytes=1), head, hidden, targets, weights, **options)
    assert found[0].dtype == torch.float32
    for ours, theirs, right in zip(found, usual, truth):
        # Each part's share of a row's gradient is rounded, then their sum: twice, where full logits round once.
        assert (ours - right).norm() <= 1.5 * (theirs - right).norm()


class LargestTensor(private_apis.dispatch_mode()):
    """Records the number of elements of the largest tensor that any operation makes, and of all logits-like ones."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, torch.Tensor):
                self.elements = max(self.elements, part.numel())
        return result


@pytest.mark.parametrize("kernel", ["packed_sdpa", "plain"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "llama_tied"])
def test_full_logits_never_exist(monkeypatch, name, kernel):
    vocabulary, width = 5000, 64
    units = [unit_of(i, 20, (60, 60, 60, 60)) for i in range(2)]
    monkeypatch.setitem(HEAD_BYTES, "cpu", 4 * 16 * vocabulary)
    model = make(name, vocab_size=vocabulary)
    batch = pack(units) if kernel == "packed_sdpa" else pad(units, PAD)
    use_attention(model, kernel)
    with LargestTensor() as largest:
        response_logps(model, batch).sum().backward()
    assert largest.elements <= vocabulary * width  # the weight's own gradient; logits would be 480 x 5000
    assert batch.targets.numel() * vocabulary > 5 * vocabulary * width

    with LargestTensor() as reference, torch.no_grad():
        response_logps(model, batch)
    assert reference.elements <= vocabulary * width

    use_attention(model, "plain", full_forward=True)  # the measure does see full logits
    with LargestTensor() as everything, torch.no_grad():
        response_logps(model, pad(units, PAD))
    assert everything.elements >= 8 * 80 * vocabulary


@pytest.mark.parametrize("kind", [torch.nn.Linear, OwnHead])
def test_the_memory_of_logits_is_bounded(monkeypatch, kind):
    monkeypatch.setitem(HEAD_BYTES, "cpu", 1 << 20)
    head, hidden, targets, _ = head_case(False, n=1000, width=4, vocabulary=5000)
    head.__class__ = kind
    with LargestTensor() as largest:
        target_logps(head, hidden, targets).sum().backward()
    assert largest.elements * 4 <= 1 << 20


@pytest.mark.parametrize(
    "name, expected",
    [("cohere", (0.3, None)), ("granite", (1 / 3, None)), ("gemma2", (1.0, 30.0)), ("llama", (1.0, None))],
)
def test_head_scaling(name, expected):
    assert head_scaling(make(name)) == (pytest.approx(expected[0]), expected[1])
