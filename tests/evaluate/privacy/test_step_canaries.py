import pytest
from noised import noised
from scipy.special import ndtr

from leakfrontier.evaluate.privacy.step_canaries import _Errors, step_canaries


def test_with_the_promised_noise_canaries_are_told_apart_no_better_than_claimed() -> None:
    found = step_canaries(noised())
    assert not found.violated
    assert 0.95 * found.ceiling < found.lower_bound < found.claimed
    assert found.p_value > 0.01


def test_too_little_noise_tells_them_apart() -> None:
    found = step_canaries(noised(noise=lambda _: 0.6))
    assert found.violated
    assert found.lower_bound > found.claimed
    assert found.p_value < 1e-6


def test_announced_repetitions_widen_the_limits() -> None:
    once, often = (step_canaries(noised(), runs).lower_bound for runs in (1, 1000))
    assert often < once


def test_errors_of_a_gaussian_test_give_its_separation() -> None:
    many = 10**7
    wrong = round(float(ndtr(-0.5)) * many)  # of mu = 1, at the threshold in the middle
    errors = _Errors(wrong, many, wrong, many)
    assert errors.separation(0.999) == pytest.approx(1.0, abs=5e-3)
    assert errors.separation(0.999) < 1.0
    assert errors.p_value(0.9) < 1e-6
    assert errors.p_value(1.1) == 1
    assert errors.separation(1 - errors.p_value(0.9995)) == pytest.approx(0.9995, abs=1e-6)


def test_guesses_by_chance_tell_nothing() -> None:
    assert _Errors(50, 100, 50, 100).separation(0.99) == 0
