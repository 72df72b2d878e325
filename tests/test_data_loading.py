"""What a run makes of its data sets: weights that draw nothing, held-out rows, metrics' names."""

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import compose_config
from data_in_memory import pairs_data
from rows import config, write
from small_tokenizers import byte_level

import train
from data.dataset_names import key_of, short_names
from data.sampler import DatasetMixture
from data.tokenization import load_tokenized
from settings.convert import resolve
from training.data_loading import check_test_fraction, check_weights, make_steps


def settings(**changes):
    usual = dict(batch_size=4, eval_batch_size=4, shuffle="pairs", n_epochs=1, n_examples=None, seed=0)
    usual |= dict(gradient_accumulation_steps=1, n_eval_examples=None)
    return SimpleNamespace(**(usual | changes))


def held_out_rows(seed, n_eval_examples=10):
    placement = SimpleNamespace(data_rank=0, data_ranks=1, device="cpu")
    tokenizer = SimpleNamespace(eos_token_id=1, pad_token_id=0)
    run = settings(seed=seed, n_eval_examples=n_eval_examples)
    sets = DatasetMixture([pairs_data(30, 1)]), DatasetMixture([pairs_data(30, 2), pairs_data(9, 3)])
    steps = make_steps(run, *sets, tokenizer, "pairs", placement, "plain", False, 1000).held_out
    assert steps is not None
    return np.concatenate([steps.example_indices(number) for number in range(steps.n_steps)]).tolist()


@pytest.mark.parametrize(
    "names, shorts",
    [
        (["hh", "owner/name", "owner/name:part"], ["hh", "owner/name", "owner/name:part"]),
        (["/data/x/p.jsonl", "~/q.parquet", "hh"], ["p", "q", "hh"]),
        (["/a/x/train.jsonl", "/a/y/train.jsonl.gz", "./folder/"], ["x/train", "y/train", "folder"]),
        (["/a/x/d/t.csv", "/b/x/d/t.csv", "/c/y/t.csv"], ["a/x/d/t", "b/x/d/t", "y/t"]),
        (["./p.jsonl", "./p.csv"], ["./p.jsonl", "./p.csv"]),
        (["/a/hh.jsonl", "hh"], ["a/hh", "hh"]),
    ],
)
def test_names_in_metrics_are_short_and_unlike_each_other(names, shorts):
    assert short_names(names) == shorts


def test_a_folder_has_one_short_name_wherever_the_run_goes_on():
    assert short_names(["data/pairs", "hh"], {"data/pairs": "/x/data/pairs", "hh": "/y"}) == ["pairs", "hh"]


PATHS = ["/data/p.jsonl", "/data/q.v2.csv", "owner/name:part"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["data.weights.p=2", "data.weights.q.v2=3", "data.weights.name=4"],
        ["data.weights.p.jsonl=2", "data.weights.q.v2.csv=3", "data.weights.name=4"],
        ["data.weights={p:2,q.v2:3,name:4}"],
        ["data.weights={/data/p.jsonl:2}", "data.weights={/data/q.v2.csv: 3, name: 4}"],
    ],
)
def test_a_data_set_goes_by_any_of_its_names_in_keys(arguments):
    given = train.arguments_for_hydra([*arguments, f"datasets=[{','.join(PATHS)}]", "loss=sft", "model=tiny"])
    values = resolve(compose_config(*given))
    assert values["data"]["weights"] == dict(zip(PATHS, (2, 3, 4)))


def test_columns_of_one_data_set_and_of_all_are_told_apart():
    columns = ["data.columns.p.jsonl.chosen=better", "data.columns.prompt=question"]
    given = train.arguments_for_hydra([*columns, "datasets=[/x/p.jsonl,/x/prompt.jsonl]", "loss=sft", "model=tiny"])
    assert resolve(compose_config(*given))["data"]["columns"] == {
        "/x/p.jsonl": {"chosen": "better"},
        "prompt": "question",
    }


def test_what_a_message_says_about_a_weight_can_be_typed():
    for names in (["/a/p.jsonl"], ["owner/name:x"], ["/a/my data.jsonl"], ["hh"], ["/a/x/t.jsonl", "/a/y/t.jsonl"]):
        written = key_of("data.weights", names[0], names, 2).strip("'")
        given = train.arguments_for_hydra([written, f"datasets={[*names]}", "loss=sft", "model=tiny"])
        assert resolve(compose_config(*given))["data"]["weights"] == {names[0]: 2}


def test_a_metric_of_a_path_recorded_by_its_whole_name_is_understood():
    given = ["datasets=[/x/p.jsonl,hh]", "early_stopping.metric=loss/eval//x/p.jsonl", "loss=sft", "model=tiny"]
    assert resolve(compose_config(*given))["early_stopping"]["metric"] == "loss/eval/p"


def test_the_same_held_out_rows_are_evaluated_whatever_the_seed():
    rows = held_out_rows(0)
    assert len(rows) == 10 and all(held_out_rows(seed) == rows for seed in (1, 2, 12345))


def test_a_weight_that_would_draw_nothing_is_refused():
    def data(name):
        return SimpleNamespace(name=name, examples=pairs_data(10).examples)

    count = len(data("a").examples)
    weights = SimpleNamespace(weights={"a": 0.4 / count})
    run = SimpleNamespace(data=weights, datasets=["a", "b"], n_epochs=1, n_examples=None)
    with pytest.raises(ValueError, match=rf"data.weights: .* examples of a is less .* Give it {1 / count:.2g} or more"):
        check_weights(run, [data("a"), data("b")])
    run.n_epochs = 3  # 1.2 examples
    check_weights(run, [data("a"), data("b")])


def test_a_weight_that_makes_an_epoch_too_large_to_draw_is_refused():
    data = SimpleNamespace(name="a", examples=pairs_data(10).examples)
    run = SimpleNamespace(data=SimpleNamespace(weights={"a": 1e9}), datasets=["a"], n_epochs=1, n_examples=4)
    with pytest.raises(
        ValueError, match=r"data.weights: 1e\+09 times the .* examples of a is too much: .* 2 draws each"
    ):
        check_weights(run, [data])


def test_a_share_to_hold_out_beside_a_test_split_is_refused_or_reported(tmp_path):
    row = [{"prompt": "q", "chosen": "a", "rejected": "b"}]
    for name in ("split/train", "split/test", "whole"):
        write(tmp_path / f"{name}.jsonl", row)
    split, whole = str(tmp_path / "split"), str(tmp_path / "whole.jsonl")
    notices = []

    def check(*names, fraction=0.2, resume=None):
        options = config(tmp_path, test_fraction=fraction)
        found = [load_tokenized(name, "train", byte_level(), options, "pairs") for name in names]
        check_test_fraction(SimpleNamespace(data=options.data, resume=resume), found, notices.append)

    for _ in range(2):  # made anew, and from the cache
        with pytest.raises(ValueError, match=r"data.test_fraction=0.2 has no effect on .*split: it has a test split"):
            check(split)
    check(split, fraction=0.05)
    check(whole)
    assert not notices
    check(split, whole)
    check(split, resume="RUN")  # an older version began the run
    assert len(notices) == 2 and all("has no effect on" in text and "whole" not in text for text in notices)
