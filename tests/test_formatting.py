"""Numbers and texts for people."""

import math

import pytest

from report.formatting import console_line, duration, metric_dataset, printable, short


def test_console_lines():
    train = {"loss/train": 0.68, "rewards_train/accuracies": 0.55, "rewards_train/margins": 0.012, "grad_norm": 32.14}
    train |= {"learning_rate": 4.9e-7, "examples_per_second": 41.23, "tokens_per_second": 12345.6}
    assert console_line(train, 12800, 160000, "pairs") == (
        "train    12,800 (8%) | loss 0.6800  acc 0.5500  margin 0.0120  grad 32.1  lr 4.9e-07"
        " | 41.2 pairs/s  12.3k tok/s  59m 30s left"
    )
    evaluation = {"loss/eval": 0.6, "rewards_eval/accuracies": 0.7, "loss/eval/hh": 0.61, "loss/eval/shp": 0.59}
    assert (
        console_line(evaluation, 0, None)
        == "eval          0 | loss 0.6000  acc 0.7000 | hh: loss 0.6100 | shp: loss 0.5900"
    )
    assert console_line({"loss/eval": 0.6, "loss/eval/hh": 0.6}, 0, None).count("loss") == 1
    assert console_line({"something": 1.0}, 0, None) == ""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss/eval", ("loss/eval", "")),
        ("loss/eval/hh", ("loss/eval", "hh")),
        ("rewards_eval/accuracies", ("rewards_eval/accuracies", "")),
        ("rewards_eval/accuracies/my_data", ("rewards_eval/accuracies", "my_data")),
        ("lengths_eval/chosen/my/file.jsonl", ("lengths_eval/chosen", "my/file.jsonl")),
        ("logps_eval/chosen", ("logps_eval/chosen", "")),
        ("loss/eval/data/chosen", ("loss/eval", "data/chosen")),
        ("loss/train", None),
        ("grad_norm", None),
    ],
)
def test_metric_dataset(name, expected):
    assert metric_dataset(name, "eval") == expected


def test_numbers_for_people():
    numbers = [0, 0.693147, 41.23, 1234.5, 12345.6, 1.25e6, 7, math.nan]
    assert [short(x) for x in numbers] == ["0", "0.6931", "41.2", "1234", "12.3k", "1.25M", "7", "nan"]
    assert [duration(x) for x in (45, 750, 11100, 187200)] == ["45s", "12m 30s", "3h 5m", "2d 4h"]


def test_control_characters_are_written_out():
    assert printable("a\x1b[2Jb\n\u202ec") == "a\\x1b[2Jb\\n\\u202ec"
