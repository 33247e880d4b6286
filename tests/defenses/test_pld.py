import math

import pytest
import torch
from dp_accounting import pld
from scipy.special import log_ndtr, ndtr

from leakfrontier.defenses import Defense, Plan
from leakfrontier.defenses.pld import (
    COARSEST,
    MOST_STEPS,
    Segment,
    concentrated_epsilon,
    gaussian_epsilon,
    loss_grid,
    numerical_error,
    pld_epsilon,
    privacy_loss,
    sampled_segment,
    separation,
    shuffled_passes,
)
from leakfrontier.defenses.pld import _epsilon as epsilon_of_distribution


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "width"),
    [(0.01, 1.0, 1, 1e-4), (0.01, 0.6, 1000, 1e-3), (0.999, 1.0, 10, 1e-3), (0.5, 0.05, 3, 1e-2)],
)
def test_the_loss_equals_the_librarys(q: float, sigma: float, steps: int, width: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leakfrontier.defenses.pld.loss_grid", lambda _: (width, 0.0))
        ours = privacy_loss.__wrapped__((Segment(q, sigma, steps),))
    theirs = pld.privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=width
    ).self_compose(steps)
    for side in ("_pmf_remove", "_pmf_add"):
        one, other = getattr(ours, side), getattr(theirs, side).to_dense_pmf()
        for eps in (-1.0, 0.0, 0.1, 1.0, 5.0):
            exact = other.get_delta_for_epsilon(eps)
            assert one.get_delta_for_epsilon(eps) == pytest.approx(exact, rel=1e-5, abs=1e-11)
    for delta in (1e-3, 1e-6):
        assert epsilon_of_distribution(ours._pmf_remove, delta) == pytest.approx(
            theirs._pmf_remove.get_epsilon_for_delta(delta), rel=1e-6
        )


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return delta of one Gaussian step, by its closed form."""
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (4.0, 9), (50.0, 400)])
def test_without_sampling_epsilon_is_the_closed_form(sigma: float, steps: int) -> None:
    epsilon = gaussian_epsilon(sigma, Plan(steps, 1.0, 1e-5))
    assert gaussian_delta(math.sqrt(steps) / sigma, epsilon) == pytest.approx(1e-5, rel=1e-6)


def test_steps_of_different_noise_compose_to_one() -> None:
    schedule = (Segment(1.0, 5.0, 3), Segment(1.0, 2.0, 2))
    assert separation(schedule) == pytest.approx(math.sqrt(3 / 25 + 2 / 4))
    assert separation((Segment(0.5, 5.0, 3),)) is None
    for rate in (1.0, 0.5):
        assert separation((*schedule, Segment(rate, 0.0, 1))) == math.inf
        assert pld_epsilon((Segment(rate, 0.0, 1),), 1e-5) == math.inf


def test_secret_sampling_helps_and_shuffled_epochs_count_in_full() -> None:
    assert sampled_segment(0.1, 2.0, 50) == Segment(0.1, 2.0, 50)
    assert sampled_segment(0.1, 2.0, 50, poisson_sampling=False) == Segment(1.0, 2.0, 50)
    assert sampled_segment(0.1, 2.0, 50, poisson_sampling=False, passes=5).steps == 5
    assert sampled_segment(0.1, 2.0, 3, poisson_sampling=False, passes=5).steps == 3
    plan = Plan(4, 0.25, 1e-5, passes=1)
    once = gaussian_epsilon(2.0, Plan(1, 1.0, 1e-5))
    assert gaussian_epsilon(2.0, plan, poisson_sampling=False) == once
    assert gaussian_epsilon(2.0, Plan(1, 0.25, 1e-5)) < once / 2


@pytest.mark.parametrize(
    ("examples", "batch_size", "steps"), [(10, 5, 2), (10, 5, 3), (10, 3, 4), (10, 3, 9), (7, 7, 3)]
)
def test_passes_are_those_of_the_record_that_is_drawn_most(
    examples: int, batch_size: int, steps: int
) -> None:
    """By drawing them: whoever is first of all epochs is in as many batches as there are."""
    most = 0
    for seed in range(40):
        draws = Defense().batches(examples, batch_size, 20, torch.Generator().manual_seed(seed))
        drawn = torch.cat([next(draws) for _ in range(steps)])
        most = max(most, int(drawn.bincount().max()))
    assert shuffled_passes(examples, batch_size, steps) == most


def test_concentrated_privacy_is_between_its_gaussian_and_its_bound() -> None:
    plan, rho = Plan(10, 1.0, 1e-5), 0.01
    found = concentrated_epsilon(rho, plan)
    total = plan.steps * rho
    assert found <= total + 2 * math.sqrt(total * math.log(1 / plan.delta))
    assert found >= gaussian_epsilon(1 / math.sqrt(2 * rho), plan)  # which is rho-zCDP
    assert concentrated_epsilon(math.inf, plan) == math.inf


def test_a_delta_that_drowns_in_rounding_is_refused() -> None:
    schedule = (Segment(0.5, 2.0, 100),)
    assert numerical_error(schedule) > numerical_error(schedule, precise=True) > 0
    with pytest.raises(ValueError, match=r"delta must be at least .* for 100 steps with sampling"):
        pld_epsilon(schedule, 1e-16)


def test_the_grid_is_fine_against_one_steps_spread_and_no_wider_than_allowed() -> None:
    wide, _ = loss_grid((Segment(1.0, 1.0, 1),))  # a loss of standard deviation 1
    assert wide == COARSEST
    narrow, largest = loss_grid((Segment(1.0, 1000.0, 1),))
    assert narrow == pytest.approx(0.04 / 1000, rel=1e-3)
    assert largest < 0.1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.0, 1.0, 1), r"sample_rate must be in \(0, 1\], got 0"),
        ((1.1, 1.0, 1), "sample_rate"),
        ((math.nan, 1.0, 1), "sample_rate"),
        ((1.0, -1.0, 1), r"noise_multiplier must be in \[0, inf\), got -1"),
        ((1.0, math.inf, 1), "noise_multiplier"),
        ((1.0, 1.0, 0), "steps must be a positive whole number, got 0"),
        ((1.0, 1.0, 1.5), "steps must be a positive whole number"),
        ((0.5, 1.0, MOST_STEPS + 1), "steps must be at most"),
    ],
)
def test_bad_segments_are_refused(values: tuple[float, float, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segment(*values)
    Segment(1.0, 1.0, MOST_STEPS + 1)  # without sampling there is a closed form
