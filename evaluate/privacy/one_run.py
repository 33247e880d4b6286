"""A privacy audit in one training run: canaries, guesses, p-values and lower bounds.

References:
    [1] Steinke, Nasr, Jagielski. "Privacy Auditing with One (1) Training Run." NeurIPS 2023.
        https://arxiv.org/abs/2305.08846
    [2] Mahloujifar, Melis, Chaudhuri. "Auditing f-Differential Privacy in One Run." ICML 2025.
        https://arxiv.org/abs/2410.22235
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import bdtrc

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import Batch, Update, trainable
from leakfrontier.defenses.pld import shuffled_passes

from ..foundations.statistics import Flags, Floats
from .canaries import Subject
from .finding import Audit, compared

CONFIDENCE = 0.95
"""Confidence level of the lower bounds from canaries."""

CANARIES = 1_000
"""Number of canaries of an audit. Half of them are in."""


def log_likelihood_ratio(values: Floats, sample_rate: float, noise_multiplier: float) -> Floats:
    """Return log p(value | in) / p(value | out), for a unit that adds 1 if sampled."""
    absent = math.log1p(-sample_rate) if sample_rate < 1 else -math.inf
    sampled = math.log(sample_rate) + (2 * values - 1) / (2 * noise_multiplier**2)
    ratio: Floats = np.logaddexp(absent, sampled)
    return ratio


def correct_guesses(scores: Floats, present: Flags, guesses: int) -> NDArray[np.int64]:
    """Return how many guesses are right.

    Half of the guesses say "in", for the highest scores. The other half say "out", for the lowest.

    Args:
        scores: Runs x canaries.
        present: Which canaries were in the data; runs x canaries.
        guesses: Number of guesses. Canaries with scores between get no guess.
    """
    ranked = np.take_along_axis(present, scores.argsort(axis=1), axis=1)
    half = guesses // 2
    right: NDArray[np.int64] = (~ranked[:, :half]).sum(axis=1) + ranked[:, -half:].sum(axis=1)
    return right


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return the probability of so many correct guesses, or more ([1], 5.2)."""
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
    """Return the largest epsilon that the correct guesses refute. 0 if they refute none."""

    def excess(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) - (1 - confidence)

    return _largest(excess)


def _largest(excess: Callable[[float], float], most: float = 100.0) -> float:
    """Return where an increasing function of epsilon crosses zero. 0 if it starts above."""
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
    """Return the mean lower bound of simulated runs of the exact mechanism."""
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


def one_run(subject: Subject, runs: int = 1, canaries: int = CANARIES, lr: float = 0.1) -> Audit:
    """Train once with each canary in the data with probability 1/2, and guess which were in [1].

    The audit sees all uploads. A canary's score is the log-likelihood ratio of its entries: sampled
    at the plan's rate against never sampled. The tenth with the highest scores is guessed in, the
    tenth with the lowest scores out. These shares are fixed in advance.

    Args:
        subject: The audited defense. The batch size matches its sample rate as closely as possible.
        runs: See `audit`.
        canaries: Number of canaries.
        lr: Learning rate of the run.
    """
    subject = subject.beside(canaries)
    if not subject.per_record:
        raise NotApplicable(
            "one run needs many canaries, so the unit must be a record: use step canaries"
        )
    present = torch.rand(canaries, generator=subject.rng) < 0.5
    examples, plan = len(subject.data.inputs) + int(present.sum()), subject.plan
    batch_size = max(1, round(plan.sample_rate * examples))
    passes = shuffled_passes(examples, batch_size, plan.steps)
    plan = replace(plan, sample_rate=batch_size / examples, passes=passes)
    subject = subject.under(plan)
    records = subject.records(torch.arange(len(subject.data.inputs)))
    training = Batch.joined([records, subject.canaries(present.nonzero().flatten())])
    claim, sigma = subject.promise.claim, subject.promise.noise_multiplier / subject.reach
    scores = np.zeros(canaries)
    for update in _train(subject, training, batch_size, plan.steps, lr):
        values = subject.canary_values(update, batch_size)
        scores += log_likelihood_ratio(values, plan.sample_rate, sigma)
    guesses, confidence = 2 * (canaries // 10), 1 - (1 - CONFIDENCE) / runs
    correct = correct_guesses(scores[None], present.cpu().numpy()[None], guesses)[0]
    bound = one_run_lower_bound(canaries, guesses, int(correct), claim.delta, confidence)
    ceiling = one_run_ceiling(
        plan.sample_rate, sigma, plan.steps, claim.delta, canaries, guesses, confidence
    )
    violated = bound > claim.epsilon
    return Audit(
        method="one run",
        claimed=claim.epsilon,
        lower_bound=bound,
        ceiling=ceiling,
        p_value=one_run_p_value(canaries, guesses, int(correct), claim.epsilon, claim.delta),
        violated=violated,
        words=compared(bound, claim.epsilon, ceiling, violated=violated),
    )


def _train(
    subject: Subject, training: Batch, batch_size: int, steps: int, lr: float
) -> Iterator[Update]:
    """Yield the uploads of a training run, with batches drawn by the defense."""
    client = replace(subject.defense)
    drawn = client.batches(len(training.targets), batch_size, steps, subject.rng)
    for rows in islice(drawn, steps):
        batch = Batch(training.inputs[rows], training.targets[rows])
        update = subject.upload(client, batch, subject.probe.loss)
        with torch.no_grad():
            for name, parameter in trainable(subject.probe.model).items():
                parameter.sub_(lr * update[f"model.{name}"])
        yield update
