"""What a defense promises: whose claim it is, under which plan, and how its steps count."""

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
"""What the epsilon of the noise may exceed a claim by, relative and absolute: accountants round."""

AMPLIFIED = 0.999
"""A claim counts on something if it is below this share of the claim without it."""


class NoClaim(NotApplicable):
    """A defense claims no differential privacy, or an infinite epsilon."""


@dataclass(frozen=True)
class _Configured:
    """A defense that equals another with the same configuration, as a key."""

    kind: type[Defense]
    configuration: str
    defense: Defense = field(compare=False)


def claim_under(defense: Defense, plan: Plan) -> Guarantee | None:
    """Return what a defense claims; its accountant is slow, and audits ask again and again."""
    return _cached_claim(_Configured(type(defense), repr(defense), defense), plan)


@lru_cache(maxsize=128)
def _cached_claim(configured: _Configured, plan: Plan) -> Guarantee | None:
    return configured.defense.guarantee(plan)


def claiming(defense: Defense, delta: float) -> Defense:
    """Return the link of a chain whose claim the chain makes; what follows is post-processing."""
    if not isinstance(defense, Chain):
        return defense
    once = Plan(1, 1.0, delta)
    claim = defense.guarantee(once)
    links = [link for link in defense.links if link.guarantee(once) == claim]
    return claiming(links[0], delta) if claim is not None and links else defense


def counted(defense: Defense, plan: Plan) -> tuple[float, int]:
    """Return the sample rate and the number of steps that a claim counts on.

    The plan's rate if the claim is the better for it; else 1, and the plan's passes if these make
    it better.
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
    """A finite claim over a plan, and the Gaussian noise that it takes to keep it.

    Claims are judged over the plan that they are made for, at their own delta: nothing is asked
    of single steps but what the whole needs.

    Attributes:
        claim: The claim.
        sample_rate: The rate that it counts on; 1 without amplification.
        steps: The steps that it counts on.
        noise_multiplier: The least sigma whose epsilon, over these steps, is that of the claim,
            but for what accountants round.
    """

    claim: Guarantee
    sample_rate: float
    steps: int
    noise_multiplier: float

    @property
    def separation(self) -> float:
        """Return mu: how far apart one step may put a unit's presence and absence, in sigmas."""
        return 1 / self.noise_multiplier

    def epsilon(self, noise_multiplier: float) -> float:
        """Return what epsilon of the plan would be with this noise; infinite without."""
        if noise_multiplier == math.inf:
            return 0.0
        if not noise_multiplier > 0:
            return math.inf
        return epsilon(self.sample_rate, noise_multiplier, self.steps, self.claim.delta)


def promised(defense: Defense, plan: Plan) -> Promise:
    """Return what a defense promises of a plan.

    Raises:
        NoClaim: If it promises nothing.
    """
    claim, name = claim_under(defense, plan), type(defense).__name__
    if claim is None:
        raise NoClaim(f"{name} claims no differential privacy")
    if not claim.epsilon < math.inf:
        raise NoClaim(f"{name} claims an infinite epsilon, which nothing can violate")
    rate, steps = counted(defense, plan)
    if rate == 1 and steps == plan.steps and claim.unit == "record" and plan.sample_rate < 1:
        # A claim may hold thanks to what it does not mention.
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
        promise: What is claimed.
        symptoms: What its tests found, the most telling first.
        runs: Repetitions that were announced.
        fine: What is said if there is nothing wrong.
        ideal: The limit of noise that a perfect implementation would show.
    """
    level, tests = SIGNIFICANCE / runs, len(symptoms)
    p_value = min(1.0, tests * min(one.p_value for one in symptoms))
    guilty = [one for one in symptoms if tests * one.p_value < level]
    worst = guilty[0] if guilty else None
    # Where nothing is wrong, how much noise there is says the test of its size, if there is one.
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
