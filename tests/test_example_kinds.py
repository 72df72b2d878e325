"""A loss of each kind of input is one function and one yaml; all else follows from the kind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import LLAMA, STRONG, assert_same_training, train

import losses
from data.batching import pack
from data.examples import examples_of_kind, preferences_of
from data.sampler import DatasetMixture
from losses import GroupLogps, LossOutput, UnpairedLogps
from training.metrics import ExampleMetrics, MetricAccumulator

PAIRS = np.array([[0, 0, 1], [0, 0, 2], [0, 2, 1], [1, 1, 0]], dtype=np.int32)


def test_examples_of_each_kind():
    assert examples_of_kind(PAIRS, "pairs")[0] is PAIRS
    assert examples_of_kind(PAIRS, "group")[0].tolist() == [[0, -1, -1], [1, -1, -1]]
    assert examples_of_kind(PAIRS, "unpaired")[0].tolist() == [
        [0, 0, -1],  # good in two pairs, one example
        [0, -1, 1],
        [0, -1, 2],
        [0, 2, -1],  # good in one pair and bad in another: an example of each
        [1, 1, -1],
        [1, -1, 0],
    ]
    assert preferences_of(PAIRS, 0).tolist() == [[0, 1], [0, 2], [2, 1]]


def test_a_loss_of_single_responses(folder):
    run = train(folder, *LLAMA, *STRONG, "loss=apo_zero_unpaired", "n_epochs=1", "n_examples=null", "batch_size=8")
    assert run.losses[0] == pytest.approx(0.5, abs=1e-6)
    # 13 prompts with 1, 2 or 3 pairs over 2, 3 or 4 responses; of these 9 are called both good and bad.
    assert run_examples(run) == 48 and len(run.losses) == 6
    first = run.steps[0]
    assert {"rewards_train/chosen", "rewards_train/rejected", "logps_train/chosen"} <= set(first)
    assert "rewards_train/margins" not in first


def run_examples(run):
    """Examples of a whole run, as its last log line counts them."""
    return json.loads(Path(run.run_dir, "metrics.jsonl").read_text().splitlines()[-1])["examples"]


def test_a_loss_of_all_responses_of_a_prompt(folder):
    run = train(folder, *LLAMA, *STRONG, "loss=plackett_luce", "n_epochs=1", "n_examples=null", "batch_size=4")
    assert run_examples(run) == 13, "an example is a prompt"
    assert "ranked_right/train" in run.steps[0] and "logps_train/responses" in run.steps[0]


@pytest.mark.parametrize("loss", ["apo_zero_unpaired", "plackett_luce"])
@pytest.mark.parametrize("how", [("tokens_per_microbatch=64",), ("prefix_sharing=false",), ("model.attention=plain",)])
def test_how_a_step_is_computed_does_not_change_it(folder, loss, how):
    options = (*LLAMA, *STRONG, f"loss={loss}", "batch_size=6", "n_examples=24")
    assert_same_training(train(folder, *options), train(folder, *options, *how))


def test_a_prompt_seen_twice_in_a_step_is_two_examples():
    class Data:
        examples = np.array([[0, -1, -1], [0, -1, -1]], dtype=np.int32)

        def prompt(self, group):
            return np.array([1, 2], dtype=np.int32)

        def response(self, group, index):
            return np.array([3 + index], dtype=np.int32)

        mismatched = False
        partly_scored = False

        def score(self, group, index):
            return np.nan

        def weight(self, example):
            return 1.0

        def response_id(self, group, index):
            return index

        def preferences(self, group):
            return np.array([[0, 1]])

    units = DatasetMixture([Data()]).units(np.array([0, 1]))
    assert len(units) == 2 and all(len(unit.responses) == 2 for unit in units)
    batch = pack(units)
    assert batch.group.tolist() == [0, 0, 1, 1] and batch.preferences.tolist() == [[0, 1], [2, 3]]
    inputs = GroupLogps.select(torch.arange(4.0), torch.zeros(4), batch)
    assert inputs.n_groups == 2 and inputs.sum_by_group(inputs.policy).tolist() == [1.0, 5.0]


def test_metrics_of_good_and_bad_responses_are_means_over_their_own():
    loss = losses.Loss("x", lambda *_: None, UnpairedLogps, True, losses.registry.UNPAIRED_REWARDS, {})
    policy, good = torch.tensor([-1.0, -2.0, -6.0]), torch.tensor([True, True, False])
    inputs = UnpairedLogps(policy, torch.zeros(3), good, torch.tensor([1.0, 1.0, 5.0]))
    metrics = ExampleMetrics.of(inputs, LossOutput(policy, inputs.rewards(0.5)))
    sums = MetricAccumulator(["hh"], loss.metric_names("eval", {}), torch.device("cpu"))

    sums.add(torch.zeros(3, dtype=torch.int64), metrics)
    means = {name: value / count for name, (value, count) in sums.by_name(sums.sums).items()}
    assert means["rewards_eval/chosen"] == -0.75 and means["rewards_eval/rejected"] == -3.0
    assert means["loss/eval"] == pytest.approx(-3.0) and means["lengths_eval/rejected"] == 5.0
