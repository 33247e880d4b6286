from types import SimpleNamespace
from typing import Any

import pytest
from federated import rng

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import DPSGD, Defense, Guarantee, Plan
from leakfrontier.evaluate.privacy.promise import Promise
from leakfrontier.evaluate.privacy.sampling import sampling

PLAN = Plan(100, 0.1, 1e-5, passes=10)


def drawing(defense: Defense, rate: float, steps: int, unit: str = "record") -> Any:  # noqa: ANN401
    claim = Guarantee(1.0, 1e-5, unit, "zero-out", "pld")
    promise = Promise(claim, rate, steps, 1.0)
    return SimpleNamespace(promise=promise, plan=PLAN, defense=defense, rng=rng())


def test_a_claim_that_counts_on_poisson_samples_needs_them() -> None:
    kept = sampling(drawing(DPSGD(1.0), 0.1, 100))
    assert not kept.violated
    assert "400 batches look like Poisson samples" in kept.verdict
    assert sampling(drawing(Defense(), 0.1, 100)).violated


def test_a_claim_that_counts_on_epochs_needs_these() -> None:
    kept = sampling(drawing(Defense(), 1.0, PLAN.passes or 0))
    assert not kept.violated
    assert "each record is in one batch of an epoch" in kept.verdict
    assert sampling(drawing(DPSGD(1.0), 1.0, PLAN.passes or 0)).violated


@pytest.mark.parametrize(("unit", "rate"), [("record", 1.0), ("client", 0.1)])
def test_who_counts_on_nothing_is_not_tested(unit: str, rate: float) -> None:
    with pytest.raises(NotApplicable, match="does not depend on how batches are drawn"):
        sampling(drawing(Defense(), rate, PLAN.steps, unit))
