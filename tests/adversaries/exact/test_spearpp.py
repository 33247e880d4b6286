from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federated import batch, deep, make_client, mlp, observed, psnr, rng
from torch import nn

from leakfrontier.adversaries import FedAvg, NotApplicable, SPEARPlusPlus
from leakfrontier.defenses import DPSGD, Batch, SecureAggregation
from leakfrontier.evaluate.client.client import ThreatModel, Upload, observe
from leakfrontier.evaluate.run.cells import AttackTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

PLAIN = SPEARPlusPlus(
    loss="l1", optimizer="scalar-adam", starts="uniform", steps=500, initialisations=1000
)


def wide(width: int = 200) -> nn.Module:
    return mlp(width)


@pytest.mark.parametrize("size", [1, 2, 20, 30])
def test_recovers_a_batch_exactly(size: int) -> None:
    truth = batch(size)
    guess = SPEARPlusPlus().reconstruct(observed(wide(), truth), rng())
    assert len(guess.inputs) == size
    assert psnr(guess, truth.inputs).min() > 90
    assert guess.confidence is not None
    assert guess.confidence.min() > 0.99
    assert guess.layer is None


@pytest.mark.parametrize(
    "attack",
    [
        PLAIN,
        replace(PLAIN, optimizer="pgd"),
        replace(PLAIN, optimizer="geoopt", initialisations=200),
        replace(PLAIN, loss="log-cosh"),
        SPEARPlusPlus(loss="l1", steps=300),
    ],
    ids=repr,
)
def test_the_papers_own_procedures_recover_small_batches(attack: SPEARPlusPlus) -> None:
    truth = batch(10)
    guess = attack.reconstruct(observed(wide(400), truth), rng())
    assert len(guess.inputs) == 10
    assert psnr(guess, truth.inputs).min() > 90


def test_deflation_needs_far_fewer_starts_than_random_ones_do() -> None:
    truth = batch(30)
    observation = observed(wide(400), truth)
    ours = SPEARPlusPlus(initialisations=600).reconstruct(observation, rng())
    plain = replace(PLAIN, initialisations=600).reconstruct(observation, rng())
    assert psnr(ours, truth.inputs).min() > 90
    assert len(plain.inputs) < 30


def test_an_incomplete_recovery_returns_a_part_and_says_how_well_it_fits() -> None:
    truth = batch(60)
    guess = SPEARPlusPlus(initialisations=200).reconstruct(observed(wide(), truth), rng())
    assert 0 <= len(guess.inputs) < 60
    assert guess.objective is not None
    assert guess.objective > 0.01
    assert guess.confidence is not None
    assert len(guess.confidence) == len(guess.inputs)


def test_a_bias_gradient_that_does_not_belong_costs_all_confidence() -> None:
    truth = batch(20)
    observation = observed(wide(), truth)
    update = dict(observation.update)
    update["1.bias"] = update["1.bias"][torch.randperm(200, generator=rng())]
    wrong = SPEARPlusPlus(patience=2).reconstruct(replace(observation, update=update), rng())
    assert wrong.confidence is not None
    assert wrong.confidence.max() < 0.5


def test_noise_without_examples_in_it_is_not_recovered_with_confidence() -> None:
    observation = observed(wide(), batch(10))
    draws = rng(5)
    update = {
        name: torch.randn(value.shape, generator=draws)
        for name, value in observation.update.items()
    }
    guess = SPEARPlusPlus(patience=2).reconstruct(replace(observation, update=update), rng())
    assert guess.confidence is not None
    assert not len(guess.confidence) or guess.confidence.max() < 0.9


def test_recovers_a_batch_under_clipping_and_weak_noise() -> None:
    truth, model = batch(10), wide()
    noise = 1e-4 * 10 / 2  # a standard deviation of 1e-4 for the mean of ten examples
    defense = DPSGD(noise_multiplier=noise, max_grad_norm=2, poisson_sampling=False)
    guess = SPEARPlusPlus().reconstruct(observed(model, truth, defense), rng())
    assert psnr(guess, truth.inputs).mean() > 25
    assert guess.confidence is not None
    assert guess.confidence.min() > 0.8


def test_noise_in_a_narrow_layer_is_no_obstacle_to_an_answer() -> None:
    observation = observed(mlp(8), batch(4))
    draws = rng(5)
    update = {
        name: 1e6 * torch.randn(value.shape, generator=draws)
        for name, value in observation.update.items()
    }
    guess = SPEARPlusPlus(patience=2).reconstruct(replace(observation, update=update), rng())
    assert guess.inputs.isfinite().all()
    assert guess.confidence is not None
    assert not len(guess.confidence) or guess.confidence.max() < 0.9


def test_strong_noise_is_not_broken() -> None:
    truth = batch(10)
    defense = DPSGD(noise_multiplier=1.0, max_grad_norm=1, poisson_sampling=False)
    guess = SPEARPlusPlus(patience=2).reconstruct(observed(wide(), truth, defense), rng())
    assert not len(guess.inputs) or psnr(guess, truth.inputs).mean() < 15


def test_recovers_a_batch_from_the_change_of_weights_over_epochs() -> None:
    truth = batch(20)
    protocol = FedAvg(epochs=3, batch_size=5, lr=0.01)
    guess = SPEARPlusPlus().reconstruct(observed(wide(), truth, protocol=protocol), rng())
    assert psnr(guess, truth.inputs).min() > 60


def test_recovers_the_features_before_a_deeper_layer() -> None:
    truth, model = batch(6), deep(nn.ReLU())
    guess = SPEARPlusPlus(layer="3").reconstruct(observed(model, truth), rng())
    assert guess.layer == "3"
    features = model[:3](truth.inputs)  # type: ignore[index]
    nearest = torch.cdist(features, guess.inputs).amin(1)
    torch.testing.assert_close(nearest, torch.zeros_like(nearest), rtol=0, atol=1e-3)


def test_a_run_records_why_a_layer_cannot_be_attacked(tmp_path: Path) -> None:
    scenario = Scenario(
        dataset="digits",
        model=Method(name="mlp", options={"width": 100}),
        candidates=20,
    )
    expected = [
        ({}, None),
        ({"layer": "missing"}, "no linear layer 'missing'"),
        ({"layer": "3"}, "recovered features, the inputs of layer '3'"),
    ]
    for options, reason in expected:
        adversary = Method(name="SPEARPlusPlus", options=options)
        trial = AttackTrial(
            scenario,
            Method(name="none"),
            adversary,
            True,
            seed=0,
            checkpoint=0,
            observations=(0, 1),
        )
        rows = trial.run(tmp_path).attacks
        assert all((row.reason is None) == (reason is None) for row in rows)
        assert reason is None or all(reason in str(row.reason) for row in rows)


def test_secure_aggregation_is_broken_below_the_width_and_not_above() -> None:
    model, shares = wide(), [batch(5, seed) for seed in range(4)]
    attack = SPEARPlusPlus()

    def upload(group: list[Batch]) -> Upload:
        together = SecureAggregation(clients=len(group))
        threat = ThreatModel()
        (seen,) = observe(make_client(model, together), group, threat, rng(1))
        return seen

    broken = upload(shares)
    guess = attack.reconstruct(broken.observation, rng())
    assert psnr(guess, broken.truth.inputs).mean() > 25
    safe = upload([batch(50, seed) for seed in range(4)])
    with pytest.raises(NotApplicable, match="200 examples"):
        attack.reconstruct(safe.observation, rng())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "l2"}, "loss must be one of log-sum, l1, log-cosh, l4"),
        ({"optimizer": "sgd"}, "optimizer must be one of"),
        ({"starts": "rows"}, "starts must be one of deflation, uniform"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"initialisations": float("nan")}, "initialisations must be at least 1"),
    ],
)
def test_rejects_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SPEARPlusPlus(**options)  # type: ignore[arg-type]
