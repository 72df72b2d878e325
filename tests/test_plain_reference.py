"""Training equals its plain re-implementation in float64 (plain_reference.py): for 12 architectures, for every loss,
and under every option that claims to change memory or speed and nothing else.

Tolerances: a run computes in float32, whose rounding (6e-8) two layers and a sum over some 30 tokens of some 5 nats
each raise to about 1e-5 of a loss in nats. A wrong position, mask, normalisation or weight of an example moves losses
by 1e-2 and more. Weights are compared by how far they moved, to 1e-3 of it.
"""

import json
import math

import plain_reference
import pytest
import torch
from architectures import make
from plain_reference import Objective, Optimizer
from runs import new_run_dir, placement, train, train_in_two, train_together
from small_tokenizers import byte_level

KINDS = (
    "llama_tied",
    "gpt_neox",
    "gpt2",
    "opt",
    "mistral",  # rows longer than its window
    "qwen2",
    "qwen3_moe",
    "gemma2",  # soft-capped attention and head, windows
    "gemma3_text",
    "phi",
    "bloom",  # ALiBi: one row a response
    "mamba",  # recurrent: one row a response
)
SMALL = dict(hidden_size=32, intermediate_size=48)
SIZES = {
    **dict.fromkeys(("llama_tied", "gpt_neox", "mistral", "qwen2", "qwen3_moe", "gemma2", "gemma3_text", "phi"), SMALL),
    "gpt2": dict(n_embd=32),
    "opt": dict(hidden_size=32, word_embed_proj_dim=32, ffn_dim=48),
    "bloom": dict(hidden_size=32),
    "mamba": dict(hidden_size=32),
}
LENGTHS = dict(max_length=64, max_prompt_length=24)
# Epsilon well above the noise of gradients that are zero by symmetry (the biases of keys), which would otherwise become
# steps of full size in random directions.
ADAMW = dict(betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1)
PLAIN = (
    "optimizer=AdamW",
    "+optimizer_kwargs.betas=[0.8,0.9]",
    "+optimizer_kwargs.eps=1e-4",
    "+optimizer_kwargs.weight_decay=0.1",
    "lr=1e-3",
    "warmup_steps=1",
    "schedule=cosine",
    "max_grad_norm=1.0",
    "batch_size=5",
    "n_examples=15",
    "max_length=64",
    "max_prompt_length=24",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data (up to three pairs a prompt; two rows too long, one whose tokens merge) and, later, models."""
    place = tmp_path_factory.mktemp("plain")
    (place / "data").mkdir()
    rows = []
    for number, words in enumerate(
        ("rain", "a violin", "chess", "the quick brown fox", "salt", "the moon and the tide", "ink")
    ):
        prompt = (
            f"Is the {words} {'blue ' * (number % 3)}?" + " yes yellow" * (20 * (number == 5)) + " " * (number == 2)
        )
        responses = [
            f"{' ' * (k != 1)}the {words} is {'so ' * (k + number)}{number}{k}." for k in range(2 + number % 3)
        ]
        if number == 4:
            responses[0] += " a good answer" * 20
        pairs = [[0, k] if (k + number) % 2 else [k, 0] for k in range(1, len(responses))]
        rows.append({"prompt": prompt, "responses": responses, "pairs": pairs, "sft_target": responses[-1]})
    for name, lines in (("train", rows), ("test", rows[:2])):
        (place / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return place


def model_folder(place, kind):
    """A model with weights as after some training, and a tokenizer that merges; every other one puts a BOS first."""
    folder = place / kind
    if not folder.exists():
        bos = KINDS.index(kind) % 2 == 1
        tokenizer = byte_level("<|bos|>", True) if bos else byte_level()
        model = make(kind, spread=2.0, vocab_size=len(tokenizer), **SIZES[kind])
        model.config.bos_token_id, model.config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        model.config.pad_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def note_numbers(trainer):
    """Keeps the numbers of each step's examples: the only thing that the re-implementation does not find out itself."""
    step = trainer.train_step

    def noted(s):
        trainer.seen.examples.append(trainer.sampler.example_indices(s.number).tolist())
        return step(s)

    trainer.train_step = noted


def options_of(place, kind, *more):
    plain = PLAIN if "~optimizer_kwargs" not in more else [word for word in PLAIN if "optimizer" not in word]
    more = [word for word in more if word != "~optimizer_kwargs"]
    return ["model=blank_model", f"model.name_or_path={model_folder(place, kind)}", *plain, *more]


_references: dict = {}


def reference(place, kind, steps, objective, keep="keep_end", schedule="cosine", optimizer=None, max_grad_norm=1.0):
    """The plain training, once for all options that are compared with it."""
    from transformers import AutoTokenizer

    given = (kind, str(steps), repr(objective), keep, schedule, repr(optimizer), max_grad_norm)
    if given not in _references:
        folder = model_folder(place, kind)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        examples = plain_reference.examples_of(
            place / "data" / "train.jsonl", tokenizer, objective.name != "sft", **LENGTHS, keep=keep
        )
        _references[given] = plain_reference.train(
            folder,
            examples,
            steps,
            objective,
            optimizer or Optimizer("AdamW", **ADAMW),
            1e-3,
            1,
            schedule,
            max_grad_norm,
        )
    return _references[given]


def check_equal(run, truth, weights=1e-3):
    """Metrics of every step, and how far the weights moved."""
    assert len(run.steps) == len(truth.steps) >= 3
    for number, (found, expected) in enumerate(zip(run.steps, truth.steps)):
        for name, value in expected.items():
            scale = max(1.0, abs(value))
            if name == "rewards_train/accuracies" and number == 0:
                continue  # policy and reference are the same model: ties, up to rounding in float64
            assert abs(found[name] - value) <= 2e-5 * scale, (number, name, found[name], value)
    named = {name: value for name, value in truth.weights.items() if name in run.weights}
    assert len(named) >= len(truth.weights) - 1  # a tied head may be left out
    off = sum((run.weights[name].double() - value).pow(2).sum().item() for name, value in named.items())
    moved = sum((truth.start[name] - value).pow(2).sum().item() for name, value in named.items())
    assert math.sqrt(off / moved) <= weights, math.sqrt(off / moved)


def check_run(place, kind, *more, objective=None, **changes):
    run = train(place, *options_of(place, kind, *more), prepare=note_numbers)
    check_equal(run, reference(place, kind, run.examples, objective or Objective("dpo"), **changes))
    return run


# ---- Architectures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_the_plain_one(place, kind):
    run = check_run(place, kind)
    assert abs(run.losses[-1] - math.log(2)) > 1e-3  # it learnt something
    lengths = [step["lengths_train/chosen"] for step in run.steps]
    assert len(set(lengths)) > 1


def test_the_rows_try_every_rule_of_tokenisation(place):
    """Cut prompts and responses, a boundary at which tokens merge, a response in several pairs."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(place, "gpt_neox"))
    rows = [json.loads(line) for line in (place / "data" / "train.jsonl").read_text().splitlines()]
    examples = plain_reference.examples_of(place / "data" / "train.jsonl", tokenizer, True, **LENGTHS)
    assert any(len(e.prompt) == 24 for e in examples) and any(len(e.prompt) + len(e.chosen) == 64 for e in examples)
    assert any(e.chosen[-1] != tokenizer.eos_token_id for e in examples)
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    whole = [(encode(row["prompt"]), encode(row["prompt"] + text)) for row in rows for text in row["responses"]]
    assert any(ids[: len(prompt)] != prompt for prompt, ids in whole)
    assert len(examples) > len(rows) and examples[0].prompt[0] == tokenizer.bos_token_id


# ---- Losses and optimizers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "objective, options",
    [
        (Objective("sft"), ["loss=sft"]),
        (Objective("ipo", beta=0.3), ["loss=ipo", "loss.beta=0.3"]),
        (Objective("ipo", average_log_prob=True), ["loss=ipo", "loss.average_log_prob=true"]),
        (Objective("ipo", reference_free=True), ["loss=ipo", "loss.reference_free=true"]),
        (Objective("dpo", beta=0.5, label_smoothing=0.2), ["loss.beta=0.5", "loss.label_smoothing=0.2"]),
        (Objective("dpo", f_divergence="js"), ["loss.f_divergence=js"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_every_loss_equals_the_plain_one(place, objective, options):
    more = [f"{option}" for option in options] + (["n_epochs=3"] if objective.name == "sft" else [])
    check_run(place, "gpt_neox", *more, objective=objective)


@pytest.mark.parametrize(
    "options, changes",
    [
        (["data.truncation=keep_start", "shuffle=prompts"], dict(keep="keep_start")),
        (["schedule=linear", "max_grad_norm=1000"], dict(schedule="linear", max_grad_norm=1000.0)),
        (["schedule=constant", "optimizer=SGD", "~optimizer_kwargs"], dict(schedule="constant", optimizer="SGD")),
        (["optimizer=RMSprop", "~optimizer_kwargs", "+optimizer_kwargs.eps=1e-4"], dict(optimizer="RMSprop")),
    ],
    ids=["keep_start", "linear", "SGD", "RMSprop"],
)
def test_other_options_change_what_the_plain_one_changes(place, options, changes):
    if "optimizer" in changes:
        changes = changes | {"optimizer": Optimizer(changes["optimizer"], eps=1e-4)}
    check_run(place, "llama_tied", *options, **changes)


# ---- Options that change memory or speed, and nothing else ----------------------------------------------------------

ONLINE = ("reference.mode=online",)
BOTH = pytest.mark.parametrize("kind", ["llama_tied", "gpt_neox"])
SAVED = (
    "debug=false",
    "checkpoint.every=5",
    "sample_during_eval=true",
    "n_eval_model_samples=1",
    "sampling.max_new_tokens=2",
)


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        ["tokens_per_microbatch=1", "reference.mode=online", "data.num_workers=2", "eval_batch_size=1"],
        ["prefix_sharing=false", "gradient_accumulation_steps=4", "activation_checkpointing=true"],
        ["model.attention=plain", "activation_checkpointing=2", "do_first_eval=true", "eval_every=5"],
        ["model.attention=packed_sdpa", "tokens_per_microbatch=150", "+optimizer_kwargs.foreach=false", *SAVED],
        ["gradient_accumulation_steps=2", "guards.on_nonfinite=skip", "guards.max_nonfinite_steps=2", *SAVED]
        + ["checkpoint.async_save=true", "early_stopping.metric=loss/eval", "+optimizer_kwargs.foreach=true"],
        ["prefix_sharing=false", "reference.mode=online", "activation_checkpointing=2", "tokens_per_microbatch=1"],
    ],
    ids=lambda options: options[0],
)
def test_options_change_nothing(place, kind, options):
    check_run(place, kind, *options)


@BOTH
def test_where_weights_and_tokenizer_come_from_changes_nothing(place, kind):
    from transformers import AutoTokenizer

    folder = model_folder(place, kind)
    other = make(kind, seed=9, vocab_size=len(AutoTokenizer.from_pretrained(folder)), **SIZES[kind])
    if not (place / f"{kind}-other").exists():
        other.save_pretrained(place / f"{kind}-other")
        torch.save({"state": plain_reference.load(folder).float().state_dict()}, place / f"{kind}.pt")
    check_run(
        place,
        kind,
        f"model.name_or_path={place}/nowhere",
        f"model.local_copy={place}/{kind}-other",
        f"model.tokenizer_name_or_path={folder}",
        f"model.archive={place}/{kind}.pt",
    )


@BOTH
def test_a_cold_and_a_warm_reference_cache_change_nothing(place, kind, tmp_path):
    for batching in ("tokens_per_microbatch=1", "tokens_per_microbatch=100000"):
        check_run(place, kind, f"reference.cache_dir={tmp_path}", batching)


def short_of_memory(trainer):
    """Lets the first pass over several prompts fail as on a full device."""
    note_numbers(trainer)
    training, failed = trainer.losses_and_metrics, []

    def limited(split, batch):
        if split == "train" and len(batch.units) > 1 and len(failed) < 2:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return training(split, batch)

    trainer.losses_and_metrics = limited
    trainer.seen.notices = failed


@BOTH
def test_steps_repeated_in_smaller_passes_change_nothing(place, kind):
    run = train(place, *options_of(place, kind, "tokens_per_microbatch=100000"), prepare=short_of_memory)
    check_equal(run, reference(place, kind, run.examples, Objective("dpo")))
    assert any("memory" in text for text in run.notices)


@BOTH
def test_a_run_that_was_stopped_and_resumed_equals_the_plain_one(place, kind):
    options = options_of(place, kind, "debug=false")
    first, rest = train_in_two(place, *options, stop_in=0, prepare=note_numbers)
    assert 1 <= len(first.steps) < 3
    rest.steps, rest.examples = first.steps + rest.steps, first.examples + rest.examples
    check_equal(rest, reference(place, kind, rest.examples, Objective("dpo")))


@BOTH
@pytest.mark.parametrize(
    "name, options",
    [
        ("FULL_SHARD", ["tokens_per_microbatch=1", "fsdp.forward_prefetch=1"]),
        ("SHARD_GRAD_OP", ["activation_checkpointing=true", *ONLINE, "fsdp.reference_cpu_offload=true"]),
        ("HYBRID_SHARD", ["fsdp.backward_prefetch=null", "gradient_accumulation_steps=3"]),
        ("NO_SHARD", ["prefix_sharing=false", "activation_checkpointing=2"]),
        ("FULL_SHARD", ["fsdp.cpu_offload=true", *ONLINE, "prefix_sharing=false"]),
        ("TP", ["tokens_per_microbatch=150", *ONLINE]),
    ],
    ids=["full", "grad_op", "hybrid", "no_shard", "offload", "TP"],
)
def test_two_processes_change_nothing(place, pools, kind, name, options):
    if "reference.mode=online" not in options:  # a cold cache, or these ranks would read what one process computed
        options = [*options, f"reference.cache_dir={new_run_dir(place)}"]
    words = options_of(place, kind, *placement(name, 2), *options)
    ranks = train_together(pools(2), place, *words, prepare=note_numbers, timeout=300)
    for run in ranks[:1]:
        check_equal(run, reference(place, kind, run.examples, Objective("dpo")))
    assert ranks[0].losses == ranks[1].losses


@pytest.mark.slow
@BOTH
def test_compiling_changes_nothing(place, kind):
    check_run(place, kind, "compile=true")
