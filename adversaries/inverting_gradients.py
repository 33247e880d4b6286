"""Inverting Gradients: matching the direction of the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Generator, Tensor
from torch.func import vmap

from .base import Adversary, InputSpace, NotApplicable, Observation, Reconstruction
from .label_inference import infer_targets

_TINY = 1e-30  # keeps a cosine with nothing at zero
_FLOATS_AT_ONCE = 2**25  # gradient entries held at once while vectorising over guesses


@dataclass(frozen=True)
class InvertingGradients(Adversary):
    """Search for inputs whose replayed update points the way of the observed one.

    Minimises 1 - cos(update(x), observed) + `total_variation` * TV(x) within the range of the
    data, by Adam on the sign of the gradient, with the step size divided by ten after 3/8, 5/8
    and 7/8 of the iterations. The update is replayed by the client's own code, so that one
    local step or many, and a known defense, are the same to the attack. Labels are inferred
    unless granted. All observations and restarts are optimised at once.

    Attributes:
        iterations: Optimisation steps.
        restarts: Random starts; the one with the lowest objective is kept.
        lr: Initial step size of Adam.
        total_variation: Weight of the total-variation prior.

    References:
        Geiping, Bauermeister, Droege, Moeller. "Inverting Gradients: How easy is it to break
        privacy in federated learning?" NeurIPS 2020. https://arxiv.org/abs/2003.14053
    """

    simulates: ClassVar[bool] = True

    iterations: int = 24_000
    restarts: int = 1
    lr: float = 0.1
    total_variation: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if not 0 <= self.total_variation < math.inf:
            raise ValueError(f"total_variation must be >= 0, got {self.total_variation}")

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the best guess of all iterations and restarts, by the attack's objective."""
        (result,) = self.reconstruct_all([observation], [rng])
        if isinstance(result, NotApplicable):
            raise result
        return result

    def reconstruct_all(
        self, observations: Sequence[Observation], rngs: Sequence[Generator]
    ) -> list[Reconstruction | NotApplicable]:
        """Attack observations together where they replay the same client on as many examples."""
        results: list[Reconstruction | NotApplicable | None] = [None] * len(observations)
        groups: dict[tuple[object, int], list[int]] = {}
        targets: dict[int, Tensor] = {}
        for index, (observation, rng) in enumerate(zip(observations, rngs, strict=True)):
            try:
                targets[index] = _targets(observation, rng)
            except NotApplicable as reason:
                results[index] = reason
            else:
                alike = (observation.replay, observation.batch_size)
                groups.setdefault(alike, []).append(index)
        for group in groups.values():
            size = self._at_once(observations[group[0]])
            for part in (group[i : i + size] for i in range(0, len(group), size)):
                guesses = self._search(
                    [observations[i] for i in part],
                    torch.stack([targets[i] for i in part]),
                    [rngs[i] for i in part],
                )
                for index, guess in zip(part, guesses, strict=True):
                    results[index] = guess
        return cast("list[Reconstruction | NotApplicable]", results)

    def objective(self, observation: Observation, inputs: Tensor, targets: Tensor) -> float:
        """Return the matching loss and the prior at a guess."""
        observed = observation.update
        with torch.no_grad():
            replayed = observation.simulate(inputs, targets)
            product = sum((replayed[name] * observed[name]).sum() for name in observed)
            cosine = product / (_norm(replayed) * _norm(observed)).clamp(min=_TINY)
            return float(1 - cosine + self.total_variation * _total_variation(inputs))

    def _at_once(self, observation: Observation) -> int:
        entries = sum(value.numel() for value in observation.update.values())
        return max(1, _FLOATS_AT_ONCE // (entries * self.restarts))

    def _search(
        self, observations: Sequence[Observation], targets: Tensor, rngs: Sequence[Generator]
    ) -> list[Reconstruction]:
        """Optimise guesses of shape (observations x restarts, batch, ...) in one loop."""
        first = observations[0]
        shape = (self.restarts, first.batch_size, *first.space.shape)
        guess = torch.cat([torch.randn(shape, generator=rng) for rng in rngs])
        guess = first.space.clamp(guess).requires_grad_()
        labels = targets.repeat_interleave(self.restarts, 0)
        observed = {
            name: torch.stack([o.update[name] for o in observations]).repeat_interleave(
                self.restarts, 0
            )
            for name in first.update
        }

        replay = _vectorised(first.replay, guess, labels, observed)
        best, lowest = self._minimise(
            lambda guess: self._evaluate(guess, replay(guess, labels, observed), observed),
            guess,
            first.space,
        )
        return [
            Reconstruction(guesses[values.argmin()], labels, float(values.min()))
            for guesses, values, labels in zip(
                best.split(self.restarts), lowest.split(self.restarts), targets, strict=True
            )
        ]

    def _evaluate(
        self, guess: Tensor, replayed: Mapping[str, Tensor], observed: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return each guess's objective and its slope.

        The slope of the cosine in the replayed update is known, so that autograd need not keep
        products as large as the update.
        """
        prior = self.total_variation * vmap(_total_variation)(guess)
        (slope,) = torch.autograd.grad(prior.sum(), guess)
        with torch.no_grad():
            rows = [
                (replayed[name] * value).flatten(1).sum(dim=1) for name, value in observed.items()
            ]
            product = torch.stack(rows).sum(dim=0)
            length = torch.stack([v.flatten(1).norm(dim=1) for v in replayed.values()]).norm(dim=0)
            scale = torch.stack([v.flatten(1).norm(dim=1) for v in observed.values()]).norm(dim=0)
            norms = (length * scale).clamp(min=_TINY)
            ratio = product / length.square().clamp(min=_TINY)
            moved = {name: value for name, value in replayed.items() if value.requires_grad}
            pull = [_each(ratio, v) * v - observed[name] for name, v in moved.items()]
        if moved:
            (matching,) = torch.autograd.grad(list(moved.values()), guess, pull)
            slope = slope + matching / _each(norms, guess)
        return 1 - product / norms + prior.detach(), slope

    def _minimise(
        self,
        evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
        guess: Tensor,
        space: InputSpace,
    ) -> tuple[Tensor, Tensor]:
        """Return each guess's best iterate and its objective."""
        optimizer = torch.optim.Adam([guess], lr=self.lr)
        milestones = [self.iterations * eighths // 8 for eighths in (3, 5, 7)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
        best = guess.detach().clone()
        lowest = torch.full((len(guess),), math.inf)
        for _ in range(self.iterations):
            values, slope = evaluate(guess)
            better = values < lowest
            lowest = torch.where(better, values, lowest)
            best[better] = guess.detach()[better]
            guess.grad = slope.sign()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                guess.copy_(space.clamp(guess))
        return best, lowest


Replay = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Mapping[str, Tensor]]


def _vectorised(
    replay: Replay, inputs: Tensor, labels: Tensor, observed: Mapping[str, Tensor]
) -> Replay:
    """Return the replay of many guesses, at once if the replayed code allows it."""
    at_once: Replay = vmap(replay, randomness="different")

    def one_by_one(
        inputs: Tensor, labels: Tensor, observed: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        updates = [{name: value[i] for name, value in observed.items()} for i in range(len(inputs))]
        replayed = [replay(*one) for one in zip(inputs, labels, updates, strict=True)]
        return {name: torch.stack([update[name] for update in replayed]) for name in observed}

    try:
        at_once(inputs, labels, observed)
    except RuntimeError:  # a defense that branches on values, or takes them out of tensors
        return one_by_one
    return at_once


def _targets(observation: Observation, rng: Generator) -> Tensor:
    if observation.space.vocabulary is not None:
        raise NotApplicable("tokens cannot be optimised by gradient descent")
    return infer_targets(observation, rng)


def _each(values: Tensor, like: Tensor) -> Tensor:
    """Shape one value per guess so that it multiplies all entries of that guess."""
    return values.view(-1, *[1] * (like.dim() - 1))


def _norm(update: Mapping[str, Tensor]) -> Tensor:
    squares = [torch.linalg.vector_norm(value).square() for value in update.values()]
    return torch.stack(squares).sum().sqrt()


def _total_variation(inputs: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring values, along the spatial axes."""
    differences = [inputs.diff(dim=axis).abs().mean() for axis in range(2, inputs.dim())]
    return torch.stack(differences).sum() if differences else inputs.new_zeros(())
