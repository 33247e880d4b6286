"""Intervals, paired differences and frontiers, from the rows of an evaluation.

The independent unit is the observation (one upload), not the victim, because the examples of a
batch share noise, masks and matching. Hence resampling draws whole observations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from functools import lru_cache
from math import inf, isfinite, nan, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.special import ndtr, stdtr

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

DRAWS = 2_000
"""Number of bootstrap resamples for every interval."""

SIGNIFICANCE = 0.05
"""A difference is significant if its p-value is smaller."""

LEAST_SEEDS = 5
"""Minimum number of seeds for an interval over seeds."""


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence limits; it prints as a percentage.

    Attributes:
        value: The estimate; NaN without data.
        low: Lower confidence limit.
        high: Upper confidence limit.
        n: Number of independent units behind it.
    """

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if np.isnan(self.value):
            return "n/a"
        if self.value == 0 <= self.low:  # a difference of zero has a negative limit
            return f"<= {100 * self.high:.1f} %"
        if self.value == 1:
            return f">= {100 * self.low:.1f} %"
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@lru_cache(maxsize=4096)
def clopper_pearson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Return a proportion with its exact interval, whose coverage is at least the nominal one.

    References:
        Clopper, Pearson, "The Use of Confidence or Fiducial Limits Illustrated in the Case of
        the Binomial", Biometrika 1934, https://doi.org/10.1093/biomet/26.4.404
    """
    tail = _tail(confidence)
    _check_counts(successes, n)
    if n == 0:
        return Interval(nan, 0.0, 1.0, 0)
    low = stats.beta.ppf(tail, successes, n - successes + 1) if successes > 0 else 0.0
    high = stats.beta.isf(tail, successes + 1, n - successes) if successes < n else 1.0
    return Interval(successes / n, float(low), float(high), n)


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Return a proportion with its score interval, which is narrower than the exact one.

    References:
        Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", Journal
        of the American Statistical Association 1927,
        https://doi.org/10.1080/01621459.1927.10502953
    """
    z = float(stats.norm.isf(_tail(confidence)))
    _check_counts(successes, n)
    if n == 0:
        return Interval(nan, 0.0, 1.0, 0)
    share = successes / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half), n)


def rate(
    successes: ArrayLike, observation: ArrayLike, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return the share of victims on which an attack succeeds.

    The interval is Clopper-Pearson if every observation has one victim. Otherwise it is a
    percentile bootstrap over observations. A bootstrap cannot draw unseen observations: zero
    successes would give [0, 0]. Hence the interval is extended. The largest share of unseen
    observations that the sample allows is assumed to succeed, or to fail. The interval contains
    the rate in both cases. If all outcomes are equal, this is Clopper-Pearson on the number of
    observations.

    Args:
        successes: 0 or 1 per victim.
        observation: Which observation each victim belongs to.
        confidence: Confidence level.
        seed: Seed of the bootstrap.
    """
    flags = _binary(successes)
    member, n = _clusters(observation, len(flags))
    if n == len(flags):
        return clopper_pearson(int(flags.sum()), n, confidence)
    return _bounded_mean(flags.astype(float), member, n, 0.0, confidence, seed)


def mean_interval(
    values: ArrayLike, cluster: ArrayLike, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return a mean with its percentile bootstrap interval over clusters.

    One cluster does not show the spread between clusters, so its interval is unbounded.

    Args:
        values: Any score, one per victim.
        cluster: Which independent unit each value belongs to.
        confidence: Confidence level.
        seed: Seed of the bootstrap.
    """
    values = _vector(values)
    member, n = _clusters(cluster, len(values))
    if n < 2:
        return Interval(float(values.mean()) if n else nan, -inf, inf, n)
    low, high = _limits(_mean_draws(values, member, n, seed), confidence)
    return Interval(float(values.mean()), low, high, n)


def accuracy_interval(
    correct: Sequence[int], total: Sequence[int], confidence: float = 0.95
) -> Interval:
    """Return the mean test accuracy over seeds, with a cautious interval.

    The interval covers two sources of variation. The choice of test examples enters by the Wilson
    interval of the mean on one test set, which all seeds share. The choice of the model enters by
    the spread of the seeds. From five seeds on, this is the t-interval of their mean. With fewer
    seeds, it is their minimum and maximum, and no interval over seeds is claimed.

    Args:
        correct: Correctly classified test examples, per seed.
        total: Test examples, per seed.
        confidence: Confidence level.
    """
    seeds = _shares(correct, total)
    mean, (low, high) = float(seeds.mean()), _spread(seeds, confidence)
    sampled = wilson(round(mean * min(total)), min(total), confidence)
    low, high = max(0.0, low), min(1.0, high)
    return Interval(mean, min(low, sampled.low), max(high, sampled.high), len(seeds))


def accuracy_difference(
    first: Sequence[int], second: Sequence[int], total: Sequence[int], confidence: float = 0.95
) -> Interval:
    """Return the mean test accuracy of `first` minus that of `second`, paired by seed.

    As in `accuracy_interval`, the interval covers the spread of the seeds, here of their
    differences. It also covers the choice of test examples, by Newcombe's interval for two samples.
    Two models mostly err on the same examples of one test set, so this interval is wider than
    necessary. The rows do not record which examples these are.

    Args:
        first: Correctly classified test examples, per seed.
        second: The same for another defense, for the same seeds.
        total: Test examples, per seed.
        confidence: Confidence level.

    References:
        Newcombe, "Interval Estimation for the Difference Between Independent Proportions:
        Comparison of Eleven Methods", Statistics in Medicine 1998 (method 10),
        https://doi.org/10.1002/(SICI)1097-0258(19980430)17:8%3C873::AID-SIM779%3E3.0.CO;2-I
    """
    pair, size = [_shares(one, total) for one in (first, second)], min(total)
    a, b = (wilson(round(shares.mean() * size), size, confidence) for shares in pair)
    seeds = pair[0] - pair[1]
    mean, (low, high) = float(seeds.mean()), _spread(seeds, confidence)
    below = sqrt((a.value - a.low) ** 2 + (b.high - b.value) ** 2)
    above = sqrt((a.high - a.value) ** 2 + (b.value - b.low) ** 2)
    return Interval(mean, min(low, mean - below), max(high, mean + above), len(seeds))


def accuracy_test(first: Sequence[int], second: Sequence[int], total: Sequence[int]) -> float:
    """Return the p-value of equal accuracies. One seed shows no difference.

    It is the larger of two p-values: a t-test over the differences of the seeds, and a score test
    for the choice of test examples, which all seeds share.

    Args:
        first: Correctly classified test examples, per seed.
        second: The same for another defense, for the same seeds.
        total: Test examples, per seed.
    """
    a, b = (_shares(one, total) for one in (first, second))
    seeds, size = a - b, min(total)
    gap, both = abs(float(seeds.mean())), float((a.mean() + b.mean()) / 2)
    if len(seeds) < 2 or gap == 0:
        return 1.0
    errors = (float(seeds.std(ddof=1)) / sqrt(len(seeds)), sqrt(2 * both * (1 - both) / size))
    scores = [gap / error if error > 0 else inf for error in errors]
    return float(2 * max(stdtr(len(seeds) - 1, -scores[0]), ndtr(-scores[1])))


def paired_difference(
    a: ArrayLike, b: ArrayLike, cluster: ArrayLike, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return the rate of `a` minus that of `b` on the same victims. Outcomes are 0 or 1.

    The interval is computed as in `rate`, so equal outcomes do not give [0, 0]. It excludes zero
    only if the exact `sign_test` is significant too.
    """
    first, second = _pair(a, b)
    member, n = _clusters(cluster, len(first))
    difference = first.astype(float) - second.astype(float)
    found = _bounded_mean(difference, member, n, -1.0, confidence, seed)
    if sign_test(a, b, cluster) < 1 - confidence:
        return found
    return replace(found, low=min(found.low, 0.0), high=max(found.high, 0.0))


def sign_test(a: ArrayLike, b: ArrayLike, cluster: ArrayLike) -> float:
    """Return the exact p-value of equally many observations favouring `a` and `b`.

    Outcomes are 0 or 1. An observation favours the one that succeeds on more of its victims. With
    one victim per observation, this is the exact form of McNemar's test.

    References:
        McNemar, "Note on the Sampling Error of the Difference Between Correlated Proportions or
        Percentages", Psychometrika 1947, https://doi.org/10.1007/BF02295996
    """
    first, second = _pair(a, b)
    member, _ = _clusters(cluster, len(first))
    sums = np.bincount(member, weights=first.astype(float) - second.astype(float))
    more, less = int((sums > 0).sum()), int((sums < 0).sum())
    return float(min(1.0, 2 * stats.binom.cdf(min(more, less), more + less, 0.5)))


def holm(pvalues: ArrayLike) -> Floats:
    """Return p-values adjusted for their number, so that alpha bounds the family-wise error.

    References:
        Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of
        Statistics 1979, https://www.jstor.org/stable/4615733
    """
    raw = _vector(pvalues)
    if not np.all((raw >= 0) & (raw <= 1)):
        raise ValueError(f"p-values must be in [0, 1], got {raw.tolist()}")
    order = np.argsort(raw)
    adjusted = np.empty_like(raw)
    adjusted[order] = np.maximum.accumulate(raw[order] * np.arange(len(raw), 0, -1))
    return adjusted.clip(max=1.0)


def advantage(success: float, prior: float) -> float:
    """Return the success beyond a prior-only guess, as a share of the possible gain."""
    return nan if prior == 1 else (success - prior) / (1 - prior)


def pareto_mask(*costs: ArrayLike) -> Flags:
    """Return which configurations are not dominated by any other: see `pareto_probability`."""
    optimal: Flags = pareto_probability(*(_vector(cost)[None] for cost in costs)) == 1
    return optimal


def pareto_probability(*costs: ArrayLike) -> Floats:
    """Return the share of draws in which each of D configurations is not dominated.

    One dominates another if none of its costs is higher and one is lower. Duplicates do not
    dominate each other. NaN is an unknown cost: it may be higher than any known one.

    Args:
        costs: The draws (R x D) of each cost. Lower is better.
    """
    draws = [np.asarray(cost, dtype=float) for cost in costs]
    if not draws or any(one.ndim != 2 or one.shape != draws[0].shape for one in draws):
        raise ValueError(f"costs must be draws x configurations, got {[d.shape for d in draws]}")
    dominated = [
        _dominates(draws, [one[:, [b]] for one in draws]).any(axis=1).mean()
        for b in range(draws[0].shape[1])
    ]
    return 1 - np.array(dominated, dtype=float)


def hypervolume(utility: ArrayLike, privacy: ArrayLike) -> float:
    """Return the area from (0, 0) that a set of configurations dominates; 1 is the ideal point.

    Utility and privacy are clipped to [0, 1]; higher is better for both.
    """
    return float(hypervolumes(_vector(utility)[None], _vector(privacy)[None])[0])


def hypervolumes(utility_draws: ArrayLike, privacy_draws: ArrayLike) -> Floats:
    """Return the hypervolume of each of R draws (R x D) of D configurations."""
    utility, privacy = (values.clip(0, 1) for values in _draws(utility_draws, privacy_draws))
    order = np.argsort(-utility, axis=1)
    utility, privacy = (np.take_along_axis(v, order, axis=1) for v in (utility, privacy))
    widths = -np.diff(utility, append=0.0)
    areas: Floats = (widths * np.maximum.accumulate(privacy, axis=1)).sum(axis=1)
    return areas


def monotone_violation(
    strength: ArrayLike, rate: ArrayLike, low: ArrayLike, high: ArrayLike
) -> list[tuple[int, int]]:
    """Return pairs (weaker, stronger) in which the stronger defense leaks significantly more.

    Significant means that the intervals do not overlap. Pairs are positions in the arguments. The
    pair with the largest rise of the rate comes first.

    Args:
        strength: Strength of each configuration of one defense.
        rate: Attack success under each.
        low: Lower confidence limits.
        high: Upper confidence limits.
    """
    strengths, rates, lows, highs = map(_vector, (strength, rate, low, high))
    if not len(strengths) == len(rates) == len(lows) == len(highs):
        raise ValueError("strength, rate, low and high must have one value per configuration")
    rises = (strengths[:, None] < strengths) & (lows > highs[:, None])
    pairs = [(int(i), int(j)) for i, j in np.argwhere(rises)]
    return sorted(pairs, key=lambda pair: rates[pair[0]] - rates[pair[1]])


def _shares(correct: Sequence[int], total: Sequence[int]) -> Floats:
    """Return the accuracy of each seed."""
    if not (len(correct) == len(total) >= 1 and all(size >= 1 for size in total)):
        raise ValueError(
            f"correct and total must have one entry per seed and total must be positive, "
            f"got {list(correct)} and {list(total)}"
        )
    for hits, size in zip(correct, total, strict=True):
        _check_counts(hits, size)
    shares: Floats = np.array(correct) / np.array(total)
    return shares


def _spread(seeds: Floats, confidence: float) -> tuple[float, float]:
    """Return the t-interval of the mean over seeds; minimum and maximum if there are few."""
    n = len(seeds)
    if n < LEAST_SEEDS:
        return float(seeds.min()), float(seeds.max())
    half = float(stats.t.isf(_tail(confidence), n - 1) * seeds.std(ddof=1) / sqrt(n))
    return float(seeds.mean()) - half, float(seeds.mean()) + half


def _bounded_mean(
    values: Floats, member: NDArray[np.intp], n: int, least: float, confidence: float, seed: int
) -> Interval:
    """Return the mean of values in [least, 1] with its bootstrap interval, as in `rate`."""
    if n == 0:
        return Interval(nan, least, 1.0, 0)
    mean = float(values.mean())
    unseen = clopper_pearson(0, n, confidence).high
    low, high = _limits(_mean_draws(values, member, n, seed), confidence)
    return Interval(
        mean,
        min(low, mean - unseen * (mean - least)),
        max(high, mean + unseen * (1 - mean)),
        n,
    )


def _mean_draws(values: Floats, member: NDArray[np.intp], n: int, seed: int) -> Floats:
    counts = _counts(n, seed)
    sums = np.bincount(member, weights=values, minlength=n)
    sizes = np.bincount(member, minlength=n)
    draws: Floats = (counts @ sums) / (counts @ sizes)
    return draws


@lru_cache(maxsize=8)
def _counts(n: int, seed: int) -> NDArray[np.int64]:
    """Return how often each of n clusters is in each resample."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS)


def _limits(draws: Floats, confidence: float) -> tuple[float, float]:
    tail = _tail(confidence)
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)


def _dominates(costs: Sequence[Floats], others: Sequence[Floats]) -> Flags:
    pairs = list(zip(costs, others, strict=True))
    worse = [(one > other) | (np.isnan(one) & ~np.isnan(other)) for one, other in pairs]
    lower = [one < other for one, other in pairs]
    result: Flags = ~np.any(worse, axis=0) & np.any(lower, axis=0)
    return result


def _tail(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    return (1 - confidence) / 2


def _check_counts(successes: int, n: int) -> None:
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be in [0, n = {n}], got {successes}")


def _vector(values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=float)
    if array.ndim != 1:
        raise ValueError(f"expected one value per entry, got an array of shape {array.shape}")
    return array


def _binary(outcomes: ArrayLike) -> Flags:
    array = np.asarray(outcomes)
    if array.ndim != 1:
        raise ValueError(f"outcomes must have one dimension, got shape {array.shape}")
    if not np.isin(array, (0, 1)).all():
        raise ValueError("outcomes must be 0 or 1; leave out outcomes that were not measured")
    return array.astype(bool)


def _pair(a: ArrayLike, b: ArrayLike) -> tuple[Flags, Flags]:
    first, second = _binary(a), _binary(b)
    if len(first) != len(second):
        raise ValueError(f"outcomes must be paired, got {len(first)} and {len(second)}")
    return first, second


def _clusters(cluster: ArrayLike, length: int) -> tuple[NDArray[np.intp], int]:
    """Return the position of each entry's cluster, and the number of clusters."""
    labels = np.asarray(cluster)
    if labels.shape != (length,):
        raise ValueError(f"expected one cluster for each of {length} entries, got {labels.shape}")
    names, member = np.unique(labels, return_inverse=True)
    return member, len(names)


def _draws(utility: ArrayLike, success: ArrayLike) -> tuple[Floats, Floats]:
    u, s = np.asarray(utility, dtype=float), np.asarray(success, dtype=float)
    if u.ndim != 2 or u.shape != s.shape or np.isnan(u).any() or np.isnan(s).any():
        raise ValueError(
            f"both must be draws x configurations without NaN, got shapes {u.shape} and {s.shape}"
        )
    return u, s


def rounded_up(value: float, digits: int) -> float:
    """Return a value rounded up to some significant digits."""
    if not 0 < value < inf:
        return value
    return float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(value)))


def finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a value for JSON: infinite and NaN values become null."""
    return None if isinstance(value, float) and not isfinite(value) else value
