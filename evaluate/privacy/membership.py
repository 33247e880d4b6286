"""Was this example behind that upload? Membership from client updates, beside what bounds it.

The game: a client uploads an update of a random batch, and the adversary scores one example of
the batch and one that is not in it. Each upload gives one score of a member and one of another
example, so that the scores of either kind are independent.

The server sees that a client takes part, and with how many examples. All that it has to find
out is which ones; and two uploads of which one has another example in place of the tested one
are up to twice as far apart as an upload with and one without it. `replacement_bounds` is what
bounds this game, not the curve of addition or removal.

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
from ..foundations.seeds import fork, generator
from ..foundations.statistics import Floats, Interval, clopper_pearson, paired_difference
from .accounting import Segment
from .bounds import Bounds
from .claims import DELTAS, claim_of

Score = Callable[[Observation, Batch, Generator], Tensor]
"""How much each of some examples looks like one behind an upload."""

RATES = (0.1, 0.01, 0.001)
"""False positive rates at which attacks are compared [2]."""

LEAST_FALSE_POSITIVES = 10
"""False positives that a rate must be estimated from, at least."""

DRAWS = 64
"""Batches of public examples over which a likelihood is averaged."""


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold on the scores, and how often those above it are members, or not.

    Attributes:
        threshold: Examples with a higher score are called members.
        false_positive_rate: Share of other examples above it. Its upper limit is exact although
            the threshold is one of these scores: without ties, the true rate at an order
            statistic has the Beta distribution of that limit.
        true_positive_rate: Share of members above it.
    """

    threshold: float
    false_positive_rate: Interval
    true_positive_rate: Interval

    def exceeds(self, bounds: Bounds) -> bool:
        """Return whether more members are found than is proven possible, beyond chance."""
        allowed = bounds.membership(self.false_positive_rate.high)
        return self.true_positive_rate.low > allowed


@dataclass(frozen=True)
class ROC:
    """The scores of a membership attack.

    Attributes:
        members: Scores of independent members.
        others: Scores of examples that are not, likewise.
    """

    members: Floats
    others: Floats

    def __post_init__(self) -> None:
        for name, scores in {"members": self.members, "others": self.others}.items():
            if not (len(scores) >= 1 and np.all(~np.isnan(scores))):
                raise ValueError(f"{name} must be at least one score, none of them NaN")

    @property
    def least_rate(self) -> float:
        """Return the smallest false positive rate that the scores can show."""
        return LEAST_FALSE_POSITIVES / len(self.others)

    @property
    def auc(self) -> float:
        """Return the probability that a member's score is the higher one; a tie counts half.

        It averages over rates of false positives that no one could act on: no more than an extra.
        """
        ranks = rankdata(np.concatenate([self.members, self.others]))[: len(self.members)]
        wins = ranks.sum() - len(self.members) * (len(self.members) + 1) / 2
        return float(wins / (len(self.members) * len(self.others)))

    def advantage(self, confidence: float = 0.95) -> Interval:
        """Return how much more often members than others are above a threshold.

        It is the best threshold of every other upload, tried on the rest: the largest difference
        over all thresholds is above zero even for scores that say nothing.
        """
        members, others = np.sort(self.members[::2]), np.sort(self.others[::2])
        thresholds = np.concatenate([members, others])
        gain = others.searchsorted(thresholds, "right") / len(others)
        gain -= members.searchsorted(thresholds, "right") / len(members)
        best = thresholds[gain.argmax()]
        called = self.members[1::2] > best, self.others[1::2] > best
        return paired_difference(*called, range(len(called[0])), confidence)

    def at(self, rate: float, confidence: float = 0.95) -> OperatingPoint:
        """Return the lowest threshold with at most this share of false positives.

        Raises:
            ValueError: If fewer than `LEAST_FALSE_POSITIVES` would be behind it.
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
        """Return the points at `RATES`, as far as there are scores enough."""
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
    """Return what bounds membership where one example stands in the place of another.

    Both move the upload by up to the clipping norm: twice the distance of addition or removal is
    half the noise [3]. For several local steps on the same examples, each counts in full.
    """
    return Bounds((Segment(1.0, noise_multiplier / 2, steps),))


def claimed_bounds(defense: Defense) -> Bounds | None:
    """Return what a defense's own guarantee permits in this game, for an upload of one step.

    None without a guarantee, and for one that is not that of a Gaussian mechanism.
    """
    claim, guarantee = claim_of(defense), defense.guarantee(Plan(1, 1.0, DELTAS[0]))
    if claim is None or guarantee is None or claim.noise_multiplier is None:
        return None
    already = guarantee.adjacency == "replace"  # then sigma is for this distance
    return replacement_bounds(claim.noise_multiplier * (2 if already else 1))


def gradient_cosine(observation: Observation, examples: Batch, rng: Generator) -> Tensor:
    """Return the cosine of the upload and that of a client who has nothing but the example [1].

    Gradients of different examples are nearly orthogonal where there are many parameters.
    """
    inputs, targets = (
        part.unsqueeze(1).repeat_interleave(observation.batch_size, 1) for part in examples
    )
    return 1 + fits(observation, inputs, targets, cosine_fit(observation))


def likelihood_ratio(observation: Observation, examples: Batch, rng: Generator) -> Tensor:
    """Return log p(upload | example in the batch) / p(upload | another in its place).

    By the defense's own likelihood, averaged over what else may be in the batch: random public
    examples. Up to their number, and where the likelihood is exact, no test is better.
    """
    density, public = likelihood(observation), observation.public
    if density is None:
        raise NotApplicable("the likelihood of an upload is not known")
    if public is None:
        raise NotApplicable("no public examples are granted, as others that may be in the batch")
    rows = torch.randint(len(public.inputs), (DRAWS, observation.batch_size), generator=rng)
    needed = DRAWS if observation.batch_size > 1 else 1  # there is nothing else to average over

    def batches(others: Tensor, tested: Tensor) -> Tensor:
        """Return the draws, then for each tested example those with it in the first place."""
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
    data: Batch,
    threat: ThreatModel,
    rng: Generator,
    *,
    uploads: int = 1000,
    batch_size: int = 1,
    scores: Mapping[str, Score] = SCORES,
    track: Callable[[range], Iterable[int]] = iter,
) -> dict[str, ROC | NotApplicable]:
    """Play the game and return each attack's scores, all of them on the same uploads.

    Args:
        client: Makes the uploads.
        data: The population that batches and other examples are drawn from, anew each time.
        threat: What the adversary is granted; public examples must not be of the data.
        rng: Source of all randomness.
        uploads: How often the game is played.
        batch_size: A client's examples.
        scores: The attacks.
        track: Passes the uploads on, one by one, as a progress bar does.
    """
    cohort = client.defense.cohort
    behind = cohort * batch_size
    if not 1 <= behind < len(data.inputs):
        raise UserError(
            f"data must have more than the {behind} examples behind an upload, "
            f"got {len(data.inputs)}"
        )
    models = [client.model] * cohort
    mending = _mending(client, data, batch_size) if threat.knows_defense else AS_GIVEN
    replay = make_replay(client, threat, rng, models=models, mending=mending)
    found: dict[str, list[Tensor]] = {name: [] for name in scores}
    refused: dict[str, NotApplicable] = {}
    for _ in track(range(uploads)):
        rows = torch.randperm(len(data.inputs), generator=rng)[: behind + 1]
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


def _mending(client: Client, data: Batch, batch_size: int) -> Mending:
    """Return what keeps the replay of a defense from crippling the attacks that know it."""
    shares = [data.at(rows) for rows in torch.arange(len(data.inputs)).split(batch_size)]
    size = client.defense.cohort
    rounds = [shares[i : i + size] for i in range(0, len(shares) - size, size)]
    if len(rounds) < EXAMINED_ROUNDS:
        return AS_GIVEN
    row = examine(client, rounds[:EXAMINED_ROUNDS], generator("replay"))
    return mending_of(row)


def _numbers(scores: Tensor) -> Tensor:
    if scores.isnan().any():
        raise NotApplicable("scores are not numbers")
    return scores


def _roc(scores: list[Tensor]) -> ROC:
    members, others = torch.stack(scores, dim=1).double().cpu().numpy()
    return ROC(members, others)
