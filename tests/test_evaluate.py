"""evaluate.py: its numbers are those of training's evaluations and of hand-made examples, on one process and on two."""

import json
import math

import numpy as np
import pytest
from runs import new_run_dir, settings_of, train, write_data

import evaluate as program
from checkpoint import run_folder
from report import evaluation_page, pair_figures
from report.pair_figures import ScoredPairs
from settings import replace
from settings.checkpoints import model_of, reference_of, with_recorded
from training import pair_evaluation
from utils import World


def pairs_of(margins, prompts=None, lengths=None, beta=1.0, reference=True) -> ScoredPairs:
    margins = np.array(margins, dtype=float)
    zeros = np.zeros(len(margins))
    lengths = np.array(lengths if lengths is not None else [[3, 3]] * len(margins))
    return ScoredPairs(
        ["one"],
        np.zeros(len(margins), dtype=int),
        np.arange(len(margins)) if prompts is None else np.array(prompts),
        np.arange(len(margins)),
        margins / beta,
        zeros,
        zeros if reference else None,
        zeros if reference else None,
        lengths[:, 0],
        lengths[:, 1],
        beta,
    )


# ---- Figures by hand ------------------------------------------------------------------------------------------------


def test_margins_and_ties():
    pairs = pairs_of([2.0, -1.0, 0.0])
    pairs.reference_chosen = np.array([0.5, -1.0, 1.0])
    pairs.reference_rejected = np.array([0.0, 0.0, 1.0])
    assert pairs.margins.tolist() == [1.5, 0.0, 0.0]
    assert pairs.right.tolist() == [1.0, 0.5, 0.5]


def test_an_interval_of_independent_pairs_is_wilsons():
    """8 of 10: 0.4901 to 0.9433 (Wilson, without continuity correction)."""
    found = pair_figures.share(np.array([1.0] * 8 + [0.0] * 2), np.arange(10))
    # The variance of 10 independent trials, estimated from themselves, is p (1 - p) / 9.
    n = 9
    center, half = (0.8 + 1.96**2 / (2 * n)) / (1 + 1.96**2 / n), 1.96 / (1 + 1.96**2 / n)
    half *= math.sqrt(0.8 * 0.2 / n + 1.96**2 / (4 * n**2))
    assert found["value"] == pytest.approx(0.8) and found["n"] == 10
    assert (found["low"], found["high"]) == pytest.approx((center - half, center + half), abs=1e-4)


def test_pairs_of_one_prompt_count_as_one_where_they_are_alike():
    alone = pair_figures.share(np.array([1.0, 0.0, 1.0, 1.0]), np.arange(4))
    repeated = pair_figures.share(np.repeat([1.0, 0.0, 1.0, 1.0], 50), np.repeat(np.arange(4), 50))
    assert (repeated["low"], repeated["high"]) == pytest.approx((alone["low"], alone["high"]))
    all_right = pair_figures.share(np.ones(200), np.repeat(np.arange(4), 50))
    assert all_right["low"] == pytest.approx(4 / (4 + 1.96**2), abs=1e-4)  # Wilson's lower end for 4 of 4


def test_an_average_of_one_prompt_has_no_interval():
    found = pair_figures.average(np.array([1.0, 3.0]), np.array([7, 7]))
    assert found == {"value": 2.0, "low": None, "high": None, "n": 2}
    two = pair_figures.average(np.array([1.0, 3.0]), np.array([7, 8]))
    assert two["high"] - two["value"] == pytest.approx(1.96 * 1.0, abs=1e-3)  # standard error sqrt(2) / sqrt(2)


@pytest.mark.parametrize(
    "better, worse, p", [(0, 0, 1.0), (5, 0, 2 / 32), (3, 1, 10 / 16), (2, 2, 1.0), (900, 700, None)]
)
def test_the_sign_test_is_exact(better, worse, p):
    found = pair_figures.sign_test(better, worse)
    if p is not None:
        assert found == pytest.approx(p)
    else:  # by the normal approximation: 200 / sqrt(1600) = 5 standard deviations
        assert found == pytest.approx(math.erfc(4.975 / math.sqrt(2)), rel=0.05)


def test_calibration():
    """Two pairs of margin ln 9 (confidence 0.9), one of them wrong, and two ties (confidence one half)."""
    found = pair_figures.calibration(pairs_of([math.log(9), -math.log(9), 0.0, 0.0]))
    assert [one["pairs"] for one in found["bins"]] == [2, 2]
    low, high = found["bins"]
    assert (low["confidence"], low["accuracy"]) == (0.5, 0.5)
    assert (high["confidence"], high["accuracy"]) == pytest.approx((0.9, 0.5))
    assert found["error"] == pytest.approx(0.5 * 0.4)
    assert pair_figures.calibration(pairs_of([5000.0, -5000.0]))["error"] == pytest.approx(0.5)


def test_a_comparison_is_paired():
    policy, other = pairs_of([1.0, 1.0, -1.0, 2.0]), pairs_of([-1.0, 1.0, -2.0, 3.0])
    found = pair_figures.comparison(policy, other)
    assert (found["better_prompts"], found["worse_prompts"], found["p_value"]) == (1, 0, 1.0)
    assert found["accuracy"]["value"] == pytest.approx(0.25)
    assert found["margin"]["value"] == pytest.approx((2 + 0 + 1 - 1) / 4)


def test_lengths_make_buckets_of_which_each_pair_is_in_one():
    pairs = pairs_of([1.0] * 8, lengths=[[n, 2 * n] for n in range(1, 9)])
    quarters = [one for name, one in pair_figures.by_length(pairs).items() if name.endswith("tokens")]
    assert [one["accuracy"]["n"] for one in quarters] == [2, 2, 2, 2]
    assert pair_figures.by_length(pairs)["chosen shorter"]["accuracy"]["n"] == 8
    assert list(pair_figures.by_length(pairs_of([1.0, 2.0]))) == ["as long"]  # all of one length


def test_the_surest_wrong_pairs():
    pairs = pairs_of([-3.0, 1.0, -1.0, -2.0, -5.0, -0.5])
    assert pair_figures.most_telling(pairs, 2) == {"surest": [4, 0], "least sure": [5, 2]}
    assert pair_figures.most_telling(pairs_of([1.0]), 2) == {"surest": [], "least sure": []}


# ---- Against training's own evaluations -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, run folder, the last evaluation's metrics) of a short run with checkpoints."""
    folder = tmp_path_factory.mktemp("evaluated")
    write_data(folder / "data")
    run_dir = new_run_dir(folder)
    options = (
        "model=tiny",
        "loss=dpo",
        "debug=false",
        "wandb.enabled=false",
        "lr=1e-3",
        "n_eval_examples=null",
        "eval_every=100",
    )
    options += ("checkpoint.formats=[state,policy,hf]", "sample_during_eval=false")
    run_folder.make(settings_of(folder, *options, f"local_run_dir={run_dir}"))
    run = train(folder, *options, run_dir=run_dir)
    return folder, run_dir, run.evals[-1]


def evaluated(trained, tmp_path, *overrides, **more):
    """The settings of an evaluation of the run, as evaluate.main makes them, and what it writes."""
    folder, run_dir, _ = trained
    from conftest import compose_config

    words = program.short_arguments([run_dir, "sample_during_eval=false", *overrides])
    composed = compose_config(*[*words, f"data.cache_dir={folder}/tokens"])
    import settings

    given = settings.named_keys(words)
    program.check_read(given)
    composed = program.with_checkpoint(composed, given)
    settings.validate(composed, device_count=0, given=given)
    config = settings.finalize(composed)
    return config if more.get("settings_only") else results(config, tmp_path)


def results(config, tmp_path, world=World()):
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    value = pair_evaluation.run(config, str(out), world)
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["accuracy"]["value"] == value
    return metrics


def test_it_finds_what_the_last_evaluation_of_the_run_found(trained, tmp_path):
    metrics, last = evaluated(trained, tmp_path), trained[2]
    assert metrics["pairs"] == 5
    assert metrics["accuracy"]["value"] == pytest.approx(last["rewards_eval/accuracies"])
    for name, key in (("margin", "margins"), ("chosen_reward", "chosen"), ("rejected_reward", "rejected")):
        assert metrics[name]["value"] == pytest.approx(last[f"rewards_eval/{key}"], abs=1e-5)
    assert metrics["margin"]["value"] != 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "pairs.jsonl").read_text().splitlines()]
    assert np.mean([line["margin"] for line in lines]) == pytest.approx(metrics["margin"]["value"])
    assert metrics["reference"] == "a random model" and metrics["policy"] == trained[1]


def test_the_policy_as_its_own_reference_has_no_margin_and_no_divergence(trained, tmp_path):
    metrics = evaluated(
        trained,
        tmp_path,
        f"reference={trained[1]}",
        f"evals.against={trained[1]}/LATEST/hf",
        "sample_during_eval=true",
        "n_eval_model_samples=3",
        "sampling.max_new_tokens=4",
    )
    assert metrics["margin"]["value"] == 0 and metrics["accuracy"]["value"] == 0.5
    assert metrics["kl"]["value"] == 0 and metrics["kl"]["n"] == 3
    assert metrics["difference"]["p_value"] == 1
    outputs = json.loads((tmp_path / "out" / "policy_outputs.json").read_text())
    assert len(outputs) == 3
    assert set(outputs[0]) == {"instruction", "output", "generator", "dataset"}
    assert outputs == [
        row | {"generator": trained[1]} for row in json.loads((tmp_path / "out" / "reference_outputs.json").read_text())
    ]
    assert "<!doctype html>" in (tmp_path / "out" / "evaluation.html").read_text()


def test_without_a_reference_log_probs_decide(trained, tmp_path):
    metrics = evaluated(trained, tmp_path, "reference=none", "evals.split=all")
    lines = [json.loads(line) for line in (tmp_path / "out" / "pairs.jsonl").read_text().splitlines()]
    assert len(lines) == metrics["pairs"] > 5
    right = [line["chosen_logp"] > line["rejected_logp"] for line in lines]
    assert metrics["accuracy"]["value"] == pytest.approx(np.mean(right))
    assert "chosen_reward" not in metrics and metrics["reference"] == "none"


@pytest.mark.parametrize("trainer", ["trainer=FSDPTrainer", "trainer=TensorParallelTrainer tp_size=2"])
def test_two_processes_find_the_same(trained, tmp_path, pools, trainer):
    alone = evaluated(trained, tmp_path)
    config = evaluated(trained, tmp_path, *trainer.split(), "world_size=2", "eval_batch_size=2", settings_only=True)
    (tmp_path / "out" / "metrics.json").unlink()
    pools(2).run(on_rank, config, str(tmp_path / "out"))
    together = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert together["margin"]["value"] == pytest.approx(alone["margin"]["value"], abs=1e-5)
    assert together["by_length"].keys() == alone["by_length"].keys()


def on_rank(world, config, out):
    return pair_evaluation.run(config, out, world)


# ---- Settings -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_brings_the_settings_of_its_run_and_the_command_goes_before_them(trained, tmp_path):
    folder, run_dir, _ = trained
    other = write_data(tmp_path / "other")
    config = evaluated(trained, tmp_path, f"datasets=[{other}]", "loss.beta=0.7", settings_only=True)
    assert config.datasets == (str(other),) and list(config.data.paths) == [str(other)]
    assert config.loss.options["beta"] == 0.7 and config.n_eval_examples is None
    assert config.max_length == settings_of(folder, "model=tiny", "loss=dpo").max_length
    policy = model_of(run_dir, config)
    assert policy.model.archive == run_dir
    reference = reference_of(config)
    assert reference is not None and reference.model.archive is None
    assert reference_of(replace(config, {"evals.reference": "none"})) is None
    hub = model_of("someone/model", config).model
    assert (hub.name_or_path, hub.archive, hub.random_config) == ("someone/model", None, None)


def test_the_reference_of_a_run_that_started_from_another_is_that_other(trained, tmp_path):
    folder, run_dir, _ = trained
    second = new_run_dir(folder)
    run_folder.make(
        settings_of(folder, "model=tiny", "loss=dpo", f"model.archive={run_dir}", f"local_run_dir={second}")
    )
    config = settings_of(folder, "model=tiny", "loss=dpo", f"evals.checkpoint={second}")
    reference = reference_of(config)
    assert reference is not None and reference.model.archive == run_dir


@pytest.mark.parametrize(
    "words, message",
    [
        (["lr=3"], "lr has no effect on an evaluation"),
        (["evals.split=half"], "allowed: test, train or all"),
        (["reference=./nothere"], "there is no such checkpoint"),
    ],
)
def test_what_cannot_be_asked_for(trained, tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        evaluated(trained, tmp_path, *words)


def test_data_without_a_held_out_pair_end_with_what_to_do(trained, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    with pytest.raises(ValueError, match="evals.split=all"):
        evaluated(trained, tmp_path, f"datasets=[{path}]")


def test_the_command(trained, tmp_path):
    import os
    import subprocess
    import sys

    from conftest import ROOT

    def run(*words):
        return subprocess.run(
            [sys.executable, str(ROOT / "evaluate.py"), *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ},
        )

    done = run(trained[1], f"local_run_dir={tmp_path}/out", "sample_during_eval=false")
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout and (tmp_path / "out" / "evaluation.html").exists()
    assert max(len(line) for line in done.stdout.splitlines() if "accuracy" in line) <= 80
    wrong = run(trained[1], "batch_size=3")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: batch_size has no effect")
    assert "RUN_FOLDER" in run("--help").stderr


def test_training_refuses_what_only_evaluate_reads(command):
    done = command("model=tiny", "evals.split=all")
    assert done.returncode == 2 and "evals.split is read by evaluate.py only" in done.stderr


def test_the_page_escapes_texts(tmp_path):
    pairs = pairs_of([-1.0, 1.0])
    text = {"prompt": "<script>alert(1)</script>", "chosen": "<b>a</b>", "rejected": "\u202eabc"}
    found = evaluation_page.Evaluated(
        {"policy": "<i>p</i>", "reference": "none"},
        {"policy": pairs},
        lambda number: text,
        [{"dataset": "d", "prompt": text["prompt"], "policy": "<script>"}],
    )
    shown: list[str] = []
    evaluation_page.write(found, str(tmp_path), shown.append)
    page = (tmp_path / "evaluation.html").read_text()
    assert "<script" not in page and "<b>a" not in page and "<i>p" not in page
    assert "Wrong pairs of which it is surest" in page


def test_recorded_settings_that_training_alone_reads_are_left_behind(trained):
    from conftest import compose_config

    composed = compose_config("model=tiny", f"evals.checkpoint={trained[1]}")
    merged = with_recorded(composed, trained[1], ["evals.checkpoint"])
    assert merged.lr == composed.lr and merged.loss.name == "dpo"
    assert merged.local_run_dir is None
