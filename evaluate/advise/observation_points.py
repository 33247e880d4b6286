"""What the server sees, depending on where the noise is added.

With distributed noise, each client adds a part of the noise, and a secure sum hides the single
uploads. This reaches the accuracy of central noise without trusting the server [1]. The noise of
clients that drop out is missing. The noise of clients that collude is known to the server. So the
parts must be large enough that the noise of the remaining clients suffices.

A secure sum adds integers, and proofs for real numbers do not cover integers: the sum of noised
and rounded uploads is not a function of the noised sum. Integer noise has separate proofs [1, 2].
Its epsilon is close if the levels are fine.

References:
    [1] Kairouz, Liu, Steinke. "The Distributed Discrete Gaussian Mechanism for Federated Learning
        with Secure Aggregation." ICML 2021. https://arxiv.org/abs/2102.06387
    [2] Agarwal, Kairouz, Liu. "The Skellam Mechanism for Differentially Private Federated
        Learning." NeurIPS 2021. https://arxiv.org/abs/2110.04995
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .question import AdviceRow, Question


@dataclass(frozen=True)
class ObservationPoint:
    """Where noise is added, and what the server then sees.

    Attributes:
        name: `local`, `distributed` (planned for losses and colluders, planned for none, or with
            the secure sum bypassed) or `central`.
        sees: What the server sees of one client.
        noise_multiplier: The least noise in it that the server does not know.
        epsilon: The guarantee that holds against the server.
        bound: Largest success of the server's attack on the run and one known upload.
    """

    name: str
    sees: str
    noise_multiplier: float
    epsilon: float
    bound: float


def observation_points(question: Question, row: AdviceRow) -> Iterator[ObservationPoint]:
    """Yield what the server sees if a row's noise is added on the client, or later."""
    sigma = row.noise_multiplier
    yield ObservationPoint(
        "local",
        "an upload to which the client has added noise; the table describes this case",
        sigma,
        row.epsilon["pld"],
        row.bound,
    )
    if question.taking_part > 1 and sigma:
        yield from _distributed(question, row)
    yield ObservationPoint(
        "central",
        "uploads without noise, because the server adds the noise. The guarantee protects against "
        "people who see only the model, and not against the server",
        0.0,
        math.inf,
        1.0,
    )


def _distributed(question: Question, row: AdviceRow) -> Iterator[ObservationPoint]:
    sigma, clients, makers = row.noise_multiplier, question.taking_part, question.noise_makers
    gone = f"{question.dropout:.0%} of them drop out and {question.colluders:.0%} tell their noise"
    if makers:
        part = sigma / math.sqrt(makers)
        yield ObservationPoint(
            "distributed",
            f"only the sum of {clients} uploads. Each has noise {part:.4g}, which is "
            f"1/sqrt({makers}) of the local noise. It suffices even if {gone}. This is as private "
            f"as local noise, and the mean has 1/{math.sqrt(makers):.3g} of the noise. A secure "
            "sum adds integers, so the noise needs a proof for integers (discrete Gaussian, "
            "Skellam)",
            sigma,
            row.epsilon["pld"],
            row.bound,
        )
    left = sigma * math.sqrt(makers / clients)
    yield _seen(
        "distributed, planned for no loss",
        f"the same sum, if each client adds only 1/sqrt({clients}) of the noise and {gone}",
        left,
        question,
    )
    yield _seen(
        "distributed, sum bypassed",
        "a single upload, because secure aggregation is broken or the server owns other clients",
        sigma / math.sqrt(makers or clients),
        question,
    )


def _seen(name: str, sees: str, sigma: float, question: Question) -> ObservationPoint:
    if not sigma:
        return ObservationPoint(name, sees, 0.0, math.inf, 1.0)
    return ObservationPoint(name, sees, sigma, question.epsilon_of(sigma), question.bound(sigma))
