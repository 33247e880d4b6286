"""A malicious server sends each client another model, and what clients can do about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import toy_imprint
from federated import SPACE, batch, make_client, mlp, psnr, rng
from toy_imprint import Inspecting, ToyImprint

from leakfrontier.adversaries import NotApplicable, PublicData, Round
from leakfrontier.defenses import Batch, Refused, SecureAggregation
from leakfrontier.evaluate.client.client import ThreatModel, Upload, observe
from leakfrontier.evaluate.foundations.rows import Outcome
from leakfrontier.evaluate.run.cells import AttackTrial, TrainTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training

CLIENTS = 4
SUMMED = Method(name="SecureAggregation", options={"clients": CLIENTS})
IMPRINT = Method(name=f"{toy_imprint.__file__}:ToyImprint")
SHARED = Method(name=IMPRINT.name, options={"own_blocks": False})
INSPECTING = Method(name="toy_imprint:Inspecting")
SCENARIO = Scenario(
    dataset="digits",
    model=Method(name="mlp", options={"width": 4 * CLIENTS}),
    candidates=20,
    training=Training(rounds=3, clients=CLIENTS, clients_per_round=2, batch_size=8),
)


def attacked(attack: ToyImprint, shares: list[Batch]) -> Upload:
    """Return what the server sees of the sum of the clients, having crafted their models."""
    client = make_client(mlp(4 * CLIENTS), SecureAggregation(clients=CLIENTS))
    public = PublicData(*batch(200, seed=9))
    known = Round(SPACE, client.protocol, CLIENTS, len(shares[0].inputs), public)
    models = attack.craft(client.model, known, rng()).models
    assert len(models) == CLIENTS
    (upload,) = observe(client, shares, ThreatModel(), rng(1), models=models)
    return upload


def run(defense: Method, adversary: Method, observations: int = 5) -> Outcome:
    trial = AttackTrial(
        SCENARIO,
        defense,
        adversary,
        knows_defense=True,
        seed=0,
        checkpoint=0,
        observations=tuple(range(observations)),
    )
    return trial.run(Path())


def scores(outcome: Outcome) -> list[float]:
    return [score.value for score in outcome.scores if score.metric == "psnr"]


def test_a_sum_of_four_different_models_gives_away_all_four_clients() -> None:
    shares = [batch(1, seed) for seed in range(CLIENTS)]
    upload = attacked(ToyImprint(), shares)
    assert upload.observation.protocol.clients == CLIENTS
    assert len(set(upload.observation.models)) == CLIENTS
    guess = ToyImprint().reconstruct(upload.observation, rng())
    assert len(guess.inputs) == CLIENTS
    assert psnr(guess, upload.truth.inputs).min() > 40


def test_a_sum_of_one_model_does_not() -> None:
    shares = [batch(1, seed) for seed in range(CLIENTS)]
    shared = ToyImprint(own_blocks=False)
    upload = attacked(shared, shares)
    guess = shared.reconstruct(upload.observation, rng())
    assert psnr(guess, upload.truth.inputs).min() < 20  # some are in the same bin


def test_a_replay_is_of_all_the_models() -> None:
    upload = attacked(ToyImprint(), [batch(1, seed) for seed in range(CLIENTS)])
    replayed = upload.observation.simulate(*upload.truth)
    for name, value in upload.observation.update.items():
        torch.testing.assert_close(replayed[name], value, rtol=1e-3, atol=1e-4)


def test_without_aggregation_each_observation_has_its_own_model_and_replay() -> None:
    models, shares = [mlp(8), mlp(8)], [batch(2), batch(2, 1)]
    with torch.no_grad():
        next(models[1].parameters()).mul_(2)
    uploads = observe(make_client(models[0]), shares, ThreatModel(), rng(), models=models)
    for upload, model in zip(uploads, models, strict=True):
        assert upload.observation.models == (model,)
        replayed = upload.observation.simulate(*upload.truth)
        torch.testing.assert_close(replayed, upload.observation.update)


def test_the_harness_sends_each_client_its_model() -> None:
    assert min(scores(run(SUMMED, IMPRINT))) > 40
    assert min(scores(run(SUMMED, SHARED))) < 20


def test_a_client_that_inspects_refuses_and_the_rows_say_why() -> None:
    defense = Method(name="Chain", links=(SUMMED, INSPECTING))
    outcome = run(defense, IMPRINT)
    assert [(row.outcome, row.reason) for row in outcome.attacks] == [
        ("refused", "rows of the first layer are the same")
    ] * 5
    assert all(row.identified is None for row in outcome.attacks)
    assert not outcome.scores
    assert not outcome.renderings
    honest = run(defense, Method(name="PriorGuess"))
    assert {row.outcome for row in honest.attacks} == {"scored"}


def test_what_cannot_be_crafted_is_not_applicable() -> None:
    blind = SCENARIO.model_copy(update={"public_data": False})
    trial = AttackTrial(blind, SUMMED, IMPRINT, True, 0, 0, observations=(0,))
    (row,) = trial.run(Path()).attacks
    assert (row.outcome, row.reason) == (
        "not applicable",
        "no public data to take quantiles of",
    )
    with pytest.raises(NotApplicable):
        ToyImprint().craft(mlp(), Round(SPACE, make_client(mlp()).protocol, 1, 1), rng())


def test_an_architecture_is_agreed_on_then_crafted_then_inspected() -> None:
    toy_imprint.CALLS.clear()
    run(INSPECTING, Method(name="toy_imprint:ToyImprint"), observations=1)
    assert toy_imprint.CALLS == ["on_model", "craft", "on_receive"]


def test_dpsgd_refuses_a_crafted_architecture_with_batch_norm() -> None:
    private = Method(name="DPSGD", options={"noise_multiplier": 1.0})
    for row in run(private, Method(name="toy_imprint:Normalising")).attacks:
        assert row.outcome == "refused"
        assert row.reason is not None
        assert "BatchNorm" in row.reason
    undefended = run(Method(name="none"), Method(name="toy_imprint:Normalising"))
    assert {row.outcome for row in undefended.attacks} == {"scored"}


@pytest.mark.parametrize(("tolerance", "refused"), [(0.0, [0, 0, 0, 0]), (100.0, [0, 2, 4, 6])])
def test_training_counts_false_alarms(tolerance: float, refused: list[int], tmp_path: Path) -> None:
    defense = Method(name=INSPECTING.name, options={"tolerance": tolerance})
    rows = TrainTrial(SCENARIO, defense, seed=0).run(tmp_path).utility
    assert [row.refused for row in rows] == refused
    learned = len({row.loss for row in rows}) > 1
    assert learned == (tolerance == 0)  # nobody takes part


def test_a_wrong_number_of_models_is_named() -> None:
    with pytest.raises(ValueError, match="craft must return a model for each of 1 clients, got 3"):
        run(Method(name="none"), Method(name="toy_imprint:Generous"))


def test_an_inspecting_client_accepts_an_honest_model() -> None:
    model = mlp()
    assert Inspecting().on_receive(model, model) is model
    with pytest.raises(Refused):
        Inspecting(tolerance=100.0).on_receive(model, model)
