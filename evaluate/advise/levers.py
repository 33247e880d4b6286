"""Other changes to a training run, and the effect of each.

For a given target, sampling and rounds determine the noise. Training depends on the noise in a
round's mean update and on the noise in the mean of all rounds [1, section 5]. Larger batches and
more data lower both. More rounds raise the first and hardly change the second, so the best number
of rounds has to be measured.

References:
    [1] Ponomareva, Hazimeh, Kurakin, Xu, Denison, McMahan, Vassilvitskii, Chien, Thakurta. "How
        to DP-fy ML: A Practical Guide to Machine Learning with Differential Privacy." JAIR 2023.
        https://arxiv.org/abs/2303.00654
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..foundations.statistics import Interval, rounded_up
from .question import DIGITS, AdviceRow, Question, noise_near

MOST_LEVERS = 5
"""Largest number of changes."""


@dataclass(frozen=True)
class Lever:
    """One change of a training run.

    Attributes:
        name: The change, in words.
        question: The run after the change.
        noise_multiplier: The smallest noise that keeps the target after the change.
        epsilon: Epsilon (PLD) after the change, with the presently recommended noise.
        round_noise: Noise in a round's mean update at the target, relative to now.
        run_noise: The same for the mean over all rounds.
        accuracy: Measured accuracy at the target. None if it could not be measured.
    """

    name: str
    question: Question
    noise_multiplier: float
    epsilon: float
    round_noise: float
    run_noise: float
    accuracy: Interval | None = None

    def document(self) -> dict[str, Any]:
        """Return the lever as JSON values."""
        sizes = ("examples", "batch_size", "rounds", "clients", "steps")
        return {
            **{name: value for name, value in vars(self).items() if name != "question"},
            **{name: getattr(self.question, name) for name in sizes},
            "epsilon": self.epsilon if self.epsilon < math.inf else None,
            "accuracy": None if self.accuracy is None else vars(self.accuracy),
        }


def changes(question: Question) -> Iterator[tuple[str, Question]]:
    """Yield changes of a run at the same delta: sizes doubled or halved."""
    fixed = replace(question, delta=question.used_delta)
    larger = min(2 * question.batch_size, question.share)
    if larger > question.batch_size:
        yield f"batch {question.batch_size} -> {larger}", replace(fixed, batch_size=larger)
    for rounds in (question.rounds // 2, 2 * question.rounds):
        if 0 < rounds <= question.possible_rounds:
            yield f"rounds {question.rounds} -> {rounds}", replace(fixed, rounds=rounds)
    examples, clients = 2 * question.examples, 2 * question.clients
    more = replace(fixed, examples=examples, clients=clients)
    yield f"clients {question.clients} -> {clients}, each with as much data", more
    if question.unit == "record":
        yield f"examples {question.examples} -> {examples}", replace(fixed, examples=examples)


def pull(name: str, question: Question, now: Question, row: AdviceRow) -> Lever:
    """Return the effect of a change, by accountants and bounds.

    Args:
        name: The change.
        question: The run after the change. Its target needs no data.
        now: The run before the change.
        row: The present recommendation.
    """
    sigma = row.noise_multiplier
    found = sigma
    if question.schedule(sigma) != now.schedule(sigma):
        risk = question.epsilon_of if question.epsilon is not None else question.bound
        guess = _guess(question, now, sigma)
        found = rounded_up(noise_near(guess, question.value, risk), DIGITS)
    ratio = question.update_noise(found) / now.update_noise(sigma)
    return Lever(
        name,
        question,
        found,
        epsilon=question.epsilon_of(sigma),
        round_noise=ratio,
        run_noise=ratio * math.sqrt(now.rounds / question.rounds),
    )


def _guess(question: Question, now: Question, sigma: float) -> float:
    """Return the noise at which both runs are equally private in the limit of many steps.

    In this limit, q sqrt(T (exp(1 / sigma^2) - 1)) determines the privacy (Dong et al., Gaussian
    differential privacy).
    """
    (old,), (new,) = now.schedule(sigma), question.schedule(sigma)
    scale = old.sample_rate**2 * old.steps / (new.sample_rate**2 * new.steps)
    halved = old.noise_multiplier / sigma  # for shuffled batches
    exponent = min((halved * sigma) ** -2, 700.0)
    noise: float = math.log1p(scale * math.expm1(exponent)) ** -0.5
    return noise / (new.noise_multiplier / sigma)
