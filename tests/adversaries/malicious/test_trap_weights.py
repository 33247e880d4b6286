from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from federated import TOKENS, make_client, rng
from torch import Tensor, nn

from leakfrontier.adversaries import (
    FedSGD,
    ImageSpace,
    NotApplicable,
    PublicData,
    Reconstruction,
    Round,
    TrapWeights,
)
from leakfrontier.adversaries.malicious.trap_weights import (
    activation,
    agreeing,
    evenness,
    traps,
    tuned,
)
from leakfrontier.defenses import DPSGD, Batch, Defense
from leakfrontier.evaluate.client.client import ThreatModel, observe
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

DATA = load_dataset("fashion-mini")
assert isinstance(DATA.space, ImageSpace)
NORMALISED = DATA.space
PLAIN = replace(NORMALISED, mean=(0.0,), std=(1.0,))
SIZE = 32
AUTO = TrapWeights()


def attack(
    space: ImageSpace,
    model: str = "mlp",
    defense: Defense | None = None,
    traps: TrapWeights = AUTO,
) -> tuple[Reconstruction, Batch, nn.Module]:
    """Attack a batch of images; return the guess, the truth and what the client was sent."""
    agreed = build_model(model, space, rng(), **({"width": 400} if model == "mlp" else {}))  # type: ignore[arg-type]
    public = PublicData(space.to_inputs(DATA.test.inputs), DATA.test.targets)
    crafted = traps.craft(agreed, Round(space, FedSGD(), 1, SIZE, public), rng(1))
    (sent,) = crafted.models
    rows = torch.randperm(len(DATA.train.inputs), generator=rng(2))[:SIZE]
    share = Batch(space.to_inputs(DATA.train.inputs[rows]), DATA.train.targets[rows])
    client = replace(make_client(sent, defense), space=space)
    (upload,) = observe(client, [share], ThreatModel(), rng(3), kept=crafted.kept)
    return traps.reconstruct(upload.observation, rng()), share, sent


def psnr(guess: Reconstruction, truth: Batch, space: ImageSpace) -> Tensor:
    """Return the PSNR of every example, of which those not found are guessed to be the mean."""
    pixels, private = space.to_unit(guess.inputs), space.to_unit(truth.inputs)
    mean = NORMALISED.to_unit(torch.zeros(1, *space.shape))
    return metrics.psnr(torch.cat([pixels, mean])[metrics.match(pixels, private)], private)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_examples_that_are_alone_in_a_row_are_exact_and_known_to_be(model: str) -> None:
    guess, truth, sent = attack(PLAIN, model)
    reached = psnr(guess, truth, PLAIN)
    layer = next(m for m in sent.modules() if isinstance(m, nn.Linear))
    active = truth.inputs.flatten(1) @ layer.weight[:, : 28 * 28].T.detach() > 0
    exposed = (active & (active.sum(dim=0) == 1)).any(dim=1)
    assert exposed.float().mean() > 0.3
    assert (reached > 60).sum() >= exposed.sum() - 1
    assert guess.confidence is not None
    certain = replace(guess, inputs=guess.inputs[guess.confidence == 1])
    assert (psnr(certain, truth, PLAIN) > 60).sum() == len(certain.inputs) > SIZE / 5


def test_normalised_inputs_make_it_fail() -> None:
    guess, truth, _ = attack(NORMALISED, "cnn")  # whose ReLUs lose what is negative
    reached = psnr(guess, truth, NORMALISED)
    assert 8 < reached.mean() < 17
    assert not (reached > 30).any()
    plain, normalised = (
        (psnr(*attack(space)[:2], space) > 60).sum() for space in (PLAIN, NORMALISED)
    )
    assert normalised < plain / 2


def test_noise_makes_it_fail() -> None:
    guess, truth, _ = attack(PLAIN, defense=DPSGD(noise_multiplier=1.0))
    assert not (psnr(guess, truth, PLAIN) > 15).any()


def test_a_factor_that_is_not_tuned_fails() -> None:
    tuned_rate, dead, all_active = (
        (psnr(*attack(PLAIN, traps=trap)[:2], PLAIN) > 60).sum()
        for trap in (AUTO, TrapWeights(s=0.2), TrapWeights(s=1.0))
    )
    assert tuned_rate > 2 * max(dead, all_active)


def test_rows_are_active_as_often_as_expected() -> None:
    inputs = torch.rand(40, 600, generator=rng())
    for s in (0.92, 0.96, 1.0):
        active = (inputs @ traps(4000, 600, s, 0.5, rng(1)).T > 0).float().mean()
        assert active == pytest.approx(float(activation(s, evenness(inputs)).mean()), rel=0.1)


def test_a_third_of_the_tuned_rows_has_one_example() -> None:
    inputs = torch.rand(50, 600, generator=rng())
    s = tuned(evenness(inputs), 50, 1000)
    assert activation(s, evenness(inputs)).mean() == pytest.approx(1 / 50, rel=0.2)
    active = (inputs @ traps(1000, 600, s, 0.5, rng(1)).T > 0).sum(dim=0)
    assert (active == 1).float().mean() == pytest.approx(0.37, abs=0.04)


def test_halves_have_the_same_magnitudes() -> None:
    weight = traps(5, 7, 0.9, 0.5, rng())
    for row in weight:
        assert (row == 0).sum() == 1  # of an odd number, one is left
        torch.testing.assert_close(
            (row[row > 0] / 0.9).sort().values, (-row[row < 0]).sort().values
        )


def test_what_agrees_is_one_group() -> None:
    inputs = torch.rand(3, 10, generator=rng())
    groups = agreeing(torch.cat([inputs, inputs[1:] * (1 + 1e-6)]))
    assert groups.rows.tolist() == [1, 2, 2]
    torch.testing.assert_close(groups.inputs, inputs)
    assert len(agreeing(inputs[:0]).rows) == 0


def test_what_has_no_such_layer_is_not_applicable() -> None:
    space = replace(PLAIN, shape=(1, 8, 8))
    known = Round(space, FedSGD(), 1, 4)
    linear, head = nn.Linear(64, 20), nn.Linear(20, 10)
    pooled = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 20), nn.ReLU(), head)
    strided = nn.Sequential(
        nn.Conv2d(1, 2, 3, 2, 1), nn.Flatten(), nn.Linear(32, 20), nn.ReLU(), head
    )
    cases = {
        "token": (nn.Sequential(nn.Flatten(), linear, nn.ReLU(), head), TOKENS),
        "not followed by a ReLU": (nn.Sequential(nn.Flatten(), linear, nn.Tanh(), head), space),
        "pooling": (pooled, space),
        "stride": (strided, space),
        "two linear layers": (build_model("lenet", space, rng()), space),
    }
    for reason, (model, seen) in cases.items():
        with pytest.raises(NotApplicable, match=reason):
            TrapWeights().craft(model, replace(known, space=seen), rng())
    honest = replace(make_client(build_model("mlp", space, rng())), space=space)
    share = Batch(torch.rand(2, 1, 8, 8, generator=rng()), torch.tensor([0, 1]))
    (upload,) = observe(honest, [share], ThreatModel(), rng())
    with pytest.raises(NotApplicable, match="not sent a model with traps"):
        TrapWeights().reconstruct(upload.observation, rng())


@pytest.mark.parametrize(("name", "value"), [("s", 1.5), ("s", "best"), ("sigma", 0.0)])
def test_rejects_bad_parameters(name: str, value: float | str) -> None:
    with pytest.raises(ValueError, match=f"{name} must .*, got {value!r}"):
        TrapWeights(**{name: value})  # type: ignore[arg-type]
