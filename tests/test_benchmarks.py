"""What scripts/benchmark compares must be the same computation, or its ratios mean nothing."""

import json
import math

import pytest
import runs

from benchmarks import compare, measure
from modeling import loading

PAIRS = [
    {
        "prompt": f"Of {word}, {number}:",
        "chosen": f" {word} is {'very ' * (number % 3)}good.",
        "rejected": f" no {number}",
    }
    for number, word in enumerate(("rain", "bread", "chess", "salt", "glass", "ink") * 4)
]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    runs.save_model(folder / "model", "llama")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return {
        "model": str(folder / "model"),
        "data": str(folder / "pairs.jsonl"),
        "max_length": 128,
        "batch_size": 4,
        "examples": 12,
        "loss": "dpo",
        "overrides": ["device=cpu", "data.num_workers=1"],
    }


@pytest.mark.parametrize("loss", ["dpo", "sft"])
def test_every_method_computes_the_same_losses(job, loss):
    job = job | {"loss": loss}
    ours = measure.ours(job)
    assert len(ours["losses"]) == 3 and ours["seconds"] > ours["reference_seconds"] >= 0
    if loss == "dpo":
        assert ours["losses"][0] == pytest.approx(math.log(2), abs=1e-6)
    others = [
        measure.textbook(job),
        measure.ours(job | {"overrides": [*job["overrides"], "prefix_sharing=false"]}),
        measure.ours(job | {"pairwise": True}),
    ]
    for other in others:
        assert other["losses"] == pytest.approx(ours["losses"], rel=1e-4)
        assert (other["tokens"], other["useful_flops"]) == (ours["tokens"], ours["useful_flops"])


def test_steps_that_warm_up_are_not_timed(job, monkeypatch):
    every = measure.ours(job)
    seconds = iter(range(100))
    monkeypatch.setattr(measure, "clock", lambda: float(next(seconds)))
    later = measure.ours(job | {"warm_steps": 1})
    # The reference's pass, of which two thirds count, took a second; so did the steps from the second on.
    assert later["seconds"] == pytest.approx(1 + 2 / 3) and later["examples"] == 8
    assert later["losses"] == every["losses"] and 0 < later["useful_flops"] < every["useful_flops"]


def test_the_precision_of_a_job_reaches_the_run(job):
    exact, rounded = (measure.ours(job | {"precision": name}) for name in ("float32", "bfloat16"))
    assert rounded["losses"] != exact["losses"] and rounded["losses"] == pytest.approx(exact["losses"], abs=2e-2)
    assert rounded["margins"][0] == exact["margins"][0] == 0.0


def test_the_order_handed_to_a_peer_is_the_order_trained_on(job):
    rows = measure.order(job)["rows"]
    assert len(rows) == 12 and all(row in PAIRS for row in rows) and rows != PAIRS[:12]
    letters = sum(len(row["prompt"] + row["chosen"] + row["rejected"]) for row in rows)
    starts = int(loading.byte_tokenizer().bos_token_id is not None)
    assert measure.ours(job)["tokens"] == letters + 12 * (2 + starts), "a byte a token, and two ends a pair"


def test_a_method_with_another_loss_is_reported(capsys):
    table = compare.Table("t", 8, {"tokens": 1, "useful_flops": 1e9})
    for name, losses in (("ours", [0.6931, 0.69]), ("same", [0.6932, 0.69]), ("other", [0.6931, 0.75])):
        table.add(name, {"seconds": 2.0, "peak_bytes": 3e9, "gemm": 1e9, "losses": losses})
    table.add("broken", {"failed": "no such thing"})
    table.check_losses(2e-3)
    printed = capsys.readouterr().out
    assert "! other: the loss of step 1 is 0.750000, not 0.690000" in printed and "! same" not in printed
    page = table.markdown()
    assert "| ours | 4.000 | 1.00 | 0 | 3.00 | 1 | 50% | 0.6931, 0.6900 |" in page and "failed: no such thing" in page
    result = {"seconds": 2.0, "peak_bytes": 3e9, "peak_device_bytes": 7e9, "gemm": 1e9, "card_peak": 2e9}
    table.add("on a GPU", result | {"losses": [0.6931]})
    assert "| on a GPU | 4.000 | 1.00 | 0 | 7.00 | 1 | 50%, 25% of the card's peak | 0.6931 |" in table.markdown()
