"""Samples: the same as transformers' own generation, whatever the batch, the padding and the number of processes."""

import os
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers.cache_utils import DynamicLayer

import private_apis
from modeling import generation
from modeling.generation import choose_tokens, generate_samples
from utils import World

VOCABULARY = 40
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TINY |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


class NumberTokenizer:
    """Decodes ids to their numbers, so that a sample's text shows its tokens exactly."""

    bos_token_id, eos_token_id, pad_token_id, chat_template = 1, 2, None, None

    def __init__(self, size: int = VOCABULARY):
        self.size = size

    def __len__(self):
        return self.size

    def get_vocab(self):
        return {f"<{i}>": i for i in range(self.size)}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(f"{i} " for i in ids if not (skip_special_tokens and i in (1, 2)))


def make_model(model_type: str = "llama", seed: int = 0, **changes):
    """A tiny random model, scaled so that its choices are far from uniform and it ends some of its texts itself."""
    config = transformers.AutoConfig.for_model(model_type, **(TINY | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=changes.get("attn", "sdpa"))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.25)
    return model


def make_prompts(*lengths: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [np.concatenate([[1], random.integers(3, VOCABULARY, length - 1)]).astype(np.int32) for length in lengths]


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "gpt2", "opt", "bloom", "mamba"])
def test_greedy_is_generate(model_type):
    changes = {"mamba": {"state_size": 4}, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}}.get(model_type, {})
    model = make_model(model_type, **changes, **({"attn": "eager"} if model_type in ("bloom", "mamba") else {}))
    prompts, tokenizer = make_prompts(9, 3, 1, 6), NumberTokenizer()
    samples = generate_samples(model, tokenizer, prompts, temperature=0, max_new_tokens=20, batch_size=3)
    for prompt, sample in zip(prompts, samples):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        with torch.no_grad():
            whole = model.eval().generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=20,
                pad_token_id=0,
                eos_token_id=2,
            )
        assert sample == tokenizer.decode(whole[0, len(prompt) :].tolist(), skip_special_tokens=True)
    assert len(set(samples)) > 1


def test_neither_padding_nor_batch_nor_order_of_batches_changes_a_sample():
    model, prompts = make_model(), make_prompts(12, 2, 7, 4, 9)
    settings = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 15, "seed": 3}
    together = generate_samples(model, NumberTokenizer(), prompts, batch_size=5, **settings)
    for batch_size in (1, 2):
        assert generate_samples(model, NumberTokenizer(), prompts, batch_size=batch_size, **settings) == together
    # The first prompts answer alike when later ones are missing.
    assert generate_samples(model, NumberTokenizer(), prompts[:2], batch_size=2, **settings) == together[:2]
    assert generate_samples(model, NumberTokenizer(), prompts, **(settings | {"seed": 4})) != together


def test_cache_and_full_forwards_agree(monkeypatch):
    model, prompts = make_model(), make_prompts(12, 2, 7)
    cached = generate_samples(model, NumberTokenizer(), prompts, max_new_tokens=15)
    calls = []
    model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs["use_cache"]), with_kwargs=True)
    with monkeypatch.context() as patch:
        patch.setattr(private_apis, "is_recurrent", lambda model: True)
        assert generate_samples(model, NumberTokenizer(), prompts, max_new_tokens=15) == cached
    assert calls and not any(calls)
    # A model that accepts a cache and returns none is found out after its first forward.

    def forget(module, args, output):
        output["cache" if "cache" in output else "past_key_values"] = None

    model.register_forward_hook(forget)
    assert generate_samples(model, NumberTokenizer(), prompts, max_new_tokens=15) == cached


WINDOWS = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
CACHES = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "gemma2": {**WINDOWS, "attn": "eager"},
    "gemma3_text": {**WINDOWS, "sliding_window_pattern": 2},
    "llama4_text": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 32,
    },
    "lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
}


@pytest.mark.parametrize("model_type", CACHES)
def test_a_cache_with_room_writes_what_the_librarys_does(model_type, monkeypatch):
    """Grouped heads, windows shorter than the texts, chunks, and convolutions between attention layers."""
    model, prompts = make_model(model_type, **CACHES[model_type]), make_prompts(9, 3, 1, 12)
    settings = {"temperature": 0, "max_new_tokens": 20, "batch_size": 4}
    memory: list[set[int]] = []

    def look(module, args, kwargs, output):
        cache = getattr(output, "cache", None) or output.past_key_values
        layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
        memory.append({layer.keys.untyped_storage().data_ptr() for layer in layers})

    with monkeypatch.context() as patch:
        patch.setattr(private_apis, "is_recurrent", lambda model: True)
        recomputed = generate_samples(model, NumberTokenizer(), prompts, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(generation, "make_room", lambda cache, tokens: None)
        joined = generate_samples(model, NumberTokenizer(), prompts, **settings)
    handle = model.register_forward_hook(look, with_kwargs=True)
    assert generate_samples(model, NumberTokenizer(), prompts, **settings) == joined == recomputed
    handle.remove()
    assert len(memory) == 20 and len(set().union(*memory[1:])) == len(memory[1]), "keys moved to other memory"


def test_the_host_waits_for_the_device_once_every_few_tokens(monkeypatch):
    model, prompts, settings = make_model(), make_prompts(9, 3, 5), {"max_new_tokens": 40, "temperature": 1.5}
    model.generation_config.eos_token_id = [2, *range(10, 16)]
    every = generate_samples(model, NumberTokenizer(), prompts, **settings)
    assert 3 < max(len(sample.split()) for sample in every) < 16  # they end before the last token
    monkeypatch.setitem(generation.TOKENS_BETWEEN_LOOKS, "cpu", 16)
    with Waits() as waits:
        assert generate_samples(model, NumberTokenizer(), prompts, **settings) == every
    # The library asks twice in the first pass whether the prompts are padded.
    assert waits.names == ["_local_scalar_dense"] * (2 + 1)


class Waits(private_apis.dispatch_mode()):
    """Operations whose result the host reads, so that on a GPU it waits for all that is queued."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_the_models_own_generation_settings_change_nothing():
    model, settings = make_model(), {"temperature": 0.8, "max_new_tokens": 15}
    before = generate_samples(model, NumberTokenizer(), make_prompts(9, 3), **settings)
    model.generation_config.update(repetition_penalty=2.0, top_k=1, suppress_tokens=list(range(3, 20)))
    assert generate_samples(model, NumberTokenizer(), make_prompts(9, 3), **settings) == before


def test_leaves_random_state_and_modes_alone():
    model = make_model(attention_dropout=0.5).train()
    model.lm_head.eval()
    state = torch.get_rng_state()
    first = generate_samples(model, NumberTokenizer(), make_prompts(5, 3), max_new_tokens=8)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and model.model.training and not model.lm_head.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert generate_samples(model, NumberTokenizer(), make_prompts(5, 3), max_new_tokens=8) == first


def test_padded_vocabulary_is_never_sampled():
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[30:] *= 20  # without care these rows win
    samples = generate_samples(model, NumberTokenizer(30), make_prompts(5, 3, 9), max_new_tokens=20)
    assert samples and all(int(token) < 30 for sample in samples for token in sample.split())


def test_prompts_are_cut_to_the_positions_of_the_model_with_a_notice():
    model, notices = make_model("gpt2", max_position_embeddings=16, n_positions=16), []
    prompts = make_prompts(30, 4)
    samples = generate_samples(
        model, NumberTokenizer(), prompts, temperature=0, max_new_tokens=10, notice=notices.append
    )
    assert len(notices) == 1 and "1 of 2 prompts" in notices[0] and "16 positions" in notices[0]
    assert (
        samples[0] == generate_samples(model, NumberTokenizer(), [prompts[0][-6:]], temperature=0, max_new_tokens=10)[0]
    )
    notices.clear()
    generate_samples(model, NumberTokenizer(), prompts, max_new_tokens=99, notice=notices.append)
    assert "lowered to 15" in notices[0]


def test_stops_at_every_end_token():
    model, tokenizer = make_model(), NumberTokenizer()
    model.generation_config.eos_token_id = [2, 7]
    tokenizer.get_vocab = lambda: {"<|im_end|>": 9, "<|eot_id|>": 11, "x": 39}
    tokenizer.chat_template = "{{ '<|im_end|>' }}"
    assert generation.stop_token_ids(model, tokenizer) == {2, 7, 9}
    samples = generate_samples(model, tokenizer, make_prompts(*[4] * 12), max_new_tokens=30, temperature=3.0)
    assert any(len(sample.split()) < 30 for sample in samples)
    assert not any(token in ("7", "9") for sample in samples for token in sample.split())


def test_empty_prompt_and_no_prompts():
    model = make_model()
    empty, bos = (
        generate_samples(model, NumberTokenizer(), [p], max_new_tokens=5)[0] for p in (np.array([], int), np.array([1]))
    )
    assert empty == bos
    assert generate_samples(model, NumberTokenizer(), []) == []


def test_choose_tokens_follows_the_distribution_and_top_p():
    logits = torch.log(torch.tensor([[0.5, 0.0, 0.3, 0.2]])).expand(4000, -1)
    uniform = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    assert torch.bincount(choose_tokens(logits, uniform, 1.0, 1.0), minlength=4).tolist() == [2000, 0, 1200, 800]
    assert torch.bincount(choose_tokens(logits, uniform, 1.0, 0.7), minlength=4).tolist() == [2500, 0, 1500, 0]
    assert set(choose_tokens(logits, uniform, 1.0, 0.1).tolist()) == {0}
    edge = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert choose_tokens(logits[:2], edge, 1.0, 1.0).tolist() == [0, 3]
    assert (
        choose_tokens(torch.full((1, 4), torch.nan), edge[:1], 1.0, 1.0).item() < 4
    )  # a broken model breaks elsewhere, not here


def test_decoding_keeps_a_leading_space():
    words = {5: " cat", 6: " sat"}

    def decode(ids, skip_special_tokens):  # as sentencepiece does
        return "".join(words[i] for i in ids).lstrip()

    assert generation.decode(SimpleNamespace(decode=decode), np.array([5]), [6]) == " sat"


@pytest.mark.parametrize("setting", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"max_new_tokens": 0}])
def test_settings_out_of_range(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        generate_samples(make_model(), NumberTokenizer(), make_prompts(3), **setting)


def sample_sharded(rank: int, size: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    model = make_model()
    # One block gathers its parameters in each forward, so that an unequal number of forwards hangs; the other and the
    # root keep them, so that parameters left gathered are seen.
    for block, again in zip(model.model.layers, (True, False)):
        fully_shard(block, reshard_after_forward=again)
    fully_shard(model)
    world = World(rank=rank, size=size)
    # Five prompts over two ranks in batches of two: rank 1 has a dummy batch at the end; texts end at different steps.
    samples = generate_samples(model, NumberTokenizer(), make_prompts(*LENGTHS), batch_size=2, world=world, **SETTINGS)
    none = generate_samples(
        model, NumberTokenizer(), make_prompts(4), batch_size=2, world=world, **SETTINGS
    )  # rank 1 has no prompt
    sharded = all(isinstance(parameter, torch.distributed.tensor.DTensor) for parameter in model.parameters())
    torch.save((samples, none, sharded), os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


LENGTHS, SETTINGS = (9, 3, 5, 2, 7), {"temperature": 1.5, "max_new_tokens": 30, "seed": 1}


def test_two_processes_on_a_sharded_model_sample_what_one_process_does(tmp_path):
    mp.start_processes(sample_sharded, (2, str(tmp_path)), nprocs=2, start_method="spawn")
    one = generate_samples(make_model(), NumberTokenizer(), make_prompts(*LENGTHS), **SETTINGS)
    assert len({len(sample.split()) for sample in one}) > 2  # they do end at different steps
    for rank in range(2):
        samples, none, sharded = torch.load(tmp_path / f"{rank}.pt")
        assert samples == one
        assert none == generate_samples(make_model(), NumberTokenizer(), make_prompts(4), **SETTINGS)
        assert sharded, "parameters were left gathered"
