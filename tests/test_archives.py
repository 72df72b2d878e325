"""Weights from every kind of file that people have, and the refusal of all others."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_folders import pointer
from safetensors.torch import save_file

from checkpoint import archives
from checkpoint.archives import locate, read_fitting, read_state_dict
from checkpoint.checkpointer import Checkpointer
from checkpoint.hf_folder import write_hf_folder
from checkpoint.names import check_keys
from data.text_encoding import TextEncoder
from modeling.export import export
from modeling.loading import byte_tokenizer, load_tokenizer
from settings import complete, from_dict
from utils import World

ROOT = Path(__file__).resolve().parent.parent


def tiny(family="llama", seed=0, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = dict(vocab_size=259, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    if family == "gpt2":
        sizes = dict(vocab_size=259, n_embd=16, n_layer=2, n_head=2)
    else:
        sizes["tie_word_embeddings"] = family == "llama"
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **changes}))


def saved_run(folder, model, formats=("state", "policy", "hf"), tokenizer=None, steps=(1,)):
    settings = SimpleNamespace(
        formats=list(formats), keep_last=None, keep_best=False, best_metric=None, async_save=False
    )
    checkpointer = Checkpointer(folder, settings, World())
    for step in steps:
        assert checkpointer.save(step, model, None, tokenizer, {}) is None
    checkpointer.close()
    return Path(folder)


def equal(model, other):
    one, two = model.state_dict(), other.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def sources(model, folder):
    """{kind: path} of every form in which the model's weights may lie about."""
    state = model.state_dict()
    run = saved_run(folder / "run", model)
    only_state = saved_run(folder / "only_state", model, ["state"])
    only_hf = saved_run(folder / "only_hf", model, ["hf"])
    torch.save({"step_idx": 19968, "state": state, "metrics": {"loss/eval": 0.6}}, folder / "theirs.pt")
    torch.save(state, folder / "bare.pt")
    torch.save(state, folder / "old.bin", _use_new_zipfile_serialization=False)
    torch.save({"module": {"module." + name: tensor for name, tensor in state.items()}}, folder / "parallel.pt")
    save_file({"module." + name: value.clone() for name, value in state.items()}, folder / "parallel.safetensors")
    torch.save({"state_dict": {"_orig_mod." + name: tensor for name, tensor in state.items()}}, folder / "compiled.pt")
    model.save_pretrained(folder / "hf")
    model.save_pretrained(folder / "hf_sharded", max_shard_size="8KB")
    assert (folder / "hf_sharded" / "model.safetensors.index.json").exists()
    (folder / "hf_bin").mkdir()
    torch.save(archives.read_state_dict(folder / "hf"), folder / "hf_bin" / "pytorch_model.bin")
    return {
        "policy.pt": run / "step-1" / "policy.pt",
        "step folder": run / "step-1",
        "run folder": run,
        "their policy.pt": folder / "theirs.pt",
        "bare": folder / "bare.pt",
        "before torch 1.6": folder / "old.bin",
        "compiled": folder / "compiled.pt",
        "DistributedDataParallel": folder / "parallel.pt",
        "DistributedDataParallel, safetensors": folder / "parallel.safetensors",
        "hf": folder / "hf",
        "hf sharded": folder / "hf_sharded",
        "hf bin": folder / "hf_bin",
        "safetensors": folder / "hf" / "model.safetensors",
        "state only": only_state,
        "state folder": only_state / "step-1" / "state",
        "hf only": only_hf,
        "hf in step": run / "step-1" / "hf",
    }


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_every_kind_of_archive_loads(tmp_path, family):
    model = tiny(family)
    for kind, path in sources(model, tmp_path).items():
        other = tiny(family, seed=1)
        assert not equal(model, other)
        other.load_state_dict(read_fitting(other, path))
        assert equal(model, other), kind


def test_a_run_folder_means_its_latest_step(tmp_path):
    run = saved_run(tmp_path, tiny(), ["policy"], steps=(1, 2))
    assert locate(run) == ("torch", run / "step-2" / "policy.pt")
    os.unlink(run / "LATEST")
    assert locate(run) == ("torch", run / "step-2" / "policy.pt")
    (run / "LATEST").write_text("step-1\n")  # a file system without links
    assert locate(run) == ("torch", run / "step-1" / "policy.pt")
    with pytest.raises(ValueError, match="no complete checkpoint"):
        (tmp_path / "empty_run" / "step-3.tmp").mkdir(parents=True)
        locate(tmp_path / "empty_run")


def test_damage_is_found_by_checksum_and_the_step_before_offered(tmp_path):
    run = saved_run(tmp_path, tiny(), ["policy", "hf", "state"], steps=(1, 2))
    policy = run / "step-2" / "policy.pt"
    content = bytearray(policy.read_bytes())
    content[len(content) // 2] ^= 1
    policy.write_bytes(content)
    for path in (run, run / "step-2", policy):
        with pytest.raises(ValueError, match="damaged .*checksum.*use the step before it: .*step-1"):
            read_state_dict(path)
    assert read_state_dict(run / "step-2" / "hf") and read_state_dict(run / "step-1")
    weights = run / "step-2" / "hf" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 4)
    for path in (weights, weights.parent):
        with pytest.raises(ValueError, match="damaged"):
            read_state_dict(path)


def test_a_file_is_mapped_not_copied(tmp_path):
    torch.save({"state": {"weight": torch.zeros(50_000_000, dtype=torch.int8)}}, tmp_path / "big.pt")
    before = resident()
    state = read_state_dict(tmp_path / "big.pt")
    assert state["weight"].shape == (50_000_000,) and resident() - before < 25e6


def resident():
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Evil:
    def __reduce__(self):
        return os.system, ("touch EVIL",)


def test_files_that_are_no_archives_are_refused_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = tmp_path / "good.pt"
    torch.save({"state": tiny().state_dict()}, good)
    torch.save({"state": Evil()}, "evil.pt")
    torch.save(tiny(), "whole_model.pt")
    (tmp_path / "evil.bin").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:-1000])
    torch.save({"state": tiny().state_dict()}, "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "cut_old.pt").write_bytes((tmp_path / "old.pt").read_bytes()[:-1000])
    (tmp_path / "text.pt").write_text("no weights here\n")
    (tmp_path / "empty.pt").write_text("")
    torch.save([1, 2], "list.pt")
    torch.save({}, "nothing.pt")
    torch.save({"state": {"a": torch.ones(1), "b": 3}}, "mixed.pt")
    (tmp_path / "text.safetensors").write_text("no")
    (tmp_path / "folder").mkdir()
    pointer(tmp_path / "pointer.pt")
    pointer(tmp_path / "pointer.safetensors")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    for name, reason in {
        "evil.pt": "refused: .*run code",
        "whole_model.pt": "refused: .*state dict alone",
        "evil.bin": "refused|truncated",
        "cut.pt": "truncated",
        "cut_old.pt": "truncated",
        "text.pt": "truncated or no",
        "empty.pt": "truncated or no",
        "list.pt": "no state dict",
        "nothing.pt": "no state dict",
        "mixed.pt": "not tensors: b",
        "text.safetensors": "no safetensors",
        "folder": "is no archive",
        "pointer.pt": "git lfs pull",
        "pointer.safetensors": "git lfs pull",
        "adapter": "adapter .PEFT. of someone/base",
        "nowhere.pt": "no archive at",
    }.items():
        with pytest.raises(ValueError, match=reason):
            read_state_dict(name)
    assert not (tmp_path / "EVIL").exists()


def test_an_index_cannot_lead_out_of_its_folder_and_must_be_whole(tmp_path):
    tiny().save_pretrained(tmp_path, max_shard_size="8KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = next(iter(content["weight_map"]))
    (tmp_path / content["weight_map"][first]).unlink()
    with pytest.raises(ValueError, match="lacks model-0000.*copy it again"):
        read_state_dict(tmp_path)
    content["weight_map"][first] = "../outside.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="outside its folder"):
        read_state_dict(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="no readable index"):
        read_state_dict(tmp_path)


def test_keys_that_do_not_fit_are_listed(tmp_path):
    model = tiny("gpt_neox")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: tensor + 1 for name, tensor in before.items()}
    del state["gpt_neox.final_layer_norm.bias"]
    state["gpt_neox.embed_in.weight"] = torch.zeros(260, 16)
    state["gpt_neox.layers.0.more"] = torch.zeros(1)
    torch.save({"state": state}, tmp_path / "policy.pt")
    with pytest.raises(ValueError) as refused:
        read_fitting(model, tmp_path / "policy.pt")
    text = str(refused.value)
    assert "missing (1): gpt_neox.final_layer_norm.bias" in text and "extra (1): gpt_neox.layers.0.more" in text
    assert "gpt_neox.embed_in.weight (260, 16) where the model has (259, 16)" in text
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match=r"and \d+ more"):
        check_keys(tiny(num_hidden_layers=4), {"x": torch.zeros(1)})


def test_buffers_and_names_of_older_files_are_understood():
    neox = tiny("gpt_neox")
    state = dict(neox.state_dict())
    state["embed_out.weight"] = state.pop("lm_head.weight")  # its name in memory, too, before transformers 5
    for n in range(2):
        state[f"gpt_neox.layers.{n}.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        state[f"gpt_neox.layers.{n}.attention.masked_bias"] = torch.tensor(-1e9)
        state[f"gpt_neox.layers.{n}.attention.rotary_emb.inv_freq"] = torch.ones(4)
    assert check_keys(neox, state).keys() == neox.state_dict().keys()
    gpt2 = tiny("gpt2")
    state = dict(gpt2.state_dict())
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    state["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)
    del state["lm_head.weight"]
    assert check_keys(gpt2, state).keys() == gpt2.state_dict().keys()
    llama = tiny()
    state = {**llama.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert check_keys(llama, state).keys() == llama.state_dict().keys()
    with pytest.raises(ValueError, match="extra"):  # a learned bias is not a harmless buffer
        check_keys(llama, {**llama.state_dict(), "model.layers.0.self_attn.q_proj.bias": torch.ones(16)})


def test_weights_tied_in_the_model_may_not_differ_in_the_file():
    state = dict(tiny().state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="differ, but are one weight"):
        check_keys(tiny(), state)
    state = dict(tiny().state_dict())
    del state["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing \(1\): lm_head.weight"):
        check_keys(tiny(tie_word_embeddings=False), state)


def test_a_hugging_face_folder_is_one_of_plain_weights(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny().to(torch.bfloat16)
    model.config.quantization_config = {"quant_method": "gguf"}
    model.generation_config.temperature = 0.5  # with do_sample false: transformers refuses to save that
    write_hf_folder(model, model.state_dict(), byte_tokenizer(), tmp_path / "hf")
    assert model.config.quantization_config and not model.generation_config.do_sample
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert opened.dtype == torch.bfloat16 and equal(model, opened)
    assert not hasattr(opened.config, "quantization_config")
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids).endswith("assistant\n")
    assert os.stat(tmp_path / "hf" / "model.safetensors").st_mode == os.stat(tmp_path / "hf" / "config.json").st_mode
    with pytest.raises(ValueError, match="no transformers model"):
        write_hf_folder(torch.nn.Linear(1, 1), {}, None, tmp_path / "no")


@pytest.mark.parametrize("special", [True, False])
def test_generation_stops_where_the_model_was_trained_to_stop(tmp_path, special):
    """hf/ and exports list the end of a turn among the ends, and carry the run's chat template."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|stop|>"], special_tokens=special)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    template = tokenizer.chat_template.replace("<|im_end|>", "<|stop|>")
    chat = {"model": {"name_or_path": str(tmp_path / "tokenizer")}, "data": {"chat_template": template}}
    model = tiny(vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = 5
    model.config.save_pretrained(tmp_path / "tokenizer")
    run = saved_run(tmp_path / "run", model, tokenizer=load_tokenizer(from_dict(complete(chat))))
    bare = tmp_path / "bare" / "policy.pt"
    bare.parent.mkdir()
    shutil.copy(run / "step-1" / "policy.pt", bare)
    chat["model"] = {"name_or_path": str(run / "step-1" / "hf"), "tokenizer_name_or_path": str(tmp_path / "tokenizer")}
    (bare.parent / "config.yaml").write_text(json.dumps(chat))
    (run / "config.yaml").write_text(json.dumps(chat))
    folders = [
        run / "step-1" / "hf",
        export(run, tmp_path / "a"),
        export(run, tmp_path / "b", base=str(tmp_path / "tokenizer")),
        export(bare, tmp_path / "c"),
        export(bare, tmp_path / "d", base=str(run / "step-1" / "hf")),
    ]
    for folder in folders:
        assert GenerationConfig.from_pretrained(folder).eos_token_id[-2:] == [tokenizer.eos_token_id, stop], folder
        assert AutoTokenizer.from_pretrained(folder).chat_template == template, folder
    assert GenerationConfig.from_pretrained(folders[0]).eos_token_id == [5, tokenizer.eos_token_id, stop]
    assert model.generation_config.eos_token_id == 5  # that of the model in training stays as it is


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_export(tmp_path, family):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny(family)
    run = saved_run(tmp_path / "run", model, tokenizer=byte_tokenizer())
    bare = tmp_path / "elsewhere" / "policy.pt"
    bare.parent.mkdir()
    shutil.copy(run / "step-1" / "policy.pt", bare)
    with pytest.raises(ValueError, match="--base"):
        export(bare, tmp_path / "out")
    hf = run / "step-1" / "hf"
    exported = [
        export(run, tmp_path / "a"),
        export(run / "step-1" / "policy.pt", tmp_path / "b"),
        export(bare, tmp_path / "c", base=str(hf)),
        export(hf, tmp_path / "d"),
    ]
    # a run with weights only: its config.yaml names the model
    config = f"model: {{name_or_path: {run}/LATEST/hf}}\nloss: {{name: sft}}\ndata: {{chat_template: null}}\n"
    (bare.parent / "config.yaml").write_text(config)
    exported.append(export(bare, tmp_path / "e"))
    only_state = saved_run(tmp_path / "only_state", model, ["state"])
    shutil.copy(bare.parent / "config.yaml", only_state)
    exported.append(export(only_state, tmp_path / "f"))
    for folder in exported:
        assert equal(model, AutoModelForCausalLM.from_pretrained(folder)), folder
        assert AutoTokenizer.from_pretrained(folder).chat_template
    half = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "half", "bfloat16"), dtype="auto")
    assert half.dtype == torch.bfloat16 and torch.equal(
        half.state_dict()["lm_head.weight"], model.state_dict()["lm_head.weight"].bfloat16()
    )
    for arguments, reason in (
        ((run, tmp_path / "a"), "not empty"),
        ((run, tmp_path / "x", "int8"), "dtype int8"),
        ((tmp_path / "nowhere", tmp_path / "x"), "no archive"),
    ):
        with pytest.raises(ValueError, match=reason):
            export(*arguments)
    assert not list(tmp_path.glob("*.tmp"))


def test_the_tokenizer_is_exported_as_it_came(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tiny().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    torch.save({"state": tiny(seed=1).state_dict()}, tmp_path / "policy.pt")
    exported = export(tmp_path / "policy.pt", tmp_path / "out", base=str(tmp_path / "base"))
    assert AutoTokenizer.from_pretrained(exported).pad_token is None
    with_padding = AutoTokenizer.from_pretrained(exported)
    with_padding.pad_token = with_padding.eos_token  # caches made by earlier versions are found again
    assert TextEncoder(AutoTokenizer.from_pretrained(exported)).digest() == TextEncoder(with_padding).digest()


def test_an_incomplete_folder_is_not_exported(tmp_path):
    tiny(tie_word_embeddings=False).model.save_pretrained(tmp_path / "headless")
    byte_tokenizer().save_pretrained(tmp_path / "headless")
    with pytest.raises(ValueError, match=r"missing \(1\): lm_head.weight"):
        export(tmp_path / "headless", tmp_path / "out")


def test_the_export_script(tmp_path):
    run = saved_run(tmp_path / "run", tiny(), ["hf"], byte_tokenizer())
    command = [sys.executable, str(ROOT / "scripts" / "export")]
    done = subprocess.run(
        [*command, str(run), str(tmp_path / "out"), "--dtype", "float16"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("out"), done.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    done = subprocess.run([*command, str(tmp_path / "no"), str(tmp_path / "x")], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: no archive") and "Traceback" not in done.stderr
