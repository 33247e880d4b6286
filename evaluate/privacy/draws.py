"""Test whether a defense draws Poisson samples or shuffled epochs."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Generator, Tensor

from leakfrontier.defenses import Defense

from .finding import SIGNIFICANCE, Symptom

STEPS, BATCH, MOST_EXAMPLES = 400, 16, 20_000
"""Number of drawn batches, their expected size, and the largest number of examples."""

Counts = NDArray[np.int64]


def draws_poisson(defense: Defense, rate: float) -> bool:
    """Return whether batches look like Poisson samples of a rate, independent of the claim."""
    symptoms = poisson_samples(defense, rate, Generator().manual_seed(0))
    return all(len(symptoms) * one.p_value >= SIGNIFICANCE for one in symptoms)


def shuffled_epochs(
    defense: Defense, rng: Generator, examples: int = 50, batch_size: int = 8
) -> Symptom:
    """Test whether each record is in one batch of an epoch."""
    per_epoch = -(-examples // batch_size)
    drawn = [*defense.batches(examples, batch_size, 4, rng)]
    for start in range(0, len(drawn), per_epoch):
        epoch = torch.cat(drawn[start : start + per_epoch])
        if len(epoch.unique()) < len(epoch):
            return Symptom(0.0, "a record is in two batches of an epoch, or twice in one batch")
    return Symptom(1.0, "")


def poisson_samples(defense: Defense, rate: float, rng: Generator) -> list[Symptom]:
    """Test whether batches are Poisson samples: rate, sizes, counts and serial dependence."""
    batch_size = max(1, min(BATCH, int(MOST_EXAMPLES * rate)))
    examples = round(batch_size / rate)
    drawn = [*islice(defense.batches(examples, batch_size, STEPS, rng), STEPS)]
    if any(len(rows.unique()) < len(rows) for rows in drawn):
        return [Symptom(0.0, "a record is twice in one batch")]
    rate = batch_size / examples
    sizes = np.array([len(rows) for rows in drawn])
    counts = torch.bincount(torch.cat(drawn), minlength=examples).cpu().numpy()
    total, draws = int(sizes.sum()), len(drawn) * examples
    found = total / draws
    return [
        Symptom(
            float(stats.binom.sf(total - 1, draws, rate)),
            f"a record is in a batch with probability {found:.3g}, but {rate:.3g} is claimed",
        ),
        _dispersion(sizes, examples, found, "batch sizes"),
        _dispersion(counts, len(drawn), found, "counts of records"),
        _serial(drawn, sizes, examples),
    ]


def _dispersion(values: Counts, trials: int, rate: float, what: str) -> Symptom:
    """Test whether the variance of values about their mean is that of binomials."""
    variance = trials * rate * (1 - rate)
    if not variance > 0:
        return Symptom(1.0, "")
    statistic = float(np.square(values - values.mean()).sum()) / variance
    freedom = len(values) - 1
    # The chi^2 is asymptotic: for rare events, kurtosis makes the tails heavier.
    excess = math.sqrt(1 + (1 - 6 * rate * (1 - rate)) / (2 * variance))
    deviation = (statistic - freedom) / (math.sqrt(2 * freedom) * excess)
    p_value = 2 * float(stats.norm.sf(_cautious(deviation, freedom)))
    ratio = statistic / freedom
    words = f"the variance of {what} is {ratio:.2g} times that of the claimed Poisson sampling"
    return Symptom(p_value, words)


def _cautious(deviation: float, freedom: int) -> float:
    """Return a normal deviate as rare as a given deviation of a (skewed) chi^2."""
    value = max(freedom + deviation * math.sqrt(2 * freedom), 1e-12)
    cube = float((value / freedom) ** (1 / 3))  # Wilson and Hilferty
    return abs(cube - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def _serial(drawn: list[Tensor], sizes: Counts, examples: int) -> Symptom:
    """Test whether the records of one step are in the next step as often as all others."""
    both = sum(int(torch.isin(now, later).sum()) for now, later in pairwise(drawn))
    expected = float((sizes[:-1] * sizes[1:]).sum()) / examples  # given the sizes
    upper, lower = stats.poisson.sf(both - 1, expected), stats.poisson.cdf(both, expected)
    p_value = 2 * float(min(upper, lower))
    words = (
        f"{both} records of a step are also in the next step, but {expected:.0f} are expected "
        "under the claimed Poisson sampling"
    )
    return Symptom(min(1.0, p_value), words)
