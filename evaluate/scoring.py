"""What an attack's guesses are worth: matched to the truth and scored, victim by victim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan

import torch
from torch import Tensor

from leakfrontier.adversaries import Adversary, NotApplicable, Reconstruction
from leakfrontier.defenses import Batch, Defense

from . import metrics
from .client import Upload
from .rendering import image_png
from .rows import AttackRow, Rendering, Score
from .scenario import World, generator


@dataclass(frozen=True)
class Scoring:
    """The guesses of one cell beside the truth.

    Attributes:
        world: The scenario and its data.
        defense: The defense, which may have transformed the examples.
        adversary: The attack.
        seed: Repetition; with the scenario, it determines the look-alikes.
        victims: Indices of each observation's private examples that are scored. Where the server
            sees several clients only together, these are the first client's.
        uploads: What the adversary saw, and what is behind it.
        results: What it made of it.
        bound: From the success of a blind guess to the success that is proven to be the most;
            None without a guarantee.
    """

    world: World
    defense: Defense
    adversary: Adversary
    seed: int
    victims: Sequence[Tensor]
    uploads: Sequence[Upload]
    results: Sequence[Reconstruction | NotApplicable]
    bound: Callable[[float], float] | None = None
    numbers: Sequence[int] = ()

    def __post_init__(self) -> None:
        name = type(self.adversary).__name__
        if len(self.results) != len(self.uploads):
            raise ValueError(
                f"{name}.reconstruct_all must return {len(self.uploads)} results, "
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
                    yield AttackRow(
                        self.numbers[index], victim, outcome="not applicable", reason=str(result)
                    )
            else:
                for row in self._score(index, result):
                    yield replace(row, seconds=seconds)

    def scores(self) -> Iterator[Score]:
        """Yield the metrics of every victim."""
        for index, result in enumerate(self.results):
            if isinstance(result, Reconstruction):
                count, upload = len(self.victims[index]), self.uploads[index]
                truth = self._pixels(upload.truth.inputs)[:count]
                guess = self._guesses(result, upload.truth)[:count]
                found = {"psnr": metrics.psnr(guess, truth), "ssim": metrics.ssim(guess, truth)}
                for name, values in found.items():
                    for victim, value in enumerate(values.tolist()):
                        if not isnan(value):
                            yield Score(self.numbers[index], victim, name, value)

    def renderings(self, count: int) -> Iterator[Rendering]:
        """Yield the first victim of the first observations, and its reconstruction."""
        for index, result in enumerate(self.results):
            if isinstance(result, Reconstruction) and self.numbers[index] < count:
                private = self.uploads[index].truth
                truth, guess = self._pixels(private.inputs), self._guesses(result, private)
                pair = image_png(truth[0]), image_png(guess[0])
                yield Rendering(self.numbers[index], 0, "image/png", *pair)

    def _score(self, index: int, result: Reconstruction) -> Iterator[AttackRow]:
        upload, victims = self.uploads[index], len(self.victims[index])
        pool = self._look_alikes(index)
        identified = self._identified(result, upload.truth, pool)
        psnr_transformed, identified_transformed = self._against_transformed(index, result, pool)
        counterfactual = self._counterfactual(index, pool)
        labels = self._labels_correct(result, upload)
        at_truth = self.adversary.objective(upload.observation, *upload.truth)
        for victim in range(victims):
            transformed = _number(psnr_transformed[victim])
            yield AttackRow(
                observation=self.numbers[index],
                victim=victim,
                transformed=transformed is not None,
                identified=bool(identified[victim] | identified_transformed[victim]),
                identified_original=bool(identified[victim]),
                counterfactual=None if counterfactual is None else bool(counterfactual[victim]),
                candidates=pool.shape[1] + 1,
                label_correct=None if labels is None else bool(labels[victim]),
                labels_granted=upload.observation.targets is not None
                or upload.observation.candidates is not None,
                objective=_number(result.objective),
                objective_at_truth=_number(at_truth),
                bound=self._bound(result, pool.shape[1] + 1, 1 if transformed is None else 2),
            )

    def _bound(self, result: Reconstruction, candidates: int, tries: int) -> float | None:
        """Return the proven bound on identification.

        Every guess is nearest to one candidate at most, for the victim and for what was made of
        it: that many are identified without looking at the upload.
        """
        if self.bound is None:
            return None
        return self.bound(min(1.0, tries * len(result.inputs) / candidates))

    def _pixels(self, inputs: Tensor) -> Tensor:
        return self.world.space.to_pixels(inputs)

    def _guesses(self, result: Reconstruction, private: Batch) -> Tensor:
        """Return a guess for each example, in pixels; black where the attack gave too few."""
        name = type(self.adversary).__name__
        if result.inputs.shape[1:] != private.inputs.shape[1:]:
            raise ValueError(
                f"{name} must return inputs of shape {tuple(private.inputs.shape[1:])}, "
                f"got {tuple(result.inputs.shape[1:])}"
            )
        if not result.inputs.isfinite().all():
            raise ValueError(f"{name} returned NaN or infinite values")
        guess = self._pixels(result.inputs.detach())
        black = guess.new_zeros(1, *guess.shape[1:])
        return torch.cat([guess, black])[self._matches(result, private)]  # -1: no guess

    def _matches(self, result: Reconstruction, private: Batch) -> Tensor:
        return metrics.match(self._pixels(result.inputs.detach()), self._pixels(private.inputs))

    def _identified(self, result: Reconstruction, private: Batch, pool: Tensor) -> Tensor:
        """Return whether each victim is told apart from its look-alikes, given in pixels."""
        guess, truth = self._guesses(result, private), self._pixels(private.inputs)
        return metrics.identified(guess[: len(pool)], truth[: len(pool)], pool)

    def _against_transformed(
        self, index: int, result: Reconstruction, pool: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return PSNR and identification against what was trained on, if it differs."""
        upload, count = self.uploads[index], len(pool)
        seen = upload.trained_on
        if seen.inputs.shape != upload.truth.inputs.shape or torch.equal(
            seen.inputs, upload.truth.inputs
        ):
            return torch.full((count,), torch.nan), torch.zeros(count, dtype=torch.bool)
        number = self.numbers[index]
        rng = generator("transformed look-alikes", self.world.scenario.dataset, self.seed, number)
        labels = seen.targets[:count].repeat_interleave(pool.shape[1], 0)
        inputs = self.world.space.to_inputs(pool.flatten(0, 1))
        transformed = self.defense.on_batch(Batch(inputs, labels), rng).inputs
        psnr = metrics.psnr(self._guesses(result, seen), self._pixels(seen.inputs))
        return psnr, self._identified(result, seen, self._pixels(transformed).view_as(pool))

    def _look_alikes(self, index: int) -> Tensor:
        """Return the pixels of the examples that each victim has to be told apart from."""
        rows = look_alikes(self.world, self.victims[index], self.seed, self.numbers[index])
        return self.world.train_pixels[rows]

    def _counterfactual(self, index: int, pool: Tensor) -> Tensor | None:
        """Return whether another observation's guess identifies the victims."""
        other = self.results[(index + 1) % len(self.results)]
        if len(self.results) < 2 or isinstance(other, NotApplicable):
            return None
        return self._identified(other, self.uploads[index].truth, pool)

    def _labels_correct(self, result: Reconstruction, upload: Upload) -> Tensor | None:
        """Return whether the labels of the matched guesses are right, if they were inferred."""
        if result.targets is None or upload.observation.targets is not None:
            return None
        guessed = torch.cat([result.targets, torch.tensor([-1])])
        return guessed[self._matches(result, upload.truth)] == upload.truth.targets


def look_alikes(world: World, victims: Tensor, seed: int, index: int) -> Tensor:
    """Return the indices of the examples that each victim of an observation is hidden among.

    They have the victim's label, so that knowing or inferring labels is of no help.
    """
    rng = generator("look-alikes", world.scenario.dataset, seed, index)
    count, targets, pixels = candidates(world) - 1, world.train.targets, world.train_pixels
    return torch.stack(
        [metrics.distractors(int(i), targets, pixels, victims, count, rng) for i in victims]
    )


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


def _number(value: Tensor | float | None) -> float | None:
    return None if value is None or isnan(value) else float(value)
