import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from federated import batch, make_client, mlp, observed, rng
from numpy.testing import assert_allclose
from scipy.stats import norm
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor, nn

from leakfrontier.adversaries import FedAvg, FedSGD, ImageSpace, NotApplicable, PublicData
from leakfrontier.defenses import (
    DPSGD,
    Batch,
    ClientDP,
    Defense,
    Guarantee,
    Noise,
    Plan,
    SecureAggregation,
    TopK,
)
from leakfrontier.evaluate.client.client import Client, ThreatModel
from leakfrontier.evaluate.foundations.statistics import Interval
from leakfrontier.evaluate.privacy.accounting import Segment
from leakfrontier.evaluate.privacy.bounds import Bounds
from leakfrontier.evaluate.privacy.membership import (
    DRAWS,
    ROC,
    SCORES,
    Score,
    claimed_bounds,
    gradient_cosine,
    likelihood_ratio,
    membership,
    replacement_bounds,
)

PUBLIC = PublicData(*batch(100, seed=8))


def gaussian(mu: float, n: int, seed: int = 0) -> ROC:
    draws = np.random.default_rng(seed)
    return ROC(draws.normal(mu, 1, n), draws.normal(0, 1, n))


def compatible(roc: ROC, rate: float, mu: float) -> bool:
    """Return whether the scores may be those of a Gaussian test with this separation."""
    point = roc.at(rate, confidence=0.99)
    false, true = point.false_positive_rate, point.true_positive_rate
    low, high = (norm.cdf(norm.ppf(limit) + mu) for limit in (false.low, false.high))
    return bool(true.low <= high and true.high >= low)


@pytest.mark.parametrize("ties", [False, True])
def test_equals_an_independent_implementation(ties: bool) -> None:
    roc = gaussian(1.0, 2000)
    if ties:
        roc = ROC(roc.members.round(1), roc.others.round(1))
    truth = np.repeat([1, 0], 2000)
    scores = np.concatenate([roc.members, roc.others])
    assert roc.auc == pytest.approx(roc_auc_score(truth, scores))
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    for rate in (0.01, 0.1, 0.5, 1.0):
        point = roc.at(rate)
        allowed = false <= rate
        assert point.false_positive_rate.value == pytest.approx(false[allowed].max())
        assert point.true_positive_rate.value == pytest.approx(true[allowed].max())


@pytest.mark.parametrize("mu", [0.0, 0.5, 2.0])
def test_gaussian_scores_have_the_known_curve(mu: float) -> None:
    roc = gaussian(mu, 20_000)
    assert roc.auc == pytest.approx(norm.cdf(mu / math.sqrt(2)), abs=0.01)
    assert set(roc.reported()) == {0.1, 0.01, 0.001}
    for rate in (0.001, 0.01, 0.1, 0.5):
        assert compatible(roc, rate, mu)
        assert not compatible(roc, rate, mu + 1)


def test_both_rates_have_exact_limits() -> None:
    point = ROC(np.arange(50.0), np.arange(-40.0, 10.0)).at(0.2)
    assert point.threshold == -1
    assert point.false_positive_rate == Interval(0.2, *approx(0.1003, 0.3372), 50)
    assert point.true_positive_rate == Interval(1.0, *approx(0.9289, 1.0), 50)


def approx(*limits: float) -> list[float]:
    return [pytest.approx(limit, abs=1e-4) for limit in limits]


@pytest.mark.parametrize(
    ("n", "rates"), [(99, []), (999, [0.1]), (1000, [0.1, 0.01]), (10_000, [0.1, 0.01, 0.001])]
)
def test_reports_no_rate_that_the_scores_cannot_show(n: int, rates: list[float]) -> None:
    roc = gaussian(1.0, n)
    assert list(roc.reported()) == rates
    with pytest.raises(ValueError, match=r"rate must be in \[.*, 1\] for .* scores"):
        roc.at(9 / n)


@pytest.mark.parametrize("mu", [0.0, 1.0, 3.0])
def test_the_advantage_covers_that_of_the_best_threshold(mu: float) -> None:
    found = [gaussian(mu, 400, seed).advantage() for seed in range(40)]
    known = 2 * norm.cdf(mu / 2) - 1
    assert sum(one.low <= known <= one.high for one in found) >= 34  # of 38 expected
    assert np.mean([one.value for one in found]) == pytest.approx(known, abs=0.02)
    assert {one.n for one in found} == {200}


def test_the_table_is_a_curve_with_its_bound() -> None:
    bounds = replacement_bounds(1.0)
    table = gaussian(2.0, 5000).table(bounds)
    assert table["fpr"].is_monotonic_increasing
    assert table["tpr"].is_monotonic_increasing
    assert table["fpr"].iloc[0] == 10 / 5000
    assert table.iloc[-1][["fpr", "tpr", "bound"]].tolist() == [1, 1, 1]
    for rate in ("fpr", "tpr"):
        assert (table[f"{rate}_low"] <= table[rate]).all()
        assert (table[rate] <= table[f"{rate}_high"]).all()
    assert_allclose(table["bound"], norm.cdf(norm.ppf(table["fpr"]) + 2))


def outputs_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss of a linear model under which the gradient of an example is the example."""
    return outputs.mean()


def linear_game(
    population: Tensor, public: Tensor, sigma: float, uploads: int
) -> dict[str, ROC | NotApplicable]:
    targets = torch.zeros(len(population), dtype=torch.long)
    size = population.shape[1]
    model = nn.Linear(size, 1, bias=False)
    client = Client(model, outputs_mean, ClientDP(sigma), FedSGD(), ImageSpace((size,), 1))
    threat = ThreatModel(public=PublicData(public, targets[: len(public)]))
    return membership(client, Batch(population, targets), threat, rng(), uploads=uploads)


@cache
def orthogonal(sigma: float) -> dict[str, ROC | NotApplicable]:
    basis = torch.eye(256)
    return linear_game(basis[:192], basis[192:], sigma, uploads=400)


@pytest.mark.parametrize("score", ["gradient cosine", "likelihood ratio"])
@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_orthogonal_gradients_are_one_over_sigma_apart(sigma: float, score: str) -> None:
    roc = orthogonal(sigma)[score]
    assert isinstance(roc, ROC)
    assert roc.auc == pytest.approx(norm.cdf(1 / sigma / math.sqrt(2)), abs=0.06)
    for rate in (0.05, 0.1, 0.5):
        assert compatible(roc, rate, 1 / sigma)
        assert not roc.at(rate).exceeds(replacement_bounds(sigma))


def test_opposite_gradients_reach_the_bound_of_a_replacement() -> None:
    """And exceed that of addition or removal, which does not hold for this game."""
    pair = torch.eye(2, 64).diff(dim=0).div(math.sqrt(2))
    roc = linear_game(torch.cat([pair, -pair]), pair, 1.0, uploads=400)["gradient cosine"]
    assert isinstance(roc, ROC)
    for point in (roc.at(0.05), roc.at(0.1)):
        assert not point.exceeds(replacement_bounds(1.0))
        assert point.exceeds(Bounds((Segment(1.0, 1.0, 1),)))
    assert compatible(roc, 0.05, 2.0)


@dataclass
class Replacing(DPSGD):
    """A defense that claims of replacement what it would claim of addition."""

    def guarantee(self, plan: Plan) -> Guarantee:
        return replace(super().guarantee(plan), adjacency="replace")


def game(
    defense: Defense,
    batch_size: int = 1,
    uploads: int = 50,
    scores: Mapping[str, Score] = SCORES,
    **threat: object,
) -> dict[str, ROC | NotApplicable]:
    granted = ThreatModel(**{"public": PUBLIC, **threat})  # type: ignore[arg-type]
    protocol = FedAvg(epochs=2, batch_size=2, lr=0.05) if batch_size > 2 else FedSGD()
    return membership(
        make_client(mlp(), defense, protocol),
        batch(60, seed=2),
        granted,
        rng(),
        uploads=uploads,
        batch_size=batch_size,
        scores=scores,
    )


@pytest.mark.parametrize(
    ("defense", "batch_size"),
    [
        (Defense(), 1),
        (Defense(), 4),
        (TopK(0.2), 1),
        (DPSGD(0.01), 2),
        (ClientDP(0.001), 1),
        (SecureAggregation(clients=3), 1),
    ],
    ids=lambda value: f"{value}".partition("(")[0],
)
def test_members_are_found_where_little_is_hidden(defense: Defense, batch_size: int) -> None:
    for roc in game(defense, batch_size).values():
        if isinstance(roc, ROC):
            assert roc.at(0.2).true_positive_rate.value > 0.95


def test_noise_hides_them() -> None:
    for roc in game(DPSGD(100.0), uploads=100).values():
        assert isinstance(roc, ROC)
        assert roc.auc == pytest.approx(0.5, abs=0.15)
        assert not roc.at(0.1).exceeds(replacement_bounds(100.0))


@pytest.mark.parametrize("size", [1, 3])
def test_the_likelihood_ratio_is_that_of_the_defense(size: int) -> None:
    share, sigma, model = batch(size), 2.0, mlp()
    observation = observed(model, share, DPSGD(sigma), threat=ThreatModel(public=PUBLIC))
    tested = batch(2, seed=4)
    rows = torch.randint(100, (DRAWS, size), generator=rng(3))

    def density(inputs: Tensor, targets: Tensor) -> float:
        replayed = observation.simulate(inputs, targets)
        error = sum(
            float((observation.update[name].double() - value.double()).square().sum())
            for name, value in replayed.items()
        )
        return math.exp(-error / (2 * (sigma / size) ** 2) + shift)

    shift = 0.5 * sum(value.numel() for value in observation.update.values())
    expected = []
    for x, y in zip(*tested, strict=True):
        ratio = np.zeros(2)
        for row in rows:
            inputs, targets = PUBLIC.inputs[row], PUBLIC.targets[row]
            ratio[1] += density(inputs, targets)
            ratio[0] += density(
                torch.cat([x.unsqueeze(0), inputs[1:]]), torch.cat([y.unsqueeze(0), targets[1:]])
            )
        expected.append(math.log(ratio[0] / ratio[1]))
    values = likelihood_ratio(observation, tested, rng(3))
    assert_allclose(values.numpy(), expected, atol=1e-4)


def test_the_cosine_is_with_the_examples_own_upload() -> None:
    share = batch(1)
    observation = observed(mlp(), share, threat=ThreatModel(knows_defense=False))
    values = gradient_cosine(observation, Batch(*(torch.cat([p, p]) for p in share)), rng())
    assert_allclose(values.numpy(), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("defense", "sigma"),
    [
        (DPSGD(1.5), 1.5),
        (ClientDP(2.0), 2.0),
        (Noise(0.5, max_norm=0.25), 2.0),
        (Replacing(1.0), 2.0),  # which are half the distance of its claim apart
        (Noise(1.0, max_norm=1.0, distribution="laplace"), None),
        (DPSGD(0.0), None),
        (TopK(0.1), None),
    ],
    ids=str,
)
def test_the_bound_is_that_of_the_claim(defense: Defense, sigma: float | None) -> None:
    bounds = claimed_bounds(defense)
    if sigma is None:
        assert bounds is None
    else:
        assert bounds is not None
        expected = replacement_bounds(sigma).membership(0.01)
        assert bounds.membership(0.01) == pytest.approx(expected, rel=0.01)


def test_says_what_it_cannot_score() -> None:
    meaningless = {"nonsense": lambda *_: torch.tensor([math.nan, 0.0])}
    assert "are NaN" in str(game(Defense(), uploads=20, scores=meaningless)["nonsense"])
    results = game(Defense(), uploads=20)
    assert isinstance(results["gradient cosine"], ROC)
    assert "likelihood of an upload is not known" in str(results["likelihood ratio"])
    blind = game(DPSGD(1.0), uploads=20, public=None)["likelihood ratio"]
    assert isinstance(blind, NotApplicable)
    assert "no public examples" in str(blind)


def test_is_the_same_again() -> None:
    first, second = (game(DPSGD(1.0), uploads=20) for _ in range(2))
    for name, roc in first.items():
        again = second[name]
        assert isinstance(roc, ROC)
        assert isinstance(again, ROC)
        assert np.array_equal(roc.members, again.members)
        assert np.array_equal(roc.others, again.others)


def test_rejects_bad_input() -> None:
    with pytest.raises(ValueError, match="members must have at least one score and no NaN"):
        ROC(np.array([math.nan]), np.array([0.0]))
    with pytest.raises(ValueError, match="others must have at least one score"):
        ROC(np.array([1.0]), np.array([]))
    with pytest.raises(ValueError, match="more than the 60 examples behind an upload, got 60"):
        game(Defense(), batch_size=60)
