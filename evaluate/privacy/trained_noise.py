"""Test the noise of a client as it was in training: with its memory, model and examples.

A defense may add the claimed noise for new clients only, or for models that it recognises as those
of an audit. So the client is put back to the time before a round. It then repeats the round with
other random draws, for its own examples and for neighbours of these. Nothing that it sees differs
from training.

The distance between the means of neighbours is a lower limit of the sensitivity. The claim needs
noise of at least this size. Uploads under the same draws give the distance, because added noise
cancels.

Noise may be correlated over rounds, as in DP-FTRL. The last test bounds what all linear
combinations of several uploads reveal together. With covariance S over rounds, a unit that
contributes v_t in round t is v' S^-1 v from its absence, in squared standard deviations. This must
be at most what the claim allows for as many steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from scipy import stats
from scipy.linalg import helmert
from torch import Generator

from leakfrontier.defenses import Batch, Plan, Update

from ..foundations.seeds import copied, fork
from ..foundations.statistics import Floats
from .canaries import CAUTION, Subject, flat
from .contributions import EXTREME
from .finding import SIGNIFICANCE, Audit, Symptom
from .noise_tests import MeasuredNoise, innovations, shape, shared_entries, size
from .promise import judged, promised

REPEATS = 8
"""Uploads of the same round."""

ROUNDS, PAIRS = 4, 2
"""Rounds of the test of correlated noise, and pairs of repetitions."""

Play = Callable[[Batch, Sequence[Generator]], list[Update]]
"""Returns the uploads of a client in consecutive rounds, for some examples and random draws."""


@dataclass(frozen=True)
class TrainedClient:
    """A client as it was before a round.

    Attributes:
        when: The time, in words.
        play: Puts it back to that time and repeats the round, once for each generator.
        examples: The examples of its round.
        other: Another example.
        steps: Local steps of a round, each with its own noise.
    """

    when: str
    play: Play
    examples: Batch
    other: Batch
    steps: int = 1


def trained_noise(subject: Subject, client: TrainedClient, runs: int = 1) -> Audit:
    """Test size, covariance and shape of the noise of a client as it was in training."""
    unit, sizes, rows = _measured(subject, client)
    sigma = subject.promise.noise_multiplier / math.sqrt(client.steps)
    symptoms = [Symptom(1.0, "")]
    if unit > 0:
        noise = MeasuredNoise(helmert(REPEATS) @ rows / (sigma * unit), sizes)
        single = (rows[::2] - rows[1::2]) / (math.sqrt(2) * sigma * unit)
        level = SIGNIFICANCE / (5 * runs)
        symptoms = [
            _without_size(size(noise, level, subject.needs)),
            innovations(noise),
            shared_entries(noise),
            shape(single),
            _together(subject, client, unit),
        ]
    found = judged("trained noise", subject.promise, symptoms, runs, fine="the noise is enough")
    return replace(found, words=f"{client.when}, {found.words}")


def _without_size(symptom: Symptom) -> Symptom:
    """Return a symptom without the measured noise, because the sensitivity is a lower limit."""
    return symptom._replace(measured=math.nan, noise=math.nan)


def _measured(subject: Subject, client: TrainedClient) -> tuple[float, list[int], Floats]:
    """Return a lower limit of the sensitivity, the sizes of tensors, and uploads of one round."""
    pilots = [fork(subject.rng) for _ in range(2)]
    worlds = [*_neighbours(subject, client)]
    moved = [_movement(client, one, pilots)[0] for one in worlds]
    rngs = [fork(subject.rng) for _ in range(REPEATS)]
    distance, uploads = _movement(client, worlds[int(np.argmax(moved))], rngs)
    sizes = [value.numel() for value in uploads[0].values()]
    # A replaced unit moves an upload by two contributions at most.
    return subject.distance * distance / 2, sizes, _stacked(uploads)


def _neighbours(subject: Subject, client: TrainedClient) -> Iterator[Batch]:
    """Yield the examples with one of them replaced, or all if the claim protects clients."""
    inputs, targets = client.examples
    count = 1 if subject.per_record else len(inputs)
    which = torch.arange(len(inputs), device=inputs.device) < count
    mask = which.reshape(-1, *[1] * (inputs.dim() - 1))
    yield Batch(torch.where(mask, client.other.inputs, inputs), _replaced(which, client))
    yield Batch(inputs, _replaced(which, client))
    if inputs.is_floating_point():
        yield Batch(torch.where(mask, -EXTREME * inputs, inputs), targets)
        yield Batch(torch.where(mask, EXTREME * inputs, inputs), targets)


def _replaced(which: torch.Tensor, client: TrainedClient) -> torch.Tensor:
    targets = client.examples.targets
    mask = which.reshape(-1, *[1] * (targets.dim() - 1))
    return torch.where(mask, client.other.targets, targets)


def _movement(
    client: TrainedClient, world: Batch, rngs: Sequence[Generator]
) -> tuple[float, list[Update]]:
    """Return a cautious distance between the means of two worlds, and the uploads of the first."""
    pairs = [
        [client.play(examples, [copied(rng)])[0] for examples in (client.examples, world)]
        for rng in rngs
    ]
    uploads = [one for one, _ in pairs]
    apart = _stacked(uploads) - _stacked([other for _, other in pairs])
    products = (apart @ apart.T)[np.triu_indices(len(apart), 1)]
    error = products.std() / math.sqrt(len(rngs)) if len(products) > 1 else 0.0
    return math.sqrt(max(0.0, float(products.mean()) - CAUTION * error)), uploads


def _together(subject: Subject, client: TrainedClient, unit: float) -> Symptom:
    """Test what the best linear combination of several uploads reveals."""
    differences = [
        (one - other) / (math.sqrt(2) * unit)
        for one, other in ([_rounds(subject, client) for _ in range(2)] for _ in range(PAIRS))
    ]
    noise = np.concatenate(differences, axis=1)
    samples = noise.shape[1]
    covariance = noise @ noise.T / samples
    covariance += 1e-12 * max(float(np.trace(covariance)), 1e-300) * np.eye(ROUNDS)
    inverse = np.linalg.inv(covariance)
    signs = [np.array(one) for one in product((-1, 0, 1), repeat=ROUNDS) if any(one)]
    worst = max(float(one @ inverse @ one) for one in signs)
    promise = promised(subject.defense, Plan(ROUNDS * client.steps, 1.0, subject.plan.delta))
    allowed = ROUNDS * client.steps / promise.noise_multiplier**2
    # For normal noise, 1 / (v' S^-1 v) is chi^2 with fewer degrees of freedom.
    tail = float(stats.chi2.cdf(samples * allowed / worst, samples - ROUNDS + 1))
    words = (
        f"a combination of {ROUNDS} uploads shows a unit {math.sqrt(worst):.2g} standard "
        f"deviations from its absence, but the claim allows {math.sqrt(allowed):.2g}"
    )
    return Symptom(min(1.0, len(signs) * tail), words)


def _rounds(subject: Subject, client: TrainedClient) -> Floats:
    return _stacked(client.play(client.examples, [fork(subject.rng) for _ in range(ROUNDS)]))


def _stacked(uploads: Sequence[Update]) -> Floats:
    return np.stack([flat(one).cpu().numpy() for one in uploads])
