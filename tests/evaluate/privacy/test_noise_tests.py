"""Tests of noise keep their level, whatever is added to the promised noise."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from leakfrontier.evaluate.foundations.statistics import Floats
from leakfrontier.evaluate.privacy.noise_tests import (
    MeasuredNoise,
    innovations,
    quiet_uploads,
    shape,
    shared_entries,
)

SHAPE = (16, 60)
SIZES = (40, 5, 15)
Extra = Callable[[np.random.Generator], Floats]

EXTRA: dict[str, Extra] = {
    "nothing": lambda draws: np.zeros(SHAPE),
    "the same in every upload": lambda draws: 3 * draws.standard_normal((1, SHAPE[1])),
    "the same at every entry": lambda draws: 3 * draws.standard_normal((SHAPE[0], 1)),
    "Cauchy": lambda draws: draws.standard_cauchy(SHAPE),
    "two points": lambda draws: 2.0 * draws.integers(0, 2, SHAPE) - 1,
}


def p_values(rows: Floats) -> list[float]:
    noise = MeasuredNoise(rows, SIZES)
    tests = (quiet_uploads(noise), innovations(noise), shared_entries(noise), shape(rows))
    return [float(noise.p_values().min()), *(one.p_value for one in tests)]


@pytest.mark.parametrize("extra", EXTRA)
def test_more_noise_of_any_kind_raises_no_alarm(extra: str) -> None:
    draws, runs = np.random.default_rng(0), 300
    small = np.zeros(5)
    for _ in range(runs):
        found = p_values(draws.standard_normal(SHAPE) + EXTRA[extra](draws))
        small += np.array(found) < 0.05
    assert (small / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)).all()


@pytest.mark.parametrize("kind", ["uniform", "Laplace", "truncated"])
def test_other_distributions_of_the_same_variance_are_told(kind: str) -> None:
    draws = np.random.default_rng(1)
    rows = {
        "uniform": math.sqrt(12) * (draws.random((16, 4000)) - 0.5),
        "Laplace": draws.laplace(scale=1 / math.sqrt(2), size=(16, 4000)),
        "truncated": _truncated(draws, (64, 4000)),
    }[kind]
    assert rows.var() == pytest.approx(1, abs=0.02)
    found = shape(rows)
    assert found.p_value < 1e-5
    assert "kurtosis" in found.words


def _truncated(draws: np.random.Generator, size: tuple[int, int]) -> Floats:
    values = draws.standard_normal(2 * size[0] * size[1])
    kept: Floats = values[np.abs(values) < 2][: size[0] * size[1]].reshape(size)
    return kept / kept.std()
