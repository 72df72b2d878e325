"""Chat templates: what is trained on is what was written, in the layout in which the model will be used."""

import json
import pickle
from pathlib import Path

import pytest
from small_tokenizers import CHATML, END, EOS, LLAMA2, LLAMA3, START, A, H, byte_level, load, metaspace, pair, trees

import settings
from data import template_calls
from data.dialogues import messages_of_dialogue
from data.template_calls import ChatTemplate, unused_characters
from data.text_encoding import TextEncoder, end_of_turn_id
from training.data_loading import check_text_options

CASES = Path(__file__).resolve().parent.parent.parent / "shared" / "cases" / "chat.json"
AT_LAST_USER = (  # as Mistral's: the system text stands before the last turn, if that is the user's
    "{%- set ns = namespace(sys='') -%}{%- for m in messages -%}{%- if m.role == 'system' -%}"
    "{%- set ns.sys = m.content -%}{%- elif m.role == 'user' -%}"
    "[INST] {{ (ns.sys ~ ' | ' if loop.last and ns.sys else '') ~ m.content }} [/INST]"
    "{%- else -%}{{ ' ' ~ m.content }}<|endoftext|>{%- endif -%}{%- endfor -%}"
)
STRIPS_THINKING = (  # as DeepSeek-R1's
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}<a>{{ m.content.split('</think>')[-1] }}<|endoftext|>"
    "{%- else -%}<u>{{ m.content }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<a>{%- endif -%}"
)
LAYS_THINKING_OUT = (  # as Qwen3's: an empty block before a last answer without one
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{%- set text = m.content %}"
    "{%- if m.role == 'assistant' and loop.last %}{%- set parts = m.content.split('</think>') %}"
    "{%- set thought = parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' %}"
    "{{ '\n<think>\n' + thought + '\n</think>\n\n' + parts[-1].lstrip() }}"
    "{%- else %}{{ '\n' + text.split('</think>')[-1] }}{%- endif -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def conversation(*contents, good="yes", bad="no", system=None):
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]
    prompt = ([{"role": "system", "content": system}] if system else []) + turns
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in (good, bad))
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def texts(tokenizer, dataset):
    return [tokenizer.decode(tree) for tree in trees(dataset)]


# ---- The layout of use ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not CASES.is_file(), reason="the given cases are not here")
def test_the_given_templates_train_on_every_message(tmp_path):
    cases = json.loads(CASES.read_text())["cases"]
    eos_text = "<|eos|>"
    tokenizer = byte_level("<|bos|>")
    tokenizer.add_special_tokens({"eos_token": eos_text})
    for number, case in enumerate(cases[:4]):
        folder = tmp_path / str(number)
        folder.mkdir()
        dataset = load(folder, [case["row"]], tokenizer, sft=True, chat_template=case["template"])
        whole = "".join(texts(tokenizer, dataset))
        for message in case["row"]["messages"]:
            assert message["content"] in whole, case["name"]
        assert whole.startswith(
            tokenizer.apply_chat_template(
                case["row"]["messages"][:-1], chat_template=case["template"], tokenize=False, add_generation_prompt=True
            )
        ), case["name"]


def test_system_text_before_the_last_user_turn_is_in_the_prompt(tmp_path):
    tokenizer = byte_level(template=AT_LAST_USER)
    row = conversation("2+2?", "four", "and 3+3?", system="Be brief.")
    dataset = load(tmp_path, [row], tokenizer)
    prompt = f"[INST] 2+2? [/INST] four{EOS}[INST] Be brief. | and 3+3? [/INST]"
    assert prompt == tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    assert texts(tokenizer, dataset) == [prompt, f" yes{EOS}", f" no{EOS}"]
    assert dataset.counts["prompts_from_generation"] == 1
    assert any("lays out some conversations otherwise" in notice for notice in dataset.notices)


def test_a_message_that_the_template_leaves_out_is_refused(tmp_path):
    template = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
    rows = [conversation("hi"), conversation("hi, user", system="user")]  # the text stands in the rendering by chance
    with pytest.raises(
        ValueError, match="row 2: the chat template leaves out the system message 'user'.*chat_template"
    ):
        load(tmp_path, rows, byte_level(template=template))
    parts = CHATML.replace("{{ m['content'] }}", "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}")
    with pytest.raises(ValueError, match="does not write the assistant's answer"):
        load(tmp_path, rows, byte_level(template=parts))  # written for lists of parts


def test_reasoning_is_trained_on_whole_and_counted(tmp_path):
    tokenizer = byte_level(template=STRIPS_THINKING)
    row = conversation("1+1?", "<think>one</think>two", "2+2?", good="<think>two and two</think>4", bad="5")
    dataset = load(tmp_path, [row], tokenizer)
    assert texts(tokenizer, dataset) == [
        f"<u>1+1?<a>two{EOS}<u>2+2?<a>",
        f"<think>two and two</think>4{EOS}",
        f"5{EOS}",
    ]
    assert dataset.counts["answers_kept_whole"] == 1 and dataset.counts["messages_changed"] == 1
    assert sum("leaves out or changes" in notice for notice in dataset.notices) == 2


def test_a_generation_prompt_that_begins_the_reasoning(tmp_path):
    template = STRIPS_THINKING.replace(
        "{%- if add_generation_prompt -%}<a>", "{%- if add_generation_prompt -%}<a><think>"
    )
    tokenizer = byte_level(template=template)
    row = conversation("2+2?", good="<think>two and two</think>4", bad="<think>hm</think>5")
    dataset = load(tmp_path, [row], tokenizer)
    assert texts(tokenizer, dataset) == ["<u>2+2?<a><think>", f"two and two</think>4{EOS}", f"hm</think>5{EOS}"]
    differing = load(tmp_path, [conversation("2+2?")], tokenizer)
    assert texts(tokenizer, differing) == ["<u>2+2?<a>", f"yes{EOS}", f"no{EOS}"]
    assert differing.counts["generation_prompts_differ"] == 1
    assert any("how it begins some turns" in notice for notice in differing.notices)


def test_reasoning_that_the_template_lays_out_is_part_of_the_answer(tmp_path):
    tokenizer = byte_level(template=LAYS_THINKING_OUT)
    dataset = load(tmp_path, [conversation("hi", good="<think>hm</think>yes")], tokenizer)
    assert texts(tokenizer, dataset) == [
        f"{START}user\nhi{END}{START}assistant\n",
        f"<think>\nhm\n</think>\n\nyes{END}",
        f"<think>\n\n</think>\n\nno{END}",
    ]


def test_a_blank_before_the_answer_is_written_by_the_model(tmp_path):
    tokenizer = byte_level("<|bos|>", True, LLAMA2)
    row = conversation("2+2?", "four", "and 3+3?", good="six", bad="seven")
    dataset = load(tmp_path, [row], tokenizer)
    prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    assert texts(tokenizer, dataset) == [prompt, f" six {EOS}", f" seven {EOS}"]
    # A header that is missing from the generation prompt stays the prompt's.
    tokenizer = byte_level(template=CHATML.partition("{% if add")[0])
    assert texts(tokenizer, load(tmp_path, [row], tokenizer))[0].endswith(f"{START}assistant\n")


def test_an_answer_that_is_the_opening_of_the_turn_is_dropped(tmp_path):
    template = STRIPS_THINKING.replace("generation_prompt -%}<a>", "generation_prompt -%}<a><think>")
    rows = [conversation("2+2?", good="<think>a</think>4", bad="<think>"), conversation("2+2", good="4", bad="5")]
    dataset = load(tmp_path, rows, byte_level(template=template))
    assert len(dataset) == 1 and dataset.counts["dropped_no_room"] == 1


def test_trimmed_answers_are_counted(tmp_path):
    dataset = load(tmp_path, [conversation("hi", good=" yes ")], byte_level("<|bos|>", True, LLAMA3))
    assert dataset.counts["answers_trimmed"] == 1 and any("drops the blanks" in notice for notice in dataset.notices)


def test_an_end_of_turn_that_is_no_token_is_reported(tmp_path):
    tokenizer = byte_level(template=CHATML.replace("<|im_end|>", "<|stop|>"))
    dataset = load(tmp_path, [conversation("hi")], tokenizer)
    assert texts(tokenizer, dataset)[1] == "yes" + EOS
    assert any("'<|stop|>', which is no control token" in notice for notice in dataset.notices)


# ---- Ends of turns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [True, False])
def test_the_end_of_turn_is_the_one_trained_however_it_was_added(tmp_path, special):
    template = CHATML.replace(END, "<|stop|>").replace(START, "<|turn|>")
    tokenizer = byte_level(template=template)
    tokenizer.add_tokens(["<|stop|>", "<|turn|>", "<think>"], special_tokens=special)
    stop, turn, think = tokenizer.convert_tokens_to_ids(["<|stop|>", "<|turn|>", "<think>"])
    assert end_of_turn_id(tokenizer) == stop
    row = conversation("hi <|turn|>", good="<think>a<|stop|>b", bad="no")
    dataset = load(tmp_path, [row], tokenizer)
    prompt, chosen, rejected = trees(dataset)
    assert rejected[-1] == stop and tokenizer.eos_token_id not in chosen + rejected
    assert chosen.count(stop) == 1 and chosen[-1] == stop  # in a message it is text
    assert prompt.count(turn) == 2 and tokenizer.decode(chosen) == "<think>a<|stop|>b<|stop|>"
    assert (think in chosen) == (not special)  # a word that the model writes


ENDS = {  # what stands after the last answer, and after an earlier one -> what is trained
    "one": ("<|im_end|>\n", "<|im_end|>\n", "<|im_end|>"),
    "of answer and turn": ("<|im_start|><|im_end|>", "<|im_start|><|im_end|>", "<|im_start|><|im_end|>"),
    "of turn and text": ("<|im_end|>\n<|endoftext|>", "<|im_end|>\n", "<|im_end|>"),
    "another for the last": ("<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
    "none before the next": ("<|endoftext|>", "", "<|endoftext|>"),
}


@pytest.mark.parametrize("name", ENDS)
def test_all_that_ends_a_turn_is_trained(tmp_path, name):
    last, earlier, trained = ENDS[name]
    template = (
        "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}{% if m.role != 'user' %}"
        "{% if loop.last %}{{ '" + last + "' }}{% else %}{{ '" + earlier + "' }}{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    ).replace("\n", "\\n")
    tokenizer = byte_level(template=template)
    assert texts(tokenizer, load(tmp_path, [conversation("hi")], tokenizer)) == [
        "<u>hi<a>",
        "yes" + trained,
        "no" + trained,
    ]
    assert tokenizer.decode([end_of_turn_id(tokenizer)]) == trained.removeprefix(START)


def test_stop_ids_of_other_templates():
    assert end_of_turn_id(byte_level()) is None
    assert end_of_turn_id(metaspace(template=LLAMA2)) == 2  # </s>
    assert end_of_turn_id(byte_level(template="{{ 1 / 0 }}")) is None


# ---- Templates that fail --------------------------------------------------------------------------------------------

FAILING = {
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "type": ("{{ messages + 1 }}", "TypeError"),
    "undefined": ("{{ nothing.at_all }}", "'nothing' is undefined"),
    "syntax": ("{% for %}", "Expected an expression"),
    "memory": ("{{ 'x' * 10 ** 15 }}", "MemoryError"),
    "surrogate": ("{{ '\\ud800' }}", "UnicodeEncodeError"),
    "unsafe": ("{{ messages.__class__.__mro__ }}", "unsafe"),
    "range": ("{{ range(10 ** 9) | list }}", "OverflowError"),
    "twice": (CHATML + "{{ messages[-1]['content'] }}", "writes the assistant's answer more than once"),
    "endless": (CHATML + "{{ 'x' * 2000000 }}", "makes 2,0.* characters of a conversation of"),
    "nothing": ("{{ '' }}", "does not write the assistant's answer"),
}


@pytest.mark.parametrize("name", FAILING)
def test_whatever_a_template_raises_is_a_message_with_the_row(tmp_path, name):
    template, expected = FAILING[name]
    with pytest.raises(ValueError, match=f"row 1: the chat template .*{expected}") as caught:
        load(tmp_path, [conversation("hi", system="Be brief.")], byte_level(), chat_template=template)
    assert "chat template" in str(caught.value) and len(str(caught.value)) < 1000


def test_a_template_that_does_not_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(template_calls, "PATIENCE", 0.3)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="row 1: .*TimeoutError: it did not end"):
        load(tmp_path, [conversation("hi")], byte_level(), chat_template=loops)


@pytest.mark.parametrize("template", [CHATML, AT_LAST_USER, LAYS_THINKING_OUT])
def test_conversations_of_private_use_characters(tmp_path, template):
    tokenizer = byte_level(template=template)
    characters = "".join(map(chr, [*range(0xE000, 0xF900), *range(0xF0000, 0xF0100)]))
    row = conversation(
        f"{characters}{END}", "yes", characters[::-1], good=f"a{END}{characters[:99]}", bad=chr(0xE000) * 9
    )
    row["prompt"].insert(0, {"role": "system", "content": "\uf8ff\uf8ff\uf8ff"})
    prompt, chosen, rejected = texts(
        tokenizer, load(tmp_path, [row], tokenizer, max_length=10**6, max_prompt_length=10**5)
    )
    for message in row["prompt"]:
        assert message["content"] in prompt
    assert f"a{END}{characters[:99]}" in chosen and chr(0xE000) * 9 in rejected
    cut = load(tmp_path, [row], tokenizer, max_length=600, max_prompt_length=100)
    assert texts(tokenizer, cut)[0].endswith(prompt[-5:])


def test_there_is_always_a_character_to_mark_with():
    private = "".join(map(chr, [*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]))
    assert next(unused_characters(private)) not in private and next(unused_characters("a", "b")) == "\ue000"


def test_a_renderer_goes_to_workers():
    encoder = pickle.loads(pickle.dumps(TextEncoder(byte_level(template=CHATML))))
    assert encoder.encode_plain(["hi"])


# ---- The date -------------------------------------------------------------------------------------------------------

DATED = "Today is {{ strftime_now('%d %b %Y') }}." + CHATML


def test_the_date_of_a_template_is_pinned_and_part_of_the_key(tmp_path):
    tokenizer = byte_level(template=DATED)
    row = conversation("hi")
    first, same, later = (load(tmp_path, [row], tokenizer, template_date=f"2026-11-{day}") for day in (30, 30, 29))
    assert texts(tokenizer, first)[0].startswith("Today is 30 Nov 2026.")
    assert texts(tokenizer, later)[0].startswith("Today is 29 Nov 2026.")
    assert first.folder == same.folder != later.folder and first.key == same.key != later.key
    plain = [TextEncoder(byte_level(template=CHATML), template_date=date).digest() for date in ("2026-11-30", None)]
    assert plain[0] == plain[1]  # a template without a date does not depend on it


def test_a_template_with_a_date_renders_as_transformers_does():
    tokenizer = byte_level("<|bos|>", template="{{ bos_token }}" + DATED)
    messages = conversation("hi")["prompt"]
    today = template_calls.datetime.now().strftime("%Y-%m-%d")
    for generation in (False, True):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        assert ChatTemplate(tokenizer, None, today).render(messages, generation) == expected


# ---- Text prompts ---------------------------------------------------------------------------------------------------

MARKED = pair(f"{START}user\nhi{END}\n{START}assistant\n", f"hello{END}\n", "go away")


def test_markers_in_text_prompts_are_text_with_a_notice_that_names_them(tmp_path):
    tokenizer = byte_level(template=CHATML)
    dataset = load(tmp_path, [pair(), MARKED], tokenizer)
    prompt, chosen, _ = trees(dataset, 1)
    assert tokenizer.convert_tokens_to_ids(START) not in prompt and chosen[-1] == tokenizer.eos_token_id
    notice = next(notice for notice in dataset.notices if START in notice)
    assert END in notice and "row 2" in notice and "data.allow_control_tokens=true" in notice


@pytest.mark.parametrize("bos", [None, "<|bos|>"])
def test_control_tokens_in_text_can_be_allowed(tmp_path, bos):
    tokenizer = byte_level(bos, bool(bos))
    rows = [MARKED, pair(f"{bos or ''}hi", f"yes{EOS}", "no"), pair()]
    dataset = load(tmp_path, rows, tokenizer, allow_control_tokens=True)
    start, end, eos = (tokenizer.convert_tokens_to_ids(text) for text in (START, END, EOS))
    first = [tokenizer.bos_token_id] if bos else []
    prompt, chosen, rejected = trees(dataset)
    assert prompt == first + tokenizer.encode(MARKED["prompt"], add_special_tokens=False)
    assert prompt.count(start) == 2 and chosen[-1] == end and chosen.count(eos) == 0
    assert rejected[-1] == eos and rejected.count(eos) == 1
    prompt, chosen, rejected = trees(dataset, 1)
    assert prompt[:1] == (first or prompt[:1]) and prompt.count(tokenizer.bos_token_id) == len(first)
    assert chosen.count(eos) == rejected.count(eos) == 1 and chosen[-1] == rejected[-1] == eos
    assert dataset.counts["prompts_with_control_tokens"] == 2 and not dataset.notices


def test_text_on_a_chat_model_is_reported_and_can_be_laid_out(tmp_path):
    tokenizer = byte_level(template=CHATML)
    assert any("data.apply_template=true" in notice for notice in load(tmp_path, [pair()], tokenizer).notices)
    assert not load(tmp_path, [pair()], byte_level()).notices
    rows = [pair(), pair(f"{H} hi{A} hello{H} and?{A}", " yes", " no"), MARKED]
    dataset = load(tmp_path, rows, tokenizer, apply_template=True)
    same = [
        conversation("Is the sky blue?", good="yellow", bad="yes"),
        conversation("hi", "hello", "and?"),
        conversation(MARKED["prompt"], good=MARKED["chosen"], bad=MARKED["rejected"]),
    ]
    expected = load(tmp_path, same, tokenizer)
    assert [trees(dataset, group) for group in range(3)] == [trees(expected, group) for group in range(3)]
    assert dataset.counts["templated_prompts"] == 3
    with pytest.raises(ValueError, match="data.apply_template=true, but the tokenizer has no chat template"):
        load(tmp_path, rows, byte_level(), apply_template=True)


def test_options_of_text_prompts_are_refused_where_all_are_conversations(tmp_path):
    config = settings.from_dict(settings.complete({"model": {"name_or_path": "tiny"}, "datasets": ["mine"]}))
    tokenizer = byte_level(template=CHATML)
    for option in ("apply_template", "allow_control_tokens"):
        on = settings.replace(config, {f"data.{option}": True})
        conversations = load(tmp_path, [conversation("hi")], tokenizer, **{option: True})
        with pytest.raises(ValueError, match=f"data.{option}=true has no effect: every prompt"):
            check_text_options(on, [conversations])
        check_text_options(on, [conversations, load(tmp_path, [pair()], tokenizer, **{option: True})])
        check_text_options(config, [conversations])


def test_turns_of_a_dialogue():
    def turns(text):
        return [(message["role"], message["content"]) for message in messages_of_dialogue(text)]

    assert turns(f"{H} a{H} b{A} c{H} d{A}") == [("user", "a\n\nb"), ("assistant", "c"), ("user", "d")]
    assert turns(f"Be kind.{H} a{A}") == [("system", "Be kind."), ("user", "a")]
    assert turns(f"a question{A}") == [("user", "a question")]


def test_layout_options_are_part_of_the_key(tmp_path):
    tokenizer = byte_level(template=CHATML)
    digests = {
        TextEncoder(tokenizer, **options).digest()
        for options in ({}, {"apply_template": True}, {"allow_control_tokens": True}, {"chat_template": DATED})
    }
    assert len(digests) == 4
