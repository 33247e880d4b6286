import pytest
import torch
from torch import Tensor, nn

from leakfrontier.adversaries.recursive.constraints import (
    Convolution,
    GradientFactor,
    WeightFactor,
    conjugate_gradients,
    count,
    gradient_matrix,
    weight_matrix,
)
from leakfrontier.adversaries.recursive.layer_chain import Layer, trace

GEOMETRIES = [
    # channels, size, filters, kernel, stride, padding, dilation
    (2, 6, 12, 3, 2, 1, 1),
    (3, 7, 4, 5, 1, 2, 1),
    (1, 9, 3, 2, 2, 0, 2),
    (2, 7, 9, 3, 3, 1, 1),
]


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def layer_of(geometry: tuple[int, ...], activation: nn.Module | None = None) -> Layer:
    channels, size, filters, kernel, stride, padding, dilation = geometry
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Conv2d(channels, filters, kernel, stride, padding, dilation).double()
    model = nn.Sequential(module, activation or nn.Identity())
    (layer,) = trace(model, (channels, size, size))
    assert isinstance(layer, Layer)
    return layer


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=rng(), dtype=torch.float64)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_matrices_and_adjoints_are_those_of_the_convolution(geometry: tuple[int, ...]) -> None:
    layer = layer_of(geometry)
    convolution = Convolution(layer)
    inputs, slopes = drawn(1, *layer.input_shape), drawn(1, *layer.output_shape)
    outputs = convolution.outputs(inputs)
    torch.testing.assert_close(weight_matrix(layer) @ inputs.flatten(), outputs.flatten())
    gradient = convolution.weight_gradient(inputs, slopes)
    rows = gradient_matrix(layer, slopes[0]) @ inputs[0].flatten(1).T
    torch.testing.assert_close(rows, gradient.permute(0, 2, 3, 1).flatten(0, 2))
    other = drawn(*gradient.shape)
    left = (gradient * other).sum()
    torch.testing.assert_close(
        left, (convolution.weight_gradient_back(other, slopes) * inputs).sum()
    )
    torch.testing.assert_close((outputs * slopes).sum(), (convolution.back(slopes) * inputs).sum())


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_weight_factor_is_the_inverse_of_the_normal_matrix(geometry: tuple[int, ...]) -> None:
    layer = layer_of(geometry)
    weights = drawn(*layer.output_shape).abs() + 0.5
    matrix = weights.flatten().unsqueeze(1) * weight_matrix(layer)
    factor = WeightFactor.of(Convolution(layer), weights)
    if len(matrix) < matrix.shape[1]:
        assert factor is None or factor.deviation > 1e3  # singular, but for rounding
        return
    assert factor is not None
    inputs = drawn(2, *layer.input_shape)
    values = (inputs.flatten(1) @ (matrix.T @ matrix)).view_as(inputs)
    torch.testing.assert_close(factor.precondition(values), inputs, atol=1e-6, rtol=1e-6)


def test_gradient_constraints_of_enough_filters_determine_every_channel() -> None:
    layer = layer_of((3, 7, 4, 5, 1, 2, 1))
    slopes, inputs = drawn(1, *layer.output_shape), drawn(1, *layer.input_shape)
    factor = GradientFactor.of(gradient_matrix(layer, slopes[0]))
    assert factor is not None
    assert count(layer).by_gradient
    gradient = Convolution(layer).weight_gradient(inputs, slopes)
    found = factor.solve(gradient.permute(0, 2, 3, 1).flatten(0, 2))
    torch.testing.assert_close(found.view_as(inputs), inputs)
    assert GradientFactor.of(gradient_matrix(layer, slopes[0])[:40]) is None


def test_counts_are_those_of_the_paper() -> None:
    """CNN6: weight and gradient constraints against unknowns, as R-GAP counts them."""
    first = count(layer_of((3, 32, 12, 4, 2, 2, 1)))
    assert (first.weight, first.gradient, first.unknowns) == (3468, 576, 3072)
    assert first.by_weight
    assert not first.by_gradient
    second = count(layer_of((12, 17, 36, 3, 2, 1, 1)))
    assert (second.weight, second.gradient, second.unknowns) == (2916, 3888, 3468)
    assert second.by_gradient
    assert not second.by_weight
    few = count(layer_of((12, 17, 20, 3, 2, 1, 1)))
    assert (few.weight, few.gradient) == (1620, 2160)
    assert few.enough
    assert count(layer_of((3, 32, 12, 4, 2, 2, 1), nn.ReLU())).weight == 0
    unseen = count(layer_of((1, 9, 50, 1, 2, 0, 1)))
    assert unseen.gradient_rank == 25
    assert not unseen.enough


def test_conjugate_gradients_solve_stacks() -> None:
    matrix, truth = drawn(20, 6), drawn(3, 6)
    values = 1e6 * truth @ matrix.T
    found = conjugate_gradients(
        lambda x: 1e6 * x @ matrix.T,
        lambda r: 1e6 * r @ matrix,
        values,
        lambda s: s * 1e-12,
        torch.zeros_like(truth),
        50,
    )
    torch.testing.assert_close(found, truth)
