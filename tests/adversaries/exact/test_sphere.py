import pytest
import torch
from federated import rng
from torch import Tensor
from torch.nn.functional import normalize

from leakfrontier.adversaries.exact import sphere


def dictionary(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return an orthonormal L and the directions, as rows, that make columns of LQ half zero."""
    draws = rng(seed)
    values = torch.randn(rows, columns, generator=draws)
    values = values * (torch.rand(rows, columns, generator=draws) < 0.5)
    left = torch.linalg.svd(values.double(), full_matrices=False).U
    return left, normalize((left.T @ values.double()).T, dim=1)


def hits(directions: Tensor, truth: Tensor, cosine: float = 1 - 1e-4) -> float:
    found = (directions.to(truth) @ truth.T).abs().amax(1) > cosine
    return float(found.double().mean())


def starts(count: int, like: Tensor) -> Tensor:
    return sphere.uniform(count, like.float(), rng(1))


def test_scalar_adam_takes_the_steps_of_geoopt() -> None:
    left, _ = dictionary(200, 10)
    begin = starts(20, left)
    ours, theirs = (
        optimizer(left.float(), begin, sphere.l1, sphere.stepwise(0.1), 50)
        for optimizer in (sphere.scalar_adam, sphere.geoopt_adam)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "optimizer", [sphere.adam, sphere.scalar_adam, sphere.geoopt_adam, sphere.gradient_descent]
)
def test_l1_finds_sparse_columns_from_random_starts(optimizer: sphere.Optimizer) -> None:
    left, truth = dictionary(1000, 10)
    lr = sphere.stepwise(1e-2 if optimizer is sphere.gradient_descent else 1e-1)
    ends = optimizer(left.float(), starts(50, left), sphere.l1, lr, 500)
    assert hits(ends, truth) > 0.8
    assert hits(starts(50, left), truth) == 0


def test_a_second_moment_per_coordinate_finds_more_columns_of_a_hard_dictionary() -> None:
    left, truth = dictionary(500, 40)
    per_coordinate, single = (
        hits(o(left.float(), starts(200, left), sphere.l1, sphere.stepwise(0.1), 300), truth)
        for o in (sphere.adam, sphere.scalar_adam)
    )
    assert per_coordinate > single + 0.2


def test_log_sum_finds_columns_and_the_last_width_is_the_final_one() -> None:
    left, truth = dictionary(1000, 10)
    begin = starts(50, left)
    slope = sphere.log_sum(torch.full((50, 1), 1.5))
    ends = sphere.adam(left.float(), begin, slope, sphere.geometric(0.1, 1e-4), 200)
    assert hits(ends, truth, 0.999) > 0.8
    y = torch.linspace(-2, 2, 9).expand(50, 9)
    torch.testing.assert_close(slope(y, 1.0), y / (y.square() + 0.03**2))
    torch.testing.assert_close(slope(y, 0.0), y / (y.square() + 1.5**2))


def test_slopes_are_the_derivatives_of_their_losses() -> None:
    y = torch.linspace(-0.4, 0.4, 9, dtype=torch.float64).requires_grad_()
    losses = {
        sphere.l1: y.abs().sum(),
        sphere.negative_l4: -(y**4).sum() / 4,
        sphere.log_cosh(6.0): (2 * y).cosh().log().sum() / 2,  # nine rows: mu / sqrt(9) = 2
    }
    for slope, loss in losses.items():
        (expected,) = torch.autograd.grad(loss, y, retain_graph=True)
        torch.testing.assert_close(slope(y.detach(), 0.0), expected)


@pytest.mark.parametrize("mu", [300.0, 30.0])
def test_rounding_by_sampling_makes_minima_of_a_smooth_loss_exact(mu: float) -> None:
    left, truth = dictionary(400, 12)
    slope = sphere.log_cosh(mu)
    near = sphere.scalar_adam(left.float(), starts(40, left), slope, sphere.stepwise(0.1), 300)
    rounded = sphere.round_by_sampling(left, near.double(), 18, rng())
    assert hits(near, truth, 1 - 1e-9) == 0
    assert hits(rounded, truth, 1 - 1e-9) > 0.6 * hits(near, truth, 0.99) > 0.3


def test_refinement_averages_noise_over_all_zeros() -> None:
    left, truth = dictionary(1000, 10)
    noise = 1e-3
    noisy = left + noise * torch.randn(left.shape, generator=rng(3), dtype=torch.float64)
    near = normalize(truth + 0.05 * sphere.uniform(10, truth, rng()), dim=1)
    level = torch.full((10,), noise, dtype=torch.float64)
    refined = sphere.refine(noisy, near, zeros=430, noise=level)
    assert float((1 - (refined * truth).sum(1).abs()).max()) < 1e-4
    assert len(sphere.refine(left, near[:0], 430, level)) == 0
