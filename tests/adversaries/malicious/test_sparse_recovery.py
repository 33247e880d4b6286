from __future__ import annotations

import cvxpy as cp
import pytest
import torch
from federated import rng, seeded
from torch import Tensor, nn
from torch.nn.functional import relu

from leakfrontier.adversaries.malicious.sparse_recovery import (
    Measurement,
    basis_pursuit,
    cosine_transform,
    inverse_cosine_transform,
    invert,
    least_squares,
    natural_weights,
)

SHAPE = (1, 8, 8)
LOW, HIGH = torch.full(SHAPE, -2.0), torch.full(SHAPE, 2.0)


def natural(count: int, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Tensor:
    """Return signals whose coefficients are about as large as those of photos."""
    coefficients = torch.randn((count, *shape), generator=rng(seed)) / natural_weights(shape)
    signals = inverse_cosine_transform(coefficients)
    return (signals / signals.std()).clamp(-2, 2)


def convolution(kernels: int, channels: int = 1, bias: float = 0.0) -> nn.Conv2d:
    layer = seeded(lambda: nn.Conv2d(channels, kernels, 3, padding=1))
    assert isinstance(layer, nn.Conv2d)
    assert layer.bias is not None
    nn.init.normal_(layer.weight, generator=rng())
    nn.init.constant_(layer.bias, bias)
    layer.requires_grad_(False)
    return layer


def perceptron(units: int) -> nn.Linear:
    layer = nn.Linear(64, units)
    nn.init.normal_(layer.weight, std=0.1, generator=rng())
    nn.init.normal_(layer.bias, std=0.1, generator=rng(1))
    return layer.requires_grad_(False)


def activations(measurement: Measurement, inputs: Tensor) -> Tensor:
    return relu(measurement.forward(inputs) + measurement.bias.to(inputs))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(24, 7), (2, 3, 4)),
        (nn.Conv2d(2, 5, 3, stride=2, padding=1), (2, 6, 7)),
        (nn.Conv1d(2, 5, 5, padding=2), (2, 9)),
    ],
)
def test_the_adjoint_is_the_adjoint(
    layer: nn.Linear | nn.Conv1d | nn.Conv2d, shape: tuple[int, ...]
) -> None:
    measurement = Measurement(layer, shape)
    inputs = torch.randn(3, *shape, generator=rng())
    outputs = measurement.forward(inputs)
    given = inputs.flatten(1) if isinstance(layer, nn.Linear) else inputs
    torch.testing.assert_close(outputs + measurement.bias, layer(given))
    others = torch.randn(outputs.shape, generator=rng(1))
    torch.testing.assert_close(
        (outputs * others).sum(), (inputs * measurement.adjoint(others)).sum(), rtol=1e-4, atol=1e-4
    )


def test_the_norm_is_the_largest_singular_value() -> None:
    layer = perceptron(20)
    found = Measurement(layer, SHAPE).norm
    assert found == pytest.approx(float(torch.linalg.matrix_norm(layer.weight, 2)), rel=1e-3)


def test_the_cosine_transform_is_orthonormal_and_rotates_colours() -> None:
    signals = torch.randn(2, 3, 4, 5, generator=rng())
    coefficients = cosine_transform(signals)
    torch.testing.assert_close(coefficients.norm(), signals.norm())
    torch.testing.assert_close(inverse_cosine_transform(coefficients), signals)
    grey = signals[:, :1].expand(-1, 3, -1, -1)
    assert cosine_transform(grey)[:, 1:].abs().max() < 1e-5


@pytest.mark.parametrize(("precision", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_more_equations_than_unknowns_are_solved_exactly(
    precision: torch.dtype, error: float
) -> None:
    measurement = Measurement(convolution(6, bias=0.1), SHAPE)
    truth = natural(16).to(precision)
    tolerance = error / 100
    found = least_squares(measurement, activations(measurement, truth), tolerance=tolerance)
    assert found.dtype == precision
    assert (found - truth).abs().max() < error


def test_solved_examples_wait_for_the_others() -> None:
    # Far beyond convergence: steps of rounding errors would lead away again.
    measurement = Measurement(convolution(8), SHAPE)
    truth = natural(4)
    given = activations(measurement, truth)
    given[3] += 0.1 * torch.rand(given[3].shape, generator=rng())  # cannot be explained
    found = least_squares(measurement, given, iterations=2000)
    assert (found[:3] - truth[:3]).abs().max() < 1e-5
    assert found.isfinite().all()


def reference(layer: nn.Linear, given: Tensor, weights: Tensor, noise: float) -> Tensor:
    """Return cvxpy's solution."""
    basis = inverse_cosine_transform(torch.eye(64).view(64, *SHAPE)).flatten(1).T.double()
    coefficients = cp.Variable(64)
    inputs = basis.numpy() @ coefficients
    outputs = layer.weight.double().numpy() @ inputs + layer.bias.double().numpy()
    active = (given > 0).numpy()
    constraints = [outputs[~active] <= 0, inputs >= -2, inputs <= 2]
    missed = outputs[active] - given.double().numpy()[active]
    objective = weights.flatten().double().numpy() @ cp.abs(coefficients)
    if noise:
        objective += cp.sum_squares(missed) / (2 * noise)
    else:
        constraints.append(missed == 0)
    cp.Problem(cp.Minimize(objective), constraints).solve(solver=cp.CLARABEL)
    return torch.tensor(inputs.value).view(SHAPE)


@pytest.mark.parametrize(("noise", "flat"), [(0.0, False), (0.1, False), (0.1, True)])
def test_basis_pursuit_agrees_with_cvxpy(noise: float, flat: bool) -> None:
    layer = perceptron(48)
    measurement = Measurement(layer, SHAPE)
    weights = torch.full(SHAPE, 0.1) if flat else natural_weights(SHAPE)
    truth = natural(3)
    given = activations(measurement, truth)
    found = basis_pursuit(
        measurement, given.double(), LOW, HIGH, noise=noise, weights=weights, iterations=4000
    )
    for one, of in zip(found, given, strict=True):
        expected = reference(layer, of, weights, noise)
        assert (one - expected).abs().max() < 0.01 * expected.abs().max()


def test_half_as_many_equations_as_unknowns_give_a_likeness() -> None:
    shape = (3, 16, 16)
    measurement = Measurement(convolution(3, channels=3), shape)
    truth = natural(4, shape)
    low, high = torch.full(shape, -2.0), torch.full(shape, 2.0)
    given = activations(measurement, truth)
    found = invert(measurement, given, low, high, iterations=200)
    assert 0.35 < found.equations.sum() / truth.numel() < 0.65
    assert found.residual.max() < 0.1
    error = (found.inputs - truth).square().mean().sqrt()
    least_norm = (least_squares(measurement, given) - truth).square().mean().sqrt()
    assert error < 0.3  # of a standard deviation
    assert least_norm > 2 * error
    assert (found.inputs >= -2).all()
    assert (found.inputs <= 2).all()


def test_the_residual_tells_one_example_from_a_mixture() -> None:
    measurement = Measurement(convolution(8), SHAPE)
    alone = activations(measurement, natural(8))
    mixed = (alone[:4] + alone[4:]) / 2
    assert invert(measurement, alone, LOW, HIGH).residual.max() < 1e-5
    assert invert(measurement, mixed, LOW, HIGH).residual.min() > 0.05
