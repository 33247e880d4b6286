"""What an attack's guesses are worth: matched to the truth and scored, victim by victim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan

import torch
from torch import Tensor

from leakfrontier.adversaries import Adversary, NotApplicable, Observation, Reconstruction
from leakfrontier.defenses import Batch

from . import metrics
from .rows import AttackRow, Picture
from .scenario import World, generator


@dataclass(frozen=True)
class Scoring:
    """The guesses of one cell beside the truth.

    Attributes:
        world: The scenario and its data.
        adversary: The attack.
        seed: Repetition; with the scenario, it determines the look-alikes.
        victims: Indices of each observation's private examples.
        truths: The private examples.
        observations: What the adversary saw.
        results: What it made of it.
    """

    world: World
    adversary: Adversary
    seed: int
    victims: Sequence[Tensor]
    truths: Sequence[Batch]
    observations: Sequence[Observation]
    results: Sequence[Reconstruction | NotApplicable]

    def __post_init__(self) -> None:
        name = type(self.adversary).__name__
        if len(self.results) != len(self.truths):
            raise ValueError(
                f"{name}.reconstruct_all must return {len(self.truths)} results, "
                f"got {len(self.results)}"
            )
        for result in self.results:
            if not isinstance(result, Reconstruction | NotApplicable):
                raise ValueError(
                    f"{name} must return a Reconstruction, got {type(result).__name__}"
                )

    def rows(self, seconds: float) -> Iterator[AttackRow]:
        """Yield one row per victim."""
        for index, result in enumerate(self.results):
            if isinstance(result, NotApplicable):
                for victim in range(len(self.victims[index])):
                    yield AttackRow(index, victim, reason=str(result))
            else:
                for row in self._score(index, result):
                    yield replace(row, seconds=seconds)

    def pictures(self, count: int) -> Iterator[Picture]:
        """Yield the first victim of the first observations, and its reconstruction."""
        for index, result in list(enumerate(self.results))[:count]:
            if isinstance(result, Reconstruction):
                truth = self._pixels(self.truths[index].inputs)
                guess = self._matched(result, truth)
                shape = tuple(truth.shape[1:])
                yield Picture(index, 0, shape, _bytes(truth[0]), _bytes(guess[0]))

    def _score(self, index: int, result: Reconstruction) -> Iterator[AttackRow]:
        truth = self._pixels(self.truths[index].inputs)
        guess = self._matched(result, truth)
        pool = self._look_alikes(index)
        psnr, ssim = metrics.psnr(guess, truth), metrics.ssim(guess, truth)
        identified = metrics.identified(guess, truth, pool)
        counterfactual = self._counterfactual(index, truth, pool)
        labels = self._labels_correct(index, result, truth)
        at_truth = self.adversary.objective(self.observations[index], *self.truths[index])
        for victim in range(len(truth)):
            yield AttackRow(
                observation=index,
                victim=victim,
                psnr=float(psnr[victim]),
                ssim=_number(ssim[victim]),
                identified=bool(identified[victim]),
                counterfactual=None if counterfactual is None else bool(counterfactual[victim]),
                candidates=pool.shape[1] + 1,
                label_correct=None if labels is None else bool(labels[victim]),
                labels_granted=self.observations[index].targets is not None,
                objective=_number(result.objective),
                objective_at_truth=_number(at_truth),
            )

    def _pixels(self, inputs: Tensor) -> Tensor:
        return self.world.space.to_pixels(inputs)

    def _matched(self, result: Reconstruction, truth: Tensor) -> Tensor:
        """Return a guess for each truth, in pixels; black where the attack gave too few."""
        name = type(self.adversary).__name__
        if result.inputs.shape[1:] != truth.shape[1:]:
            raise ValueError(
                f"{name} must return inputs of shape {tuple(truth.shape[1:])}, "
                f"got {tuple(result.inputs.shape[1:])}"
            )
        if not result.inputs.isfinite().all():
            raise ValueError(f"{name} returned NaN or infinite values")
        guess = torch.cat([self._pixels(result.inputs.detach()), torch.zeros_like(truth[:1])])
        return guess[metrics.match(guess[:-1], truth)]  # -1, no guess, is the black one

    def _look_alikes(self, index: int) -> Tensor:
        """Return the pixels of the examples that each victim has to be told apart from.

        They have the victim's label, so that knowing or inferring labels is of no help.
        """
        train = self.world.train
        rng = generator("look-alikes", self.world.scenario.dataset, self.seed, index)
        count = candidates(self.world) - 1
        chosen = [
            metrics.distractors(
                int(victim), train.targets, train.inputs, self.victims[index], count, rng
            )
            for victim in self.victims[index]
        ]
        return torch.stack([self._pixels(train.inputs[rows]) for rows in chosen])

    def _counterfactual(self, index: int, truth: Tensor, pool: Tensor) -> Tensor | None:
        """Return whether another observation's guess identifies the victims."""
        other = self.results[(index + 1) % len(self.results)]
        if len(self.results) < 2 or isinstance(other, NotApplicable):
            return None
        return metrics.identified(self._matched(other, truth), truth, pool)

    def _labels_correct(self, index: int, result: Reconstruction, truth: Tensor) -> Tensor | None:
        """Return whether the labels of the matched guesses are right, if they were inferred."""
        if result.targets is None or self.observations[index].targets is not None:
            return None
        guessed = torch.cat([result.targets, torch.tensor([-1])])
        matched = guessed[metrics.match(self._pixels(result.inputs.detach()), truth)]
        return matched == self.truths[index].targets


def candidates(world: World) -> int:
    """Return the number of look-alikes: as asked for, or what the smallest class allows."""
    counts = torch.bincount(world.train.targets)
    counts = torch.where(counts > 0, counts, counts.max())
    label, batch_size = int(counts.argmin()), world.scenario.batch_size
    allowed = int(counts[label]) - batch_size + 1
    if allowed < 2:
        raise ValueError(
            f"class {label} of {world.scenario.dataset} has {counts[label]} training examples: "
            f"batches of {batch_size} and their look-alikes need at least {batch_size + 1}"
        )
    return min(world.scenario.candidates, allowed)


def _bytes(pixels: Tensor) -> bytes:
    return pixels.clamp(0, 1).mul(255).round().to(torch.uint8).numpy().tobytes()


def _number(value: Tensor | float | None) -> float | None:
    return None if value is None or isnan(value) else float(value)
