"""Orders, steps and micro-batches: what the data laws promise."""

import itertools
import threading
import time

import numpy as np
import pytest
import torch
from data_in_memory import Data, flat, pairs_data
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batching import PromptUnit, pack
from data.examples import KINDS, examples_lacking, examples_of_kind, preferences_of
from data.sampler import BatchSampler, DatasetMixture, make_micro_batches


def sampler_of(mixture, batch_size=4, **options):
    return BatchSampler(mixture, batch_size, **{"seed": 0, "shuffle": "pairs", "make_batch": list, **options})


def numbers_of(sampler):
    return [sampler.example_indices(step).tolist() for step in range(sampler.n_steps)]


# ---- Epochs: Law 3


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=3).filter(any),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 5),
    shuffle=st.sampled_from(["pairs", "prompts", None]),
    n_epochs=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_every_example_once_an_epoch(sizes, batch_size, seed, shuffle, n_epochs):
    mixture = DatasetMixture([pairs_data(n, seed=i) for i, n in enumerate(sizes)])
    sampler = sampler_of(mixture, batch_size, seed=seed, shuffle=shuffle, n_epochs=n_epochs)
    total = sum(len(d.examples) for d in mixture.datasets)
    seen = flat(numbers_of(sampler))
    assert len(seen) == n_epochs * total == sampler.n_examples
    for epoch in range(n_epochs):
        assert sorted(seen[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_order_depends_on_seed_and_epoch_alone():
    def order(batch_size=4, n_ranks=1, seed=0):
        sampler = sampler_of(
            DatasetMixture([pairs_data(9), pairs_data(5, 1)]), batch_size, n_ranks=n_ranks, n_epochs=2, seed=seed
        )
        return flat(numbers_of(sampler))

    base, total = order(), len(order()) // 2
    assert order(batch_size=7) == order(n_ranks=4) == base
    assert order(seed=1) != base
    assert base[:total] != base[total:]
    # As one epoch of a longer run, and asked for out of turn.
    assert DatasetMixture([pairs_data(9), pairs_data(5, 1)]).epoch_permutation(0, 1).tolist() == base[total:]


def test_global_random_state_does_not_matter():
    mixture = DatasetMixture([pairs_data(9)])
    np.random.seed(1)
    first = mixture.epoch_permutation(0, 0)
    np.random.seed(2)
    assert (mixture.epoch_permutation(0, 0) == first).all()


@pytest.mark.parametrize("shuffle", ["pairs", "prompts"])
def test_shuffles_do_shuffle(shuffle):
    mixture = DatasetMixture([pairs_data(30)])
    assert mixture.epoch_permutation(0, 0, shuffle).tolist() != list(range(mixture.epoch_size()))
    assert mixture.epoch_permutation(0, 0, None).tolist() == list(range(mixture.epoch_size()))


def test_shuffle_prompts_keeps_a_prompts_pairs_together():
    # The first data set has more groups than examples, so that group numbers of the two overlap.
    sparse = Data([(3, [2, 2], []), (3, [2, 2], [(0, 1)]), (3, [2, 2], []), (3, [2, 2, 2], [(0, 1), (2, 1)])])
    mixture = DatasetMixture([sparse, pairs_data(12)])
    prompts = []
    for number in mixture.epoch_permutation(3, 0, "prompts"):
        index = int(number >= mixture.offsets[1])
        prompts.append((index, int(mixture.datasets[index].examples[number - mixture.offsets[index], 0])))
    assert len(list(itertools.groupby(prompts))) == len(set(prompts)) == 14


def test_shuffle_prompts_mixes_data_sets():
    data = Data([(2, [2, 2], [(0, 1)])] * 40)
    order = DatasetMixture([data, data]).epoch_permutation(0, 0, "prompts")
    place = np.argsort(order)
    assert np.mean(abs(place[:40] - place[40:]) == 1) < 0.2  # the prompts of a number are no neighbours


def test_orders_of_large_data_sets_take_linear_time():
    data = Data([(1, [1, 1], [])])
    data.examples = np.stack([np.arange(200_000) // 3, np.zeros(200_000), np.ones(200_000)], axis=1).astype(np.int32)
    start = time.perf_counter()
    assert len(DatasetMixture([data]).epoch_permutation(0, 0, "prompts")) == 200_000
    assert time.perf_counter() - start < 60  # a tenth of a second; hours where every prompt looks at all the others


def test_weights_repeat_or_thin_a_data_set():
    twice, half = pairs_data(5, 1), pairs_data(8, 2)
    mixture = DatasetMixture([twice, half], [2, 0.5])
    edge, n_half = len(twice.examples), round(len(half.examples) / 2)
    assert mixture.epoch_size() == 2 * edge + n_half
    for epoch in range(3):
        order = mixture.epoch_permutation(0, epoch).tolist()
        assert sorted(x for x in order if x < edge) == sorted(2 * list(range(edge)))
        taken = [x for x in order if x >= edge]
        assert len(taken) == len(set(taken)) == n_half


@pytest.mark.parametrize("weight", [0.5, 0.3, 1.7])
def test_fractional_weights_see_all_examples_equally_often(weight):
    mixture = DatasetMixture([pairs_data(10)], [weight])
    seen = flat(mixture.epoch_permutation(0, epoch).tolist() for epoch in range(7))
    counts = np.bincount(seen, minlength=len(mixture.datasets[0].examples))
    assert counts.max() - counts.min() <= 1


def test_half_weight_takes_the_other_half_next_epoch():
    mixture = DatasetMixture([Data([(2, [2, 2], [(0, 1)])] * 10)], [0.5])
    assert sorted([*mixture.epoch_permutation(0, 0), *mixture.epoch_permutation(0, 1)]) == list(range(10))


@pytest.mark.parametrize("weights", [[0.01, 1], [0.013, 0.5], [0.26, 1.7], [0.01, 0.01]])
def test_a_mixture_draws_as_often_as_its_weights_say(weights):
    """Also where an epoch's share is no whole number, even one below a half."""
    sets = [pairs_data(8, 1), pairs_data(20, 2)]
    mixture = DatasetMixture(sets, weights)
    epochs, seen = 200, np.zeros(sum(len(each.examples) for each in sets), int)
    for epoch in range(epochs):
        order = mixture.epoch_permutation(3, epoch)
        assert len(order) == mixture.epoch_size(epoch)
        np.add.at(seen, order, 1)
    parts = np.split(seen, [len(sets[0].examples)])
    for part, weight, each in zip(parts, weights, sets, strict=True):
        assert abs(part.sum() - epochs * weight * len(each.examples)) <= 0.5
        assert part.max() - part.min() <= 1  # and each example as often as the others
    assert not mixture.never_drawn(epochs) and mixture.examples_before(epochs) == seen.sum()


def test_a_weight_that_draws_nothing_in_a_run_is_known():
    mixture = DatasetMixture([pairs_data(8, 1), pairs_data(20, 2)], [0.001, 1])
    assert mixture.never_drawn(1) == [0] and not mixture.never_drawn(1000)


@pytest.mark.parametrize("n_epochs, n_examples", [(7, None), (None, 100), (9, 40), (2000, 41)])
@pytest.mark.parametrize("weights", [[0.26, 0.05], [1, 0.37], [2, 1]])
def test_steps_of_epochs_of_unequal_size_are_numbered_right(weights, n_epochs, n_examples):
    mixture = DatasetMixture([pairs_data(5, 1), pairs_data(4, 2)], weights)
    steps = sampler_of(mixture, 3, n_epochs=n_epochs, n_examples=n_examples)
    expected, left = [], steps.n_examples
    assert left == min(n_examples or 10**9, mixture.examples_before(n_epochs or 10**9))
    for epoch in range(mixture.epochs(n_epochs, n_examples)):
        order = mixture.epoch_permutation(steps.seed, epoch, steps.shuffle)[:left]
        expected += [(epoch, order[start : start + 3].tolist()) for start in range(0, len(order), 3)]
        left -= len(order)
    assert steps.n_steps == len(expected) and left == 0
    before = 0
    for number, (epoch, indices) in enumerate(expected):
        assert steps.examples_before(number) == before
        assert steps.example_indices(number).tolist() == indices
        assert steps.step(number).epoch == epoch
        before += len(indices)
    assert steps.examples_before(steps.n_steps) == steps.n_examples == before


# ---- Steps


def test_the_last_step_of_an_epoch_is_smaller_and_never_dropped():
    mixture = DatasetMixture([Data([(2, [2, 2], [(0, 1)])] * 10)])
    sampler = sampler_of(mixture, 4, n_epochs=2)
    assert [len(part) for part in numbers_of(sampler)] == [4, 4, 2, 4, 4, 2]
    assert [sampler.examples_before(step) for step in range(sampler.n_steps + 1)] == [0, 4, 8, 10, 14, 18, 20]
    assert [sampler.step(i).epoch for i in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [sampler.step(i).n_examples for i in range(6)] == [4, 4, 2, 4, 4, 2]


@pytest.mark.parametrize(
    "n_epochs, n_examples, sizes",
    [
        (None, 13, [4, 4, 2, 3]),
        (1, 13, [4, 4, 2]),
        (5, 13, [4, 4, 2, 3]),
        (None, 3, [3]),
        (None, 20, [4, 4, 2, 4, 4, 2]),
        (None, 10, [4, 4, 2]),
        (2, 9, [4, 4, 1]),
    ],
)
def test_n_examples_ends_a_run_anywhere(n_epochs, n_examples, sizes):
    sampler = sampler_of(
        DatasetMixture([Data([(2, [2, 2], [(0, 1)])] * 10)]), 4, n_epochs=n_epochs, n_examples=n_examples
    )
    assert [len(part) for part in numbers_of(sampler)] == sizes
    assert sampler.n_steps == len(sizes) and sampler.n_examples == sum(sizes) == sampler.examples_before(
        sampler.n_steps
    )


def test_batch_larger_than_the_data():
    sampler = sampler_of(DatasetMixture([Data([(2, [2, 2], [(0, 1)])] * 3)]), 100, n_epochs=2)
    assert [len(part) for part in numbers_of(sampler)] == [3, 3]


def test_no_examples_is_an_error_that_says_so():
    for mixture in (DatasetMixture([Data([(2, [2, 2], [])])]), DatasetMixture([pairs_data(3)], [0])):
        with pytest.raises(ValueError, match="no example.*data.weights"):
            sampler_of(mixture)


def same_batch(a, b):
    return (a is None and b is None) or all(
        torch.equal(value.nan_to_num(-1), vars(b)[name].nan_to_num(-1))  # an unknown score is NaN
        for name, value in vars(a).items()
        if isinstance(value, torch.Tensor)
    )


@pytest.mark.parametrize("start, stop", [(0, None), (3, None), (2, 5)])
def test_steps_by_number_equal_steps_in_turn(start, stop):
    options = dict(make_batch=pack, n_epochs=2, n_ranks=2, rank=1, budget=100)
    sampler = sampler_of(DatasetMixture([pairs_data(6)]), 5, **options)
    stop = sampler.n_steps if stop is None else stop
    in_turn = list(sampler.steps(start, stop))
    assert [step.number for step in in_turn] == list(range(start, stop))
    for step in reversed(in_turn):  # backwards: nothing may hang on what was asked before
        again = sampler_of(DatasetMixture([pairs_data(6)]), 5, **options).step(step.number)
        assert (again.epoch, again.n_examples) == (step.epoch, step.n_examples)
        assert len(again.micro_batches) == len(step.micro_batches)
        assert all(map(same_batch, again.micro_batches, step.micro_batches))


def test_numbers_may_be_asked_for_while_the_next_epoch_is_prepared(monkeypatch):
    sampler = sampler_of(DatasetMixture([Data([(2, [2, 2], [(0, 1)])] * 8)]), 4, n_epochs=3)
    expected, before = numbers_of(sampler), sampler.examples_before

    def interrupted(step):  # where another thread may come in between
        monkeypatch.setattr(sampler, "examples_before", before)
        sampler.example_indices(sampler.n_steps - 1)
        monkeypatch.setattr(sampler, "examples_before", interrupted)
        return before(step)

    monkeypatch.setattr(sampler, "examples_before", interrupted)
    assert numbers_of(sampler) == expected


def test_steps_prepare_ahead_and_stop_cleanly():
    prepared = []
    sampler = sampler_of(
        DatasetMixture([Data([(2, [2, 2], [(0, 1)])] * 12)]), 4, make_batch=lambda units: prepared.append(1)
    )
    iterator = sampler.steps()
    next(iterator)
    deadline = time.time() + 5
    while len(prepared) < 2 and time.time() < deadline:
        time.sleep(0.001)
    assert len(prepared) == 2  # the next one, while this one runs, and no further
    before = threading.active_count()
    iterator.close()
    assert threading.active_count() < before


def test_errors_while_preparing_reach_the_caller():
    def broken(units):
        raise ValueError("row 7 of x.jsonl")

    with pytest.raises(ValueError, match="row 7"):
        list(sampler_of(DatasetMixture([pairs_data(3)]), make_batch=broken).steps())


# ---- Units


def test_units_hold_each_response_once():
    data = Data([(3, [2, 4, 5], [(0, 1), (2, 1), (0, 2)]), (4, [6, 1], [(1, 0)])])
    first, second = DatasetMixture([data]).units(np.array([1, 3, 0, 2]))
    assert (first.group, second.group) == (0, 1)
    assert first.response_ids == [2, 1, 0] and second.response_ids == [4, 3]
    assert [r.tolist() for r in first.responses] == [data.answers[0][i].tolist() for i in (2, 1, 0)]
    assert first.pairs == [(0, 1), (2, 1), (2, 0)] and second.pairs == [(0, 1)]
    assert first.cost() == 3 + 11 and first.cost(share_prefix=False) == 9 + 11


def test_units_of_two_data_sets_stay_apart():
    one, two = pairs_data(2, 1), pairs_data(2, 2)
    units = DatasetMixture([one, two]).units(np.array([0, len(one.examples)]))
    assert [(unit.dataset, unit.group) for unit in units] == [(0, 0), (1, 0)]
    assert [unit.prompt.tolist() for unit in units] == [one.prompts[0].tolist(), two.prompts[0].tolist()]


def test_sft_examples_have_no_rejected_response():
    data = Data([(3, [2], [(0, -1)]), (1, [4], [(0, -1)])])
    batch = pack(DatasetMixture([data]).units(np.array([0, 1])))
    assert batch.pairs.tolist() == [[0, -1], [1, -1]] and batch.lengths.tolist() == [2, 4]


# ---- Micro-batches


def some_units(costs):
    return [
        PromptUnit(0, i, np.ones(1, np.int32), [np.ones(cost - 1, np.int32)], [i], [(0, -1)])
        for i, cost in enumerate(costs)
    ]


@given(
    costs=st.lists(st.integers(2, 60), min_size=1, max_size=30),
    n_ranks=st.integers(1, 4),
    budget=st.integers(1, 120),
    wanted=st.integers(1, 8),
)
@settings(max_examples=200, deadline=None)
def test_split_units(costs, n_ranks, budget, wanted):
    units = some_units(costs)
    slots = make_micro_batches(units, n_ranks, budget, wanted)
    assert all(len(slot) == n_ranks for slot in slots)  # every rank has as many micro-batches as the others
    assert sorted(unit.group for slot in slots for part in slot for unit in part) == list(range(len(costs)))
    assert all(any(slot) for slot in slots)  # none is empty on all ranks
    for part in flat(slots):
        assert sum(unit.cost() for unit in part) <= budget or len(part) == 1
    assert len(slots) >= min(wanted, len(costs))
    # A function of the units, not of the order they come in.
    again = make_micro_batches(units[::-1], n_ranks, budget, wanted)
    assert [[[u.group for u in part] for part in slot] for slot in again] == [
        [[u.group for u in part] for part in slot] for slot in slots
    ]


@pytest.mark.parametrize(
    "n_units, wanted, sizes", [(8, 1, [8]), (8, 2, [4, 4]), (5, 4, [2, 1, 1, 1]), (5, 3, [2, 2, 1]), (2, 4, [1, 1])]
)
def test_gradient_accumulation_cuts_a_step(n_units, wanted, sizes):
    slots = make_micro_batches(some_units([10] * n_units), 1, 10**6, wanted)
    assert [len(part) for slot in slots for part in slot] == sizes


def test_budget_cuts_and_a_longer_unit_runs_alone():
    slots = make_micro_batches(some_units([50, 10, 10, 10, 10]), 1, 25)
    assert [[unit.cost() for unit in slot[0]] for slot in slots] == [[50], [10, 10], [10, 10]]


def test_micro_batches_hold_units_of_like_length():
    slots = make_micro_batches(some_units([9, 30, 8, 31, 10, 29]), 1, 90)
    assert [sorted(unit.cost() for unit in slot[0]) for slot in slots] == [[29, 30, 31], [8, 9, 10]]


def test_work_is_balanced_over_ranks():
    rng = np.random.default_rng(0)
    slots = make_micro_batches(some_units(rng.integers(20, 200, 200).tolist()), 4, 2048)
    loads = np.array([[sum(u.cost() for u in part) for part in slot] for slot in slots])
    assert loads.sum(0).max() < 1.05 * loads.sum(0).mean()
    assert len(slots) <= 1.25 * loads.sum() / (4 * 2048) + 1  # micro-batches are full


def test_all_ranks_together_hold_the_step():
    mixture = DatasetMixture([pairs_data(20)])
    samplers = [sampler_of(mixture, 16, rank=rank, n_ranks=3, budget=150) for rank in range(3)]
    for number in range(samplers[0].n_steps):
        steps = [sampler.step(number) for sampler in samplers]
        assert len({len(step.micro_batches) for step in steps}) == 1
        found = sorted(
            (unit.group, response)
            for step in steps
            for units in step.micro_batches
            for unit in units
            for response in unit.response_ids
        )
        units = mixture.units(samplers[0].example_indices(number))
        assert found == sorted((unit.group, response) for unit in units for response in unit.response_ids)
        assert (
            sum(len(unit.pairs) for step in steps for units in step.micro_batches for unit in units)
            == steps[0].n_examples
        )


def test_a_rank_without_units_gets_none():
    sampler = sampler_of(DatasetMixture([Data([(2, [2, 2], [(0, 1)])])]), 1, n_ranks=2, rank=1, make_batch=pack)
    assert sampler.step(0).micro_batches == [None]


# ---- Steps that hold what is looked for


@pytest.mark.parametrize("kind", KINDS)
def test_examples_with_an_unknown_response_are_found(kind):
    rng = np.random.default_rng(0)
    data = pairs_data(30)
    pairs = np.array([pair for pair in data.examples if rng.random() < 0.5], dtype=np.int32)
    data.examples, *_ = examples_of_kind(pairs, kind)
    data.preferences = lambda group: preferences_of(pairs, group)
    mixture = DatasetMixture([data])
    for share in (0.0, 0.1, 0.9, 1.0):
        known = rng.random(data.n_responses) >= share
        found = examples_lacking(data.examples, pairs, data.first[:-1], known)
        for number in range(len(data.examples)):
            (unit,) = mixture.units(np.array([number]))
            assert found[number] == (not all(known[unit.response_ids])), number


@pytest.mark.parametrize("shuffle", ["pairs", "prompts"])
@pytest.mark.parametrize(
    "weights, n_epochs, n_examples", [((1, 1), 3, None), ((1, 1), 2, 50), ((0.5, 1), 4, None), ((2, 0), 1, None)]
)
def test_steps_with_what_is_wanted_hold_all_of_it_once(shuffle, weights, n_epochs, n_examples):
    mixture = DatasetMixture([pairs_data(20), pairs_data(30, seed=1)], weights)
    sampler = sampler_of(mixture, 5, seed=3, shuffle=shuffle, n_epochs=n_epochs, n_examples=n_examples)
    seen = [set(sampler.example_indices(step).tolist()) for step in range(sampler.n_steps)]
    rng = np.random.default_rng(0)
    for share in (0.0, 0.03, 1.0):
        wanted = rng.random(mixture.offsets[-1]) < share
        numbers = sampler.steps_with(wanted)
        left = set(np.flatnonzero(wanted).tolist())
        for number, step in enumerate(seen):
            assert (number in numbers) == bool(left & step), number
            left -= step
        assert numbers == sorted(set(numbers))
