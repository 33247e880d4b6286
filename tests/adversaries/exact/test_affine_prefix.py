"""Frozen layers in front of the trained ones hide nothing if they can be inverted."""

from __future__ import annotations

import pytest
import torch
from federated import SPACE, batch, mlp, observed, rng
from federated import psnr as psnr_of
from torch import Tensor, nn

from leakfrontier.adversaries import SPEAR, LinearLeakage, NotApplicable
from leakfrontier.adversaries.exact.affine_prefix import affine_prefix

SIZE = 192


class Mixed(nn.Module):
    """A permutation and a shift that no parameter holds."""

    def forward(self, inputs: Tensor) -> Tensor:
        order = torch.randperm(SIZE, generator=rng(3))
        return (2 * inputs.flatten(1)[:, order] - 1).view_as(inputs)


def frozen(layer: nn.Module, weight: Tensor | None = None) -> nn.Module:
    if weight is not None:
        layer.weight = nn.Parameter(weight)
    return layer.requires_grad_(False)


def rotation(condition: float = 1.0) -> Tensor:
    basis = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=rng(1))).Q
    scales = torch.logspace(0, -torch.tensor(condition).log10().item(), SIZE)
    return basis @ torch.diag(scales) @ basis.T.roll(1, 0)


def linear(weight: Tensor) -> nn.Module:
    layer = nn.Linear(SIZE, len(weight), bias=False)
    return nn.Sequential(nn.Flatten(), frozen(layer, weight), nn.Unflatten(1, (3, 8, 8)))


def convolution() -> nn.Module:
    layer = nn.Conv2d(3, 4, 3, padding=1)
    draws = torch.randn(layer.weight.shape, generator=rng(2)) / 9
    with torch.no_grad():
        draws[:3, :, 1, 1] += torch.eye(3)
    return nn.Sequential(frozen(layer, draws), nn.Flatten(), nn.LayerNorm(256))


INVERTIBLE = {
    "identity": linear(torch.eye(SIZE)),
    "rotation": linear(rotation()),
    "stretched": linear(rotation(1e3)),
    "permuted": Mixed(),
    "normalised": frozen(nn.BatchNorm2d(3)).eval(),
    "convolution": nn.Sequential(convolution()[0], nn.Flatten()),  # type: ignore[index]
}
NOT = {
    "relu": nn.Sequential(linear(rotation()), nn.ReLU()),
    "fewer": nn.Sequential(nn.Flatten(), frozen(nn.Linear(SIZE, SIZE // 2))),
    "norm": convolution(),
}


def behind(front: nn.Module, hidden: int = 32) -> nn.Module:
    """Return a model with a frozen front."""
    width = front(torch.zeros(2, *SPACE.shape)).flatten(1).shape[1]
    body = mlp(hidden)
    if width != SIZE:
        body = nn.Sequential(
            nn.Flatten(), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )
    return nn.Sequential(front, body)


@pytest.mark.parametrize("name", INVERTIBLE)
def test_the_inputs_are_recovered_from_behind(name: str) -> None:
    truth, model = batch(1), behind(INVERTIBLE[name])
    guess = LinearLeakage().reconstruct(observed(model, truth), rng())
    assert float(psnr_of(guess, truth.inputs).min()) > 40


@pytest.mark.parametrize("name", ["identity", "rotation", "permuted"])
def test_batches_are_disaggregated_behind(name: str) -> None:
    truth, model = batch(3), behind(INVERTIBLE[name], hidden=128)
    guess = SPEAR().reconstruct(observed(model, truth), rng())
    assert guess.layer is None
    assert float(psnr_of(guess, truth.inputs).min()) > 40


@pytest.mark.parametrize("name", NOT)
def test_what_cannot_be_inverted_is_not_applicable(name: str) -> None:
    observation = observed(behind(NOT[name]), batch(1))
    with pytest.raises(NotApplicable, match=r"not affine|loses a part"):
        LinearLeakage().reconstruct(observation, rng())


def test_layers_can_be_written_on_either_side() -> None:
    model = behind(linear(rotation(10.0)))
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear) and m.bias is not None)
    found = affine_prefix(model, layer, SPACE)
    assert found is not None
    weight, bias = torch.randn(5, SIZE, generator=rng(4)), torch.randn(5, generator=rng(5))
    inputs = batch(3).inputs.flatten(1)
    features = (inputs.double() @ found.matrix.T + found.offset).float()
    there, shift = found.on_features(weight, bias)
    torch.testing.assert_close(
        features @ there.T + shift, inputs @ weight.T + bias, rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(found.on_inputs(there, shift)[0], weight, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.inputs(features), inputs, rtol=1e-3, atol=1e-3)
