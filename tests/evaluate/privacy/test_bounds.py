import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from riskcal.analysis import get_advantage_from_pld, get_beta_from_pld
from scipy import integrate
from scipy.stats import norm

from leakfrontier.defenses.pld import privacy_loss
from leakfrontier.evaluate.privacy.accounting import Segment, Unreachable, epsilon, least_noise
from leakfrontier.evaluate.privacy.bounds import (
    Bounds,
    privacy_profile,
    profile_power,
    reconstruction,
)

EVERYBODY = [  # prior, sigma, steps; gamma
    (1 / 8, 75, 100, 0.1546),
    (1 / 8, 40, 100, 0.1840),
    (1 / 8, 27, 100, 0.2177),
    (1 / 8, 21, 100, 0.2501),
    (1 / 8, 9.5, 100, 0.4611),
    (1 / 8, 5, 100, 0.8022),
    (1 / 8, 2, 100, 0.99994),
    (0.1, 1, 1, 0.38914),
    (0.1, 5, 100, 0.76376),
]
SAMPLED = [  # prior, sample rate, sigma, steps; gamma
    (0.1, 0.01, 1.0, 1000, 0.19418),
    (0.1, 0.01, 0.6, 1000, 0.41717),
    (0.01, 0.02, 0.8, 500, 0.07525),
    (0.001, 0.02, 0.8, 500, 0.01534),
]


@pytest.mark.parametrize(("prior", "sigma", "steps", "gamma"), EVERYBODY)
def test_without_sampling_the_bound_is_the_closed_form(
    prior: float, sigma: float, steps: int, gamma: float
) -> None:
    bound = reconstruction(prior, 1.0, sigma, steps)
    assert bound == pytest.approx(gamma, abs=1e-4)
    assert bound == pytest.approx(norm.cdf(norm.ppf(prior) + math.sqrt(steps) / sigma), abs=1e-12)
    by_profile = float(profile_power((Segment(1.0, sigma, steps),), prior))
    assert bound - 1e-9 <= by_profile <= bound + 1e-4  # an upper bound, and tight


@pytest.mark.parametrize(("prior", "q", "sigma", "steps", "gamma"), SAMPLED)
def test_with_sampling_the_bound_equals_the_references(
    prior: float, q: float, sigma: float, steps: int, gamma: float
) -> None:
    assert reconstruction(prior, q, sigma, steps) == pytest.approx(gamma, abs=1e-3)


def distribution(q: float, sigma: float, steps: int, width: float = 1e-3) -> object:
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=width
    ).self_compose(steps)


@pytest.mark.parametrize("prior", [0.5, 0.1, 0.01])
@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(0.01, 0.6, 1000), (0.02, 0.8, 500), (0.1, 1.5, 100)]
)
def test_equals_riskcal(prior: float, q: float, sigma: float, steps: int) -> None:
    theirs = distribution(q, sigma, steps)
    bounds = Bounds((Segment(q, sigma, steps),))
    riskcal = 1 - get_beta_from_pld(theirs, alpha=prior)
    assert bounds.reconstruction(prior) == pytest.approx(riskcal, abs=1e-4)
    assert bounds.advantage() == pytest.approx(get_advantage_from_pld(theirs), abs=1e-4)


@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.02, 0.8, 500), (0.01, 0.1, 100)])
def test_the_profile_equals_the_librarys(q: float, sigma: float, steps: int) -> None:
    schedule = (Segment(q, sigma, steps),)
    epsilons, deltas = privacy_profile(schedule)
    theirs = [privacy_loss(schedule).get_delta_for_epsilon(float(e)) for e in epsilons[::100]]
    np.testing.assert_allclose(deltas[::100], theirs, rtol=1e-6, atol=1e-13)


def test_riskcal_is_below_the_truth_for_small_rates_on_fine_grids() -> None:
    """Why the bound is computed from the privacy profile: here the truth is known."""
    exact = norm.cdf(norm.ppf(1e-8) + 1)
    fine = distribution(1.0, 1.0, 1, width=1e-4)
    assert 1 - get_beta_from_pld(fine, alpha=1e-8) < 0.01 * exact
    ours = float(profile_power((Segment(1.0, 1.0, 1),), 1e-8))
    assert exact <= ours <= 1.001 * exact


@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(1.0, 1.0, 1), (1.0, 5.0, 100), (0.01, 0.6, 1000), (0.1, 1.5, 100)]
)
def test_equals_a_simulation_of_the_optimal_test(q: float, sigma: float, steps: int) -> None:
    """The estimate of Hayes et al., from the bottom 1 - prior of simulated likelihood ratios."""
    draws = np.random.default_rng(0)
    ratio = np.zeros(50_000)
    for _ in range(steps):
        seen = draws.normal(0, sigma, len(ratio))
        ratio += np.log1p(q * np.expm1((2 * seen - 1) / (2 * sigma**2)))
    ratio.sort()
    for prior in (0.5, 0.2, 0.1):
        kept = ratio[: int(len(ratio) * (1 - prior))]
        estimate = 1 - (1 - prior) * np.exp(kept).mean()
        bound = reconstruction(prior, q, sigma, steps)
        if prior == 0.5:  # where the bound also covers a test for absence, which is easier
            assert bound > estimate - 0.01
        else:
            assert bound == pytest.approx(estimate, abs=0.01)


@pytest.mark.parametrize(
    ("q", "steps", "sigma", "gamma"),
    [
        (1.0, 1, 1.081, 0.361),
        (0.1, 100, 1.386, 0.319),
        (0.01, 1000, 0.735, 0.286),
        (0.01, 10_000, 1.288, 0.354),
    ],
)
def test_equal_epsilons_differ_in_reconstruction(
    q: float, steps: int, sigma: float, gamma: float
) -> None:
    assert epsilon(q, sigma, steps, 1e-5) == pytest.approx(4.0, rel=0.005)
    assert reconstruction(0.1, q, sigma, steps) == pytest.approx(gamma, abs=1e-3)


@pytest.mark.parametrize(
    ("candidates", "sigma", "success", "gamma"),
    [
        (10, 0.5, 0.6736, 0.7638),
        (10, 1.0, 0.3409, 0.3891),
        (10, 2.0, 0.1992, 0.2172),
        (100, 0.5, 0.3232, 0.3721),
        (100, 1.0, 0.0825, 0.0924),
        (1000, 0.5, 0.1203, 0.1378),
    ],
)
def test_the_best_attack_on_orthogonal_candidates_stays_below(
    candidates: int, sigma: float, success: float, gamma: float
) -> None:
    best, _ = integrate.quad(
        lambda x: norm.pdf(x - 1 / sigma) * norm.cdf(x) ** (candidates - 1), -10, 20
    )
    assert best == pytest.approx(success, abs=1e-4)
    assert reconstruction(1 / candidates, 1.0, sigma, 1) == pytest.approx(gamma, abs=1e-4)
    assert best < gamma


def test_membership_is_bounded_by_epsilon_and_delta_too() -> None:
    q, sigma, steps, delta = 0.01, 1.0, 1000, 1e-5
    bounds, eps = Bounds((Segment(q, sigma, steps),)), epsilon(q, sigma, steps, delta)
    rates, largest = bounds.curve()
    assert np.all(largest <= np.exp(eps) * rates + delta + 1e-9)
    assert np.all(np.diff(largest) >= 0)
    assert np.all(largest >= rates - 1e-12)
    assert largest[-1] == 1
    assert np.max(largest - rates) <= bounds.advantage() + 1e-3
    assert bounds.membership(float(rates[50])) == largest[50]


def test_advantage_has_a_closed_form_without_sampling() -> None:
    bounds = Bounds((Segment(1.0, 2.0, 4),))
    assert bounds.advantage() == pytest.approx(2 * norm.cdf(0.5) - 1)
    rates = np.linspace(0.001, 0.999, 999)
    assert np.max(bounds.power(rates) - rates) == pytest.approx(bounds.advantage(), abs=1e-6)


def test_segments_compose() -> None:
    whole = reconstruction(0.1, 0.01, 0.8, 400)
    halves = Bounds((Segment(0.01, 0.8, 100), Segment(0.01, 0.8, 300)))
    assert halves.reconstruction(0.1) == pytest.approx(whole, abs=1e-4)
    exact = Bounds((Segment(1.0, 5.0, 3), Segment(1.0, 2.0, 2))).reconstruction(0.1)
    assert exact == pytest.approx(norm.cdf(norm.ppf(0.1) + math.sqrt(3 / 25 + 2 / 4)))


def test_limits() -> None:
    assert reconstruction(0.1, 0.01, 0.0, 5) == 1  # no noise
    assert Bounds((Segment(1.0, 0.0, 1),)).power([0, 0.5, 1]).tolist() == [1, 1, 1]
    assert reconstruction(0.1, 0.01, 1e-5, 5) == 1  # no noise to speak of
    assert Bounds((Segment(0.01, 1e-5, 5),)).advantage() == 1
    assert reconstruction(0.1, 0.01, 1e4, 10) == pytest.approx(0.1, abs=1e-4)
    gammas = [reconstruction(0.1, 0.02, sigma, 100) for sigma in (0.3, 0.5, 1, 2, 4, 8)]
    assert gammas == sorted(gammas, reverse=True)
    ends = Bounds((Segment(0.02, 1.0, 100),)).power([0.0, 1.0])
    assert ends == pytest.approx([0, 1], abs=1e-9)


def calibrated(prior: float, target: float, sample_rate: float, steps: int) -> float:
    """Return the least noise multiplier for which gamma(prior) is at most a target."""
    return least_noise(
        "a success of", target, lambda sigma: reconstruction(prior, sample_rate, sigma, steps)
    )


def test_calibration_keeps_its_promise_and_equals_the_reference() -> None:
    sigma = calibrated(0.01, 0.05, 0.01, 1000)
    assert sigma == pytest.approx(0.778, abs=1e-3)
    assert 0.0499 <= reconstruction(0.01, 0.01, sigma, 1000) <= 0.05
    everybody = calibrated(0.1, 0.5, 1.0, 100)
    assert everybody == pytest.approx(10 / -norm.ppf(0.1), rel=5e-4)
    assert reconstruction(0.1, 1.0, everybody, 100) <= 0.5


@pytest.mark.parametrize("target", [0.1, 0.05])
def test_an_unreachable_target_says_what_is_closest(target: float) -> None:
    with pytest.raises(Unreachable, match=f"success of {target} cannot be reached") as caught:
        calibrated(0.1, target, 0.01, 100)
    assert caught.value.closest == pytest.approx(0.1, abs=1e-4)


def test_rejects_bad_parameters() -> None:
    for prior in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"rates and priors must be in \[0, 1\]"):
            reconstruction(prior, 0.01, 1.0, 10)
    with pytest.raises(ValueError, match=r"sample_rate must be in \(0, 1\], got 2"):
        reconstruction(0.1, 2, 1.0, 10)
    with pytest.raises(ValueError, match="at least one segment"):
        Bounds(())


def test_epsilon_and_bounds_share_one_distribution() -> None:
    privacy_loss.cache_clear()
    epsilon(0.01, 1.0, 123, 1e-5)
    reconstruction(0.1, 0.01, 1.0, 123)
    assert privacy_loss.cache_info().misses == 1
