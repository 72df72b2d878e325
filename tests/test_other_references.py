"""References other than the policy's start: another model, other weights, and one that follows the policy."""

from pathlib import Path

import pytest
import torch
from runs import FSDP, LLAMA, STRONG, assert_same_training, save_model, settings_of, train, train_in_two

SHORT = ("n_examples=20", "batch_size=5", "lr=1e-3", "warmup_steps=0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with data, and policy.pt of a run of the tiny model that learnt something."""
    from runs import write_data

    place = tmp_path_factory.mktemp("references")
    write_data(place / "data")
    run = train(place, *LLAMA, *SHORT, "debug=false", "checkpoint.formats=[policy]")
    return place, Path(run.run_dir, "LATEST", "policy.pt")


def margins(run):
    return [step["rewards_train/margins"] for step in run.steps]


def test_other_weights_as_reference_cached_or_online(trained):
    place, archive = trained
    options = (*LLAMA, *SHORT, f"reference.archive={archive}")
    cached, online = train(place, *options), train(place, *options, "reference.mode=online")
    assert_same_training(cached, online)
    assert abs(margins(cached)[0]) > 1e-3, "the policy is not its own reference"
    assert any("the reference is" in text and str(archive) in text for text in cached.notices)


@pytest.mark.parametrize("mode", ["cached", "online"])
@pytest.mark.parametrize("trainer", [(), FSDP])
def test_another_model_as_reference(trained, tmp_path, mode, trainer):
    place, _ = trained
    save_model(tmp_path / "neox", "gpt_neox")
    options = (*LLAMA, *SHORT, *trainer, f"reference.name_or_path={tmp_path / 'neox'}", f"reference.mode={mode}")
    run = train(place, *options, *(["world_size=1"] if trainer else []))
    assert abs(margins(run)[0]) > 1e-3
    baseline = train(place, *LLAMA, *SHORT, f"reference.name_or_path={tmp_path / 'neox'}")
    assert_same_training(baseline, run)


def test_a_model_with_other_tokens_is_refused(trained, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place, _ = trained
    save_model(tmp_path / "other", "llama")
    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(
        tmp_path / "other"
    )
    with pytest.raises(ValueError, match="reference.name_or_path=.*other: its tokenizer has other tokens"):
        train(place, *LLAMA, *SHORT, f"reference.name_or_path={tmp_path / 'other'}")


# ---- A reference that follows the policy ----------------------------------------------------------------------------

FOLLOWING = ("reference.mode=online", "reference.sync_every=2")


def test_a_copy_of_the_policy_every_few_updates(trained):
    place, _ = trained
    run = train(place, *LLAMA, *SHORT, *FOLLOWING)
    found = margins(run)
    assert found[0] == 0 and found[2] == 0, "after a copy, policy and reference are the same to the bit"
    assert abs(found[1]) > 1e-4 and abs(found[3]) > 1e-4


def test_a_mix_of_policy_and_reference(trained):
    place, _ = trained
    seen = {}

    def watch(trainer):
        step = trainer.train_step

        def watched(s):
            before = [parameter.detach().clone() for parameter in trainer.objective.reference_model.parameters()]
            metrics = step(s)
            if s.number == 1:
                seen["parts"] = [
                    (old, policy.detach().clone(), new.detach().clone())
                    for old, policy, new in zip(
                        before, trainer.policy.parameters(), trainer.objective.reference_model.parameters()
                    )
                ]
            return metrics

        trainer.train_step = watched

    train(place, *LLAMA, *SHORT, *FOLLOWING, "reference.sync_mix=0.25", "activation_checkpointing=true", prepare=watch)
    for old, policy, new in seen["parts"]:
        assert torch.allclose(new, 0.75 * old + 0.25 * policy, atol=1e-7)
    assert any(not torch.equal(old, new) for old, _, new in seen["parts"])


@pytest.mark.parametrize("name", ["FULL_SHARD", "TP"])
def test_a_following_reference_on_two_processes(folder, sharded, name):
    options = (*FOLLOWING, "reference.sync_mix=0.5")
    alone = train(folder, *LLAMA, *STRONG, *options)
    assert_same_training(alone, sharded(2, name, *options)[0])


def test_a_following_reference_is_part_of_the_state(trained):
    place, _ = trained
    options = (*LLAMA, *SHORT, *FOLLOWING, "reference.sync_mix=0.5", "debug=false", "checkpoint.formats=[state]")
    whole = train(place, *options)
    _, rest = train_in_two(place, *options, stop_in=1)
    assert len(rest.losses) == 1 and rest.losses == whole.losses[-1:]
    assert all(torch.equal(whole.weights[name], value) for name, value in rest.weights.items())


@pytest.mark.parametrize(
    "options, message",
    [
        (["reference.sync_every=2"], "set reference.mode=online"),
        (["reference.sync_mix=0.5"], "sync_every is null"),
        ([*FOLLOWING, "reference.sync_mix=0"], "sync_mix=0 leaves the reference as it is"),
        (["reference.archive=/nowhere.pt"], "reference.archive"),
        (["reference.name_or_path=./nowhere"], "reference.name_or_path"),
        (["loss=simpo", "reference.archive=/nowhere.pt"], "loss=simpo uses no reference model"),
        (["loss=sft", *FOLLOWING], "loss=sft uses no reference model"),
    ],
)
def test_what_makes_no_sense_is_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        settings_of(folder, *LLAMA, *options)
