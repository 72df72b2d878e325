"""Metrics are sums over distinct examples, however they fell on ranks and micro-batches."""

import pytest
import torch

from losses import find_loss
from training.metrics import ExampleMetrics, MetricAccumulator


def sums_of(losses, members, datasets):
    """What a rank holds that saw examples with these losses, of these data sets."""
    sums = MetricAccumulator(datasets, find_loss("sft").metric_names("eval", {}), torch.device("cpu"))
    columns = torch.tensor([[loss, -loss, 1.0] for loss in losses])
    sums.add(torch.tensor(members), ExampleMetrics(columns))
    return sums


def test_every_example_weighs_the_same_whatever_rank_it_is_on():
    """One pair with loss 0 on rank 0 and three with loss 1 on rank 1: the mean is 3/4, not the mean of means."""
    ranks = [sums_of([0.0], [0], ["hh"]), sums_of([1.0, 1.0, 1.0], [0, 0, 0], ["hh"])]
    value, count = ranks[0].by_name(sum(rank.sums for rank in ranks))["loss/eval"]
    assert value / count == 0.75 and count == 4


def test_each_data_set_has_values_of_its_own_and_an_absent_one_none():
    sums = sums_of([1.0, 2.0, 6.0], [0, 0, 1], ["hh", "shp", "se"])
    named = {name: value / count for name, (value, count) in sums.by_name(sums.sums).items()}
    assert named["loss/eval"] == pytest.approx(3.0)
    assert named["loss/eval/hh"] == pytest.approx(1.5) and named["loss/eval/shp"] == pytest.approx(6.0)
    assert "loss/eval/se" not in named


def test_a_metric_of_some_examples_is_their_mean():
    sums = MetricAccumulator(["hh"], ("loss/eval", "rewards_eval/chosen"), torch.device("cpu"))
    values = torch.tensor([[1.0, 5.0], [2.0, float("nan")], [3.0, 7.0]])
    weights = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    sums.add(torch.tensor([0, 0, 0]), ExampleMetrics(values, weights))
    assert sums.by_name(sums.sums) == {"loss/eval": (6.0, 3.0), "rewards_eval/chosen": (12.0, 2.0)}
