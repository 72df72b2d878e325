"""The losses that this project shares with TRL, on the same log-probs of tokens, against TRL's own code (slow).

TRL's trainers compute a loss inside one method, with the model's call. Here that method is called with a stand-in for
the trainer and one for the model, which returns the log-probs of a table. It is written for the TRL that
benchmarks/requirements.txt asks for, and skipped where that is not installed.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from losses import LOSSES
from losses.inputs import CollisionPairLogps, FrontPairLogps, PairLogps, UnpairedLogps, UnpairedWithMismatched

pytestmark = pytest.mark.slow
BETA, PAIRS, PROMPT, LONGEST = 0.3, 6, 3, 8


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl", reason="TRL is not installed: pip install -r benchmarks/requirements.txt")


class Table:
    """Log-probs of 2 * PAIRS responses, chosen ones first: float64 [2 * PAIRS, LONGEST], 0 beyond a response's end."""

    def __init__(self, seed: int):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.Generator().manual_seed(100)  # the same for policy and reference
        self.lengths = torch.randint(2, LONGEST + 1, (2 * PAIRS,), generator=lengths)
        self.mask = torch.arange(LONGEST)[None] < self.lengths[:, None]
        self.logps = -3 * torch.rand(2 * PAIRS, LONGEST, generator=draw, dtype=torch.float64) * self.mask
        self.collisions = -torch.rand(2 * PAIRS, LONGEST, generator=draw, dtype=torch.float64) * self.mask
        self.training, self.dtype = False, torch.float64

    def __call__(self, **_):
        """What TRL's models return: a prompt's tokens, one of which a shift has taken, come before the response's."""
        before = torch.zeros(2 * PAIRS, PROMPT - 1, dtype=torch.float64)
        whole = {name: torch.cat([before, getattr(self, name)], 1).to(self.dtype) for name in ("logps", "collisions")}
        return SimpleNamespace(
            log_probs=whole["logps"],
            log_sum_sq_probs=whole["collisions"],
            entropy=torch.zeros_like(whole["logps"]),
            mean_logits=torch.zeros_like(whole["logps"]),
            is_top1=torch.zeros_like(whole["logps"], dtype=torch.bool),
        )

    def sums(self, what: torch.Tensor | None = None) -> torch.Tensor:
        return (self.logps if what is None else what).sum(1)

    def fronts(self) -> torch.Tensor:
        """Sums over the first tokens of a response, as many as the pair's shorter one has."""
        shorter = torch.minimum(*self.lengths.chunk(2)).repeat(2)
        return (self.logps * (torch.arange(LONGEST)[None] < shorter[:, None])).sum(1)


POLICY, REFERENCE = Table(1), Table(2)


def pairs(kind=PairLogps, *more):
    sums = (part for table in (POLICY, REFERENCE) for part in table.sums().chunk(2))
    return kind(*sums, *(part.double() for part in POLICY.lengths.chunk(2)), *more)


def of_trl(trl, loss_type: str, **changes) -> float:
    """TRL's loss of the table: the mean over its pairs."""
    settings = dict(label_smoothing=0.0, ld_alpha=None, f_divergence_type="reverse_kl", use_weighting=False)
    settings |= dict(f_alpha_divergence_coef=0.5, discopop_tau=0.05)
    settings |= changes
    everywhere = SimpleNamespace(device="cpu", gather_for_metrics=lambda value: value, gather=lambda value: value)
    trainer = SimpleNamespace(
        model=POLICY,
        ref_model=REFERENCE,
        accelerator=everywhere,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=settings.pop("discopop_tau")),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        beta=BETA,
        loss_types=[loss_type],
        loss_weights=[1.0],
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )
    reference = REFERENCE.fronts() if settings["ld_alpha"] is not None else REFERENCE.sums()
    if settings["ld_alpha"] is not None:
        reference = reference + settings["ld_alpha"] * (REFERENCE.sums() - reference)
    chosen, rejected = reference.to(POLICY.dtype).chunk(2)
    completion = torch.cat([torch.zeros(2 * PAIRS, PROMPT, dtype=torch.long), POLICY.mask.long()], 1)
    inputs = {
        "input_ids": torch.ones_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    return trl.DPOTrainer._compute_loss(trainer, POLICY, inputs, False).item()


def ours(name: str, inputs, **options) -> float:
    options.setdefault("beta", BETA)
    return LOSSES[name](inputs, **options).losses.mean().item()


@pytest.mark.parametrize(
    "name, options, loss_type, settings",
    [
        ("dpo", {}, "sigmoid", {}),
        ("dpo", {"f_divergence": "forward_kl"}, "sigmoid", {"f_divergence_type": "forward_kl"}),
        ("dpo", {"f_divergence": "js"}, "sigmoid", {"f_divergence_type": "js_divergence"}),
        ("hinge", {"margin": 1.0}, "hinge", {}),
        ("ipo", {"average_log_prob": True}, "ipo", {}),
        ("exo", {"label_smoothing": 0.1}, "exo_pair", {"label_smoothing": 0.1}),
        ("nca", {}, "nca_pair", {}),
        ("robust", {"label_smoothing": 0.2}, "robust", {"label_smoothing": 0.2}),
        ("sppo", {}, "sppo_hard", {}),
        ("aot", {"label_smoothing": 0.1}, "aot", {"label_smoothing": 0.1}),
        ("aot_unpaired", {"label_smoothing": 0.1}, "aot_unpaired", {"label_smoothing": 0.1}),
        ("apo_zero", {}, "apo_zero", {}),
        ("apo_down", {}, "apo_down", {}),
        ("discopop", {"tau": 0.2}, "discopop", {"discopop_tau": 0.2}),
        ("dpo_norm", {}, "sigmoid_norm", {}),
    ],
)
def test_losses_of_pairs(trl, name, options, loss_type, settings):
    assert ours(name, pairs(), **options) == pytest.approx(of_trl(trl, loss_type, **settings), rel=1e-6)


def test_the_alpha_divergence(trl, monkeypatch):
    """TRL's coefficient is one less our alpha. It computes this one in float32 at most."""
    monkeypatch.setattr(POLICY, "dtype", torch.float32)
    theirs = of_trl(trl, "sigmoid", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.7)
    assert ours("dpo", pairs(), f_divergence="alpha", alpha=0.3) == pytest.approx(theirs, rel=1e-5)


def test_dpo_with_the_ends_of_longer_responses_weighed_less(trl):
    fronts = [part for table in (POLICY, REFERENCE) for part in table.fronts().chunk(2)]
    found = ours("ld_dpo", pairs(FrontPairLogps, *fronts), alpha=0.4)
    assert found == pytest.approx(of_trl(trl, "sigmoid", ld_alpha=0.4), rel=1e-6)


def test_dpo_weighed_by_how_likely_the_pairs_are(trl):
    collisions = POLICY.sums(POLICY.collisions).chunk(2)
    found = ours("wpo", pairs(CollisionPairLogps, *collisions))
    assert found == pytest.approx(of_trl(trl, "sigmoid", use_weighting=True), rel=1e-6)


@pytest.mark.parametrize("loss_type, name", [("simpo", "simpo"), ("sigmoid", "cpo")])
def test_losses_without_a_reference(trl, loss_type, name):
    from trl.experimental.cpo import CPOTrainer

    trainer = SimpleNamespace(
        alpha=0.0,
        beta=BETA,
        label_smoothing=0.1,
        loss_type=loss_type,
        simpo_gamma=0.2,
        accelerator=SimpleNamespace(device="cpu"),
    )
    chosen, rejected = POLICY.sums().chunk(2)
    if name == "simpo":
        chosen, rejected = (POLICY.sums() / POLICY.lengths).chunk(2)
    theirs = CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean().item()
    more = {"gamma": 0.2} if name == "simpo" else {}
    assert ours(name, pairs(), label_smoothing=0.1, **more) == pytest.approx(theirs, rel=1e-6)


def test_orpo(trl):
    from trl.experimental.orpo import ORPOTrainer

    trainer = SimpleNamespace(beta=BETA, accelerator=SimpleNamespace(device="cpu"))
    chosen, rejected = (POLICY.sums() / POLICY.lengths).chunk(2)
    ratio = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
    # TRL adds the mean over all chosen tokens of the batch; the paper and this project take each response's mean.
    theirs = (-chosen - ratio.double()).mean().item()
    assert ours("orpo", pairs()) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_losses_of_single_responses(trl, loss_type):
    desirable = torch.tensor([True] * 4 + [False] * (2 * PAIRS - 4))
    kl = {id(POLICY): POLICY.sums().flip(0) + 9.0, id(REFERENCE): REFERENCE.sums().flip(0)}
    everywhere = SimpleNamespace(device="cpu", gather_for_metrics=lambda value: value, gather=lambda value: value)
    trainer = SimpleNamespace(
        model=POLICY,
        ref_model=REFERENCE,
        accelerator=everywhere,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=loss_type == "kto",
        beta=BETA,
        loss_type=loss_type,
        desirable_weight=1.5 if loss_type == "kto" else 1.0,
        undesirable_weight=0.7 if loss_type == "kto" else 1.0,
        _compute_kl_logps=lambda model, batch: kl[id(model)],
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    completion = torch.cat([torch.zeros(2 * PAIRS, PROMPT, dtype=torch.long), POLICY.mask.long()], 1)
    batch = {
        "label": desirable,
        "input_ids": torch.ones_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
        "ref_logps": REFERENCE.sums(),
        "ref_KL_logps": kl[id(REFERENCE)],
    }
    theirs = trl.KTOTrainer._compute_loss(trainer, POLICY, batch, False).item()
    inputs = (POLICY.sums(), REFERENCE.sums(), desirable, POLICY.lengths.double())
    if loss_type == "kto":
        responses = UnpairedWithMismatched(*inputs, kl[id(POLICY)], kl[id(REFERENCE)])
        found = ours("kto", responses, desirable_weight=1.5, undesirable_weight=0.7)
        assert responses.kl(BETA) > 0
    else:
        found = ours("apo_zero_unpaired", UnpairedLogps(*inputs))
    assert found == pytest.approx(theirs, rel=1e-6)
