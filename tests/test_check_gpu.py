"""scripts/check_gpu: it runs, finds what is wrong, and says so."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from benchmarks import check_gpu, kernel_checks, measure, rates, speed_checks, training_checks
from benchmarks.pages import Report
from modeling import attention_kernels


def test_all_of_it_runs_on_a_cpu(tmp_path):
    done = subprocess.run(
        [ROOT / "scripts" / "check_gpu", "--cpu", "--out", str(tmp_path)],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=300,
        env={**os.environ, "NO_VENV": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (page,), (numbers,) = tmp_path.glob("*-check-cpu.md"), tmp_path.glob("*-check-cpu.json")
    sections = json.loads(numbers.read_text())["sections"]
    assert list(sections) == list(check_gpu.SECTIONS)
    for section in check_gpu.SECTIONS[1:]:
        assert any(row["ok"] for row in sections[section]), section
        assert f"## {section}" in page.read_text()
    assert "checks hold" in done.stdout.splitlines()[-1]


@pytest.fixture
def on_cpu(monkeypatch):
    """Puts back what the check sets in the environment."""
    for name in ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def test_a_wrong_kernel_is_found(monkeypatch, capsys, on_cpu, tmp_path):
    right = next(k for k in attention_kernels.KERNELS if k.name == "packed_sdpa")

    def looks_too_far(query, key, value, layout, scale, window):
        return right.function(query, key, value, layout, scale, None if window is None else window + 1)

    wrong = dataclasses.replace(right, function=looks_too_far)
    padded = [k for k in attention_kernels.KERNELS if k.layout == "padded"]
    monkeypatch.setattr(attention_kernels, "KERNELS", [wrong, *padded])
    assert check_gpu.main(["--cpu", "--only", "kernels", "--out", str(tmp_path)]) == 1
    listed = capsys.readouterr().out.split("checks do not hold:")[1]
    assert "kernel: looks_too_far" in listed and "in a model" in listed and "kernel: plain" not in listed
    assert "any packed kernel" in listed  # none is left that is right
    (page,) = tmp_path.glob("*.md")
    assert "checks do not hold" in page.read_text() and "| NO |" in page.read_text()


def test_a_kernel_that_does_not_run_here_is_no_failure_but_one_must(monkeypatch):
    def no_such_card(*_):
        raise RuntimeError("not compiled for this card\nmore of it")

    right = next(k for k in attention_kernels.KERNELS if k.name == "packed_sdpa")
    absent = dataclasses.replace(right, function=no_such_card)
    for kernels, ok in (([absent, right], True), ([absent], False)):
        monkeypatch.setattr(attention_kernels, "KERNELS", kernels)
        first, *others = kernel_checks.kernels(small=True)
        assert first["ok"] is None and "RuntimeError: not compiled for this card" in first["note"]
        assert [row["ok"] for row in others if row["kernel"] == "any packed kernel"] == [ok, ok]


def test_not_a_number_is_not_within_a_tolerance(monkeypatch):
    right = next(k for k in attention_kernels.KERNELS if k.name == "packed_sdpa")
    calls = []

    def sometimes(*arguments):
        calls.append(1)
        output = right.function(*arguments)
        return output * math.nan if len(calls) == 3 else output

    monkeypatch.setattr(attention_kernels, "KERNELS", [dataclasses.replace(right, function=sometimes)])
    assert next(kernel_checks.kernels(small=True))["ok"] is False
    calls.clear()  # the first model is scored right, the second is not
    assert kernel_checks.in_a_model("packed_sdpa", "float32", torch.device("cpu"), True)["ok"] is False
    for forward, backward in ((math.nan, 0.0), (0.0, math.nan)):
        assert kernel_checks.verdict({}, forward, backward, (1.0, 1.0))["ok"] is False


def test_more_memory_than_planned_is_found(monkeypatch):
    monkeypatch.setattr(measure, "plan", lambda job: {"total": 2e9, "assumed": 0, "fits": True})
    for peak, ok in ((2.1e9, True), (2.3e9, False)):
        monkeypatch.setattr(measure, "measure", lambda job, peak=peak: {"peak_bytes": peak})
        (row,) = training_checks.memory(small=True)
        assert row["ok"] is ok and row["measured GB"] == pytest.approx(peak / 1e9)
    monkeypatch.setattr(measure, "measure", lambda job: {"failed": "killed"})
    assert [(row["ok"], row["note"]) for row in training_checks.memory(small=True)] == [(False, "killed")]


def test_training_that_differs_is_found(monkeypatch):
    """A first margin that is not 0, losses of another precision too far off, and a second run with other bits."""
    results = []
    monkeypatch.setattr(measure, "ours", lambda job: {"kernel": "k", **results.pop(0)})
    for margin, loss, ok in ((0.0, 0.701, True), (1e-6, 0.7, False), (0.0, 0.73, False), (0.0, math.nan, False)):
        results += [{"losses": [0.69, 0.7], "margins": [0.0]}, {"losses": [0.69, loss], "margins": [margin]}]
        assert [row["ok"] for row in training_checks.precision(small=True)] == [True, ok]
    results += [{"losses": [0.7], "digest": "a"}, {"losses": [0.7], "digest": "b"}] * 2
    first = next(training_checks.determinism(small=True))
    assert first["same bits"] is False and first["ok"] is False
    results[:] = [{"losses": 50 * [0.7], "graphs": 40}]
    assert [row["ok"] for row in training_checks.recompiles(small=True)] == [False]


def test_speeds_of_another_computation_are_found(monkeypatch):
    rows = speed_checks.Rows("tiny", small=False)
    result = {"kernel": "k", "seconds": 2.0, "examples": 8, "tokens": 80, "useful_flops": 1e9, "gemm": 1e9}
    result["peak_bytes"] = 1e9
    results = [result | {"losses": losses} for losses in ([0.6931, 0.69], [0.6932, 0.7], [0.75, 0.69])]
    results += [{"failed": "CUDA out of memory"}, {"failed": "ValueError: no"}]
    monkeypatch.setattr(measure, "measure", lambda job: results.pop(0))
    made = [rows.ours("ours", {}) for _ in range(5)]
    assert [row["ok"] for row in made] == [True, True, False, None, False]
    assert made[0]["pairs/s"] == 4.0 and made[0]["MFU of measured"] == "50.0%"


def test_what_a_section_raises_is_a_failed_row(monkeypatch, capsys):
    def interrupted(small):
        yield {"a": 1, "ok": True}
        print("what a trainer reports")
        raise ValueError("first line\nsecond")

    def lacking(small):
        raise ModuleNotFoundError("No module named 'hydra'", name="hydra")
        yield

    monkeypatch.setattr(training_checks, "precision", interrupted)
    monkeypatch.setattr(training_checks, "memory", lacking)
    first, second = check_gpu.rows_here("precision", True)
    assert first["a"] == 1 and second == {"note": "ValueError: first line", "ok": False}
    (row,) = check_gpu.rows_here("memory", True)
    assert row["ok"] is False and "hydra is not installed" in row["note"]
    assert "what a trainer reports" not in capsys.readouterr().out


def test_a_section_that_crashes_or_is_cut_keeps_its_rows(monkeypatch, tmp_path):
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    for ending, note in (("echo 'illegal access' >&2; exit 3", "exit code 3: illegal access"), ("sleep 60", "cut")):
        program.write_text(f'#!/bin/sh\necho noise\necho \'ROW {{"a": 1, "ok": true}}\'\n{ending}\n')
        program.chmod(0o755)
        report = Report("here", str(tmp_path / "page"), {})
        for row in check_gpu.rows_apart("speed", 1.0):
            report.add("speed", row)
        first, second = report.sections["speed"]
        assert first == {"a": 1, "ok": True} and note in second["note"]
        assert bool(report.failed) is (note != "cut")


def test_a_machine_without_a_gpu_is_refused(monkeypatch, capsys, on_cpu):
    monkeypatch.setattr(rates, "gpu", lambda: False)
    assert check_gpu.main([]) == 2 and "--cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_the_names_of_devices(name, peak):
    assert rates.peak_of(name) == peak
