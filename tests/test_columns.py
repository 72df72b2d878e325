"""Columns and fields beside those of a format: read for what they mean, refused, or named in a notice."""

import csv
import json

import numpy as np
import pytest
from rows import A, H, chat, config, hh, only, read, write
from small_tokenizers import byte_level, load

from data.sources import open_source

PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "yes"}]
SFT = {"messages": chat("q", "yes")}


def kind_of(sft):
    return "responses" if sft else "pairs"


def notices_of(path, tmp_path, sft=False, **data):
    source = open_source(str(path), "train", config(tmp_path, **({"test_fraction": 0.0} | data)), kind_of(sft))
    list(source.groups())
    return source.notices


@pytest.mark.parametrize("file", ["d.jsonl", "d.csv", "d.parquet"])
@pytest.mark.parametrize(
    "row, prompt, rest",
    [
        (PAIR | {"system": "be kind"}, chat("q", system="be kind"), ["good", "bad"]),
        (PAIR | {"system": ""}, chat("q"), ["good", "bad"]),
        ({"prompt": "q", "completion": "yes", "system": "be kind"}, chat("q", system="be kind"), ["yes"]),
        (SFT | {"system": "be kind"}, chat("q", system="be kind"), ["yes"]),
        ({"messages": chat("q", "yes", system="be kind"), "system": "be kind"}, chat("q", system="be kind"), ["yes"]),
        ({"instruction": "add", "input": "1 2", "output": "3"}, chat("add\n1 2"), ["3"]),
        ({"instruction": "add", "input": "", "output": "3", "system": "s"}, chat("add", system="s"), ["3"]),
        ({"conversations": TURNS, "system": "be kind"}, chat("q", system="be kind"), ["yes"]),
        (
            {"system": "be kind", "question": "q", "chosen": "good", "rejected": "bad"},
            chat("q", system="be kind"),
            ["good", "bad"],
        ),
        (
            {
                "conversations": TURNS[:1],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            chat("q"),
            ["good", "bad"],
        ),
    ],
)
def test_system_input_and_the_layouts_of_alpaca_sharegpt_and_orca_are_read(tmp_path, file, row, prompt, rest):
    group = only(write(tmp_path / file, [row]), tmp_path, sft="chosen" not in row)
    assert (group.prompt, group.responses) == (prompt, rest)


def test_the_system_text_of_a_dialogue_in_hhs_layout_comes_first(tmp_path):
    row = hh(f"{H} q{A}", " good", " bad") | {"system": "be kind"}
    group = only(write(tmp_path / "d.jsonl", [row]), tmp_path)
    assert group.prompt == f"be kind{H} q{A}" and group.header == A
    assert only(write(tmp_path / "e.jsonl", [row | {"system": ""}]), tmp_path).prompt == f"{H} q{A}"


def test_an_instruction_under_another_name_keeps_its_input(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"instruction": "add", "input": "1 2", "output": "3"}])
    group = only(path, tmp_path, sft=True, columns={"prompt": "instruction", "completion": "output"})
    assert (group.prompt, group.sft_target) == ("add\n1 2", "3")


@pytest.mark.parametrize(
    "row, complaint",
    [
        (SFT | {"functions": [{"name": "search"}]}, "column functions is not supported: name it tools"),
        (SFT | {"images": ["a.png"]}, "column images is not supported: only text"),
        (SFT | {"reasoning_content": "hm"}, "column reasoning_content is not supported: give it as a field"),
        (SFT | {"weight": 0.5}, "loss=sft weighs all rows alike"),
        ({"messages": chat("q", "yes", system="a"), "system": "b"}, "other than the one in column system"),
        ({"messages": [chat("q")[0], chat("q", "yes")[1] | {"thinking": "hm"}]}, "has thinking"),
        ({"messages": [chat("q")[0], chat("q", "yes")[1] | {"weight": 0.3}]}, "weight must be 0 or 1"),
        ({"messages": [chat("q")[0], chat("q", "yes")[1] | {"function_call": {"name": "f"}}]}, "has function_call"),
        ({"instruction": "a", "output": "b", "history": [["x", "y"]]}, "history has turns"),
    ],
)
def test_what_cannot_be_read_is_refused_in_its_row(tmp_path, row, complaint):
    first = {key: value for key, value in row.items() if key in ("messages", "conversations", "prompt", "completion")}
    first |= {"instruction": "a", "output": "b"} if "instruction" in row else {}
    first |= {"messages": chat("q", "yes")} if "messages" in row else {}
    path = write(tmp_path / "d.jsonl", [first, row])
    with pytest.raises(ValueError, match=f"d.jsonl, line 2: .*{complaint}"):
        read(path, tmp_path, sft=True)


def test_what_says_nothing_is_not_refused(tmp_path):
    empty = {"tools": [], "images": None, "weight": 1, "label": "arithmetic", "system": None}
    message = chat("q", "yes")[1] | {"reasoning_content": None, "tool_calls": [], "weight": 1}
    path = write(tmp_path / "d.jsonl", [{"messages": [chat("q")[0], message]} | empty])
    assert only(path, tmp_path, sft=True).prompt == chat("q")


def test_a_last_message_of_weight_zero_is_left_out_and_counted(tmp_path):
    rows = [{"messages": [chat("q")[0], {"role": "assistant", "content": text, "weight": w}]} for text, w in ABC]
    groups, counts = read(write(tmp_path / "d.jsonl", rows), tmp_path, sft=True)
    assert groups[0].sft_targets == ["a", "c"] and counts["dropped_weight_zero"] == 1


ABC = (("a", 1), ("b", 0), ("c", 1))


@pytest.mark.parametrize("file", ["d.jsonl", "d.parquet"])
def test_columns_and_fields_left_unread_are_named(tmp_path, file):
    message = chat("q", "yes")[1] | {"name": "Ann"}
    path = write(tmp_path / file, [{"messages": [chat("q")[0], message], "score": 3.5, "source": "x"}])
    columns, fields = notices_of(path, tmp_path, sft=True)
    assert columns.endswith("columns that are not read: ['score', 'source']")
    assert fields.endswith("fields of messages that are not read: ['name']")
    assert not notices_of(write(tmp_path / "plain.jsonl", [PAIR]), tmp_path)


def test_a_label_that_is_not_read_is_named(tmp_path):
    path = write(tmp_path / "d.jsonl", [SFT | {"label": "arithmetic"}])
    assert notices_of(path, tmp_path, sft=True)[0].endswith("not read: ['label']")
    assert "not read: ['label']" in notices_of(write(tmp_path / "pairs.jsonl", [PAIR | {"label": 0}]), tmp_path)[0]


def test_a_column_that_begins_late_is_named(tmp_path):
    assert "not read: ['late']" in notices_of(write(tmp_path / "d.jsonl", [PAIR, PAIR | {"late": 1}]), tmp_path)[0]


def test_sft_learns_every_completion_of_a_prompt(tmp_path):
    rows = [{"prompt": "q", "completion": text} for text in ("a", "b", "a", "c")]
    assert only(write(tmp_path / "d.jsonl", rows), tmp_path, sft=True).sft_targets == ["a", "b", "c"]
    pairs = [PAIR, PAIR | {"chosen": "better"}]
    assert only(write(tmp_path / "p.jsonl", pairs), tmp_path, sft=True).sft_targets == ["good", "better"]
    data = load(tmp_path, rows, byte_level(), sft=True)
    assert data.n_groups == 1 and data.examples.tolist() == [[0, 0, -1], [0, 1, -1], [0, 2, -1]]
    assert len({data.response(0, number).tobytes() for number in range(3)}) == 3


def python_cells(path, rows):
    """A csv file as pandas or csv.DictWriter write columns of lists: with Python's repr."""
    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_conversation_in_a_csv_cell_is_read_however_it_was_written(tmp_path):
    row = {"chosen": chat("it's\n", "good"), "rejected": chat("it's\n", "bad")}
    group = only(python_cells(tmp_path / "d.csv", [row]), tmp_path)
    assert group.prompt == chat("it's\n") and group.responses == ["good", "bad"]
    row = {"prompt": "q", "completion": chat("q", "yes")[1:]}
    assert only(python_cells(tmp_path / "e.csv", [row]), tmp_path, sft=True).responses == ["yes"]
    row = {"prompt": "q", "completion": chat("q", "yes")[1]}
    assert only(python_cells(tmp_path / "f.csv", [row]), tmp_path, sft=True).responses == ["yes"]
    row = {"prompt": "q", "responses": ["a", "b"], "pairs": [(0, 1)], "sft_target": "a"}
    assert only(python_cells(tmp_path / "g.csv", [row]), tmp_path).pairs == [(0, 1)]


def test_a_conversation_in_a_cell_that_cannot_be_read_back_is_refused(tmp_path):
    # numpy arrays of messages, as pandas writes what it read from parquet: no commas between them
    cell = "[{'role': 'user', 'content': 'q'}\n {'role': 'assistant', 'content': 'yes'}]"
    path = python_cells(tmp_path / "d.csv", [{"prompt": "q", "completion": cell}])
    with pytest.raises(ValueError, match="line 3: a conversation written as text that is neither JSON nor Python"):
        read(path, tmp_path, sft=True)


@pytest.mark.parametrize("text", ["[1] is a list", '[{"a": 1}]', "{x}", "[{", "{'a': 1} is a dict", "[INST] hi"])
def test_brackets_are_text(tmp_path, text):
    path = write(tmp_path / "d.jsonl", [{"prompt": "q", "chosen": text, "rejected": "no"}])
    assert only(path, tmp_path).responses[0] == text


def test_unknown_columns_get_the_advice_that_fits_them(tmp_path):
    def complaint(row, sft=False):
        with pytest.raises(ValueError) as caught:
            read(write(tmp_path / "d.jsonl", [row]), tmp_path, sft=sft)
        return str(caught.value)

    assert "such as data.columns.completion=response" in complaint({"prompt": "q", "response": "a"}, sft=True)
    asked = complaint({"question": "q", "better": "a", "worse": "b"})
    assert "data.columns.prompt=question data.columns.chosen=better data.columns.rejected=worse" in asked
    assert "data.columns.prompt=question" in complaint({"question": "q", "chosen": "a", "rejected": "b"})
    assert "loss=sft only" in complaint({"conversations": TURNS})


def test_examples_of_several_completions_follow_the_groups(tmp_path):
    rows = [{"prompt": p, "completion": c} for p, c in (("p", "a"), ("q", "b"), ("p", "c"))]
    data = load(tmp_path, rows, byte_level(), sft=True)
    assert sorted(np.bincount(data.examples[:, 0]).tolist()) == [1, 2]


# ---- Turns and rows that are left out -------------------------------------------------------------------------------


def conversation(*turns):
    """Turns of user and assistant; a pair (text, weight) has a weight."""
    messages = []
    for number, turn in enumerate(turns):
        text, weight = turn if isinstance(turn, tuple) else (turn, None)
        message = {"role": "assistant" if number % 2 else "user", "content": text}
        messages.append(message if weight is None else message | {"weight": weight})
    return {"messages": messages}


def test_sft_on_all_turns_of_the_assistant(tmp_path):
    rows = [conversation("q1", "a1", "q2", ("a2", 0), "q3", "a3"), conversation("q4", "a4", "q5", ("a5", 0))]
    path = write(tmp_path / "d.jsonl", rows)
    groups, counts = read(path, tmp_path, sft=True, train_on="all")
    learnt = {(group.prompt[-1]["content"], len(group.prompt), group.sft_target) for group in groups}
    assert learnt == {("q1", 1, "a1"), ("q3", 5, "a3"), ("q4", 1, "a4")} and counts["groups"] == 3
    groups, counts = read(path, tmp_path, sft=True)
    assert [group.sft_target for group in groups] == ["a3"] and counts["dropped_weight_zero"] == 1


def test_rows_that_cannot_be_read_are_skipped_if_asked_for(tmp_path):
    good = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(4)]
    lines = [json.dumps(row) for row in good]
    lines[1:1] = ["{broken", json.dumps({"prompt": 3, "chosen": "a", "rejected": "b"}), "[1]"]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(["{not json", *lines]))
    with pytest.raises(ValueError, match=r"line 1: invalid JSON.*"):
        read(path, tmp_path)
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"line 2: invalid JSON.*data.on_bad_row=skip leaves such rows out"):
        read(path, tmp_path)
    groups, counts = read(path, tmp_path, on_bad_row="skip")
    assert [group.prompt for group in groups] == ["q0", "q1", "q2", "q3"] and counts["dropped_bad_row"] == 3
    (notice,) = notices_of(path, tmp_path, on_bad_row="skip")
    assert notice.startswith(f"data set {path}: 3 rows cannot be read and are left out; first: {path}, line 2: invalid")
    assert "line 3: prompt must be text" in notice and "line 4: expected a JSON object" in notice
    csv = tmp_path / "d.csv"
    csv.write_text("prompt,chosen,rejected,scores\nq,a,b,\n")
    assert len(read(csv, tmp_path, on_bad_row="skip")[0]) == 1
