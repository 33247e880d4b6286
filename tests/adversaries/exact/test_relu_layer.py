import re
from dataclasses import replace

import pytest
import torch
from federated import TOKENS, batch, convolutional, deep, factors, mlp, observed, rng, seeded
from torch import Tensor, nn
from torch.nn import functional

from leakfrontier.adversaries import NotApplicable
from leakfrontier.adversaries.exact.relu_layer import factorise, find_layer
from leakfrontier.defenses import Batch


class Functional(nn.Module):
    """Two linear layers and functions instead of modules between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(192, 64), nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs.flatten(1))
        return torch.as_tensor(self.second(functional.relu(hidden) if hidden.shape[0] else hidden))


@pytest.mark.parametrize(("model", "name"), [(mlp(), "1"), (seeded(Functional), "first")])
def test_finds_the_layer_that_sees_the_inputs(model: nn.Module, name: str) -> None:
    model.train()
    layer = find_layer(observed(model, batch(2)), None)
    assert (layer.name, layer.sees_inputs) == (name, True)
    assert layer.parameter("bias") == f"{name}.bias"
    assert model.training


def test_finds_a_deeper_layer_by_name() -> None:
    layer = find_layer(observed(deep(nn.ReLU()), batch(2)), "3")
    assert (layer.name, layer.sees_inputs) == ("3", False)


@pytest.mark.parametrize(
    ("model", "layer", "reason"),
    [
        (deep(nn.ReLU(), bias=False), None, "'1' has no bias"),
        (deep(nn.LeakyReLU()), None, "'1' is followed by leaky_relu"),
        (deep(nn.GELU()), None, "'1' is followed by gelu"),
        (deep(nn.Sequential(nn.BatchNorm1d(100), nn.ReLU())), None, "followed by batch_norm"),
        (deep(nn.ReLU()), "5", "'5' is followed by nothing"),
        (deep(nn.ReLU()), "7", "no linear layer '7', only: 1, 3, 5"),
        (convolutional(), None, "no linear layer sees the inputs"),
    ],
)
def test_says_why_a_model_does_not_qualify(
    model: nn.Module, layer: str | None, reason: str
) -> None:
    observation = observed(model.eval(), batch(2))
    with pytest.raises(NotApplicable, match=re.escape(reason)):
        find_layer(observation, layer)


def test_tokens_do_not_qualify() -> None:
    observation = observed(mlp(), batch(1))
    with pytest.raises(NotApplicable, match="token"):
        find_layer(replace(observation, space=TOKENS), None)


def test_the_factors_are_those_of_the_full_decomposition() -> None:
    observation = observed(deep(nn.ReLU()), batch(12))
    found = factors(observation)
    gradient = observation.update["1.weight"].double()
    values = torch.linalg.svdvals(gradient)
    assert found.rank == 12
    torch.testing.assert_close(found.left @ found.right, gradient, rtol=0, atol=1e-8)
    torch.testing.assert_close(found.right.norm(dim=1), values[:12])
    torch.testing.assert_close(found.left.T @ found.left, torch.eye(12).double())
    assert not found.noisy


def test_the_rank_shows_fewer_examples_where_some_are_the_same() -> None:
    some = batch(6)
    share = Batch(torch.cat([some.inputs, some.inputs[:2]]), torch.cat([some.targets] * 2)[:8])
    assert factors(observed(deep(nn.ReLU()), share)).rank == 6


def test_noise_is_measured_and_hides_the_rank() -> None:
    observation = observed(deep(nn.ReLU()), batch(6))
    update = dict(observation.update)
    deviation = 1e-4
    noise = torch.randn(update["1.weight"].shape, generator=rng())
    update["1.weight"] = update["1.weight"] + deviation * noise
    found = factors(replace(observation, update=update))
    assert found.rank == 6
    assert found.noisy
    measured = found.noise * found.right.norm(dim=1)
    torch.testing.assert_close(measured, torch.full_like(measured, deviation), rtol=0.05, atol=0)


@pytest.mark.parametrize("size", [100, 150])
def test_a_batch_must_fit_the_rank(size: int) -> None:
    with pytest.raises(NotApplicable, match=f"{size} examples .* do not fit .* 100"):
        factors(observed(deep(nn.ReLU()), batch(size)))


def test_an_update_without_signal_has_no_factors() -> None:
    observation = observed(mlp(), batch(1))
    empty = {name: torch.zeros_like(value) for name, value in observation.update.items()}
    assert factorise(replace(observation, update=empty), find_layer(observation, None)) is None


def test_zeros_are_those_of_the_relu() -> None:
    share, model = batch(10), deep(nn.ReLU())
    found = factors(observed(model, share))
    with torch.no_grad():
        outputs = model[1](share.inputs.flatten(1))  # type: ignore[index]
    hidden = outputs.detach().requires_grad_()
    loss = functional.cross_entropy(model[2:](hidden), share.targets)  # type: ignore[index]
    (gradient,) = torch.autograd.grad(loss, hidden)
    directions = gradient.double() @ found.left
    directions = directions / directions.norm(dim=1, keepdim=True)
    assert torch.equal(found.zeros(directions), outputs <= 0)
    assert (found.zeros(directions).sum(1) >= found.fewest_zeros(1e-5)).all()
    random = torch.nn.functional.normalize(torch.randn(50, 10, generator=rng()).double(), dim=1)
    assert found.sparsity(directions).min() > found.sparsity(random).max()
