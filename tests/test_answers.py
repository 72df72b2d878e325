"""Tools, tool calls, reasoning, answers that go on with a beginning, and answers of several turns: what is read,
rendered, scored and refused."""

import json
import math

import numpy as np
import pytest
import torch
from architectures import make
from rows import chat, only, read, write
from runs import LLAMA, new_run_dir, placement, train, train_together
from small_tokenizers import CHATML, END, byte_level, config, dump, load, metaspace

from data.batching import pack, pad
from data.sampler import DatasetMixture
from data.shown_examples import first_examples
from data.tokenization import load_tokenized
from modeling.attention import use_attention
from modeling.scoring import token_logps

# A layout of tools, calls and reasoning like that of Qwen's templates.
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m['role'] == 'tool' else m['role'] }}\n"
    "{% if m['role'] == 'tool' %}<tool_response>{{ m['content'] }}</tool_response>"
    "{% else %}"
    "{% if m['reasoning_content'] and loop.last %}<think>{{ m['reasoning_content'] }}</think>\n\n{% endif %}"
    "{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": 'Köln "am Rhein"', "days": 2}}}


def asks(text="q"):
    return {"role": "user", "content": text}


def says(text="", **more):
    return {"role": "assistant", "content": text, **more}


def texts_of(dataset, tokenizer, group=0):
    """The prompt, and each response with what is not scored in brackets."""
    shown = [tokenizer.decode(dataset.prompt(group))]
    for index in range(dataset.n_group_responses(group)):
        ids, scored, text = dataset.response(group, index), dataset.scored(group, index), ""
        for start in range(len(ids)):
            if start == 0 or scored[start] != scored[start - 1]:
                stop = next((n for n in range(start, len(ids)) if scored[n] != scored[start]), len(ids))
                part = tokenizer.decode(ids[start:stop])
                text += part if scored[start] else f"[{part}]"
        shown.append(text)
    return shown


def loaded(tmp_path, rows, template=TOOLS_TEMPLATE, **options):
    tokenizer = byte_level(template=template)
    dataset = load(tmp_path, rows, tokenizer, **options)
    return texts_of(dataset, tokenizer)


# ---- Tools and calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [[WEATHER], json.dumps([WEATHER]), [json.dumps(WEATHER)]])
def test_tools_and_calls_are_written_by_the_template(tmp_path, written):
    row = {
        "prompt": [asks()],
        "tools": written,
        "chosen": [says(tool_calls=[CALL])],
        "rejected": [says("I don't know")],
    }
    prompt, chosen, rejected = loaded(tmp_path, [row])
    assert prompt == f"<|im_start|>system\nTools: {json.dumps(WEATHER)}\n{END}\n<|im_start|>user\nq{END}\n" + (
        "<|im_start|>assistant\n"
    )
    call = json.dumps(CALL["function"], ensure_ascii=False)
    assert chosen == f"<tool_call>{call}</tool_call>{END}" and rejected == f"I don't know{END}"


def test_calls_in_the_ways_that_files_have_them(tmp_path):
    flat = {"name": "get_weather", "arguments": json.dumps(CALL["function"]["arguments"])}
    prompts = [
        [asks(), says(tool_calls=[CALL]), {"role": "tool", "name": "get_weather", "content": "rain"}],
        [asks(), says(None, tool_calls=json.dumps([flat])), {"role": "tool", "content": "rain"}],
        [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": "rain"},
        ],
    ]
    rows = [{"prompt": prompt, "chosen": "wet", "rejected": "dry"} for prompt in prompts]
    groups, _ = read(write(tmp_path / "d.jsonl", rows), tmp_path)
    calls = [group.prompt[1] for group in groups]
    assert all(call["tool_calls"] == [CALL] and call["content"] == "" for call in calls)
    assert [group.prompt[2]["role"] for group in groups] == ["tool"] * len(groups)
    for row in rows:
        assert "<tool_response>rain</tool_response>" in loaded(tmp_path, [row])[0]


def test_prompts_with_other_tools_are_other_prompts(tmp_path):
    other = {"type": "function", "function": {"name": "get_time"}}
    every = ([WEATHER], [other], None)
    rows = [{"prompt": [asks()], "tools": tools, "chosen": "a", "rejected": "b"} for tools in every]
    groups, counts = read(write(tmp_path / "d.jsonl", rows), tmp_path)
    assert [group.tools for group in groups] == [[WEATHER], [other], []]


def test_a_column_of_structs_gives_tools_without_its_nulls(tmp_path):
    tools = [{"name": "a", "parameters": {"x": {"type": "int"}}}, {"name": "b", "parameters": {"y": {"type": "str"}}}]
    row = {"prompt": [asks()], "tools": tools, "chosen": "a", "rejected": "b"}
    assert only(write(tmp_path / "d.parquet", [row]), tmp_path).tools == tools


def test_control_tokens_in_calls_and_tools_stay_text(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": END, "role": END}}}
    tool = {"type": "function", "function": {"name": "f", "description": END}}
    row = {"prompt": [asks()], "tools": [tool], "chosen": [says(tool_calls=[call])], "rejected": "no"}
    tokenizer = byte_level(template=TOOLS_TEMPLATE)
    dataset = load(tmp_path, [row | {"rejected": [says("no")]}], tokenizer)
    end = tokenizer.convert_tokens_to_ids(END)
    assert dataset.prompt(0).tolist().count(end) == 2  # of the system's and the user's turn
    assert dataset.response(0, 0).tolist().count(end) == 1 and dataset.response(0, 0)[-1] == end
    assert texts_of(dataset, tokenizer)[1].count(END) == 3


@pytest.mark.parametrize(
    "row, message",
    [
        ({"tools": 3}, "tools must be a list of functions, not a number"),
        ({"tools": "[not json"}, "tools is text that is no JSON"),
        ({"tools": [{"x": 1}]}, r"tools\[0\] must be an object with the name of a function"),
        ({"prompt": "text", "tools": [WEATHER]}, "is written by a chat template, and this prompt is text"),
        ({"prompt": [says("a")]}, "is the assistant's message alone"),
        ({"prompt": [asks(), says(tool_calls=[CALL])]}, "ends with an assistant message that is no text"),
        ({"prompt": [asks(), says("  ")]}, "ends with an assistant message that is no text"),
        ({"prompt": [asks() | {"tool_calls": [CALL]}]}, "has tool_calls, which only the assistant makes"),
        ({"chosen": [says(tool_calls=[{"id": 1}])]}, r"tool_calls\[0\] must be an object with the name of a function"),
        ({"chosen": [says(tool_calls=[{"name": "f", "arguments": "x"}])]}, "arguments is text that is no JSON"),
        ({"chosen": [says(tool_calls=[{"name": "f", "arguments": [1]}])]}, "arguments must be an object"),
        ({"chosen": [asks("a"), says("b")]}, "chosen must begin with an assistant message"),
        ({"chosen": [says("a"), asks("b")]}, "chosen must end with an assistant message"),
        ({"chosen": [says("a", weight=0), asks("b"), says("c")]}, r"chosen\[0\] has weight 0"),
        ({"rejected": [asks(), says("a"), asks("b"), says("c", weight=0)]}, r"rejected\[3\] has weight 0"),
    ],
)
def test_what_cannot_be_is_refused_in_its_row(tmp_path, row, message):
    base = {"prompt": [asks()], "chosen": [says("a")], "rejected": [says("b")]}
    with pytest.raises(ValueError, match=f"line 1: .*{message}"):
        if isinstance(row.get("prompt"), str):
            base |= {"chosen": "a", "rejected": "b"}
        read(write(tmp_path / "d.jsonl", [base | row]), tmp_path)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"tools": [WEATHER]}, "does not write the function get_weather of column tools"),
        ({"chosen": [says(tool_calls=[CALL])]}, "does not write the call of get_weather"),
        ({"chosen": [says("a", reasoning_content="because")]}, "does not write the reasoning 'because' of the answer"),
        ({"prompt": [asks(), says(tool_calls=[CALL]), {"role": "tool", "content": "x"}]}, "does not write the call"),
    ],
)
def test_a_template_that_leaves_out_a_part_is_named(tmp_path, row, message):
    base = {"prompt": [asks()], "chosen": [says("a")], "rejected": [says("b")]}
    with pytest.raises(ValueError, match=f"row 1: .*{message}.*data.chat_template"):
        loaded(tmp_path, [base | row], CHATML)
    with pytest.raises(ValueError, match="written by a chat template, and the tokenizer has none"):
        loaded(tmp_path, [base | row], None)


# ---- Reasoning ------------------------------------------------------------------------------------------------------


def test_reasoning_of_an_answer_is_learnt_and_that_of_earlier_turns_goes_as_the_template_has_it(tmp_path):
    prompt = [asks("a"), says("b", reasoning_content="first"), asks("c")]
    row = {"prompt": prompt, "chosen": [says("d", reasoning_content="so")], "rejected": [says("e")]}
    tokenizer = byte_level(template=TOOLS_TEMPLATE)
    dataset = load(tmp_path, [row], tokenizer)
    prompt, chosen, rejected = texts_of(dataset, tokenizer)
    assert "first" not in prompt and dataset.counts["earlier_reasoning_left_out"] == 1
    assert chosen == f"<think>so</think>\n\nd{END}" and rejected == f"e{END}"
    rows = [{"messages": [asks(), says("d", reasoning_content="so")]}]
    assert loaded(tmp_path, rows, sft=True)[1] == f"<think>so</think>\n\nd{END}"


# ---- A beginning that the response goes on with ---------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, TOOLS_TEMPLATE])
@pytest.mark.parametrize("begun", ["Sure, here", "Sure, <|im_end|> here"])
def test_a_response_goes_on_with_the_assistants_message(tmp_path, template, begun):
    row = {"prompt": [asks(), says(begun)], "chosen": " it is", "rejected": " no"}
    prompt, chosen, rejected = loaded(tmp_path, [row], template)
    assert prompt == f"<|im_start|>user\nq{END}\n<|im_start|>assistant\n{begun}"
    assert (chosen, rejected) == (f" it is{END}", f" no{END}")


def test_a_beginning_without_a_template_and_one_that_a_template_trims(tmp_path):
    row = {"prompt": [asks(), says("Sure,")], "chosen": " yes", "rejected": " no"}
    prompt, chosen, _ = loaded(tmp_path, [row], None)
    assert prompt == "\n\nHuman: q\n\nAssistant: Sure," and chosen == " yes<|endoftext|>"
    trims = CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
    with pytest.raises(ValueError, match="does not write the beginning of the answer '  Sure'"):
        loaded(tmp_path, [row | {"prompt": [asks(), says("  Sure")]}], trims)


def test_a_prompt_that_is_cut_keeps_the_beginning_of_the_answer(tmp_path):
    row = {"prompt": [asks("word " * 60), says("Sure, here")], "chosen": " it is", "rejected": " no"}
    for truncation in ("keep_end", "keep_start"):
        more = dict(max_length=40, max_prompt_length=30, truncation=truncation)
        assert loaded(tmp_path, [row], CHATML, **more)[0].endswith("<|im_start|>assistant\nSure, here")


# ---- Several turns --------------------------------------------------------------------------------------------------

TURNS = [says("one"), asks("more?"), says("two")]


def test_of_several_turns_only_the_assistants_are_scored(tmp_path):
    row = {"prompt": [asks()], "chosen": TURNS, "rejected": [says("bad")]}
    _, chosen, rejected = loaded(tmp_path, [row], CHATML)
    assert chosen == f"one{END}[\n<|im_start|>user\nmore?{END}\n<|im_start|>assistant\n]two{END}"
    assert rejected == f"bad{END}"
    call = [says(tool_calls=[CALL]), {"role": "tool", "content": "rain"}, says("It rains.")]
    (_, text, _) = loaded(tmp_path, [row | {"chosen": call, "tools": [WEATHER]}])
    middle = f"[\n<|im_start|>user\n<tool_response>rain</tool_response>{END}\n<|im_start|>assistant\n]"
    assert text.startswith("<tool_call>") and f"{END}{middle}It rains.{END}" in text
    sft = [{"prompt": [asks()], "completion": TURNS}]
    assert loaded(tmp_path, sft, CHATML, sft=True)[1] == chosen


def test_several_turns_that_are_cut(tmp_path):
    row = {"prompt": [asks()], "chosen": [says("one"), asks("more? " * 9), says("two")], "rejected": [says("bad")]}
    for length in range(30, 60):
        tokenizer = byte_level(template=CHATML)
        dataset = load(tmp_path, [row], tokenizer, max_length=length, max_prompt_length=25)
        scored = dataset.scored(0, 0)
        assert scored[0] and len(scored) == len(dataset.response(0, 0))
        assert tokenizer.decode(dataset.response(0, 0)[scored]).startswith("one")


def test_a_template_that_changes_earlier_turns_is_refused(tmp_path):
    changing = CHATML.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'][:2] }}")
    row = {"prompt": [asks("a")], "chosen": TURNS, "rejected": [says("bad")]}
    with pytest.raises(ValueError, match="lays turns out otherwise when others follow"):
        loaded(tmp_path, [row], changing)


def pair_units(tmp_path, kind="pairs"):
    rows = [
        {"prompt": [asks(f"q{n}")], "chosen": [says(f"one {n}"), asks("more?"), says("two")], "rejected": [says("bad")]}
        for n in range(3)
    ]
    tokenizer = byte_level(template=CHATML)
    dataset = load_tokenized(dump(tmp_path, rows), "train", tokenizer, config(tmp_path), kind)
    return DatasetMixture([dataset]).units(np.arange(len(dataset.examples))), dataset


@pytest.mark.parametrize("kind", ["pairs", "unpaired_mismatched"])
def test_what_is_not_scored_gives_no_log_prob_and_no_gradient_in_any_layout(tmp_path, kind):
    """Against the log-probs of every token of a plain pass, of which only the assistant's count, and their gradient."""

    def gradient(sums):
        model.zero_grad()
        (sums * torch.arange(1.0, 1 + len(sums))).sum().backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    units, _ = pair_units(tmp_path, kind)
    assert any(not unit.scored_of(n).all() for unit in units for n in range(len(unit.responses)))
    model = make("llama", vocab_size=512)
    batches = {"packed_sdpa": [pack(units), pack(units, share_prefix=False)], "plain": [pad(units, 0)]}
    truth = []
    for unit in units:
        for number, response in enumerate(unit.responses):
            ids = torch.tensor(np.concatenate([unit.prompt, response]), dtype=torch.int64)[None]
            logps = model(input_ids=ids).logits.log_softmax(-1)[0, len(unit.prompt) - 1 : -1]
            own = logps.gather(-1, ids[0, len(unit.prompt) :, None])[:, 0]
            truth.append(own[torch.tensor(unit.scored_of(number))].sum())
    expected = gradient(torch.stack(truth))
    for kernel, of in batches.items():
        use_attention(model, kernel, False)
        for batch in of:
            tokens = token_logps(model, batch)
            sums = torch.zeros(len(truth)).index_add(0, batch.response_of, tokens)
            torch.testing.assert_close(sums, torch.stack(truth), atol=2e-4, rtol=1e-5)
            torch.testing.assert_close(gradient(sums), expected, atol=2e-3, rtol=1e-4)
            assert batch.lengths.tolist() == batch.lengths_list


def several_turns(folder):
    rows = [
        {
            "prompt": [asks(f"Tell me of {n}")],
            "chosen": [says(f"One {n}"), asks("and then? " * (n % 3 + 1)), says("Two")],
            "rejected": [says("Bad"), asks("why?"), says(f"No {n}")],
        }
        for n in range(9)
    ]
    for name, part in (("train", rows[:7]), ("test", rows[7:])):
        write(folder / "turns" / f"{name}.jsonl", part)
    template = CHATML.replace("<|im_start|>", "[start]").replace("<|im_end|>", "[end]")
    return [f"datasets=[{folder}/turns]", f"data.chat_template={write_text(folder / 'turns.jinja', template)}"]


def write_text(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize("size, name", [(2, "FULL_SHARD"), (2, "TP")])
def test_several_turns_train_alike_on_one_process_and_on_two(folder, pools, size, name):
    options = (*LLAMA, "loss=dpo", *several_turns(folder), "batch_size=3", "optimizer=SGD", "lr=1e-2")
    alone = train(folder, *options)
    assert alone.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    more = (*options, f"reference.cache_dir={new_run_dir(folder)}", *placement(name, size))
    for run in train_together(pools(size), folder, *more):
        assert run.losses == pytest.approx(alone.losses, abs=1e-5)


def test_rows_without_any_of_it_are_the_same_tokens_as_before(tmp_path):
    rows = [{"prompt": chat("q"), "chosen": "a", "rejected": "b"}]
    dataset = load(tmp_path, rows, metaspace(template=CHATML))
    assert not dataset.partly_scored and len(dataset.unscored) == 0
    assert dataset.scored(0, 1).all()


def test_what_is_shown_of_several_turns_is_what_is_scored(tmp_path):
    row = {"prompt": [asks()], "chosen": TURNS, "rejected": [says("bad")]}
    tokenizer = byte_level(template=CHATML)
    path = dump(tmp_path, [row])
    (example,) = first_examples(path, tokenizer, config(tmp_path), "pairs", 1)
    dataset = load_tokenized(path, "train", tokenizer, config(tmp_path))
    chosen = example.texts[1]
    shown = [piece.part == "scored" for piece in chosen.pieces for _ in piece.ids]
    assert shown == dataset.scored(0, 0).tolist() and chosen.tokens == sum(shown)


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"messages": [asks("q")]}, [asks("q")]),
        ({"instruction": "q", "input": "x"}, [asks("q\nx")]),
        ({"instruction": "q"}, [asks("q")]),
    ],
)
def test_other_columns_of_a_prompt_beside_a_pair(tmp_path, row, prompt):
    group = only(write(tmp_path / "d.jsonl", [row | {"chosen": "a", "rejected": "b"}]), tmp_path)
    assert (group.prompt, group.responses) == (prompt, ["a", "b"])


def test_a_message_of_weight_zero_is_no_answer_but_may_stand_before_one(tmp_path):
    for completion in ([says("a", weight=0)], [says("a"), asks("b"), says("c", weight=0)]):
        rows = [{"prompt": [asks()], "completion": completion}]
        with pytest.raises(ValueError, match=rf"line 1: completion\[{len(completion) - 1}\] has weight 0"):
            loaded(tmp_path, rows, CHATML, sft=True)
    before = [asks(), says("a", weight=0), asks("b")]
    row = {"prompt": before, "chosen": [*before, says("c")], "rejected": [*before, says("d")]}
    assert only(write(tmp_path / "d.jsonl", [row]), tmp_path).responses == ["c", "d"]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": [asks("get_weather")], "tools": [WEATHER]}, "does not write the function get_weather"),
        ({"chosen": [says("I find it", tool_calls=[{"name": "find"}])]}, "does not write the call of find"),
        (
            {"prompt": [asks("find it"), says(tool_calls=[{"name": "find"}]), {"role": "tool", "content": "x"}]},
            "does not write the call of find .* of an earlier message",
        ),
        ({"chosen": [says("because", reasoning_content="because")]}, "does not write the reasoning 'because'"),
    ],
)
def test_a_part_that_stands_elsewhere_too_is_not_taken_for_written(tmp_path, row, message):
    base = {"prompt": [asks()], "chosen": [says("a")], "rejected": [says("b")]}
    with pytest.raises(ValueError, match=f"row 1: .*{message}"):
        loaded(tmp_path, [base | row], CHATML)


def test_parts_that_stand_elsewhere_too_are_written_by_a_template_that_writes_them(tmp_path):
    prompt = [
        asks("get_weather of Köln, 2 days"),
        says("get_weather", tool_calls=[CALL]),
        {"role": "tool", "content": "2"},
    ]
    row = {"prompt": prompt, "tools": [WEATHER], "chosen": [says("get_weather", tool_calls=[CALL])], "rejected": "no"}
    assert "<tool_call>" in loaded(tmp_path, [row | {"rejected": [says("no")]}])[1]


def test_numbers_of_a_call_that_a_template_leaves_out_are_named(tmp_path):
    names_only = TOOLS_TEMPLATE.replace("c['function'] | tojson", "c['function']['name']")
    call = {"name": "f", "arguments": {"list": [{"n": 2.5}]}}
    row = {"prompt": [asks()], "chosen": [says(tool_calls=[call])], "rejected": [says("b")]}
    with pytest.raises(ValueError, match=r"does not write the call of f \('2.5'\)"):
        loaded(tmp_path, [row], names_only)
    assert "2.5" in loaded(tmp_path, [row])[1]


def test_a_response_that_is_the_beginning_once_more_is_refused(tmp_path):
    row = {"messages": [asks(), says("Sure")], "chosen": "Sure", "rejected": "no"}
    with pytest.raises(ValueError, match="row 1: the response 'Sure' is the assistant message that prompt ends with"):
        loaded(tmp_path, [row], CHATML)


def test_tools_in_a_column_of_another_name(tmp_path):
    row = {"prompt": [asks()], "api": [WEATHER], "chosen": "a", "rejected": "b"}
    assert "get_weather" in loaded(tmp_path, [row], columns={"tools": "api"})[0]
