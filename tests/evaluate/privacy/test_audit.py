"""Every broken defense is found, by the test that is for it; correct ones are not accused."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from federated import batch, mlp, rng
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import (
    DPSGD,
    Batch,
    Chain,
    ClientDP,
    Defense,
    Guarantee,
    Noise,
    Plan,
    TopK,
)
from leakfrontier.evaluate.privacy.accounting import epsilon
from leakfrontier.evaluate.privacy.audit import AUDITS, QUICK, audit
from leakfrontier.evaluate.privacy.finding import SIGNIFICANCE, Audit

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
audited = importlib.import_module("audited_defenses")
BROKEN, CORRECT, PLAN = audited.BROKEN, audited.CORRECT, audited.PLAN

ONCE = Plan(1, 1.0, 1e-5)
DATA = batch(20)
FOUND_BY = {
    "residual noise": [
        *("Quiet", "Silent", "Bare", "Uneven", "Uniform", "Laplacian", "Paired", "Scattered"),
        *("Repeated", "Mirrored", "Fading", "OneStep", "QuietClient"),
    ],
    "rare steps": ["Truncated", "Bank", "Forgetful", "Proportional"],
    "local steps": ["FirstStep"],
    "clipping": ["BatchClipped", "Loose", "Gap", "FirstLayer", "ActualMean"],
    "neighbours": ["Unclipped", "Unchecked", "UnclippedClient"],
    "sampling": [
        *("TooOften", "Shuffled", "Ordered", "FixedSize", "Sticky", "Replacement", "Reshuffled"),
    ],
}


def finding(method: str, defense: Defense, plan: Plan = PLAN, seed: int = 0) -> Audit:
    model: nn.Module = mlp(8)
    if type(defense).__name__ == "Unchecked":
        model = audited.Centred(model)
    found = audit(defense, model, cross_entropy, DATA, plan, rng(seed), (method,))[method]
    assert isinstance(found, Audit), found
    return found


def test_every_broken_defense_is_looked_for() -> None:
    names = {type(defense).__name__ for defense in BROKEN.values()}
    assert len(names) >= 20
    assert names == {name for several in FOUND_BY.values() for name in several}
    assert len(CORRECT) >= 15


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_defense_is_found(fault: str) -> None:
    defense = BROKEN[fault]
    name = type(defense).__name__
    method = next(method for method, names in FOUND_BY.items() if name in names)
    found = finding(method, defense)
    assert found.violated
    assert found.p_value < SIGNIFICANCE
    assert found.verdict.startswith("violated")


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_defense_is_not_accused(name: str) -> None:
    methods = (*QUICK, "clipping")
    findings = audit(CORRECT[name], mlp(8), cross_entropy, DATA, PLAN, rng(), methods)
    assert isinstance(findings["residual noise"], Audit)
    for found in findings.values():
        assert not (isinstance(found, Audit) and found.violated), found


def test_lower_bounds_are_below_the_claim_and_near_the_ceiling() -> None:
    for method in ("residual noise", "step canaries"):
        found = finding(method, DPSGD(1.0))
        assert not found.violated
        assert found.claimed == pytest.approx(epsilon(0.05, 1.0, 100, 1e-5), rel=1e-3)
        assert found.lower_bound < 1.01 * found.claimed
        assert found.lower_bound == pytest.approx(found.ceiling, rel=0.2)
    quiet = finding("step canaries", BROKEN["0.8 of the claimed noise"])
    assert quiet.violated
    assert quiet.claimed < quiet.lower_bound < epsilon(0.05, 0.8, 100, 1e-5)


def test_a_claim_is_judged_at_its_own_delta() -> None:
    own = CORRECT["States its claim at a delta of its own"]
    assert own.guarantee(PLAN).delta == 1e-3
    found = finding("residual noise", own)
    assert not found.violated
    assert found.claimed == pytest.approx(epsilon(0.05, 1.0, 100, 1e-3), rel=1e-3)
    assert found.measured_noise == pytest.approx(1.0, rel=0.05)


def test_steps_that_do_not_add_up_to_the_claim_are_a_violation() -> None:
    broken = BROKEN["Claims of all steps what holds for one"]
    assert finding("residual noise", broken).violated
    assert not finding("residual noise", broken, ONCE).violated


def test_a_replay_with_noise_is_audited_from_differences_and_told_of() -> None:
    noisy = next(d for d in CORRECT.values() if type(d).__name__ == "NoisyReplay")
    found = finding("residual noise", noisy)
    assert not found.violated
    assert "attacks that know the defense were handicapped" in found.verdict
    assert finding("residual noise", replace(noisy, sigma=0.5), ONCE).violated is False

    class Quiet(type(noisy)):  # type: ignore[misc]
        def guarantee(self, plan: Plan) -> Guarantee:
            return (
                replace(self, sigma=2.0)
                .__class__.__mro__[1]
                .guarantee(replace(self, sigma=2.0), plan)
            )

    assert finding("residual noise", Quiet(1.0)).violated


@pytest.mark.parametrize(
    ("defense", "reason"),
    [
        (Defense(), "claims no differential privacy"),
        (Chain((TopK(0.1),)), "claims no differential privacy"),
        (DPSGD(0.0), "claims an infinite epsilon"),
        (Noise(1.0, "laplace", max_norm=1.0), "the noise is not Gaussian"),
    ],
    ids=repr,
)
def test_what_cannot_be_audited_says_why(defense: Defense, reason: str) -> None:
    methods = tuple(one for one in AUDITS if one != "sampling")
    findings = audit(defense, mlp(8), cross_entropy, DATA, ONCE, rng(), methods)
    for found in findings.values():
        assert isinstance(found, NotApplicable)
        assert reason in str(found)


def test_an_epsilon_of_zero_says_what_noise_it_needs() -> None:
    found = finding("residual noise", DPSGD(1e6), ONCE)
    assert found.claimed == 0
    assert not found.violated
    assert "of what an epsilon of 0 needs" in found.verdict


def test_an_audit_needs_an_example() -> None:
    nobody = Batch(*(values[:0] for values in DATA))
    with pytest.raises(ValueError, match="at least one example"):
        audit(DPSGD(1.0), mlp(8), cross_entropy, nobody, ONCE, rng(), QUICK)


def test_an_audit_leaves_the_model_and_the_global_generator_alone() -> None:
    model = mlp(8)
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    findings = audit(DPSGD(2.0), model, cross_entropy, DATA, PLAN, rng(), QUICK)
    assert all(isinstance(found, Audit) for found in findings.values())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_token_inputs_pass_through() -> None:
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(24, 10))
    tokens = Batch(torch.randint(50, (12, 6), generator=rng()), torch.arange(12) % 10)
    for method, found in audit(
        DPSGD(1.0), model, cross_entropy, tokens, ONCE, rng(), ("residual noise", "neighbours")
    ).items():
        assert isinstance(found, Audit), method
        assert not found.violated


@dataclass
class Halved(ClientDP):
    """Claims for replacement what holds for one that is zeroed out."""

    def guarantee(self, plan: Plan) -> Guarantee:
        return replace(super().guarantee(plan), adjacency="replace")


def test_a_claim_under_replacement_asks_for_twice_the_noise() -> None:
    found = finding("residual noise", Halved(1.0), ONCE)
    assert found.violated
    assert "the noise is 0.5" in found.verdict
