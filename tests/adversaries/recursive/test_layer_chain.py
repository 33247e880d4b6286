import pytest
import torch
from torch import Tensor, nn

from leakfrontier.adversaries import ImageSpace, NotApplicable, TokenSpace
from leakfrontier.adversaries.recursive.layer_chain import Layer, Obstacle, chain, trace

SPACE = ImageSpace((3, 8, 8), 10)


def network(*middle: nn.Module) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), *middle, nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 3, 8, 8))
    return model


class Residual(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.relu(inputs)


def test_a_chain_knows_geometry_and_activations() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, (3, 5), stride=(2, 1), padding="valid", bias=False),
        nn.LeakyReLU(0.3),
        nn.Conv2d(4, 5, 3, padding="same"),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(60, 10),
    )
    first, second, head = chain(model, SPACE)
    assert (first.stride, first.padding, first.output_shape) == ((2, 1), (0, 0), (4, 3, 4))
    assert first.bias is None
    assert first.activation is not None
    assert second.activation is not None
    assert (second.padding, second.activation.name) == ((1, 1), "relu")
    assert float(first.activation.slope(torch.tensor([-1.0]))) == pytest.approx(0.3)
    assert head.is_linear
    assert head.parameter("weight") == "5.weight"


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        ([nn.ReLU(), nn.MaxPool2d(2)], "pooling"),
        ([nn.ReLU(), nn.AvgPool2d(2)], "pooling"),
        ([nn.GELU()], "not a function of its output"),
        ([nn.SiLU()], "not a function of its output"),
        ([nn.GroupNorm(2, 6)], "normalisation"),
        ([Residual()], "residual"),
        ([nn.Dropout(0.5)], "dropout"),
        ([nn.ReLU(), nn.Sigmoid()], "activation"),
    ],
)
def test_what_cannot_be_passed_is_named(middle: list[nn.Module], reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        chain(network(*middle), SPACE)


def test_what_comes_behind_the_first_linear_layer_does_not_matter() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.GELU(), nn.Linear(8, 10))
    assert [layer.name for layer in chain(model, SPACE)] == ["1"]


def test_tokens_and_models_without_a_linear_layer_are_refused() -> None:
    with pytest.raises(NotApplicable, match="token"):
        chain(network(), TokenSpace((4,), 2, 9))
    with pytest.raises(NotApplicable, match="no linear layer"):
        chain(nn.Sequential(nn.Conv2d(3, 10, 8), nn.Flatten()), SPACE)


def test_sound_and_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv1d(1, 4, 9, stride=4), nn.ReLU(), nn.Flatten())
    (layer,) = trace(model, (1, 41))
    assert isinstance(layer, Layer)
    assert (layer.input_shape, layer.output_shape, layer.stride) == ((1, 1, 41), (4, 1, 9), (1, 4))


def test_a_model_is_left_in_its_mode() -> None:
    model = network(nn.Dropout(0.5)).train()
    model[0].eval()
    modes = [module.training for module in model.modules()]
    assert any(isinstance(step, Obstacle) for step in trace(model, SPACE.shape))
    assert [module.training for module in model.modules()] == modes


def test_dropout_that_is_switched_off_is_no_obstacle() -> None:
    model = network(nn.Dropout(0.5)).eval()
    assert not any(isinstance(step, Obstacle) for step in trace(model, SPACE.shape))
    assert len(chain(model, SPACE)) == 2
