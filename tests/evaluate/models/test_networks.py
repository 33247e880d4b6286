import pytest
import torch
from federated import rng
from torch import nn

from leakfrontier.adversaries import ImageSpace, InputSpace, WaveSpace
from leakfrontier.evaluate.models import networks
from leakfrontier.evaluate.models.models import build_model

LETTERS, PHOTOS = ImageSpace((1, 28, 28), 62), ImageSpace((3, 32, 32), 10)


def built(name: str, space: InputSpace, **options: object) -> nn.Module:
    return build_model(f"{networks.__name__}:{name}", space, rng(), **options)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "space", "parameters"),
    [
        ("sme_cnn", LETTERS, 338_778),
        ("sme_mlp", LETTERS, 1_848_062),
        ("sme_lenet", LETTERS, 66_126),
        (
            "scale_mia",
            PHOTOS,
            (12 * 49 + 32 * 109 + 64 * 513) + 1025 * 1024 + 1025 * 512 + 513 * 10,
        ),
        ("ares_audio", WaveSpace((1, 100), 10), 12 * 10 + 1201 * 1024 + 1025 * 10),
    ],
)
def test_networks_have_the_papers_size(name: str, space: InputSpace, parameters: int) -> None:
    assert size(built(name, space)) == parameters


def test_every_client_has_three_kernels_of_its_own() -> None:
    model = built("ares_summed", ImageSpace((1, 4, 4), 10), clients=7)
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    assert first.out_channels == 21


@pytest.mark.parametrize(
    ("name", "convolutions"), [("ig_convnet", 8), ("ig_resnet20", 19 + 2), ("sme_resnet8", 7 + 2)]
)
def test_networks_have_the_papers_depth(name: str, convolutions: int) -> None:
    """Beside the convolutions that count there are those of two shortcuts that change the size."""
    options = {"width": 4} if name.startswith("ig") else {}
    model = built(name, PHOTOS, **options)
    found = sum(isinstance(layer, nn.Conv2d) for layer in model.modules())
    assert found == convolutions
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_what_ends_in_a_softmax_gives_probabilities_and_what_ends_in_a_relu_no_negatives() -> None:
    images = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(built("sme_lenet", LETTERS)(images).sum(1), torch.ones(2))
    assert (built("sme_mlp", LETTERS)(images) >= 0).all()


def test_examples_do_not_see_each_other() -> None:
    images = torch.rand(3, 3, 32, 32)
    for name, options in (("ig_resnet20", {"width": 2}), ("sme_vit", {})):
        model = built(name, PHOTOS, **options)
        torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-4, atol=1e-5)
