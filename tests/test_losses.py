"""Losses against numbers worked out by hand and by independent implementations."""

import inspect
import math

import pytest
import torch

import losses
from losses import LOSSES, PairLogps, preference_loss, reward_accuracies

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
    found, _, _ = LOSSES[name](pair, beta=BETA, **settings)
    assert found.shape == (1,)
    assert found.item() == pytest.approx(value, abs=1e-6)


def test_rewards_of_dpo_and_ipo(pair):
    for name in ("dpo", "ipo"):
        _, chosen, rejected = LOSSES[name](pair, beta=BETA)
        assert (chosen.item(), rejected.item()) == (pytest.approx(0.1), pytest.approx(-0.15))
        assert (chosen - rejected).item() == pytest.approx(0.25)
        assert reward_accuracies(chosen, rejected).item() == 1.0


def test_averaged_ipo_rewards_are_of_averages(pair):
    _, chosen, rejected = LOSSES["ipo"](pair, beta=BETA, average_log_prob=True)
    assert (chosen.item(), rejected.item()) == (pytest.approx(0.1 / 4), pytest.approx(-0.15 / 6))


def test_policy_equal_to_reference(pair):
    found, chosen, rejected = LOSSES["dpo"](of_policy(pair), beta=BETA)
    assert found.item() == pytest.approx(math.log(2), abs=1e-8)
    assert (chosen - rejected).item() == 0.0
    assert reward_accuracies(chosen, rejected).item() == 0.5


def test_gradient_of_dpo(pair):
    pair.policy_chosen.requires_grad_()
    pair.policy_rejected.requires_grad_()
    LOSSES["dpo"](pair, beta=BETA)[0].sum().backward()
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
    assert torch.autograd.gradcheck(lambda *x: LOSSES[name](PairLogps(*x, *lengths), beta=0.3, **settings)[0], logps)
    _, chosen, rejected = LOSSES[name](PairLogps(*logps, *lengths), beta=0.3, **settings)
    assert not chosen.requires_grad and not rejected.requires_grad


def test_extreme_margins_stay_finite():
    far = PairLogps(
        *[torch.tensor([v], requires_grad=True) for v in (-1e4, -1.0, -1.0, -1e4)], torch.ones(1), torch.ones(1)
    )
    for settings in ({}, {"label_smoothing": 0.1}, {"f_divergence": "js"}):
        found = LOSSES["dpo"](far, beta=1.0, **settings)[0]
        found.sum().backward()
        assert torch.isfinite(found).all() and torch.isfinite(far.policy_chosen.grad).all()


def test_unknown_divergence_is_an_error(pair):
    with pytest.raises(ValueError, match="f_divergence.*reverse_kl or js"):
        LOSSES["dpo"](pair, beta=BETA, f_divergence="forward")


def test_ties_count_one_half():
    found = reward_accuracies(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, 1.0]))
    assert found.tolist() == [0.5, 1.0, 0.0]


def test_options_name_what_a_loss_takes():
    assert losses.options("dpo") == ["beta", "label_smoothing", "reference_free", "f_divergence"]
    assert losses.options("ipo") == ["beta", "average_log_prob", "reference_free"]
    assert losses.options("sft") == []


def test_sft_is_the_summed_negative_log_likelihood():
    assert losses.sft(tensor(-10, -12)).tolist() == [10, 12]


def test_register_loss_makes_a_loss_available(monkeypatch):
    monkeypatch.setattr(losses, "LOSSES", dict(LOSSES))

    @losses.register_loss("mine")
    def mine(pairs, *, gamma):
        return pairs.policy_chosen * gamma, *losses._rewards(pairs, 1.0)

    assert losses.LOSSES["mine"] is mine and losses.options("mine") == ["gamma"]


class TestPreferenceLoss:
    """The function of the DPO paper's reference implementation, for its users' scripts."""

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
