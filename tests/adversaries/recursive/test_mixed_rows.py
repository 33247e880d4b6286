import pytest
import torch
from federated import rng
from torch import Tensor, nn

from leakfrontier.adversaries.recursive import mixed_rows
from leakfrontier.adversaries.recursive.layer_chain import Layer, trace
from leakfrontier.adversaries.recursive.mixed_rows import Group, tell_apart

CHANNELS, SIZE = 24, 3


def mixture(
    examples: int, activation: nn.Module
) -> tuple[Layer, Tensor, Group, tuple[Tensor, Tensor]]:
    """Return a layer, its gradient by examples of one slope, what is known of them, and the truth.

    The truth is what the activation gave, and the inputs.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1).double()
    model = nn.Sequential(module, activation)
    (layer,) = trace(model, (CHANNELS, SIZE, SIZE))
    assert isinstance(layer, Layer)
    inputs = torch.rand(examples, CHANNELS, SIZE, SIZE, generator=rng(1), dtype=torch.float64)
    outputs = model(inputs - 0.5).flatten(1)
    slope = torch.randn(outputs.shape[1], generator=rng(2), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((outputs * slope).sum(), module.weight)
    group = Group(examples, outputs.detach().sum(0), lambda values: slope.expand(len(values), -1))
    return layer, gradient, group, (outputs.detach(), (inputs - 0.5).flatten(1))


def test_two_examples_with_one_slope_are_told_apart() -> None:
    layer, gradient, group, truth = mixture(2, nn.LeakyReLU(0.2))
    found = tell_apart(layer, gradient, [group], 1e-16, rng(3))
    assert found is not None
    order = [0, 1] if (found[1][0] - truth[1][0]).norm() < 1e-3 else [1, 0]
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours[order], theirs, rtol=0, atol=1e-6)


def test_what_was_not_behind_the_gradient_is_not_found() -> None:
    layer, gradient, group, _ = mixture(2, nn.LeakyReLU(0.2))
    other = gradient.flip(0)
    assert tell_apart(layer, other, [group], 1e-16, rng(3), starts=1) is None


def test_nothing_is_sought_where_it_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*_: object) -> None:
        raise AssertionError("a search takes long")

    monkeypatch.setattr(mixed_rows._Mixture, "search", searched)
    layer, gradient, group, _ = mixture(2, nn.LeakyReLU(0.2))
    assert tell_apart(layer, gradient, [], 1e-16, rng()) is None
    for activation in (nn.ReLU(), nn.Tanh(), nn.Identity()):
        assert tell_apart(*mixture(2, activation)[:2], [group], 1e-16, rng()) is None
    many = 13  # of 9 places each, for 24 * 9 equations
    layer, gradient, group, _ = mixture(many, nn.LeakyReLU(0.2))
    assert tell_apart(layer, gradient, [group], 1e-16, rng()) is None
