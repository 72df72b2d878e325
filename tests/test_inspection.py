"""Looking at data before a run: the tokens shown are those that are trained, the figures are right, errors end it."""

import json

import pytest
from rows import A, H, hh, write
from runs import settings_of
from small_tokenizers import CHATML, END, byte_level

from data.shown_examples import first_examples
from data.tokenization import load_tokenized
from losses import find_loss
from report import inspection as shown
from training.inspection import inspect, show

TEXTS = ["yes", " no, never", " a good answer \U0001f98a", " 你好 and more of it " * 4]
KINDS = {"sft": "responses", "dpo": "pairs", "kto": "unpaired_mismatched", "bco": "unpaired", "plackett_luce": "group"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a chat tokenizer and a configuration, and no weights."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_level(template=CHATML)
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ).save_pretrained(folder)
    return folder


def conversations(n: int):
    return [
        {
            "prompt": [{"role": "user", "content": f"Question {number} {'again ' * (number % 5)}"}],
            "chosen": [{"role": "assistant", "content": TEXTS[number % 4] + str(number)}],
            "rejected": [{"role": "assistant", "content": TEXTS[(number + 1) % 4]}],
        }
        for number in range(n)
    ]


def config_of(tmp_path, model, rows, *overrides, test=None):
    write(tmp_path / "data" / "train.jsonl", rows)
    write(tmp_path / "data" / "test.jsonl", test or [rows[0] | {"prompt": "another prompt"}])
    return settings_of(tmp_path, f"model.name_or_path={model}", "model.random_config=null", "show=3", *overrides)


@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("truncation", ["keep_end", "keep_start"])
def test_the_tokens_shown_are_those_that_are_trained(tmp_path, model, loss, truncation):
    config = config_of(
        tmp_path, model, conversations(12), f"loss={loss}", "max_length=45", "max_prompt_length=30",
        f"data.truncation={truncation}",
    )  # fmt: skip
    kind = find_loss(loss, {}).inputs.kind
    assert kind == KINDS[loss]
    tokenizer = byte_level(template=CHATML)
    dataset = load_tokenized(config.datasets[0], "train", tokenizer, config, kind)
    found = first_examples(config.datasets[0], tokenizer, config, kind, 1000)
    assert len(found) == len(dataset.examples)
    cut = 0
    for example, (group, first, second) in zip(found, dataset.examples.tolist()):
        assert example.row == dataset.rows[group]
        numbers = [n for n in (first, second) if n >= 0] or list(range(dataset.n_group_responses(group)))
        texts = [dataset.prompt(group), *(dataset.response(group, n) for n in numbers)]
        for text, tokens in zip(example.texts, texts, strict=True):
            kept = [number for piece in text.pieces if piece.part != "cut" for number in piece.ids]
            assert kept == tokens.tolist()
            assert text.tokens == len(kept)
            assert sum(len(piece.ids) for piece in text.pieces if piece.part == "cut") == text.cut
            cut += text.cut
            part = "prompt" if text.label == "prompt" else "scored"
            assert {piece.part for piece in text.pieces} <= {part, "cut"}
    assert cut > 0


def test_pieces_make_up_the_text_and_know_control_tokens(tmp_path, model):
    config = config_of(tmp_path, model, conversations(4), "loss=dpo")
    found = first_examples(config.datasets[0], byte_level(template=CHATML), config, "pairs", 4)
    prompt, chosen, rejected = found[2].texts
    assert "".join(piece.text for piece in prompt.pieces) == (
        "<|im_start|>user\nQuestion 2 again again <|im_end|>\n<|im_start|>assistant\n"
    )
    assert "".join(piece.text for piece in chosen.pieces) == " a good answer \U0001f98a2" + END
    assert chosen.ended and chosen.label == "chosen"
    assert [piece.text for piece in chosen.pieces if piece.control] == [END]
    assert rejected.pieces[-1].control
    assert not any("\ufffd" in piece.text for text in found[3].texts for piece in text.pieces)


def test_a_text_that_spells_a_control_token_is_not_shown_as_one(tmp_path, model):
    rows = conversations(3)
    rows[0]["chosen"][0]["content"] = f"no end {END} here"
    config = config_of(tmp_path, model, rows, "loss=dpo")
    chosen = first_examples(config.datasets[0], byte_level(template=CHATML), config, "pairs", 1)[0].texts[1]
    assert [piece.control for piece in chosen.pieces].count(True) == 1
    assert chosen.pieces[-1].control


def test_figures(tmp_path, model):
    """Counted by hand: 4 pairs, one of them twice; of these 5 the chosen response is longer in 3 and as long in 1."""
    rows = [
        {"prompt": "a?", "chosen": "b" * 6, "rejected": "b"},
        {"prompt": "c?", "chosen": "b" * 5, "rejected": "bb"},
        {"prompt": "a?", "chosen": "b" * 6, "rejected": "b"},
        {"prompt": "d?", "chosen": "z", "rejected": "z" * 3},
        {"prompt": "e?", "chosen": "q", "rejected": "z"},
    ]
    config = config_of(tmp_path, model, rows, "loss=dpo", test=[rows[3], rows[4] | {"chosen": "y"}])
    found = inspect(config, 2)
    train = next(one for one in found.sets if one.split == "train")
    assert (train.examples, train.prompts, train.repeated, train.compared) == (5, 4, 1, 5)
    assert train.longer == pytest.approx(3.5 / 5)
    assert train.lengths["rejected"][0] == 2 and train.lengths["rejected"][-1] == 4  # with the end token
    assert found.overlap is not None
    assert (found.overlap.prompts, found.overlap.of_prompts) == (2, 2)
    assert (found.overlap.examples, found.overlap.of_examples) == (1, 2)
    assert found.overlap.first == [("data", 1)]
    assert found.failed
    texts = [problem.text for problem in found.problems]
    assert any("1 of 2 held-out examples are in the training data" in text for text in texts)
    assert not any("choosing" in text for text in texts)  # five pairs tell nothing
    assert any("1 of 5 examples equal an earlier one" in text for text in texts)


@pytest.mark.parametrize("chosen, rejected, which", [("bb", "b", "longer"), ("b", "bb", "shorter"), ("b", "c", "")])
def test_a_preference_for_length_is_noted(tmp_path, model, chosen, rejected, which):
    rows = [{"prompt": f"{number}?", "chosen": chosen, "rejected": rejected} for number in range(20)]
    texts = [problem.text for problem in inspect(config_of(tmp_path, model, rows, "loss=dpo"), 1).problems]
    found = [text for text in texts if "choosing the" in text]
    assert len(found) == bool(which)
    assert not which or f"the {which} response is right in 100.0% of 20 comparisons" in found[0]


def test_length_of_labelled_responses_is_compared_one_with_another(tmp_path, model):
    rows = [{"prompt": f"{n}?", "completion": "b" * size, "label": good} for n, (size, good) in enumerate(
        [(5, True), (3, True), (4, False), (1, False)]
    )]  # fmt: skip
    config = config_of(tmp_path, model, rows, "loss=bco")
    train = inspect(config, 1).sets[0]
    assert train.compared == 4
    assert train.longer == pytest.approx(3 / 4)  # 5>4, 5>1, 3>1


def test_a_row_that_cannot_be_read_is_an_error_beside_what_can_be(tmp_path, model, capsys):
    config = config_of(tmp_path, model, [*conversations(4), {"prompt": 3, "chosen": "a", "rejected": "b"}], "loss=dpo")
    assert not show(config)
    out = capsys.readouterr().out
    assert "error: " in out and "line 5" in out and "1 errors" in out
    assert "4 examples" in out


def test_data_that_are_right_pass_and_what_is_dropped_is_named(tmp_path, model, capsys):
    rows = [hh(f"{H} {n}?{A}", f" yes {n}", f" no {n}") for n in range(6)]
    rows[1] = hh(f"{H} one?{A}", " same", " same")
    config = config_of(
        tmp_path, model, rows, "loss=dpo", f"show_files=[{tmp_path}/a.json,{tmp_path}/a.html]", test=rows[:0]
    )
    assert show(config)
    out = capsys.readouterr().out
    assert "dropped identical: 1" in out
    assert "chat template is not applied" in out  # text prompts, and a tokenizer with a template
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["failed"] is False
    assert found["examples"][0]["texts"][0]["label"] == "prompt"
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


def test_a_page_escapes_texts(tmp_path, model):
    rows = conversations(4)
    rows[0]["chosen"][0]["content"] = "<script>alert(1)</script> \u202eabc"
    config = config_of(tmp_path, model, rows, "loss=dpo")
    page = shown.as_page(inspect(config, 4))
    assert "<script" not in page


@pytest.mark.parametrize("colours", [True, False])
def test_lines_are_as_wide_as_the_terminal(tmp_path, model, colours):
    rows = conversations(4)
    rows[0]["chosen"][0]["content"] = "many words " * 200 + "\x1b[31m"
    config = config_of(tmp_path, model, rows, "loss=dpo", "max_length=2000")
    text = first_examples(config.datasets[0], byte_level(template=CHATML), config, "pairs", 1)[0].texts[1]
    lines = list(shown.wrapped(text, 60, colours))
    assert any("[...]" in line for line in lines)
    if colours:
        assert all("\x1b[31m[" not in line for line in lines)  # the text's own escape is written out
    else:
        assert max(map(len, lines)) <= 60 + len("{cut: }")
        assert not any("\x1b" in line for line in lines)


def test_the_command_ends_with_1_where_something_is_wrong(tmp_path, model, command):
    write(tmp_path / "data" / "train.jsonl", [*conversations(4), {"prompt": 3, "chosen": "a", "rejected": "b"}])
    done = command(
        f"datasets=[{tmp_path}/data]",
        "model=blank_model",
        f"model.name_or_path={model}",
        "loss=dpo",
        "show=2",
        f"local_dirs=[{tmp_path}/runs]",
    )
    assert done.returncode == 1, done.stderr
    assert "Question 0" in done.stdout.replace("|", "") and "line 5" in done.stdout
    runs = tmp_path / "runs"
    assert not list(runs.rglob("config.yaml"))  # no run was started


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["show=2", "plan=true"], "give one of them"),
        (["show_files=[a.html]"], "give show=5"),
        (["show=2", "show_files=[a.txt]"], "end with .html or .json"),
        (["show=2", "show_files=[nowhere/a.html]"], "there is no folder nowhere"),
        (["show=0"], "whole number from 1"),
    ],
)
def test_what_cannot_be_asked_for(tmp_path, overrides, words):
    write(tmp_path / "data" / "train.jsonl", conversations(3))
    with pytest.raises(ValueError, match=words):
        settings_of(tmp_path, "model=tiny", *overrides)
