"""Losses in real runs: on several processes, stopped and resumed, and beside TRL's implementations."""

import pytest
import torch
from rows import write
from runs import LLAMA, STRONG, assert_same_training, baseline, train, train_in_two

from losses import LOSSES

# Losses of pairs without scores, which the rows of conftest's folder have not.
NAMES = [name for name, loss in LOSSES.items() if name not in ("sft", "mix") and not loss.inputs.needs_scores]
# One of each way in which the losses are computed; the others follow the same code, and are slow tests.
KINDS = ("simpo", "kto", "bco", "aot", "plackett_luce", "tdpo", "wpo")
MIX = (
    "loss=mix",
    "loss.parts=[{name: dpo, beta: 0.1}, {name: beta_dpo, beta: 0.1, weight: 0.5}]",
    "loss.sft_weight=0.1",
)


def marked(names):
    return [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in names]


def scored(folder):
    """The option for data whose rows rate their responses."""
    for name, numbers in (("train", range(9)), ("test", range(9, 12))):
        rows = [
            {
                "prompt": f"Tell me of {number}:",
                "responses": [f" {number} is good{' indeed' * k}." for k in range(2 + number % 2)],
                "scores": [3 - k * (1 + number % 3) for k in range(2 + number % 2)],
            }
            for number in numbers
        ]
        write(folder / "scored" / f"{name}.jsonl", rows)
    return f"datasets=[{folder}/scored]"


@pytest.mark.parametrize("place", ["FULL_SHARD", "TP"])
@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.inputs.needs_scores])
def test_losses_of_scores_train_on_two_processes_as_on_one(folder, sharded, name, place):
    option = scored(folder)
    alone = train(folder, *LLAMA, *STRONG, f"loss={name}", option)
    runs = sharded(2, place, option, loss=name)
    assert_same_training(alone, runs[0])
    assert runs[1].losses == runs[0].losses


@pytest.mark.parametrize("place", ["FULL_SHARD", "TP"])
@pytest.mark.parametrize("name", marked(NAMES))
def test_two_processes_train_as_one_does(folder, sharded, name, place):
    online = LOSSES[name].inputs.reference_by_token
    more = ["reference.mode=online"] if online else []
    runs = sharded(2, place, *more, loss=name)
    assert_same_training(baseline(folder, *LLAMA, f"loss={name}", *more), runs[0])
    assert runs[1].losses == runs[0].losses


def test_two_processes_train_a_mix_as_one_does(folder, sharded):
    alone = train(folder, *LLAMA, *STRONG, *MIX)
    assert_same_training(alone, sharded(2, "FULL_SHARD", *MIX[1:], loss="mix")[0])


@pytest.mark.parametrize(
    "options", [("loss=bco",), ("loss=beta_dpo",), ("loss=kto",), MIX], ids=lambda options: options[0]
)
def test_a_resumed_run_is_the_same_to_the_bit(folder, options):
    """What a loss keeps from step to step is part of the state."""
    options = (*LLAMA, *STRONG, *options, "n_examples=25", "debug=false", "checkpoint.formats=[state]")
    whole = train(folder, *options)
    _, rest = train_in_two(folder, *options, stop_in=1)
    assert 1 <= len(rest.losses) < len(whole.losses) and rest.losses == whole.losses[-len(rest.losses) :]
    assert all(torch.equal(whole.weights[name], value) for name, value in rest.weights.items())
