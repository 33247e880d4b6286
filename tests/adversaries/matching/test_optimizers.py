import math
from collections.abc import Callable

import pytest
import torch
from federated import rng
from torch import Tensor

from leakfrontier.adversaries.matching.optimizers import (
    LBFGS,
    Adam,
    Evaluate,
    Optimizer,
    Unknowns,
    _Curvature,
    cosine_decay,
    step_decay,
)


def rosenbrock(points: Tensor) -> Tensor:
    """A curved valley with its minimum, 0, at (1, ..., 1); harder in later rows."""
    slant = 10.0 * torch.arange(1, len(points) + 1).unsqueeze(1)
    left, right = points[:, :-1], points[:, 1:]
    return (slant * (right - left.square()).square() + (1 - left).square()).sum(dim=1)


def evaluation(function: Callable[[Tensor], Tensor]) -> Evaluate:
    def evaluate(unknowns: Unknowns) -> tuple[Tensor, Unknowns]:
        leaves = {name: value.detach().requires_grad_() for name, value in unknowns.items()}
        values = function(torch.cat([value.flatten(1) for value in leaves.values()], dim=1))
        slopes = torch.autograd.grad(values.sum(), list(leaves.values()))
        return values.detach(), dict(zip(leaves, slopes, strict=True))

    return evaluate


def minimise(
    optimizer: Optimizer,
    function: Callable[[Tensor], Tensor],
    start: Tensor,
    draws: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    best, values = optimizer.minimise(
        evaluation(function),
        {"point": start},
        lambda unknowns: unknowns,
        lambda like: torch.randn(like.shape, generator=draws),
    )
    return best["point"], values


def test_lbfgs_finds_the_minimum_of_every_row_as_torch_does_of_each() -> None:
    start = torch.randn(4, 10, generator=rng(), dtype=torch.float64)
    points, values = minimise(LBFGS(400), rosenbrock, start)
    assert values.max() < 1e-10
    for row in range(4):
        alone = start[row : row + 1].clone().requires_grad_()
        theirs = torch.optim.LBFGS([alone], max_iter=400, line_search_fn="strong_wolfe")

        def closure(alone: Tensor = alone, row: int = row) -> Tensor:
            value = rosenbrock(alone.expand(4, -1))[row]
            (alone.grad,) = torch.autograd.grad(value, alone)
            return value

        theirs.step(closure)
        torch.testing.assert_close(points[row], alone[0].detach(), atol=1e-3, rtol=0)


def test_lbfgs_needs_few_more_evaluations_than_torch() -> None:
    start = torch.randn(1, 50, generator=rng(), dtype=torch.float64)
    alone, counted = start.clone().requires_grad_(), 0
    theirs = torch.optim.LBFGS(
        [alone], max_iter=10_000, history_size=100, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        nonlocal counted
        counted += 1
        value = rosenbrock(alone).sum()
        (alone.grad,) = torch.autograd.grad(value, alone)
        return value

    theirs.step(closure)
    reached = float(rosenbrock(alone.detach()))
    _, values = minimise(LBFGS(2 * counted), rosenbrock, start)
    assert values <= max(reached, 1e-12)


def test_rows_do_not_mix() -> None:
    start = torch.randn(3, 6, generator=rng(), dtype=torch.float64)
    for optimizer in (LBFGS(60), Adam(60, signed=True, look_ahead=0.3, weight_decay=0.1)):
        together, _ = minimise(optimizer, lambda points: points.pow(4).sum(dim=1), start)
        for row in range(3):
            alone, _ = minimise(
                optimizer, lambda points: points.pow(4).sum(dim=1), start[row : row + 1]
            )
            torch.testing.assert_close(together[row], alone[0], rtol=1e-6, atol=1e-6)


def test_a_row_that_is_not_a_number_stops_no_other() -> None:
    start = torch.ones(2, 5)

    def broken(points: Tensor) -> Tensor:
        return torch.where(torch.tensor([False, True]), math.nan, points.square().sum(dim=1))

    for optimizer in (LBFGS(40), Adam(200)):
        points, values = minimise(optimizer, broken, start)
        assert values[0] < 1e-2
        torch.testing.assert_close(points[1], start[1])


def test_curvature_is_the_two_loop_recursion() -> None:
    draws, history = rng(), 5
    weights = torch.rand(3, 8, generator=draws, dtype=torch.float64) + 0.1
    curvature, pairs = _Curvature(history, weights), []
    for _ in range(8):
        step = torch.randn(3, 8, generator=draws, dtype=torch.float64)
        taken = torch.tensor([[True], [True], [bool(torch.rand((), generator=draws) < 0.5)]])
        curvature.learn(taken, step, weights * step)
        pairs.append((taken * step, taken * weights * step))
    slope = torch.randn(3, 8, generator=draws, dtype=torch.float64)

    expected, shares = slope.clone(), []
    for step, change in reversed(pairs[-history:]):
        product = (step * change).sum(dim=1, keepdim=True)
        share = torch.where(product > 0, (step * expected).sum(dim=1, keepdim=True) / product, 0.0)
        expected -= share * change
        shares.append(share)
    expected *= curvature.scale
    for step, change in pairs[-history:]:
        product = (step * change).sum(dim=1, keepdim=True)
        inner = (change * expected).sum(dim=1, keepdim=True)
        expected += torch.where(product > 0, shares.pop() - inner / product, 0.0) * step
    torch.testing.assert_close(curvature.times(slope), expected)
    curvature.forget(torch.tensor([[True], [False], [False]]))
    torch.testing.assert_close(curvature.times(slope)[0], slope[0])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_torchs(decay: float) -> None:
    start = torch.randn(2, 5, generator=rng())
    seen: list[Tensor] = []

    def watched(points: Tensor) -> Tensor:
        seen.append(points.detach().clone())
        return points.square().sum(dim=1)

    minimise(Adam(40, lr=0.3, schedule=step_decay, weight_decay=decay), watched, start)
    expected = start.clone().requires_grad_()
    theirs = torch.optim.AdamW([expected], lr=0.3, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.MultiStepLR(theirs, [15, 25, 35], gamma=0.1)
    for point in seen:
        torch.testing.assert_close(point, expected.detach())
        (expected.grad,) = torch.autograd.grad(expected.square().sum(), expected)
        theirs.step()
        schedule.step()


def test_looking_ahead_mixes_the_slopes_before_and_after_a_step() -> None:
    start = torch.randn(1, 5, generator=rng())
    seen: list[Tensor] = []

    def watched(points: Tensor) -> Tensor:
        seen.append(points.detach().clone())
        return points.pow(4).sum(dim=1)

    minimise(Adam(3, lr=0.2, signed=True, look_ahead=0.3), watched, start)
    point = start.clone()
    theirs = torch.optim.AdamW([point], lr=0.2, weight_decay=0.0)
    for iteration in range(2):
        here = point.clone()
        point.grad = first = point.pow(3).sign()
        theirs.step()
        torch.testing.assert_close(seen[2 * iteration + 1], point)
        second = point.pow(3).sign()
        point.copy_(here)
        point.grad = 0.7 * first + 0.3 * second
        theirs.step()
        torch.testing.assert_close(seen[2 * iteration + 2], point)


def test_noise_comes_from_what_is_given() -> None:
    start = torch.zeros(1, 1000)
    flat = lambda points: (0 * points).sum(dim=1)  # noqa: E731
    seen: list[Tensor] = []

    def watched(points: Tensor) -> Tensor:
        seen.append(points.detach().clone())
        return flat(points)

    minimise(Adam(2, lr=0.5, langevin=0.2), watched, start, rng(3))
    expected = 0.1 * torch.randn(1, 1000, generator=rng(3))
    torch.testing.assert_close(seen[1], expected)


def test_each_unknown_has_its_rate_and_stays_where_it_may_lie() -> None:
    best, _ = Adam(20, lr=0.5, rates={"fixed": 0.0}).minimise(
        evaluation(lambda points: (points - 3).square().sum(dim=1)),
        {"free": torch.zeros(1, 2), "fixed": torch.zeros(1, 2)},
        lambda unknowns: {**unknowns, "free": unknowns["free"].clamp(max=1.0)},
        torch.zeros_like,
    )
    torch.testing.assert_close(best["free"], torch.ones(1, 2))
    torch.testing.assert_close(best["fixed"], torch.zeros(1, 2))


def test_ends_when_all_rows_are_good_enough_or_none_improves() -> None:
    told: list[int] = []
    square = evaluation(lambda points: points.square().sum(dim=1))
    flat = evaluation(lambda points: 1 + 0 * points.sum(dim=1))
    for optimizer, evaluate, last in (
        (Adam(100, goal=0.5), square, None),
        (Adam(100, patience=7), flat, 7),
    ):
        told.clear()
        _, values = optimizer.minimise(
            evaluate,
            {"point": torch.ones(2, 3)},
            lambda unknowns: unknowns,
            torch.zeros_like,
            lambda iteration, values: told.append(iteration),
        )
        assert told == list(range(len(told)))
        assert len(told) < 100
        assert told[-1] == last or values.max() <= 0.5


def test_the_best_iterate_is_kept() -> None:
    start = torch.full((1, 1), 0.1)
    points, values = minimise(Adam(10, lr=5.0), lambda p: p.square().sum(dim=1), start)
    torch.testing.assert_close(points, start)  # the first step overshoots by far
    assert float(values) == pytest.approx(0.01)


def test_schedules() -> None:
    assert [step_decay(i, 8) for i in (0, 2, 3, 5, 7)] == pytest.approx([1, 1, 0.1, 0.01, 0.001])
    assert cosine_decay(0, 100) == 1
    assert cosine_decay(50, 100) == pytest.approx(0.5)
    assert cosine_decay(0, 100, warmup=9) == pytest.approx(0.1)
