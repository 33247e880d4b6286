"""Robbing the Fed, with its module and in a model as it is."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federated import SPACE, TOKENS, batch, make_client, mlp, observed, rng
from imprinted import attacked, host, psnrs
from torch import nn

from leakfrontier.adversaries import (
    Adversary,
    FedAvg,
    FedSGD,
    ImageSpace,
    NotApplicable,
    PublicData,
    RobbingTheFed,
    RobbingTheFedDirectPass,
    Round,
    Threat,
)
from leakfrontier.adversaries.malicious.imprint import expected_recovery
from leakfrontier.defenses import DPSGD
from leakfrontier.evaluate.client.client import ThreatModel, Upload, observe
from leakfrontier.evaluate.data.data import Dataset
from leakfrontier.evaluate.models.models import cnn
from leakfrontier.evaluate.run.cells import AttackTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

LOCAL = FedAvg(epochs=1, batch_size=8, lr=0.01)


def exact(attack: Adversary, upload: Upload) -> int:
    found = psnrs(attack.reconstruct(upload.observation, rng()), upload)
    return int((found > 60).sum())


@pytest.mark.parametrize("query", ["average", "random", "fourier"])
def test_as_many_are_exact_as_are_alone_in_their_bins(few_photos: Dataset, query: str) -> None:
    attack = RobbingTheFed(query=query)  # type: ignore[arg-type]
    uploads = [attacked(attack, few_photos, host(), 64, seed=seed) for seed in range(3)]
    share = sum(exact(attack, upload) for upload in uploads) / (3 * 64)
    assert share == pytest.approx(expected_recovery(64, 1024), abs=0.06)


def test_more_queries_leave_hardly_any(few_photos: Dataset) -> None:
    attack = RobbingTheFed(query="random", queries=4)
    uploads = [attacked(attack, few_photos, host(), 64, seed=seed) for seed in range(3)]
    lost = (1 - expected_recovery(64, 1024 // 4)) ** 4
    share = sum(exact(attack, upload) for upload in uploads) / (3 * 64)
    assert share == pytest.approx(1 - lost, abs=0.015)
    assert len(attack.reconstruct(uploads[0].observation, rng()).inputs) <= 64


def test_without_public_data_thresholds_are_the_published_ones(few_photos: Dataset) -> None:
    attack = RobbingTheFed(gain=1.0)
    upload = attacked(attack, few_photos, host(), 64, public=False)
    edges = -upload.observation.model[0].measure.bias.detach()  # type: ignore[index]
    assert edges[512] == 0
    assert edges[1023] == pytest.approx(3.097, abs=1e-3)  # of the standard normal
    assert exact(attack, upload) >= 50


def test_sparse_rows_survive_local_steps(few_photos: Dataset) -> None:
    found = {}
    for rows in ("protocol", "cumulative"):
        attack = RobbingTheFed(rows=rows)
        upload = attacked(attack, few_photos, host(), 64, protocol=LOCAL)
        assert upload.observation.local_steps == 8
        found[rows] = exact(attack, upload)
    assert found["protocol"] >= 54
    assert found["cumulative"] < found["protocol"]


def test_sparse_rows_isolate_in_one_step_too(few_photos: Dataset) -> None:
    attack = RobbingTheFed(rows="sparse")
    assert exact(attack, attacked(attack, few_photos, host(), 64)) >= 54


def test_confidence_is_low_where_signs_mix() -> None:
    attack, client = RobbingTheFed(bins=8), make_client(mlp())
    known = Round(SPACE, FedSGD(), 1, 32, PublicData(*batch(200, 9)))
    crafted = attack.craft(mlp(), known, rng())
    (upload,) = observe(
        client, [batch(32)], ThreatModel(), rng(1), models=crafted.models, kept=crafted.kept
    )
    guess = attack.reconstruct(upload.observation, rng())
    assert guess.confidence is not None
    assert 0 <= float(guess.confidence.min()) < 0.9


def test_dpsgd_leaves_nothing(few_photos: Dataset) -> None:
    for attack in (RobbingTheFed(), RobbingTheFed(rows="sparse")):
        for noise, least, most in ((0.0, 54, 64), (1.0, 0, 0)):
            defense = DPSGD(noise_multiplier=noise, poisson_sampling=False)
            upload = attacked(attack, few_photos, host(), 64, defense=defense)
            guess = attack.reconstruct(upload.observation, rng())
            assert least <= int((psnrs(guess, upload) > 20).sum()) <= most


def test_the_harness_scores_what_little_is_left() -> None:
    scenario = Scenario(dataset="digits", candidates=20, batch_size=4)
    attack = Method(name="RobbingTheFed", options={"bins": 64})
    found = {}
    for name, defense in {
        "none": Method(name="none"),
        "DPSGD": Method(name="DPSGD", options={"noise_multiplier": 1.0}),
    }.items():
        trial = AttackTrial(scenario, defense, attack, True, 0, 0, observations=(0, 1, 2))
        rows = trial.run(Path()).attacks
        assert {row.outcome for row in rows} == {"scored"}
        found[name] = sum(bool(row.identified) for row in rows)
    assert found["none"] >= 10
    assert found["DPSGD"] <= 3


def test_in_a_cnn_as_it_is_negative_values_are_lost(few_photos: Dataset) -> None:
    model = cnn(few_photos.space)
    before = copy.deepcopy(model.state_dict())
    attack = RobbingTheFedDirectPass()
    upload = attacked(attack, few_photos, model, 16)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    for name, value in upload.observation.model.named_parameters():
        assert value.shape == before[name].shape
    guess = attack.reconstruct(upload.observation, rng())
    space = few_photos.space
    assert 12 < psnrs(guess, upload).mean() < 22
    kept = upload.truth._replace(inputs=upload.truth.inputs.clamp(min=0))
    assert int((psnrs(guess, replace(upload, truth=kept)) > 60).sum()) >= 14

    assert isinstance(space, ImageSpace)
    raw = Dataset(
        few_photos.name,
        few_photos.train,
        few_photos.test,
        few_photos.classes,
        replace(space, mean=(0.0,), std=(1.0,)),
    )
    assert exact(attack, attacked(attack, raw, model, 16)) >= 14


def test_in_a_perceptron_as_it_is_nothing_is_lost() -> None:
    attack, model = RobbingTheFedDirectPass(), mlp(512)
    known = Round(SPACE, FedSGD(), 1, 8, PublicData(*batch(200, 9)))
    crafted = attack.craft(model, known, rng())
    (upload,) = observe(
        make_client(model),
        [batch(8)],
        ThreatModel(),
        rng(1),
        models=crafted.models,
        kept=crafted.kept,
    )
    assert exact(attack, upload) >= 6


def layers(*between: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1),
        *between,
        nn.Flatten(),
        nn.LazyLinear(9),
        nn.ReLU(),
        nn.LazyLinear(9),
    )


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (nn.MaxPool2d(2), "pooling"),
        (nn.GroupNorm(3, 3), "normalisation"),
        (nn.Dropout(0.5), "dropout"),
        (nn.Conv2d(3, 3, 3, padding=1, stride=2), "stride"),
    ],
)
def test_what_lies_between_is_named(between: nn.Module, reason: str) -> None:
    model = layers(between)
    model(batch(2).inputs)
    with pytest.raises(NotApplicable, match=reason):
        RobbingTheFedDirectPass().craft(model, Round(SPACE, FedSGD(), 1, 4), rng())
    model = layers(nn.ReLU())
    model(batch(2).inputs)
    crafted = RobbingTheFedDirectPass().craft(model, Round(SPACE, FedSGD(), 3, 4), rng())
    assert len(crafted.models) == 3


@pytest.mark.parametrize("attack", [RobbingTheFed(), RobbingTheFedDirectPass()])
def test_an_honest_round_is_not_applicable(attack: Adversary) -> None:
    with pytest.raises(NotApplicable, match="were not sent"):
        attack.reconstruct(observed(mlp(), batch(2)), rng())
    with pytest.raises(NotApplicable, match="token"):
        attack.craft(mlp(), Round(TOKENS, FedSGD(), 1, 4), rng())


def test_all_draws_come_from_the_generator() -> None:
    known, attack = Round(SPACE, FedSGD(), 1, 4), RobbingTheFed(query="random", bins=8)
    before = torch.get_rng_state()
    one, other, third = (
        attack.craft(mlp(), known, rng(s)).models[0].state_dict() for s in (3, 3, 4)
    )
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(one["0.measure.weight"], third["0.measure.weight"])
    assert torch.equal(torch.get_rng_state(), before)


def test_threats_are_stated() -> None:
    assert RobbingTheFed.threat is Threat.ARCHITECTURE
    assert RobbingTheFedDirectPass.threat is Threat.PARAMETERS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bins": 1}, "bins must be at least 2"),
        ({"bins": 9, "query": "random", "queries": 2}, "bins must be a multiple of the 2 queries"),
        (
            {"queries": 2},
            "queries must be 1, or more with query='random', got 2 with query='average'",
        ),
        ({"query": "mean"}, "query must be 'average', 'random' or 'fourier', got 'mean'"),
        ({"rows": "dense"}, "rows must be 'protocol', 'cumulative' or 'sparse', got 'dense'"),
        ({"mode": -1}, "mode must be at least 0, got -1"),
        ({"gain": float("nan")}, "gain must be positive and finite, got nan"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RobbingTheFed(**options)  # type: ignore[arg-type]
