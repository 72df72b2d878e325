"""What a run finds out about its model before it trains: shared prompts, causality, rows by themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from architectures import make
from runs import FSDP, save_model, settings_of, train, train_on_rank
from scoring_checks import PAD, UNITS

from data.batching import pack, pad
from modeling import loading
from modeling.attention import use_attention
from modeling.attention_kernels import is_packed
from modeling.scoring import response_logps
from modeling.scoring_check import choose_attention
from parallel.placement import make_placement
from training.attention_choice import choose_attention as choose_for_run

# What crosses the boundary between responses at usual, small weights: a mask of the model's own, states, convolutions.
CROSSING = ("doge", "falcon_h1", "jamba", "lfm2", "minimax")
# The same with the byte tokenizer's ids only.
BYTES = [
    replace(unit, prompt=unit.prompt % 250, responses=[response % 250 for response in unit.responses]) for unit in UNITS
]


def alone(model, units=UNITS):
    """Summed log-prob of each response in float64, by the model's own forward on its row alone."""
    found = []
    with torch.no_grad():
        for unit in units:
            for response in unit.responses:
                row = torch.from_numpy(np.concatenate([unit.prompt, response])).long()[None]
                logps = model(input_ids=row, use_cache=False).logits[0].double().log_softmax(-1)
                own = logps[len(unit.prompt) - 1 : -1].gather(1, row[0, -len(response) :, None])
                found.append(own.sum().item())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CROSSING)
def test_what_crosses_between_responses_is_seen_at_weights_of_any_size(name, dtype):
    for spread in (1.0, 4.0):
        kernel, _, notice = choose_attention(make(name, dtype=dtype, spread=spread), UNITS[0], "auto", PAD, "cpu")
        assert kernel == "plain" and "cannot share a prompt" in notice


def scores_of_rank(world, folder, models, kinds, more):
    """{kind: (kernel, log-probs, those of the whole model's single rows)} as a sharded run finds them."""
    found = {}
    for kind in kinds:
        config = settings_of(
            folder, "model=blank_model", f"model.name_or_path={models}/{kind}", f"world_size={world.size}", *more
        )
        tokenizer = loading.load_tokenizer(config)
        place = make_placement(config, world)
        model = place.build_model(config, tokenizer, torch.float32)
        kernel, full = choose_for_run(config, tokenizer, place, model, BYTES[0], True, lambda text: None)
        use_attention(model, kernel, full)
        batch = pack(BYTES) if is_packed(kernel) else pad(BYTES, PAD)
        with torch.no_grad():
            logps = model.response_logps(batch).tolist()
        whole = loading.load_model(config, tokenizer, torch.float32, "cpu")
        found[kind] = kernel, logps, alone(whole, BYTES)
    return found


@pytest.mark.parametrize(
    "more, tolerance", [((), 1e-5), (("model.fsdp_policy_mp=bfloat16",), 5e-2)], ids=["fp32", "bf16"]
)
def test_a_sharded_model_is_tried_with_its_own_weights(folder, pools, tmp_path, more, tolerance):
    kinds = ("doge", "falcon_h1", "lfm2", "bloom", "gemma3n_text", "llama")
    for kind in kinds:
        save_model(tmp_path / kind, kind)
    for found in pools(2).run(scores_of_rank, folder, tmp_path, kinds, (*FSDP, *more)):
        for kind, (kernel, logps, truth) in found.items():
            assert is_packed(kernel) is (kind in ("gemma3n_text", "llama")), kind
            assert logps == pytest.approx(truth, rel=tolerance), kind


# ---- Causality


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_model_that_sees_later_tokens_is_refused(name, dtype):
    for spread in (1.0, 4.0):
        model = make(name, dtype=dtype, spread=spread, is_decoder=False)
        with pytest.raises(ValueError, match="not causal.*sees what it is to predict.*is_decoder"):
            choose_attention(model, UNITS[0], "plain", PAD, "cpu")


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_an_encoder_that_was_made_a_decoder_scores_as_it_does_alone(name):
    """RoBERTa counts positions from 2: it is left to do so."""
    model = make(name)
    kernel, full, _ = choose_attention(model, UNITS[0], "auto", PAD, "cpu")
    use_attention(model, kernel, full)
    with torch.no_grad():
        found = response_logps(model, pack(UNITS) if is_packed(kernel) else pad(UNITS, PAD)).tolist()
    assert found == pytest.approx(alone(make(name)), rel=1e-5)


BERT = (
    "model=blank_model",
    "model.name_or_path=bert",
    "model.random_config={model_type:bert,hidden_size:32,intermediate_size:32,num_hidden_layers:2,"
    "num_attention_heads:2}",
)


def test_every_trainer_asks_for_causality(folder, pools):
    with pytest.raises(ValueError, match="BertLMHeadModel is not causal"):
        train(folder, *BERT)
    with pytest.raises(ValueError, match="BertLMHeadModel is not causal"):
        pools(2).run(train_on_rank, folder, (*BERT, *FSDP))


def test_a_model_that_scores_rows_by_their_neighbours_is_refused():
    model = make("llama")
    forward = model.forward

    def normalised_over_the_batch(*arguments, **keywords):
        output = forward(*arguments, **keywords)
        output.logits = output.logits * (1 + 0.01 * (len(output.logits) - 1))
        return output

    model.forward = normalised_over_the_batch
    with pytest.raises(ValueError, match="differently beside other rows"):
        choose_attention(model, UNITS[0], "auto", PAD, "cpu")
