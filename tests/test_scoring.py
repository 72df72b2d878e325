"""Packed scoring against the plain thing: every response a row of its own, through the model's own forward."""

from functools import partial

import numpy as np
import pytest
import torch
from architectures import KINDS, PLAIN_ONLY, SLIDING, VOCABULARY, WINDOW, make
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.batching import PrefixTree, PromptUnit, pack, pad
from modeling import loading, scoring
from modeling.scoring import (
    PackedLayout,
    choose_attention,
    head_scaling,
    packed_attention,
    response_logps,
    target_logps,
    use_attention,
)

SHARING = [name for name in KINDS if name not in PLAIN_ONLY]
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


def scored(model, kernel, whole, batch):
    """Log-probs [K] and the gradient of a weighting of them, by parameter."""
    use_attention(model, kernel, whole)
    model.zero_grad(set_to_none=True)
    logps = response_logps(model, batch)
    (logps * torch.linspace(-1, 2, len(logps))).sum().backward()
    return logps.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def true_scores(name, units=UNITS, **options):
    """The model's own code, a fresh model: full logits of padded rows under its own attention."""
    model = make(name, **options)
    assert model.config._attn_implementation != scoring.ATTENTION_NAME
    return scored(model, "plain", True, pad(units, PAD))


def relative(found, truth):
    """|found - truth| / |truth| over all gradients together."""
    assert found.keys() == truth.keys()
    difference = sum((found[name] - truth[name]).double().pow(2).sum() for name in truth)
    return (difference / sum(g.double().pow(2).sum() for g in truth.values())).sqrt().item()


def check_same(found, truth, logps=1e-5, gradients=1e-5):
    assert ((found[0] - truth[0]).abs() <= logps * truth[0].abs().clamp(min=1.0)).all(), (found[0], truth[0])
    assert relative(found[1], truth[1]) <= gradients


# ---- Every architecture


@pytest.mark.parametrize("name", KINDS)
def test_the_chosen_way_equals_plain_rows(name):
    model = make(name)
    kernel, whole, notice = choose_attention(model, UNITS[0], "auto", PAD, "cpu")
    if name in PLAIN_ONLY:
        assert kernel == "plain"
        assert type(model).__name__ in notice and "cannot share a prompt" in notice and "packed_sdpa:" in notice
        batch = pad(UNITS, PAD)
    else:
        assert (kernel, whole, notice) == ("packed_sdpa", False, None)
        batch = pack(UNITS)
    check_same(scored(model, kernel, whole, batch), true_scores(name))


def test_the_notice_says_why():
    _, _, notice = choose_attention(make("falcon"), UNITS[0], "auto", PAD, "cpu")
    assert "its attention is not replaceable" in notice


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_oss", "bloom", "mamba"])
def test_plain_rows_through_the_chunked_head_equal_the_models_own(name):
    check_same(scored(make(name), "plain", False, pad(UNITS, PAD)), true_scores(name))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_prefix_sharing_off_is_the_same(name):
    model = make(name)
    check_same(
        scored(model, "packed_sdpa", False, pack(UNITS, share_prefix=False)),
        scored(model, "packed_sdpa", False, pack(UNITS)),
    )


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3_text"])
def test_micro_batches_add_up(name):
    model = make(name)
    whole = scored(model, "packed_sdpa", False, pack(UNITS))
    parts = [response_logps(model, pack([unit])).detach() for unit in UNITS]
    assert torch.allclose(torch.cat(parts), whole[0], rtol=1e-5)


@pytest.mark.parametrize("name", SHARING)
def test_siblings_and_neighbours_change_nothing(name):
    model = make(name)
    use_attention(model, "packed_sdpa")
    other = [unit_of(i, len(u.prompt), [len(r) for r in u.responses], seed=1) for i, u in enumerate(UNITS)]
    other[1] = UNITS[1]
    other[0] = PromptUnit(
        0,
        0,
        UNITS[0].prompt,
        [other[0].responses[0], UNITS[0].responses[1], other[0].responses[2]],
        [0, 1, 2],
        UNITS[0].pairs,
    )
    with torch.no_grad():
        found, expected = response_logps(model, pack(other)), response_logps(model, pack(UNITS))
    for same in (1, 3, 4):  # unit 0's second response, and both of unit 1
        assert found[same].item() == pytest.approx(expected[same].item(), rel=1e-5)
    assert (found[0] - expected[0]).abs() > 0.1  # the ones that were replaced do change


@pytest.mark.parametrize("name", SLIDING)
def test_the_window_matters_here(name):
    """Guards the tests above: with a long window these models answer otherwise, so a dropped window would be seen."""
    wide = true_scores(name, sliding_window=10_000)[0]
    assert (wide - true_scores(name)[0]).abs().max() > 1e-2
    model = make(name, sliding_window=10_000)
    assert torch.allclose(scored(model, "packed_sdpa", False, pack(UNITS))[0], wide, rtol=1e-5)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_activation_checkpointing_is_the_same(name, every):
    model = make(name)
    loading.checkpoint_activations(loading.find_blocks(model, None), every)
    check_same(scored(model, "packed_sdpa", False, pack(UNITS)), true_scores(name))


@pytest.mark.parametrize("name", ["opt", "gpt2", "gpt_neox", "phi", "gptj"])
def test_dropout_is_off(name):
    rates = {
        "opt": dict(dropout=0.5, attention_dropout=0.5, layerdrop=0.5),
        "gpt2": dict(attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5),
        "gptj": dict(attn_pdrop=0.5, resid_pdrop=0.5),
        "gpt_neox": dict(attention_dropout=0.5, hidden_dropout=0.5),
        "phi": dict(attention_dropout=0.5, resid_pdrop=0.5, embd_pdrop=0.5),
    }[name]
    model = make(name, **rates)
    first = scored(model, "packed_sdpa", False, pack(UNITS))
    second = scored(model, "packed_sdpa", False, pack(UNITS))
    assert torch.equal(first[0], second[0]) and relative(first[1], second[1]) == 0
    check_same(first, true_scores(name))


def test_models_are_loaded_in_evaluation_mode():
    from omegaconf import OmegaConf

    config = OmegaConf.create(
        {
            "seed": 0,
            "model": {
                "random_config": {
                    "model_type": "opt",
                    "hidden_size": 16,
                    "ffn_dim": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "word_embed_proj_dim": 16,
                    "dropout": 0.5,
                }
            },
        }
    )
    model = loading.load_model(config, loading.byte_tokenizer(), torch.float32, "cpu")
    assert not any(module.training for module in model.modules())


# ---- Choosing


def test_wanting_plain_needs_no_excuse():
    assert choose_attention(make("llama"), UNITS[0], "plain", PAD, "cpu") == ("plain", False, None)


def test_wanting_the_impossible_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match="model.attention=packed_sdpa.*Bloom.*Use model.attention=auto"):
        choose_attention(make("bloom"), UNITS[0], "packed_sdpa", PAD, "cpu")


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_models_own_never_passes_for_shared(dtype, spread):
    """In half precision and with near-uniform weights the wrong answer is close: numbers alone would let it pass."""
    kernel, _, notice = choose_attention(make("falcon", dtype=dtype, spread=spread), UNITS[0], "auto", PAD, "cpu")
    assert kernel == "plain" and notice


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma2", "gpt2", "qwen3"])
def test_half_precision_shares_too(name):
    assert choose_attention(make(name, dtype=torch.bfloat16, spread=2.0), UNITS[0], "auto", PAD, "cpu") == (
        "packed_sdpa",
        False,
        None,
    )


def broken_attention(how):
    def attention(module, query, key, value, mask, scaling=None, dropout=0.0, *, layout=None, **kwargs):
        if layout is not None:
            if how == "siblings":  # responses of a prompt see those before them
                trees = [PrefixTree(s.prompt, (sum(s.responses),)) for s in layout.trees]
            elif how == "prompt":  # responses do not see their prompt
                trees = [PrefixTree(n, ()) for s in layout.trees for n in (s.prompt, *s.responses)]
            layout.used, layout = True, PackedLayout(trees, layout.positions)
        return packed_attention(module, query, key, value, mask, scaling, dropout, layout=layout, **kwargs)

    return attention


@pytest.mark.parametrize(
    "dtype, how", [(torch.float32, "siblings"), (torch.float32, "prompt"), (torch.bfloat16, "prompt")]
)
def test_the_self_check_finds_wrong_attention(monkeypatch, how, dtype):
    from transformers import AttentionInterface

    monkeypatch.setitem(AttentionInterface._global_mapping, scoring.ATTENTION_NAME, broken_attention(how))
    kernel, whole, notice = choose_attention(make("llama", dtype=dtype), UNITS[0], "auto", PAD, "cpu")
    assert kernel == "plain" and "log-probs differ" in notice


def test_an_unknown_head_is_scored_through_the_whole_model():
    model = make("llama")
    forward = model.forward
    shift = torch.linspace(0, 3, VOCABULARY)

    def with_a_twist(*arguments, **keywords):
        output = forward(*arguments, **keywords)
        output.logits = output.logits + shift
        return output

    model.forward = with_a_twist
    kernel, whole, notice = choose_attention(model, UNITS[0], "auto", PAD, "cpu")
    assert (kernel, whole) == ("plain", True) and "differ" in notice
    rows = [
        torch.tensor(np.concatenate([unit.prompt, response]))[None].long()
        for unit in UNITS
        for response in unit.responses
    ]
    expected = torch.stack(
        [
            with_a_twist(row).logits[0, -1 - n : -1].log_softmax(-1).gather(1, row[0, -n:, None]).sum()
            for row, n in zip(rows, pack(UNITS).lengths_list)
        ]
    )
    assert torch.allclose(response_logps(model, pad(UNITS, PAD)), expected, rtol=1e-5)


# ---- Attention


def random_units(rng):
    return [unit_of(i, int(rng.integers(1, 30)), rng.integers(1, 30, rng.integers(1, 5)).tolist()) for i in range(3)]


def dense_rule(batch, window):
    """[T, T] visibility by the definition: the same prompt, the same response, no later, and within the window."""
    places = []
    for tree, tree in enumerate(batch.trees):
        places += [(tree, 0, i) for i in range(tree.prompt)]
        places += [(tree, k, tree.prompt + i) for k, n in enumerate(tree.responses, 1) for i in range(n)]
    return torch.tensor(
        [
            [
                tree == t and branch in (0, b) and place <= p and (window is None or p - place < window)
                for tree, branch, place in places
            ]
            for t, b, p in places
        ]
    )


@pytest.mark.parametrize("window", [None, 1, WINDOW, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_kernel_follows_the_dense_rule(window, seed):
    batch = pack(random_units(np.random.default_rng(seed)))
    total = batch.input_ids.numel()
    rule = dense_rule(batch, window)
    layout = PackedLayout(batch.trees, batch.position_ids[0])
    index = torch.arange(total)
    assert torch.equal(layout.mask_mod(window)(0, 0, index[:, None], index[None]), rule)

    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 4, total, 16, generator=generator)
    key, value = (torch.randn(1, 2, total, 16, generator=generator) for _ in range(2))  # grouped heads
    wide_key, wide_value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = (query @ wide_key.mT * 0.3).masked_fill(~rule, float("-inf"))
    expected = (scores.softmax(-1) @ wide_value).transpose(1, 2)
    for kernel in ("sdpa", "flex"):
        layout = PackedLayout(batch.trees, batch.position_ids[0], kernel)
        found, weights = packed_attention(
            None, query, key, value, None, scaling=0.3, layout=layout, sliding_window=window
        )
        assert weights is None and found.shape == (1, total, 4, 16) and found.is_contiguous()
        assert torch.allclose(found, expected, atol=2e-5), (kernel, (found - expected).abs().max())

    capped = (5 * torch.tanh(query @ wide_key.mT * 0.3 / 5)).masked_fill(~rule, float("-inf"))
    sinks = torch.randn(4, generator=generator)
    weights = torch.cat([capped, sinks.reshape(1, 4, 1, 1).expand(1, 4, total, 1)], -1).softmax(-1)[..., :-1]
    for kernel in ("sdpa", "flex"):
        layout = PackedLayout(batch.trees, batch.position_ids[0], kernel)
        found, _ = packed_attention(
            None, query, key, value, None, scaling=0.3, layout=layout, sliding_window=window, softcap=5.0, s_aux=sinks
        )
        assert torch.allclose(found, (weights @ wide_value).transpose(1, 2), atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_neox"])
def test_flex_scores_as_the_model_does(name):
    model = make(name)
    use_attention(model, "flex")
    with torch.no_grad():
        found = response_logps(model, pack(UNITS))
    assert torch.allclose(found, true_scores(name)[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "gpt_neox"])
def test_generation_under_the_packed_attention_is_the_models_own(name):
    """Without a layout, one token at a time over a cache, and with left padding, the same function serves."""
    rows = torch.tensor([[PAD] * 3 + list(range(10, 25)), list(range(30, 48))])
    mask = (rows != PAD).long()
    for ids, attention in ((rows, mask), (rows[1:], mask[1:])):
        own, ours = make(name), make(name)
        ours.set_attn_implementation(scoring.ATTENTION_NAME)
        arguments = dict(
            attention_mask=attention,
            max_new_tokens=6,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=PAD,
            eos_token_id=None,
        )
        expected, found = own.generate(ids, **arguments), ours.generate(ids, **arguments)
        assert torch.equal(found.sequences, expected.sequences)
        for a, b in zip(found.logits, expected.logits):
            assert torch.allclose(a, b, atol=1e-3, rtol=1e-4)


# ---- The head

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


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation makes, and of all logits-like ones."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("kernel", ["packed_sdpa", "plain"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "llama_tied"])
def test_full_logits_never_exist(monkeypatch, name, kernel):
    vocabulary, width = 5000, 64
    units = [unit_of(i, 20, (60, 60, 60, 60)) for i in range(2)]
    monkeypatch.setitem(scoring.HEAD_BYTES, "cpu", 4 * 16 * vocabulary)
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
    monkeypatch.setitem(scoring.HEAD_BYTES, "cpu", 1 << 20)
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
