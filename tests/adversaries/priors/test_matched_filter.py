"""Candidates in the bins of an imprint module."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from federated import SPACE, TOKENS, batch, make_client, mlp, observed, rng

from leakfrontier.adversaries import (
    Candidates,
    FedAvg,
    FedSGD,
    MatchedFilter,
    NotApplicable,
    Observation,
    Protocol,
    PublicData,
    RobbingTheFed,
    Round,
    Threat,
)
from leakfrontier.defenses import DPSGD, Batch, Defense
from leakfrontier.evaluate.client.client import ThreatModel, observe
from leakfrontier.evaluate.foundations.statistics import clopper_pearson
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.privacy.bounds import reconstruction

POOL = Candidates(*(part.unflatten(0, (20, 8)) for part in batch(160, seed=3)))
ATTACK = MatchedFilter(bins=64)


def attacked(
    defense: Defense | None = None,
    seed: int = 0,
    protocol: Protocol | None = None,
    attack: MatchedFilter | RobbingTheFed = ATTACK,
) -> tuple[Observation, Batch]:
    """Return what the server sees of eight examples, each among twenty, and the examples."""
    protocol = protocol or FedSGD()
    known = Round(SPACE, protocol, 1, 8, PublicData(*batch(200, 9)))
    crafted = attack.craft(mlp(), known, rng(seed))
    rows = torch.randint(20, (8,), generator=rng(seed))
    private = Batch(*(part[rows, torch.arange(8)] for part in POOL))
    client = make_client(mlp(), defense, protocol)
    sent = {"models": crafted.models, "kept": crafted.kept}
    (upload,) = observe(client, [private], ThreatModel(candidates=POOL), rng(seed + 1), **sent)
    return upload.observation, private


def found(observation: Observation, private: Batch) -> int:
    guess = ATTACK.reconstruct(observation, rng()).inputs
    return int((guess == private.inputs).flatten(1).all(dim=1).sum())


@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(epochs=1, batch_size=4, lr=0.01)])
def test_finds_all_without_noise(protocol: Protocol) -> None:
    right = sum(found(*attacked(seed=seed, protocol=protocol)) for seed in range(3))
    assert right >= 22  # an example may lie in no bin


def test_finds_candidates_under_noise_where_reconstruction_finds_nothing() -> None:
    module = RobbingTheFed(bins=64, query="random", rows="sparse")
    right = close = 0
    for seed in range(5):
        observation, private = attacked(DPSGD(0.1), seed)
        right += found(observation, private)
        guess = module.reconstruct(observation, rng()).inputs
        if len(guess):
            rows = metrics.match(*map(SPACE.to_unit, (guess, private.inputs)))
            near = SPACE.to_unit(guess[rows]) - SPACE.to_unit(private.inputs)
            distances = near.square().flatten(1).mean(dim=1)
            close += int(((distances < 0.01) & (rows >= 0)).sum())  # above 20 dB
    assert close == 0
    assert clopper_pearson(right, 40, 0.99).low > 0.5


@pytest.mark.parametrize(("sigma", "works"), [(0.3, True), (3.0, False)])
def test_does_not_beat_the_bound(sigma: float, works: bool) -> None:
    right = sum(found(*attacked(DPSGD(sigma), seed)) for seed in range(10))
    interval = clopper_pearson(right, 80, 0.99)
    assert interval.low <= reconstruction(1 / 20, 1.0, sigma, 1)
    assert (interval.low > 1 / 20) == works


def test_a_candidate_of_another_upload_is_not_found() -> None:
    observation, _ = attacked(DPSGD(0.1))
    _, private = attacked(DPSGD(0.1), seed=1)
    assert found(observation, private) <= 2


def test_needs_its_own_module_and_candidates() -> None:
    observation, _ = attacked()
    with pytest.raises(NotApplicable, match="no candidates are granted for the 8 private"):
        ATTACK.reconstruct(replace(observation, candidates=None), rng())
    with pytest.raises(NotApplicable, match="were not sent an imprint module"):
        ATTACK.reconstruct(observed(mlp(), batch(2)), rng())
    with pytest.raises(NotApplicable, match="token"):
        ATTACK.craft(mlp(), Round(TOKENS, FedSGD(), 1, 4), rng())


def test_what_it_is() -> None:
    assert MatchedFilter.threat is RobbingTheFed.threat is Threat.ARCHITECTURE
    assert MatchedFilter.needs_candidates
    with pytest.raises(ValueError, match="bins must be at least 2"):
        MatchedFilter(bins=1)
