"""Token rules: where a prompt ends, which ids end a response, and what is cut."""

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_tokenizers import (
    CHATML,
    END,
    EOS,
    LLAMA2,
    LLAMA3,
    START,
    TOKENIZERS,
    A,
    H,
    byte_level,
    config,
    dump,
    load,
    metaspace,
    pair,
    plain,
    trees,
)
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data import text_encoding, tokenization
from data.row_formats import PromptGroup
from data.sources import open_source
from data.text_encoding import TextEncoder
from data.tokenization import load_tokenized
from data.truncation import Limits

ROOT = Path(__file__).resolve().parent.parent
REAL_HH = ROOT.parent / "shared" / "data" / "hh-rlhf"
CASES = ROOT.parent / "shared" / "cases" / "losses.json"


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make() for name, make in TOKENIZERS.items()}


@pytest.fixture(scope="module")
def gpt2(tokenizers):
    return tokenizers["byte-level"]


# ---- the given cases ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not CASES.is_file(), reason="the given cases are not here")
def test_every_given_case_has_its_test():
    cases = [case["case"] for case in json.loads(CASES.read_text())["tokens"]]
    starts = ("prompt 'Is the sky blue?'", "a response that contains the text", "prompt 100 tokens", "an HH row whose")
    assert all(case.startswith(start) for case, start in zip(cases, starts, strict=True))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_shared_beginning_stays_in_both_responses(tmp_path, tokenizers, name):
    tokenizer = tokenizers[name]
    dataset = load(tmp_path, [pair()], tokenizer)
    prompt, chosen, rejected = trees(dataset)
    bos = [] if tokenizer.bos_token_id is None or name == "BOS never added" else [tokenizer.bos_token_id]
    assert prompt == bos + plain(tokenizer, "Is the sky blue?")
    assert prompt + chosen == bos + plain(tokenizer, "Is the sky blue?yellow") + [tokenizer.eos_token_id]
    assert prompt + rejected == bos + plain(tokenizer, "Is the sky blue?yes") + [tokenizer.eos_token_id]
    assert "ye" in tokenizer.decode(chosen) and "ye" in tokenizer.decode(rejected)
    assert dataset.examples.tolist() == [[0, 0, 1]] and not dataset.truncated.any()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_that_looks_like_control_tokens_is_text(tmp_path, tokenizers, name):
    tokenizer = tokenizers[name]
    lookalikes = "".join(tokenizer.all_special_tokens) + START + END
    rows = [pair(f"q{lookalikes}?", f" a{tokenizer.eos_token} b {lookalikes}", f"{tokenizer.eos_token}")]
    dataset = load(tmp_path, rows, tokenizer, max_length=10**4)
    control = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    prompt, *responses = trees(dataset)
    bos = tokenizer.bos_token_id
    assert [token for token in prompt if token in control] == [bos] * (prompt[0] == bos)
    for response in responses:
        assert [token for token in response if token in control] == [tokenizer.eos_token_id]
        assert response[-1] == tokenizer.eos_token_id and len(response) > 2
    if tokenizer.unk_token_id not in prompt + responses[0]:
        # Blanks aside: a word mark at a text's start is no blank of the text.
        words = tokenizer.decode(prompt[prompt[0] == bos :]) + tokenizer.decode(responses[0][:-1])
        assert words.replace(" ", "") == (rows[0]["prompt"] + rows[0]["chosen"]).replace(" ", "")
    assert dataset.counts["texts_with_control_lookalikes"] == 3


def test_prompt_100_response_450_leaves_412_and_no_eos(tmp_path, gpt2):
    prompt, chosen = " the" * 100, " sky" * 450
    assert len(plain(gpt2, prompt)) == 100 and len(plain(gpt2, prompt + chosen)) == 550
    dataset = load(tmp_path, [pair(prompt, chosen, " sky is")], gpt2)
    kept, long, short = trees(dataset)
    assert (len(kept), len(long)) == (100, 412) and gpt2.eos_token_id not in long and short[-1] == gpt2.eos_token_id
    assert dataset.truncated.tolist() == [True, False] and dataset.counts["responses_cut"] == 1
    assert "prompts_cut" not in dataset.counts


def test_diverging_hh_rows_are_dropped_and_counted(tmp_path, gpt2):
    rows = [
        {"chosen": f"{H} hi{A} one{H} go on{A} yes", "rejected": f"{H} hi{A} two{H} go on{A} no"},
        {"chosen": f"{H} hi{A} yes", "rejected": f"{H} hi{A} no"},
    ]
    dataset = load(tmp_path, rows, gpt2)
    assert len(dataset) == 1 and dataset.counts["dropped_diverged"] == 1 and dataset.rows.tolist() == [2]


# ---- prompt | response -------------------------------------------------------------------------------------------


def test_a_merge_across_the_boundary_shares_the_common_prefix(tmp_path, gpt2):
    # "a good answ" + "er" is one word to the tokenizer; "a good answ" + "!" is not.
    dataset = load(tmp_path, [pair("a good answ", "er", "!")], gpt2)
    prompt, chosen, rejected = trees(dataset)
    eos = [gpt2.eos_token_id]
    assert prompt + chosen == plain(gpt2, "a good answer") + eos
    assert prompt + rejected == plain(gpt2, "a good answ!") + eos
    assert len(prompt) < len(plain(gpt2, "a good answ")) and dataset.counts["merged_boundaries"] == 1


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_empty_prompt_still_has_a_token_before_the_response(tmp_path, tokenizers, name):
    tokenizer = tokenizers[name]
    prompt, chosen, _ = trees(load(tmp_path, [pair("", "yes", "no")], tokenizer))
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    assert prompt == [start] and chosen == plain(tokenizer, "yes") + [tokenizer.eos_token_id]


FUZZ_TEXT = st.one_of(
    st.text(max_size=12), st.sampled_from(["ye", "yellow", EOS, END, "</s>", "<s>", " ", "\n\n", "answ"])
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    name=st.sampled_from(list(TOKENIZERS)),
    prompt=FUZZ_TEXT,
    responses=st.lists(FUZZ_TEXT, min_size=2, max_size=3, unique=True),
    max_length=st.integers(2, 20),
    max_prompt_length=st.integers(1, 12),
    keep=st.sampled_from(["keep_end", "keep_start"]),
)
def test_fuzz_token_groups(tokenizers, name, prompt, responses, max_length, max_prompt_length, keep):
    encoder = TextEncoder(tokenizers[name])
    pairs = [(0, number) for number in range(1, len(responses))]
    group = PromptGroup(prompt, responses, pairs, responses[0])
    try:
        source = type("Source", (), {"name": "x", "split": "train", "groups": lambda self: iter([group])})()
        chunks = list(
            tokenization.tokenized_chunks(
                source, encoder, Limits(max_length, max_prompt_length, keep), False, counts := tokenization.Counter()
            )
        )
    except UnicodeEncodeError:
        assert any(0xD800 <= ord(character) < 0xE000 for text in [prompt, *responses] for character in text)
        return
    for result in (group for chunk in chunks for group in chunk):
        assert 0 < len(result.prompt) <= max_length
        for response, cut in zip(result.responses, result.truncated):
            assert response and len(result.prompt) + len(response) <= max_length
            assert cut == (response[-1] != encoder.eos_id) and response.count(encoder.eos_id) == (not cut)
        assert all(result.responses[a] != result.responses[b] for a, b in result.pairs)
    assert sum(len(g.pairs) for chunk in chunks for g in chunk) + sum(
        counts[reason] for reason in ("dropped_no_room", "dropped_identical_tokens")
    ) == len(pairs)


# ---- cutting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte-level", "with BOS", "metaspace", "slow"])
@pytest.mark.parametrize("keep", ["keep_end", "keep_start"])
def test_a_cut_prompt_keeps_bos_header_and_the_right_end(tmp_path, tokenizers, name, keep):
    tokenizer = tokenizers[name]
    text = H + " the sky" * 60 + A
    dataset = load(
        tmp_path, [pair(text, " yes" * 60, " no")], tokenizer, truncation=keep, max_length=100, max_prompt_length=50
    )
    whole = plain(tokenizer, text)
    header = len(whole) - text_encoding.common_length(plain(tokenizer, text[: -len(A)]), whole)
    prompt, chosen, rejected = trees(dataset)
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    room = 50 - len(bos)
    body = whole[-room:] if keep == "keep_end" else whole[: room - header] + whole[-header:]
    assert prompt == bos + body and tokenizer.decode(prompt).endswith("Assistant:") and len(prompt) == 50
    assert len(chosen) == 50 and tokenizer.eos_token_id not in chosen and rejected[-1] == tokenizer.eos_token_id
    assert dataset.counts["prompts_cut"] == 1 and dataset.counts["responses_cut"] == 1


def test_a_long_prompt_that_fits_is_not_cut(tmp_path, gpt2):
    dataset = load(tmp_path, [pair(" the" * 90, " sky", " fox")], gpt2, max_length=92, max_prompt_length=10)
    assert len(dataset.prompt(0)) == 90 and not dataset.truncated.any()
    dataset = load(tmp_path, [pair(" the" * 90, " sky", " fox")], gpt2, max_length=91, max_prompt_length=10)
    assert len(dataset.prompt(0)) == 10 and not dataset.truncated.any()


def test_overlong_rows_can_be_dropped_or_refused(tmp_path, gpt2):
    rows = [pair(" the" * 10, " sky" * 30, " sky"), {**pair(" a", " sky", " fox")}]
    dataset = load(tmp_path, rows, gpt2, max_length=20, on_overlong="drop")
    assert len(dataset) == 1 and dataset.counts["dropped_overlong"] == 1 and dataset.n_groups == 1
    with pytest.raises(ValueError, match="row 1: prompt of 10 . response of 31 tokens exceed max_length=20"):
        load(tmp_path, rows, gpt2, max_length=20, on_overlong="error")


def test_a_response_without_room_is_dropped_and_counted(tmp_path, gpt2):
    rows = [pair(" the" * 40, " sky", " fox"), pair(" a", " sky", " fox")]
    dataset = load(tmp_path, rows, gpt2, max_length=10, max_prompt_length=10)
    assert dataset.counts["dropped_no_room"] == 1 and len(dataset) == 1
    with pytest.raises(ValueError, match="no example is left in the train split .*dropped_no_room 1"):
        load(tmp_path, rows[:1], gpt2, max_length=10, max_prompt_length=10)


def test_pairs_that_a_cut_made_equal_are_dropped(tmp_path, gpt2):
    rows = [pair(" a", " sky" * 30 + " one", " sky" * 30 + " two"), pair(" b", " sky", " fox")]
    dataset = load(tmp_path, rows, gpt2, max_length=20)
    assert dataset.counts["dropped_identical_tokens"] == 1 and dataset.examples.tolist() == [[0, 0, 1]]


# ---- structure ---------------------------------------------------------------------------------------------------


def test_groups_examples_and_response_numbers(tmp_path, gpt2):
    rows = [
        {"prompt": "p1", "responses": ["r0", "r1", "r2", "r3"], "pairs": [[3, 0], [3, 1], [0, 1]], "sft_target": "r2"},
        {"prompt": "p2", "responses": ["s0", "s1"], "pairs": [[1, 0]], "sft_target": "s1"},
    ]
    dataset = load(tmp_path, rows, gpt2)
    assert dataset.examples.tolist() == [[0, 2, 0], [0, 2, 1], [0, 0, 1], [1, 1, 0]]  # r2 is in no pair: not kept
    assert [gpt2.decode(tree) for tree in trees(dataset)] == ["p1", "r0" + EOS, "r1" + EOS, "r3" + EOS]
    assert [dataset.response_id(g, i) for g in (0, 1) for i in range(dataset.n_group_responses(g))] == [0, 1, 2, 3, 4]
    assert dataset.n_responses == 5 and dataset.n_groups == 2 and dataset.rows.tolist() == [1, 2]
    assert dataset.tokens.dtype == np.int32 and dataset.examples.dtype == np.int32
    assert dataset.segment_starts.dtype == np.int64 and dataset.group_starts.tolist() == [0, 4, 7]
    assert dataset.segment_starts[-1] == len(dataset.tokens)
    sft = load(tmp_path, rows, gpt2, sft=True)
    assert sft.examples.tolist() == [[0, 0, -1], [1, 0, -1]]
    assert [gpt2.decode(tree) for tree in trees(sft)] == ["p1", "r2" + EOS]


def test_chunks_change_nothing(tmp_path, gpt2, monkeypatch):
    rows = [pair(f"q{number}", "yes" * (number % 5 + 1), "no") for number in range(100)]
    whole = load(tmp_path, rows, gpt2)
    monkeypatch.setattr(tokenization, "CHUNK", 7)
    shutil.rmtree(tmp_path / "cache")
    assert load(tmp_path, rows, gpt2).key == whole.key and len(whole) == 100


def test_a_slow_tokenizer_goes_to_workers_and_comes_back_the_same(tmp_path, tokenizers, monkeypatch):
    rows = [pair(f"q{number}", "yes", "no") for number in range(40)]
    alone = load(tmp_path, rows, tokenizers["slow"])
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(tokenization, "CHUNK", 2)  # more chunks than are done without workers
    assert load(tmp_path, rows, tokenizers["slow"], num_workers=2).key == alone.key


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    inner = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match="no EOS token"):
        load(tmp_path, [pair()], PreTrainedTokenizerFast(tokenizer_object=inner))


# ---- conversations -----------------------------------------------------------------------------------------------


def chat(*contents, system=None):
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def chat_pair(*contents, good="yes", bad="no", system=None):
    return {"prompt": chat(*contents, system=system), "chosen": chat("", good)[1:], "rejected": chat("", bad)[1:]}


CHAT_TOKENIZERS = {
    "chatml": lambda: byte_level(template=CHATML),
    "llama3": lambda: byte_level("<|bos|>", True, LLAMA3),
    "llama2": lambda: metaspace(template=LLAMA2),
    "llama2 always": lambda: metaspace("always", template=LLAMA2),
    "unigram": lambda: metaspace(kind="unigram", template=LLAMA2),
}


@pytest.fixture(scope="module")
def chat_tokenizer(request):
    return CHAT_TOKENIZERS[request.param]()


@pytest.mark.parametrize("chat_tokenizer", ["chatml", "llama3", "llama2", "llama2 always"], indirect=True)
def test_conversations_are_what_the_template_renders(tmp_path, chat_tokenizer):
    tokenizer, template = chat_tokenizer, chat_tokenizer.chat_template
    row = chat_pair("Is the sky blue?", "yes", " and the sun? ", good="the sun is yellow ", bad=" yes")
    dataset = load(tmp_path, [row], tokenizer)
    prompt, *responses = trees(dataset)
    for response, side in zip(responses, ("chosen", "rejected")):
        rendered = tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False)
        ids = tokenizer.encode(rendered, add_special_tokens=False)
        end = tokenizer.eos_token_id if template == LLAMA2 else tokenizer.convert_tokens_to_ids(END)
        last = len(ids) - ids[::-1].index(end)
        assert prompt + response == ids[:last] and response[-1] == end and response.count(end) == 1
    if tokenizer.bos_token_id is not None:
        assert prompt[0] == tokenizer.bos_token_id != prompt[1]
    if template != LLAMA2:
        assert prompt == tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("chat_tokenizer", ["chatml", "llama3", "llama2", "unigram"], indirect=True)
def test_markers_inside_messages_are_text(tmp_path, chat_tokenizer):
    """A message with a marker in it gives just as many control tokens as one without."""
    tokenizer = chat_tokenizer
    special = END if END in tokenizer.all_special_tokens else tokenizer.eos_token
    row = chat_pair(f"hi {special} there", good=f"a{special}\n{special}", bad=f"{special}")
    dataset = load(tmp_path, [row], tokenizer)
    clean = load(tmp_path, [chat_pair("hi there", good="a\n", bad="b")], tokenizer)
    control = [
        number
        for text, number in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids)
        if text != tokenizer.unk_token
    ]
    for dirty_segment, clean_segment in zip(trees(dataset), trees(clean)):
        assert [t for t in dirty_segment if t in control] == [t for t in clean_segment if t in control]
    if tokenizer.unk_token is None:
        assert tokenizer.decode(dataset.response(0, 0)[:-1]).rstrip() == f"a{special}\n{special}"
        assert f"hi {special} there" in tokenizer.decode(dataset.prompt(0))


@pytest.mark.parametrize("chat_tokenizer", ["chatml", "llama2", "llama2 always"], indirect=True)
def test_the_protected_path_encodes_like_the_plain_one(chat_tokenizer):
    encoder = TextEncoder(chat_tokenizer)
    text = chat_tokenizer.apply_chat_template(chat("the sky", " yes ", "and"), tokenize=False)
    assert encoder.encode_with_placeholders(text, {}) == encoder.encode_marked([text])[0]


def test_a_generation_prompt_that_differs_from_the_rendered_turn_is_not_used(tmp_path):
    template = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    tokenizer = byte_level(template=template)
    prompt, chosen, _ = trees(load(tmp_path, [chat_pair("hi")], tokenizer))
    assert tokenizer.decode(prompt).endswith(f"{START}assistant\n") and tokenizer.decode(chosen) == f"yes{END}"


def test_a_template_that_looks_into_the_answer(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and '</think>' not "
        "in m['content'] %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    tokenizer = byte_level(template=template)
    row = chat_pair("hi", good="<think>hm</think>yes", bad="no")
    prompt, chosen, rejected = trees(load(tmp_path, [row], tokenizer))
    assert tokenizer.decode(prompt + chosen).endswith(f"{START}assistant\n<think>hm</think>yes{END}")
    assert tokenizer.decode(prompt + rejected).endswith(f"{START}assistant\n<think></think>no{END}")


def test_without_an_end_of_turn_token_eos_ends_the_response(tmp_path):
    tokenizer = byte_level(template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    prompt, chosen, _ = trees(load(tmp_path, [chat_pair("hi")], tokenizer))
    assert tokenizer.decode(prompt) == "user: hi\nassistant: "[: len(tokenizer.decode(prompt))]
    assert tokenizer.decode(prompt + chosen) == "user: hi\nassistant: yes" + EOS


def test_without_a_template_the_plain_layout_with_a_notice(tmp_path, gpt2):
    dataset = load(tmp_path, [chat_pair("hi", "yes", "and?", system="Be kind.")], gpt2)
    prompt, chosen, _ = trees(dataset)
    assert gpt2.decode(prompt) == f"Be kind.{H} hi{A} yes{H} and?{A}" and gpt2.decode(chosen) == " yes" + EOS
    assert any("no chat template" in notice for notice in dataset.notices)
    again = load(tmp_path, [chat_pair("hi", "yes", "and?", system="Be kind.")], gpt2)
    assert again.notices == dataset.notices  # also when read from the cache


def test_a_chat_template_of_the_users_own(tmp_path, gpt2):
    (tmp_path / "mine.jinja").write_text(CHATML)
    for value in (CHATML, str(tmp_path / "mine.jinja")):
        dataset = load(tmp_path, [chat_pair("hi")], gpt2, chat_template=value)
        assert gpt2.decode(dataset.prompt(0)) == f"{START}user\nhi{END}\n{START}assistant\n" and not dataset.notices
    with pytest.raises(ValueError, match="data.chat_template=nowhere.jinja"):
        load(tmp_path, [chat_pair("hi")], gpt2, chat_template="nowhere.jinja")


def test_a_system_turn_that_the_template_refuses_goes_into_the_first_user_turn(tmp_path):
    tokenizer = metaspace(template=LLAMA2)
    dataset = load(tmp_path, [chat_pair("hi", system="the sky")], tokenizer)
    folded = load(tmp_path, [chat_pair("the sky\n\nhi")], tokenizer)
    assert trees(dataset) == trees(folded) and dataset.counts["system_turns_folded"] == 1 and dataset.notices


def test_a_conversation_that_the_template_refuses_names_the_row(tmp_path):
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
    rows = [chat_pair("hi"), {**chat_pair("hi"), "prompt": [{"role": "tool", "content": "x"}]}]
    with pytest.raises(ValueError, match="row 2: the chat template refuses .*user first"):
        load(tmp_path, rows, byte_level(template=template))


@pytest.mark.parametrize("keep", ["keep_end", "keep_start"])
@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["chatml", "llama3"])
def test_a_cut_conversation_keeps_its_header(tmp_path, keep, template):
    tokenizer = byte_level("<|bos|>", True, template) if template is LLAMA3 else byte_level(template=template)
    row = chat_pair("a " + " the sky" * 60 + " t", good="yes " * 40)
    dataset = load(tmp_path, [row], tokenizer, max_length=60, max_prompt_length=30, truncation=keep)
    prompt = dataset.prompt(0)
    text = tokenizer.decode(prompt)
    header = f"{END}\n{START}assistant\n" if template is CHATML else f"{END}{START}assistant\n\n"
    assert len(prompt) == 30 and text.endswith(header)
    if template is LLAMA3:
        assert prompt[0] == tokenizer.bos_token_id and list(prompt).count(tokenizer.bos_token_id) == 1
    assert ("user" in text) == (keep == "keep_start")
    assert (" t" + END in text) == (keep == "keep_end")


# ---- cost -------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_data(tmp_path, gpt2, monkeypatch):
    monkeypatch.setattr(tokenization, "CHUNK", 32)
    peaks = []
    for number in (200, 4000):
        path = dump(tmp_path, [pair(f"q{row}" + " the sky" * 50, "yes" * 50, "no" * 50) for row in range(number)])
        source = open_source(path, "train", config(tmp_path))
        encoder = TextEncoder(gpt2)
        tracemalloc.start()
        for chunk in tokenization.tokenized_chunks(source, encoder, Limits(512, 256), False, tokenization.Counter()):
            assert chunk
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]  # of 20 times the rows; how many chunks overlap depends on the threads


@pytest.mark.skipif(not REAL_HH.is_dir(), reason="the real HH rows are not here")
def test_real_hh_tokens_spell_the_rows(tmp_path, gpt2):
    settings_ = config(tmp_path, max_length=10**6, max_prompt_length=10**6, paths={"hh": str(REAL_HH)})
    dataset = load_tokenized("hh", "test", gpt2, settings_, "pairs")
    groups = list(open_source("hh", "test", settings_).groups())
    assert dataset.n_groups == len(groups) == 311 and "merged_boundaries" not in dataset.counts
    for number, group in enumerate(groups):
        assert gpt2.decode(dataset.prompt(number)) == group.prompt
        for index, text in enumerate(group.responses):
            assert gpt2.decode(dataset.response(number, index)) == text + EOS
