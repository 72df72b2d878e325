"""Runs that share a reference cache: each has the numbers that it would have alone."""

import io
import json
import math
import shutil
from functools import partial

import numpy as np
import pytest
from runs import LLAMA, NEOX, new_run_dir, placement, save_model, train, write_data

from data.sampler import BatchSampler, DatasetMixture
from modeling import reference as reference_module
from modeling.reference import Reference
from modeling.reference_cache import CachedResponses, ReferenceCache

LN2 = math.log(2)
SHORT = ("n_examples=10", "batch_size=5", "lr=1e-4", "warmup_steps=2", "do_first_eval=true")
BF16 = "model.policy_dtype=bfloat16"


@pytest.fixture
def place(tmp_path):
    write_data(tmp_path / "data")
    return tmp_path


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "llama"
    save_model(folder, "llama")
    return folder


def use_model(place, model_folder, **changes):
    """Options of a run from a copy of the model with its configuration changed."""
    folder = place / "model"
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return ["model=blank_model", f"model.name_or_path={folder}"]


def cache(place, name="cache"):
    return f"reference.cache_dir={place / name}"


def files(place, name="cache"):
    return sorted((place / name).glob("*/*.logps"))


def values_of(path):
    content = path.read_bytes()
    return np.load(io.BytesIO(content[content.index(b"\x93NUMPY") :]))


def same_files(place, *names):
    one, other = ([values_of(path) for path in files(place, name)] for name in names)
    return len(one) == len(other) and all(np.array_equal(*both, equal_nan=True) for both in zip(one, other))


def write_values(path, values):
    """A cache file with these values and the checksum that belongs to them."""
    path.unlink(missing_ok=True)
    entry = CachedResponses(path.stem, len(values))
    other = ReferenceCache(str(path.parent.parent), path.parent.name, {"train": [entry]}, pytest.fail)
    other.values["train"][0][:] = values
    other.save()


def all_numbers(run):
    return run.losses, run.steps, run.evals


# ---- The key: what changes the numbers changes the file


@pytest.mark.parametrize(
    "dtype, change",
    [
        ("bfloat16", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}),
        ("float32", {"rms_norm_eps": 1.1e-6}),
        ("bfloat16", {"hidden_act": "gelu"}),
    ],
    ids=["rope_theta", "rms_norm_eps", "hidden_act"],
)
def test_another_model_configuration_finds_no_values_of_this_one(place, model_folder, dtype, change):
    options = (*SHORT, f"model.policy_dtype={dtype}", cache(place))
    train(place, *use_model(place, model_folder), *options)
    before = files(place)
    run = train(place, *use_model(place, model_folder, **change), *options)
    assert len(before) == 2 and len(files(place)) == 4
    assert run.losses[0] == pytest.approx(LN2, abs=1e-6)


def test_the_same_weights_in_another_folder_find_their_values(place, model_folder):
    options = use_model(place, model_folder)
    train(place, *options, *SHORT, cache(place))
    shutil.move(place / "model", place / "moved")
    train(place, options[0], f"model.name_or_path={place / 'moved'}", *SHORT, cache(place))
    assert len(files(place)) == 2


def test_what_no_description_shows_is_seen_in_the_scores(place, model_folder, monkeypatch):
    """The key made blind: a probe's bits still keep the values of another activation function apart."""
    monkeypatch.setattr(reference_module, "computation_digest", lambda *_: "blind")
    train(place, *use_model(place, model_folder), *SHORT, BF16, cache(place))
    changed = use_model(place, model_folder, hidden_act="gelu")
    train(place, *changed, *SHORT, BF16, cache(place))
    assert len({path.parent for path in files(place)}) == 1 and len(files(place)) == 4


# ---- Wrong values


@pytest.mark.parametrize("split, dtype", [("train", "float32"), ("test", "bfloat16")])
def test_values_found_wrong_do_not_come_back(place, split, dtype):
    options = (*LLAMA, *SHORT, f"model.policy_dtype={dtype}", cache(place))
    right = train(place, *options)
    before = {path: values_of(path) for path in files(place)}
    changed = max(files(place), key=lambda path: len(before[path]) * (1 if split == "train" else -1))
    write_values(changed, before[changed] - 2.5 - np.arange(len(before[changed])) % 3)
    run = train(place, *options)
    assert any("differ from recomputed ones" in notice and "anew" in notice for notice in run.notices)
    assert all_numbers(run) == all_numbers(right)
    for path, values in before.items():
        assert np.array_equal(values_of(path), values, equal_nan=True)


def test_a_file_of_not_computed_values_is_filled(place):
    options = (*LLAMA, *SHORT, cache(place))
    right = train(place, *options)
    before = {path: values_of(path) for path in files(place)}
    for path, values in before.items():
        write_values(path, np.where(np.arange(len(values)) % 2, values, np.nan))
    assert all_numbers(train(place, *options)) == all_numbers(right)
    assert all(np.array_equal(values_of(path), values, equal_nan=True) for path, values in before.items())


def test_a_run_killed_while_it_computes_them_goes_on_from_there(place, monkeypatch):
    options = (*LLAMA, "n_examples=26", "batch_size=4", cache(place))
    right = train(place, *options, cache(place, "whole"))
    score, scored = Reference._score, []

    def dying(self, batch):
        if len(scored) == 6:
            raise SystemExit(9)
        scored.append(batch)
        return score(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(reference_module, "SAVE_SECONDS", -1)
        patched.setattr(Reference, "_score", dying)
        with pytest.raises(SystemExit):
            train(place, *options)
    kept = [values_of(path) for path in files(place)]
    assert any(0 < np.isnan(values).sum() < len(values) for values in kept)
    assert all_numbers(train(place, *options)) == all_numbers(right)
    assert same_files(place, "cache", "whole")


# ---- A cache filled by other runs


OTHER_BATCHES = ("tokens_per_microbatch=1", "eval_batch_size=1", "shuffle=prompts", "n_examples=26")


def move_by_rounding(place):
    """Other kernels, or other batches on other hardware, differ by a few units in the last place."""
    for path in files(place):
        values = values_of(path)
        write_values(path, values * (1 + 3e-7 * np.random.default_rng(0).integers(-3, 4, len(values))))


def check_start(losses, steps, evals):
    assert losses[0] == pytest.approx(LN2, abs=1e-7)
    assert steps[0]["rewards_train/margins"] == evals[0]["rewards_eval/margins"] == 0
    assert steps[0]["rewards_train/accuracies"] == evals[0]["rewards_eval/accuracies"] == 0.5


def test_the_policy_starts_as_a_reference_that_was_scored_in_other_batches(place):
    options = (*NEOX, *SHORT, cache(place))
    train(place, *options, *OTHER_BATCHES)
    move_by_rounding(place)
    run = train(place, *options)
    check_start(*all_numbers(run))
    assert run.steps[1]["rewards_train/margins"] != 0
    assert len(files(place)) == 2


def test_a_reference_that_is_not_the_policy_shows_at_the_first_step(place, monkeypatch):
    """Only what rounding explains is taken to be equal."""
    monkeypatch.setattr(Reference, "_check", lambda self: None)
    options = (*LLAMA, *SHORT, cache(place))
    train(place, *options)
    for path in files(place):
        write_values(path, values_of(path) + 0.05 * (np.arange(len(values_of(path))) % 2))
    run = train(place, *options)
    assert run.steps[0]["rewards_train/margins"] != 0 and run.evals[0]["rewards_eval/margins"] != 0


def test_a_warm_cache_makes_no_steps(place, monkeypatch):
    options = (*LLAMA, "n_examples=26", "batch_size=2", cache(place))
    calls = []
    step, units, start = BatchSampler.step, DatasetMixture.units, Reference.__init__

    def note(name, function):
        return lambda self, *arguments: (calls.append(name), function(self, *arguments))[1]

    def counted(self, *arguments):
        with monkeypatch.context() as patched:
            patched.setattr(BatchSampler, "step", note("step", step))
            patched.setattr(DatasetMixture, "units", note("units", units))
            start(self, *arguments)

    monkeypatch.setattr(Reference, "__init__", counted)
    train(place, *options)
    assert calls.count("step") >= 13 + 1
    calls.clear()
    train(place, *options)
    assert calls.count("step") == 2, "one of each split is checked"
    assert calls.count("units") <= 4


# ---- Several processes


def another_job_saves(trainer, donor):
    """While this run computes the held-out values, another job saves half of the training values."""
    if trainer.world.rank:
        return
    save = ReferenceCache.save

    def late(cache):
        ReferenceCache.save = save
        for path in files(donor.parent, donor.name):
            values = values_of(path)
            write_values(
                donor.parent / "cache" / path.parent.name / path.name,
                np.where(np.arange(len(values)) % 2, values, np.nan),
            )
        cache.save()

    ReferenceCache.save = late


def first_numbers(world, place, options, prepare, run_dir):
    run = train(place, *options, world=world, prepare=prepare, run_dir=run_dir)
    return all_numbers(run)


def test_ranks_agree_on_what_is_missing_while_another_job_writes(place, pools):
    options = [*LLAMA, *SHORT, *placement("FULL_SHARD", 2)]
    alone = pools(2).run(first_numbers, place, [*options, cache(place, "donor")], None, new_run_dir(place))
    prepare = partial(another_job_saves, donor=place / "donor")
    beside = pools(2).run(first_numbers, place, [*options, cache(place)], prepare, new_run_dir(place))
    assert beside == alone
    assert same_files(place, "cache", "donor")


@pytest.mark.parametrize("name", ["FULL_SHARD", "TP"])
def test_shards_start_as_a_reference_that_was_scored_in_other_batches(place, pools, name):
    options = [*NEOX, *SHORT, *placement(name, 2), cache(place)]
    pools(2).run(first_numbers, place, [*options, *OTHER_BATCHES], None, new_run_dir(place))
    move_by_rounding(place)
    for numbers in pools(2).run(first_numbers, place, options, None, new_run_dir(place)):
        check_start(*numbers)
    assert len(files(place)) == 2
