"""What defenses claim, what that proves, and whether the noise is there."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from federated import rng
from pydantic import JsonValue
from scipy.stats import norm
from torch import Generator

from leakfrontier.defenses import (
    DPSGD,
    Chain,
    ClientDP,
    Defense,
    Guarantee,
    Noise,
    Plan,
    TopK,
    Update,
)
from leakfrontier.evaluate.foundations.rows import GuaranteeRow
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.privacy.accounting import epsilon
from leakfrontier.evaluate.privacy.bounds import Bounds
from leakfrontier.evaluate.privacy.claims import (
    Claim,
    claim_of,
    guarantee_row,
    proven_bound,
    training_plan,
)
from leakfrontier.evaluate.privacy.membership import replacement_bounds
from leakfrontier.evaluate.run.cells import AttackTrial, TrainTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training, World, load_world

SMALL = Method(name="mlp", options={"width": 16})
FEDSGD = Method(name="FedSGD")
FEDAVG = Method(name="FedAvg", options={"epochs": 2, "batch_size": 4, "lr": 0.1})


def scenario(protocol: Method = FEDSGD, batch_size: int = 1) -> Scenario:
    return Scenario(
        dataset="digits",
        model=SMALL,
        protocol=protocol,
        batch_size=batch_size,
        candidates=20,
        checkpoints=(0, 2),
        training=Training(rounds=3, clients=4, clients_per_round=2, batch_size=8),
    )


def world(protocol: Method = FEDSGD, batch_size: int = 1) -> World:
    return load_world(scenario(protocol, batch_size))


def claimed(defense: Defense) -> Claim:
    claim = claim_of(defense)
    assert claim is not None
    return claim


def row(defense: Defense, rounds: int = 3) -> GuaranteeRow:
    here = world()
    return guarantee_row(claimed(defense), here, here.model(defense, 0), rounds, generator("audit"))


@pytest.mark.parametrize(
    ("defense", "unit", "sigma"),
    [
        (DPSGD(0.5), "record", 0.5),
        (DPSGD(0.001), "record", 0.001),
        (DPSGD(30.0, max_grad_norm=0.1), "record", 30.0),
        (ClientDP(2.0, max_update_norm=5.0), "client", 2.0),
        (Noise(0.3, max_norm=0.1), "client", 3.0),
        (Chain((DPSGD(0.7), TopK(0.1))), "record", 0.7),
        (Noise(0.3, "laplace", max_norm=0.1), "client", None),
    ],
    ids=repr,
)
def test_the_noise_follows_from_the_claim(defense: Defense, unit: str, sigma: float | None) -> None:
    claim = claimed(defense)
    assert claim.unit == unit
    assert claim.noise_multiplier == (None if sigma is None else pytest.approx(sigma, rel=1e-3))


@pytest.mark.parametrize(
    "defense", [Defense(), TopK(0.1), Noise(0.5), DPSGD(0.0), ClientDP(0.0)], ids=repr
)
def test_no_claim_is_made_of_what_bounds_nothing(defense: Defense) -> None:
    assert claim_of(defense) is None


def test_a_tiny_noise_has_an_epsilon_too() -> None:
    guarantee = DPSGD(0.001).guarantee(Plan(60, 0.08, 1e-5))
    assert guarantee.epsilon == pytest.approx(epsilon(0.08, 0.001, 60, 1e-5), rel=1e-3)


def test_the_plan_is_that_of_the_busiest_client() -> None:
    records = len(world().train.targets)
    share = records // 4
    plan = training_plan(world(), "record", rounds=7)
    assert (plan.steps, plan.sample_rate) == (7, pytest.approx(8 / share))
    assert plan.delta == min(1e-5, records**-1.1)
    local = training_plan(world(FEDAVG), "record", rounds=7)
    assert local.steps == 7 * 2 * math.ceil(math.ceil(records / 4) / 4)
    assert local.sample_rate == pytest.approx(4 / share)
    client = training_plan(world(FEDAVG), "client", rounds=7)
    assert (client.steps, client.sample_rate) == (7, 1.0)


@pytest.mark.parametrize("batch_size", [8, 100, 142, 143])  # clients have 143 or 144 examples
@pytest.mark.parametrize("local", [None, {"epochs": 2}, {"steps": 3}], ids=str)
def test_a_record_is_in_as_many_shuffled_batches_as_are_counted(
    batch_size: int, local: dict[str, JsonValue] | None
) -> None:
    protocol, rounds = FEDSGD, 7
    if local is not None:
        protocol = Method(name="FedAvg", options={"batch_size": batch_size, "lr": 0.1, **local})
    training = Training(clients=10, batch_size=batch_size)
    here = load_world(scenario(protocol).model_copy(update={"training": training}))
    records = len(here.train.targets)
    assert records % 10
    most = 0
    for share in (records // 10, -(-records // 10)):
        defense = DPSGD(1.0, poisson_sampling=False)
        if local is None:  # epochs go on from round to round
            drawn = [*islice(defense.batches(share, batch_size, rounds, rng()), rounds)]
        else:
            steps = here.protocol.local_steps(share)
            drawn = [
                rows
                for seed in range(rounds)
                for rows in islice(defense.batches(share, batch_size, steps, rng(seed)), steps)
            ]
        most = max(most, int(torch.cat(drawn).bincount().max()))
    passes = training_plan(here, "record", rounds).passes
    assert passes is not None
    assert passes == most or (most < passes and local == {"steps": 3})  # drawn anew each round


def test_epsilon_is_that_of_the_accountants() -> None:
    found = row(DPSGD(1.0), rounds=50)
    rate = training_plan(world(), "record", 1).sample_rate
    assert (found.steps, found.sample_rate) == (50, rate)
    assert found.epsilon == pytest.approx(epsilon(rate, 1.0, 50, found.delta), rel=1e-3)
    assert (found.unit, found.accountant, found.adjacency) == ("record", "PLD", "zero-out")
    shuffled = row(DPSGD(1.0, poisson_sampling=False), rounds=50)
    assert (shuffled.sample_rate, shuffled.steps) == (1.0, 2)  # an epoch has 45 batches of eight
    assert shuffled.epsilon == pytest.approx(epsilon(1.0, 1.0, 2, found.delta), rel=1e-3)
    assert shuffled.violated is False


@dataclass
class TooQuiet(DPSGD):
    """Claims its noise multiplier, and adds four fifths of it."""

    def gradient(self, *arguments: object) -> Update:  # type: ignore[override]
        noisy = DPSGD(0.8 * self.noise_multiplier, self.max_grad_norm)
        noisy._batch_size = self._batch_size
        return noisy.gradient(*arguments)  # type: ignore[arg-type]


@dataclass
class Forgetful(DPSGD):
    """Claims of any number of steps what holds for one."""

    def guarantee(self, plan: Plan) -> Guarantee:
        return super().guarantee(replace(plan, steps=1))


@dataclass
class Untestable(ClientDP):
    """Cannot be audited: it knows the names of one model."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        if "canary.weight" in update:
            raise KeyError("3.weight")
        return super().on_update(update, rng)


def test_noise_that_is_there_is_measured() -> None:
    for found in (row(DPSGD(0.5)), row(ClientDP(2.0)), row(Chain((DPSGD(0.5), TopK(0.1))))):
        assert found.violated is False
        assert found.measured_noise == pytest.approx(found.noise_multiplier, rel=0.05)
        assert found.audited_epsilon is not None
        assert 0.8 * found.epsilon < found.audited_epsilon <= 1.001 * found.epsilon


def share_of_noise(found: GuaranteeRow) -> float:
    """Return the share of the noise that is there, as a finding of too little of it says."""
    words = r"violated: the noise is (\d\.\d{3}) of what the claim needs \(p = .+\)"
    match = re.fullmatch(words, found.finding)
    assert match, found.finding
    return float(match[1])


def test_noise_that_is_not_there_is_noticed() -> None:
    found = row(TooQuiet(1.0))
    assert found.violated
    assert found.measured_noise == pytest.approx(0.8, rel=0.05)
    assert found.audited_epsilon is not None
    assert found.audited_epsilon > found.epsilon
    assert share_of_noise(found) == pytest.approx(0.8, rel=0.01)


def test_noise_that_does_not_add_up_to_the_claim_is_noticed() -> None:
    found = row(Forgetful(1.0), rounds=50)
    assert found.violated
    assert found.measured_noise == pytest.approx(1.0, rel=0.05)
    assert found.audited_epsilon is not None
    assert found.audited_epsilon > found.epsilon
    needed = found.measured_noise / share_of_noise(found)
    over_all = epsilon(found.sample_rate, needed, 50, found.delta)
    assert over_all == pytest.approx(found.epsilon, rel=0.05)
    assert row(Forgetful(1.0), rounds=1).violated is False


@pytest.mark.parametrize(
    ("defense", "reason"),
    [
        (Noise(0.3, "laplace", max_norm=0.1), "not audited: the noise is not Gaussian"),
        (Untestable(1.0), "not audited: KeyError: '3.weight'"),
    ],
    ids=["laplace", "fails"],
)
def test_an_audit_that_cannot_be_made_is_not_one_that_passed(defense: Defense, reason: str) -> None:
    found = row(defense)
    assert (found.finding, found.violated, found.audited_epsilon) == (reason, None, None)
    assert found.epsilon < math.inf


def test_the_bound_is_for_what_the_upload_is_made_of() -> None:
    def gamma(prior: float, mu: float) -> float:
        return float(norm.cdf(norm.ppf(prior) + mu))

    private, client = claimed(DPSGD(2.0)), claimed(ClientDP(2.0))
    assert proven_bound(private, world(), 0)(0.1) == pytest.approx(gamma(0.1, 0.5), rel=1e-3)
    # Eight examples in steps of four, twice over: four noisy steps, or one noisy upload.
    several = world(FEDAVG, batch_size=8)
    assert proven_bound(private, several, 0)(0.1) == pytest.approx(gamma(0.1, 1.0), rel=1e-3)
    assert proven_bound(client, several, 0)(0.1) == pytest.approx(gamma(0.1, 0.5), rel=1e-3)


@pytest.mark.parametrize(
    "defense", [DPSGD(0.5), DPSGD(50.0), ClientDP(2.0), Noise(0.3, "laplace", max_norm=0.1)]
)
@pytest.mark.parametrize("checkpoint", [0, 2])
def test_no_bound_is_below_the_blind_guess(defense: Defense, checkpoint: int) -> None:
    bound = proven_bound(claimed(defense), world(), checkpoint)
    for prior in (1e-6, 0.01, 0.5, 1.0):
        assert prior <= bound(prior) <= 1
    for impossible in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"success of a blind guess must be in \(0, 1\]"):
            bound(impossible)


def test_a_bound_below_the_blind_guess_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounds, "reconstruction", lambda self, prior: prior / 2)
    with pytest.raises(ValueError, match="is below the blind guess"):
        proven_bound(claimed(DPSGD(1.0)), world(), 0)(0.01)


SILENT = """
from dataclasses import dataclass
from leakfrontier.adversaries import PriorGuess, Reconstruction

@dataclass(frozen=True)
class Silent(PriorGuess):
    def reconstruct(self, observation, rng):
        return Reconstruction(super().reconstruct(observation, rng).inputs[:0])
"""


def test_an_attack_that_finds_nothing_has_the_bound_of_a_guess(tmp_path: Path) -> None:
    private = Method(name="DPSGD", options={"noise_multiplier": 1.0})
    (tmp_path / "silent.py").write_text(SILENT)
    rows = attack(private, adversary=f"{tmp_path / 'silent.py'}:Silent").run(tmp_path).attacks
    assert [r.bound for r in rows] == [pytest.approx(norm.cdf(norm.ppf(1 / 20) + 1), rel=1e-3)] * 2


def test_a_trained_model_may_know_the_victim() -> None:
    for defense in (DPSGD(2.0), ClientDP(2.0), Noise(0.3, "laplace", max_norm=0.1)):
        claim = claimed(defense)
        fresh, trained = (proven_bound(claim, world(), at)(0.05) for at in (0, 2))
        assert 0.05 < fresh < trained < 1
    everywhere = proven_bound(claimed(ClientDP(2.0)), world(), 2)(0.05)
    assert everywhere == pytest.approx(norm.cdf(norm.ppf(0.05) + math.sqrt(3) / 2), rel=1e-3)


def test_epsilon_alone_bounds_what_is_not_gaussian() -> None:
    defense = Noise(0.3, "laplace", max_norm=0.1)
    bound = proven_bound(claimed(defense), world(), 0)
    guarantee = defense.guarantee(Plan(1, 1.0, 1e-3))
    assert guarantee is not None
    assert bound(0.05) <= math.exp(guarantee.epsilon) * 0.05 + 1e-3
    assert bound(0.9) == 1.0


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_opposite_candidates_reach_the_bound_and_do_not_exceed_it(sigma: float) -> None:
    """Replacement is twice as far as removal; the bound on choosing among candidates knows."""
    bound = proven_bound(claimed(DPSGD(sigma)), world(), 0)
    # Gradients C and -C: the sign of the upload tells which, unless noise turns it.
    assert bound(1 / 2) == pytest.approx(norm.cdf(1 / sigma), rel=1e-3)
    assert replacement_bounds(sigma).membership(1 / 2) > bound(
        1 / 2
    )  # a null hypothesis among the candidates: further apart
    draws = np.random.default_rng(0).standard_normal((200_000, 8))
    draws[:, 0] += 1 / sigma  # eight orthogonal candidates, the first is the victim
    assert bound(1 / 8) > (draws.argmax(axis=1) == 0).mean()


def attack(defense: Method, batch_size: int = 1, adversary: str = "LinearLeakage") -> AttackTrial:
    return AttackTrial(
        scenario(batch_size=batch_size),
        defense,
        Method(name=adversary),
        knows_defense=True,
        seed=0,
        checkpoint=0,
        observations=(0, 1),
    )


def test_every_attack_row_has_its_bound(tmp_path: Path) -> None:
    private = Method(name="DPSGD", options={"noise_multiplier": 1.0})
    one = attack(private, adversary="PriorAware").run(tmp_path).attacks
    assert [r.bound for r in one] == [pytest.approx(norm.cdf(norm.ppf(1 / 20) + 1), rel=1e-3)] * 2
    # Each of three guesses may be the one that is matched to a victim.
    three = attack(private, 3, adversary="PriorGuess").run(tmp_path).attacks
    assert [r.bound for r in three] == [pytest.approx(norm.cdf(norm.ppf(3 / 20) + 1), rel=1e-3)] * 6
    undefended = attack(Method(name="none")).run(tmp_path).attacks
    assert [r.bound for r in undefended] == [None, None]


def test_training_records_the_claim_of_its_busiest_client(tmp_path: Path) -> None:
    private = Method(name="DPSGD", options={"noise_multiplier": 1.0})
    (found,) = TrainTrial(scenario(), private, seed=0).run(tmp_path).guarantees
    assert found.steps in (2, 3)  # three rounds of two out of four clients
    assert found.violated is False
    assert TrainTrial(scenario(), Method(name="none"), seed=0).run(tmp_path).guarantees == ()
