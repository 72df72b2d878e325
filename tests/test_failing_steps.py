"""Steps that fail: numbers that are not finite, and memory that runs out."""

import json
import math
import os

import pytest
import torch
from runs import LLAMA, STRONG, ChangedPlacement, assert_same_training, baseline, spoil, train

from modeling.blocks import find_blocks
from training.optimizer import LossScale

LN2 = math.log(2)


# ---- Law 6: nothing is hidden ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run_before_the_optimizer_steps(folder, value):
    held = {}

    def prepare(trainer):
        spoil(7, value=value)(trainer)
        step = trainer.train_step

        def watched(s):
            held["trainer"], held["step"] = trainer, s
            held["before"] = {name: p.detach().clone() for name, p in trainer.policy.named_parameters()}
            return step(s)

        trainer.train_step = watched

    with pytest.raises(FloatingPointError) as error:
        train(folder, *LLAMA, "lr=1e-3", "batch_size=4", "n_examples=20", "tokens_per_microbatch=1", prepare=prepare)
    trainer = held["trainer"]
    assert trainer.state.updates == 1 and "update 2" in str(error.value)
    assert all(torch.equal(p, held["before"][name]) for name, p in trainer.policy.named_parameters())
    assert all(p.grad is None for p in trainer.policy.parameters())
    rows = [json.loads(line) for line in open(os.path.join(trainer.run_dir, "nonfinite.jsonl"))]
    # The eighth pair trained on is the last of the second step, in the order of its micro-batches.
    unit = held["step"].micro_batches[-1].units[-1]
    chosen = trainer.tokenizer.decode(unit.responses[unit.pairs[-1][0]])
    assert len(rows) == 1 and rows[0]["chosen"] == chosen and rows[0]["updates"] == 1
    assert rows[0]["row"] == unit.group + 1  # the line of train.jsonl
    assert f"row {rows[0]['row']}" in str(error.value) and "nonfinite.jsonl" in str(error.value)


def test_a_gradient_that_is_not_finite_names_the_whole_step(folder):
    def prepare(trainer):
        def break_gradient(grad):
            return grad * float("inf")

        step = trainer.train_step

        def broken(s):
            hook = next(trainer.policy.parameters()).register_hook(break_gradient)
            try:
                return step(s)
            finally:
                hook.remove()

        trainer.train_step = broken
        held.append(trainer)

    held = []
    with pytest.raises(FloatingPointError, match="gradient"):
        train(folder, *LLAMA, "batch_size=4", "n_examples=4", prepare=prepare)
    assert len(open(os.path.join(held[0].run_dir, "nonfinite.jsonl")).readlines()) == 4 and held[0].state.updates == 0


def test_steps_that_are_not_finite_can_be_skipped(folder):
    options = [*LLAMA, "lr=1e-3", "batch_size=4", "n_examples=20", "guards.on_nonfinite=skip"]
    run = train(folder, *options, "guards.max_nonfinite_steps=1", prepare=spoil(5))
    assert len(run.losses) == 4 and all(map(math.isfinite, run.losses))
    assert any("Skipped (1 of at most 1)" in notice for notice in run.notices)
    assert all(torch.isfinite(value).all() for value in run.weights.values())

    with pytest.raises(FloatingPointError):
        train(folder, *options, "guards.max_nonfinite_steps=1", prepare=spoil(5, 9))


def test_a_reference_that_is_not_finite_is_refused(folder):
    def prepare(trainer):
        placement = trainer.placement

        def poisoned(*arguments, **keywords):
            model = placement.build_model(*arguments, **keywords)
            with torch.no_grad():
                model.get_input_embeddings().weight[ord("T")] = float("nan")
            return model

        trainer.placement = ChangedPlacement(placement, build_model=poisoned)
        trainer.choose_attention = lambda unit: ("packed_sdpa", False)

    with pytest.raises(FloatingPointError, match="The reference gives response"):
        train(folder, *LLAMA, "n_examples=8", prepare=prepare)


def test_a_loss_scale_that_overflows_is_lowered_and_no_example_is_lost(folder):
    """What float16 does on a GPU, with float32 numbers: gradients of a scaled loss, which overflow above 2^14."""
    scales = []

    def prepare(trainer):
        trainer.loss_scale.active, trainer.loss_scale.value = True, 2.0**16
        gradients = trainer.gradients

        def overflowing(step):
            result = gradients(step)
            scales.append(trainer.loss_scale.value)
            if trainer.loss_scale.value > 2**14:
                next(trainer.policy.parameters()).grad[0, 0] = float("inf")
            return result

        trainer.gradients = overflowing

    run = train(folder, *LLAMA, *STRONG, prepare=prepare)
    assert scales == [2.0**16, 2.0**15] + [2.0**14] * 11
    del run.losses[:2], run.norms[:2]  # the first step returned from its two repetitions as well
    assert_same_training(baseline(folder, *LLAMA), run)


def test_a_loss_scale_grows_again_and_ends_the_run_at_less_than_one():
    scale = LossScale(enabled=True)
    for _ in range(16):
        scale.lower()
    assert scale.value == 1.0 and scale.active
    for _ in range(LossScale.GROWTH_STEPS):
        scale.stepped()
    assert scale.value == 2.0, "it can grow again"
    scale.lower()
    with pytest.raises(FloatingPointError, match="overflow at every loss scale"):
        scale.lower()
    off = LossScale(enabled=False)
    off.stepped()
    assert off.value == 1.0 and not off.active


# ---- Out of memory --------------------------------------------------------------------------------------------------


def small_memory(most_units):
    """A device on which a pass of more than `most_units` prompts does not fit."""

    def prepare(trainer):
        forward = trainer.losses_and_metrics

        def limited(split, batch):
            result = forward(split, batch)
            if split == "train" and len(batch.units) > most_units:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
            return result

        trainer.losses_and_metrics = limited

    return prepare


@pytest.mark.parametrize(
    "where, words",
    [
        ("placement", "before the first pass"),
        ("evaluate", "tokens_per_microbatch=32 .it was 64"),
        ("make_reference", "tokens_per_microbatch=32 .it was 64"),
    ],
)
def test_no_memory_outside_a_step_is_reported_with_the_fix(folder, where, words):
    def nothing_left(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    def prepare(trainer):
        loading = ChangedPlacement(trainer.placement, build_model=nothing_left)
        setattr(trainer, where, loading if where == "placement" else nothing_left)

    with pytest.raises(ValueError, match=f"Out of memory.*{words}") as raised:
        train(folder, *LLAMA, "tokens_per_microbatch=64", "do_first_eval=true", prepare=prepare)
    assert "2.00 GiB" in str(raised.value) and "\n" not in str(raised.value)


def test_a_step_that_does_not_fit_is_repeated_in_smaller_passes(folder):
    run = train(folder, *LLAMA, *STRONG, prepare=small_memory(2))
    assert_same_training(baseline(folder, *LLAMA), run)
    reported = [notice for notice in run.notices if notice.startswith("Out of memory")]
    assert reported and len(reported) <= 3 and "tokens_per_microbatch=" in reported[0]


def test_a_step_in_half_precision_is_repeated_too(folder):
    """FSDP2 casts the parameters, also of one device: what it had begun is given up before the step is repeated."""
    options = [*LLAMA, *STRONG, "precision=bfloat16", "tokens_per_microbatch=1024"]

    def prepare(trainer):
        failures = iter(["forward", "backward"])
        forward = trainer.losses_and_metrics

        def limited(split, batch):
            where = next(failures, None) if split == "train" and len(batch.units) > 1 else None
            first, last = find_blocks(trainer.policy, None)
            hooks = {
                "forward": lambda: last.mlp.register_forward_hook(exhausted),
                "backward": lambda: first.mlp.register_forward_hook(fail_behind),
            }
            if where is None:
                return forward(split, batch)
            handle = hooks[where]()
            try:
                return forward(split, batch)
            finally:
                handle.remove()

        def fail_behind(module, arguments, output):
            output.register_hook(exhausted)

        def exhausted(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        trainer.losses_and_metrics = limited

    whole, repeated = train(folder, *options), train(folder, *options, prepare=prepare)
    assert len([notice for notice in repeated.notices if notice.startswith("Out of memory")]) == 2
    assert repeated.losses == pytest.approx(whole.losses, rel=2e-2)


def test_a_prompt_that_does_not_fit_says_what_to_do(folder):
    with pytest.raises(ValueError, match="single prompt.*activation_checkpointing=true"):
        train(folder, *LLAMA, *STRONG, prepare=small_memory(0))
