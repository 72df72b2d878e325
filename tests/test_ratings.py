"""Rows that say how good a response is: labels, scores, ranks, margins and weights."""

import math

import numpy as np
import pytest
from rows import chat, config, only, read, write
from runs import LLAMA, train

from data.sources import open_source
from data.tokenization import load_tokenized
from modeling.loading import byte_tokenizer

PROMPT = [{"role": "user", "content": "q"}]


def texts(group):
    """Pairs as texts; "" for no response."""
    return [tuple(group.responses[n] if n >= 0 else "" for n in pair) for pair in group.pairs]


# ---- Labels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["d.jsonl", "d.csv", "d.parquet"])
@pytest.mark.parametrize("good, bad", [(True, False), (1, 0), ("good", "bad"), ("Chosen", "rejected"), (1, -1)])
def test_labelled_responses(tmp_path, name, good, bad):
    rows = [{"prompt": "q", "completion": "yes", "label": good}, {"prompt": "q", "completion": "no", "label": bad}]
    path = write(tmp_path / name, rows)
    group = only(path, tmp_path, kind="unpaired")
    assert texts(group) == [("yes", ""), ("", "no")]
    groups, counts = read(path, tmp_path, sft=True)  # SFT learns the good one
    assert groups[0].sft_targets == ["yes"] and counts["dropped_labelled_bad"] == 1


def test_labelled_conversations_and_another_name_of_the_label(tmp_path):
    row = {"messages": chat("q", "yes"), "kto_tag": "true"}
    group = only(write(tmp_path / "a.jsonl", [row]), tmp_path, kind="unpaired")
    assert group.prompt == PROMPT and texts(group) == [("yes", "")]
    row = {"prompt": "q", "response": "no", "thumbs": False}
    columns = {"completion": "response", "label": "thumbs"}
    group = only(write(tmp_path / "b.jsonl", [row]), tmp_path, kind="unpaired", columns=columns)
    assert texts(group) == [("", "no")]


def test_pairs_are_single_responses_too(tmp_path):
    rows = [{"prompt": "q", "chosen": "yes", "rejected": "no"}]
    assert texts(only(write(tmp_path / "d.jsonl", rows), tmp_path, kind="unpaired")) == [("yes", "no")]


@pytest.mark.parametrize(
    "rows, kind, message",
    [
        ([{"prompt": "q", "completion": "a", "label": True}], "pairs", "kto, bco and apo_zero_unpaired"),
        ([{"prompt": "q", "completion": "a"}], "unpaired", "give a column label"),
        ([{"prompt": "q", "completion": "a", "label": "sports"}], "unpaired", "line 1: .*label that says good or bad"),
        ([{"prompt": "q", "completion": "a", "label": None}], "unpaired", "line 1: .*label that says good or bad"),
    ],
)
def test_rows_of_the_wrong_kind_are_refused(tmp_path, rows, kind, message):
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "d.jsonl", rows), tmp_path, kind=kind)


# ---- Rankings -------------------------------------------------------------------------------------------------------

RANKINGS = {
    "scored": [{"prompt": "q", "responses": ["b", "a", "c"], "scores": [2, 3, 1]}],
    "ultrafeedback": [
        {
            "source": "sharegpt",
            "instruction": "q",
            "models": ["m"] * 3,
            "completions": [
                {"response": "b", "overall_score": 2.0, "annotations": {}},
                {"response": "a", "overall_score": 3.0, "annotations": {}},
                {"response": "c", "fine-grained_score": 1.0, "annotations": {}},
            ],
        }
    ],
    "nectar": [
        {
            "prompt": "q",
            "answers": [
                {"answer": "b", "model": "m", "rank": 2.0},
                {"answer": "a", "model": "m", "rank": 1.0},
                {"answer": "c", "model": "m", "rank": 3.0},
            ],
            "turns": 1,
        }
    ],
    "completions beside scores": [{"prompt": "q", "completions": ["b", "a", "c"], "scores": [2, 3, 1]}],
    "completions beside ranks": [{"prompt": "q", "completions": ["b", "a", "c"], "ranks": [2, 1, 3]}],
    "completions with ranks": [
        {"prompt": "q", "completions": [{"text": t, "rank": r} for t, r in (("b", 2), ("a", 1), ("c", 3))]}
    ],
    "completions with scores": [
        {"prompt": "q", "completions": [{"completion": t, "score": s} for t, s in (("b", 2), ("a", 3), ("c", 1))]}
    ],
    "helpsteer": [
        {"prompt": "q", "response": text, "helpfulness": score, "correctness": 4, "verbosity": 1}
        for text, score in (("b", 2), ("a", 3), ("c", 1))
    ],
}


@pytest.mark.parametrize("source", RANKINGS)
@pytest.mark.parametrize(
    "how, pairs",
    [
        ("all", [("a", "b"), ("a", "c"), ("b", "c")]),
        ("best_worst", [("a", "c")]),
        ("adjacent", [("a", "b"), ("b", "c")]),
    ],
)
def test_pairs_of_a_ranking(tmp_path, source, how, pairs):
    score = {"score": "helpfulness"} if source == "helpsteer" else {}
    group = only(write(tmp_path / "d.jsonl", RANKINGS[source]), tmp_path, pairs=how, **score)
    assert texts(group) == pairs and group.sft_targets == ["a"]


def test_a_random_pair_is_the_same_every_time(tmp_path):
    rows = [{"prompt": f"q{n}", "responses": ["a", "b", "c"], "scores": [3, 2, 1]} for n in range(40)]
    path = write(tmp_path / "d.jsonl", rows)
    found = [texts(group) for group in read(path, tmp_path, pairs="random")[0]]
    assert all(len(pairs) == 1 for pairs in found) and len({pairs[0] for pairs in found}) == 3
    assert found == [texts(group) for group in read(path, tmp_path, pairs="random")[0]]


def test_ties_and_small_gaps_make_no_pair_and_are_counted(tmp_path):
    rows = [{"prompt": "q", "responses": ["a", "b", "c", "d"], "scores": [5, 5, 4.5, 1]}]
    groups, counts = read(write(tmp_path / "d.jsonl", rows), tmp_path, min_score_gap=1)
    assert texts(groups[0]) == [("a", "d"), ("b", "d"), ("c", "d")]
    assert (counts["dropped_tied"], counts["dropped_small_gap"]) == (1, 2)
    assert texts(read(tmp_path / "d.jsonl", tmp_path, pairs="best_worst")[0][0]) == [("a", "d")]
    adjacent = read(tmp_path / "d.jsonl", tmp_path, pairs="adjacent")[0][0]
    assert texts(adjacent) == [("a", "c"), ("b", "c"), ("c", "d")]


def test_scores_of_a_pair_under_their_names(tmp_path):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    for number, rated in enumerate(
        (
            {"score_chosen": 8.5, "score_rejected": 8.0},
            {"chosen_score": 8.5, "rejected_score": "8"},
            {"chosen-rating": 8.5, "rejected-rating": 8},
        )
    ):
        group = only(write(tmp_path / f"{number}.jsonl", [pair | rated]), tmp_path)
        assert group.scores == {"a": 8.5, "b": 8.0}
    group = only(write(tmp_path / "m.jsonl", [pair | {"margin": 0.7}]), tmp_path)
    assert group.scores == {"a": 0.7, "b": 0.0}
    columns = {"score_chosen": "good", "score_rejected": "bad"}
    group = only(write(tmp_path / "c.jsonl", [pair | {"good": 2, "bad": 1}]), tmp_path, columns=columns)
    assert group.scores == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "q", "responses": ["a", "b"], "scores": [1]}, "2 responses but 1 scores"),
        ({"prompt": "q", "responses": ["a", "b"], "scores": [1, "x"]}, r"scores\[1\] must be a number"),
        ({"prompt": "q", "responses": ["a", "b"], "scores": [1, math.nan]}, r"scores\[1\] must be a finite number"),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": "high", "score_rejected": 1},
            "must be a number",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 3}, "the other response has none"),
        ({"prompt": "q", "answers": [{"answer": "a", "rank": None}]}, "rank must be a number"),
        ({"instruction": "q", "completions": [{"response": "a"}]}, "has no score; read are overall_score"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "weight": -1}, "must not be negative"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "weight": math.nan}, "finite number"),
        ({"prompt": "q", "responses": ["a", "b"], "scores": [1, 2], "weight": 2}, "no weight of their own"),
        ({"prompt": "q", "response": "a", "helpfulness": 3}, "data.score=helpfulness"),
    ],
)
def test_ratings_that_cannot_be_read_are_refused(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "d.jsonl", [row]), tmp_path)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"completions": ["a", "b"]}, "completions are texts that nothing rates: give a column scores or ranks"),
        ({"completions": ["a", "b"], "scores": [1]}, "there are 2 completions but 1 scores"),
        ({"completions": ["a", "b"], "ranks": [1, "x"]}, r"ranks\[1\] must be a number"),
        ({"completions": [{"text": "a", "score": 1}, {"text": "b"}]}, r"completions\[1\] has no score"),
        ({"completions": [{"score": 1}]}, r"completions\[0\] has no text"),
        ({"completions": "a"}, "completions must be a list"),
    ],
)
def test_completions_that_nothing_rates_are_refused(tmp_path, more, message):
    with pytest.raises(ValueError, match=f"line 1: {message}"):
        read(write(tmp_path / "d.jsonl", [{"prompt": "q"} | more]), tmp_path)


def test_a_score_column_that_is_not_there(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"prompt": "q", "response": "a", "helpfulness": 3}])
    with pytest.raises(ValueError, match="choose the column that ranks them, data.score=helpfulness"):
        read(path, tmp_path, score="helpful")


def test_layouts_of_other_trainers(tmp_path):
    rows = {
        "ms-swift": {"messages": chat("q", "a"), "rejected_response": "b"},
        "llama-factory": {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        "alpaca": {"instruction": "q", "input": "", "output": ["a", "b"]},
        "roles": {
            "prompt": [{"role": "Human", "content": "q"}],
            "chosen": [{"role": "Assistant", "content": "a"}],
            "rejected": [{"role": "Assistant", "content": "b"}],
        },
    }
    for name, row in rows.items():
        group = only(write(tmp_path / f"{name}.jsonl", [row]), tmp_path)
        assert group.prompt == PROMPT and texts(group) == [("a", "b")], name
    with pytest.raises(ValueError, match="line 1: this row is without a pair"):
        read(write(tmp_path / "x.jsonl", [{"instruction": "q", "output": "a"}]), tmp_path)


# ---- In runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ratings")


def data(folder, name, rows, test=None):
    """The option for a folder with these rows."""
    write(folder / name / "train.jsonl", rows)
    write(folder / name / "test.jsonl", test or rows[:3])
    return f"datasets=[{folder / name}]"


def first_loss(folder, option, *more):
    return train(folder, *LLAMA, option, "n_examples=8", "batch_size=8", *more).losses[0]


def test_losses_train_on_the_rows_that_they_are_for(folder):
    ranked = [
        {"prompt": f"q{n}:", "responses": [f" {n} a", f" {n} bb", f" {n} ccc"], "scores": [3, 2 + n % 2, 1]}
        for n in range(12)
    ]
    option = data(folder, "ranked", ranked)
    for loss in ("odpo", "listwise_softmax", "plackett_luce", "dpo", "kto"):
        assert math.isfinite(first_loss(folder, option, f"loss={loss}"))
    labelled = [{"prompt": f"q{n}:", "completion": f" answer {n}", "label": n % 3 > 0} for n in range(12)]
    option = data(folder, "labelled", labelled)
    for loss, start in (("kto", 0.5), ("bco", math.log(2)), ("apo_zero_unpaired", 0.5)):
        assert first_loss(folder, option, f"loss={loss}") == pytest.approx(start, abs=1e-6)


def test_weights_multiply_losses(folder):
    rows = [{"prompt": f"q{n}:", "chosen": f" a{n}", "rejected": f" b{n}", "weight": 0.5 + n % 2} for n in range(8)]
    assert first_loss(folder, data(folder, "weighted", rows)) == pytest.approx(math.log(2), abs=1e-6)  # mean weight 1
    for row in rows:
        row["weight"] = 3.0
    option = data(folder, "heavy", rows)
    assert first_loss(folder, option) == pytest.approx(3 * math.log(2), abs=1e-6)
    assert first_loss(folder, option, "loss=kto") == pytest.approx(1.5, abs=1e-6)


@pytest.mark.parametrize(
    "rows, more, message",
    [
        ([{"prompt": "q", "chosen": "a", "rejected": "b"}], ["loss=odpo"], "reads the scores of responses; .* row 1"),
        (
            [{"prompt": "q", "chosen": "a", "rejected": "b"}],
            ["data.pairs=adjacent"],
            "data.pairs=adjacent has no effect",
        ),
        ([{"prompt": "q", "chosen": "a", "rejected": "b", "weight": 0}], [], "no example is left.*weight_zero 1"),
        ([{"prompt": "q", "completion": "a", "label": True}], ["loss=bco"], "all 1 labelled responses are good"),
        ([{"prompt": "q", "completion": "a", "label": False}], ["loss=bco"], "all 1 labelled responses are bad"),
        ([{"prompt": "q", "chosen": "a", "rejected": "b"}], ["loss=kto"], "a single train prompt"),
    ],
)
def test_data_that_a_loss_cannot_learn_from_are_refused(folder, rows, more, message):
    option = data(folder, f"bad-{abs(hash(str((rows, more))))}", rows)
    with pytest.raises(ValueError, match=message):
        first_loss(folder, option, *more)


def test_scores_and_weights_reach_the_arrays(folder):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 2, "score_rejected": 1, "weight": 2}]
    rows += [{"prompt": "q2", "chosen": "c", "rejected": "d"}]
    seen = {}

    def prepare(trainer):
        prepare_ = trainer.prepare

        def prepared():
            prepare_()
            (dataset,) = trainer.datasets["train"]
            seen["scores"], seen["weights"] = np.array(dataset.scores), [dataset.weight(n) for n in range(2)]

        trainer.prepare = prepared

    train(folder, *LLAMA, data(folder, "arrays", rows), "n_examples=2", "batch_size=2", prepare=prepare)
    assert seen["weights"] == [2.0, 1.0]
    assert seen["scores"][:2].tolist() == [2, 1] and np.isnan(seen["scores"][2:]).all()


def test_data_that_rate_nothing_are_the_same_data_as_before_there_were_ratings(tmp_path):
    """So that runs of earlier versions can be resumed, whose checkpoints hold this fingerprint."""
    rows = [{"prompt": f"q{n}:", "chosen": f" yes {n}", "rejected": " no"} for n in range(5)]

    def key(name, rows):
        write(tmp_path / name / "train.jsonl", rows)
        write(tmp_path / name / "test.jsonl", rows[:2])
        return load_tokenized(str(tmp_path / name), "train", byte_tokenizer(), config(tmp_path), "pairs").key

    assert key("plain", rows) == "f1784ef3617eee1d7385739b9ce340b9"
    rows[0]["weight"] = 2
    assert key("weighted", rows) != "f1784ef3617eee1d7385739b9ce340b9"


def test_pairs_that_rows_name_are_not_made_anew_from_scores(tmp_path):
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": 5, "weight": 2},
        {"prompt": "q", "chosen": "c", "rejected": "d", "score_chosen": 9, "score_rejected": 1, "weight": 3},
        {"prompt": "q", "chosen": "e", "rejected": "f"},
    ]
    path = write(tmp_path / "d.jsonl", rows)
    group = only(path, tmp_path, pairs="best_worst")
    assert texts(group) == [("a", "b"), ("c", "d"), ("e", "f")] and group.weights == [2, 3, 1]
    groups, counts = read(path, tmp_path, min_score_gap=2)
    assert texts(groups[0]) == [("c", "d"), ("e", "f")] and groups[0].weights == [3, 1]
    assert counts["dropped_small_gap"] == 1


def test_of_a_response_that_is_rated_twice_the_best_rating_counts(tmp_path):
    rows = [{"prompt": "q", "response": text, "helpfulness": score} for text, score in (("a", 1), ("b", 2), ("a", 4))]
    assert texts(only(write(tmp_path / "d.jsonl", rows), tmp_path, score="helpfulness")) == [("a", "b")]


def test_a_label_makes_no_pair(tmp_path):
    row = {"instruction": "q", "output": "a", "label": True}
    with pytest.raises(ValueError, match="line 1: this row is without a pair"):
        read(write(tmp_path / "d.jsonl", [row]), tmp_path)


# ---- Rows of one prompt that rate the same response otherwise -------------------------------------------------------


def test_margins_of_two_pairs_that_share_a_response_both_count(tmp_path, folder):
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1},
        {"prompt": "q", "chosen": "a", "rejected": "c", "margin": 5},
        {"prompt": "q", "chosen": "d", "rejected": "e", "margin": 2},
    ]
    groups, counts = read(write(tmp_path / "d.jsonl", rows), tmp_path)
    found = {
        texts(group)[n]: group.scores[texts(group)[n][0]] - group.scores[texts(group)[n][1]]
        for group in groups
        for n in range(len(group.pairs))
    }
    assert found == {("a", "b"): 1, ("a", "c"): 5, ("d", "e"): 2}
    assert counts["groups"] == 2  # the third row joins the first


@pytest.mark.parametrize("loss, weights", [("dpo", [1, 3, 5]), ("bco", [2, 1, 3, 5, 5]), ("plackett_luce", [3])])
def test_an_example_that_several_rows_make_has_the_mean_of_their_weights(folder, loss, weights):
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b", "weight": 1, "score_chosen": 3, "score_rejected": 1},
        {"prompt": "q", "chosen": "a", "rejected": "c", "weight": 3, "score_chosen": 3, "score_rejected": 0},
        {"prompt": "q", "chosen": "d", "rejected": "e", "weight": 5, "score_chosen": 2, "score_rejected": -1},
    ]
    seen = []

    def prepare(trainer):
        prepare_ = trainer.prepare

        def prepared():
            prepare_()
            (dataset,) = trainer.datasets["train"]
            first = [number for number, row in enumerate(dataset.examples) if row[0] == 0]
            seen.append([dataset.weight(number) for number in first])

        trainer.prepare = prepared

    rows += [{"prompt": "other", "chosen": "a", "rejected": "b", "score_chosen": 3, "score_rejected": 1}]
    option = data(folder, f"mean-of-weights-{loss}", rows)
    train(folder, *LLAMA, option, f"loss={loss}", "n_examples=2", "batch_size=2", prepare=prepare)
    assert sorted(seen[0]) == sorted(weights)


# ---- Scores that cannot be, labels that contradict ------------------------------------------------------------------


def test_scores_that_float32_cannot_hold_or_tell_apart(tmp_path):
    row = {"prompt": "q", "responses": ["a", "b"], "scores": [1e300, 1]}
    with pytest.raises(ValueError, match=r"line 1: scores\[0\] is 1e\+300, which float32 cannot hold"):
        read(write(tmp_path / "a.jsonl", [row]), tmp_path)
    rows = [
        {"prompt": "p", "responses": ["a", "b"], "scores": [1, 2]},
        {"prompt": "q", "responses": ["a", "b"], "scores": [16777217, 16777216]},
    ]
    groups, counts = read(write(tmp_path / "b.jsonl", rows), tmp_path)
    assert [len(group.pairs) for group in groups] == [1, 0] and counts["dropped_tied"] == 1


def test_a_gap_is_measured_in_the_scores_as_they_are_written(tmp_path):
    rows = [{"prompt": "q", "responses": ["a", "b"], "scores": [0.9, 0.6]}]
    (group,), _ = read(write(tmp_path / "d.jsonl", rows), tmp_path, min_score_gap=0.3)
    assert texts(group) == [("a", "b")]


def test_a_label_of_a_row_with_several_responses(tmp_path):
    row = {"prompt": "q", "responses": ["a", "b"], "sft_target": "a", "label": True}
    with pytest.raises(ValueError, match="line 1: a label says whether a row's only response is good; this row has 2"):
        read(write(tmp_path / "d.jsonl", [row]), tmp_path, kind="unpaired")


def test_sft_names_the_ratings_that_it_does_not_read(tmp_path):
    from test_columns import notices_of

    rows = [{"prompt": "q", "completion": "a", "margin": 2, "chosen_score": 3}]
    (notice,) = notices_of(write(tmp_path / "d.jsonl", rows), tmp_path, sft=True)
    assert notice.endswith("columns that are not read: ['chosen_score', 'margin']")
    rows = [{"prompt": "q", "completion": "a", "label": True}]
    assert not notices_of(write(tmp_path / "labelled.jsonl", rows), tmp_path, sft=True)


def test_a_response_that_is_called_good_and_bad_is_counted_and_named(tmp_path):
    rows = [{"prompt": "q", "completion": "a", "label": good} for good in (True, False)]
    rows += [{"prompt": "p", "completion": "a", "label": True}]
    source = open_source(str(write(tmp_path / "d.jsonl", rows)), "train", config(tmp_path, test_fraction=0), "unpaired")
    groups = list(source.groups())
    assert [texts(group) for group in groups] == [[("a", ""), ("", "a")], [("a", "")]]
    assert source.counts["labelled_good_and_bad"] == 1
    assert "1 responses are called good by one row and bad by another" in source.notices[0]


def test_nectars_blank_after_assistant_belongs_to_the_answer(tmp_path):
    row = {
        "prompt": "\n\nHuman: hi\n\nAssistant: ",
        "answers": [{"answer": "yes", "rank": 1}, {"answer": " no", "rank": 2}],
    }
    group = only(write(tmp_path / "d.jsonl", [row]), tmp_path)
    assert group.prompt == "\n\nHuman: hi\n\nAssistant:" and texts(group) == [(" yes", " no")]
    assert group.header == "\n\nAssistant:"


# ---- Options that have no effect ------------------------------------------------------------------------------------


def test_a_score_column_is_for_the_data_sets_that_have_it(folder):
    rated = [{"prompt": f"q{n % 2}", "response": f" {n}", "helpfulness": n} for n in range(4)]
    pairs = [{"prompt": f"p{n}", "chosen": " a", "rejected": " b"} for n in range(4)]
    both = [data(folder, name, rows).partition("=[")[2][:-1] for name, rows in (("rated", rated), ("pairs", pairs))]
    assert math.isfinite(first_loss(folder, f"datasets=[{','.join(both)}]", "data.score=helpfulness"))
    with pytest.raises(ValueError, match="data.score=helpfulness has no effect: no data set"):
        first_loss(folder, f"datasets=[{both[1]}]", "data.score=helpfulness")


@pytest.mark.parametrize("option", ["data.pairs=adjacent", "data.min_score_gap=2"])
def test_sft_refuses_what_is_about_pairs(compose, option):
    import settings

    with pytest.raises(ValueError, match="learns the best response of a ranking, and no pairs"):
        settings.validate(compose("model=tiny", "loss=sft", option), device_count=0)


WRONG = {  # rows of a kind -> the losses that learn from them
    "sft": ({"prompt": "q", "completion": " a"}, {"responses"}),
    "pairs": ({"prompt": "q", "chosen": " a", "rejected": " b"}, {"responses", "pairs", "unpaired", "group"}),
    "labelled": ({"prompt": "q", "completion": " a", "label": True}, {"responses", "unpaired"}),
    "ranked": (
        {"prompt": "q", "responses": [" a", " b"], "scores": [2, 1]},
        {"responses", "pairs", "unpaired", "group"},
    ),
}


@pytest.mark.parametrize("rows", WRONG)
@pytest.mark.parametrize("kind", ["responses", "pairs", "unpaired", "group"])
def test_every_kind_of_loss_takes_its_rows_and_refuses_others(tmp_path, rows, kind):
    row, fitting = WRONG[rows]
    path = write(tmp_path / "d.jsonl", [row])
    load = lambda: load_tokenized(str(path), "train", byte_tokenizer(), config(tmp_path, test_fraction=0), kind)  # noqa: E731
    if kind in fitting:
        assert len(load()) > 0
    else:
        with pytest.raises(ValueError, match=r"d\.jsonl.*(loss=sft|a label|losses of such rows)"):
            load()
