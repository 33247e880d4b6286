import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakfrontier.defenses.discrete_gaussian import LARGEST, discrete_gaussian


@pytest.mark.parametrize("sigma", [1, 2, 7])
def test_every_integer_is_as_probable_as_it_should_be(sigma: int) -> None:
    drawn = discrete_gaussian(100_000, sigma, torch.Generator().manual_seed(sigma)).numpy()
    values = np.arange(-20 * sigma, 20 * sigma + 1)
    share = np.exp(-(values**2) / (2 * sigma**2))
    expected = len(drawn) * share / share.sum()
    found = np.array([(drawn == value).sum() for value in values])
    assert found.sum() == len(drawn)
    often = expected > 5
    rest = [found[~often].sum()], [expected[~often].sum()]
    p_value = stats.chisquare(
        np.append(found[often], rest[0]), np.append(expected[often], rest[1])
    ).pvalue
    assert p_value > 1e-3


def test_wide_ones_are_gaussian() -> None:
    drawn = discrete_gaussian(50_000, LARGEST, torch.Generator().manual_seed(0)).double() / LARGEST
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-3
    assert math.isclose(float(drawn.std()), 1, rel_tol=0.02)


def test_none_are_none() -> None:
    assert discrete_gaussian(0, 3, torch.Generator()).shape == (0,)


@pytest.mark.parametrize("sigma", [0, -1, LARGEST + 1])
def test_what_cannot_be_drawn_exactly_is_refused(sigma: int) -> None:
    with pytest.raises(ValueError, match="sigma must be from 1"):
        discrete_gaussian(1, sigma, torch.Generator())
