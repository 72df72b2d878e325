"""Folders that hold no complete causal language model, and models that do not fit the run: one message, before anything
is loaded, from every trainer.
"""

from __future__ import annotations

import json
import re

import architectures
import pytest
import torch
from model_folders import Folders, as_bin, cut, edit_config, edit_weights, pointer
from runs import FSDP, PLACEMENTS, save_model, settings_of, train

from modeling import loading
from modeling.model_check import check_model, learned_positions
from parallel.placement import make_placement
from planning.command import make_plan


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("models"))


def config_of(folder, model, *more):
    return settings_of(folder, "model=blank_model", f"model.name_or_path={model}", *more)


def checked(config):
    return check_model(config, loading.load_tokenizer(config))


def refused(config) -> str:
    """The one message about a model, from the check before the data and, alike, from loading it."""
    with pytest.raises(ValueError) as early:
        checked(config)
    return str(early.value)


# ---- Weights that are not the model's -------------------------------------------------------------------------------


def without_head(folder):
    architectures.make("llama", vocab_size=259).model.save_pretrained(folder)


def for_classification(folder):
    from transformers import LlamaForSequenceClassification

    LlamaForSequenceClassification(architectures.settings("llama", vocab_size=259)).save_pretrained(folder)


MISFITS = {
    "headless": (without_head, "missing (1): lm_head.weight"),
    "classifier": (for_classification, "missing (1): lm_head.weight; extra (1): score.weight"),
    "fewer layers stored": (
        lambda f: edit_config(f, num_hidden_layers=3, layer_types=None),
        "missing (9): model.layers.2",
    ),
    "more layers stored": (
        lambda f: edit_config(f, num_hidden_layers=1, layer_types=None),
        "extra (9): model.layers.1",
    ),
    "other widths": (lambda f: edit_config(f, intermediate_size=96), "(128, 64) where the model has (96, 64)"),
    "a bias that is not configured": (
        lambda f: edit_weights(f, lambda s: s.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})),
        "extra (1): model.layers.0.self_attn.q_proj.bias",
    ),
    "an adapter that is not merged": (
        lambda f: edit_weights(f, lambda s: s.update({"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 64)})),
        "extra (1): model.layers.0.mlp.up_proj.lora_A.weight",
    ),
}


@pytest.mark.parametrize("stored", ["safetensors", "bin"])
@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_are_not_the_models_are_refused_by_name(folder, folders, case, stored):
    spoil, words = MISFITS[case]
    model = folders()
    spoil(model)
    if stored == "bin":
        as_bin(model)
    config = config_of(folder, model)
    assert words in refused(config)
    with pytest.raises(ValueError) as problem:
        loading.load_model(config, None, torch.float32, "cpu")
    assert words in str(problem.value)


def build(world, folder, *options):
    config = settings_of(folder, *options, f"world_size={world.size}")
    with pytest.raises(ValueError) as problem:
        make_placement(config, world).build_model(config, loading.load_tokenizer(config), torch.float32)
    return str(problem.value)


@pytest.mark.parametrize("name", ["FULL_SHARD", "TP"])
def test_sharded_trainers_refuse_the_same_weights(folder, folders, pools, name):
    options = [option.format(size=2) for option in PLACEMENTS[name]]
    for case in ("headless", "fewer layers stored", "more layers stored", "a bias that is not configured"):
        spoil, words = MISFITS[case]
        model = folders()
        spoil(model)
        named = "model=blank_model", f"model.name_or_path={model}"
        assert all(words in message for message in pools(2).run(build, folder, *named, *options)), case


def test_missing_weights_end_a_run_before_its_data_is_read(folder, folders, monkeypatch):
    from training import preparation

    model = folders()
    without_head(model)
    monkeypatch.setattr(preparation, "load_datasets", None)
    with pytest.raises(ValueError, match=r"missing \(1\): lm_head.weight"):
        train(folder, "model=blank_model", f"model.name_or_path={model}")


def different_head(folder):
    edit_weights(folder, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"] * 2}))


def equal_head(folder):
    edit_weights(folder, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}))


def test_tied_embeddings_may_be_absent_or_stored_twice_and_may_not_differ(folder, folders, pools):
    model = folders("llama_tied")
    config = config_of(folder, model)
    checked(config)
    equal_head(model)
    checked(config)
    whole = loading.load_model(config, None, torch.float32, "cpu")
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    different_head(model)
    assert "tie_word_embeddings" in refused(config)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        loading.load_model(config, None, torch.float32, "cpu")
    named = "model=blank_model", f"model.name_or_path={model}"
    assert all("tie_word_embeddings" in message for message in pools(2).run(build, folder, *named, *FSDP))
    edit_config(model, tie_word_embeddings=False)
    checked(config)


def test_parts_of_another_kind_are_left_unread_and_named(folder, folders):
    model = folders()
    edit_weights(model, lambda state: state.update({"v_head.summary.weight": torch.ones(3)}))
    checked(config_of(folder, model))
    notices = train(folder, "model=blank_model", f"model.name_or_path={model}", "n_examples=4").notices
    assert any("left unread: v_head.summary.weight" in notice for notice in notices)


@pytest.mark.parametrize("kind", [kind for kind in architectures.KINDS if kind not in ("mamba", "bloom")])
def test_complete_models_pass(folder, folders, kind):
    assert checked(config_of(folder, folders(kind), "max_length=128", "max_prompt_length=64")).embeddings == 259


# ---- Files that are not whole ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["safetensors", "bin"])
@pytest.mark.parametrize("how", ["cut", "pointer", "empty", "absent"])
def test_damaged_weights_name_the_file_and_what_to_do(folder, folders, stored, how):
    model = folders()
    name = "model.safetensors"
    if stored == "bin":
        as_bin(model)
        name = "pytorch_model.bin"
    file = model / name
    {"cut": cut, "pointer": pointer, "empty": lambda f: f.write_bytes(b""), "absent": lambda f: f.unlink()}[how](file)
    message = refused(config_of(folder, model))
    words = {
        "cut": "cut off or damaged",
        "empty": "cut off or damaged",
        "pointer": "git lfs pull",
        "absent": "no weights",
    }
    assert name in message and words[how] in message and "hf download" not in message


def test_a_missing_shard_is_named(folder, folders):
    model = folders()
    loading.load_model(config_of(folder, model), None, torch.float32, "cpu").save_pretrained(
        model, max_shard_size="60KB"
    )
    (model / "model.safetensors").unlink()
    (model / "model-00002-of-00004.safetensors").unlink(missing_ok=True)
    shards = sorted(file.name for file in model.glob("model-*.safetensors"))
    (model / shards[-1]).unlink()
    assert shards[-1] in refused(config_of(folder, model))


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def write_gguf(file, model, leave_out=None):
    """A Llama as llama.cpp stores it, in float32."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in model.state_dict().items():
        layer, inner = re.match(r"(?:model\.layers\.(\d+)\.)?(.+)\.weight", name).groups()
        stored = f"{'' if layer is None else f'blk.{layer}.'}{GGUF_NAMES[inner]}.weight"
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(inner[-6:])
        if heads:  # its rotary halves lie side by side
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        if stored != leave_out:
            writer.add_tensor(stored, tensor.numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_read_whole_or_refused(folder, folders, tmp_path):
    model, file = architectures.make("llama", vocab_size=259), tmp_path / "model.gguf"
    write_gguf(file, model)
    config = config_of(folder, file, f"model.tokenizer_name_or_path={folders()}")
    checked(config)
    loaded = loading.load_model(config, loading.byte_tokenizer(), torch.float32, "cpu").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    cut(file, 0.9)
    assert "model.gguf" in refused(config) and "cut off or damaged" in refused(config)
    write_gguf(file, model, leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ValueError, match=r"missing \(1\): model.layers.1.mlp.up_proj.weight"):
        loading.load_model(config, loading.byte_tokenizer(), torch.float32, "cpu")
    for spoil, words in ((pointer, "git lfs pull"), (lambda file: file.write_bytes(b"GG"), "GGUF")):
        spoil(file)
        assert words in refused(config)


# ---- Folders that hold something else -------------------------------------------------------------------------------


def adapter(folder):
    for file in folder.iterdir():
        file.unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base", "peft_type": "LORA"}')
    (folder / "adapter_model.safetensors").write_bytes(b"")


def adapter_with_config(folder):
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base", "peft_type": "LORA"}')


def image_generator(folder):
    (folder / "config.json").unlink()
    (folder / "model_index.json").write_text("{}")


def run_folder(folder):
    (folder / "config.json").unlink()
    (folder / "step-20" / "hf").mkdir(parents=True)
    (folder / "LATEST").symlink_to("step-20")


def only_tokenizer(folder):
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)


def odd_tokenizer(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "long"}))


OTHER_FOLDERS = {
    "tokenizer of odd settings": (odd_tokenizer, ("cannot be loaded",)),
    "adapter": (adapter, ("someone/base", "merge_and_unload", "save_pretrained")),
    "adapter with a config.json": (adapter_with_config, ("someone/base", "merge_and_unload")),
    "image generator": (image_generator, ("diffusers",)),
    "run": (run_folder, ("model.archive=", "LATEST/hf")),
    "tokenizer": (only_tokenizer, ("holds a tokenizer", "config.json")),
    "config of no JSON": (lambda f: (f / "config.json").write_text("{"), ("config.json cannot be read",)),
    "unknown type": (lambda f: edit_config(f, model_type="llama9"), ("llama9", "transformers")),
    "its own code": (
        lambda f: edit_config(f, model_type="mine", auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}),
        ("model.trust_remote_code=true",),
    ),
    "no tokenizer": (
        lambda f: [(f / name).unlink(missing_ok=True) for name in ("tokenizer.json", "tokenizer_config.json")],
        ("holds no tokenizer", "model.tokenizer_name_or_path"),
    ),
    "tokenizer without a vocabulary": (lambda f: (f / "tokenizer.json").unlink(), ("tokenizer",)),
    "tokenizer pointer": (lambda f: pointer(f / "tokenizer.json"), ("tokenizer.json", "git lfs pull")),
}


@pytest.mark.parametrize("case", OTHER_FOLDERS)
def test_a_folder_of_something_else_says_what_it_is_and_what_to_give(folder, folders, case):
    spoil, words = OTHER_FOLDERS[case]
    model = folders()
    spoil(model)
    config = config_of(folder, model)
    message = refused(config)
    assert all(word in message for word in words) and "hf download" not in message, message
    with pytest.raises(ValueError) as problem:
        make_plan(config)
    assert str(problem.value) == message


def test_a_file_in_place_of_a_folder(folder, folders):
    model = folders()
    assert "model.archive=" in refused(config_of(folder, model / "model.safetensors"))


def config_only(folder, **values):
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    "values, words",
    [
        ({"model_type": "t5", "d_model": 16, "num_layers": 1}, "encoder-decoder"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "text together with images"),
        ({"model_type": "qwen2_vl"}, "text together with images"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "llama", "num_hidden_layers": 2**40}, "which no model has"),
        *(
            ({"model_type": "llama", "quantization_config": values}, "quantised weights")
            for values in (
                {"quant_method": "bitsandbytes", "load_in_4bit": True},
                {"load_in_8bit": True},
                {"quant_method": "gptq", "bits": 4},
                {"quant_method": "awq", "bits": 4},
                {"quant_method": "fp8"},
                {"quant_method": "compressed-tensors"},
                {"quant_method": "mxfp4"},
            )
        ),
    ],
)
def test_models_of_other_kinds_are_refused_by_what_they_are(folder, folders, values, words):
    model = folders()
    config_only(model, **values)
    message = refused(config_of(folder, model))
    assert words in message and str(model) in message and "hf download" not in message


# ---- Models that do not fit the run ---------------------------------------------------------------------------------


def test_token_ids_without_an_embedding_are_named(folder, tmp_path, monkeypatch):
    save_model(tmp_path / "model", "llama")
    tokenizer = loading.byte_tokenizer()
    tokenizer.add_tokens(["<|more|>", " bread"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = "model=blank_model", f"model.name_or_path={tmp_path}/model"
    other = f"model.tokenizer_name_or_path={tmp_path}/tokenizer"
    with pytest.raises(ValueError, match=r"data set .*: the tokenizer makes token ids .*260 .*it has 259"):
        train(folder, *options, other)
    train(folder, *options, f"model.tokenizer_name_or_path={tmp_path}/model", "n_examples=4")
    tokenizer.eos_token = "<|more|>"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = settings_of(folder, *options, other)
    assert "end-of-sequence token" in refused(config)
    with pytest.raises(ValueError, match="end-of-sequence token"):
        make_plan(config)


@pytest.mark.parametrize("kind, limit", [("gpt2", 64), ("opt", 64), ("gptj", 64), ("llama", None), ("gpt_neox", None)])
def test_rows_longer_than_the_positions_that_a_model_has_are_refused(folder, tmp_path, kind, limit):
    model = architectures.make(kind, vocab_size=259, max_position_embeddings=64)
    model.save_pretrained(tmp_path)
    loading.byte_tokenizer().save_pretrained(tmp_path)
    assert learned_positions(model) == limit
    config = config_of(folder, tmp_path, "max_length=65", "max_prompt_length=32")
    fits = config_of(folder, tmp_path, "max_length=64", "max_prompt_length=32")
    checked(fits)
    if limit is None:
        checked(config)
        return
    assert "set max_length=64 or less" in refused(config)
    with pytest.raises(ValueError, match="set max_length=64 or less"):
        make_plan(config)


@pytest.mark.parametrize(
    "option, words",
    [
        ("model_type=lama", "did you mean llama"),
        ("model_type=t5", "encoder-decoder"),
        ("hiden_size=64", "did you mean hidden_size"),
        ("num_layer=2", "no such key"),
        ("hidden_size=-4", "works"),
        ("hidden_size=abc", "hidden_size"),
        ("hidden_size=64.5", "hidden_size"),
        ("hidden_size=null", "hidden_size"),
        ("num_attention_heads=3", "works"),
        ("num_attention_heads=0", "works"),
        ("num_key_value_heads=3", "works"),
        ("num_hidden_layers=0", "block"),
        ("num_hidden_layers=1099511627776", "which no model has"),
        ("vocab_size=0", "works"),
        ("vocab_size=-1", "works"),
        ("hidden_act=relux", "relux"),
        ("rope_theta=x", "works"),
        ("max_position_embeddings=abc", "works"),
        ("tie_word_embeddings=7", "works"),
    ],
)
def test_random_configurations_that_make_no_model_are_refused(folder, option, words):
    config = settings_of(folder, "model=tiny", f"++model.random_config.{option}")
    with pytest.raises(ValueError) as problem:
        checked(config)
        loading.load_model(config, loading.byte_tokenizer(), torch.float32, "cpu")
    assert words in str(problem.value) and type(problem.value) is ValueError


def test_random_configurations_may_have_every_key_that_their_model_reads():
    for kind, values in architectures.KINDS.values():
        loading.random_model_config({"model_type": kind, **values}, loading.byte_tokenizer())
    made = loading.random_model_config({"model_type": "llama", "rope_theta": 123.0}, loading.byte_tokenizer())
    assert made.rope_parameters["rope_theta"] == 123.0


def test_models_that_are_built_before_their_weights_keep_the_generation_settings(folder, folders):
    """Sharded ones, and those that start from an archive."""
    model = folders()
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [0, 2]}))
    torch.save({"state": architectures.make("llama", vocab_size=259).state_dict()}, model / "other.pt")
    config = config_of(folder, model, f"model.archive={model}/other.pt")
    built = loading.build_on_meta(config, loading.model_config(config, None), torch.float32)
    loaded = loading.load_model(config, None, torch.float32, "cpu")
    assert built.generation_config.eos_token_id == loaded.generation_config.eos_token_id == [0, 2]
