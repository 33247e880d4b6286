import pytest
import torch
from federated import rng
from torch import Tensor, nn

from leakfrontier.adversaries import NotApplicable
from leakfrontier.adversaries.recursive.layer_chain import Layer, trace
from leakfrontier.adversaries.recursive.layer_system import (
    Gradients,
    Known,
    System,
    Use,
    WeightInverse,
    slope_of,
)

EXACT = torch.tensor(1e-14, dtype=torch.float64)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=torch.float64)


def convolution(
    channels: int, filters: int, activation: nn.Module | None = None, size: int = 6, groups: int = 1
) -> tuple[Layer, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Conv2d(channels, filters, 3, padding=1, groups=groups)
    model = nn.Sequential(module, activation or nn.Identity()).double()
    (layer,) = trace(model, (channels, size, size))
    assert isinstance(layer, Layer)
    return layer, model


def behind(layer: Layer, model: nn.Module) -> tuple[Tensor, Known, Gradients]:
    """Return an input, and what is known of the output and the gradients that it has."""
    inputs = drawn(1, *layer.input_shape, seed=5)
    outputs = model(inputs)
    slopes = drawn(*outputs.shape, seed=6)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad((outputs * slopes).sum(), parameters)
    known = Known(outputs.detach().flatten(), slopes.flatten(), EXACT)
    return inputs, known, Gradients(dict(zip(names, found, strict=True)), 1e-16)


@pytest.mark.parametrize(
    ("channels", "filters", "use", "kind"),
    [
        (1, 8, "either", "gradient"),  # 72 equations for 36 pixels
        (1, 2, "either", "weight"),  # 18, but 72 outputs
        (1, 2, "both", "both"),
        (3, 2, "both", "both"),  # neither alone is enough for 108 pixels: 54 and 72
    ],
)
def test_the_input_is_found_by_what_is_enough(
    channels: int, filters: int, use: Use, kind: str
) -> None:
    layer, model = convolution(channels, filters, nn.Tanh())
    truth, known, gradients = behind(layer, model)
    system = System(layer, known, gradients, 1e-12)
    inputs, used, _ = system.solve(use)
    assert used == kind
    torch.testing.assert_close(inputs, truth, rtol=0, atol=1e-5)
    assert system.residual(inputs, used) < 1e-6
    assert system.residual(inputs + 0.1, used) > 1e-3


def test_blocks_that_count_alike_find_the_same_input() -> None:
    layer, model = convolution(1, 3, nn.Sigmoid())
    truth, known, gradients = behind(layer, model)
    system = System(layer, known, gradients, 1e-12)
    system.balance()
    torch.testing.assert_close(system.solve("blocks")[0], truth, rtol=0, atol=1e-5)


def test_too_few_constraints_and_groups_are_refused() -> None:
    layer, model = convolution(4, 1, nn.Tanh())
    _, known, gradients = behind(layer, model)
    with pytest.raises(NotApplicable, match="36 by its outputs and 36 by its gradient"):
        System(layer, known, gradients, 1e-12).solve("both")
    layer, model = convolution(2, 2, nn.Tanh(), groups=2)
    _, known, gradients = behind(layer, model)
    with pytest.raises(NotApplicable, match="grouped convolution"):
        System(layer, known, gradients, 1e-12)


def test_an_output_at_a_kink_is_on_the_side_that_the_bias_gradient_tells() -> None:
    layer, model = convolution(1, 4, nn.LeakyReLU(0.1))
    _, known, gradients = behind(layer, model)
    right = slope_of(layer, known, gradients)
    place = int(known.values.abs().argmin())
    assert set(right.unique().tolist()) == {0.1, 1.0}
    values = known.values.clone()
    values[place] = -1e-15 * values[place].sign()  # so near to 0 that its sign says nothing
    turned = Known(values, known.slopes, known.deviation)
    assert layer.activation is not None
    assert not torch.equal(layer.activation.slope(values), right)
    torch.testing.assert_close(slope_of(layer, turned, gradients), right)


def test_what_a_relu_held_back_has_no_slope_though_errors_make_it_positive() -> None:
    layer, model = convolution(1, 2, nn.ReLU())
    _, known, gradients = behind(layer, model)
    blurred = Known(known.values + 1e-4, known.slopes, torch.tensor(1e-4, dtype=torch.float64))
    slopes = slope_of(layer, blurred, gradients)
    assert not slopes[known.values == 0].any()
    assert slopes[known.values > 0.01].all()


@pytest.mark.parametrize("filters", [1, 3])
def test_a_batch_of_outputs_gives_its_inputs(filters: int) -> None:
    layer, model = convolution(1, filters, nn.LeakyReLU(0.2))
    inputs = drawn(3, *layer.input_shape, seed=7)
    found, residuals = WeightInverse(layer)(model(inputs).detach().flatten(1))
    torch.testing.assert_close(found, inputs.flatten(1))
    assert float(residuals.max()) < 1e-8
    if filters == 3:  # more outputs than inputs: others are the outputs of nothing
        assert float(WeightInverse(layer)(drawn(1, 108, seed=8))[1]) > 0.1


def test_weak_directions_are_those_that_weights_pass_on_least() -> None:
    layer, _ = convolution(2, 2)
    inverse = WeightInverse(layer)
    weak = inverse.weak(4)
    assert weak is not None
    torch.testing.assert_close(weak @ weak.T, torch.eye(4).double())
    passed = inverse.convolution.outputs(weak.view(-1, 2, 6, 6)).flatten(1).norm(dim=1)
    matrix = inverse.convolution.outputs(torch.eye(72).double().view(-1, 2, 6, 6)).flatten(1)
    smallest = torch.linalg.svdvals(matrix)[-8:]
    assert passed.square().sum() < smallest.square().sum()  # up to what few iterations leave
    assert inverse.weak(0) is None
    assert WeightInverse(convolution(2, 3)[0]).weak(4) is None  # more outputs than inputs


def test_outputs_that_do_not_determine_inputs_are_refused() -> None:
    with pytest.raises(NotApplicable, match="relu, has no inverse"):
        WeightInverse(convolution(1, 4, nn.ReLU())[0])
    with pytest.raises(NotApplicable, match="36 of them for 72 unknowns"):
        WeightInverse(convolution(2, 1, nn.Tanh())[0])
