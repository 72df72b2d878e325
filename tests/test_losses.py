"""Losses against numbers worked out by hand and by independent implementations."""

import inspect
import math

import pytest
import torch

import losses
from losses import LOSSES, LossOutput, PairLogps, ResponseLogps
from losses.inputs import reward_accuracies
from losses.pairwise import preference_loss

BETA = 0.1
# One pair. Policy: chosen tokens -2 -3 -4 -1, rejected six times -2. Reference: chosen sum -11, rejected as written.
POLICY_CHOSEN, POLICY_REJECTED = [-2, -3, -4, -1], [-2] * 6
REFERENCE_CHOSEN, REFERENCE_REJECTED = -11.0, [-2, -1.5, -2, -2, -2, -1]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def pair():
    return PairLogps(
        tensor(sum(POLICY_CHOSEN)),
        tensor(sum(POLICY_REJECTED)),
        tensor(REFERENCE_CHOSEN),
        tensor(sum(REFERENCE_REJECTED)),
        tensor(4),
        tensor(6),
    )


def of_policy(pair):
    """The same pair, with the policy as its own reference."""
    return PairLogps(
        pair.policy_chosen,
        pair.policy_rejected,
        pair.policy_chosen,
        pair.policy_rejected,
        pair.chosen_lengths,
        pair.rejected_lengths,
    )


@pytest.mark.parametrize(
    "name, settings, value",
    [
        ("dpo", {}, 0.57593942),
        ("dpo", {"label_smoothing": 0.1}, 0.60093942),
        ("dpo", {"reference_free": True}, 0.59813887),
        ("dpo", {"f_divergence": "js"}, 0.62614638),
        ("ipo", {}, 6.25),
        ("ipo", {"average_log_prob": True}, 20.25),
    ],
)
def test_value(pair, name, settings, value):
    found = LOSSES[name](pair, beta=BETA, **settings).losses
    assert found.shape == (1,)
    assert found.item() == pytest.approx(value, abs=1e-6)


def rewards(output):
    return output.metrics["rewards/chosen"], output.metrics["rewards/rejected"]


def test_rewards_of_dpo_and_ipo(pair):
    for name in ("dpo", "ipo"):
        output = LOSSES[name](pair, beta=BETA)
        chosen, rejected = rewards(output)
        assert (chosen.item(), rejected.item()) == (pytest.approx(0.1), pytest.approx(-0.15))
        assert output.metrics["rewards/margins"].item() == pytest.approx(0.25)
        assert output.metrics["rewards/accuracies"].item() == 1.0


def test_averaged_ipo_rewards_are_of_averages(pair):
    chosen, rejected = rewards(LOSSES["ipo"](pair, beta=BETA, average_log_prob=True))
    assert (chosen.item(), rejected.item()) == (pytest.approx(0.1 / 4), pytest.approx(-0.15 / 6))


def test_policy_equal_to_reference(pair):
    output = LOSSES["dpo"](of_policy(pair), beta=BETA)
    assert output.losses.item() == pytest.approx(math.log(2), abs=1e-8)
    assert output.metrics["rewards/margins"].item() == 0.0
    assert output.metrics["rewards/accuracies"].item() == 0.5


def test_gradient_of_dpo(pair):
    pair.policy_chosen.requires_grad_()
    pair.policy_rejected.requires_grad_()
    LOSSES["dpo"](pair, beta=BETA).losses.sum().backward()
    assert pair.policy_chosen.grad.item() == pytest.approx(-0.04378235, abs=1e-7)
    assert pair.policy_rejected.grad.item() == pytest.approx(0.04378235, abs=1e-7)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("dpo", {}),
        ("dpo", {"label_smoothing": 0.2}),
        ("dpo", {"f_divergence": "js"}),
        ("dpo", {"reference_free": True}),
        ("ipo", {}),
        ("ipo", {"average_log_prob": True}),
        ("ipo", {"reference_free": True}),
    ],
)
def test_gradients_are_of_the_values_and_rewards_carry_none(name, settings):
    generator = torch.Generator().manual_seed(0)
    logps = [(-20 * torch.rand(5, generator=generator, dtype=torch.float64)).requires_grad_() for _ in range(4)]
    lengths = torch.arange(1, 6, dtype=torch.float64), torch.arange(2, 7, dtype=torch.float64)

    def compute(*logps):
        return LOSSES[name](PairLogps(*logps, *lengths), beta=0.3, **settings)

    assert torch.autograd.gradcheck(lambda *logps: compute(*logps).losses, logps)
    assert not any(value.requires_grad for value in compute(*logps).metrics.values())


def test_extreme_margins_stay_finite():
    far = PairLogps(
        *[torch.tensor([v], requires_grad=True) for v in (-1e4, -1.0, -1.0, -1e4)], torch.ones(1), torch.ones(1)
    )
    for settings in ({}, {"label_smoothing": 0.1}, {"f_divergence": "js"}):
        found = LOSSES["dpo"](far, beta=1.0, **settings).losses
        found.sum().backward()
        assert torch.isfinite(found).all() and torch.isfinite(far.policy_chosen.grad).all()


def test_unknown_divergence_is_an_error(pair):
    with pytest.raises(ValueError, match="f_divergence.*js or alpha"):
        LOSSES["dpo"](pair, beta=BETA, f_divergence="forward")


def test_ties_count_one_half():
    found = reward_accuracies(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, 1.0]))
    assert found.tolist() == [0.5, 1.0, 0.0]


def test_options_are_read_off_the_function():
    names = ["beta", "label_smoothing", "reference_free", "f_divergence", "alpha", "sft_weight"]
    assert list(LOSSES["dpo"].options) == names
    assert list(LOSSES["ipo"].options) == ["beta", "average_log_prob", "reference_free", "sft_weight"]
    assert LOSSES["sft"].options == {}
    beta, divergence = LOSSES["dpo"].options["beta"], LOSSES["dpo"].options["f_divergence"]
    assert (beta.type, beta.low, beta.open, beta.required) == (float, 0, True, True)
    assert divergence.choices == ("reverse_kl", "forward_kl", "js", "alpha") and not divergence.required


def test_what_a_loss_declares():
    sft, dpo = LOSSES["sft"], LOSSES["dpo"]
    assert (sft.inputs.kind, dpo.inputs.kind) == ("responses", "pairs")
    assert not sft.needs_reference({}) and dpo.needs_reference({"beta": 0.1})
    assert not dpo.needs_reference({"reference_free": True})
    assert sft.metric_names("eval", {}) == ("loss/eval", "logps_eval/chosen", "lengths_eval/chosen")
    assert dpo.metric_names("train", {})[:5] == (
        "loss/train",
        "rewards_train/chosen",
        "rewards_train/rejected",
        "rewards_train/accuracies",
        "rewards_train/margins",
    )


def test_sft_is_the_summed_negative_log_likelihood():
    assert LOSSES["sft"](ResponseLogps(tensor(-10, -12), tensor(3, 4))).losses.tolist() == [10, 12]


@pytest.fixture
def registry(monkeypatch):
    """A registry that the test may add to."""
    monkeypatch.setattr(losses.registry, "LOSSES", dict(LOSSES))
    return losses.registry


def test_register_loss_makes_a_loss_available(registry, pair):
    @losses.register_loss("mine", metrics=("gap",))
    def mine(pairs: PairLogps, *, gamma: float) -> LossOutput:
        return LossOutput(pairs.policy_chosen * gamma, {"gap": pairs.policy_chosen - pairs.policy_rejected})

    loss = losses.find_loss("mine")
    assert loss.function is mine and list(loss.options) == ["gamma", "sft_weight"] and loss.needs_reference({})
    assert loss(pair, gamma=2.0).losses.item() == -20
    assert loss.metric_names("eval", {})[:2] == ("loss/eval", "gap/eval")
    with pytest.raises(ValueError, match="loss.beta is a key that its function does not take; loss=mine takes gamma"):
        loss.check_options({"beta": 1, "gamma": 1})
    with pytest.raises(ValueError, match="loss.gamma is missing"):
        loss.check_options({})


def test_mistakes_in_a_loss_are_named(registry, pair):
    with pytest.raises(ValueError, match="annotate the first argument of untyped"):

        @losses.register_loss("untyped")
        def untyped(pairs): ...

    with pytest.raises(ValueError, match="annotate its option beta with a type"):

        @losses.register_loss("half typed")
        def half_typed(pairs: PairLogps, *, beta): ...

    @losses.register_loss("silent")
    def silent(pairs: PairLogps) -> LossOutput:
        return LossOutput(pairs.policy_chosen)

    with pytest.raises(ValueError, match="returned the metrics none, but is registered with rewards/chosen"):
        losses.find_loss("silent")(pair)
    with pytest.raises(ValueError, match="no module in losses/ has @register_loss"):
        losses.find_loss("nothing")


@pytest.mark.parametrize("kind", [list[float], dict, float | None])
def test_an_option_of_a_type_that_no_setting_has_is_refused(registry, kind):
    def mine(pairs: PairLogps, *, scales) -> LossOutput: ...

    mine.__annotations__["scales"] = kind
    with pytest.raises(ValueError, match="loss=mine: its option scales is a .*; give it one of the types float, int"):
        losses.register_loss("mine")(mine)
    assert "mine" not in registry.LOSSES


def test_a_name_belongs_to_one_function(registry):
    dpo = LOSSES["dpo"].function

    with pytest.raises(ValueError, match="loss=dpo is registered already, by losses.pairwise.dpo: give .*mine another"):

        @losses.register_loss("dpo")
        def mine(pairs: PairLogps) -> LossOutput: ...

    assert registry.LOSSES["dpo"].function is dpo
    losses.register_loss("dpo")(dpo)  # its module imported a second time


class TestPreferenceLoss:
    """The function of the DPO reference implementation, for its users' scripts."""

    def arguments(self, pair):
        return pair.policy_chosen, pair.policy_rejected, pair.reference_chosen, pair.reference_rejected

    def test_signature(self):
        parameters = inspect.signature(preference_loss).parameters
        assert [(p.name, p.default) for p in parameters.values()] == [
            ("policy_chosen_logps", inspect.Parameter.empty),
            ("policy_rejected_logps", inspect.Parameter.empty),
            ("reference_chosen_logps", inspect.Parameter.empty),
            ("reference_rejected_logps", inspect.Parameter.empty),
            ("beta", inspect.Parameter.empty),
            ("label_smoothing", 0.0),
            ("ipo", False),
            ("reference_free", False),
        ]
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())

    @pytest.mark.parametrize(
        "settings, value",
        [
            ({}, 0.57593942),
            ({"label_smoothing": 0.1}, 0.60093942),
            ({"reference_free": True}, 0.59813887),
            ({"ipo": True}, 6.25),
            ({"ipo": True, "reference_free": True}, 9.0),
        ],
    )
    def test_values(self, pair, settings, value):
        found, chosen, rejected = preference_loss(*self.arguments(pair), BETA, **settings)
        assert found.item() == pytest.approx(value, abs=1e-6)
        assert (chosen.item(), rejected.item()) == (pytest.approx(0.1), pytest.approx(-0.15))

    def test_is_found_where_its_users_import_it(self):
        import trainers

        assert trainers.preference_loss is preference_loss


@pytest.mark.parametrize(
    "returned, complaint",
    [
        (lambda pairs: (pairs.policy_chosen, 0, 0), "returned a tuple: it must return a LossOutput"),
        (lambda pairs: LossOutput(pairs.policy_chosen.mean(), {"gap": pairs.policy_chosen}), r"losses must .*\[1\]"),
        (lambda pairs: LossOutput(pairs.policy_chosen, {"gap": 1.0}), "its gap must be a tensor .* not float"),
    ],
)
def test_what_a_loss_returns_is_checked(registry, pair, returned, complaint):
    @losses.register_loss("mine", metrics=("gap",))
    def mine(pairs: PairLogps) -> LossOutput:
        return returned(pairs)

    with pytest.raises(ValueError, match=complaint):
        losses.find_loss("mine")(pair)


def test_what_a_loss_declares_is_checked(registry):
    with pytest.raises(ValueError, match="reports logps/chosen already"):

        @losses.register_loss("mine", metrics=("logps/chosen",))
        def clashing(pairs: PairLogps) -> LossOutput: ...

    with pytest.raises(ValueError, match=r"metrics=\('kl',\)"):

        @losses.register_loss("mine", metrics="kl")
        def text(pairs: PairLogps) -> LossOutput: ...

    with pytest.raises(ValueError, match="put its option beta behind a"):

        @losses.register_loss("mine")
        def positional(pairs: PairLogps, beta: float) -> LossOutput: ...

    with pytest.raises(ValueError, match="annotate the first argument of nothing"):

        @losses.register_loss("mine")
        def nothing() -> LossOutput: ...


def test_a_file_that_cannot_be_imported_is_reported_once_a_loss_is_needed(monkeypatch):
    monkeypatch.setitem(losses.registry.BROKEN, "losses/bad.py", ModuleNotFoundError("No module named 'x'"))
    with pytest.raises(ValueError, match="losses/bad.py cannot be imported: ModuleNotFoundError: No module named 'x'"):
        losses.find_loss("dpo")
