"""Test whether canaries can be detected at single steps better than the claim allows.

References:
    Nasr, Hayes, Steinke, Balle, Tramer, Jagielski, Carlini, Terzis. "Tight Auditing of
    Differentially Private Machine Learning." USENIX Security 2023.
    https://arxiv.org/abs/2302.07956
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from leakfrontier.defenses import Batch

from ..foundations.statistics import Flags, Floats, clopper_pearson
from .canaries import Subject
from .finding import CANARY_SIGNIFICANCE, Audit, compared
from .one_run import CANARIES

RECORDS = 8
"""Real examples in the batch of canaries at one step."""

STEPS, UPLOADS = (10, 100), 800
"""Smallest and largest number of steps (unit record); number of uploads (unit client)."""


class _Errors(NamedTuple):
    """How often the test missed canaries that were in, and called others in."""

    misses: int
    present: int
    alarms: int
    absent: int

    def separation(self, confidence: float) -> float:
        """Return a lower confidence limit of mu, from upper limits of both error rates."""
        missed = clopper_pearson(self.misses, self.present, confidence).high
        alarmed = clopper_pearson(self.alarms, self.absent, confidence).high
        return max(0.0, -float(ndtri(alarmed)) - float(ndtri(missed)))

    def p_value(self, mu: float) -> float:
        """Return the smallest significance level at which the separation exceeds mu."""

        def excess(log_level: float) -> float:
            return self.separation(-math.expm1(log_level)) - mu

        least, most = math.log(1e-12), math.log(1 - 1e-9)
        if excess(most) <= 0:
            return 1.0
        return math.exp(least if excess(least) > 0 else brentq(excess, least, most))


def step_canaries(subject: Subject, runs: int = 1) -> Audit:
    """Test clipping and noise at single steps, with canaries that are in or out.

    The unit of measurement is the largest contribution of one record. Then a canary's entry of the
    upload is N(1, sigma^2) if the canary is in, and N(0, sigma^2) if not. The test calls entries
    above 1/2 in. Exact limits of its two error rates give a lower bound on the separation
    mu = 1 / sigma, and PLD composes it over the plan. The canaries of one step count as independent
    trials. They are independent if the noise is.

    If the unit is a record, half of all canaries are in at each step. If it is a client, one canary
    is the whole update of the client.
    """
    subject = subject.beside(CANARIES)
    errors = _record_errors(subject) if subject.per_record else _client_errors(subject)
    promise, confidence = subject.promise, 1 - CANARY_SIGNIFICANCE / runs
    mu = errors.separation(confidence)
    miss = float(ndtr(-subject.reach * promise.separation / 2))  # of a perfect implementation
    ideal = errors._replace(misses=round(miss * errors.present), alarms=round(miss * errors.absent))
    bound, ceiling = (promise.epsilon(_inverse(one)) for one in (mu, ideal.separation(confidence)))
    violated = mu > promise.separation
    return Audit(
        method="step canaries",
        claimed=promise.claim.epsilon,
        lower_bound=bound,
        ceiling=ceiling,
        p_value=errors.p_value(promise.separation),
        violated=violated,
        words=compared(bound, promise.claim.epsilon, ceiling, violated=violated),
    )


def _record_errors(subject: Subject) -> _Errors:
    rows = torch.arange(min(RECORDS, len(subject.data.inputs)))
    size = len(rows) + CANARIES // 2
    client = subject.client(size)
    # Enough steps to detect, with high power, that a fifth of the noise is missing.
    steps = math.ceil(2600 * subject.promise.noise_multiplier**2 / (CANARIES // 2))
    present, values = [], []
    for _ in range(min(max(steps, STEPS[0]), STEPS[1])):
        chosen = torch.randperm(CANARIES, generator=subject.rng)[: CANARIES // 2]
        batch = Batch.joined([subject.records(rows), subject.canaries(chosen)])
        upload = subject.upload(client, batch, subject.probe.loss)
        values.append(subject.canary_values(upload, size))
        present.append(np.isin(np.arange(CANARIES), chosen.cpu().numpy()))
    return _errors(np.stack(values), np.stack(present))


def _client_errors(subject: Subject) -> _Errors:
    client = subject.client(1)
    chosen = torch.randint(CANARIES, (UPLOADS,), generator=subject.rng)
    values = [
        subject.canary_values(subject.upload(client, subject.canaries(one), subject.probe.loss), 1)
        for one in chosen.split(1)
    ]
    return _errors(np.stack(values), np.arange(CANARIES) == chosen.cpu().numpy()[:, None])


def _errors(values: Floats, present: Flags) -> _Errors:
    called = values > 0.5
    return _Errors(
        int((present & ~called).sum()),
        int(present.sum()),
        int((called & ~present).sum()),
        int((~present).sum()),
    )


def _inverse(separation: float) -> float:
    return 1 / separation if separation else math.inf
