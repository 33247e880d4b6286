"""Audits in one training run, and their statistics."""

import math

import numpy as np
import pytest
from federated import batch, mlp, rng
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import DPSGD, ClientDP, Plan
from leakfrontier.evaluate.privacy.accounting import gaussian_sigma
from leakfrontier.evaluate.privacy.canaries import Subject
from leakfrontier.evaluate.privacy.one_run import (
    CANARIES,
    log_likelihood_ratio,
    one_run,
    one_run_ceiling,
    one_run_lower_bound,
    one_run_p_value,
)


def test_one_run_stays_below_its_claim_and_near_its_ceiling() -> None:
    plan = Plan(50, 0.05, 1e-5)
    honest = one_run(Subject(DPSGD(0.8), mlp(8), cross_entropy, batch(300), plan, rng(3)))
    assert not honest.violated
    assert honest.p_value > 0.9
    assert 0.3 < honest.lower_bound < 0.5 * honest.claimed
    assert honest.lower_bound == pytest.approx(honest.ceiling, abs=0.5)
    assert "a perfect implementation would show" in honest.verdict


def test_one_run_is_for_records() -> None:
    plan = Plan(1, 1.0, 1e-5)
    subject = Subject(ClientDP(1.0), mlp(8), cross_entropy, batch(9), plan, rng())
    with pytest.raises(NotApplicable, match="the unit must be a record"):
        one_run(subject)


ONE_RUN = [  # canaries, guesses, correct, delta; lower bound, p-value of epsilon 2
    (100, 100, 100, 0, 3.4930, 3.07e-6),
    (1000, 1000, 1000, 0, 5.8091, None),
    (1000, 100, 95, 0, 2.1724, 0.0161),
    (1000, 100, 95, 1e-5, 2.1652, 0.01782),
    (1000, 200, 180, 1e-5, 1.7963, 0.2387),
    (5000, 500, 480, 1e-5, 2.7830, 0.00186),
    (1000, 1000, 600, 1e-5, 0.2972, None),
]


@pytest.mark.parametrize(("canaries", "guesses", "correct", "delta", "bound", "p"), ONE_RUN)
def test_one_run_equals_the_references(
    canaries: int, guesses: int, correct: int, delta: float, bound: float, p: float | None
) -> None:
    ours = one_run_lower_bound(canaries, guesses, correct, delta)
    assert ours == pytest.approx(bound, abs=1e-3)
    assert one_run_p_value(canaries, guesses, correct, ours, delta) == pytest.approx(0.05)
    if p is not None:
        at_two = one_run_p_value(canaries, guesses, correct, 2.0, delta)
        assert at_two == pytest.approx(p, rel=5e-3)


def test_one_run_limits() -> None:
    assert one_run_lower_bound(1000, 200, 100, 1e-5) == 0  # as good as a coin
    assert one_run_p_value(1000, 200, 0, 1.0, 1e-5) == 1
    with pytest.raises(ValueError, match="must not decrease, got 3, 2, 10"):
        one_run_p_value(10, 2, 3, 1.0, 1e-5)


EXPECTED = [  # true epsilon; mean and standard deviation of 20 lower bounds, by canaries
    (1, {200: (0.02, 0.06), 1000: (0.26, 0.10), 5000: (0.36, 0.05)}),
    (2, {200: (0.29, 0.25), 1000: (0.63, 0.16), 5000: (0.80, 0.08)}),
    (4, {200: (0.95, 0.34), 1000: (1.44, 0.16), 5000: (1.61, 0.07)}),
    (8, {200: (2.00, 0.37), 1000: (2.78, 0.24), 5000: (3.22, 0.22)}),
    (16, {200: (2.55, 0.2), 1000: (4.17, 0.2), 5000: (5.57, 0.18)}),
]


@pytest.mark.parametrize(("true", "expected"), EXPECTED)
def test_the_ceiling_equals_the_references(
    true: float, expected: dict[int, tuple[float, float]]
) -> None:
    sigma = gaussian_sigma(true, 1e-5)
    for canaries, (mean, deviation) in expected.items():
        ceiling = one_run_ceiling(1.0, sigma, 1, 1e-5, canaries, canaries // 5)
        error = deviation * math.sqrt(1 / 20 + 1 / 20)
        assert ceiling == pytest.approx(mean, abs=3 * error + 0.005)
        assert ceiling < true / 2 or true < 4


def test_log_likelihood_ratio_is_that_of_the_mixture() -> None:
    values, q, sigma = np.linspace(-3, 4, 8), 0.3, 0.7
    present = q * np.exp(-((values - 1) ** 2) / (2 * sigma**2))
    absent = np.exp(-(values**2) / (2 * sigma**2))
    exact = np.log((present + (1 - q) * absent) / absent)
    np.testing.assert_allclose(log_likelihood_ratio(values, q, sigma), exact)
    assert np.isfinite(log_likelihood_ratio(np.array([1e6]), 1.0, 0.01)).all()
    assert CANARIES % 10 == 0
