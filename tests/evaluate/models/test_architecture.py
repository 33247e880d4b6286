"""The analysis of architectures agrees with what the attacks do."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import RCONV, RGAP, FedSGD, ImageSpace, LinearLeakage, NotApplicable
from leakfrontier.adversaries.base import Adversary
from leakfrontier.defenses import Batch, Defense
from leakfrontier.evaluate.client.client import Client, ThreatModel, observe
from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.architecture import analyse, build, space_of

SPACE = ImageSpace((3, 16, 16), 10)


def convolutional(filters: int, activation: nn.Module, *, pool: bool = False) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, filters, 5, stride=2, padding=2), activation]
    layers += [nn.MaxPool2d(2)] if pool else []
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "leaky": lambda: convolutional(16, nn.LeakyReLU(0.2)),
    "relu": lambda: convolutional(20, nn.ReLU()),
    "narrow": lambda: convolutional(4, nn.ReLU()),
    "pooled": lambda: convolutional(16, nn.LeakyReLU(0.2), pool=True),
    "perceptron": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(768, 30), nn.ReLU(), nn.Linear(30, 10)
    ),
}
ATTACKS: dict[str, Adversary] = {"RCONV": RCONV(), "RGAP": RGAP(), "LinearLeakage": LinearLeakage()}


def breaks(attack: Adversary, model: nn.Module) -> bool:
    """Return whether an attack recovers an image exactly."""
    image = torch.rand(1, *SPACE.shape, generator=torch.Generator().manual_seed(0)).double()
    client = Client(model, cross_entropy, Defense(), FedSGD(), SPACE)
    rng = torch.Generator().manual_seed(1)
    (upload,) = observe(client, [Batch(image, torch.tensor([3]))], ThreatModel(), rng)
    try:
        guess = attack.reconstruct(upload.observation, rng)
    except NotApplicable:
        return False
    return bool(metrics.psnr(guess.inputs, image)[0] > 60)


@pytest.mark.parametrize("name", MODELS)
def test_verdicts_are_what_attacks_do(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[name]().double()
        model(torch.zeros(1, *SPACE.shape).double())
    verdicts = {v.attack: v.possible for v in analyse(model, SPACE.shape).verdicts}
    found = {attack: breaks(adversary, model) for attack, adversary in ATTACKS.items()}
    assert found == {attack: verdicts[attack] for attack in ATTACKS}


def test_the_expected_models_resist() -> None:
    resisting = {name for name in MODELS if analyse(build_lazy(name), SPACE.shape).resists}
    assert resisting == {"narrow", "pooled"}


def build_lazy(name: str) -> nn.Module:
    model = MODELS[name]()
    model(torch.zeros(1, *SPACE.shape))
    return model


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("alexnet", "pooling"),
        ("resnet18", "normalisation"),
        ("vit_b_16", "permute"),
    ],
)
def test_torchvision_by_name_without_values(name: str, reason: str) -> None:
    space = space_of((3, 224, 224), 10)
    model = build(name, space)
    assert next(model.parameters()).device.type == "meta"
    found = analyse(model, space.shape, name)
    assert found.resists
    assert reason in found.verdicts[0].reason


def test_hugging_face_by_kind() -> None:
    space = space_of((3, 64, 64), 10)
    assert analyse(build("resnet", space), space.shape).resists


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(UserError, match="--shape must be"):
        space_of((3, 0, 2), 10)
