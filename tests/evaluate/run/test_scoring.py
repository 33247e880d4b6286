from __future__ import annotations

import io
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Generator, Tensor

from leakfrontier.adversaries import (
    Adversary,
    NotApplicable,
    Observation,
    PriorAware,
    PriorGuess,
    Reconstruction,
)
from leakfrontier.defenses import Batch, Defense, Refused
from leakfrontier.evaluate.client.client import Upload, observe
from leakfrontier.evaluate.foundations.rows import AttackRow
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.modality.modality import Modality
from leakfrontier.evaluate.run.scoring import Attempt, Scoring
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, World, load_world
from leakfrontier.evaluate.world.victims import candidates, victims


@cache
def world(batch_size: int = 1, knows_targets: bool = False) -> World:
    model = Method(name="mlp", options={"width": 8})
    return load_world(
        Scenario(
            dataset="digits",
            model=model,
            candidates=10,
            batch_size=batch_size,
            knows_targets=knows_targets,
        )
    )


@dataclass
class Inverted(Defense):
    """Train on negatives."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        return Batch(-batch.inputs, batch.targets)


@dataclass(frozen=True)
class Measuring(PriorGuess):
    """Has an objective: the distance of a guess from zero."""

    def objective(self, observation: Observation, inputs: Tensor, targets: Tensor) -> float:
        return float(inputs.norm())


def seen(here: World, number: int, defense: Defense | None = None) -> tuple[Tensor, Upload]:
    sought, defense = victims(here, 0, number), defense or Defense()
    client = here.client(defense, here.model(defense, 0))
    (upload,) = observe(client, [here.train.at(sought)], here.threat(True), generator(number))
    return sought, upload


def attempt(
    here: World, number: int, noise: float | None = 0.0, defense: Defense | None = None
) -> Attempt:
    """Return a guess that is the truth, noisy, or nothing at all."""
    sought, upload = seen(here, number, defense)
    truth = upload.truth
    if noise is None:
        return Attempt(number, sought, Reconstruction(truth.inputs[:0]), upload)
    inputs = truth.inputs + noise * torch.randn(truth.inputs.shape, generator=generator("noise"))
    return Attempt(number, sought, Reconstruction(inputs.flip(0), truth.targets.flip(0)), upload)


def scored(
    here: World,
    *attempts: Attempt,
    defense: Defense | None = None,
    adversary: Adversary | None = None,
) -> list[tuple[AttackRow, dict[str, float]]]:
    scoring = Scoring(here, defense or Defense(), adversary or PriorGuess(), 0, attempts)
    return [
        (row, {score.metric: score.value for score in scores})
        for row, scores in scoring.rows(seconds=2.5)
    ]


def test_the_truth_is_identified_and_exact_in_whatever_order() -> None:
    here = world(batch_size=3)
    found = scored(here, attempt(here, 4))
    assert [(row.observation, row.victim) for row, _ in found] == [(4, 0), (4, 1), (4, 2)]
    for row, values in found:
        assert (row.outcome, row.identified, row.identified_original) == ("scored", True, True)
        assert row.label_correct
        assert not row.labels_granted
        assert (row.candidates, row.seconds, row.bound) == (10, 2.5, None)
        assert values["psnr"] > 100
        assert values["ssim"] == pytest.approx(1)


def test_scores_are_those_of_the_metrics() -> None:
    here = world()
    one = attempt(here, 0, noise=0.3)
    ((_, values),) = scored(here, one)
    assert isinstance(one.result, Reconstruction)
    guess, truth = here.modality.values(one.result.inputs), here.train_values.inputs[one.victims]
    assert values["psnr"] == pytest.approx(float(metrics.psnr(guess, truth)))
    assert values["ssim"] == pytest.approx(float(metrics.ssim(guess, truth)))


def test_no_guess_is_scored_as_black() -> None:
    here = world(batch_size=2)
    for row, values in scored(here, attempt(here, 0, noise=None)):
        assert row.outcome == "scored"
        assert not row.identified
        truth = here.train_values.inputs[victims(here, 0, 0)[row.victim], None]
        assert values["psnr"] == pytest.approx(float(metrics.psnr(0 * truth, truth)))


def test_without_a_guess_nobody_is_identified_however_dark() -> None:
    here = world(batch_size=1)
    darkest, black = 0, attempt(here, 0)
    for number in range(40):  # a victim that black is nearer to than to its look-alikes
        sought, upload = seen(here, number)
        guess = Reconstruction(here.modality.inputs(0 * here.train_values.inputs[sought]))
        darkest, black = number, Attempt(number, sought, guess, upload)
        if scored(here, black)[0][0].identified:
            break
    assert scored(here, black)[0][0].identified
    assert not scored(here, attempt(here, darkest, noise=None))[0][0].identified


def test_what_gave_no_guess_is_a_result_of_its_own() -> None:
    here = world(batch_size=2)
    sought = victims(here, 0, 5)
    for reason, outcome in ((NotApplicable("why"), "not applicable"), (Refused("no"), "refused")):
        found = scored(here, attempt(here, 3), Attempt(5, sought, reason))
        assert [row.outcome for row, _ in found] == ["scored", "scored", outcome, outcome]
        for row, values in found[2:]:
            assert (row.observation, row.reason, row.identified) == (5, str(reason), None)
            assert values == {}
        assert found[0][0].counterfactual is None  # there is no other guess


def test_a_counterfactual_is_the_guess_of_another_observation() -> None:
    here = world()
    rows = [row for row, _ in scored(here, attempt(here, 0), attempt(here, 1))]
    assert [row.identified for row in rows] == [True, True]
    assert [row.counterfactual for row in rows] == [False, False]
    ((alone, _),) = scored(here, attempt(here, 0))
    assert alone.counterfactual is None


def test_a_transformed_example_counts_as_the_original_does() -> None:
    here, defense = world(), Inverted()
    sought, upload = seen(here, 0, defense)
    for inputs, original in ((upload.trained_on.inputs, False), (upload.truth.inputs, True)):
        one = Attempt(0, sought, Reconstruction(inputs), upload)
        ((row, values),) = scored(here, one, defense=defense)
        assert row.transformed
        assert row.identified
        assert row.identified_original == original
        assert (values["psnr"] > 100) == original
        assert (values["psnr_transformed"] > 100) != original
    ((plain, values),) = scored(here, attempt(here, 0))
    assert not plain.transformed
    assert "psnr_transformed" not in values


def test_labels_count_only_where_they_were_guessed() -> None:
    here = world()
    one = attempt(here, 0)
    assert isinstance(one.result, Reconstruction)
    wrong = replace(one.result, targets=(one.result.targets + 1) % 10)  # type: ignore[operator, arg-type]
    none = replace(one.result, targets=None)
    results = (one.result, wrong, none)
    correct = [scored(here, replace(one, result=r))[0][0].label_correct for r in results]
    assert correct == [True, False, None]
    granted = world(knows_targets=True)
    ((row, _),) = scored(granted, attempt(granted, 0))
    assert (row.labels_granted, row.label_correct) == (True, None)


def test_the_objective_is_compared_at_the_guess_and_at_the_truth() -> None:
    here = world()
    one = attempt(here, 0)
    assert isinstance(one.result, Reconstruction)
    assert one.upload is not None
    given = replace(one, result=replace(one.result, objective=0.5))
    ((row, _),) = scored(here, given, adversary=Measuring())
    at_truth = float(one.upload.truth.inputs.norm())
    assert (row.objective, row.objective_at_truth) == (0.5, pytest.approx(at_truth))
    broken = replace(one, result=replace(one.result, objective=torch.nan))
    assert scored(here, broken)[0][0].objective is None


def test_a_bound_counts_every_guess() -> None:
    here = world(batch_size=3)
    scoring = Scoring(here, Defense(), PriorGuess(), 0, [attempt(here, 0)], bound=lambda p: p + 0.1)
    assert [row.bound for row, _ in scoring.rows(0.0)] == [pytest.approx(0.4)] * 3
    transformed = Scoring(
        here, Inverted(), PriorGuess(), 0, [attempt(here, 0, 0.0, Inverted())], bound=lambda p: p
    )
    assert [row.bound for row, _ in transformed.rows(0.0)] == [pytest.approx(0.6)] * 3


def test_a_bound_is_never_that_of_no_guess() -> None:
    """An attack that finds nothing could have guessed: its bound is that of one guess."""
    here = world(batch_size=3)
    silent = [attempt(here, number, noise=None) for number in (0, 1)]
    scoring = Scoring(here, Defense(), PriorGuess(), 0, silent, bound=lambda p: p)
    assert [row.bound for row, _ in scoring.rows(0.0)] == [pytest.approx(0.1)] * 6


def test_a_bound_is_for_the_most_guesses_that_were_made_of_any_upload() -> None:
    here = world(batch_size=3)
    mixed = [attempt(here, 0), attempt(here, 1, noise=None)]
    scoring = Scoring(here, Defense(), PriorGuess(), 0, mixed, bound=lambda p: p)
    assert [row.bound for row, _ in scoring.rows(0.0)] == [pytest.approx(0.3)] * 6


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(1, 3), r"PriorGuess must return inputs of shape \(1, 8, 8\), got \(3,\)"),
        (torch.full((1, 1, 8, 8), torch.nan), "PriorGuess returned NaN or infinite values"),
    ],
)
def test_a_broken_guess_is_named(inputs: Tensor, message: str) -> None:
    here = world()
    sought, upload = seen(here, 0)
    with pytest.raises(ValueError, match=message):
        scored(here, Attempt(0, sought, Reconstruction(inputs), upload))


def test_the_first_observations_are_rendered() -> None:
    here = world(batch_size=2)
    refused = Attempt(1, victims(here, 0, 1), Refused("no"))
    attempts = [attempt(here, 0), refused, attempt(here, 2), attempt(here, 3)]
    shown = list(Scoring(here, Defense(), PriorGuess(), 0, attempts).renderings(range(3)))
    assert [one.observation for one in shown] == [0, 2]
    for one in shown:
        assert (one.victim, one.media) == (0, "image/png")
        assert one.truth == one.guess
        pixels = np.asarray(Image.open(io.BytesIO(one.truth))) / 255
        truth = here.train_values.inputs[victims(here, 0, one.observation)[0], 0]
        assert pixels == pytest.approx(truth.numpy(), abs=0.51 / 255)


def test_more_victims_of_each_are_rendered_on_request() -> None:
    here = world(batch_size=2)
    scoring = Scoring(here, Defense(), PriorGuess(), 0, [attempt(here, 0), attempt(here, 7)])
    shown = [(one.observation, one.victim) for one in scoring.renderings((7,), 3)]
    assert shown == [(7, 0), (7, 1)]


def test_a_counterfactual_is_of_other_victims() -> None:
    """Captures may hold the same examples twice: a guess at them is no other upload's."""
    here = world()
    twice, other = attempt(here, 0), attempt(here, 1)
    again = replace(twice, observation=5)
    found = [row.counterfactual for row, _ in scored(here, twice, again, other)]
    assert found == [False, False, False]
    assert [row.counterfactual for row, _ in scored(here, twice, again)] == [None, None]


def test_guesses_are_assigned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here, calls = world(2), []
    kind = type(here.modality)
    match = kind.match

    def counted(self: Modality, guesses: Tensor, truth: Tensor) -> Tensor:
        calls.append(len(guesses))
        return match(self, guesses, truth)

    monkeypatch.setattr(kind, "match", counted)
    for defense, count in ((Defense(), 1), (Inverted(), 2)):  # and to what was trained on
        calls.clear()
        attempts = [attempt(here, 0, 0.1, defense)]
        scoring = Scoring(here, defense, PriorGuess(), 0, attempts)
        assert len([*scoring.rows(seconds=1.0)]) == 2
        assert len([*scoring.renderings((0,))]) == 1
        assert len(calls) == count


def test_a_guess_among_candidates_counts_only_for_the_example_that_they_belong_to() -> None:
    here = world(batch_size=3)
    sought, upload = seen(here, 0)
    where = {"seed": 0, "observation": 0, "disjoint": True}
    granted = candidates(here, sought, **where)  # type: ignore[arg-type]
    upload = replace(upload, observation=replace(upload.observation, candidates=granted))
    truth, chooses = upload.truth.inputs, PriorAware()
    for inputs, identified in ((truth, True), (truth.roll(1, 0), False)):
        guess = Attempt(0, sought, Reconstruction(inputs), upload)
        rows = [row for row, _ in scored(here, guess, adversary=chooses)]
        assert [row.identified for row in rows] == [identified] * 3
    fewer = Attempt(0, sought, Reconstruction(truth[:2]), upload)
    with pytest.raises(ValueError, match="one guess for each of the 3 private examples"):
        scored(here, fewer, adversary=chooses)


@pytest.mark.parametrize("sizes", [(4, 3), (3, 4), (4, 1)])
def test_counterfactuals_of_uploads_of_other_sizes(sizes: tuple[int, int]) -> None:
    """The draws of Poisson samples differ in size."""
    here = world(batch_size=4)
    attempts = []
    for number, size in enumerate(sizes):
        rows = victims(here, 0, number)[:size]
        client = here.client(Defense(), here.model(Defense(), 0))
        among = candidates(here, rows, seed=0, observation=number, disjoint=True)
        threat = replace(here.threat(True), candidates=among)
        (upload,) = observe(client, [here.train.at(rows)], threat, generator(number))
        attempts.append(Attempt(number, rows, Reconstruction(upload.truth.inputs), upload))
    found = [row for row, _ in scored(here, *attempts, adversary=PriorAware())]
    assert len(found) == sum(sizes)
    assert all(row.identified and row.counterfactual is not None for row in found)
    assert not all(row.counterfactual for row in found)
