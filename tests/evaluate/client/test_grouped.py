"""Sums of many clients' gradients equal those of each client alone."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakfrontier.defenses import Batch, Update, batch_gradient, trainable
from leakfrontier.defenses.per_example import ClippedGradient
from leakfrontier.evaluate.client import grouped
from leakfrontier.evaluate.client.grouped import Unsuited, grouped_sums, stacked_sums

SIZES = (1, 3, 0, 20, 7)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1, dilation=1),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(4, 6, 2, bias=False),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def other_layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same"),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2, padding_mode="reflect", padding=1),
        nn.Flatten(2),
        nn.LayerNorm(64),
        nn.Linear(64, 3),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def frozen() -> nn.Module:
    model = perceptron()
    model[1].weight.requires_grad_(requires_grad=False)  # type: ignore[index, union-attr]
    return model


MODELS = [perceptron, convolutional, other_layers, frozen]


def batches() -> list[Batch]:
    torch.manual_seed(0)
    return [Batch(torch.randn(n, 1, 8, 8), torch.randint(3, (n,))) for n in SIZES]


def assert_equal(found: Update, expected: Update) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def mean_sum(model: nn.Module, batch: Batch) -> Update:
    if not len(batch.inputs):
        return {name: torch.zeros_like(value) for name, value in trainable(model).items()}
    mean = batch_gradient(model, F.cross_entropy, batch)
    return {name: len(batch.inputs) * value for name, value in mean.items()}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("most", [5, 400])
@pytest.mark.parametrize("model", [make() for make in MODELS])
def test_sums_at_the_same_weights(
    model: nn.Module, most: int, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "EXAMPLES", most)
    several = batches()
    found = grouped_sums(model, F.cross_entropy, trainable(model), several, layout=layout)
    for total, batch in zip(found, several, strict=True):
        assert_equal(total, mean_sum(model, batch))


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("model", [make() for make in MODELS])
def test_clipped_sums(model: nn.Module, clipping: str) -> None:
    clipped = ClippedGradient(0.3, clipping)
    clipped.expect(1)
    several = batches()
    weights = trainable(model)
    found = grouped_sums(model, F.cross_entropy, weights, several, clipped.factors)
    for total, batch in zip(found, several, strict=True):
        if len(batch.inputs):
            expected = clipped.gradient(model, F.cross_entropy, batch, torch.Generator())
            assert_equal(total, expected)


@pytest.mark.parametrize("model", [make() for make in MODELS])
def test_sums_at_different_weights(model: nn.Module) -> None:
    several = batches()
    weights = [
        {name: value.detach() + 0.01 * place for name, value in trainable(model).items()}
        for place in range(len(several))
    ]
    found = stacked_sums(model, F.cross_entropy, weights, several)
    for total, own, batch in zip(found, weights, several, strict=True):
        model.load_state_dict(own, strict=False)
        assert_equal(total, mean_sum(model, batch))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(self.layer(inputs))
        return output


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs) * self.scale
        return output


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize("model", [Twice(), Bare(), tied()])
def test_other_models_are_unsuited(model: nn.Module) -> None:
    batch = Batch(torch.randn(2, 4), torch.tensor([0, 1]))
    with pytest.raises(Unsuited):
        grouped_sums(model, F.cross_entropy, trainable(model), [batch])
