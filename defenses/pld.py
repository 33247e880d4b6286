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
"""How finely privacy losses are discretised: a share of the standard deviation of one step's
loss, but at most `COARSEST`, unless the distribution would have more than `MOST_POINTS` points.
A share of 0.04 costs about 0.02 % of epsilon, always upwards."""

LARGEST_LOSS = float(MOST_POINTS)
"""The loss of a run above which epsilon counts as infinite: its grid would be wider than 1."""

TAIL, TAIL_MASS = 10.0, 1e-15
"""Beyond this many standard deviations of the noise, the loss of a step counts as infinite; so
does that of a run in the tails, of this probability."""

NEGLIGIBLE = 1e-40
"""Amplitude of a frequency, after all steps, below which it counts as zero."""

ORDERS = 7
"""Orders of Chernoff's bound that are tried."""

MOST_STEPS = 10**9
"""The most steps that are accounted for where units are sampled; without sampling, its square."""


@dataclass(frozen=True)
class Segment:
    """Steps of a training run that have the same sampling and the same noise.

    Attributes:
        sample_rate: q, the probability that one unit is in a step, by Poisson sampling that is
            secret from the adversary; 1 where the adversary sees who takes part.
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
"""A training run, one segment after another; the sampling and the noise may differ."""


def sampled_segment(
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    *,
    poisson_sampling: bool = True,
    passes: int | None = None,
) -> Segment:
    """Return steps that see a share of all units, as accountants may count them.

    Without Poisson sampling, a unit counts in full at each step that it is in: in `passes` of
    them where batches are those of shuffled epochs, else in all. That is mu-GDP with
    mu = sqrt(passes) / sigma, under zero-out adjacency and whatever the order of the examples:

    Let D' be D with unit i contributing nothing. Given the permutations of all epochs, D and D'
    have the same examples in the same places: i leaves its place to nobody. So the steps without
    i are the same randomised function of what was released before them, and at each of the k
    steps with i the sums differ by at most C. Such a step is (1 / sigma)-GDP, a step without i is
    0-GDP, and adaptive composition gives sqrt(k) / sigma [2], with k <= passes. That bounds an
    adversary who is told the permutations, which are drawn in the same way under D and D'; one
    who is not can do no better. (Were i removed instead, another unit would move into its place
    and those behind it: the sum would change by 2 C, and in more than one step.)
    """
    if poisson_sampling:
        return Segment(sample_rate, noise_multiplier, steps)
    return Segment(1.0, noise_multiplier, steps if passes is None else min(steps, passes))


def shuffled_passes(examples: int, batch_size: int, steps: int) -> int:
    """Return how many of the first batches of shuffled epochs an example is in at most."""
    return -(-steps // -(-examples // batch_size))


def gaussian_epsilon(
    noise_multiplier: float, plan: Plan, *, poisson_sampling: bool = True
) -> float:
    """Return epsilon of a plan's steps by PLD; infinite without noise.

    Args:
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        plan: Steps, sample rate and delta.
        poisson_sampling: Whether steps are Poisson samples, or else those of shuffled epochs;
            see `sampled_segment`.
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

    The sample rate is ignored, which is an upper bound: zCDP does not say what sampling gains.
    """
    if rho == math.inf:
        return math.inf
    from dp_accounting import SelfComposedDpEvent, ZCDpEvent, rdp

    accountant = rdp.RdpAccountant().compose(SelfComposedDpEvent(ZCDpEvent(rho), plan.steps))
    return float(accountant.get_epsilon(plan.delta))


def pld_epsilon(schedule: Schedule, delta: float) -> float:
    """Return epsilon by PLD, or by its closed form where there is one; infinite without noise."""
    mu = separation(schedule)
    if mu is None:
        if not delta >= (least := 2 * numerical_error(schedule, precise=True)):
            raise ValueError(
                f"delta must be at least {least:.2g} for {sum(s.steps for s in schedule)} steps "
                f"with sampling, got {delta:g}: smaller ones drown in rounding errors and in the "
                "tails that are cut off; take a larger delta, or a sample rate of 1, for which "
                "epsilon has a closed form"
            )
        # The same call as that of the bounds where it is good enough: its result is kept.
        rough = numerical_error(schedule) > delta / 100
        loss = privacy_loss(schedule, precise=True) if rough else privacy_loss(schedule)
        return max(_epsilon(one, delta) for one in (loss._pmf_remove, loss._pmf_add))
    if mu > LARGEST_LOSS:  # epsilon is above its square over 2, which the closed form cannot hold
        return math.inf
    from dp_accounting import get_epsilon_gaussian

    with np.errstate(divide="ignore"):  # in an intermediate logarithm
        return float(get_epsilon_gaussian(1 / mu, delta))


def numerical_error(schedule: Sequence[Segment], *, precise: bool = False) -> float:
    """Return by how much delta(epsilon) of sampled steps may be wrong, from tails and rounding.

    A power of a Fourier transform has a relative error of about one rounding per step; measured
    errors are below a third of that.
    """
    rounding = float(np.finfo(np.longdouble if precise else np.float64).eps)
    return sum(2 * TAIL_MASS + segment.steps * rounding for segment in schedule)


def separation(schedule: Sequence[Segment]) -> float | None:
    """Return mu if a run is mu-Gaussian-private; None if it subsamples.

    Steps that everyone is in compose to a single one, exactly [2]. Without noise mu is infinite,
    and likewise where sampled steps have so little that losses exceed `LARGEST_LOSS`.
    """
    if not all(segment.noise_multiplier for segment in schedule):
        return math.inf
    if any(segment.sample_rate < 1 for segment in schedule):
        return None if loss_grid(schedule)[1] <= LARGEST_LOSS else math.inf
    return math.hypot(*(math.sqrt(s.steps) / s.noise_multiplier for s in schedule))


@lru_cache(maxsize=8)
def privacy_loss(schedule: Schedule, *, precise: bool = False) -> Any:  # noqa: ANN401 - untyped
    """Return the privacy loss distribution of a schedule with noise; pessimistic throughout.

    Args:
        schedule: The training run.
        precise: Whether to compose in extended precision, for tiny deltas; slower.
    """
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    width, _ = loss_grid(schedule)
    total = None
    for segment in schedule:
        # Steps that everyone is in compose to a single one, exactly.
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
    """Return the discretised loss of one step, if a unit is removed and if one is added.

    By connecting the dots of delta(epsilon) [1], as dp-accounting's `from_gaussian_mechanism`,
    which takes seconds where losses are many, and which adds rounding errors to every mass.
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
    # Seen from the other side, the loss changes its sign.
    other = (masses * np.exp(-grid * width))[::-1]
    return removed, DensePLDPmf(width, -int(grid[-1]), other, float(ndtr(-TAIL)), True)


def _self_composed(step: Any, steps: int, precise: bool) -> Any:  # noqa: ANN401 - untyped
    """Return the loss of equal steps; what may be wrong counts as infinite.

    As dp-accounting's `self_compose`, but several times faster.
    """
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    if steps == 1:
        return step
    low, high = _support(step._probs, steps)
    size = fft.next_fast_len(max(high - low + 1, step.size), real=True)
    kind = np.longdouble if precise else np.float64
    once = fft.rfft(step._probs.astype(kind), size)
    together, matters = np.zeros_like(once), np.abs(once) > NEGLIGIBLE ** (1 / steps)
    together[matters] = once[matters] ** steps  # of many steps, few frequencies are left
    composed = fft.irfft(together, size)
    kept = np.roll(composed, -low)[: high - low + 1].astype(np.float64)
    infinite = TAIL_MASS - math.expm1(steps * math.log1p(-step._infinity_mass))
    infinite += steps * float(np.finfo(kind).eps)
    return DensePLDPmf(step._discretization, steps * step._lower_loss + low, kept, infinite, True)


def _support(masses: Floats, steps: int) -> tuple[int, int]:
    """Return between which points a sum of draws is, but for `TAIL_MASS`, by Chernoff's bound.

    The orders are from the one that suits a Gaussian to those that suit a heavy tail of one draw,
    each a power of 2 times the one before: exponentials are squared, which costs far less.
    """
    points = np.arange(len(masses), dtype=float)
    mean = float(masses @ points)
    points -= mean
    gaussian = math.sqrt(-2 * math.log(TAIL_MASS) / (steps * (masses @ points**2)))
    heavy = 4 / len(masses)
    doublings = max(1, math.ceil(abs(math.log2(heavy / gaussian)) / (ORDERS - 1)))
    order = gaussian if gaussian < heavy else gaussian / 2.0 ** (doublings * (ORDERS - 1))
    low, high = 0.0, steps * (len(masses) - 1.0)
    with np.errstate(all="ignore"):  # an infinite bound is of no use
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

    No set of outputs is likelier than e^epsilon times its probability on the other side, plus
    delta; the sets that matter are those of the largest losses. As `get_epsilon_for_delta`,
    without its loop.
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
    with np.errstate(divide="ignore", over="ignore"):  # where e^-loss underflows
        ratio = np.max((likely[above] - delta) / unlikely[above])
    return float(max(0.0, min(np.log(ratio), losses[above][0])))


def _step_profile(epsilons: Floats, q: float, sigma: float) -> Floats:
    """Return delta(epsilon) of one step, when a unit is removed."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # in what is not selected
        ratio = np.where(
            epsilons > 50,  # where e^epsilon overflows, or swallows 1 - q
            epsilons - math.log(q),
            np.log1p(np.maximum(np.expm1(epsilons) / q, -1)),
        )
        outputs = 0.5 + sigma**2 * ratio  # from where on losses are larger than epsilon
        without, within = ndtr(-outputs / sigma), ndtr((1 - outputs) / sigma)
        # The first is precise where epsilon and q are small, the other does not overflow.
        near = q * (within - without) - np.expm1(epsilons) * without
        far = (1 - q) * without + q * within - np.exp(epsilons + log_ndtr(-outputs / sigma))
    result: Floats = np.where(np.abs(epsilons) < 1, near, far).clip(0, 1)
    return result


def loss_grid(schedule: Sequence[Segment]) -> tuple[float, float]:
    """Return the interval between discretised privacy losses, and (nearly) the largest loss.

    The interval is small against the spread of a step's loss, because rounding to a grid of
    width w adds up to w^2 / 4 to the variance of every step.
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
    with np.errstate(all="ignore"):  # without noise to speak of, losses overflow
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
