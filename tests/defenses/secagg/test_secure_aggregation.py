import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federated import batch, make_client, mlp, rng
from scipy.stats import chisquare
from small_panel import OF_GRADIENTS, attacked
from torch import Tensor
from torch.func import vmap

from leakfrontier.adversaries import FedSGD, Observation
from leakfrontier.defenses import Chain, ClientDP, Plan, Refused, TopK, Update
from leakfrontier.defenses.secagg.secure_aggregation import SecureAggregation
from leakfrontier.evaluate.client.client import ThreatModel, observe
from leakfrontier.evaluate.foundations.statistics import clopper_pearson
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario


def updates(count: int, seed: int = 0, scale: float = 1.0) -> list[Update]:
    draws = rng(seed)
    return [
        {
            "weight": scale * torch.randn(20, 50, generator=draws),
            "bias": scale * torch.randn(20, generator=draws),
        }
        for _ in range(count)
    ]


def flat(update: Update) -> Tensor:
    return torch.cat([value.flatten() for value in update.values()]).double()


def total(updates: list[Update]) -> Tensor:
    return torch.stack([flat(update) for update in updates]).sum(dim=0)


def observations(defense: SecureAggregation, clients: int) -> list[Observation]:
    shares = [batch(2, seed) for seed in range(clients)]
    threat = ThreatModel(knows_targets=True)
    uploads = observe(make_client(mlp(), defense), shares, threat, rng(1))
    return [upload.observation for upload in uploads]


@pytest.mark.parametrize("neighbours", [None, 4])
@pytest.mark.parametrize("count", [2, 5, 8, 12])
def test_releases_the_sum_alone_whose_mean_is_within_a_step(
    count: int, neighbours: int | None
) -> None:
    defense, given = SecureAggregation(count, bits=12, neighbours=neighbours), updates(count)
    (released,) = defense.on_round(given, rng(1))
    assert {name: value.shape for name, value in released.items()} == {
        "weight": (20, 50),
        "bias": (20,),
    }
    assert released["weight"].dtype == torch.float32
    error = (flat(released) - total(given)).abs().max() / count
    assert 0 < error <= defense.step


def test_the_default_step_is_fine() -> None:
    assert SecureAggregation().step == pytest.approx(3.8e-6, rel=0.01)


def test_rounding_is_unbiased() -> None:
    defense = SecureAggregation(bits=3, clipping_range=1.0)  # steps of 2 / 6
    value = torch.linspace(-1, 1, 41)
    many = [{"w": value.repeat(250)}] * 8
    (released,) = defense.on_round(many, rng(2))
    means = released["w"].view(250, 41).mean(dim=0) / 8
    assert (means - value).abs().max() < 4.5 * defense.step / 2 / math.sqrt(2000)
    torch.testing.assert_close(means[[0, -1]], value[[0, -1]])  # the ends are levels


def test_zeros_stay_zeros() -> None:
    given = [{"w": torch.tensor([0.0, 0.3, 0.0])}, {"w": torch.tensor([0.0, -0.1, 0.2])}]
    (released,) = SecureAggregation(2).on_round(given, rng())
    assert (released["w"] != 0).tolist() == [False, True, True]


def test_entries_beyond_the_range_are_not_cut_off() -> None:
    given = [{"w": torch.tensor([100.0, -100.0, 0.5])}] * 2
    (released,) = SecureAggregation(2, clipping_range=2.0).on_round(given, rng())
    expected = torch.tensor([200.0, -200.0, 1.0])
    torch.testing.assert_close(released["w"], expected, rtol=0, atol=2e-5)


def test_noise_that_was_added_before_is_all_in_the_mean() -> None:
    defense, draws = Chain((ClientDP(20.0, 1.0), SecureAggregation(4))), rng(7)
    given = [defense.on_update({"w": torch.zeros(10_000)}, draws) for _ in range(4)]
    (released,) = defense.on_round(given, draws)
    assert float(released["w"].std() / 4) == pytest.approx(10, rel=0.03)
    torch.testing.assert_close(flat(released), total(given), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("clients", "room"), [(2, 4096.0), (8, 1024.0), (1000, 8.19)])
def test_an_entry_without_room_in_the_ring_is_refused(clients: int, room: float) -> None:
    defense = SecureAggregation(clients, neighbours=None if clients < 9 else 4)
    for sign in (1, -1):
        fits, too_large = (
            [{"w": torch.tensor([sign * factor * room, 0.0])}] * clients for factor in (0.99, 1.01)
        )
        (released,) = defense.on_round(fits, rng())
        expected = torch.tensor([sign * 0.99 * room * clients, 0.0])
        torch.testing.assert_close(released["w"], expected, rtol=1e-5, atol=0)
        with pytest.raises(Refused, match=r"does not fit the ring.*use a larger clipping_range"):
            defense.on_round(too_large, rng())


@pytest.mark.parametrize("bits", [2, 8, 22, 31, 32])
def test_the_largest_sum_fits_the_ring(bits: int) -> None:
    given = [{"w": torch.tensor([8.0, -8.0])}] * 8
    (released,) = SecureAggregation(bits=bits).on_round(given, rng())
    torch.testing.assert_close(released["w"], torch.tensor([64.0, -64.0]))


@pytest.mark.parametrize("count", [1, 3])
def test_without_aggregation_clients_upload_as_if_undefended(count: int) -> None:
    given = updates(count, scale=100)
    released = SecureAggregation(clients=1).on_round(given, rng())
    assert all(torch.equal(flat(a), flat(b)) for a, b in zip(released, given, strict=True))


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 6),
        ({"threshold": 5}, 5),
        ({"clients": 2}, 2),
        ({"clients": 30, "neighbours": 8}, 21),
        ({"clients": 100, "neighbours": 2}, 67),
        ({"clients": 20, "neighbours": 4, "threshold": 3}, 12),
    ],
    ids=str,
)
def test_a_round_below_the_threshold_is_refused(options: dict[str, int], least: int) -> None:
    defense = SecureAggregation(**options)  # type: ignore[arg-type]
    for count in range(least):
        with pytest.raises(Refused, match=f"at least {least} clients are needed"):
            defense.on_round(updates(count), rng())
    assert len(defense.on_round(updates(least), rng())) == 1


@pytest.mark.parametrize("count", [8, 9, 11])
def test_what_lost_clients_leave_is_scaled_up_to_all(count: int) -> None:
    defense, given = SecureAggregation(dropout=0.25), updates(count)
    view = defense.server_view(given, rng(3))
    survivors = sorted(view.masked)
    assert len(survivors) == count - count // 4
    (released,) = defense.on_round(given, rng(3))
    expected = total([given[u] for u in survivors]) * count / len(survivors)
    torch.testing.assert_close(flat(released), expected, rtol=0, atol=2 * count * defense.step)


def test_lost_clients_are_drawn_anew_in_every_round() -> None:
    defense, given = SecureAggregation(clients=4, dropout=0.25), updates(4)
    draws = rng(0)
    seen = [set(defense.server_view(given, draws).masked) for _ in range(20)]
    assert all(len(survivors) == 3 for survivors in seen)
    assert not set.intersection(*seen)


def test_a_neighbourhood_that_loses_too_many_is_refused() -> None:
    with pytest.raises(Refused, match="nothing is unmasked"):
        SecureAggregation(30, dropout=0.3, neighbours=4).on_round(updates(30), rng())


@pytest.mark.parametrize("threshold", [None, 5, 6, 8])
def test_the_threshold_stays_above_half_in_larger_rounds(threshold: int | None) -> None:
    defense = SecureAggregation(8, threshold=threshold)
    for count in range(8, 25):
        assert 2 * defense._threshold(count) > count
        assert len(defense.on_round(updates(count), rng())) == 1


def test_thirty_clients_with_eight_neighbours() -> None:
    defense, given = SecureAggregation(30, neighbours=8, dropout=0.05), updates(30)
    view = defense.server_view(given, rng(4))
    (released,) = defense.on_round(given, rng(4))
    assert len(view.masked) == 29
    expected = total([given[u] for u in view.masked]) * 30 / 29
    torch.testing.assert_close(flat(released), expected, rtol=0, atol=60 * defense.step)


def test_a_masked_upload_is_uniform_and_tells_nothing_of_the_update() -> None:
    draws = rng(5)
    given = [{"w": 0.01 * torch.randn(100_000, generator=draws)} for _ in range(3)]
    defense = SecureAggregation(3)
    view = defense.server_view(given, rng(6))
    for u, masked in view.masked.items():
        counts = np.bincount(masked.view(np.uint8), minlength=256)
        assert chisquare(counts).pvalue > 1e-6
        truth = given[u]["w"].numpy()
        assert abs(np.corrcoef(masked.astype(float), truth)[0, 1]) < 4 / math.sqrt(truth.size)
    # The sum does tell of the updates, by the same measure.
    assert np.corrcoef(view.total.astype(float), total(given))[0, 1] > 0.99


def test_the_same_seed_gives_the_same_messages() -> None:
    defense, given = SecureAggregation(4, dropout=0.25), updates(4)
    one, same, other = (defense.server_view(given, rng(seed)) for seed in (0, 0, 1))
    for u, masked in one.masked.items():
        np.testing.assert_array_equal(masked, same.masked[u])
    np.testing.assert_array_equal(one.total, same.total)
    assert not np.array_equal(one.total, other.total)


def test_the_server_sees_one_upload_of_all_clients() -> None:
    (observation,) = observations(SecureAggregation(4), 4)
    assert observation.protocol == FedSGD(clients=4)
    assert observation.batch_size == 8
    assert len(observations(SecureAggregation(1), 4)) == 4


def test_replay_is_the_sum_and_differentiable_under_vmap() -> None:
    defense = SecureAggregation(4)
    (observation,) = observations(defense, 4)
    truth = torch.cat([batch(2, seed).inputs for seed in range(4)]).requires_grad_()
    targets = torch.cat([batch(2, seed).targets for seed in range(4)])
    replayed = observation.replay(truth, targets, observation.update)
    for name, value in observation.update.items():
        torch.testing.assert_close(replayed[name], value, rtol=1e-5, atol=4 * defense.step)
    (slope,) = torch.autograd.grad(sum(v.square().sum() for v in replayed.values()), truth)
    assert (slope.flatten(1).abs().sum(dim=1) > 0).all()

    guesses = torch.stack([truth.detach(), truth.detach().flip(0)])
    many = vmap(lambda guess: observation.replay(guess, targets, observation.update))(guesses)
    for name, value in replayed.items():
        torch.testing.assert_close(many[name][0], value, rtol=1e-4, atol=1e-6)


def test_leaves_the_updates_alone() -> None:
    given = updates(3)
    before = [{name: value.clone() for name, value in update.items()} for update in given]
    SecureAggregation(3).on_round(given, rng())
    assert all(torch.equal(flat(a), flat(b)) for a, b in zip(given, before, strict=True))


def test_is_described_by_its_clients_and_claims_no_differential_privacy() -> None:
    defense = SecureAggregation(16)
    assert (defense.cohort, defense.strength, defense.stochastic) == (16, 16, True)
    assert not SecureAggregation(1).stochastic
    assert defense.guarantee(Plan(1, 1.0, 1e-5)) is None
    assert defense.log_likelihood({}, {}) is None
    assert replace(defense) == defense


def test_clients_that_compare_refuse_models_that_differ_in_one_bit() -> None:
    models, shares = [mlp(4) for _ in range(4)], [batch(1, seed) for seed in range(4)]
    comparing = SecureAggregation(4, compare_models=True)
    with torch.no_grad():
        models[2][1].bias[0].nextafter_(torch.tensor(9.0))
    for defense in (comparing, Chain((TopK(1.0), comparing))):
        client = make_client(models[0], defense)
        with pytest.raises(Refused, match=r"2 .*were sent different models|and 2 were sent"):
            observe(client, shares, ThreatModel(), rng(), models=models)
        observe(client, shares, ThreatModel(), rng(), models=[models[2]] * 4)
    trusting = make_client(models[0], SecureAggregation(4))
    assert len(observe(trusting, shares, ThreatModel(), rng(), models=models)) == 1


def test_comparing_changes_nothing_else() -> None:
    one, other = (
        observations(SecureAggregation(4, compare_models=compare), 4)[0].update
        for compare in (False, True)
    )
    assert torch.equal(flat(one), flat(other))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rejects_updates_that_are_not_finite(value: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        SecureAggregation(2).on_round([{"w": torch.tensor([value])}] * 2, rng())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients must be at least 1, got 0"),
        ({"clients": math.nan}, "clients must be"),
        ({"threshold": 1}, r"threshold must be in \[5, 8\], got 1"),
        ({"threshold": 4}, r"threshold must be in \[5, 8\], got 4"),
        ({"threshold": 9}, r"threshold must be in \[5, 8\], got 9"),
        ({"threshold": 3, "clients": 9}, r"threshold must be in \[5, 9\], got 3: .*unmask"),
        ({"threshold": 4, "clients": 9}, r"threshold must be in \[5, 9\], got 4"),
        ({"threshold": 6, "neighbours": 4}, r"threshold must be in \[3, 5\], got 6"),
        ({"threshold": 2, "neighbours": 4}, r"threshold must be in \[3, 5\], got 2"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": math.nan}, "dropout"),
        ({"dropout": 0.5}, "dropout must leave at least the threshold of 6 clients, got 0.5"),
        (
            {"dropout": 0.4, "clients": 30, "neighbours": 20},
            "dropout must leave at least the threshold of 21 clients, got 0.4, which leaves 18",
        ),
        ({"clipping_range": 0}, "clipping_range must be positive and finite"),
        ({"clipping_range": math.inf}, "clipping_range"),
        ({"clipping_range": math.nan}, "clipping_range"),
        ({"bits": 1}, r"bits must be in \[2, 32\]"),
        ({"bits": 33}, "bits"),
        ({"neighbours": 3}, "neighbours must be even and at least 2, got 3"),
        ({"neighbours": 0}, "neighbours"),
    ],
)
def test_rejects_bad_parameters(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SecureAggregation(**options)  # type: ignore[arg-type]


MASKED_UPLOAD = """
from dataclasses import dataclass
import torch
from leakfrontier.defenses import Defense, SecureAggregation
from leakfrontier.defenses.vector import unflatten

@dataclass
class MaskedUpload(Defense):
    '''What the server holds of one client before unmasking, read as real numbers.'''

    def on_update(self, update, rng):
        other = {name: torch.zeros_like(value) for name, value in update.items()}
        masked = SecureAggregation(2).server_view([update, other], rng).masked[0]
        reals = torch.from_numpy(masked.astype("float64") / 2**32 - 0.5).float()
        return unflatten(reals, like=update)

    def replay(self, observed):
        return Defense()  # a mask is secret
"""


@pytest.mark.parametrize("adversary", OF_GRADIENTS.values(), ids=OF_GRADIENTS)
def test_a_single_masked_upload_gives_the_panel_the_prior_rate(
    adversary: Method, tmp_path: Path
) -> None:
    file = tmp_path / "masked.py"
    file.write_text(MASKED_UPLOAD)
    model = Method(name="mlp", options={"width": 64})
    if adversary.name == "LearningToInvert":
        model = Method(name="lenet")  # from few uploads of a perceptron it learns little
    scenario = Scenario(dataset="digits", model=model)
    for name, leaks in (("none", True), (f"{file}:MaskedUpload", False)):
        rows = attacked(scenario, Method(name=name), adversary, uploads=20)
        interval = clopper_pearson(sum(bool(row.identified) for row in rows), 20)
        assert (interval.low > 0.5) == leaks, (name, interval)
        assert leaks or interval.low <= 1 / 100
