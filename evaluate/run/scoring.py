"""Matches an attack's guesses to the private examples and scores them, victim by victim."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor

from leakfrontier.adversaries import Adversary, NotApplicable, Reconstruction
from leakfrontier.defenses import Batch, Defense, Refused

from ..client.client import Upload
from ..foundations.rows import AttackOutcome, AttackRow, Rendering, Score
from ..foundations.seeds import generator
from ..world.scenario import World
from ..world.victims import look_alikes


@dataclass(frozen=True)
class Attempt:
    """An attack on one observation.

    Attributes:
        observation: The number of the observation.
        victims: Indices of the private examples that are scored. If the server sees only a sum of
            several clients, these are the examples of the first client.
        result: The adversary's reconstruction, or the reason why there is none.
        upload: The upload with its private examples; None if there was none.
    """

    observation: int
    victims: Tensor
    result: Reconstruction | NotApplicable | Refused
    upload: Upload | None = None


class _Matched(NamedTuple):
    """The guesses that are assigned to private examples.

    Attributes:
        rows: The row of each example's guess; -1 for none.
        values: The guesses on the scale of the data; the modality's `nothing` if there is none.
    """

    rows: Tensor
    values: Tensor


@dataclass(frozen=True)
class Scoring:
    """Compares the guesses of one cell with the truth.

    Attributes:
        world: The scenario and its data.
        defense: The defense. It may have transformed the examples.
        adversary: The attack.
        seed: Repetition. Together with the scenario, it determines the look-alikes.
        attempts: The attacks.
        bound: Maps the success of a blind guess to the largest success that the guarantee allows;
            None without a guarantee.
    """

    world: World
    defense: Defense
    adversary: Adversary
    seed: int
    attempts: Sequence[Attempt]
    bound: Callable[[float], float] | None = None
    _own: dict[int, _Matched] = field(default_factory=dict)

    def rows(self, seconds: float) -> Iterator[tuple[AttackRow, tuple[Score, ...]]]:
        """Yield the row and the scores of each victim."""
        for index, attempt in enumerate(self.attempts):
            guess = _guess(attempt)
            if guess is not None:
                for row, scores in self._score(index, *guess):
                    yield replace(row, seconds=seconds), scores
                continue
            outcome: AttackOutcome = "not applicable"
            if isinstance(attempt.result, Refused):
                outcome = "refused"
            for victim in range(len(attempt.victims)):
                reason = str(attempt.result)
                yield AttackRow(attempt.observation, victim, outcome, reason), ()

    def renderings(self, observations: Container[int], each: int = 1) -> Iterator[Rendering]:
        """Yield the first victims of some observations, and their reconstructions.

        Args:
            observations: The observations to show.
            each: How many victims to show of each.
        """
        modality = self.world.modality
        for index, attempt in enumerate(self.attempts):
            guess = _guess(attempt)
            if guess is None or attempt.observation not in observations:
                continue
            upload, result = guess
            truth = modality.values(upload.truth.inputs)
            shown = self._matched(index, upload, result).values
            for victim in range(min(each, len(attempt.victims))):
                files = modality.render(truth[victim]), modality.render(shown[victim])
                yield Rendering(attempt.observation, victim, modality.media, *files)

    def _score(
        self, index: int, upload: Upload, result: Reconstruction
    ) -> Iterator[tuple[AttackRow, tuple[Score, ...]]]:
        attempt, modality = self.attempts[index], self.world.modality
        victims, number = len(attempt.victims), attempt.observation
        truth = modality.values(upload.truth.inputs)[:victims]
        matched = self._matched(index, upload, result)
        pool = self._look_alikes(attempt, upload)
        metrics = modality.scores(matched.values[:victims], truth)
        identified = self._identified(matched, upload.truth, pool)
        transformed = self._against_transformed(attempt, upload, result, pool)
        either = identified if transformed is None else identified | transformed[0]
        if transformed is not None:
            metrics |= {f"{name}_transformed": value for name, value in transformed[1].items()}
        counterfactual = self._counterfactual(index, upload, pool)
        labels = _labels_correct(result, upload, matched)
        at_truth = self.adversary.objective(upload.observation, *upload.truth)
        tries = 1 if transformed is None else 2
        for victim in range(victims):
            row = AttackRow(
                observation=number,
                victim=victim,
                identified=bool(either[victim]),
                identified_original=bool(identified[victim]),
                transformed=transformed is not None,
                counterfactual=None if counterfactual is None else bool(counterfactual[victim]),
                candidates=pool.shape[1] + 1,
                label_correct=None if labels is None else bool(labels[victim]),
                labels_granted=upload.observation.targets is not None
                or upload.observation.candidates is not None,
                objective=_number(result.objective),
                objective_at_truth=_number(at_truth),
                bound=self._bound(pool.shape[1] + 1, tries),
            )
            scores = (
                Score(number, victim, name, float(values[victim]))
                for name, values in metrics.items()
                if not isnan(values[victim])
            )
            yield row, tuple(scores)

    def _bound(self, candidates: int, tries: int) -> float | None:
        """Return the proven bound on identification.

        Each guess is nearest to at most one candidate, both for the victim and for its transformed
        version. This limits the success of guesses that ignore the upload. The number of guesses
        may depend on the upload, so the largest number over all uploads counts, and at least one.
        A guess that counts only for one victim is one guess.
        """
        if self.bound is None:
            return None
        found = (_guess(attempt) for attempt in self.attempts)
        scored = [one for one in found if one is not None and not _in_order(one[0])]
        guesses = max([1, *(len(result.inputs) for _, result in scored)])
        return self.bound(min(1.0, tries * guesses / candidates))

    def _matched(self, index: int, upload: Upload, result: Reconstruction) -> _Matched:
        """Return the guesses of an attempt, assigned to the private examples; computed once."""
        if index not in self._own:
            self._own[index] = self._match(result, upload.truth, in_order=_in_order(upload))
        return self._own[index]

    def _match(self, result: Reconstruction, private: Batch, *, in_order: bool) -> _Matched:
        """Assign guesses to private examples."""
        name, modality = type(self.adversary).__name__, self.world.modality
        if not isinstance(result.inputs, Tensor):
            raise ValueError(
                f"{name} must return a tensor of inputs, got {type(result.inputs).__name__}"
            )
        if result.inputs.is_floating_point() != private.inputs.is_floating_point():
            raise ValueError(
                f"{name} must return inputs of {private.inputs.dtype}, got {result.inputs.dtype}"
            )
        if result.inputs.shape[1:] != private.inputs.shape[1:]:
            raise ValueError(
                f"{name} must return inputs of shape {tuple(private.inputs.shape[1:])}, "
                f"got {tuple(result.inputs.shape[1:])}"
            )
        if not result.inputs.isfinite().all():
            raise ValueError(f"{name} returned NaN or infinite values")
        guess = modality.values(result.inputs.detach())
        if in_order:
            if len(guess) != len(private.inputs):
                raise ValueError(
                    f"{name} must return one guess for each of the {len(private.inputs)} private "
                    f"examples, in the order of their candidates, got {len(guess)}"
                )
            rows = torch.arange(len(guess), device=guess.device)
        else:
            rows = modality.match(guess, modality.values(private.inputs))
        return _Matched(rows, torch.cat([guess, modality.nothing(guess)])[rows])

    def _identified(self, matched: _Matched, private: Batch, pool: Tensor) -> Tensor:
        """Return which victims are identified among their look-alikes; none without a guess."""
        truth, count = self.world.modality.values(private.inputs), len(pool)
        found = self.world.modality.identified(matched.values[:count], truth[:count], pool)
        return found & (matched.rows >= 0)[:count]

    def _against_transformed(
        self, attempt: Attempt, upload: Upload, result: Reconstruction, pool: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return identification and metrics against the trained examples, if they differ."""
        seen, count, modality = upload.trained_on, len(pool), self.world.modality
        if seen.inputs.shape != upload.truth.inputs.shape or torch.equal(
            seen.inputs, upload.truth.inputs
        ):
            return None
        dataset = self.world.scenario.data_name
        rng = generator("transformed look-alikes", dataset, self.seed, attempt.observation)
        labels = seen.targets[:count].repeat_interleave(pool.shape[1], 0)
        inputs = modality.inputs(pool.flatten(0, 1))
        transformed = self.defense.on_batch(Batch(inputs, labels), rng).inputs
        matched = self._match(result, seen, in_order=_in_order(upload))
        metrics = modality.scores(matched.values, modality.values(seen.inputs))
        others = modality.values(transformed).view_as(pool)
        return self._identified(matched, seen, others), metrics

    def _look_alikes(self, attempt: Attempt, upload: Upload) -> Tensor:
        """Return the look-alikes of each victim: those that the adversary is given, if any."""
        rows = look_alikes(
            self.world,
            attempt.victims,
            seed=self.seed,
            observation=attempt.observation,
            disjoint=upload.observation.candidates is not None and not self.adversary.informed,
        )
        return self.world.train_values.at(rows).inputs

    def _counterfactual(self, index: int, upload: Upload, pool: Tensor) -> Tensor | None:
        """Return whether the guesses for an observation with other victims identify these."""
        own = {*self.attempts[index].victims.tolist()}
        others = (*self.attempts[index + 1 :], *self.attempts[:index])
        other = next((one for one in others if own.isdisjoint(one.victims.tolist())), None)
        if other is None or not isinstance(other.result, Reconstruction):
            return None
        result, in_order = other.result, _in_order(upload) and len(other.result.inputs) > 0
        if in_order:  # uploads may have other numbers of examples
            result = _one_for_each(result, len(upload.truth.inputs))
        matched = self._match(result, upload.truth, in_order=in_order)
        return self._identified(matched, upload.truth, pool)


def _one_for_each(result: Reconstruction, examples: int) -> Reconstruction:
    """Return guesses for a number of examples. Too few guesses are repeated."""
    rows = torch.arange(examples, device=result.inputs.device)
    return Reconstruction(result.inputs[rows.remainder(len(result.inputs))])


def _labels_correct(result: Reconstruction, upload: Upload, matched: _Matched) -> Tensor | None:
    """Return whether the labels of the matched guesses are right; None if not inferred."""
    granted = upload.observation.targets is not None
    if result.targets is None or granted or upload.truth.targets.dim() > 1:  # no labels
        return None
    guessed = torch.cat([result.targets, result.targets.new_tensor([-1])])
    return guessed[matched.rows] == upload.truth.targets


def _guess(attempt: Attempt) -> tuple[Upload, Reconstruction] | None:
    """Return the upload and its reconstruction; None if there is nothing to score."""
    if attempt.upload is None or not isinstance(attempt.result, Reconstruction):
        return None
    return attempt.upload, attempt.result


def _in_order(upload: Upload) -> bool:
    """Return whether each guess counts only for the example whose candidates it is chosen from."""
    return upload.observation.candidates is not None and len(upload.truth.inputs) > 1


def _number(value: Tensor | float | None) -> float | None:
    return None if value is None or isnan(value) else float(value)
