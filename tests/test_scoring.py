"""Packed scoring against the plain thing: every response a row of its own, through the model's own forward."""

import numpy as np
import pytest
import torch
import torch._dynamo
from architectures import KINDS, PLAIN_ONLY, SLIDING, VOCABULARY, make
from conftest import compose_config
from scoring_checks import PAD, UNITS, check_same, relative, scored, true_scores, unit_of
from transformers import AttentionInterface

import settings
from data.batching import PrefixTree, PromptUnit, pack, pad
from modeling import loading
from modeling.attention import ATTENTION_NAME, packed_attention, use_attention
from modeling.blocks import checkpoint_activations, find_blocks
from modeling.packed_layout import PackedLayout
from modeling.scoring import response_logps
from modeling.scoring_check import choose_attention

SHARING = [name for name in KINDS if name not in PLAIN_ONLY]


# ---- Every architecture


@pytest.mark.parametrize("name", KINDS)
def test_the_chosen_way_equals_plain_rows(name):
    model = make(name)
    kernel, full_forward, notice = choose_attention(model, UNITS[0], "auto", PAD, "cpu")
    if name in PLAIN_ONLY:
        assert kernel == "plain"
        assert type(model).__name__ in notice and "cannot share a prompt" in notice and "packed_sdpa:" in notice
        batch = pad(UNITS, PAD)
    else:
        assert (kernel, full_forward, notice) == ("packed_sdpa", False, None)
        batch = pack(UNITS)
    check_same(scored(model, kernel, full_forward, batch), true_scores(name))


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
    checkpoint_activations(find_blocks(model, None), every)
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
    opt = "model_type:opt,hidden_size:16,ffn_dim:16,num_hidden_layers:1,num_attention_heads:2,word_embed_proj_dim:16"
    config = settings.finalize(
        compose_config("model=blank_model", "model.name_or_path=opt", f"model.random_config={{{opt},dropout:0.5}}")
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
            layout.used = True
            layout.readers.add(module)
            layout = PackedLayout(trees, layout.positions)
        return packed_attention(module, query, key, value, mask, scaling, dropout, layout=layout, **kwargs)

    return attention


@pytest.mark.parametrize(
    "dtype, how", [(torch.float32, "siblings"), (torch.float32, "prompt"), (torch.bfloat16, "prompt")]
)
def test_the_self_check_finds_wrong_attention(how, dtype):
    model = make("llama", dtype=dtype)
    AttentionInterface.register(ATTENTION_NAME, broken_attention(how))
    try:
        kernel, full_forward, notice = choose_attention(model, UNITS[0], "auto", PAD, "cpu")
    finally:
        AttentionInterface.register(ATTENTION_NAME, packed_attention)
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
    kernel, full_forward, notice = choose_attention(model, UNITS[0], "auto", PAD, "cpu")
    assert (kernel, full_forward) == ("plain", True) and "differ" in notice
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


def test_layers_and_rows_of_any_number_share_their_compiled_code():
    """Notes about who reads a row must not be part of it: a graph a layer, and after eight nothing is compiled."""
    counts = {}
    for layers in (3, 10):
        torch._dynamo.reset()
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        model = make("llama", num_hidden_layers=layers)
        use_attention(model, "packed_sdpa")
        for block in find_blocks(model, None):
            block.compile(dynamic=True, backend="eager")
        for n in (5, 9, 23, 40):
            response_logps(model, pack([unit_of(0, n, [n + 1, 7]), unit_of(1, 6, [n])])).sum().backward()
        counts[layers] = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert counts[3] == counts[10] <= 6
