"""Rotary frequencies that depend on a row's length: every row has those that it has alone."""

import math

import numpy as np
import pytest
import torch
from architectures import make
from runs import FSDP, settings_of, train, train_on_rank
from scoring_checks import PAD, unit_of
from test_scoring_check import alone

from data.batching import pack, pad
from modeling.attention import use_attention
from modeling.generation import generate_samples
from modeling.loading import byte_tokenizer
from modeling.rotary import length_limit
from modeling.scoring import response_logps
from modeling.scoring_check import choose_attention
from training.attention_choice import shares_prefix

LIMIT = 32
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + 4.0 * k for k in range(8)],
}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
MODELS = {
    "dynamic": ("llama", dict(max_position_embeddings=LIMIT, rope_parameters=DYNAMIC)),
    "longrope": (
        "phi3",
        dict(max_position_embeddings=256, rope_parameters=LONGROPE) | dict(original_max_position_embeddings=LIMIT),
    ),
    "by kind of layer": (
        "gemma3_text",
        dict(max_position_embeddings=LIMIT)
        | dict(rope_parameters={"full_attention": DYNAMIC, "sliding_attention": PLAIN})
        | dict(layer_types=["full_attention", "sliding_attention"]),
    ),
}
# Rows on both sides of the limit and on it, of one prompt and of several; short ones again after long ones.
UNITS = [
    unit_of(0, 20, (4, 30, 12, 60)),
    unit_of(1, 5, (6,)),
    unit_of(2, 40, (9, 3)),
    unit_of(3, 10, (LIMIT - 10, LIMIT - 9)),
    unit_of(4, 8, (8,)),
]


@pytest.fixture(params=MODELS)
def kind(request):
    return request.param


def made(kind):
    name, options = MODELS[kind]
    return make(name, **options)


@pytest.fixture
def truth(kind):
    """Each row through a model that has read no other."""
    return [
        alone(made(kind), [pack_of])[0]
        for unit in UNITS
        for pack_of in [type(unit)(0, 0, unit.prompt, [response], [0]) for response in unit.responses]
    ]


def test_a_row_scores_as_it_does_alone(kind, truth):
    model = made(kind)
    assert length_limit(model) == LIMIT
    kernel, full, notice = choose_attention(model, UNITS[0], "auto", PAD, "cpu", share_prefix=False)
    assert (kernel, full, notice) == ("packed_sdpa", False, None)
    for kernel, layout in (
        ("packed_sdpa", lambda units: pack(units, share_prefix=False)),
        ("plain", lambda units: pad(units, PAD)),
    ):
        use_attention(model, kernel)
        with torch.no_grad():
            together = response_logps(model, layout(UNITS)).tolist()
            # In micro-batches of their own, from the last to the first.
            apart = [response_logps(model, layout([unit])).tolist() for unit in reversed(UNITS)]
        assert together == pytest.approx(truth, rel=1e-5), kernel
        assert [value for part in reversed(apart) for value in part] == pytest.approx(truth, rel=1e-5), kernel


def test_the_lengths_matter_here(kind, truth):
    """Guards the test above: under the frequencies of the longest row, short ones score otherwise."""
    rows = [(unit.prompt, response) for unit in UNITS for response in unit.responses]
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.full((len(rows), longest), PAD)
    for index, row in enumerate(rows):
        ids[index, : sum(map(len, row))] = torch.from_numpy(np.concatenate(row))
    with torch.no_grad():
        logps = made(kind)(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    prompt, response = rows[0]
    found = sum(logps[0, len(prompt) - 1 + i, token].item() for i, token in enumerate(response))
    assert abs(found - truth[0]) > 5e-3 * abs(truth[0])


def test_a_prompt_is_shared_only_where_its_frequencies_are_the_same(kind):
    model = made(kind)
    use_attention(model, "packed_sdpa")
    with torch.no_grad():
        below = [UNITS[1], unit_of(3, 10, (LIMIT - 10, 4))]
        found = response_logps(model, pack(below)).tolist()
        assert found == pytest.approx(alone(made(kind), below), rel=1e-5)
        with pytest.raises(NotImplementedError, match="length of each row"):
            response_logps(model, pack(UNITS))


def test_rows_below_the_limit_share_their_prompts_and_longer_ones_say_why_not(folder):
    config, notices = settings_of(folder, "model=tiny"), []
    assert shares_prefix(config, made("longrope"), LIMIT, notices.append) and not notices
    assert not shares_prefix(config, made("longrope"), LIMIT + 1, notices.append)
    assert f"max_length={LIMIT} is faster" in notices[0]
    foreign = make("llama")
    foreign.config.rope_parameters = {"type": "su", "original_max_position_embeddings": LIMIT}
    assert shares_prefix(config, foreign, LIMIT, notices.append)
    with pytest.raises(ValueError, match=f"depend on the longest row.*Set max_length={LIMIT}"):
        shares_prefix(config, foreign, LIMIT + 1, notices.append)


RUN = (
    "model=blank_model",
    "model.name_or_path=dynamic",
    "model.random_config={model_type:llama,hidden_size:32,intermediate_size:64,num_hidden_layers:2,"
    "num_attention_heads:2,max_position_embeddings:52,rope_parameters:{rope_type:dynamic,factor:8.0,rope_theta:10.0}}",
    "lr=1e-3",
    "n_examples=20",
    "batch_size=5",
)


def test_training_is_the_same_however_rows_meet(folder, pools):
    runs = [
        train(folder, *RUN),
        train(folder, *RUN, "tokens_per_microbatch=1"),
        train(folder, *RUN, "model.attention=plain"),
        pools(2).run(train_on_rank, folder, (*RUN, *FSDP))[0],
    ]
    assert any("prompts are not shared" in text for text in runs[0].notices)
    for run in runs[1:]:
        for one, other in zip(run.losses, runs[0].losses, strict=True):
            assert math.isclose(one, other, abs_tol=1e-5)


def test_samples_do_not_depend_on_the_prompts_beside_them(kind):
    model = made(kind)
    prompts = [np.arange(5, 5 + n) for n in ((10, 60, 24) if kind == "longrope" else (10, 18))]

    def write(some):
        return generate_samples(model, byte_tokenizer(), some, temperature=0, max_new_tokens=12)

    assert write(prompts) == [write([prompt])[0] for prompt in prompts]
