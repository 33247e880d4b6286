import pytest
import torch

from leakfrontier.adversaries.recursive.activations import ACTIVATIONS


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "relu"])
def test_slopes_and_inverses_are_those_of_torch(name: str) -> None:
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    inputs = torch.linspace(-3, 3, 41, dtype=torch.float64).requires_grad_()
    outputs = function(inputs)
    (slopes,) = torch.autograd.grad(outputs.sum(), inputs)
    activation = ACTIVATIONS[name]()
    torch.testing.assert_close(activation.slope(outputs.detach()), slopes)
    torch.testing.assert_close(activation.inverse(outputs.detach()), inputs.detach())


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "arctan", "softplus", "elu"])
def test_the_curvature_is_how_fast_the_slopes_logarithm_changes_with_the_output(name: str) -> None:
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    inputs = torch.linspace(-3, 3, 20, dtype=torch.float64).requires_grad_()
    outputs = function(inputs)
    (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    (bends,) = torch.autograd.grad(slopes.sum(), inputs)
    expected = (bends / slopes**2).abs().detach()
    torch.testing.assert_close(ACTIVATIONS[name]().curvature(outputs.detach()), expected)


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "arctan", "softplus", "elu"])
def test_what_saturated_has_a_finite_inverse_and_a_slope_of_almost_nothing(name: str) -> None:
    activation = ACTIVATIONS[name]()
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    end = function(torch.tensor(-1e9, dtype=torch.float64))
    assert activation.inverse(end).isfinite()
    assert 0 <= float(activation.slope(end)) < 1e-12


def test_options_are_those_of_torch() -> None:
    inputs = torch.linspace(-2, 2, 9, dtype=torch.float64)
    soft = ACTIVATIONS["softplus"](beta=3.0)
    torch.testing.assert_close(soft.inverse(torch.nn.functional.softplus(inputs, beta=3.0)), inputs)
    elu = ACTIVATIONS["elu"](alpha=0.5)
    torch.testing.assert_close(elu.inverse(torch.nn.functional.elu(inputs, alpha=0.5)), inputs)


def test_a_relu_passes_on_only_what_is_positive() -> None:
    for activation in (ACTIVATIONS["relu"](), ACTIVATIONS["leaky_relu"](negative_slope=0.0)):
        assert activation.partial
        assert activation.kinked
        assert activation.slope(torch.tensor([-1.0, 0.0, 2.0])).tolist() == [0, 0, 1]
    assert not ACTIVATIONS["leaky_relu"](negative_slope=0.1).partial
