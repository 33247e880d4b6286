from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leakfrontier.evaluate.advise import experiment as tuning
from leakfrontier.evaluate.advise.experiment import (
    Effort,
    Experiment,
    TrainingChoice,
    between,
    fitting,
)
from leakfrontier.evaluate.advise.measurements import Trained
from leakfrontier.evaluate.advise.question import AdviceRow, Question
from leakfrontier.evaluate.foundations.statistics import Interval
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training, load_world

DIGITS = Scenario(dataset="digits", model=Method(name="mlp", options={"width": 16}))
ASKED = Question(1438, 128, 15, candidates=20, epsilon=3.0)


class Scripted(Experiment):
    """Trains nothing: accuracies are given by step size."""

    def train(
        self, settings: Sequence[TrainingChoice], seeds: range, rounds: int | None = None
    ) -> dict[TrainingChoice, Trained]:
        accuracies = {0.003: 0.89, 0.01: 0.895, 0.03: 0.9, 0.1: 0.5}  # one error: 0.016 of 359
        return {one: Trained(Interval(accuracies[one.step_size], 0, 1, 1), 1.0) for one in settings}


def test_other_noise_gets_the_smallest_step_size_that_is_as_good(tmp_path: Path) -> None:
    best = TrainingChoice(1.0, 0.5, 0.03)
    experiment = Scripted(ASKED, DIGITS, tmp_path)
    chosen, rows = experiment.retune(best, (0.0, 1.0, 4.0))
    assert chosen == [TrainingChoice(0.0, 0.5, 0.003), best, TrainingChoice(4.0, 0.5, 0.003)]
    assert len(rows) == 8
    assert all(row.searched for row in rows)


@pytest.mark.parametrize(
    ("winner", "around"),
    [
        ((1.0, 0.01), [(1.0, 0.0032), (1.0, 0.032)]),
        ((0.25, 0.01), [(0.25, 0.0032), (0.25, 0.032), (0.062, 0.01)]),
        ((4.0, 0.001), [(4.0, 0.00032), (4.0, 0.0032), (16.0, 0.001)]),
    ],
)
def test_what_a_grid_leaves_out_is_tried_around_its_best(
    winner: tuple[float, float], around: list[tuple[float, float]]
) -> None:
    grid = [TrainingChoice(1.0, c, step) for c in (0.25, 1.0, 4.0) for step in (0.001, 0.01, 0.1)]
    found = tuning._around(TrainingChoice(1.0, *winner), grid)
    assert [(one.max_norm, one.step_size) for one in found] == around
    assert tuning._around(TrainingChoice(1.0, 1.0, 0.1), [TrainingChoice(1.0, 1.0, 0.1)]) == []


def test_no_more_candidates_than_the_data_has(tmp_path: Path) -> None:
    few = replace(ASKED, candidates=10_000)
    experiment = Experiment(few, DIGITS, tmp_path)
    assert experiment.scenario_for(TrainingChoice(1.0, 1.0, 0.1)).candidates == 10_000
    counts = torch.bincount(load_world(DIGITS).train.targets)
    assert fitting(few, DIGITS).candidates == int(counts.min())


def test_the_step_size_is_the_rate_times_the_norm_under_sgd(tmp_path: Path) -> None:
    setting = TrainingChoice(1.0, 0.5, 0.2)
    for server, lr in (("adam", 0.2), ("sgd", 0.4)):
        training = Training(server=server, partition="label-skew")
        scenario = DIGITS.model_copy(update={"training": training})
        experiment = Experiment(replace(ASKED, clients=3), scenario, tmp_path)
        trained = experiment.scenario_for(setting).training
        assert trained.lr == pytest.approx(lr)
        assert trained.partition == "label-skew"
        assert (trained.clients, trained.clients_per_round, trained.rounds) == (3, 3, 15)
        row = AdviceRow(1.0, {}, 0, 0, 0, 15, max_norm=0.5, lr=trained.lr)
        assert experiment.setting(row) == pytest.approx(setting)


def test_the_defense_follows_the_unit(tmp_path: Path) -> None:
    setting = TrainingChoice(1.5, 0.5, 0.2)
    for change, expected in (
        ({}, {"noise_multiplier": 1.5, "max_grad_norm": 0.5}),
        ({"unit": "client"}, {"noise_multiplier": 1.5, "max_update_norm": 0.5}),
        (
            {"poisson_sampling": False},
            {"noise_multiplier": 1.5, "max_grad_norm": 0.5, "poisson_sampling": False},
        ),
    ):
        question = replace(ASKED, **change)  # type: ignore[arg-type]
        assert Experiment(question, DIGITS, tmp_path).defense(setting).options == expected


def test_sizes_beside_one_are_half_a_step_of_the_grid_away() -> None:
    assert between(0.01, [0.001, 0.01, 0.1]) == [0.0032, 0.032]
    assert between(0.1, [0.1]) == []


def test_what_is_reported_shares_no_seed_with_a_search_or_another_repetition(
    tmp_path: Path,
) -> None:
    first, second = (
        Experiment(ASKED, DIGITS, tmp_path, Effort(seeds=5), seed=seed) for seed in (0, 1)
    )
    used = [first.searched, first.fresh(0), second.searched, second.fresh(1)]
    assert [len(one) for one in used] == [1, 5, 1, 5]
    assert len({seed for one in used for seed in one}) == 12


def test_without_noise_nothing_is_clipped(tmp_path: Path) -> None:
    experiment = Experiment(ASKED, DIGITS, tmp_path)
    assert experiment.defense(TrainingChoice(0.0, 1.0, 0.1)) == Method(name="none")
    unmeasured = AdviceRow(1.0, {}, 0, 0, 0, 15)
    with pytest.raises(ValueError, match="row must be a measured row"):
        experiment.setting(unmeasured)


def test_a_setting_is_trained_once_for_every_seed(tmp_path: Path) -> None:
    experiment = Experiment(ASKED, DIGITS, tmp_path)
    trials = experiment.trials(TrainingChoice(1.0, 0.5, 0.2), range(3, 6), rounds=7)
    assert [trial.seed for trial in trials] == [3, 4, 5]
    assert {trial.scenario.training.rounds for trial in trials} == {7}
    assert experiment.train_all({}, "nothing") == {}


def test_norms_to_try_are_around_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "gradient_norms", lambda *_: torch.tensor([0.1, 2.06, 90.0]))
    effort = Effort(norm_factors=(0.1, 1.0), step_sizes=(0.01, 0.1))
    experiment = Experiment(ASKED, DIGITS, tmp_path, effort)
    assert experiment.norms == [0.21, 2.1]
    assert experiment.settings(1.5)[:2] == [
        TrainingChoice(1.5, 0.21, 0.01),
        TrainingChoice(1.5, 0.21, 0.1),
    ]
    assert len(experiment.settings(1.5)) == 4
