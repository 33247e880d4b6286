"""Membership inference on client updates, and the bounds on it.

The game: a client uploads an update of a random batch. The adversary scores one example of the
batch (a member) and one other example. Each upload gives one score of each kind, so the scores of
one kind are independent.

The server knows that a client takes part, and with how many examples. It only has to find out which
ones. So the two cases differ by a replacement: they are up to twice as far apart as with and
without the example. `replacement_bounds` bounds this game; the curve of addition or removal does
not.

References:
    [1] Li, Li, Ribeiro. "Effective Passive Membership Inference Attacks in Federated Learning
        Against Overparameterized Models." ICLR 2023. https://openreview.net/forum?id=QsCSLPP55Ku
    [2] Carlini, Chien, Nasr, Song, Terzis, Tramer. "Membership Inference Attacks From First
        Principles." S&P 2022. https://arxiv.org/abs/2112.03570
    [3] Dong, Roth, Su. "Gaussian Differential Privacy." JRSS B 2022.
        https://arxiv.org/abs/1905.02383
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata
from torch import Generator, Tensor

from leakfrontier.adversaries import NotApplicable, Observation
from leakfrontier.adversaries.priors.prior_aware import cosine_fit, fits, likelihood
from leakfrontier.defenses import Batch, Defense, Plan

from ..client.client import Client, ThreatModel, make_replay, observe
from ..client.examination import EXAMINED_ROUNDS, examine, mending_of
from ..client.mending import AS_GIVEN, Mending
from ..foundations.errors import UserError
from ..foundations.examples import Data
from ..foundations.seeds import fork, generator
from ..foundations.statistics import Floats, Interval, clopper_pearson, paired_difference
from .accounting import Segment
from .bounds import Bounds
from .claims import DELTAS, claim_of

Score = Callable[[Observation, Batch, Generator], Tensor]
"""Scores examples: the higher, the more likely an example is behind the upload."""

RATES = (0.1, 0.01, 0.001)
"""False positive rates at which attacks are compared [2]."""

LEAST_FALSE_POSITIVES = 10
"""Smallest number of false positives from which a rate is estimated."""

DRAWS = 64
"""Number of batches of public examples over which a likelihood is averaged."""


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold on the scores, with its true and false positive rate.

    Attributes:
        threshold: Examples with a higher score are called members.
        false_positive_rate: Share of other examples above it. The threshold is one of their
            scores, but the upper limit is still exact: without ties, the true rate at an order
            statistic has the Beta distribution of that limit.
        true_positive_rate: Share of members above it.
    """

    threshold: float
    false_positive_rate: Interval
    true_positive_rate: Interval

    def exceeds(self, bounds: Bounds) -> bool:
        """Return whether the true positive rate is significantly above its bound."""
        allowed = bounds.membership(self.false_positive_rate.high)
        return self.true_positive_rate.low > allowed


@dataclass(frozen=True)
class ROC:
    """The scores of a membership attack.

    Attributes:
        members: Independent scores of members.
        others: Independent scores of other examples.
    """

    members: Floats
    others: Floats

    def __post_init__(self) -> None:
        for name, scores in {"members": self.members, "others": self.others}.items():
            if not (len(scores) >= 1 and np.all(~np.isnan(scores))):
                raise ValueError(f"{name} must have at least one score and no NaN")

    @property
    def least_rate(self) -> float:
        """Return the smallest false positive rate that the scores can resolve."""
        return LEAST_FALSE_POSITIVES / len(self.others)

    @property
    def auc(self) -> float:
        """Return the probability that a member's score is higher. A tie counts half.

        It averages over false positive rates that are too high to be of use, so it is only an
        additional value.
        """
        ranks = rankdata(np.concatenate([self.members, self.others]))[: len(self.members)]
        wins = ranks.sum() - len(self.members) * (len(self.members) + 1) / 2
        return float(wins / (len(self.members) * len(self.others)))

    def advantage(self, confidence: float = 0.95) -> Interval:
        """Return the true positive rate minus the false positive rate at the best threshold.

        Every second upload chooses the threshold, and the others test it. The largest difference
        over all thresholds would be above zero even for random scores.
        """
        members, others = np.sort(self.members[::2]), np.sort(self.others[::2])
        thresholds = np.concatenate([members, others])
        gain = others.searchsorted(thresholds, "right") / len(others)
        gain -= members.searchsorted(thresholds, "right") / len(members)
        best = thresholds[gain.argmax()]
        called = self.members[1::2] > best, self.others[1::2] > best
        return paired_difference(*called, range(len(called[0])), confidence)

    def at(self, rate: float, confidence: float = 0.95) -> OperatingPoint:
        """Return the operating point at the lowest threshold with at most this false positive rate.

        Raises:
            ValueError: If the rate allows fewer than `LEAST_FALSE_POSITIVES` false positives.
        """
        if not self.least_rate <= rate <= 1:
            raise ValueError(
                f"rate must be in [{self.least_rate:.2g}, 1] for {len(self.others)} scores of "
                f"other examples, got {rate}"
            )
        allowed = math.floor(rate * len(self.others) + 1e-9)
        highest = np.append(np.sort(self.others)[::-1], -math.inf)
        threshold = float(highest[allowed])
        shares = [
            clopper_pearson(int((scores > threshold).sum()), len(scores), confidence)
            for scores in (self.others, self.members)
        ]
        return OperatingPoint(threshold, *shares)

    def reported(self) -> dict[float, OperatingPoint]:
        """Return the points at those `RATES` for which there are enough scores."""
        return {rate: self.at(rate) for rate in RATES if rate >= self.least_rate}

    def table(self, bounds: Bounds | None = None, points: int = 60) -> pd.DataFrame:
        """Return the curve for a plot with logarithmic axes, with limits and the proven bound."""
        rows = []
        for rate in np.geomspace(self.least_rate, 1, points):
            point = self.at(min(1.0, max(self.least_rate, rate)))
            false, true = point.false_positive_rate, point.true_positive_rate
            rows.append((false.value, false.low, false.high, true.value, true.low, true.high))
        columns = ["fpr", "fpr_low", "fpr_high", "tpr", "tpr_low", "tpr_high"]
        table = pd.DataFrame(rows, columns=columns).drop_duplicates(ignore_index=True)
        return table if bounds is None else table.assign(bound=bounds.power(table["fpr"]))


def replacement_bounds(noise_multiplier: float, steps: int = 1) -> Bounds:
    """Return the bounds on membership if one example replaces another.

    Both examples move the upload by up to the clipping norm. Twice the distance of addition or
    removal is equivalent to half the noise [3]. If several local steps use the same examples, each
    step counts in full.
    """
    return Bounds((Segment(1.0, noise_multiplier / 2, steps),))


def claimed_bounds(defense: Defense) -> Bounds | None:
    """Return the bounds of a defense's guarantee in this game, for an upload of one step.

    None without a guarantee, or if the guarantee is not that of a Gaussian mechanism.
    """
    claim, guarantee = claim_of(defense), defense.guarantee(Plan(1, 1.0, DELTAS[0]))
    if claim is None or guarantee is None or claim.noise_multiplier is None:
        return None
    already = guarantee.adjacency == "replace"  # then sigma already refers to this distance
    return replacement_bounds(claim.noise_multiplier * (2 if already else 1))


def gradient_cosine(observation: Observation, examples: Batch, rng: Generator) -> Tensor:
    """Return the cosine of the upload and the upload of a client with only the example [1].

    With many parameters, gradients of different examples are nearly orthogonal.
    """
    inputs, targets = (
        part.unsqueeze(1).repeat_interleave(observation.batch_size, 1) for part in examples
    )
    return 1 + fits(observation, inputs, targets, cosine_fit(observation))


def likelihood_ratio(observation: Observation, examples: Batch, rng: Generator) -> Tensor:
    """Return log p(upload | example in the batch) / p(upload | another in its place).

    The likelihood is that of the defense, averaged over random public examples as the rest of the
    batch. If the likelihood is exact, no test is better, up to the number of public batches.
    """
    density, public = likelihood(observation), observation.public
    if density is None:
        raise NotApplicable("the likelihood of an upload is not known")
    if public is None:
        raise NotApplicable("no public examples are granted to stand for the rest of the batch")
    rows = torch.randint(len(public.inputs), (DRAWS, observation.batch_size), generator=rng)
    needed = DRAWS if observation.batch_size > 1 else 1  # nothing to average over

    def batches(others: Tensor, tested: Tensor) -> Tensor:
        """Return the drawn batches, then for each tested example copies that start with it."""
        within = others[:needed].repeat(len(tested), *[1] * (others.dim() - 1))
        within[:, 0] = tested.repeat_interleave(needed, 0)
        return torch.cat([others, within])

    inputs = batches(public.inputs[rows], examples.inputs)
    targets = batches(public.targets[rows], examples.targets)
    values = fits(observation, inputs, targets, density)
    return _log_mean(values[DRAWS:].view(-1, needed)) - _log_mean(values[:DRAWS])


def _log_mean(values: Tensor) -> Tensor:
    return values.logsumexp(-1) - math.log(values.shape[-1])


SCORES: dict[str, Score] = {
    "gradient cosine": gradient_cosine,
    "likelihood ratio": likelihood_ratio,
}
"""Every membership attack by name."""


def membership(
    client: Client,
    data: Data,
    threat: ThreatModel,
    rng: Generator,
    *,
    uploads: int = 1000,
    batch_size: int = 1,
    scores: Mapping[str, Score] = SCORES,
    track: Callable[[range], Iterable[int]] = iter,
) -> dict[str, ROC | NotApplicable]:
    """Play the game. Return the scores of each attack, all on the same uploads.

    Args:
        client: Makes the uploads.
        data: The population from which each game draws its batch and the other example.
        threat: The knowledge of the adversary. Its public examples must not be in `data`.
        rng: Source of all randomness.
        uploads: Number of games.
        batch_size: Examples of one client.
        scores: The attacks.
        track: Iterates over the games, e.g. with a progress bar.
    """
    cohort = client.defense.cohort
    behind = cohort * batch_size
    if not 1 <= behind < len(data.targets):
        raise UserError(
            f"data must have more than the {behind} examples behind an upload, "
            f"got {len(data.targets)}"
        )
    models = [client.model] * cohort
    mending = _mending(client, data, batch_size) if threat.knows_defense else AS_GIVEN
    replay = make_replay(client, threat, rng, models=models, mending=mending)
    found: dict[str, list[Tensor]] = {name: [] for name in scores}
    refused: dict[str, NotApplicable] = {}
    for _ in track(range(uploads)):
        rows = torch.randperm(len(data.targets), generator=rng)[: behind + 1]
        shares = [data.at(share) for share in rows[:-1].split(batch_size)]
        upload = observe(client, shares, threat, rng, replay=replay)[0]
        tested = data.at(rows[[0, -1]])
        for name, score in scores.items():
            if name in refused:
                continue
            try:
                found[name].append(_numbers(score(upload.observation, tested, fork(rng))))
            except NotApplicable as reason:
                refused[name] = reason
    return {name: refused.get(name) or _roc(found[name]) for name in scores}


def _mending(client: Client, data: Data, batch_size: int) -> Mending:
    """Return the repair of the defense's replay, for attacks that know the defense."""
    shares = [data.at(rows) for rows in torch.arange(len(data.targets)).split(batch_size)]
    size = client.defense.cohort
    rounds = [shares[i : i + size] for i in range(0, len(shares) - size, size)]
    if len(rounds) < EXAMINED_ROUNDS:
        return AS_GIVEN
    row = examine(client, rounds[:EXAMINED_ROUNDS], generator("replay"))
    return mending_of(row)


def _numbers(scores: Tensor) -> Tensor:
    if scores.isnan().any():
        raise NotApplicable("scores are NaN")
    return scores


def _roc(scores: list[Tensor]) -> ROC:
    members, others = torch.stack(scores, dim=1).double().cpu().numpy()
    return ROC(members, others)
