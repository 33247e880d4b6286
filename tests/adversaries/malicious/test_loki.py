"""LOKI: a module per client, whose blocks a sum does not mix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from federated import SPACE, TOKENS, Sum, batch, make_client, mlp, observed, rng
from imprinted import attacked, host, psnrs
from torch import Tensor

from leakfrontier.adversaries import (
    LOKI,
    FedAvg,
    FedSGD,
    NotApplicable,
    Protocol,
    PublicData,
    Reconstruction,
    Round,
    Threat,
    WaveSpace,
)
from leakfrontier.adversaries.malicious.imprint import expected_recovery
from leakfrontier.defenses import DPSGD, SecureAggregation
from leakfrontier.evaluate.client.client import ThreatModel, observe
from leakfrontier.evaluate.data.data import Dataset

LOCAL = FedAvg(epochs=1, batch_size=8, lr=1e-4)
KNOWN = Round(SPACE, FedSGD(), 3, 4, PublicData(*batch(200, 9)))


def reconstructed(attack: LOKI, data: Dataset, examples: int, **options: object) -> Tensor:
    """Return the PSNR of each client's examples."""
    upload = attacked(attack, data, host(), examples, **options)  # type: ignore[arg-type]
    guess = attack.reconstruct(upload.observation, rng())
    return psnrs(guess, upload)


def test_the_sum_of_several_clients_gives_away_the_examples_of_all(few_photos: Dataset) -> None:
    for protocol, least in ((FedSGD(), expected_recovery(32, 128)), (LOCAL, 0.85)):
        found = reconstructed(LOKI(), few_photos, 32, clients=4, defense=Sum(), protocol=protocol)
        assert (found > 30).double().mean() > least - 0.06


def test_secure_aggregation_does_not_help(few_photos: Dataset) -> None:
    defense = SecureAggregation(clients=3)
    attack = LOKI(bins_per_example=8)
    found = reconstructed(attack, few_photos, 4, clients=3, defense=defense)
    assert int((found > 30).sum()) >= 10
    found = reconstructed(attack, few_photos, 4, clients=3, defense=defense, protocol=LOCAL)
    assert int((found > 30).sum()) >= 10


def test_the_victims_come_first(few_photos: Dataset) -> None:
    attack = LOKI(bins_per_example=100)
    upload = attacked(attack, few_photos, host(), 2, clients=3, defense=Sum())
    guess = attack.reconstruct(upload.observation, rng())
    assert len(guess.inputs) == 6
    for index in range(0, 6, 2):
        truth = replace(upload, truth=upload.truth.at(slice(index, index + 2)))
        assert psnrs(Reconstruction(guess.inputs[index : index + 2]), truth).min() > 30


def test_a_bin_that_one_client_alone_hits_is_exact(few_photos: Dataset) -> None:
    for clients, exact in ((1, True), (4, False)):
        found = reconstructed(LOKI(), few_photos, 32, clients=clients, defense=Sum())
        right = found[found > 30]
        assert (right > 90).double().mean() > 0.9 if exact else (right < 90).any()


@pytest.mark.parametrize("protocol", [FedSGD(), LOCAL], ids=type)
def test_more_queries_leave_hardly_any(few_photos: Dataset, protocol: Protocol) -> None:
    attack = LOKI(bins_per_example=8, queries=4)
    found = reconstructed(attack, few_photos, 32, clients=2, defense=Sum(), protocol=protocol)
    lost = (1 - expected_recovery(32, 8 * 32 // 4)) ** 4  # shared in all of them
    assert (found > 30).double().mean() > 1 - lost - 0.03  # one query: 0.89


def test_the_published_readout_assumes_black_and_white(few_photos: Dataset) -> None:
    ours, published = (
        reconstructed(LOKI(readout=readout), few_photos, 32, clients=2, defense=Sum())
        for readout in ("brightness", "minmax")
    )
    assert published.median() < ours.median() - 10
    assert (published > 20).double().mean() > 0.4


def test_dpsgd_leaves_nothing(few_photos: Dataset) -> None:
    for noise, least, most in ((0.0, 12, 16), (1.0, 0, 0)):
        defense = DPSGD(noise_multiplier=noise, poisson_sampling=False)
        found = reconstructed(LOKI(bins_per_example=8), few_photos, 16, defense=defense)
        assert least <= int((found > 20).sum()) <= most


def test_clients_have_blocks_of_their_own() -> None:
    models = LOKI().craft(mlp(), KNOWN, rng()).models
    assert len(models) == 3
    shapes = [{name: value.shape for name, value in m.named_parameters()} for m in models]
    assert shapes[0] == shapes[1] == shapes[2]
    inputs = batch(5).inputs
    for model in models[1:]:
        torch.testing.assert_close(model(inputs), models[0](inputs))  # they look alike in use
    client = make_client(mlp())
    for index, model in enumerate(models):
        (upload,) = observe(client, [batch(4)], ThreatModel(), rng(), models=[model])
        blocks = upload.observation.update["0.measure.weight"].chunk(3, dim=1)
        assert [bool(block.any()) for block in blocks] == [index == i for i in range(3)]


def test_all_draws_come_from_the_generator() -> None:
    before = torch.get_rng_state()
    one, other = (LOKI().craft(mlp(), KNOWN, rng(3)).models[1].state_dict() for _ in range(2))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_sound_has_a_brightness_too() -> None:
    space = WaveSpace(shape=(1, 192), classes=10)
    known = replace(KNOWN, space=space, public=PublicData(torch.rand(50, 1, 192), torch.zeros(50)))
    (model, *_) = LOKI().craft(mlp(), known, rng()).models
    assert model(torch.rand(2, 1, 192)).shape == (2, 10)


def test_what_it_cannot_do() -> None:
    assert LOKI.threat is Threat.ARCHITECTURE
    attack = LOKI()
    with pytest.raises(NotApplicable, match="public"):
        attack.craft(mlp(), replace(KNOWN, public=None), rng())
    with pytest.raises(NotApplicable, match="token"):
        attack.craft(mlp(), replace(KNOWN, space=TOKENS), rng())
    with pytest.raises(NotApplicable, match="no channels"):
        attack.craft(mlp(), replace(KNOWN, space=replace(SPACE, shape=(192,))), rng())
    with pytest.raises(NotApplicable, match="modules of their own"):
        attack.reconstruct(observed(mlp(), batch(2)), rng())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bins_per_example": 0}, "bins_per_example must be at least 1, got 0"),
        ({"queries": 3}, "queries must be at least 1 and divide bins_per_example, got 3"),
        ({"signal": float("nan")}, "signal must be positive and finite, got nan"),
        ({"readout": "bias"}, "readout must be 'brightness' or 'minmax', got 'bias'"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LOKI(**options)  # type: ignore[arg-type]
