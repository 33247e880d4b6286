"""Who sees what, depending on where the noise is added.

Clients who add noise together, each a part, and hide their uploads in a secure sum, reach the
accuracy of central noise without trusting the server with uploads [1]. The noise of those who are
lost in a round is missing, and the noise of those who tell it to the server is known: the parts
must be so large that the others' suffice.

Nor does a proof for real numbers hold for what a secure sum adds up: integers. The sum of noised
uploads that were rounded one by one is no function of the noised sum. Noise that is itself of
integers has proofs of its own [1, 2], with an epsilon that is close if levels are fine.

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
        noise_multiplier: The noise on that which it does not know, at the least.
        epsilon: What is left of the guarantee against the server.
        bound: Largest success of the server's attack on the run and one known upload.
    """

    name: str
    sees: str
    noise_multiplier: float
    epsilon: float
    bound: float


def observation_points(question: Question, row: AdviceRow) -> Iterator[ObservationPoint]:
    """Yield who sees what if a row's noise is added on the client, or later."""
    sigma = row.noise_multiplier
    yield ObservationPoint(
        "local",
        "an upload that the client itself has noised; this is what the table is about",
        sigma,
        row.epsilon["pld"],
        row.bound,
    )
    if question.taking_part > 1 and sigma:
        yield from _distributed(question, row)
    yield ObservationPoint(
        "central",
        "uploads in the clear, since the server itself adds the noise: the guarantee is against "
        "those who see the model alone, none against the server",
        0.0,
        math.inf,
        1.0,
    )


def _distributed(question: Question, row: AdviceRow) -> Iterator[ObservationPoint]:
    sigma, clients, makers = row.noise_multiplier, question.taking_part, question.noise_makers
    gone = f"{question.dropout:.0%} of them are lost and {question.colluders:.0%} tell their noise"
    if makers:
        part = sigma / math.sqrt(makers)
        yield ObservationPoint(
            "distributed",
            f"only the sum of {clients} uploads, each with {part:.4g} of noise, 1/sqrt({makers}) "
            f"of the local, which suffices even if {gone}: as private as local, and the mean has "
            f"1/{math.sqrt(makers):.3g} of its noise. Integers, as a secure "
            "sum takes, need noise with a proof of its own (discrete Gaussian, Skellam)",
            sigma,
            row.epsilon["pld"],
            row.bound,
        )
    left = sigma * math.sqrt(makers / clients)
    yield _seen(
        "distributed, planned for no loss",
        f"the same, if each adds 1/sqrt({clients}) and {gone}",
        left,
        question,
    )
    yield _seen(
        "distributed, sum bypassed",
        "a single upload, because secure aggregation is broken or other clients are the server's",
        sigma / math.sqrt(makers or clients),
        question,
    )


def _seen(name: str, sees: str, sigma: float, question: Question) -> ObservationPoint:
    if not sigma:
        return ObservationPoint(name, sees, 0.0, math.inf, 1.0)
    return ObservationPoint(name, sees, sigma, question.epsilon_of(sigma), question.bound(sigma))
