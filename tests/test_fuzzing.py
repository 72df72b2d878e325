"""Hostile rows, command lines, folders and chat templates end well or with a message; and the fuzzer can fail."""

import json

import fuzzing
import pytest

COUNTS = {"rows": 150, "commands": 25, "folders": 45, "templates": 80}


def test_hostile_input_ends_well_or_with_a_message():
    failures = []

    def seen(outcome):
        if outcome.end == "failed":
            failures.append(f"{outcome.case.command()}\n{outcome.about}\n{outcome.text[-1500:]}")

    work = [case for kind, count in COUNTS.items() for case in fuzzing.cases(kind, count, seed=1)]
    summary = fuzzing.run_all(work, jobs=1, seen=seen)
    assert not failures, "\n\n".join(failures)
    for kind, count in COUNTS.items():
        ends = {end: summary.ends[kind, end] for end in ("well", "refused")}
        assert sum(ends.values()) == count and all(ends.values()), (kind, ends)


def test_a_case_is_the_same_each_time(tmp_path):
    for kind in ("rows", "commands", "templates"):
        first, again = (fuzzing.carry_out(fuzzing.Case(kind, 3, 8)) for _ in range(2))
        assert first.about == again.about and first.about and first.end == again.end


@pytest.mark.parametrize(
    "run, wrong",
    [
        (lambda: {}["x"], "KeyError"),
        (lambda: json.loads("x"), "JSONDecodeError"),  # a ValueError that our own code did not raise
        (lambda: "Traceback (most recent call last): ...", "no message"),
        (lambda: "a" * 5000, "a message of 5000 characters"),
        (lambda: "\ud800", "cannot be printed"),
        (lambda: [0] * 400_000_000 and None, "memory grew"),
    ],
)
def test_what_counts_as_a_failure(monkeypatch, run, wrong):
    import hostile_rows

    monkeypatch.setattr(hostile_rows, "make", lambda chance, folder: ("a case", run))
    outcome = fuzzing.carry_out(fuzzing.Case("rows", 0, 0))
    assert outcome.end == "failed" and wrong in outcome.text


def test_a_case_that_is_too_slow_is_a_failure(monkeypatch):
    import hostile_rows

    monkeypatch.setattr(fuzzing, "LIMIT_SECONDS", -1.0)
    monkeypatch.setattr(hostile_rows, "make", lambda chance, folder: ("a case", lambda: None))
    assert "it took" in fuzzing.carry_out(fuzzing.Case("rows", 0, 0)).text


@pytest.mark.parametrize("end", ["its process died", "it hangs"])
def test_a_process_that_dies_or_hangs_is_ended_and_named(tmp_path, end):
    worker = fuzzing.Worker(tmp_path)
    try:
        worker.give(fuzzing.Case("rows", 0, 1))
        worker.proven = True
        if end == "it hangs":
            worker.deadline = 0.0
        else:
            worker.process.kill()
            worker.process.join()
        while (outcome := worker.outcome()) is None:
            pass
        assert outcome.end == "failed" and end in outcome.text and worker.process is None
    finally:
        worker.stop()


def test_a_process_that_cannot_start_ends_the_fuzzing(tmp_path):
    worker = fuzzing.Worker(tmp_path)
    worker.give(fuzzing.Case("rows", 0, 1))
    worker.process.kill()
    worker.process.join()
    with pytest.raises(RuntimeError, match="died before its first case ended"):
        worker.outcome()
