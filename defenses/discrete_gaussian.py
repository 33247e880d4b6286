"""Exact samples of the discrete Gaussian, computed with integers only.

P(x) is proportional to exp(-x^2 / (2 sigma^2)) on the integers. It satisfies the same concentrated
differential privacy as the continuous Gaussian (Theorem 14 of [1]). It avoids the gaps between
floating-point numbers, which reveal inputs [2].

References:
    [1] Canonne, Kamath, Steinke. "The Discrete Gaussian for Differential Privacy." NeurIPS 2020.
        https://arxiv.org/abs/2004.00010 (Algorithms 1 to 3)
    [2] Mironov. "On Significance of the Least Significant Bits for Differential Privacy." CCS 2012.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

LARGEST = 2**22
"""The largest sigma for which all products fit into 64 bits."""


def discrete_gaussian(count: int, sigma: int, rng: Generator) -> Tensor:
    """Return independent integers (Algorithm 3 with t = sigma).

    Args:
        count: Number of integers.
        sigma: The standard deviation of the continuous distribution, from 1 to `LARGEST`.
        rng: Source of all randomness. Only integers are drawn from it.
    """
    if not 1 <= sigma <= LARGEST:
        raise ValueError(f"sigma must be from 1 to {LARGEST}, got {sigma}")
    drawn = torch.zeros(count, dtype=torch.int64)
    missing = torch.arange(count)
    while len(missing):
        value = _discrete_laplace(len(missing), sigma, rng)
        kept = _with_probability_exp((value.abs() - sigma).square(), 2 * sigma**2, rng)
        drawn[missing[kept]] = value[kept]
        missing = missing[~kept]
    return drawn


def _discrete_laplace(count: int, scale: int, rng: Generator) -> Tensor:
    """Return integers x with probability proportional to exp(-|x| / scale) (Algorithm 2)."""
    drawn = torch.zeros(count, dtype=torch.int64)
    missing = torch.arange(count)
    while len(missing):
        below = torch.randint(scale, missing.shape, generator=rng)
        kept = _with_probability_exp(below, scale, rng)
        value = below[kept] + scale * _geometric(int(kept.sum()), rng)
        negative = torch.randint(2, value.shape, generator=rng) == 1
        counted = ~(negative & (value == 0))  # count zero once
        done = missing[kept][counted]
        drawn[done] = torch.where(negative, -value, value)[counted]
        again = torch.ones(count, dtype=torch.bool)
        again[done] = False
        missing = missing[again[missing]]
    return drawn


def _geometric(count: int, rng: Generator) -> Tensor:
    """Return how many events of probability exp(-1) occur before the first that does not."""
    total = torch.zeros(count, dtype=torch.int64)
    going = torch.arange(count)
    while len(going):
        one = torch.ones(len(going), dtype=torch.int64)
        going = going[_with_probability_exp(one, 1, rng)]
        total[going] += 1
    return total


def _with_probability_exp(numerator: Tensor, denominator: int, rng: Generator) -> Tensor:
    """Return events of probability exp(-numerator / denominator) (Algorithm 1)."""
    whole, rest = numerator // denominator, numerator % denominator
    happened = _below_one(rest, denominator, rng)
    for done in range(int(whole.max()) if len(whole) else 0):
        going = ((whole > done) & happened).nonzero().flatten()
        ones = torch.full((len(going),), denominator, dtype=torch.int64)
        happened[going] = _below_one(ones, denominator, rng)
    return happened


def _below_one(numerator: Tensor, denominator: int, rng: Generator) -> Tensor:
    """Return events of probability exp(-x) for x = numerator / denominator of at most 1.

    Consider events of probability x, x / 2, x / 3, ... With probability exp(-x), an even number
    of them occurs before the first that does not.
    """
    happened = torch.ones(len(numerator), dtype=torch.bool)
    going, k = torch.arange(len(numerator)), 1
    while len(going):
        drawn = torch.randint(k * denominator, going.shape, generator=rng)
        going = going[drawn < numerator[going]]
        happened[going] = k % 2 == 0
        k += 1
    return happened
