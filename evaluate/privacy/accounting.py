"""Epsilon of a training run by several accountants, and the noise that a target needs.

This module treats the Poisson-subsampled Gaussian mechanism. Neighbouring datasets differ in one
unit, a record or a client: its contribution is zeroed out, or the unit is added or removed. The
accountants differ in how tightly they compose the steps. Privacy loss distributions (PLD) [1] and
privacy random variables (PRV) [2] are tight. Renyi differential privacy (RDP) [3] is loose. All
three give upper bounds. The accountant `gdp` of Opacus is an asymptotic limit, which can be too
low, so it is not offered.

References:
    [1] Doroshenko, Ghazi, Kamath, Kumar, Manurangsi. "Connect the Dots: Tighter Discrete
        Approximations of Privacy Loss Distributions." PoPETs 2022.
        https://arxiv.org/abs/2207.04380
    [2] Gopi, Lee, Wutschitz. "Numerical Composition of Differential Privacy." NeurIPS 2021.
        https://arxiv.org/abs/2106.02848
    [3] Mironov. "Renyi Differential Privacy." CSF 2017. https://arxiv.org/abs/1702.07476
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np
from scipy import fft
from scipy.optimize import brentq

from leakfrontier.defenses.pld import Schedule as Schedule
from leakfrontier.defenses.pld import Segment as Segment
from leakfrontier.defenses.pld import numerical_error, pld_epsilon, sampled_segment, shuffled_passes

Unit = Literal["record", "client"]
"""The unit in which neighbouring datasets differ."""

NOISE_RANGE = (0.01, 1e6)
"""Smallest and largest noise multiplier of a calibration."""

INTEGER_ORDERS, LARGEST_FOR_SERIES = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024), 10.0
"""Integer orders of RDP; the noise multiplier above which only these are used."""

PRV_POINTS, LARGEST_PRV_ERROR = 2_000_000, 0.5
"""Largest number of points of a privacy random variable; largest accepted error."""


def record_segment(
    examples: int,
    batch_size: int,
    noise_multiplier: float,
    steps: int,
    *,
    poisson_sampling: bool = True,
) -> Segment:
    """Return steps that protect a record, with q = B / n for secret Poisson samples.

    Shuffled epochs have no amplification by sampling. But a record is in one batch per epoch, so
    only these steps count, each in full (see `sampled_segment`).
    """
    if not 1 <= batch_size <= examples:
        raise ValueError(f"batch_size must be in [1, examples = {examples}], got {batch_size}")
    return sampled_segment(
        batch_size / examples,
        noise_multiplier,
        steps,
        poisson_sampling=poisson_sampling,
        passes=shuffled_passes(examples, batch_size, steps),
    )


def client_segment(
    noise_multiplier: float, rounds: int, *, sample_rate: float = 1.0, secret: bool = False
) -> Segment:
    """Return the rounds of a client, which protect the client as a whole.

    The server sees who uploads, so random choice of clients gives no protection against it. The
    sample rate counts only if the choice is secret, e.g. against an adversary who sees only the
    model. In that case `rounds` are all rounds, and not only those of the client.
    """
    return Segment(sample_rate if secret else 1.0, noise_multiplier, rounds)


def epsilon(
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    delta: float,
    accountant: str = "pld",
    *,
    units: int | None = None,
    poisson_sampling: bool = True,
) -> float:
    """Return epsilon of equal steps. Without noise, warn and return infinity.

    Args:
        sample_rate: Probability that one unit is in a step.
        noise_multiplier: Standard deviation of the noise over the sensitivity.
        steps: Number of steps.
        delta: Failure probability.
        accountant: One of `ACCOUNTANTS`.
        units: Number of records or clients, if known. Warns if delta is not below 1 / units.
        poisson_sampling: Whether steps are Poisson samples. Otherwise the sample rate counts as 1
            (see `sampled_segment`).
    """
    if units is not None and (warning := delta_warning(delta, units)):
        warnings.warn(warning, stacklevel=2)
    segment = sampled_segment(
        sample_rate, noise_multiplier, steps, poisson_sampling=poisson_sampling
    )
    return schedule_epsilon((segment,), delta, accountant)


def schedule_epsilon(schedule: Sequence[Segment], delta: float, accountant: str = "pld") -> float:
    """Return epsilon of a schedule. If a segment has no noise, warn and return infinity."""
    if accountant not in ACCOUNTANTS:
        known = ", ".join(ACCOUNTANTS)
        raise ValueError(f"accountant must be one of {known}, got {accountant!r}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    if not schedule:
        raise ValueError("schedule must have at least one segment, got none")
    if not all(segment.noise_multiplier for segment in schedule):
        warnings.warn("epsilon is infinite without noise: nothing is guaranteed", stacklevel=3)
        return math.inf
    return ACCOUNTANTS[accountant](tuple(schedule), delta)


def epsilons(schedule: Sequence[Segment], delta: float) -> dict[str, float]:
    """Return epsilon by every accountant. All are upper bounds."""
    return {name: schedule_epsilon(schedule, delta, name) for name in ACCOUNTANTS}


def default_delta(units: int) -> float:
    """Return a delta that is far below 1 / units."""
    return float(min(1e-5, units**-1.1))


def delta_warning(delta: float, units: int) -> str | None:
    """Return why a delta is too large for a number of units. None if it is not."""
    if not delta >= 1 / units:
        return None
    return (
        f"delta {delta:g} is not below 1 / {units}: a mechanism that publishes one of the {units} "
        f"at random would count as (0, {1 / units:.2g})-private. Choose a much smaller delta, such "
        f"as {units**-1.1:.1g}"
    )


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """Return the noise multiplier at which one Gaussian step has this epsilon, exactly."""
    from dp_accounting import get_sigma_gaussian

    return float(get_sigma_gaussian(epsilon, delta))


def _rdp_epsilon(schedule: Schedule, delta: float) -> float:
    from opacus.accountants import RDPAccountant  # imported here because the import takes seconds

    # Fractional orders need series whose length grows with the noise.
    if max(segment.noise_multiplier for segment in schedule) > LARGEST_FOR_SERIES:
        return rough_epsilon(schedule, delta)
    return _opacus_epsilon(RDPAccountant(), schedule, delta)


def rough_epsilon(schedule: Schedule, delta: float) -> float:
    """Return an upper bound by RDP at integer orders, which need only short sums."""
    from opacus.accountants import RDPAccountant

    return _opacus_epsilon(RDPAccountant(), schedule, delta, alphas=INTEGER_ORDERS)


def _prv_epsilon(schedule: Schedule, delta: float) -> float:
    """Return an upper bound with an error of at most 0.01 or 0.1 %, or more for very many steps.

    Return infinity if it overflows, if rounding errors (which Opacus does not count) are not far
    below delta, or if `PRV_POINTS` are too few for the steps.
    """
    from opacus.accountants import PRVAccountant
    from opacus.accountants.analysis.prv import Domain

    rounding = numerical_error(schedule)
    if not delta >= 2 * rounding:
        return math.inf
    delta -= rounding
    tail = delta / 1000
    steps = sum(segment.steps for segment in schedule)
    # The range of losses (remark 5.6 of [2]), by our orders, which are fewer than those of Opacus.
    largest = 3 + max(
        rough_epsilon(schedule, tail / 4),
        *(rough_epsilon((replace(one, steps=1),), tail / 8 / steps) for one in schedule),
    )
    spread = math.sqrt(steps * math.log(12 / tail) / 2)
    finest = 2 * largest / PRV_POINTS * spread
    error = max(0.01, rough_epsilon(schedule, delta) / 1000, finest)
    if not error <= LARGEST_PRV_ERROR:
        return math.inf

    class Accountant(PRVAccountant):  # type: ignore[misc]
        """The same on a domain whose size suits the fast Fourier transform."""

        def _get_domain(self, **_: Any) -> Domain:  # noqa: ANN401 - Opacus's own
            width = error / spread
            half = fft.next_fast_len(math.ceil(largest / width))
            return Domain((1 - half) * width, half * width, 2 * half)

    try:
        return _opacus_epsilon(Accountant(), schedule, delta, eps_error=error, delta_error=tail)
    except RuntimeError:  # exp(epsilon) overflows, above 700
        return math.inf


def _opacus_epsilon(
    accountant: Any,  # noqa: ANN401 - untyped
    schedule: Schedule,
    delta: float,
    **options: Any,  # noqa: ANN401 - the accountant's own
) -> float:
    accountant.history = [(s.noise_multiplier, s.sample_rate, s.steps) for s in schedule]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # Ignore warnings about Renyi orders and log(0): the results stay upper bounds.
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta, **options))


ACCOUNTANTS: dict[str, Callable[[Schedule, float], float]] = {
    "pld": pld_epsilon,
    "prv": _prv_epsilon,
    "rdp": _rdp_epsilon,
}
"""Accountants by name: PLD (algorithm of dp-accounting), PRV and RDP (Opacus)."""


class Unreachable(ValueError):
    """No noise multiplier of `NOISE_RANGE` reaches a target.

    Attributes:
        closest: The smallest risk that can be reached.
    """

    def __init__(self, what: str, target: float, closest: float) -> None:
        super().__init__(
            f"{what} {target:g} cannot be reached: the closest value, with a noise multiplier of "
            f"{NOISE_RANGE[1]:g}, is {closest:.6g}"
        )
        self.closest = closest


def calibrate(target: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return the least noise multiplier, up to 0.02 %, whose PLD epsilon is at most the target.

    Raises:
        Unreachable: If no noise is enough. The message names the closest epsilon.
    """
    if not 0 < target < math.inf:
        raise ValueError(f"target must be in (0, inf), got {target}")
    return least_noise("epsilon", target, lambda sigma: epsilon(sample_rate, sigma, steps, delta))


def least_noise(
    what: str, target: float, risk: Callable[[float], float], tolerance: float = 2e-4
) -> float:
    """Return the least noise multiplier, up to a tolerance, whose risk is at most a target.

    Args:
        what: Name of the risk, for the error message.
        target: The largest acceptable risk.
        risk: Risk as a decreasing function of the noise multiplier.
        tolerance: Relative tolerance. The risk at the result is never above the target.

    Raises:
        Unreachable: If no noise is enough.
    """
    risk = cache(risk)
    least, most = NOISE_RANGE
    low = high = 1.0
    while risk(high) > target:
        if high >= most:
            raise Unreachable(what, target, risk(high))
        low, high = high, min(4 * high, most)
    while risk(low) <= target:
        if low <= least:
            return least
        low, high = max(low / 2, least), low

    def excess(log_sigma: float) -> float:
        # Risks are close to power laws, i.e. to straight lines on this scale.
        return math.log(min(max(risk(math.exp(log_sigma)), 1e-300), 1e300) / target)

    root = brentq(excess, math.log(low), math.log(high), xtol=tolerance / 2)
    while excess(root) > 0:
        root += tolerance / 2
    return math.exp(root)
