"""The attention kernels against the dense rule and the models' own attention, and the registry of them."""

from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from architectures import SLIDING, WINDOW, make
from scoring_checks import PAD, UNITS, true_scores, unit_of
from torch.nn.attention.flex_attention import create_block_mask

from data.batching import pack
from modeling import attention_kernels
from modeling.attention import ATTENTION_NAME, packed_attention, use_attention
from modeling.attention_kernels import candidates, is_packed, kernel_for, kernel_names, row_multiple
from modeling.blocks import checkpoint_activations, find_blocks
from modeling.packed_layout import PackedLayout
from modeling.scoring import response_logps
from modeling.scoring_check import choose_attention
from settings.schema import ModelSettings

ON_CPU = dict.fromkeys(k.name for k in attention_kernels.KERNELS if k.runs_on("cpu", torch.float32))
PACKED = [name for name in ON_CPU if is_packed(name)]


def random_units(rng):
    return [unit_of(i, int(rng.integers(1, 30)), rng.integers(1, 30, rng.integers(1, 5)).tolist()) for i in range(3)]


def dense_rule(batch, window):
    """[T, T] visibility by the definition: the same prompt, the same response, no later, and within the window."""
    places = []
    for number, tree in enumerate(batch.trees):
        places += [(number, 0, i) for i in range(tree.prompt)]
        places += [(number, k, tree.prompt + i) for k, n in enumerate(tree.responses, 1) for i in range(n)]
    return torch.tensor(
        [
            [
                number == t and branch in (0, b) and place <= p and (window is None or p - place < window)
                for number, branch, place in places
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
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 4, total, 16, generator=generator)
    key, value = (torch.randn(1, 2, total, 16, generator=generator) for _ in range(2))  # grouped heads
    wide_key, wide_value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = (query @ wide_key.mT * 0.3).masked_fill(~rule, float("-inf"))
    expected = (scores.softmax(-1) @ wide_value).transpose(1, 2)
    for kernel in PACKED:
        layout = PackedLayout(batch.trees, batch.position_ids[0], kernel)
        found, weights = packed_attention(
            None, query, key, value, None, scaling=0.3, layout=layout, sliding_window=window
        )
        assert weights is None and found.shape == (1, total, 4, 16) and found.is_contiguous()
        assert torch.allclose(found, expected, atol=2e-5), (kernel, (found - expected).abs().max())

    capped = (5 * torch.tanh(query @ wide_key.mT * 0.3 / 5)).masked_fill(~rule, float("-inf"))
    sinks = torch.randn(4, generator=generator)
    weights = torch.cat([capped, sinks.reshape(1, 4, 1, 1).expand(1, 4, total, 1)], -1).softmax(-1)[..., :-1]
    for kernel in PACKED:
        layout = PackedLayout(batch.trees, batch.position_ids[0], kernel)
        found, _ = packed_attention(
            None, query, key, value, None, scaling=0.3, layout=layout, sliding_window=window, softcap=5.0, s_aux=sinks
        )
        assert torch.allclose(found, (weights @ wide_value).transpose(1, 2), atol=2e-5)


@pytest.mark.parametrize("window", [None, 17, 128, 200, 1000])
def test_block_masks_are_those_of_the_dense_rule(window):
    """Every block that is left out, and every block that is computed without looking at the rule."""
    rng = np.random.default_rng(window)
    for _ in range(8):
        units = [
            unit_of(i, int(rng.integers(1, 300)), rng.integers(1, 250, rng.integers(1, 4)).tolist()) for i in range(2)
        ]
        batch = pack(units, multiple=int(rng.choice([1, 256])))
        layout = PackedLayout(batch.trees, batch.position_ids[0])
        index, total = torch.arange(batch.input_ids.numel()), batch.input_ids.numel()
        rule = dense_rule(batch, window)
        mask = layout.block_mask(window)
        assert torch.equal(mask.mask_mod(0, 0, index[:, None], index[None]), rule)
        expected = create_block_mask(mask.mask_mod, None, None, total, total, device="cpu")
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(mask, name), getattr(expected, name)), name
        assert torch.equal(mask.to_dense(), expected.to_dense())


def flash_over_sequences(query, key, value, plan, scale, window):
    """What flash attention computes over sequences, written out: queries are the last of their sequence's keys."""
    outputs = []
    queries, keys = plan.query_starts.tolist(), plan.key_starts.tolist()
    assert plan.most_queries == max(np.diff(queries)) and plan.most_keys == max(np.diff(keys))
    for a, b, c, d in zip(queries, queries[1:], keys, keys[1:]):
        own_query = query[a:b].transpose(0, 1)
        own_key, own_value = (t[c:d].transpose(0, 1).repeat_interleave(2, dim=0) for t in (key, value))
        places, others = torch.arange(d - c - (b - a), d - c)[:, None], torch.arange(d - c)[None]
        visible = (others <= places) & (places - others < (window or d))
        scores = (own_query @ own_key.mT * scale).masked_fill(~visible, -torch.inf)
        outputs.append((scores.softmax(-1) @ own_value).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 1, WINDOW])
def test_varlen_sequences_follow_the_dense_rule(window, monkeypatch):
    monkeypatch.setattr(attention_kernels, "varlen_attention", flash_over_sequences)
    for seed in range(4):
        batch = pack(random_units(np.random.default_rng(seed)), multiple=64)
        total, rule = batch.input_ids.numel(), dense_rule(batch, window)
        leaves = [torch.randn(1, heads, total, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
        query, key, value = leaves
        scores = (query @ key.repeat_interleave(2, 1).mT * 0.3).masked_fill(~rule, -torch.inf)
        expected = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
        layout = PackedLayout(batch.trees, batch.position_ids[0], "varlen")
        found = attention_kernels.varlen(query, key, value, layout, 0.3, window)
        assert torch.allclose(found, expected)
        upstream = torch.randn_like(expected)
        for a, b in zip(torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(expected, leaves, upstream)):
            assert torch.allclose(a, b)


@pytest.mark.parametrize("name, checkpointing", [("llama", False), ("llama", True), ("gemma3_text", False)])
def test_rows_of_fifty_lengths_compile_at_most_three_times(name, checkpointing, monkeypatch):
    """Blocks compiled around FlexAttention, forward and backward: the mask is a value, not part of what is compiled."""
    # On a CPU it has no backward kernel, but its gradients as plain operations do.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch.compiler.reset()
    model = make(name)
    blocks = find_blocks(model, None)
    if checkpointing:
        checkpoint_activations(blocks, 1)
    for block in blocks:
        block.compile(dynamic=True, backend="eager")
    use_attention(model, "flex", windows=(WINDOW,) if name in SLIDING else (None,))
    counters = torch._dynamo.utils.counters
    before, lengths, rng = counters["stats"]["unique_graphs"], set(), np.random.default_rng(0)
    while len(lengths) < 50:  # scored tokens; rows of two blocks and more
        units = [
            unit_of(k, int(rng.integers(1, 60)), rng.integers(1, 60, 2).tolist()) for k in range(rng.integers(1, 4))
        ]
        batch = pack(units, multiple=row_multiple("flex"))
        lengths.add(len(batch.targets))
        response_logps(model, batch).sum().backward()
    assert 0 < counters["stats"]["unique_graphs"] - before <= 3


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
        ours.set_attn_implementation(ATTENTION_NAME)
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


# ---- The registry


def test_the_settings_name_the_kernels_there_are():
    allowed = get_args(get_type_hints(ModelSettings)["attention"])
    assert sorted(allowed) == sorted(["auto", *kernel_names()])


def test_candidates_by_device_and_dtype():
    assert candidates("cuda", torch.bfloat16) == ["flex", "varlen", "packed_sdpa"]
    assert candidates("cuda", torch.float32) == ["flex", "packed_sdpa"]
    assert candidates("cuda", torch.float64) == ["packed_sdpa"]
    assert candidates("cpu", torch.float32) == candidates("mps", torch.float32) == ["packed_sdpa"]


def test_a_call_goes_to_a_kernel_that_can_do_it():
    found = lambda *call: kernel_for(*call).function.__name__  # noqa: E731
    assert found("packed_sdpa", "cpu", torch.float32, ()) == "packed_sdpa_cpu"
    assert found("packed_sdpa", "cpu", torch.float32, ("value width",)) == "packed_sdpa"
    assert found("packed_sdpa", "cuda", torch.float32, ()) == "packed_sdpa"
    assert found("flex", "cuda", torch.bfloat16, ()) == "flex"
    assert found("flex", "cuda", torch.bfloat16, ("softcap",)) == "packed_sdpa"
    assert found("flex", "cpu", torch.float32, ()) == "flex_uncompiled"


def test_a_kernel_that_is_registered_is_chosen_by_name_and_falls_back_where_it_cannot(monkeypatch):
    monkeypatch.setattr(attention_kernels, "KERNELS", list(attention_kernels.KERNELS))
    calls = []

    @attention_kernels.register_kernel("mine", layout="packed", dtypes=(torch.float32,), lacks=("softcap",))
    def mine(query, key, value, layout, scale, window):
        calls.append(window)
        return attention_kernels.packed_sdpa(query, key, value, layout, scale, window)

    assert candidates("cpu", torch.float32) == ["packed_sdpa", "mine"] and is_packed("mine")
    assert candidates("cpu", torch.bfloat16) == ["packed_sdpa"]
    for name, used in (("mistral", {WINDOW}), ("gemma2", set())):
        calls.clear()
        model = make(name)
        assert choose_attention(model, UNITS[0], "mine", PAD, "cpu") == ("mine", False, None)
        assert set(calls) == used
        with torch.no_grad():
            found = response_logps(model, pack(UNITS))
        assert torch.allclose(found, true_scores(name)[0], rtol=1e-5)


def test_a_wrong_kernel_is_passed_over_for_the_next(monkeypatch):
    monkeypatch.setattr(attention_kernels, "KERNELS", [])

    @attention_kernels.register_kernel("wrong", layout="packed")
    def wrong(query, key, value, layout, scale, window):
        return attention_kernels.packed_sdpa(query, key, value, layout, 2 * scale, window)

    attention_kernels.register_kernel("right", layout="packed")(attention_kernels.packed_sdpa)
    attention_kernels.register_kernel("plain", layout="padded")(None)
    assert choose_attention(make("llama"), UNITS[0], "auto", PAD, "cpu") == ("right", False, None)
    with pytest.raises(ValueError, match="model.attention=wrong does not work for Llama.*log-probs differ"):
        choose_attention(make("llama"), UNITS[0], "wrong", PAD, "cpu")
