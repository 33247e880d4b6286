"""What a defense claims of a run, what the claim proves of attacks, and whether the noise is there.

The claim is the defense's own `guarantee`. Where it is that of a Gaussian mechanism, its noise
multiplier follows from epsilon at a few deltas, and all else from the noise multiplier.

The bound on an attack is gamma(kappa) of `bounds`, for what the attack sees. To tell which of N
candidates is behind an upload is to tell apart uploads of which one example is replaced, and yet
it is the curve of addition and removal that bounds it: every candidate's upload is compared with
one fixed release, that without the victim, and sigma is relative to the distance from there. A
set of guesses that ignores the upload holds the victim with probability kappa at most, hence
under each candidate's upload with probability 1 - f(kappa) at most, on average over candidates.
Two candidates may be twice as far from each other: that matters where one of them is the null
hypothesis, as in `membership`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, nn

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import Defense, Guarantee, Plan

from ..rows import GuaranteeRow
from ..scenario import World
from .accounting import Segment, default_delta, gaussian_sigma, schedule_epsilon
from .audit import RESIDUAL_BATCH, residual_noise
from .bounds import Bounds
from .canaries import claim_under

DELTAS = (1e-8, 1e-5, 1e-3)
"""Where a claim must agree with one and the same noise multiplier to be a Gaussian mechanism's."""

Bound = Callable[[float], float]
"""From the success of the best blind guess to the success that no attack exceeds."""


@dataclass(frozen=True)
class Claim:
    """What a defense claims of one step that the unit is surely in.

    Attributes:
        defense: The defense.
        unit: What is protected: `record` or `client`.
        noise_multiplier: sigma of the Gaussian mechanism with this claim; None for another.
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

    def sample_rate(self, plan: Plan) -> float:
        """Return what a claim counts on: the plan's, or 1 if the defense does not sample so."""
        if self.noise_multiplier is None or plan.sample_rate == 1:
            return 1.0
        everybody = (Segment(1.0, self.noise_multiplier, plan.steps),)
        amplified = self.guarantee(plan).epsilon < 0.999 * schedule_epsilon(everybody, plan.delta)
        return plan.sample_rate if amplified else 1.0


def claim_of(defense: Defense) -> Claim | None:
    """Return what a defense claims; None if nothing, or an infinite epsilon."""
    found = [defense.guarantee(Plan(1, 1.0, delta)) for delta in DELTAS]
    claims = [claim for claim in found if claim is not None and claim.epsilon < math.inf]
    if len(claims) < len(DELTAS):
        return None
    sigmas = [gaussian_sigma(one.epsilon, at) for one, at in zip(claims, DELTAS, strict=True)]
    gaussian = max(sigmas) <= 1.002 * min(sigmas)  # accountants round upwards
    return Claim(defense, claims[0].unit, min(sigmas) if gaussian else None)


def training_plan(world: World, unit: str, rounds: int) -> Plan:
    """Return how often the defense is applied to one unit, for a client that is in some rounds.

    The server sees which clients take part, so that choosing them at random gains nothing; which
    of a client's records are in a batch is secret.
    """
    training, protocol = world.scenario.training, world.protocol
    examples = len(world.train.targets)
    fewest, most = examples // training.clients, -(-examples // training.clients)
    drawn = training.batch_size if protocol.uploads_gradient else most
    rate = 1.0 if unit == "client" else min(1.0, protocol.step_size(drawn) / fewest)
    return Plan(rounds * _steps(world, unit, most), rate, default_delta(len(world.train.targets)))


def _steps(world: World, unit: str, examples: int) -> int:
    """Return how often noise is added for one upload: at every local step, or to the whole."""
    return 1 if unit == "client" else world.protocol.local_steps(examples)


def proven_bound(claim: Claim, world: World, checkpoint: int) -> Bound:
    """Return the bound on attacks on one upload, after some rounds of training.

    The victim is behind the upload for sure: its steps count in full. The model of a later round
    may know the victim as well; its rounds are counted as if the client had been in all of them.
    """
    steps = _steps(world, claim.unit, world.scenario.batch_size)
    before = training_plan(world, claim.unit, checkpoint) if checkpoint else None
    sigma = claim.noise_multiplier
    if sigma is None:
        return _epsilon_bound(claim, steps + (before.steps if before else 0))
    schedule = [Segment(1.0, sigma, steps)]
    if before:
        schedule.append(Segment(claim.sample_rate(before), sigma, before.steps))
    return Bounds(tuple(schedule)).reconstruction


def _epsilon_bound(claim: Claim, steps: int) -> Bound:
    """Return what epsilon and delta alone prove: e^epsilon kappa + delta, at the best delta."""
    plans = [Plan(steps, 1.0, delta) for delta in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)]
    claims = [claim.guarantee(plan) for plan in plans]

    def bound(prior: float) -> float:
        known = [math.exp(min(one.epsilon, 700.0)) * prior + one.delta for one in claims]
        return min(1.0, *known)

    return bound


def guarantee_row(
    claim: Claim, world: World, model: nn.Module, rounds: int, rng: Generator
) -> GuaranteeRow:
    """Return what a defense claims of a training run, beside what an audit of its noise finds.

    Args:
        claim: What the defense claims of one step.
        world: The scenario.
        model: The model, after the defense's `on_model`.
        rounds: Rounds that the busiest client took part in.
        rng: Source of the audit's randomness.
    """
    plan = training_plan(world, claim.unit, rounds)
    found, rate = claim.guarantee(plan), claim.sample_rate(plan)
    row = GuaranteeRow(
        epsilon=found.epsilon,
        delta=found.delta,
        unit=found.unit,
        adjacency=found.adjacency,
        accountant=found.accountant,
        noise_multiplier=claim.noise_multiplier,
        sample_rate=rate,
        steps=plan.steps,
    )
    return _audited(row, claim, plan, world, model, rng)


def _audited(
    row: GuaranteeRow, claim: Claim, plan: Plan, world: World, model: nn.Module, rng: Generator
) -> GuaranteeRow:
    """Return the row with the findings of the residual-noise audit, for the whole run."""
    examples = torch.arange(min(RESIDUAL_BATCH, len(world.train.targets)))
    data = world.train.at(examples)
    try:
        audit = residual_noise(claim.defense, model, world.modality.loss, data, plan, rng)
    except NotApplicable as reason:
        return row.with_audit(f"not audited: {reason}")
    except Exception as error:  # a user's defense that an audit cannot be made of
        return row.with_audit(f"not audited: {type(error).__name__}: {error}")
    return row.with_audit(
        audit.verdict,
        violated=audit.violated,
        measured_noise=audit.measured_noise,
        audited_epsilon=audit.lower_bound,
    )
