"""The prior-aware attack: it decides which of several candidates is behind the update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Generator, Tensor
from torch.nn.functional import cosine_similarity

from ..base import Adversary, Observation, Reconstruction
from ..matching.matching import vectorised
from ..spaces import NotApplicable

Update = Mapping[str, Tensor]

Fit = Callable[[Update], Tensor]
"""Maps a replayed update to a number: how well it explains the observed update."""

_ENTRIES_AT_ONCE = 2**22  # entries of replayed updates that are held in double precision


@dataclass(frozen=True)
class PriorAware(Adversary):
    """Choose the candidate that explains the update best.

    The client's own code replays each candidate, at the cost of one update per candidate. There
    is no search. If the adversary knows the defense, the fit is the defense's log-likelihood. If
    that is exact, no attack is right more often, because all candidates are equally likely. For
    Gaussian noise on gradients of equal norm, it ranks candidates like the inner product of [1].
    If the defense is unknown, the fit is the cosine, which does not depend on the scale.

    The candidates, including their labels, are prior knowledge that the threat model grants. A
    blind guess among N candidates is right with probability 1 / N. Under differential privacy, no
    attack is right with probability above gamma(1 / N) [1].

    References:
        [1] Hayes, Mahloujifar, Balle. "Bounding Training Data Reconstruction in DP-SGD." NeurIPS
            2023. https://arxiv.org/abs/2302.07225 (the prior-aware attack, for one release)
    """

    simulates: ClassVar[bool] = True
    needs_candidates: ClassVar[bool] = True
    cost: ClassVar[int] = 0

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the best candidate."""
        if observation.candidates is None:
            raise NotApplicable(
                f"no candidates are granted for the {observation.batch_size} private examples"
            )
        inputs, targets = observation.candidates
        values = fits(observation, inputs, targets, _best_fit(observation))
        best = int(values.argmax())
        return Reconstruction(inputs[best], observation.targets, -float(values[best]))

    def objective(self, observation: Observation, inputs: Tensor, targets: Tensor) -> float:
        """Return minus the fit of a guess."""
        guess = inputs.unsqueeze(0), targets.unsqueeze(0)
        return -float(fits(observation, *guess, _best_fit(observation)))


def fits(observation: Observation, inputs: Tensor, targets: Tensor, fit: Fit) -> Tensor:
    """Return how well each of a stack of guessed batches explains the update.

    The fit is in double precision, because log-likelihoods of a large update differ only in their
    last digits.
    """

    def one(inputs: Tensor, targets: Tensor) -> Tensor:
        return fit(_double(observation.simulate(inputs, targets)))

    size = max(1, _ENTRIES_AT_ONCE // _entries(observation))
    parts = zip(inputs.split(size), targets.split(size), strict=True)
    with torch.no_grad():
        return torch.cat([vectorised(one)(*part) for part in parts])


def cosine_fit(observation: Observation) -> Fit:
    """Return the cosine similarity to the observed update, minus one."""
    names = list(observation.update)

    def vector(update: Update) -> Tensor:
        return torch.cat([update[name].flatten() for name in names])

    observed = vector(_double(observation.update))
    return lambda replayed: cosine_similarity(observed, vector(replayed), dim=0) - 1


def likelihood(observation: Observation) -> Fit | None:
    """Return the defense's log-likelihood, if the adversary knows it and it exists."""
    density, observed = observation.log_likelihood, _double(observation.update)
    if density is None or density(observed, observed) is None:
        return None
    known = cast("Callable[[Update, Update], Tensor]", density)
    return lambda replayed: known(observed, replayed)


def _best_fit(observation: Observation) -> Fit:
    """Return the log-likelihood per entry of the update, or the cosine if there is none."""
    density = likelihood(observation)
    if density is None:
        return cosine_fit(observation)
    return lambda replayed: density(replayed) / _entries(observation)


def _entries(observation: Observation) -> int:
    return sum(value.numel() for value in observation.update.values())


def _double(update: Update) -> dict[str, Tensor]:
    return {name: value.double() for name, value in update.items()}
