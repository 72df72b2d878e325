"""What a training run on one device promises: the same update however a step is cut up, the same metrics however an
evaluation is, the numbers of a plain loop written by hand, and every option has an effect or is refused."""

import json
import math
import os
import shutil

import pytest
import torch
from conftest import compose_config
from runs import (
    LLAMA,
    MODELS,
    NEOX,
    STRONG,
    assert_same_training,
    baseline,
    distance,
    settings_of,
    spoil,
    train,
    write_data,
)

import losses
import settings
from data.tokenization import load_tokenized
from modeling import loading
from modeling.blocks import find_blocks
from settings.precision import resolve_precision

LN2 = math.log(2)


# ---- Law 1: the same update -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        ["tokens_per_microbatch=1"],
        ["tokens_per_microbatch=1000000"],
        ["gradient_accumulation_steps=4"],
        ["prefix_sharing=false"],
        ["model.attention=plain"],
        ["reference.mode=online"],
        ["activation_checkpointing=true"],
        ["activation_checkpointing=2"],
    ],
    ids=lambda change: change[0],
)
def test_how_a_step_is_computed_does_not_change_it(folder, change):
    plain = baseline(folder, *LLAMA)
    assert len(plain.losses) == 11 and abs(plain.losses[-1] - LN2) > 1e-3  # it learnt something
    assert_same_training(plain, train(folder, *LLAMA, *STRONG, *change))


@pytest.mark.parametrize("loss", ["sft", "ipo"])
def test_micro_batches_do_not_change_other_losses(folder, loss):
    split = train(folder, *LLAMA, f"loss={loss}", *STRONG, "tokens_per_microbatch=1")
    assert_same_training(baseline(folder, *LLAMA, f"loss={loss}"), split)


def test_keeping_the_pairs_of_a_prompt_together_does_not_change_a_step(folder):
    runs = [
        train(folder, *LLAMA, *STRONG, "shuffle=prompts", *more)
        for more in ([], ["tokens_per_microbatch=1"], ["prefix_sharing=false"])
    ]
    for other in runs[1:]:
        assert_same_training(runs[0], other)


@pytest.mark.parametrize("setting, times", [("false", [1, 1]), ("true", [2, 2]), ("2", [2, 1])])
def test_activations_are_recomputed_where_asked_for(folder, setting, times):
    """Forward passes of each block in a step of one micro-batch."""
    counts = [0, 0]

    def count(trainer):
        step = trainer.train_step

        def counted(s):
            hooks = []
            for index, block in enumerate(find_blocks(trainer.policy, None)):

                def add(*_, index=index):
                    counts[index] += 1

                hooks.append(block.input_layernorm.register_forward_pre_hook(add))
            try:
                return step(s)
            finally:
                for hook in hooks:
                    hook.remove()

        trainer.train_step = counted

    train(folder, *LLAMA, "n_examples=4", f"activation_checkpointing={setting}", prepare=count)
    assert counts == times


def test_the_same_run_twice_is_the_same_bits(folder):
    again = train(folder, *LLAMA, *STRONG)
    assert again.losses == baseline(folder, *LLAMA).losses
    assert all(torch.equal(value, again.weights[name]) for name, value in baseline(folder, *LLAMA).weights.items())


def test_another_seed_is_another_run(folder):
    assert train(folder, *LLAMA, *STRONG, "seed=1").losses != baseline(folder, *LLAMA).losses


def test_five_pairs_in_one_step_however_they_are_cut(folder):
    """The case of losses.json: one micro-batch, 4 + 1, ..., 1 + 1 + 1 + 1 + 1 have one gradient norm."""
    shapes, norms = [], []

    def note(trainer):
        step = trainer.train_step
        trainer.train_step = lambda s: (shapes.append([len(b.pairs) for b in s.micro_batches]), step(s))[1]

    for cut in (
        "gradient_accumulation_steps=1",
        "gradient_accumulation_steps=4",
        "tokens_per_microbatch=300",
        "tokens_per_microbatch=1",
    ):
        run = train(folder, *NEOX, "n_examples=5", "batch_size=5", "lr=1e-3", cut, prepare=note)
        norms.append(run.norms[0])
    assert shapes[0] == [5] and shapes[-1] != [5] and len({tuple(shape) for shape in shapes}) >= 3, shapes
    assert all(sum(shape) == 5 for shape in shapes)
    assert max(norms) - min(norms) < 1e-5


# ---- Law 2: the same metrics ----------------------------------------------------------------------------------------


def by_hand(config, trained, split="test"):
    """Losses and rewards of held-out pairs from plain forward passes, one response at a time, full logits."""
    tokenizer = loading.load_tokenizer(config)
    reference = loading.load_model(config, tokenizer, torch.float32, "cpu")
    policy = loading.load_model(config, tokenizer, torch.float32, "cpu")
    policy.load_state_dict(trained)
    rows = []
    for name in config.datasets:
        data = load_tokenized(name, split, tokenizer, config, losses.find_loss(config.loss.name).inputs.kind)
        for group, *responses in data.examples.tolist():
            logps = []
            for response in responses:
                if response < 0:
                    continue
                prompt, answer = data.prompt(group), data.response(group, response)
                ids = torch.tensor([[*prompt.tolist(), *answer.tolist()]])
                for model in (policy, reference):
                    with torch.no_grad():
                        token_logps = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
                    logps.append(token_logps[len(prompt) - 1 :].double().sum())
            rows.append((data.name, logps))
    return rows


@pytest.mark.parametrize("eval_batch_size", [1, 2, 3, 4, 5])
def test_evaluation_does_not_depend_on_its_batches(folder, eval_batch_size):
    run = train(folder, *LLAMA, *STRONG, f"eval_batch_size={eval_batch_size}")
    plain = baseline(folder, *LLAMA).evals[-1]
    assert run.evals[-1].keys() == plain.keys()
    assert all(run.evals[-1][name] == pytest.approx(plain[name], abs=1e-6 * max(1, abs(plain[name]))) for name in plain)
    assert run.result == run.evals[-1]["loss/eval"]


def test_evaluation_is_what_one_computes_by_hand(folder):
    run = baseline(folder, *LLAMA)
    rows = by_hand(settings_of(folder, *LLAMA, *STRONG), run.weights)
    assert len(rows) == 5
    expected = dict.fromkeys(run.evals[-1], 0.0)
    for _, (chosen, reference_chosen, rejected, reference_rejected) in rows:
        good, bad = 0.1 * (chosen - reference_chosen), 0.1 * (rejected - reference_rejected)
        values = {
            "loss/eval": -torch.nn.functional.logsigmoid(good - bad),
            "rewards_eval/chosen": good,
            "rewards_eval/rejected": bad,
            "rewards_eval/margins": good - bad,
            "logps_eval/chosen": chosen,
            "rewards_eval/accuracies": float(good > bad),
            "logps_eval/rejected": rejected,
        }
        for name, value in values.items():
            expected[name] += float(value) / len(rows)
    for name, value in expected.items():
        if not name.startswith("lengths"):
            assert run.evals[-1][name] == pytest.approx(value, abs=1e-5 * max(1, abs(value))), name


def test_sft_evaluation_is_what_one_computes_by_hand(folder):
    run = baseline(folder, *LLAMA, "loss=sft")
    rows = by_hand(settings_of(folder, *LLAMA, "loss=sft", *STRONG), run.weights)
    assert run.evals[-1]["loss/eval"] == pytest.approx(-sum(float(logps[0]) for _, logps in rows) / len(rows), rel=1e-6)


def test_each_data_set_has_its_own_values(folder):
    write_data(folder / "other", prompts=4, held_out=1)
    names = f"datasets=[{folder}/data,{folder}/other]"
    run = train(folder, *LLAMA, "lr=1e-3", "n_examples=20", "warmup_steps=0", names)
    held_out = {f"{folder}/data": 5, f"{folder}/other": 2}
    last = run.evals[-1]
    for metric in ("loss/eval", "rewards_eval/margins", "logps_eval/chosen"):
        parts = {
            name.removeprefix(metric + "/"): value for name, value in last.items() if name.startswith(metric + "/")
        }
        assert set(parts) == {"data", "other"}  # short names, not the whole paths
        assert len(set(parts.values())) == 2
        weights = [next(n for path, n in held_out.items() if path.endswith(part) or part in path) for part in parts]
        mean = sum(value * n for value, n in zip(parts.values(), weights)) / 7
        assert last[metric] == pytest.approx(mean, rel=1e-6)


REFERENCE_METRICS = [f"rewards_{{}}/{name}" for name in ("chosen", "rejected", "accuracies", "margins")] + [
    f"logps_{{}}/{name}" for name in ("chosen", "rejected")
]


def test_metrics_have_the_names_of_the_dpo_reference_implementation(folder):
    run = train(folder, *LLAMA, *STRONG, "do_first_eval=true")
    lines = [json.loads(line) for line in open(os.path.join(run.run_dir, "metrics.jsonl"))]
    evals = [line for line in lines if "loss/eval" in line]
    steps = [line for line in lines if "loss/train" in line]
    assert [line["examples"] for line in evals] == [0, 50] and [line["updates"] for line in evals] == [0, 11]
    assert all(name.format("eval") in evals[0] for name in REFERENCE_METRICS)
    more = [
        "grad_norm",
        "learning_rate",
        "examples_per_second",
        "tokens_per_second",
        "counters/examples",
        "counters/updates",
        "memory/peak_gb",
        "lengths_train/chosen",
        "lengths_train/rejected",
    ]
    assert len(steps) == 11
    assert all(name in line for line in steps for name in [n.format("train") for n in REFERENCE_METRICS] + more)
    assert [line["counters/examples"] for line in steps] == [5, 10, 15, 20, 25, 26, 31, 36, 41, 46, 50]
    assert all(isinstance(line["time"], float) for line in lines)


def test_a_log_line_averages_all_steps_since_the_last(folder):
    """Examples weigh the same in it, also those of a smaller step."""
    options = (*LLAMA, *STRONG, "n_examples=26")
    each = train(folder, *options)
    rare = train(folder, *options, "minimum_log_interval_secs=1000")
    lines = [json.loads(line) for line in open(os.path.join(rare.run_dir, "metrics.jsonl"))]
    (line,) = [line for line in lines if "loss/train" in line]
    weights = [5, 5, 5, 5, 5, 1]
    assert line["loss/train"] == pytest.approx(sum(w * x for w, x in zip(weights, each.losses)) / 26, rel=1e-6)


# ---- Law 3: every example once an epoch -----------------------------------------------------------------------------


def test_every_example_once_an_epoch_and_none_twice(folder):
    epochs = {}

    def note(trainer):
        step = trainer.train_step

        def noted(s):
            for batch in s.micro_batches:
                epochs.setdefault(s.epoch, []).extend(
                    (unit.group, unit.response_ids[a], unit.response_ids[b])
                    for unit in batch.units
                    for a, b in unit.pairs
                )
            return step(s)

        trainer.train_step = noted

    run = train(folder, *LLAMA, "n_epochs=3", "batch_size=4", prepare=note)
    assert len(run.losses) == 3 * 7  # 26 pairs: six steps of 4, one of 2
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2]) and len(set(epochs[0])) == 26
    assert epochs[0] != epochs[1]


def test_n_examples_ends_a_run_within_a_step(folder):
    sizes = []

    def note(trainer):
        step = trainer.train_step
        trainer.train_step = lambda s: (sizes.append(s.n_examples), step(s))[1]

    train(folder, *LLAMA, "n_examples=11", "batch_size=4", prepare=note)
    assert sizes == [4, 4, 3]


# ---- Step 0, and a loop written by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        "reference.mode=cached",
        "reference.mode=online",
        "tokens_per_microbatch=1",
        "activation_checkpointing=true",
        "model.attention=plain",
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_the_policy_starts_as_the_reference(folder, tmp_path, model, how):
    shutil.copytree(folder / "data", tmp_path / "data")
    runs = 2 if how == "reference.mode=cached" else 1  # cold cache, then warm
    for _ in range(runs):
        run = train(tmp_path, *MODELS[model], "lr=1e-4", "n_examples=10", "do_first_eval=true", how)
        first = run.steps[0]
        assert first["loss/train"] == pytest.approx(LN2, abs=1e-6)
        assert first["rewards_train/margins"] == first["rewards_train/chosen"] == first["rewards_train/rejected"] == 0
        assert first["rewards_train/accuracies"] == 0.5  # ties
        assert run.evals[0]["rewards_eval/margins"] == 0 and run.evals[0]["rewards_eval/accuracies"] == 0.5
        assert run.evals[0]["loss/eval"] == pytest.approx(LN2, abs=1e-6)
        assert run.steps[1]["rewards_train/margins"] != 0
    kept = list(tmp_path.glob("runs/*/reference/*/*.logps"))
    assert len(kept) == (0 if how == "reference.mode=online" else 2)


def test_ipo_starts_at_its_target(folder):
    run = train(folder, *LLAMA, "loss=ipo", "loss.beta=0.1", "n_examples=8")
    assert run.losses[0] == pytest.approx(25.0, rel=1e-6)


@pytest.mark.parametrize(
    "optimizer, keywords", [("RMSprop", {}), ("AdamW", {"weight_decay": 0.1, "betas": [0.8, 0.9]})]
)
def test_dpo_equals_a_textbook_loop(folder, optimizer, keywords):
    """Two padded rows a pair, the model's own attention and full logits, one backward pass, a step."""
    options = [
        *NEOX,
        "loss.beta=0.3",
        f"optimizer={optimizer}",
        "lr=1e-4",
        "warmup_steps=3",
        "batch_size=4",
        "n_examples=20",
        "max_grad_norm=0.5",
        *(f"optimizer_kwargs.{k}={v}" for k, v in keywords.items()),
    ]
    numbers = []

    def note(trainer):
        step = trainer.train_step
        trainer.train_step = lambda s: (numbers.append(trainer.sampler.example_indices(s.number)), step(s))[1]

    run = train(folder, *("+" * o.startswith("optimizer_kwargs") + o for o in options), prepare=note)

    config = settings_of(folder, *("+" * o.startswith("optimizer_kwargs") + o for o in options))
    tokenizer = loading.load_tokenizer(config)
    policy = loading.load_model(config, tokenizer, torch.float32, "cpu")
    reference = loading.load_model(config, tokenizer, torch.float32, "cpu")
    data = load_tokenized(config.datasets[0], "train", tokenizer, config, "pairs")
    steps = getattr(torch.optim, optimizer)(policy.parameters(), lr=1e-4, **keywords)

    def logps(model, pairs):
        rows = [(data.prompt(g).tolist(), data.response(g, r).tolist()) for g, *both in pairs for r in both]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids, labels, mask = (torch.full((len(rows), width), fill) for fill in (0, -100, 0))
        for i, (prompt, answer) in enumerate(rows):
            ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
            mask[i, : len(prompt) + len(answer)] = 1
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        labels = labels[:, 1:]
        token_logps = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
        return (token_logps * (labels != -100)).sum(-1)

    for number, chosen_numbers in enumerate(numbers):
        pairs = data.examples[chosen_numbers].tolist()
        mine = logps(policy, pairs)
        with torch.no_grad():
            theirs = logps(reference, pairs)
        h = (mine - theirs)[0::2] - (mine - theirs)[1::2]
        loss = -torch.nn.functional.logsigmoid(0.3 * h).mean()
        assert run.losses[number] == pytest.approx(loss.item(), abs=1e-5)
        steps.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        assert run.norms[number] == pytest.approx(norm.item(), rel=1e-4)
        steps.param_groups[0]["lr"] = 1e-4 * min(1, (number + 1) / 4)
        steps.step()
    assert len(numbers) == 5 and any(norm > 0.5 for norm in run.norms)
    start = loading.load_model(config, tokenizer, torch.float32, "cpu").state_dict()
    assert distance(run.weights, policy.state_dict()) < 1e-5
    assert distance(run.weights, policy.state_dict()) < 1e-2 * distance(run.weights, start)


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3, 0]),
        ("cosine", [1 / 3, 2 / 3, 1, 3 / 4, 1 / 4, 0]),
    ],
)
def test_the_learning_rate_warms_up_and_falls_to_zero_at_the_last_step(folder, schedule, expected):
    run = train(folder, *LLAMA, "n_examples=24", "warmup_steps=2", f"schedule={schedule}", "lr=0.01", "optimizer=SGD")
    rates = [step["learning_rate"] for step in run.steps]
    assert rates == pytest.approx([0.01 * factor for factor in expected])
    assert schedule == "constant" or rates[-1] == 0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_falls_to_zero_after_skipped_steps_too(folder, schedule):
    guards = ["guards.on_nonfinite=skip", "guards.max_nonfinite_steps=2"]
    options = [*LLAMA, "n_examples=24", "warmup_steps=0", f"schedule={schedule}", "lr=0.01", "optimizer=SGD", *guards]
    run = train(folder, *options, prepare=spoil(5))
    rates = [step["learning_rate"] for step in run.steps]
    assert len(rates) == 5 and rates[0] == 0.01 and rates[-1] == 0


def test_a_run_that_is_all_warm_up_is_reported(folder):
    options = [*LLAMA, "n_examples=8", "schedule=linear", "warmup_steps=9", "lr=0.01", "optimizer=SGD"]
    (notice,) = [text for text in train(folder, *options).notices if "warmup_steps" in text]
    assert "schedule=linear" in notice and "2 steps" in notice


# ---- Precision ------------------------------------------------------------------------------------------------------


def test_half_precision_on_one_device(folder):
    """Weights, gradients and optimizer stay float32, blocks compute in bfloat16."""
    options = [*LLAMA, *STRONG, "precision=bfloat16", "reference.mode=online"]
    alone = train(folder, *options)
    assert alone.losses[0] == pytest.approx(math.log(2), abs=1e-7) and alone.steps[0]["rewards_train/margins"] == 0
    assert all(weight.dtype == torch.float32 for weight in alone.weights.values())
    exact = train(folder, *LLAMA, *STRONG)
    assert alone.losses != exact.losses and alone.losses == pytest.approx(exact.losses, rel=5e-2)


def test_the_older_name_of_precision_is_the_same(folder):
    options = [*LLAMA, *STRONG, "n_examples=10"]
    assert (
        train(folder, *options, "model.fsdp_policy_mp=bfloat16").losses
        == train(folder, *options, "precision=bfloat16").losses
    )


@pytest.mark.parametrize(
    "kind, has_bfloat16, more, expected",
    [
        ("cuda", True, [], "bfloat16"),
        ("cuda", False, [], "float32"),
        ("cpu", True, [], "float32"),
        ("mps", True, [], "float32"),
        ("cuda", True, ["optimizer=Adafactor"], "float32"),
        ("cuda", True, ["model.policy_dtype=bfloat16"], "bfloat16"),
        ("cuda", True, ["precision=float32"], "float32"),
        ("cuda", True, ["precision=tf32", "device=null"], "tf32"),
    ],
)
def test_automatic_precision(folder, kind, has_bfloat16, more, expected):
    config = compose_config(*LLAMA, "loss=dpo", *more)
    assert resolve_precision(settings.finalize(config), kind, has_bfloat16) == expected


# ---- Law 5: no option is ignored ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override, named",
    [
        ("fsdp=no_shard", "fsdp.sharding_strategy"),
        ("tp_size=2", "tp_size"),
        ("fsdp.cpu_offload=true", "fsdp.cpu_offload"),
        ("precision=tf32", "precision=tf32"),
        ("model.fsdp_policy_mp=bfloat16 precision=float32", "under two names"),
        ("world_size=2", "BasicTrainer"),
        ("loss.average_log_prob=true", None),
        ("model.attention=flex", "flex"),
    ],
)
def test_what_has_no_effect_is_refused(folder, override, named):
    with pytest.raises(Exception) as error:
        settings_of(folder, *LLAMA, *override.split())
    assert named is None or (isinstance(error.value, ValueError) and named in str(error.value))


def test_a_key_that_the_losss_function_does_not_take_is_refused_before_any_weight_is_read(folder, monkeypatch):
    monkeypatch.setattr(loading, "load_model", None)
    monkeypatch.setattr(losses.registry, "LOSSES", {})

    @losses.register_loss("dpo")
    def fewer(pairs: losses.PairLogps, *, beta: float) -> losses.LossOutput: ...

    with pytest.raises(ValueError, match="loss.alpha is a key that"):
        train(folder, *LLAMA, "n_examples=4")

    @losses.register_loss("ipo")
    def more(
        pairs: losses.PairLogps, *, beta: float, average_log_prob: bool, reference_free: bool, tau: float
    ) -> losses.LossOutput: ...

    with pytest.raises(ValueError, match="loss.tau is missing"):
        train(folder, *LLAMA, "loss=ipo", "n_examples=4")


@pytest.mark.parametrize(
    "override, changes",
    [
        ("loss.label_smoothing=0.2", True),
        ("loss.reference_free=true", True),
        ("loss.f_divergence=js", True),
        ("loss.beta=0.5", True),
        ("max_grad_norm=0.01", True),
        ("model.reference_dtype=bfloat16", True),
        ("optimizer=SGD", True),
        ("warmup_steps=0", True),
        ("max_length=40 max_prompt_length=20", True),
        ("eval_batch_size=2", False),
    ],
)
def test_options_reach_the_update(folder, override, changes):
    run = train(folder, *LLAMA, *STRONG, *override.split())
    assert (distance(run.weights, baseline(folder, *LLAMA).weights) > 1e-6) is changes


def test_frozen_parameters_stay_and_the_others_move(folder):
    frozen = "model.frozen=[model.layers.0.*,*norm.weight]"
    slow, fast = (train(folder, *LLAMA, *STRONG, frozen, rate).weights for rate in ("lr=1e-5", "lr=1e-3"))
    for name in slow:
        stays = name.startswith("model.layers.0.") or name.endswith("norm.weight")
        assert torch.equal(slow[name], fast[name]) == stays, name


@pytest.mark.parametrize("pattern, says", [("nothing.*", "matches no parameter"), ("*", "leaves no parameter")])
def test_patterns_of_frozen_parameters_must_make_sense(folder, pattern, says):
    with pytest.raises(ValueError, match=says):
        train(folder, *LLAMA, *STRONG, f"model.frozen=[{pattern}]")
