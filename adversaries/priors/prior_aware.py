"""The prior-aware attack: it decides which of several candidates is behind the update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf, isclose
from typing import ClassVar, cast

import torch
from torch import Generator, Tensor
from torch.nn.functional import cosine_similarity

from ..base import Adversary, Candidates, Observation, Reconstruction
from ..matching.matching import vectorised
from ..spaces import NotApplicable
from .joint_choice import check_size, choose, cosine, gaussian, measured

Update = Mapping[str, Tensor]

Fit = Callable[[Update], Tensor]
"""Maps a replayed update to a number: how well it explains the observed update."""

_ENTRIES_AT_ONCE = 2**22  # entries of replayed updates that are held in double precision
_REFINEMENTS = 3  # sweeps over all examples with replays of whole batches


@dataclass(frozen=True)
class PriorAware(Adversary):
    """Choose the candidates that explain the update best.

    The client's own code replays each candidate, at the cost of one update per candidate. There
    is no search for one example. If the adversary knows the defense, the fit is the defense's
    log-likelihood. If that is exact, no attack is right more often, because all candidates are
    equally likely. For Gaussian noise on gradients of equal norm, it ranks candidates like the
    inner product of [1]. If the defense is unknown, the fit is the cosine, which does not depend
    on the scale.

    In a batch, the adversary chooses a candidate for every example at once. If updates are sums
    over examples, inner products of replayed candidates give the fit of every combination, and
    coordinate updates search them (`joint_choice`). If updates are not sums, or the noise is not
    Gaussian, replays of whole batches then refine the choice. Earlier uploads of the client count
    if they are about the same examples.

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
        """Return the best candidate of every example."""
        if observation.candidates is None:
            raise NotApplicable(
                f"no candidates are granted for the {observation.batch_size} private examples"
            )
        possible = _Combinations(observation, observation.candidates)
        values, guesses = possible.best(rng)
        best = int(values.argmax())
        return Reconstruction(guesses[best], observation.targets, -float(values[best]))

    def objective(self, observation: Observation, inputs: Tensor, targets: Tensor) -> float:
        """Return minus the fit of a guess."""
        guess = inputs.unsqueeze(0), targets.unsqueeze(0)
        return -float(_total_fits(observation, *guess))


@dataclass(frozen=True)
class InformedPriorAware(PriorAware):
    """Choose the candidate that explains the update best, knowing the rest of the batch.

    This is the informed adversary of differential privacy [2]: only one example is unknown. The
    replay of the known examples is subtracted from the update, and maximum likelihood decides.
    The same bound gamma(1 / N) applies as for a single example. In a batch of one example, it is
    `PriorAware`.

    References:
        [1] Hayes, Mahloujifar, Balle. "Bounding Training Data Reconstruction in DP-SGD." NeurIPS
            2023. https://arxiv.org/abs/2302.07225
        [2] Balle, Cherubin, Hayes. "Reconstructing Training Data with Informed Adversaries." S&P
            2022. https://arxiv.org/abs/2201.04845
    """

    informed: ClassVar[bool] = True


class _Combinations:
    """The batches that are possible: one candidate for each example that is not known."""

    def __init__(self, observation: Observation, candidates: Candidates) -> None:
        self.observation, self.candidates = observation, candidates
        self.unknown = _unknown(candidates)

    def best(self, rng: Generator) -> tuple[Tensor, Tensor]:
        """Return the fits of some batches, among them the best, and their inputs."""
        if len(self.unknown) <= 1:  # each candidate is a whole batch
            return _total_fits(self.observation, *self.candidates), self.candidates.inputs
        inputs, targets = self._batches(self._choice(rng)[None])
        return _total_fits(self.observation, inputs, targets), inputs

    def _choice(self, rng: Generator) -> Tensor:
        """Return the chosen candidate of every unknown example."""
        shape = len(self.unknown), len(self.candidates.inputs)
        check_size(shape)
        found, exact = [], True
        for upload in _same_examples(self.observation):
            observed = _vector(upload, _double(upload.update))
            weight = _gaussian_weight(upload)
            fit = cosine(float(observed.norm())) if weight is None else gaussian(weight)
            products, additive = measured(observed, partial(self._replayed, upload), shape, fit)
            found.append(products)
            exact &= additive and (weight is not None or likelihood(upload) is None)
        choice = choose(found, rng)
        return choice if exact else self._refined(choice)

    def _refined(self, choice: Tensor) -> Tensor:
        """Return a choice after coordinate updates with replays of whole batches."""
        for _ in range(_REFINEMENTS):
            before = choice.clone()
            for example in range(len(choice)):
                each = choice.repeat(len(self.candidates.inputs), 1)
                each[:, example] = torch.arange(len(each))
                choice[example] = _total_fits(self.observation, *self._batches(each)).argmax()
            if torch.equal(before, choice):
                break
        return choice

    def _batches(self, choices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batches of a stack of choices."""
        examples = self.candidates.inputs.shape[1]
        rows = choices.new_zeros(len(choices), examples)
        rows[:, self.unknown] = choices
        inputs, targets = (part[rows, torch.arange(examples)] for part in self.candidates)
        return inputs, targets

    def _replayed(self, upload: Observation, choices: Tensor) -> Tensor:
        """Return the replayed updates of a stack of choices, one row each."""
        return of_replays(upload, *self._batches(choices), partial(_vector, upload))


def _unknown(candidates: Candidates) -> list[int]:
    """Return the columns whose candidates differ. The adversary knows the other examples."""
    columns = range(candidates.inputs.shape[1])
    return [k for k in columns if any((part[:, k] != part[:1, k]).any() for part in candidates)]


def _same_examples(observation: Observation) -> list[Observation]:
    """Return the uploads that are about the same private examples."""
    if not observation.protocol.uses_all_examples:
        return [observation]
    return [observation, *observation.earlier]


def _total_fits(observation: Observation, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return how well each of a stack of guessed batches explains all uploads about it."""
    values = [fits(one, inputs, targets, _best_fit(one)) for one in _same_examples(observation)]
    return torch.stack(values).sum(dim=0)


def fits(observation: Observation, inputs: Tensor, targets: Tensor, fit: Fit) -> Tensor:
    """Return how well each of a stack of guessed batches explains the update.

    The fit is in double precision, because log-likelihoods of a large update differ only in their
    last digits.
    """
    return of_replays(observation, inputs, targets, lambda update: fit(_double(update)))


def of_replays(
    observation: Observation,
    inputs: Tensor,
    targets: Tensor,
    function: Callable[[Update], Tensor],
) -> Tensor:
    """Return a function of the replayed update of each of a stack of guessed batches."""

    def one(inputs: Tensor, targets: Tensor) -> Tensor:
        return function(observation.simulate(inputs, targets))

    size = max(1, _ENTRIES_AT_ONCE // (_entries(observation) * inputs.shape[1]))
    parts = zip(inputs.split(size), targets.split(size), strict=True)
    with torch.no_grad():
        return torch.cat([vectorised(one)(*part) for part in parts])


def cosine_fit(observation: Observation) -> Fit:
    """Return the cosine similarity to the observed update, minus one."""
    vector = partial(_vector, observation)
    observed = vector(_double(observation.update))
    return lambda replayed: cosine_similarity(observed, vector(replayed), dim=0) - 1


def likelihood(observation: Observation) -> Fit | None:
    """Return the defense's log-likelihood, if the adversary knows it and it exists."""
    density, observed = observation.log_likelihood, _double(observation.update)
    if density is None or density(observed, observed) is None:
        return None
    known = cast("Callable[[Update, Update], Tensor]", density)
    return lambda replayed: known(observed, replayed)


def _gaussian_weight(observation: Observation) -> float | None:
    """Return w if the log-likelihood is a constant minus w |o - m|^2, else None."""
    density = likelihood(observation)
    if density is None:
        return None
    observed = _double(observation.update)
    last = next(reversed(observed))
    scales = {name: (0.0, 0.5, float(name == last)) for name in observed}
    best, weights = density(observed), []
    for trial in range(3):
        expected = {name: value * scales[name][trial] for name, value in observed.items()}
        difference = {name: observed[name] - expected[name] for name in observed}
        distance = _vector(observation, difference).square().sum()
        weights.append(float((best - density(expected)) / distance))
    alike = all(isclose(weight, weights[0], rel_tol=1e-6) for weight in weights)
    return weights[0] if alike and 0 < weights[0] < inf else None


def _best_fit(observation: Observation) -> Fit:
    """Return the log-likelihood per entry of the update, or the cosine if there is none."""
    density = likelihood(observation)
    if density is None:
        return cosine_fit(observation)
    return lambda replayed: density(replayed) / _entries(observation)


def _entries(observation: Observation) -> int:
    return sum(value.numel() for value in observation.update.values())


def _vector(observation: Observation, update: Update) -> Tensor:
    """Return an update as a vector, in the order of the observed one."""
    return torch.cat([update[name].flatten() for name in observation.update])


def _double(update: Update) -> dict[str, Tensor]:
    return {name: value.double() for name, value in update.items()}
