"""Optimizers that minimise many independent guesses at once.

The unknowns are a dictionary of tensors with one row per guess. Rows never mix: Adam works
elementwise, and L-BFGS keeps a step and a curvature for each row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

Unknowns = dict[str, Tensor]
"""The tensors to search for, by name, with one row per guess."""

Evaluate = Callable[[Unknowns], tuple[Tensor, Unknowns]]
"""Maps unknowns to each guess's objective and its slope."""

Progress = Callable[[int, Tensor], None]
"""Receives the iteration and the objective of every guess."""

_HUGE = 1e38  # initial value of the lowest objective


@dataclass(frozen=True)
class Optimizer(ABC):
    """A way to minimise an objective.

    Attributes:
        iterations: Largest number of steps.
        goal: The search ends when the objectives of all guesses have reached this value.
        patience: The search ends if no guess's objective falls by more than 0.01 % in this many
            iterations.
    """

    iterations: int
    goal: float = -math.inf
    patience: float = math.inf

    def minimise(
        self,
        evaluate: Evaluate,
        start: Unknowns,
        project: Callable[[Unknowns], Unknowns],
        draw: Callable[[Tensor], Tensor],
        progress: Progress | None = None,
    ) -> tuple[Unknowns, Tensor]:
        """Return each guess's best iterate and its objective.

        Args:
            evaluate: Returns the objective and its slope.
            start: First guesses.
            project: Projects unknowns to their valid range.
            draw: Draws normal noise of a tensor's shape.
            progress: Called after every iteration.
        """
        start = project(start)
        best = {name: value.clone() for name, value in start.items()}
        first = next(iter(start.values()))
        lowest = first.new_full((len(first),), _HUGE)
        last_gain = 0
        steps = islice(self.steps(evaluate, start, project, draw), self.iterations)
        for iteration, (unknowns, values) in enumerate(steps):
            better = values < lowest  # false where NaN
            if (values < lowest - 1e-4 * lowest.abs()).any():
                last_gain = iteration
            lowest = torch.where(better, values, lowest)
            for name, value in unknowns.items():
                best[name][better] = value[better]
            if progress is not None:
                progress(iteration, values)
            if (lowest <= self.goal).all() or iteration - last_gain >= self.patience:
                break
        return best, lowest

    @abstractmethod
    def steps(
        self,
        evaluate: Evaluate,
        start: Unknowns,
        project: Callable[[Unknowns], Unknowns],
        draw: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[Unknowns, Tensor]]:
        """Yield iterates and their objectives."""


def constant(iteration: int, iterations: int) -> float:
    """Return 1, for a constant step size."""
    return 1.0


def step_decay(iteration: int, iterations: int) -> float:
    """Return 0.1 after 3/8 of the iterations, 0.01 after 5/8 and 0.001 after 7/8."""
    return 0.1 ** sum(iteration >= iterations * eighths // 8 for eighths in (3, 5, 7))


def cosine_decay(iteration: int, iterations: int, warmup: int = 0) -> float:
    """Return a factor that rises linearly during `warmup` and falls to zero as a cosine."""
    rise = min(1.0, (iteration + 1) / (warmup + 1))
    return rise * (1 + math.cos(math.pi * iteration / iterations)) / 2


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, or AdamW, with a schedule of step sizes.

    Attributes:
        lr: Initial step size.
        rates: Initial step sizes of unknowns that do not use `lr`, by name.
        schedule: Maps the iteration and the number of iterations to a factor of the step size.
        signed: Whether Adam receives only the sign of the slope.
        weight_decay: Decoupled weight decay, in units of the step size.
        langevin: Standard deviation of the noise added to a step, in units of the step size.
        look_ahead: Weight of the slope at the end of a step. The rest is the slope at its start.
    """

    lr: float = 0.1
    rates: Mapping[str, float] = field(default_factory=dict)
    schedule: Callable[[int, int], float] = constant
    signed: bool = False
    weight_decay: float = 0.0
    langevin: float = 0.0
    look_ahead: float = 0.0

    def steps(
        self,
        evaluate: Evaluate,
        start: Unknowns,
        project: Callable[[Unknowns], Unknowns],
        draw: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[Unknowns, Tensor]]:
        """Descend, and yield the same tensors at every step."""
        unknowns = {name: value.clone() for name, value in start.items()}
        optimizer = torch.optim.AdamW(
            [{"params": [value]} for value in unknowns.values()], weight_decay=self.weight_decay
        )
        rates = [self.rates.get(name, self.lr) for name in unknowns]

        def descend(slopes: Unknowns) -> None:
            for name, value in unknowns.items():
                value.grad = slopes[name]
            optimizer.step()

        def followed(slopes: Unknowns) -> Unknowns:
            return {n: slope.sign() for n, slope in slopes.items()} if self.signed else slopes

        for iteration in range(self.iterations):
            factor = self.schedule(iteration, self.iterations)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            values, slopes = evaluate(unknowns)
            yield unknowns, values
            slopes = followed(slopes)
            if self.look_ahead:
                here = {name: value.clone() for name, value in unknowns.items()}
                descend(slopes)
                ahead = followed(evaluate(unknowns)[1])
                slopes = {n: slope.lerp(ahead[n], self.look_ahead) for n, slope in slopes.items()}
                _assign(unknowns, here)
            descend(slopes)
            if self.langevin:
                for value, rate in zip(unknowns.values(), rates, strict=True):
                    value.add_(draw(value), alpha=self.langevin * rate * factor)
            _assign(unknowns, project(unknowns))


def _assign(unknowns: Unknowns, values: Unknowns) -> None:
    for name, value in values.items():
        unknowns[name].copy_(value)


@dataclass(frozen=True)
class LBFGS(Optimizer):
    """Limited-memory BFGS with backtracking.

    A guess takes its step if the trial point lowers its objective enough (Armijo's condition).
    The other guesses halve their steps for the next evaluation, which all guesses share.

    Attributes:
        history: Number of steps from which the curvature is estimated.

    References:
        Liu, Nocedal. "On the limited memory BFGS method for large scale optimization."
        Mathematical Programming 45, 1989. https://doi.org/10.1007/BF01589116
    """

    history: int = 100

    def steps(
        self,
        evaluate: Evaluate,
        start: Unknowns,
        project: Callable[[Unknowns], Unknowns],
        draw: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[Unknowns, Tensor]]:
        """Yield trial points, whether they are accepted or not."""

        def unpacked(points: Tensor) -> Unknowns:
            parts = points.split([value[0].numel() for value in start.values()], dim=1)
            return {n: p.reshape(start[n].shape) for n, p in zip(start, parts, strict=True)}

        def evaluate_at(points: Tensor) -> tuple[Tensor, Tensor]:
            values, slopes = evaluate(unpacked(points))
            return values.unsqueeze(1), _flat(slopes)

        point = _flat(start)
        value, slope = evaluate_at(point)
        yield start, value.squeeze(1)
        curvature = _Curvature(min(self.history, self.iterations), point)
        direction, step = -slope, _first_step(slope)
        while True:
            trial = _flat(project(unpacked(point + step * direction)))
            trial_value, trial_slope = evaluate_at(trial)
            yield unpacked(trial), trial_value.squeeze(1)
            taken = trial_value <= value + 1e-4 * _dot(slope, trial - point)  # false where NaN
            stuck = ~taken & ((trial - point).abs().amax(dim=1, keepdim=True) < 1e-8)
            curvature.learn(taken, trial - point, trial_slope - slope)
            curvature.forget(stuck)
            point, value, slope = (
                torch.where(taken, new, old)
                for new, old in ((trial, point), (trial_value, value), (trial_slope, slope))
            )
            newton = -curvature.times(slope)
            uphill = ~(_dot(newton, slope) < 0)
            curvature.forget(uphill)
            direction = torch.where(taken | stuck, torch.where(uphill, -slope, newton), direction)
            first = torch.where(curvature.known, 1.0, _first_step(slope))
            step = torch.where(taken | stuck, first, step / 2)


class _Curvature:
    """Inverse Hessians, estimated from the last steps and the changes of slope along them.

    They are stored in the compact form. A product with all of them takes two passes over the
    history. Byrd, Nocedal, Schnabel. "Representations of quasi-Newton matrices and their use in
    limited memory methods." Mathematical Programming 63, 1994, Theorem 2.2.
    """

    def __init__(self, history: int, like: Tensor) -> None:
        guesses, unknowns = like.shape
        self.pairs = like.new_zeros(guesses, 2, history, unknowns)  # steps and changes
        # Products of steps with changes, and of changes with changes.
        self.products = like.new_zeros(guesses, 2, history, history, dtype=torch.float64)
        self.scale = like.new_ones(guesses, 1)
        self.known = like.new_zeros(guesses, 1, dtype=torch.bool)
        self.next = 0

    def learn(self, taken: Tensor, step: Tensor, change: Tensor) -> None:
        """Store steps and changes of slope where the objective curves upwards."""
        product, square = _dot(step, change), _dot(change, change)
        convex = taken & (product > 1e-10 * square)
        if not convex.any():
            return
        slot, self.next = self.next, (self.next + 1) % self.pairs.shape[2]
        pair = torch.where(convex.unsqueeze(1), torch.stack([step, change], dim=1), 0.0)
        self.pairs[:, :, slot] = pair
        inner = self._inner(pair)
        self.products[:, 0, slot] = inner[:, 0, 1]
        self.products[:, 0, :, slot] = inner[:, 1, 0]
        self.products[:, 1, slot] = self.products[:, 1, :, slot] = inner[:, 1, 1]
        self.scale = torch.where(convex, product / square, self.scale)
        self.known = self.known | convex

    def forget(self, guesses: Tensor) -> None:
        """Reset the curvature of some guesses."""
        if guesses.any():
            rows = guesses.squeeze(1)
            self.pairs[rows], self.products[rows] = 0.0, 0.0
            self.scale[rows], self.known[rows] = 1.0, False

    def times(self, slope: Tensor) -> Tensor:
        """Return the products of the inverse Hessians with the slopes."""
        history = self.pairs.shape[2]
        order = torch.arange(self.next, self.next + history) % history  # oldest first
        crossed, changes = self.products[:, :, order][..., order].unbind(dim=1)
        diagonal = crossed.diagonal(dim1=1, dim2=2).unsqueeze(2)
        upper = crossed.triu() + torch.diag_embed((diagonal == 0).squeeze(2).to(crossed))
        with_steps, with_changes = self._inner(slope.unsqueeze(1))[:, 0, :, order].unbind(dim=1)

        scale = self.scale.double().unsqueeze(2)
        shares = torch.linalg.solve_triangular(upper, with_steps.unsqueeze(2), upper=True)
        inner = diagonal * shares + scale * (changes @ shares - with_changes.unsqueeze(2))
        weights = torch.linalg.solve_triangular(upper.mT, inner, upper=False)

        combination = torch.empty_like(self.pairs[..., 0])
        combination[:, :, order] = torch.cat([weights, -scale * shares], dim=2).mT.to(slope)
        moved = combination.flatten(1).unsqueeze(1) @ self.pairs.flatten(1, 2)
        return self.scale * slope + moved.squeeze(1)

    def _inner(self, vectors: Tensor) -> Tensor:
        """Return the products of vectors with the stored steps and changes."""
        products = vectors @ self.pairs.flatten(1, 2).mT
        return products.double().view(*products.shape[:2], 2, -1)


def _first_step(slope: Tensor) -> Tensor:
    """Return the step size for which the absolute changes of a guess sum to 1."""
    return 1 / slope.abs().sum(dim=1, keepdim=True).clamp(min=1e-30)


def _flat(unknowns: Unknowns) -> Tensor:
    return torch.cat([value.flatten(1) for value in unknowns.values()], dim=1)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(dim=1, keepdim=True)
