"""A log line averages over examples, not over steps, and its rates are of the time in which they were made."""

from types import SimpleNamespace

import pytest
import torch

from training.meter import Meter


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def step(n_examples, *tokens):
    batches = [None if n is None else SimpleNamespace(n_tokens=n) for n in tokens]
    return SimpleNamespace(n_examples=n_examples, micro_batches=batches)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def logged():
    return []


@pytest.fixture
def meter(clock, logged):
    def log(metrics, examples, updates):
        logged.append((metrics, examples, updates))

    return Meter(log, interval=10.0, data_ranks=2, device=torch.device("cpu"), clock=clock)


def test_steps_within_the_interval_become_one_line(meter, clock, logged):
    clock.now += 4
    meter.add({"loss/train": (3.0, 2), "grad_norm": (5.0, 1)}, step(2, 100, None), 2, 1)
    assert logged == [] and meter.rates() == {"tokens_per_second": 50.0}
    clock.now += 6
    meter.add({"loss/train": (1.0, 6)}, step(6, 300), 8, 2)
    [(metrics, examples, updates)] = logged
    assert (examples, updates) == (8, 2)
    assert metrics.pop("memory/peak_gb") > 0
    assert metrics == {
        "loss/train": 0.5,
        "grad_norm": 5.0,
        "examples_per_second": 0.8,
        "tokens_per_second": 80.0,
        "counters/examples": 8,
        "counters/updates": 2,
    }


def test_a_restart_leaves_out_the_time_before_it(meter, clock, logged):
    clock.now += 60  # an evaluation
    meter.restart()
    clock.now += 5
    meter.add(None, step(5, 10), 5, 0)  # a skipped step has no metrics
    meter.flush()
    meter.flush()  # nothing was gathered since
    [(metrics, examples, updates)] = logged
    assert metrics["examples_per_second"] == 1.0 and "loss/train" not in metrics and (examples, updates) == (5, 0)
