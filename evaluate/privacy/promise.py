"""The promise of a defense: its claim under a plan, and the noise that the claim needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import Chain, Defense, Guarantee, Plan

from .accounting import calibrate, epsilon
from .draws import draws_poisson
from .finding import SIGNIFICANCE, Audit, Symptom

TOLERANCE, SLACK = 0.005, 1e-3
"""Relative and absolute tolerance of a claimed epsilon, because accountants round."""

AMPLIFIED = 0.999
"""A claim depends on sampling or passes if they lower its epsilon below this share."""


class NoClaim(NotApplicable):
    """The defense claims no differential privacy, or an infinite epsilon."""


@dataclass(frozen=True)
class _Configured:
    """A cache key: defenses with the same configuration are equal."""

    kind: type[Defense]
    configuration: str
    defense: Defense = field(compare=False)


def claim_under(defense: Defense, plan: Plan) -> Guarantee | None:
    """Return the claim of a defense. Cached, because accountants are slow."""
    return _cached_claim(_Configured(type(defense), repr(defense), defense), plan)


@lru_cache(maxsize=128)
def _cached_claim(configured: _Configured, plan: Plan) -> Guarantee | None:
    return configured.defense.guarantee(plan)


def claiming(defense: Defense, delta: float) -> Defense:
    """Return the link of a chain that makes its claim. Later links are post-processing."""
    if not isinstance(defense, Chain):
        return defense
    once = Plan(1, 1.0, delta)
    claim = defense.guarantee(once)
    links = [link for link in defense.links if link.guarantee(once) == claim]
    return claiming(links[0], delta) if claim is not None and links else defense


def counted(defense: Defense, plan: Plan) -> tuple[float, int]:
    """Return the sample rate and the number of steps that a claim assumes.

    This is the plan's rate if it improves the claim. Otherwise the rate is 1, and the steps are
    the plan's passes if these improve the claim.
    """
    everybody = replace(plan, sample_rate=1.0)
    if plan.sample_rate < 1 and _gains(defense, plan, everybody):
        return plan.sample_rate, plan.steps
    if plan.passes is not None and _gains(defense, everybody, replace(everybody, passes=None)):
        return 1.0, plan.passes
    return 1.0, plan.steps


def _gains(defense: Defense, plan: Plan, other: Plan) -> bool:
    claims = [claim_under(defense, one) for one in (plan, other)]
    if claims[0] is None or claims[1] is None:
        return False
    return claims[0].epsilon < AMPLIFIED * claims[1].epsilon


@dataclass(frozen=True)
class Promise:
    """A finite claim for a plan, and the Gaussian noise that it needs.

    Claims are judged for the whole plan, at their own delta. A single step must only be as private
    as the whole plan requires.

    Attributes:
        claim: The claim.
        sample_rate: The rate that it assumes. 1 without amplification.
        steps: The steps that it assumes.
        noise_multiplier: The least sigma that keeps the claimed epsilon over these steps, up to
            the rounding of accountants.
    """

    claim: Guarantee
    sample_rate: float
    steps: int
    noise_multiplier: float

    @property
    def separation(self) -> float:
        """Return mu, the allowed distance between presence and absence of a unit, in sigmas."""
        return 1 / self.noise_multiplier

    def epsilon(self, noise_multiplier: float) -> float:
        """Return epsilon of the plan with this noise. Infinite without noise."""
        if noise_multiplier == math.inf:
            return 0.0
        if not noise_multiplier > 0:
            return math.inf
        return epsilon(self.sample_rate, noise_multiplier, self.steps, self.claim.delta)


def promised(defense: Defense, plan: Plan) -> Promise:
    """Return the promise of a defense for a plan.

    Raises:
        NoClaim: If the defense makes no finite claim.
    """
    claim, name = claim_under(defense, plan), type(defense).__name__
    if claim is None:
        raise NoClaim(f"{name} claims no differential privacy")
    if not claim.epsilon < math.inf:
        raise NoClaim(f"{name} claims an infinite epsilon, which no finding can refute")
    rate, steps = counted(defense, plan)
    if rate == 1 and steps == plan.steps and claim.unit == "record" and plan.sample_rate < 1:
        # Unclaimed Poisson sampling may be the reason why a claim holds.
        rate = plan.sample_rate if draws_poisson(defense, plan.sample_rate) else 1.0
    return Promise(claim, rate, steps, _needed_noise(claim.epsilon, rate, steps, claim.delta))


@lru_cache(maxsize=128)
def _needed_noise(claimed: float, rate: float, steps: int, delta: float) -> float:
    return calibrate((1 + TOLERANCE) * claimed + SLACK, rate, steps, delta)


def judged(
    method: str,
    promise: Promise,
    symptoms: Sequence[Symptom],
    runs: int,
    *,
    fine: str,
    ideal: float = math.nan,
) -> Audit:
    """Return the finding of an audit of several tests, corrected for their number (Bonferroni).

    Args:
        method: The audit's name.
        promise: The audited promise.
        symptoms: Results of its tests, the most informative first.
        runs: Number of announced repetitions.
        fine: The words if nothing is wrong.
        ideal: The limit of the noise for a perfect implementation.
    """
    level, tests = SIGNIFICANCE / runs, len(symptoms)
    p_value = min(1.0, tests * min(one.p_value for one in symptoms))
    guilty = [one for one in symptoms if tests * one.p_value < level]
    worst = guilty[0] if guilty else None
    # If nothing is wrong, report the noise from the test of size, if there is one.
    telling = guilty or [one for one in symptoms if not math.isnan(one.measured)] or symptoms
    limits = [one.noise for one in telling if not math.isnan(one.noise)]
    sigma = promise.noise_multiplier
    measured = next((one.measured for one in symptoms if not math.isnan(one.measured)), math.nan)
    return Audit(
        method=method,
        claimed=promise.claim.epsilon,
        lower_bound=promise.epsilon(sigma * min(limits)) if limits else math.nan,
        ceiling=math.nan if math.isnan(ideal) else promise.epsilon(sigma * ideal),
        p_value=p_value,
        violated=worst is not None,
        words=worst.words if worst else fine,
        measured_noise=sigma * measured,
    )
