"""Weights read into shards: from every kind of file, and what is refused before any weight is read."""

import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from model_folders import as_bin, cut
from runs import FSDP, LLAMA, placement, save_model, settings_of, train

from data.batching import PromptUnit, pack, pad
from modeling import loading
from modeling.attention import use_attention
from parallel import build
from parallel.placement import make_placement
from parallel.weights import count_held
from utils import World

# ---- Loading --------------------------------------------------------------------------------------------------------

UNITS = [
    PromptUnit(
        0,
        0,
        torch.arange(5, 12).numpy().astype("int32"),
        [torch.arange(a, b).numpy().astype("int32") for a, b in ((20, 29), (40, 45), (60, 71))],
        [0, 1, 2],
        [(0, 1), (0, 2)],
    )
]


def logps_of(model, plain=False):
    use_attention(model, "plain" if plain else "packed_sdpa", False)
    with torch.no_grad():
        return model.response_logps(pad(UNITS, 0) if plain else pack(UNITS)).clone()


def load_sharded(world, folder, options, frozen=False):
    """Log-probs of a freshly loaded sharded model, how it was read, and the largest share of a rank."""
    config = settings_of(folder, *options, f"world_size={world.size}")
    tokenizer = loading.load_tokenizer(config)
    model = make_placement(config, world).build_model(config, tokenizer, torch.float32, frozen)
    return logps_of(model), model.loaded_from, count_held(model)


KINDS = ("llama", "llama_tied", "gpt_neox", "gpt2", "gptj", "gemma", "qwen3")


@pytest.mark.parametrize("form", ["safetensors", "shards", "bin", "policy.pt", "hf archive"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_scores_as_the_whole_one(folder, pools, tmp_path, kind, form):
    model = save_model(tmp_path / "model", kind, **({"max_shard_size": "60KB"} if form == "shards" else {}))
    options = [
        "model=blank_model",
        f"model.name_or_path={tmp_path}/model",
        *FSDP,
        "max_length=128",
        "max_prompt_length=64",
    ]
    if form == "shards":
        assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    if form == "bin":
        from safetensors.torch import load_file

        torch.save(load_file(tmp_path / "model" / "model.safetensors"), tmp_path / "model" / "pytorch_model.bin")
        (tmp_path / "model" / "model.safetensors").unlink()
    if form in ("policy.pt", "hf archive"):  # of the model that an archive was trained from no weight is read
        cut(tmp_path / "model" / "model.safetensors")
    if form == "policy.pt":
        model = save_model(tmp_path / "other", kind, seed=1)
        torch.save({"step_idx": 1, "state": model.state_dict(), "metrics": {}}, tmp_path / "policy.pt")
        options.append(f"model.archive={tmp_path}/policy.pt")
    if form == "hf archive":
        model = save_model(tmp_path / "other", kind, seed=1)
        options.append(f"model.archive={tmp_path}/other")
    if kind == "gpt_neox" and form == "safetensors":
        from safetensors import safe_open

        with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
            assert "embed_out.weight" in file.keys()
    expected = logps_of(model)
    for found, how, (part, whole) in pools(2).run(load_sharded, folder, options):
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-6), (found, expected)
        assert ("each rank read its own part" in how) is (form != "bin"), how
        assert part < 0.6 * whole


def test_a_frozen_model_and_one_in_host_memory_load_the_same(folder, pools, tmp_path):
    model = save_model(tmp_path / "model", "llama_tied")
    options = ["model=blank_model", f"model.name_or_path={tmp_path}/model", *FSDP]
    for more, frozen in (([], True), (["fsdp.cpu_offload=true"], False)):
        for found, _, _ in pools(2).run(load_sharded, folder, [*options, *more], frozen):
            assert torch.allclose(found, logps_of(model), atol=1e-4)


@pytest.mark.parametrize("formats", ["state", "policy", "hf"])
def test_a_run_folder_is_all_that_is_read_of_it_and_its_base(folder, pools, tmp_path, formats):
    base = save_model(tmp_path / "model", "llama_tied")
    named = ["model=blank_model", f"model.name_or_path={tmp_path}/model"]
    run = train(
        folder, *named, "n_examples=4", "lr=1e-2", "warmup_steps=0", "debug=false", f"checkpoint.formats=[{formats}]"
    )
    cut(tmp_path / "model" / "model.safetensors")
    options = [*named, f"model.archive={run.run_dir}", "max_length=128", "max_prompt_length=64"]
    for sharding in ("FULL_SHARD", "TP"):
        for found, how, (part, whole) in pools(2).run(load_sharded, folder, [*options, *placement(sharding, 2)]):
            base.load_state_dict(run.weights)
            assert torch.allclose(found, logps_of(base), atol=1e-4, rtol=1e-6) and part < 0.8 * whole
            assert "each rank read its own part" in how
    config = settings_of(folder, *options)
    alone = loading.load_model(config, loading.load_tokenizer(config), torch.float32, "cpu")
    assert all(torch.equal(run.weights[name], value) for name, value in alone.state_dict().items())
    assert alone.lm_head.weight is alone.model.embed_tokens.weight


def load_slowly(world, folder, options, store):
    """As load_sharded, where rank 0 takes longer to load than a collective of training may wait."""
    dist.destroy_process_group()
    limit = timedelta(seconds=2)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size, timeout=limit
    )
    load = loading.load_model

    def slow(*arguments):
        time.sleep(4)
        return load(*arguments)

    with patch.object(loading, "load_model", slow):
        return load_sharded(world, folder, options)


def test_loading_may_take_longer_than_a_collective_of_training(folder, pools, tmp_path):
    model = save_model(tmp_path / "model", "llama")
    as_bin(tmp_path / "model")
    options = ["model=blank_model", f"model.name_or_path={tmp_path}/model", *FSDP]
    for found, how, _ in pools(2).run(load_slowly, folder, options, str(tmp_path / "store")):
        assert torch.allclose(found, logps_of(model), atol=1e-4) and "rank 0 read" in how


FALCON_H1 = (
    "model=blank_model",
    "model.name_or_path=falcon_h1",
    "model.random_config={model_type:falcon_h1,hidden_size:64,intermediate_size:128,num_hidden_layers:2,"
    "num_attention_heads:4,num_key_value_heads:2,mamba_d_ssm:128,mamba_n_heads:4,mamba_d_head:32,mamba_d_state:16,"
    "ssm_multipliers:[0.5,0.6,0.7,0.8,0.9]}",
)


def load_plain(world, folder, options):
    config = settings_of(folder, *options, *([f"world_size={world.size}"] if world.size > 1 else []))
    model = make_placement(config, world).build_model(config, loading.load_tokenizer(config), torch.float32)
    return logps_of(model, plain=True)


def test_buffers_that_a_model_computes_for_all_its_layers_are_right_when_sharded(folder, pools):
    expected = load_plain(World(), folder, FALCON_H1)
    for found in pools(2).run(load_plain, folder, [*FALCON_H1, *FSDP]):
        assert torch.allclose(found, expected, atol=1e-4)


def refuse_to_load(world, folder, options):
    """The message of an error that comes before weights are read."""

    def no(*arguments):
        raise AssertionError("weights were read")

    with patch.object(build, "load_weights", no), pytest.raises(ValueError) as problem:
        load_sharded(world, folder, options)
    return str(problem.value)


def test_a_wrong_block_name_lists_those_there_are(folder, pools, tmp_path):
    save_model(tmp_path / "model", "gpt_neox")
    options = ["model=blank_model", f"model.name_or_path={tmp_path}/model", *FSDP]
    for message in pools(2).run(refuse_to_load, folder, [*options, "model.block_name=GPTNeoXBlock"]):
        assert "model.block_name='GPTNeoXBlock'" in message and "GPTNeoXLayer" in message


def test_a_model_without_a_plan_cannot_be_split(folder, pools, tmp_path):
    save_model(tmp_path / "model", "gpt2")
    options = [
        "model=blank_model",
        f"model.name_or_path={tmp_path}/model",
        "trainer=TensorParallelTrainer",
        "tp_size=2",
    ]
    for message in pools(2).run(refuse_to_load, folder, options):
        assert "no tensor-parallel plan" in message and "FSDPTrainer" in message


def test_an_archive_that_does_not_fit_is_refused_on_all_ranks(folder, pools, tmp_path):
    save_model(tmp_path / "model", "gpt_neox")
    torch.save({"state": {"nonsense": torch.zeros(2)}}, tmp_path / "policy.pt")
    options = [
        "model=blank_model",
        f"model.name_or_path={tmp_path}/model",
        *FSDP,
        f"model.archive={tmp_path}/policy.pt",
    ]
    with pytest.raises(ValueError, match="does not fit the model"):
        pools(2).run(load_sharded, folder, options)


def test_a_tensor_parallel_rank_holds_its_part_of_the_matrices(folder, pools):
    shares = [
        held[0] / held[1]
        for _, _, held in pools(2).run(
            load_sharded, folder, [*LLAMA, *placement("TP", 2), "max_length=128", "max_prompt_length=64"]
        )
    ]
    # All but embeddings and norms is split: of this model, the blocks' 81,920 numbers of 98,816.
    assert shares == [pytest.approx(1 - 0.5 * 81_920 / 98_816, abs=1e-3)] * 2
