"""The privacy claim of a defense, the bounds on attacks that follow, and an audit of the noise.

The claim is the `guarantee` of the defense. If it is the claim of a Gaussian mechanism, epsilon at
a few deltas gives the noise multiplier, and the noise multiplier gives everything else.

The bound on an attack is gamma(kappa) of `bounds`, for the uploads that the attack sees. An attack
that finds the victim among N candidates distinguishes uploads in which one example is replaced.
Still, the curve of addition and removal bounds it. The reason: every candidate's upload is compared
with one fixed release, the one without the victim, and sigma is relative to the distance from
there. A set of guesses that ignores the upload contains the victim with probability at most kappa.
So under each candidate's upload it does with probability at most 1 - f(kappa), on average over
candidates. Two candidates may be twice as far from each other. This matters only if one of them is
the null hypothesis, as in `membership`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, nn

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import Defense, Guarantee, Plan
from leakfrontier.defenses.pld import shuffled_passes

from ..foundations.devices import current_device, on_device
from ..foundations.rows import GuaranteeRow
from ..world.scenario import World
from .accounting import Segment, default_delta, gaussian_sigma
from .audit import QUICK, audit
from .bounds import Bounds
from .canaries import Subject
from .finding import Audit
from .promise import claim_under, counted
from .residual_noise import RESIDUAL_BATCH
from .trained_noise import TrainedClient, trained_noise

DELTAS = (1e-8, 1e-5, 1e-3)
"""A claim is Gaussian if one noise multiplier explains it at all these deltas."""

ROUNDING = 1e-6
"""Relative rounding error by which a bound may fall below the blind guess."""

Bound = Callable[[float], float]
"""Maps the success of the best blind guess to the success that no attack exceeds."""


@dataclass(frozen=True)
class Claim:
    """The claim of a defense for one step that certainly contains the unit.

    Attributes:
        defense: The defense.
        unit: What is protected: `record` or `client`.
        noise_multiplier: sigma if the claim is that of a Gaussian mechanism, else None.
    """

    defense: Defense
    unit: str
    noise_multiplier: float | None

    def guarantee(self, plan: Plan) -> Guarantee:
        """Return the claim for a plan."""
        found = claim_under(self.defense, plan)
        if found is None:
            raise ValueError(f"{self.defense} claims privacy for one step and not for {plan}")
        return found

    def counted(self, plan: Plan) -> tuple[float, int]:
        """Return the sample rate and the steps that the claim counts."""
        return counted(self.defense, plan)


def claim_of(defense: Defense) -> Claim | None:
    """Return the claim of a defense. None without a claim or with an infinite epsilon."""
    found = [defense.guarantee(Plan(1, 1.0, delta)) for delta in DELTAS]
    claims = [claim for claim in found if claim is not None and claim.epsilon < math.inf]
    if not claims:
        return None
    sigmas = [gaussian_sigma(one.epsilon, one.delta) for one in claims]
    gaussian = len(claims) == len(DELTAS) and max(sigmas) <= 1.002 * min(sigmas)  # up to rounding
    return Claim(defense, claims[0].unit, min(sigmas) if gaussian else None)


def training_plan(world: World, unit: str, rounds: int) -> Plan:
    """Return how often the defense is applied to one unit of a client that is in some rounds.

    The server sees which clients take part, so random choice of clients gives no protection. Which
    records of a client are in a batch is secret.
    """
    protocol, sizes = world.protocol, world.share_sizes
    fewest, most = min(sizes), max(sizes)
    drawn = max(world.drawn_sizes)
    delta = default_delta(len(world.train.targets))
    if unit == "client":
        return Plan(rounds, 1.0, delta)
    size, steps = protocol.step_size(drawn), protocol.local_steps(most)
    if protocol.uploads_gradient:  # an epoch spans several rounds
        passes = shuffled_passes(fewest, size, rounds)
    else:
        passes = rounds * shuffled_passes(fewest, size, protocol.local_steps(fewest))
    return Plan(rounds * steps, min(1.0, size / fewest), delta, passes)


def _steps(world: World, unit: str, examples: int) -> int:
    """Return how often one upload gets noise: at every local step, or once."""
    return 1 if unit == "client" else world.protocol.local_steps(examples)


def proven_bound(claim: Claim, world: World, checkpoint: int) -> Bound:
    """Return the bound on attacks on one upload, after some rounds of training.

    The upload certainly contains the victim, so its steps count in full. The model of a later round
    may contain information about the victim too. So the earlier rounds count as if the client had
    been in all of them.
    """
    steps = _steps(world, claim.unit, world.scenario.batch_size)
    before = training_plan(world, claim.unit, checkpoint) if checkpoint else None
    sigma = claim.noise_multiplier
    if sigma is None:
        return _no_less_than_blind(_epsilon_bound(claim, steps + (before.steps if before else 0)))
    schedule = [Segment(1.0, sigma, steps)]
    if before:
        schedule.append(Segment(claim.counted(before)[0], sigma, claim.counted(before)[1]))
    return _no_less_than_blind(Bounds(tuple(schedule)).reconstruction)


def _no_less_than_blind(bound: Bound) -> Bound:
    """Return a bound that raises if it is below the blind guess, which is always possible."""

    def checked(prior: float) -> float:
        if not 0 < prior <= 1:
            raise ValueError(f"the success of a blind guess must be in (0, 1], got {prior:g}")
        found = bound(prior)
        if not found >= prior * (1 - ROUNDING):
            raise ValueError(f"a bound of {found:g} is below the blind guess, {prior:g}")
        return max(found, prior)

    return checked


def _epsilon_bound(claim: Claim, steps: int) -> Bound:
    """Return the bound from epsilon and delta: e^epsilon kappa + delta, at the best delta."""
    plans = [Plan(steps, 1.0, delta) for delta in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)]
    claims = [claim.guarantee(plan) for plan in plans]

    def bound(prior: float) -> float:
        known = [math.exp(min(one.epsilon, 700.0)) * prior + one.delta for one in claims]
        return min(1.0, *known)

    return bound


def guarantee_row(
    claim: Claim,
    world: World,
    model: nn.Module,
    rounds: int,
    rng: Generator,
    trained: Callable[[], Sequence[TrainedClient]] = tuple,
) -> GuaranteeRow:
    """Return the claim of a defense for a training run, and the findings of an audit.

    Args:
        claim: The claim for one step.
        world: The scenario.
        model: The model, after the defense's `on_model`.
        rounds: Rounds of the client that took part most often.
        rng: Source of the audit's randomness.
        trained: Returns clients as they were in training, which are audited as well.
    """
    plan = training_plan(world, claim.unit, rounds)
    found, (rate, steps) = claim.guarantee(plan), claim.counted(plan)
    row = GuaranteeRow(
        epsilon=found.epsilon,
        delta=found.delta,
        unit=found.unit,
        adjacency=found.adjacency,
        accountant=found.accountant,
        noise_multiplier=claim.noise_multiplier,
        sample_rate=rate,
        steps=steps,
    )
    return _audited(row, claim, plan, world, model, rng, trained)


def _audited(
    row: GuaranteeRow,
    claim: Claim,
    plan: Plan,
    world: World,
    model: nn.Module,
    rng: Generator,
    trained: Callable[[], Sequence[TrainedClient]],
) -> GuaranteeRow:
    """Return the row with the findings of the quick audits, for the whole run."""
    data = world.train.at(torch.arange(min(RESIDUAL_BATCH + 1, len(world.train.targets))))
    try:
        with on_device("cpu"):  # noise does not depend on the device
            data, model = data.to(current_device()), model.cpu()
            found = audit(claim.defense, model, world.modality.loss, data, plan, rng, QUICK)
            subject = Subject(claim.defense, model, world.modality.loss, data, plan, rng)
        clients = trained()
        later = [trained_noise(subject, one, len(clients)) for one in clients]
    except Exception as error:  # the audit cannot run this user's defense
        return row.with_audit(f"not audited: {type(error).__name__}: {error}")
    noise = found["residual noise"]
    if isinstance(noise, NotApplicable):
        return row.with_audit(f"not audited: {noise}")
    made = [*later, *(one for one in found.values() if isinstance(one, Audit))]
    worst = min(made, key=lambda one: (not one.violated, one is not noise))
    return row.with_audit(
        worst.verdict,
        violated=worst.violated,
        measured_noise=noise.measured_noise,
        audited_epsilon=noise.lower_bound if math.isnan(worst.lower_bound) else worst.lower_bound,
    )
