"""Bounds on all attacks against a differentially private training run.

A trade-off curve f bounds every test of "was this unit there?": at a false positive rate a, the
false negative rate is at least f(a) [1]. So no membership attack has a true positive rate above
1 - f(false positive rate). No reconstruction succeeds more often than gamma(kappa) = 1 - f(kappa),
where kappa is the success of the best guess without the release (reconstruction robustness
[2, 3, 4]). Two runs of equal epsilon may differ in gamma.

The blind guess must use everything that the attacker is given, such as the label. The bound for a
mixture of cases is the mean of the bounds of the cases.

References:
    [1] Dong, Roth, Su. "Gaussian Differential Privacy." JRSS B 2022.
        https://arxiv.org/abs/1905.02383
    [2] Balle, Cherubin, Hayes. "Reconstructing Training Data with Informed Adversaries." S&P
        2022. https://arxiv.org/abs/2201.04845
    [3] Hayes, Mahloujifar, Balle. "Bounding Training Data Reconstruction in DP-SGD." NeurIPS
        2023. https://arxiv.org/abs/2302.07225
    [4] Kaissis, Hayes, Ziller, Rueckert. "Bounding Data Reconstruction Attacks with the
        Hypothesis Testing Interpretation of Differential Privacy." 2023.
        https://arxiv.org/abs/2307.03928
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import norm

from leakfrontier.defenses.pld import Schedule, Segment, loss_grid, privacy_loss, separation

from ..foundations.statistics import Floats

PROFILE_POINTS, LARGEST_EPSILON = 4001, 30.0
"""Number of tangents of a trade-off curve; a larger epsilon matters only below level 1e-13."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of one schedule of the subsampled Gaussian mechanism.

    Attributes:
        schedule: The training run. Without noise in one of its segments, every bound is 1.
    """

    schedule: Schedule

    def __post_init__(self) -> None:
        if not self.schedule:
            raise ValueError("schedule must have at least one segment, got none")

    def power(self, level: ArrayLike) -> Floats:
        """Return 1 - f(level): the largest true positive rate at given false positive rates."""
        levels = np.asarray(level, dtype=float)
        if not np.all((levels >= 0) & (levels <= 1)):
            raise ValueError(f"rates and priors must be in [0, 1], got {levels.tolist()}")
        mu = separation(self.schedule)
        if mu is None:
            return profile_power(self.schedule, levels)
        if mu == math.inf:
            return np.ones_like(levels)
        return np.asarray(norm.cdf(norm.ppf(levels) + mu))

    def reconstruction(self, prior: float) -> float:
        """Return gamma(prior), the success that no reconstruction attack exceeds.

        Args:
            prior: Success of the best guess that ignores the release: 1 / N for N equally likely
                candidates.
        """
        return float(self.power(prior))

    def membership(self, false_positive_rate: float) -> float:
        """Return the largest true positive rate of a membership attack."""
        return float(self.power(false_positive_rate))

    def advantage(self) -> float:
        """Return the largest difference of true and false positive rate: the total variation."""
        mu = separation(self.schedule)
        if mu is None:
            return float(privacy_loss(self.schedule).get_delta_for_epsilon(0.0))
        return float(2 * norm.cdf(mu / 2) - 1)

    def curve(self, points: int = 200, least: float = 1e-5) -> tuple[Floats, Floats]:
        """Return false and largest true positive rates, for a plot with logarithmic axes."""
        rates = np.geomspace(least, 1, points)
        return rates, self.power(rates)


def profile_power(schedule: Schedule, level: ArrayLike) -> Floats:
    """Return 1 - f(level) = min over epsilon of e^epsilon level + delta(epsilon).

    Every epsilon gives an upper bound, and the discretised delta(epsilon) is an upper bound too.
    So the result is proven, not estimated.
    """
    epsilons, deltas = privacy_profile(schedule)
    levels = np.asarray(level, dtype=float)
    bounds = np.min(levels[..., None] * np.exp(epsilons) + deltas, axis=-1)
    return np.asarray(bounds.clip(0, 1))


@lru_cache(maxsize=128)
def privacy_profile(schedule: Schedule) -> tuple[Floats, Floats]:
    """Return delta(epsilon) over the relevant range, for the worse of addition and removal."""
    _, largest = loss_grid(schedule)
    end = min(LARGEST_EPSILON, largest)
    epsilons = np.linspace(-end, end, PROFILE_POINTS)
    loss = privacy_loss(schedule)
    deltas = [_hockey_stick(one, epsilons) for one in (loss._pmf_remove, loss._pmf_add)]
    return epsilons, np.maximum(*deltas)


def _hockey_stick(
    distribution: Any,  # noqa: ANN401 - untyped
    epsilons: Floats,
) -> Floats:
    """Return E[(1 - e^(epsilon - loss))+], for many epsilons at once.

    Same result as `get_delta_for_epsilon`, which takes seconds; so this reads private fields.
    """
    dense = distribution.to_dense_pmf()
    losses = (np.arange(dense.size) + dense._lower_loss) * dense._discretization
    kept = losses > epsilons[0]
    losses, masses = losses[kept], dense._probs[kept]
    first = np.searchsorted(losses, epsilons, side="right")
    mass, other = (
        np.append(np.cumsum(part[::-1])[::-1], 0.0)[first]
        for part in (masses, masses * np.exp(-losses))
    )
    result: Floats = dense._infinity_mass + mass - np.exp(epsilons) * other
    return result


def reconstruction(prior: float, sample_rate: float, noise_multiplier: float, steps: int) -> float:
    """Return gamma(prior): the success that no reconstruction attack on equal steps exceeds."""
    return Bounds((Segment(sample_rate, noise_multiplier, steps),)).reconstruction(prior)
