"""Every loss: against numbers worked out by hand, numeric gradients, extreme inputs, and in real runs."""

import json
import math
from dataclasses import fields

import pytest
import torch
import yaml
from conftest import ROOT
from runs import LLAMA, STRONG, assert_same_training, baseline, train

from losses import LOSSES, find_loss
from losses.inputs import (
    CollisionPairLogps,
    DivergencePairLogps,
    FrontPairLogps,
    GroupLogps,
    PairLogps,
    ScoredGroupLogps,
    ScoredPairLogps,
    UnpairedLogps,
    UnpairedWithMismatched,
)

CASES = ROOT.parent / "shared" / "cases" / "losses.json"
BETA = 0.1


def values(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# The pair of log-ratios 1.0 and -1.5 (nats), of 4 and 6 tokens.
PAIR = (values(-10), values(-12), values(-11.0), values(-10.5), values(4), values(6))


def options_of(name: str, **changes) -> dict:
    """The options of a loss's yaml, without the SFT term."""
    written = yaml.safe_load((ROOT / "config" / "loss" / f"{name}.yaml").read_text())
    return {key: value for key, value in written.items() if key not in ("name", "sft_weight")} | changes


def inputs_of(kind: type, policy: torch.Tensor, reference: torch.Tensor):
    """Any input, of 2n log-probs: neighbours are pairs, all even ones are good, all belong to one prompt."""
    n = len(policy) // 2
    own = torch.arange(2 * n)
    lengths = 1.0 + own.to(policy.dtype) % 5
    if issubclass(kind, PairLogps):
        parts = [part[start::2] for part in (policy, reference) for start in (0, 1)]
        more = {
            PairLogps: (),
            ScoredPairLogps: (lengths[::2] + 1, lengths[1::2]),
            FrontPairLogps: tuple(part / 2 for part in parts),
            CollisionPairLogps: ((parts[0] / 2).detach(), (parts[1] / 3).detach()),
            DivergencePairLogps: (-parts[0] / 3, -parts[1] / 2),
        }[kind]
        return kind(*parts, lengths[::2], lengths[1::2], *more)
    if issubclass(kind, UnpairedLogps):
        more = (policy[:2], reference[:2]) if kind is UnpairedWithMismatched else ()
        return kind(policy, reference, own % 2 == 0, lengths, *more)
    assert issubclass(kind, GroupLogps)
    preferences = torch.tensor([(i, j) for i in range(2 * n) for j in range(i + 1, 2 * n)])
    scores = -own.to(policy.dtype)
    return kind(policy, reference, lengths, torch.zeros_like(own), preferences, scores, 1)


def compute(name: str, inputs, **changes):
    loss = LOSSES[name]
    memory = {"memory": dict.fromkeys(loss.memory, 1.0)} if loss.memory else {}
    return loss(inputs, **options_of(name, **changes), **memory)


FAMILY = [name for name in LOSSES if name not in ("sft", "mix")]
VARIANTS = [
    *((name, {}) for name in FAMILY),
    ("dpo", {"label_smoothing": 0.2}),
    ("dpo", {"f_divergence": "forward_kl"}),
    ("dpo", {"f_divergence": "js"}),
    ("dpo", {"f_divergence": "alpha", "alpha": 0.3}),
    ("dpo", {"reference_free": True}),
    ("ipo", {"average_log_prob": True}),
    ("odpo", {"offset": "difference"}),
    *((name, {"sft_weight": 0.3}) for name in ("dpo", "simpo", "kto", "plackett_luce")),
]


# ---- Numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not CASES.is_file(), reason="the cases are not here")
def test_handed_cases():
    done = 0
    for case in json.loads(CASES.read_text())["expected"]:
        if "loss" not in case:
            continue
        changes = {key: case[key] for key in case.keys() - {"loss", "value", "rewards", "policy_equals_reference"}}
        pair = PairLogps(*PAIR[:2], *(PAIR[:2] if case.get("policy_equals_reference") else PAIR[2:4]), *PAIR[4:])
        output = compute(case["loss"], pair, beta=BETA, **changes)
        assert output.losses.item() == pytest.approx(case["value"], abs=1e-6), case
        for name, value in case.get("rewards", {}).items():
            key = {"margin": "margins", "accuracy": "accuracies"}.get(name, name)
            assert output.metrics[f"rewards/{key}"].item() == pytest.approx(value, abs=1e-9), case
        done += 1
    assert done == 12


def logistic(x):
    return math.log1p(math.exp(-x))


@pytest.mark.parametrize(
    "name, changes, value",
    [
        # f'(u) of u = e and e^-1.5, with beta = 0.1
        ("dpo", {"f_divergence": "forward_kl"}, logistic(0.1 * (-math.exp(-1) + math.exp(1.5)))),
        ("dpo", {"f_divergence": "alpha"}, logistic(0.1 * (-math.exp(-0.5) + math.exp(0.75)) / 0.5)),
        ("hinge", {"margin": 0.1}, 0.0),
        ("sppo", {}, (1 - 5) ** 2 + (-1.5 + 5) ** 2),
        ("cal_dpo", {}, logistic(2.5) + (1 - 5) ** 2 + (-1.5 + 5) ** 2),
        ("apo_down", {}, 1 / (1 + math.exp(-0.1)) + 1 - 1 / (1 + math.exp(-0.25))),
        ("dpo_norm", {}, logistic(0.1 * (1 / 4 + 1.5 / 6))),
        ("simpo", {"gamma": 0.5}, logistic(0.1 * (-10 / 4 + 12 / 6) - 0.5)),
        ("cpo", {}, logistic(0.1 * 2)),
        # odds of mean log-probs -2.5 and -2
        ("orpo", {}, 2.5 + 0.1 * logistic(-0.5 - math.log1p(-math.exp(-2.5)) + math.log1p(-math.exp(-2)))),
        # exp(-0.25) weighs sigmoid(0.25 / 0.05), -log sigmoid the rest
        ("discopop", {}, logistic(0.25) * (1 - 1 / (1 + math.exp(-5))) + math.exp(-0.25) / (1 + math.exp(-5))),
        ("dpo", {"sft_weight": 0.2}, 0.57593942 + 0.2 * 10 / 4),
        ("simpo", {"gamma": 0.5, "sft_weight": 1.0}, logistic(0.1 * -0.5 - 0.5) + 2.5),
    ],
)
def test_value_of_a_pair(name, changes, value):
    output = compute(name, PairLogps(*PAIR), beta=BETA, **changes)
    assert output.losses.item() == pytest.approx(value, abs=1e-8)
    if "sft_weight" in changes:
        assert output.metrics["sft"].item() == 2.5


def test_dpo_with_an_offset():
    pair = ScoredPairLogps(*PAIR, values(3.0), values(1.0))
    assert compute("odpo", pair, beta=BETA).losses.item() == pytest.approx(logistic(0.25 - math.log(3)))
    assert compute("odpo", pair, beta=BETA, offset="difference", alpha=0.5).losses.item() == pytest.approx(
        logistic(0.25 - 1)
    )


def test_alignment_by_optimal_transport_sorts_the_step():
    policy_chosen, policy_rejected = values(-1, -5, -2), values(-2, -3, -6)  # differences 1, -2, 4
    reference_chosen, reference_rejected = values(-1, -1, -1), values(-4, -1, -2)  # differences 3, 0, 1
    ones = torch.ones(3)
    pairs = PairLogps(policy_chosen, policy_rejected, reference_chosen, reference_rejected, ones, ones)
    # sorted: -2 1 4 against 0 1 3; each is given to the pair that its policy difference is of
    expected = [logistic(0.0), logistic(0.1 * -2), logistic(0.1 * 1)]
    assert compute("aot", pairs, beta=BETA).losses.tolist() == pytest.approx(expected)
    # chosen log-ratios 0 -4 -1, sorted -4 -1 0; rejected 2 -2 -4, sorted -4 -2 2
    expected = [logistic(0.1 * -2), logistic(0.0), logistic(0.1 * 1)]
    assert compute("aot_unpaired", pairs, beta=BETA).losses.tolist() == pytest.approx(expected)


def token_batch():
    """Two responses of 2 and 4 tokens, a pair."""

    class Batch:
        lengths, pairs = torch.tensor([2.0, 4.0]), torch.tensor([[0, 1]])

    return Batch


def test_length_desensitised_dpo():
    policy, reference = values(-1, -2, -1, -1, -3, -4), values(-2, -2, -1, -2, -3, -3)
    sums = values(-3, -9), values(-4, -9)
    pairs = FrontPairLogps.select(*sums, token_batch(), (policy, reference))
    # Of the longer response the first two tokens count whole, the other two half.
    h = (-3 + 4) - ((-2 - 7 / 2) - (-3 - 6 / 2))
    assert compute("ld_dpo", pairs, beta=BETA, alpha=0.5).losses.item() == pytest.approx(logistic(0.1 * h))
    assert compute("ld_dpo", pairs, beta=BETA, alpha=1.0).losses.item() == pytest.approx(logistic(0.1 * (1 - 0)))


def test_weights_of_wpo():
    sums = values(-3, -9), values(-4, -9)
    pairs = CollisionPairLogps.select(*sums, token_batch(), (values(-0.5 - 0.5, -1 - 1 - 1 - 2),))
    weight = math.exp((-3 + 1) / 2) * math.exp((-9 + 5) / 4)
    output = compute("wpo", pairs, beta=BETA)
    assert output.losses.item() == pytest.approx(weight * logistic(0.1 * 1))
    assert output.metrics["pair_weight"].item() == pytest.approx(weight)


def test_token_level_dpo():
    sums = values(-3, -9), values(-4, -9)
    divergence = values(0.1, 0.2, 0.3, 0.1, 0.2, 0.3).requires_grad_()
    of_responses = torch.stack([divergence[:2].sum(), divergence[2:].sum()])
    pairs = DivergencePairLogps.select(*sums, token_batch(), (of_responses,))
    assert compute("tdpo", pairs, beta=BETA, variant="tdpo1").losses.item() == pytest.approx(logistic(0.1 * (1 - 0.6)))
    second = compute("tdpo", pairs, beta=BETA, alpha=0.5).losses
    assert second.item() == pytest.approx(logistic(0.1 * (1 - 0.3)))
    (slope,) = torch.autograd.grad(second.sum(), divergence)
    assert slope[:2].tolist() == [0, 0] and (slope[2:] > 0).all()


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_kto():
    responses = UnpairedWithMismatched(
        values(-3, -8), values(-5, -7), torch.tensor([True, False]), values(3, 4), values(-4, -6), values(-5, -9)
    )
    kl = 0.1 * (1 + 3) / 2
    output = compute("kto", responses, beta=BETA, undesirable_weight=1.5)
    assert output.losses.tolist() == pytest.approx([sigmoid(-(0.2 - kl)), 1.5 * sigmoid(-0.1 - kl)])
    assert output.metrics["kl"].tolist() == pytest.approx([kl, kl])
    responses.mismatched_policy = values(-14, -16)  # an estimate below 0 counts as 0
    assert compute("kto", responses, beta=BETA).metrics["kl"].tolist() == [0, 0]


def test_bco_and_its_baseline():
    loss = LOSSES["bco"]
    responses = UnpairedLogps(values(-3, -8), values(-5, -7), torch.tensor([True, False]), values(3, 4))
    output = loss(responses, beta=1.0, memory={"reward_sum": 7.0, "reward_count": 6.0})
    baseline_ = (7 + 2 - 1) / 8
    assert output.losses.tolist() == pytest.approx([logistic(2 - baseline_), logistic(-(-1 - baseline_))])
    assert {name: value.item() for name, value in output.memory.items()} == {"reward_sum": 8.0, "reward_count": 8.0}


def test_beta_dpo():
    margins = values(0.0, 1.0, 2.0, 9.0)  # log-ratios of chosen responses; those of rejected ones are 0
    zeros, ones = torch.zeros(4, dtype=torch.float64), torch.ones(4)
    pairs = PairLogps(margins, zeros, zeros, zeros, ones, ones)
    output = LOSSES["beta_dpo"](
        pairs, beta=1.0, alpha=0.5, momentum=0.5, keep=0.75, memory={"margin_mean": 1.0, "steps": 3.0}
    )
    mean = 0.5 * 1.0 + 0.5 * 3.0  # = 2: the margins 0, 1 and 2 are the nearest to it
    adapted = 1 + 0.5 * (1.0 - mean)
    expected = [logistic(adapted * margin) * 4 / 3 for margin in (0, 1, 2)] + [0.0]
    assert output.losses.tolist() == pytest.approx(expected)
    assert output.metrics["beta"].tolist() == pytest.approx([adapted] * 4)
    assert {name: value.item() for name, value in output.memory.items()} == {"margin_mean": 2.0, "steps": 4.0}


def group(scores, preferences, kind=GroupLogps):
    policy = values(1.0, 2.0, -1.0)
    zeros = torch.zeros(3, dtype=torch.float64)
    return kind(policy, zeros, zeros + 1, torch.zeros(3, dtype=torch.int64), torch.tensor(preferences), scores, 1)


def test_plackett_luce():
    everything = [(1, 0), (1, 2), (0, 2)]  # the ranking 1, 0, 2 of rewards 2, 1, -1
    output = compute("plackett_luce", group(values(0, 0, 0), everything), beta=1.0)
    total = math.exp(1) + math.exp(2) + math.exp(-1)
    expected = -(2 - math.log(total)) - (1 - math.log(math.exp(1) + math.exp(-1)))
    assert output.losses.item() == pytest.approx(expected) and output.metrics["ranked_right"].item() == 1.0
    # one pair is DPO; a response that is in no preference stays out of nothing here, as it has none behind it
    pair = GroupLogps(values(1, 3), values(0, 0), values(1, 1), torch.zeros(2, dtype=torch.int64),
                      torch.tensor([(0, 1)]), values(0, 0), 1)  # fmt: skip
    assert compute("plackett_luce", pair, beta=0.5).losses.item() == pytest.approx(logistic(0.5 * -2))


def test_listwise_softmax():
    output = compute("listwise_softmax", group(values(3, 1, 2), [(0, 2)], ScoredGroupLogps), beta=1.0, temperature=2.0)
    weights = [math.exp(score / 2) for score in (3, 1, 2)]
    log_total = math.log(math.exp(1) + math.exp(2) + math.exp(-1))
    expected = -sum(w / sum(weights) * (reward - log_total) for w, reward in zip(weights, (1, 2, -1)))
    assert output.losses.item() == pytest.approx(expected) and output.metrics["ranked_right"].item() == 1.0


# ---- What holds for every loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, changes", VARIANTS)
def test_numeric_gradients_and_metrics_without_gradient(name, changes):
    kind = LOSSES[name].inputs
    generator = torch.Generator().manual_seed(0)
    policy, reference = (-20 * torch.rand(2, 8, generator=generator, dtype=torch.float64)).unbind()
    policy.requires_grad_()
    if name == "beta_dpo":  # its beta is a constant of the step, which a numeric gradient would move
        changes = changes | {"alpha": 0.0}
    if name == "tdpo":  # tdpo2 leaves out a part of the gradient on purpose: see its own test
        changes = changes | {"variant": "tdpo1"}
    frozen = inputs_of(kind, policy.detach().clone(), reference)

    def losses(policy):
        inputs = inputs_of(kind, policy, reference)
        if kind is UnpairedWithMismatched:
            inputs.mismatched_policy = frozen.mismatched_policy
        if name == "bco":  # the baseline carries no gradient, but moves with a numeric one
            return LOSSES[name](inputs, beta=BETA, memory={"reward_sum": 0.0, "reward_count": 1e12}).losses
        if name == "wpo":  # a pair's weight is a constant, which a numeric gradient would move
            output = compute(name, inputs)
            return output.losses / output.metrics["pair_weight"] * compute(name, frozen).metrics["pair_weight"]
        return compute(name, inputs, **changes).losses

    assert torch.autograd.gradcheck(losses, (policy,))
    for value in compute(name, inputs_of(kind, policy, reference), **changes).metrics.values():
        assert not any(part.requires_grad for part in (value if isinstance(value, tuple) else (value,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name, changes", VARIANTS)
def test_extreme_log_ratios_stay_finite(name, changes, dtype):
    far = torch.tensor([-4000.0, 0.0, 0.0, -4000.0, -4000.0, -4000.0, 0.0, 0.0], dtype=dtype)
    for policy, reference in ((far, far.flip(0)), (far, torch.zeros_like(far)), (torch.zeros_like(far), far)):
        policy = policy.clone().requires_grad_()
        output = compute(name, inputs_of(LOSSES[name].inputs, policy, reference), **changes)
        output.losses.sum().backward()
        assert torch.isfinite(output.losses).all() and torch.isfinite(policy.grad).all()
        for value in output.metrics.values():
            assert torch.isfinite(value[0] if isinstance(value, tuple) else value).all()


@pytest.mark.parametrize("name", [name for name in FAMILY if LOSSES[name].start])
def test_start_is_the_loss_of_the_reference_itself(name):
    loss, options = LOSSES[name], options_of(name)
    policy = values(-3, -9, -4, -2)
    memory = {"memory": dict(loss.memory)} if loss.memory else {}
    inputs = inputs_of(loss.inputs, policy, policy)
    if isinstance(inputs, DivergencePairLogps):
        inputs.chosen_divergence = inputs.rejected_divergence = torch.zeros_like(policy[::2])
    found = loss(inputs, **options, **memory).losses
    assert found.tolist() == pytest.approx([loss.starting_point(options).value] * len(found), rel=1e-9)
    assert loss.starting_point(options | {"sft_weight": 0.1}) is None


@pytest.mark.parametrize("name", FAMILY)
def test_a_loss_reads_what_it_declares(name):
    """A reference where it says so, and every option."""
    loss = LOSSES[name]
    policy, reference = values(-3, -9, -4, -2, -7, -5), values(-4, -6, -5, -3, -2, -8)
    before = compute(name, inputs_of(loss.inputs, policy, reference)).losses
    moved = compute(name, inputs_of(loss.inputs, policy, reference - values(1, 2, 0, 4, 0, 3))).losses
    assert torch.equal(before, moved) != loss.needs_reference(options_of(name))
    for option, of in loss.options.items():
        now = options_of(name).get(option, of.default)
        if of.choices:
            other = next(choice for choice in of.choices if choice != now)
        else:
            other = not now if of.type is bool else now / 2 if now else 0.3
        together = dict([of.only_with]) if of.only_with else {}
        base = compute(name, inputs_of(loss.inputs, policy, reference), **together).losses
        after = compute(name, inputs_of(loss.inputs, policy, reference), **together, **{option: other}).losses
        assert not torch.equal(base, after), option


@pytest.mark.parametrize("name", FAMILY)
def test_order_of_examples_does_not_matter(name):
    loss = LOSSES[name]
    if issubclass(loss.inputs, GroupLogps):
        pytest.skip("an example has many responses")
    policy, reference = -20 * torch.rand(2, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = inputs_of(loss.inputs, policy, reference)
    order = torch.randperm(inputs.n_examples, generator=torch.Generator().manual_seed(2))
    shuffled = type(inputs)(
        **{
            each.name: value if each.name.startswith("mismatched") else value[order]
            for each in fields(inputs)
            for value in [getattr(inputs, each.name)]
        }
    )
    assert compute(name, shuffled).losses.tolist() == pytest.approx(compute(name, inputs).losses[order].tolist())


# ---- In runs -------------------------------------------------------------------------------------------------------


def online(name):
    """What a loss asks for that looks at the reference token by token."""
    return ["reference.mode=online"] if LOSSES[name].inputs.reference_by_token else []


WITHOUT_SCORES = [name for name in FAMILY if not LOSSES[name].inputs.needs_scores]


@pytest.mark.parametrize("name", WITHOUT_SCORES)
def test_the_update_does_not_depend_on_micro_batches(folder, name):
    options = (*LLAMA, f"loss={name}", *online(name))
    run = baseline(folder, *options)
    assert_same_training(run, train(folder, *options, *STRONG, "tokens_per_microbatch=64"))


@pytest.mark.parametrize("name", ["kto", "bco", "aot", "beta_dpo"])
def test_an_evaluation_does_not_depend_on_its_batch_size(folder, name, monkeypatch):
    def divergence(self, beta):  # below 0, too, which kto takes for 0
        return beta * (self.mismatched_policy - self.mismatched_reference).detach().mean()

    monkeypatch.setattr(UnpairedWithMismatched, "kl", divergence)
    runs = [
        train(folder, *LLAMA, *STRONG, f"loss={name}", "n_examples=16", "batch_size=8", f"eval_batch_size={size}")
        for size in (1, 2, 3, 100)
    ]
    assert name != "kto" or abs(runs[0].evals[-1]["kl/eval"]) > 1e-3
    for run in runs[1:]:
        assert run.evals[-1] == pytest.approx(runs[0].evals[-1], abs=1e-6)


# ---- Weighted sums ---------------------------------------------------------------------------------------------------


def mixed(*parts, **options):
    return find_loss("mix", {"parts": list(parts), **options})


def test_a_mix_is_the_weighted_sum_of_its_parts():
    loss = mixed({"name": "dpo", "beta": 0.1}, {"name": "apo_zero", "beta": 0.2, "weight": 0.5})
    pair = PairLogps(*PAIR)
    output = loss(pair, sft_weight=2.0)
    parts = compute("dpo", pair, beta=0.1).losses, compute("apo_zero", pair, beta=0.2).losses
    assert output.losses.item() == pytest.approx((parts[0] + 0.5 * parts[1] + 2.0 * 2.5).item())
    assert [output.metrics[name].item() for name in ("dpo", "apo_zero", "rewards/chosen")] == pytest.approx(
        [parts[0].item(), parts[1].item(), 0.1]
    )


def test_a_mix_needs_what_its_parts_need():
    assert not mixed({"name": "simpo", "beta": 2, "gamma": 1}, {"name": "orpo", "beta": 1}).needs_reference({})
    loss = mixed({"name": "bco", "beta": 0.1}, {"name": "kto", "beta": 0.1}, {"name": "bco", "beta": 1.0})
    assert loss.step_wide and loss.inputs is UnpairedWithMismatched and loss.needs_reference({})
    assert list(loss.memory) == ["bco.reward_sum", "bco.reward_count", "bco_2.reward_sum", "bco_2.reward_count"]
    inputs = inputs_of(loss.inputs, values(-3, -9, -4, -2), values(-4, -6, -5, -3))
    output = loss(inputs, memory=loss.memory)
    assert output.memory.keys() == loss.memory.keys() and output.memory["bco_2.reward_count"] == 4


@pytest.mark.parametrize(
    "parts, message",
    [
        ([], "loss.parts is empty"),
        ([{"beta": 0.1}], r"loss.parts\[0\] must name a loss"),
        ([{"name": "dpo"}], r"loss.parts\[0\]: loss.beta is missing"),
        ([{"name": "dpo", "beta": 0.1, "gamma": 1}], "loss.gamma is a key that its function does not take"),
        ([{"name": "dpo", "beta": 0.1}, {"name": "kto", "beta": 0.1}], "dpo takes pairs, kto takes responses"),
        ([{"name": "dpo", "beta": 0.1, "alpha": 0.2}], "no effect without loss.f_divergence=alpha"),
        ([{"name": "sft"}], "for the likelihood of chosen responses set loss.sft_weight"),
        ([{"name": "mix", "parts": []}], "mix is no loss to add up"),
        ([{"name": "dpo", "beta": 0.1, "sft_weight": 1}], "once for all parts"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        mixed(*parts)


# ---- Documents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
def test_the_table_has_every_loss_with_its_defaults(name):
    rows = [line for line in (ROOT / "docs" / "losses.md").read_text().splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1
    written = yaml.safe_load((ROOT / "config" / "loss" / f"{name}.yaml").read_text())
    own = [f"{key} {value}" for key, value in written.items() if key not in ("name", "sft_weight")]
    if written.get("sft_weight"):
        own.append(f"sft_weight {written['sft_weight']}")
    assert f"| {', '.join(own)} |".replace("False", "false") in rows[0]


@pytest.mark.parametrize("name", ["plackett_luce", "listwise_softmax"])
def test_the_likelihood_of_the_best_responses_beside_a_loss_of_rankings(name):
    """Three prompts: one best response, two that are level, and again one."""
    policy = torch.tensor([-4.0, -6.0, -8.0, -3.0, -2.0, -9.0, -5.0, -7.0], dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([2.0, 3.0, 4.0, 3.0, 1.0, 3.0, 5.0, 1.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2])
    preferences = torch.tensor([[1, 0], [2, 4], [3, 4], [3, 5], [6, 7]])
    scores = torch.tensor([1.0, 2.0, 3.0, 3.0, 1.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    inputs = LOSSES[name].inputs(policy, torch.zeros_like(policy), lengths, group, preferences, scores, 3)
    options = {"beta": 0.1} | ({"temperature": 1.0} if name == "listwise_softmax" else {})
    with_term, plain = (LOSSES[name](inputs, sft_weight=weight, **options) for weight in (0.5, 0.0))
    nll = torch.tensor([6 / 3, (8 / 4 + 3 / 3) / 2, 5 / 5], dtype=torch.float64)
    torch.testing.assert_close(with_term.losses, plain.losses + 0.5 * nll)
    torch.testing.assert_close(with_term.metrics["sft"], nll)
    (slope,) = torch.autograd.grad((with_term.losses - plain.losses).sum(), policy)
    assert slope.nonzero().flatten().tolist() == [1, 2, 3, 6]
