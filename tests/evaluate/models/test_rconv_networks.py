import pytest
import torch
from federated import seeded
from torch import nn

from leakfrontier.adversaries import ImageSpace
from leakfrontier.adversaries.recursive.constraints import count
from leakfrontier.adversaries.recursive.layer_chain import chain
from leakfrontier.evaluate.models import rconv_networks
from leakfrontier.evaluate.models.rconv_networks import NETWORKS


def test_lenet_ex_has_the_fewest_filters_for_weight_constraints() -> None:
    space = ImageSpace((3, 32, 32), 10)
    layers = chain(rconv_networks.lenet_ex(space), space)
    for layer in layers[:-1]:
        counts = count(layer)
        assert counts.weight == counts.unknowns


SPACE = ImageSpace((3, 32, 32), 10)
FILTERS = {
    "lenet_rconv": [12, 16, 12, 12],
    "lenet_x": [12, 16, 3, 3],
    "lenet_relu": [77, 22, 3, 3],
    "lenet_ex": [12, 48, 48, 48],
    "cnn6": [12, 36, 36, 36, 64, 128],
    "cnn6_x": [12, 16, 3, 3, 3, 3],
}


@pytest.mark.parametrize("name", NETWORKS)
def test_filters_are_the_papers_and_every_size_fits(name: str) -> None:
    for space in (SPACE, ImageSpace((1, 14, 14), 3)):
        model = seeded(lambda space=space: NETWORKS[name](space))  # type: ignore[misc]
        found = [layer.out_channels for layer in model.modules() if isinstance(layer, nn.Conv2d)]
        assert found == FILTERS[name]
        assert model(torch.zeros(2, *space.shape)).shape == (2, space.classes)


def test_parameters_are_uniform_as_in_the_authors_code_but_for_rgaps() -> None:
    for name in ("lenet_x", "cnn6_x"):
        values = torch.cat([p.detach().flatten() for p in NETWORKS[name](SPACE).parameters()])
        assert 0.49 < float(values.abs().max()) <= 0.5
        assert float(values.std()) == pytest.approx(1 / 12**0.5, rel=0.02)
    assert not any(
        "bias" in parameter for parameter, _ in NETWORKS["cnn6"](SPACE).named_parameters()
    )


def test_the_first_two_activations_stay_unless_it_is_said_otherwise() -> None:
    model = rconv_networks.lenet_x(SPACE, activation="arctan")
    kinds = [type(layer).__name__ for layer in list(model)[1:8:2]]  # type: ignore[call-overload]
    assert kinds == ["LeakyReLU", "LeakyReLU", "ArcTan", "ArcTan"]
    other = rconv_networks.lenet_x(SPACE, activation="tanh", early="sigmoid")
    kinds = [type(layer).__name__ for layer in list(other)[1:8:2]]  # type: ignore[call-overload]
    assert kinds == ["Sigmoid", "Sigmoid", "Tanh", "Tanh"]
    with pytest.raises(ValueError, match=r"one of leaky_relu, .*, gelu, got 'swish'"):
        rconv_networks.cnn6(SPACE, activation="swish")
    torch.testing.assert_close(rconv_networks.ArcTan()(torch.ones(1)), torch.tensor([torch.pi / 4]))
