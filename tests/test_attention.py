"""The attention kernels against the dense rule and the models' own attention, and the registry of them."""

from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from architectures import WINDOW, make
from scoring_checks import PAD, UNITS, true_scores, unit_of

from data.batching import pack
from modeling import attention_kernels
from modeling.attention import ATTENTION_NAME, packed_attention, use_attention
from modeling.attention_kernels import candidates, is_packed, kernel_for, kernel_names
from modeling.packed_layout import PackedLayout
from modeling.scoring import response_logps
from modeling.scoring_check import choose_attention
from settings.schema import ModelSettings

PACKED = [name for name in kernel_names() if is_packed(name)]


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
    layout = PackedLayout(batch.trees, batch.position_ids[0])
    index = torch.arange(total)
    assert torch.equal(layout.mask_mod(window)(0, 0, index[:, None], index[None]), rule)

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
    assert candidates("cuda", torch.bfloat16) == ["flex", "packed_sdpa"]
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
