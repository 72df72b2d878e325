"""Metrics are sums over distinct examples, however they fell on ranks and micro-batches."""

from types import SimpleNamespace

import pytest
import torch

from training.metrics import SFT_METRICS, MetricAccumulator


def sums_of(losses, members, datasets):
    """What a rank holds that saw examples with these losses, of these data sets."""
    sums = MetricAccumulator("eval", datasets, SFT_METRICS, torch.device("cpu"))
    columns = torch.tensor([[loss, -loss, 1.0] for loss in losses])
    sums.add(SimpleNamespace(datasets=torch.tensor(members)), columns)
    return sums


def test_every_example_weighs_the_same_whatever_rank_it_is_on():
    """One pair with loss 0 on rank 0 and three with loss 1 on rank 1: the mean is 3/4, not the mean of means."""
    hh = SimpleNamespace(name="hh")
    ranks = [sums_of([0.0], [0], [hh]), sums_of([1.0, 1.0, 1.0], [0, 0, 0], [hh])]
    value, count = ranks[0].by_name(sum(rank.sums for rank in ranks))["loss/eval"]
    assert value / count == 0.75 and count == 4


def test_each_data_set_has_values_of_its_own_and_an_absent_one_none():
    datasets = [SimpleNamespace(name=name) for name in ("hh", "shp", "se")]
    sums = sums_of([1.0, 2.0, 6.0], [0, 0, 1], datasets)
    named = {name: value / count for name, (value, count) in sums.by_name(sums.sums).items()}
    assert named["loss/eval"] == pytest.approx(3.0)
    assert named["loss/eval/hh"] == pytest.approx(1.5) and named["loss/eval/shp"] == pytest.approx(6.0)
    assert "loss/eval/se" not in named
