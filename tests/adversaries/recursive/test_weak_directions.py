import torch
from torch import nn

from leakfrontier.adversaries import ImageSpace
from leakfrontier.adversaries.recursive.layer_chain import chain
from leakfrontier.adversaries.recursive.layer_system import WeightInverse
from leakfrontier.adversaries.recursive.weak_directions import corrected


def inverse_of(filters: int) -> WeightInverse:
    space = ImageSpace((3, 8, 8), 10)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, filters, 5, stride=2, padding=2),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(filters * 16, 10),
        )
    return WeightInverse(chain(model.double(), space)[0])


def test_errors_in_weak_directions_are_corrected_by_the_gradient() -> None:
    inverse, rng = inverse_of(12), torch.Generator().manual_seed(1)
    truth = torch.rand(5, 192, generator=rng, dtype=torch.float64)
    slopes = torch.randn(5, 12, 4, 4, generator=rng, dtype=torch.float64)
    gradient = inverse.convolution.weight_gradient(truth.view(-1, 3, 8, 8), slopes)
    weak = inverse.weak(4)
    assert weak is not None
    wrong = truth + torch.randn(5, 4, generator=rng, dtype=torch.float64) @ weak
    found, residual = corrected(inverse, wrong, slopes, gradient)
    assert (found - truth).norm() < 1e-3 * (wrong - truth).norm()
    assert residual < 1e-3
