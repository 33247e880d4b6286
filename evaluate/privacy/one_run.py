"""The statistics of privacy audits in one training run: guesses, p-values and lower bounds.

References:
    [1] Steinke, Nasr, Jagielski. "Privacy Auditing with One (1) Training Run." NeurIPS 2023.
        https://arxiv.org/abs/2305.08846
    [2] Mahloujifar, Melis, Chaudhuri. "Auditing f-Differential Privacy in One Run." ICML 2025.
        https://arxiv.org/abs/2410.22235
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import bdtrc

from ..statistics import Flags, Floats

CONFIDENCE = 0.95
"""Confidence level of the lower bounds from canaries."""

CANARIES = 1_000
"""Canaries of an audit, half of which are in."""


def log_likelihood_ratio(values: Floats, sample_rate: float, noise_multiplier: float) -> Floats:
    """Return log p(value | in the data) / p(value | not), for a unit that adds 1 when sampled."""
    absent = math.log1p(-sample_rate) if sample_rate < 1 else -math.inf
    sampled = math.log(sample_rate) + (2 * values - 1) / (2 * noise_multiplier**2)
    ratio: Floats = np.logaddexp(absent, sampled)
    return ratio


def correct_guesses(scores: Floats, present: Flags, guesses: int) -> NDArray[np.int64]:
    """Return how many guesses are right: half of them in, by the highest scores, half out.

    Args:
        scores: Runs x canaries.
        present: Which canaries were in the data; runs x canaries.
        guesses: Number of guesses; for the canaries between there are none.
    """
    ranked = np.take_along_axis(present, scores.argsort(axis=1), axis=1)
    half = guesses // 2
    right: NDArray[np.int64] = (~ranked[:, :half]).sum(axis=1) + ranked[:, -half:].sum(axis=1)
    return right


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return the chance of so many correct guesses, or more, under (epsilon, delta) ([1], 5.2)."""
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"correct guesses, guesses and canaries must not decrease, got {correct}, {guesses}, "
            f"{canaries}"
        )
    fewer = np.arange(correct + 1)
    at_least = bdtrc(correct - fewer - 1.0, guesses, 1 / (1 + math.exp(-epsilon)))
    added = (at_least[1:] - at_least[0]) / fewer[1:]  # Pr[correct > X >= correct - i] / i
    return min(1.0, float(at_least[0]) + 2 * canaries * delta * float(added.max(initial=0.0)))


def one_run_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return the largest epsilon that so many correct guesses refute; 0 if they refute none."""

    def excess(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) - (1 - confidence)

    return _largest(excess)


def _largest(excess: Callable[[float], float], most: float = 100.0) -> float:
    """Return where an increasing function of epsilon crosses zero; 0 if it starts above."""
    return 0.0 if excess(0.0) > 0 else float(brentq(excess, 0.0, most))


def one_run_ceiling(
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    delta: float,
    canaries: int = CANARIES,
    guesses: int = CANARIES // 5,
    confidence: float = CONFIDENCE,
    runs: int = 20,
) -> float:
    """Return the mean lower bound that simulated runs of the exact mechanism score."""
    draws = np.random.default_rng(0)
    present = draws.random((runs, canaries)) < 0.5
    scores = np.zeros((runs, canaries))
    for _ in range(steps):
        sampled = present & (draws.random(present.shape) < sample_rate)
        values = sampled + noise_multiplier * draws.standard_normal(present.shape)
        scores += log_likelihood_ratio(values, sample_rate, noise_multiplier)
    correct, times = np.unique(correct_guesses(scores, present, guesses), return_counts=True)
    bounds = [
        one_run_lower_bound(canaries, guesses, int(one), delta, confidence) for one in correct
    ]
    return float(np.average(bounds, weights=times))
