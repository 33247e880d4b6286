"""Epsilon of the (subsampled) Gaussian mechanism, by privacy loss distributions.

References:
    [1] Doroshenko, Ghazi, Kamath, Kumar, Manurangsi. "Connect the Dots: Tighter Discrete
        Approximations of Privacy Loss Distributions." PoPETs 2022.
        https://arxiv.org/abs/2207.04380 (Algorithm 1)
    [2] Dong, Roth, Su. "Gaussian Differential Privacy." JRSS B 2022.
        https://arxiv.org/abs/1905.02383 (Corollary 3.3)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import log_ndtr, ndtr

from .base import Plan

Floats = NDArray[np.float64]

RESOLUTION, COARSEST, MOST_POINTS = 0.04, 1e-3, 250_000
"""Width of the grid of privacy losses: this share of the standard deviation of one step's loss, but
at most `COARSEST`. It is wider if the distribution would have more than `MOST_POINTS` points.
A share of 0.04 costs about 0.02 % of epsilon, always upwards."""

LARGEST_LOSS = float(MOST_POINTS)
"""If a run's loss is larger, epsilon counts as infinite: its grid would be wider than 1."""

TAIL, TAIL_MASS = 10.0, 1e-15
"""Beyond `TAIL` standard deviations of the noise, the loss of a step counts as infinite. The loss
of a run counts as infinite in its tails of probability `TAIL_MASS`."""

NEGLIGIBLE = 1e-40
"""If the amplitude of a frequency after all steps is smaller, it counts as zero."""

ORDERS = 7
"""Number of orders of Chernoff's bound to try."""

MOST_STEPS = 10**9
"""The maximum number of steps with sampling. Without sampling, the maximum is its square."""


@dataclass(frozen=True)
class Segment:
    """Steps of a training run that have the same sampling and the same noise.

    Attributes:
        sample_rate: q, the probability that a step contains a given unit, under secret Poisson
            sampling; 1 if the adversary sees who takes part.
        noise_multiplier: sigma, the noise's standard deviation over the sensitivity.
        steps: Number of steps.
    """

    sample_rate: float
    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate must be in (0, 1], got {self.sample_rate}")
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be in [0, inf), got {self.noise_multiplier}")
        if not (self.steps >= 1 and self.steps == int(self.steps)):
            raise ValueError(f"steps must be a positive whole number, got {self.steps}")
        most = MOST_STEPS if self.sample_rate < 1 else MOST_STEPS**2
        if not self.steps <= most:
            raise ValueError(f"steps must be at most {most:g}, got {self.steps:.6g}")


Schedule = tuple[Segment, ...]
"""A training run: segments in order. Their sampling and noise may differ."""


def sampled_segment(
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    *,
    poisson_sampling: bool = True,
    passes: int | None = None,
) -> Segment:
    """Return steps that see a share of all units, in the form that accountants count.

    Without Poisson sampling, a unit counts in full at each step that contains it. With shuffled
    epochs, these are `passes` steps, otherwise all steps. The result is mu-GDP with
    mu = sqrt(passes) / sigma, under zero-out adjacency, for every order of the examples. Proof:

    Let D' be D with unit i contributing nothing. Given the permutations of all epochs, D and D'
    have the same examples in the same places, because i keeps its place. So the steps without i are
    the same randomised function of earlier releases. At each of the k steps with i, the sums differ
    by at most C. Such a step is (1 / sigma)-GDP, and a step without i is 0-GDP. Adaptive
    composition gives sqrt(k) / sigma [2], with k <= passes. This bounds an adversary who knows the
    permutations, which have the same distribution under D and D'. An adversary who does not know
    them cannot do better. (If i were removed instead, all later units would move up by one place.
    Sums would change by 2 C, and in more than one step.)
    """
    if poisson_sampling:
        return Segment(sample_rate, noise_multiplier, steps)
    return Segment(1.0, noise_multiplier, steps if passes is None else min(steps, passes))


def shuffled_passes(examples: int, batch_size: int, steps: int) -> int:
    """Return the most of the first `steps` batches of shuffled epochs that contain one example."""
    return -(-steps // -(-examples // batch_size))


def gaussian_epsilon(
    noise_multiplier: float, plan: Plan, *, poisson_sampling: bool = True
) -> float:
    """Return epsilon of a plan's steps by PLD; infinite without noise.

    Args:
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        plan: Steps, sample rate and delta.
        poisson_sampling: Whether steps are Poisson samples. If not, they are batches of shuffled
            epochs; see `sampled_segment`.
    """
    segment = sampled_segment(
        plan.sample_rate,
        noise_multiplier,
        plan.steps,
        poisson_sampling=poisson_sampling,
        passes=plan.passes,
    )
    return pld_epsilon((segment,), plan.delta)


def concentrated_epsilon(rho: float, plan: Plan) -> float:
    """Return epsilon of a plan's steps, each of them rho-zCDP, by Renyi differential privacy.

    The result ignores the sample rate, so it is an upper bound: zCDP does not credit sampling.
    """
    if rho == math.inf:
        return math.inf
    from dp_accounting import SelfComposedDpEvent, ZCDpEvent, rdp

    accountant = rdp.RdpAccountant().compose(SelfComposedDpEvent(ZCDpEvent(rho), plan.steps))
    return float(accountant.get_epsilon(plan.delta))


def pld_epsilon(schedule: Schedule, delta: float) -> float:
    """Return epsilon by PLD, or by its closed form if there is one; infinite without noise."""
    mu = separation(schedule)
    if mu is None:
        if not delta >= (least := 2 * numerical_error(schedule, precise=True)):
            raise ValueError(
                f"delta must be at least {least:.2g} for {sum(s.steps for s in schedule)} steps "
                f"with sampling, got {delta:g}. Rounding errors and truncated tails hide smaller "
                "deltas. Use a larger delta, or a sample rate of 1, for which epsilon has a closed "
                "form"
            )
        # Make the same call as the bounds do if it is precise enough, because it is cached.
        rough = numerical_error(schedule) > delta / 100
        loss = privacy_loss(schedule, precise=True) if rough else privacy_loss(schedule)
        return max(_epsilon(one, delta) for one in (loss._pmf_remove, loss._pmf_add))
    if mu > LARGEST_LOSS:  # epsilon exceeds mu^2 / 2, where the closed form overflows
        return math.inf
    from dp_accounting import get_epsilon_gaussian

    with np.errstate(divide="ignore"):  # in an intermediate logarithm
        return float(get_epsilon_gaussian(1 / mu, delta))


def numerical_error(schedule: Sequence[Segment], *, precise: bool = False) -> float:
    """Return the possible error of delta(epsilon) of sampled steps, from tails and rounding.

    A power of a Fourier transform has a relative error of about one rounding per step. Measured
    errors are below a third of that.
    """
    rounding = float(np.finfo(np.longdouble if precise else np.float64).eps)
    return sum(2 * TAIL_MASS + segment.steps * rounding for segment in schedule)


def separation(schedule: Sequence[Segment]) -> float | None:
    """Return mu if a run is mu-Gaussian-private; None if it subsamples.

    Unsampled steps compose exactly to a single step [2]. mu is infinite without noise. It is also
    infinite if sampled steps have so little noise that losses exceed `LARGEST_LOSS`.
    """
    if not all(segment.noise_multiplier for segment in schedule):
        return math.inf
    if any(segment.sample_rate < 1 for segment in schedule):
        return None if loss_grid(schedule)[1] <= LARGEST_LOSS else math.inf
    return math.hypot(*(math.sqrt(s.steps) / s.noise_multiplier for s in schedule))


@lru_cache(maxsize=8)
def privacy_loss(schedule: Schedule, *, precise: bool = False) -> Any:  # noqa: ANN401 - untyped
    """Return the privacy loss distribution of a schedule with noise, rounded pessimistically.

    Args:
        schedule: The training run.
        precise: Whether to compose in extended precision, for tiny deltas; slower.
    """
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    width, _ = loss_grid(schedule)
    total = None
    for segment in schedule:
        # Unsampled steps compose exactly to a single step.
        together = segment.steps if segment.sample_rate == 1 else 1
        sigma = segment.noise_multiplier / math.sqrt(together)
        steps = [
            _self_composed(one, segment.steps // together, precise)
            for one in _step_loss(segment.sample_rate, sigma, width)
        ]
        several = PrivacyLossDistribution(*steps)
        total = several if total is None else total.compose(several)
    return total


def _step_loss(q: float, sigma: float, width: float) -> tuple[Any, Any]:
    """Return the discretised loss of one step if a unit is removed, and if one is added.

    It connects the dots of delta(epsilon) [1], like dp-accounting's `from_gaussian_mechanism`. That
    function takes seconds if there are many losses, and adds rounding errors to every mass.
    """
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    least, most = _loss(np.array([-TAIL * sigma, 1 + TAIL * sigma]), q, sigma)
    grid = np.arange(math.floor(least / width), math.ceil(most / width) + 1)
    deltas = np.minimum.accumulate(_step_profile(grid * width, q, sigma))
    falls = -np.diff(deltas)
    masses = np.zeros_like(deltas)
    masses[0] = 1 - deltas[0]
    masses[1:] -= falls / math.expm1(-width)
    masses[:-1] -= falls / math.expm1(width)
    masses = masses.clip(min=0)
    removed = DensePLDPmf(width, int(grid[0]), masses, float(deltas[-1]), True)
    if q == 1:
        return removed, removed
    # With the neighbours exchanged, the loss changes its sign.
    other = (masses * np.exp(-grid * width))[::-1]
    return removed, DensePLDPmf(width, -int(grid[-1]), other, float(ndtr(-TAIL)), True)


def _self_composed(step: Any, steps: int, precise: bool) -> Any:  # noqa: ANN401 - untyped
    """Return the loss of equal steps. Mass that may be wrong counts as infinite loss.

    It is like dp-accounting's `self_compose`, but several times faster.
    """
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    if steps == 1:
        return step
    low, high = _support(step._probs, steps)
    size = fft.next_fast_len(max(high - low + 1, step.size), real=True)
    kind = np.longdouble if precise else np.float64
    once = fft.rfft(step._probs.astype(kind), size)
    together, matters = np.zeros_like(once), np.abs(once) > NEGLIGIBLE ** (1 / steps)
    together[matters] = once[matters] ** steps  # after many steps, few frequencies matter
    composed = fft.irfft(together, size)
    kept = np.roll(composed, -low)[: high - low + 1].astype(np.float64)
    infinite = TAIL_MASS - math.expm1(steps * math.log1p(-step._infinity_mass))
    infinite += steps * float(np.finfo(kind).eps)
    return DensePLDPmf(step._discretization, steps * step._lower_loss + low, kept, infinite, True)


def _support(masses: Floats, steps: int) -> tuple[int, int]:
    """Return the points between which a sum of draws lies, except with probability `TAIL_MASS`.

    The function uses Chernoff's bound. The orders range from one that suits a Gaussian to those
    that suit a heavy tail of one draw. Each is a power of 2 times the one before, so exponentials
    are squared, which is much cheaper.
    """
    points = np.arange(len(masses), dtype=float)
    mean = float(masses @ points)
    points -= mean
    gaussian = math.sqrt(-2 * math.log(TAIL_MASS) / (steps * (masses @ points**2)))
    heavy = 4 / len(masses)
    doublings = max(1, math.ceil(abs(math.log2(heavy / gaussian)) / (ORDERS - 1)))
    order = gaussian if gaussian < heavy else gaussian / 2.0 ** (doublings * (ORDERS - 1))
    low, high = 0.0, steps * (len(masses) - 1.0)
    with np.errstate(all="ignore"):  # infinite bounds are ignored
        growth = np.exp(order * points)
        for _ in range(ORDERS):
            moments = [float(np.log(masses @ one)) for one in (1 / growth, growth)]
            below, above = ((steps * one + math.log(2 / TAIL_MASS)) / order for one in moments)
            low = max(low, float(steps * mean - below)) if below < math.inf else low
            high = min(high, float(steps * mean + above)) if above < math.inf else high
            for _ in range(doublings):
                growth, order = growth * growth, 2 * order
    return math.floor(low), math.ceil(high)


def _epsilon(distribution: Any, delta: float) -> float:  # noqa: ANN401 - untyped
    """Return epsilon of a loss distribution.

    The probability of a set of outputs is at most e^epsilon times its probability under the
    neighbour, plus delta. The worst sets contain the largest losses. The function is like
    `get_epsilon_for_delta`, without its loop.
    """
    if distribution._infinity_mass > delta:
        return math.inf
    losses = (
        np.arange(distribution.size) + distribution._lower_loss
    ) * distribution._discretization
    losses, masses = losses[losses > 0][::-1], distribution._probs[losses > 0][::-1]
    likely = distribution._infinity_mass + np.cumsum(masses)
    unlikely = np.cumsum(masses * np.exp(-losses))
    above = likely > delta
    if not above.any():
        return 0.0
    with np.errstate(divide="ignore", over="ignore"):  # e^-loss may underflow
        ratio = np.max((likely[above] - delta) / unlikely[above])
    return float(max(0.0, min(np.log(ratio), losses[above][0])))


def _step_profile(epsilons: Floats, q: float, sigma: float) -> Floats:
    """Return delta(epsilon) of one step, when a unit is removed."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # in values not selected
        ratio = np.where(
            epsilons > 50,  # e^epsilon would overflow, or 1 - q would be lost in rounding
            epsilons - math.log(q),
            np.log1p(np.maximum(np.expm1(epsilons) / q, -1)),
        )
        outputs = 0.5 + sigma**2 * ratio  # beyond this, losses are larger than epsilon
        without, within = ndtr(-outputs / sigma), ndtr((1 - outputs) / sigma)
        # The first form is precise if epsilon and q are small. The other does not overflow.
        near = q * (within - without) - np.expm1(epsilons) * without
        far = (1 - q) * without + q * within - np.exp(epsilons + log_ndtr(-outputs / sigma))
    result: Floats = np.where(np.abs(epsilons) < 1, near, far).clip(0, 1)
    return result


def loss_grid(schedule: Sequence[Segment]) -> tuple[float, float]:
    """Return the interval between discretised privacy losses, and (nearly) the largest loss.

    The interval is small compared with the spread of a step's loss, because a grid of width w adds
    up to w^2 / 4 to the variance of every step.
    """
    moments = [_loss_moments(segment) for segment in schedule]
    spread = min(math.sqrt(variance) for _, variance, _ in moments)
    steps = [segment.steps for segment in schedule]
    mean = sum(count * one[0] for count, one in zip(steps, moments, strict=True))
    variance = sum(count * one[1] for count, one in zip(steps, moments, strict=True))
    largest = mean + 9 * math.sqrt(variance) + max(one[2] for one in moments)
    return max(min(RESOLUTION * spread, COARSEST), largest / MOST_POINTS), largest


def _loss_moments(segment: Segment) -> tuple[float, float, float]:
    """Return mean, variance and (nearly) the maximum of one step's privacy loss."""
    q, sigma = segment.sample_rate, segment.noise_multiplier
    deviations = np.linspace(-9, 9, 2001)
    weights = np.exp(-(deviations**2) / 2)
    weights /= weights.sum()
    with np.errstate(all="ignore"):  # if noise is tiny, losses overflow
        losses = _loss(sigma * deviations + np.array([[0.0], [1.0]]), q, sigma)
        mixture = np.array([1 - q, q])  # without and with the unit
        mean = float(mixture @ losses @ weights)
        variance = float(mixture @ (losses - mean) ** 2 @ weights)
    return mean, variance, float(losses[1, -1])


def _loss(outputs: Floats, q: float, sigma: float) -> Floats:
    """Return the privacy loss at outputs of one step, when a unit is removed."""
    absent = math.log1p(-q) if q < 1 else -math.inf
    result: Floats = np.logaddexp(absent, math.log(q) + (2 * outputs - 1) / (2 * sigma**2))
    return result
