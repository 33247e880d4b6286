from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from federated import SPACE, mlp, rng
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries.matching.unfused_norms import unfused_norms
from leakfrontier.defenses import Batch
from leakfrontier.defenses.per_example import ClippedGradient

NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm([4, 6, 6]),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "group": lambda: nn.GroupNorm(2, 4),
}


def network(norm: str) -> nn.Module:
    """Return a convolutional network in double precision whose norm has weights of its own."""
    parts = [nn.Conv2d(SPACE.shape[0], 4, 3), NORMS[norm](), nn.Sigmoid(), nn.Flatten()]
    model = nn.Sequential(*parts, nn.Linear(4 * 6 * 6, SPACE.classes)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=rng())
    return model


def size_of_update(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the squared norm of what DP-SGD's replay makes of examples, by `vmap`."""
    batch = Batch(inputs, torch.arange(len(inputs)))
    update = ClippedGradient(10.0).gradient(model, cross_entropy, batch, rng())
    return torch.stack([value.square().sum() for value in update.values()]).sum()


@pytest.mark.parametrize("norm", NORMS)
def test_slopes_of_gradients_are_right_in_stacks(norm: str) -> None:
    model = network(norm)
    inputs, direction = torch.randn(2, 3, *SPACE.shape, generator=rng(), dtype=torch.float64)
    inputs.requires_grad_()
    with unfused_norms(model):
        (slope,) = torch.autograd.grad(size_of_update(model, inputs), inputs)
    with torch.no_grad():
        ahead, behind = (size_of_update(model, inputs + s * direction) for s in (1e-5, -1e-5))
    assert float((slope * direction).sum()) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_what_a_model_returns_is_the_same(norm: str) -> None:
    model = network(norm)
    inputs = torch.randn(2, *SPACE.shape, generator=rng(), dtype=torch.float64)
    with unfused_norms(model):
        outputs = model(inputs)
    torch.testing.assert_close(outputs, model(inputs))


def test_models_without_such_norms_are_left_alone() -> None:
    assert isinstance(unfused_norms(mlp()), nullcontext)
    assert isinstance(unfused_norms(network("group")), nullcontext)
