"""What a run makes of its data sets: weights that draw nothing, held-out rows, metrics' names."""

from types import SimpleNamespace

import numpy as np
import pytest
from data_in_memory import pairs_data

from data.sampler import DatasetMixture
from training.data_loading import check_weights, make_steps


def settings(**changes):
    usual = dict(batch_size=4, eval_batch_size=4, shuffle="pairs", n_epochs=1, n_examples=None, seed=0)
    usual |= dict(gradient_accumulation_steps=1, prefix_sharing=True, n_eval_examples=None)
    return SimpleNamespace(**(usual | changes))


def held_out_rows(seed, n_eval_examples=10):
    placement = SimpleNamespace(data_rank=0, data_ranks=1, device="cpu")
    tokenizer = SimpleNamespace(eos_token_id=1, pad_token_id=0)
    config = settings(seed=seed, n_eval_examples=n_eval_examples)
    sets = DatasetMixture([pairs_data(30, 1)]), DatasetMixture([pairs_data(30, 2), pairs_data(9, 3)])
    steps = make_steps(config, *sets, tokenizer, "pairs", placement, "plain", 1000).held_out
    assert steps is not None
    return np.concatenate([steps.example_indices(number) for number in range(steps.n_steps)]).tolist()


def test_the_same_held_out_rows_are_evaluated_whatever_the_seed():
    rows = held_out_rows(0)
    assert len(rows) == 10 and all(held_out_rows(seed) == rows for seed in (1, 2, 12345))


def test_a_weight_that_would_draw_nothing_is_refused():
    def data(name):
        return SimpleNamespace(name=name, examples=pairs_data(10).examples)

    count = len(data("a").examples)
    weights = SimpleNamespace(weights={"a": 0.4 / count})
    config = SimpleNamespace(data=weights, datasets=["a", "b"], n_epochs=1, n_examples=None)
    with pytest.raises(ValueError, match=rf"data.weights: .* examples of a is less .* Give it {1 / count:.2g} or more"):
        check_weights(config, [data("a"), data("b")])
    config.n_epochs = 3  # 1.2 examples
    check_weights(config, [data("a"), data("b")])
