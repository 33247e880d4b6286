from __future__ import annotations

from dataclasses import replace
from unittest.mock import create_autospec

import pytest
import torch
from federated import TOKENS, Sum, make_client, rng, seeded
from torch import Tensor, nn

from leakfrontier.adversaries import (
    FedSGD,
    ImageSpace,
    NotApplicable,
    PublicData,
    Reconstruction,
    Round,
    ScaleMIA,
)
from leakfrontier.adversaries.malicious.imprint import dissect, expected_recovery
from leakfrontier.adversaries.malicious.scale_mia import encode_all, mirrored
from leakfrontier.defenses import DPSGD, Batch, Defense
from leakfrontier.evaluate.client.client import ThreatModel, Upload, observe
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

DATA = load_dataset("fashion-mini")
assert isinstance(DATA.space, ImageSpace)
SPACE = DATA.space
PUBLIC = PublicData(SPACE.to_inputs(DATA.test.inputs), DATA.test.targets)
PRIVATE = Batch(SPACE.to_inputs(DATA.train.inputs), DATA.train.targets)
ATTACK = ScaleMIA(epochs=10, examples=300, batch_size=10, lr=0.01)
SIZE = 32


def network() -> nn.Module:
    """Return strided convolutions and three linear layers, as in the paper but smaller."""
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 400),
            nn.ReLU(),
            nn.Linear(400, 50),
            nn.ReLU(),
            nn.Linear(50, 10),
        )
    )


def attacked(defense: Defense | None = None, clients: int = 1, seed: int = 2) -> Upload:
    """Observe a batch of images, on one client or divided among several."""
    known = Round(SPACE, FedSGD(), clients, SIZE // clients, PUBLIC)
    crafted = ATTACK.craft(network(), known, rng(1))
    rows = torch.randperm(len(PRIVATE.inputs), generator=rng(seed))[:SIZE]
    client = replace(make_client(crafted.models[0], defense), space=SPACE)
    shares = [PRIVATE.at(part) for part in rows.chunk(clients)]
    sent = {"models": crafted.models, "kept": crafted.kept}
    (upload,) = observe(client, shares, ThreatModel(public=PUBLIC), rng(3), **sent)
    return upload


def psnr(guess: Reconstruction, truth: Batch) -> Tensor:
    """Return the PSNR of every example, of which those not found are guessed to be the mean."""
    pixels, private = SPACE.to_unit(guess.inputs), SPACE.to_unit(truth.inputs)
    mean = SPACE.to_unit(PUBLIC.inputs.mean(dim=0, keepdim=True))
    return metrics.psnr(torch.cat([pixels, mean])[metrics.match(pixels, private)], private)


def recovered(upload: Upload) -> float:
    reached = psnr(ATTACK.reconstruct(upload.observation, rng()), upload.truth)
    return float((reached > 18).float().mean())


def test_what_is_alone_in_a_bin_is_recovered() -> None:
    shares = [recovered(attacked(seed=seed)) for seed in range(4)]
    assert sum(shares) / 4 == pytest.approx(expected_recovery(SIZE, 400), abs=0.12)


def test_codes_are_exact_and_mixtures_are_dropped() -> None:
    upload = attacked()
    model = upload.observation.model
    anatomy = dissect(model, SPACE)
    codes = encode_all(model, anatomy.layer, upload.truth.inputs)
    bins = (anatomy.layer(codes) > 0).sum(dim=1)
    alone = (bins[:, None] == bins).sum(dim=1) == 1
    guess = ATTACK.reconstruct(upload.observation, rng())
    assert abs(len(guess.inputs) - int(alone.sum())) <= 2
    assert (psnr(guess, upload.truth)[alone] > 15).all()


def test_a_sum_of_clients_is_one_batch() -> None:
    assert recovered(attacked(Sum(), clients=4)) > 0.8


def test_noise_hides_everything() -> None:
    upload = attacked(DPSGD(noise_multiplier=1.0))
    blind = psnr(Reconstruction(PUBLIC.inputs[:0]), upload.truth)
    reached = psnr(ATTACK.reconstruct(upload.observation, rng()), upload.truth)
    assert reached.mean() < blind.mean() + 1


def test_training_is_done_once_for_the_same_model_and_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = create_autospec(ScaleMIA._train, side_effect=ScaleMIA._train)
    monkeypatch.setattr(ScaleMIA, "_train", train)
    attack = replace(ATTACK, epochs=1, examples=40)
    known = Round(SPACE, FedSGD(), 1, SIZE, PUBLIC)
    first = attack.craft(network(), known, rng())
    assert train.call_count == 2  # the autoencoder, and the decoder again
    kept = replace(known, kept=first.kept)
    second, third = attack.craft(network(), kept, rng(1)), attack.craft(network(), known, rng(9))
    assert train.call_count == 4  # the second time from nothing
    for one in (second, third):
        weights = (sent.models[0].state_dict() for sent in (first, one))
        torch.testing.assert_close(*weights, rtol=0, atol=0)
    replace(attack, examples=30).craft(network(), kept, rng())
    other = network()
    next(other.parameters()).data.mul_(2)
    attack.craft(other, kept, rng())
    assert train.call_count == 8  # what was kept is of other examples, or of another model


@pytest.mark.parametrize("pool", [1, 2, 28])
def test_the_decoder_mirrors_the_convolutions(pool: int) -> None:
    side = 28 // pool
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(pool), nn.Flatten()
    )
    model.extend([nn.Linear(6 * side * side, 20), nn.ReLU(), nn.Linear(20, 10)])
    decoder = mirrored(model, dissect(model, SPACE), SPACE)
    images = decoder(torch.rand(2, 6 * side * side, generator=rng()))
    assert images.shape == (2, *SPACE.shape)
    assert images.min() >= 0
    assert images.max() <= 1


class Residual(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1))
        self.shortcut = nn.Conv2d(1, 6, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def test_what_cannot_hold_an_encoder_is_not_applicable() -> None:
    known = Round(SPACE, FedSGD(), 1, SIZE, PUBLIC)
    merged = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.AvgPool1d(2), nn.Linear(1014, 9))
    merged.extend([nn.ReLU(), nn.Linear(9, 10)])
    residual = nn.Sequential(Residual(), nn.Flatten(), nn.Linear(6 * 28 * 28, 9))
    residual.extend([nn.ReLU(), nn.Linear(9, 10)])
    cases = {
        "branches are joined": (residual, known),
        "token": (network(), replace(known, space=TOKENS)),
        "no public data": (network(), replace(known, public=None)),
        "no convolutions": (build_model("mlp", SPACE, rng()), known),
        "no grid of 3 channels": (merged, known),
        "two linear layers": (build_model("lenet", SPACE, rng()), known),
    }
    for reason, (model, round) in cases.items():
        with pytest.raises(NotApplicable, match=reason):
            ATTACK.craft(model, round, rng())
    client = replace(make_client(network()), space=SPACE)
    (upload,) = observe(client, [PRIVATE.at(torch.arange(2))], ThreatModel(), rng())
    with pytest.raises(NotApplicable, match="not sent a model with an imprint"):
        ATTACK.reconstruct(upload.observation, rng())


@pytest.mark.parametrize("name", ["epochs", "examples", "batch_size", "lr"])
def test_rejects_bad_parameters(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*, got 0"):
        ScaleMIA(**{name: 0})
