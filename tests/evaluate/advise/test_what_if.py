from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from leakfrontier.evaluate.advise import what_if
from leakfrontier.evaluate.advise.clipping import Clipped
from leakfrontier.evaluate.advise.experiment import Effort, Experiment, TrainingChoice
from leakfrontier.evaluate.advise.levers import Lever
from leakfrontier.evaluate.advise.measurements import Trained
from leakfrontier.evaluate.advise.question import Question
from leakfrontier.evaluate.advise.what_if import over_norms, pulled
from leakfrontier.evaluate.foundations.statistics import Interval
from leakfrontier.evaluate.run.cells import TrainTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

DIGITS = Scenario(dataset="digits", model=Method(name="mlp", options={"width": 16}))
ASKED = Question(1438, 128, 15, candidates=20, epsilon=3.0)
SETTING = TrainingChoice(1.0, 0.5, 0.1)


@dataclass(frozen=True)
class Untrained(Experiment):
    """Trains nothing: a run is as accurate as its learning rate is near 0.3."""

    asked: list[Mapping[Any, Sequence[TrainTrial]]] = field(default_factory=list)
    norms: ClassVar = [0.1, 0.5, 2.0]  # type: ignore[misc]

    def train_all(
        self, trials: Mapping[Any, Sequence[TrainTrial]], what: str
    ) -> dict[Any, Trained]:
        self.asked.append(trials)

        def accuracy(runs: Sequence[TrainTrial]) -> float:
            return 1 - abs(runs[0].scenario.training.lr - 0.3)

        return {
            key: Trained(Interval(accuracy(runs), 0, 1, len(runs)), 1.0)
            for key, runs in trials.items()
        }


def untrained(tmp_path: Path) -> Untrained:
    return Untrained(ASKED, DIGITS, tmp_path, Effort(step_sizes=(0.01, 0.1, 1.0), seeds=3))


def test_a_change_is_measured_at_the_step_size_that_suits_it_and_with_new_seeds(
    tmp_path: Path,
) -> None:
    experiment = untrained(tmp_path)
    lever = Lever("more rounds", replace(ASKED, rounds=30), 2.0, 3.0, 1.0, 1.0)
    (found,) = pulled(experiment, [lever], SETTING)
    assert found.accuracy is not None
    assert (found.accuracy.value, found.accuracy.n) == (pytest.approx(0.98), 3)  # at 0.32
    searched, fresh = experiment.asked
    assert len(searched) == 3
    (runs,) = fresh.values()
    assert [run.seed for run in runs] == [*experiment.fresh(0)]
    assert {run.scenario.training.rounds for run in runs} == {30}
    assert runs[0].defense.options == {"noise_multiplier": 2.0, "max_grad_norm": 0.5}


def test_what_the_data_does_not_allow_stays_unmeasured(tmp_path: Path) -> None:
    experiment = untrained(tmp_path)
    larger = Lever("larger", Question(6000, 3000, 15, epsilon=3.0), 2.0, 3.0, 1.0, 1.0)
    possible = replace(larger, name="possible", question=ASKED)
    found = pulled(experiment, [larger, possible], SETTING)
    assert [one.name for one in found] == ["larger", "possible"]
    assert found[0].accuracy is None
    assert found[1].accuracy is not None


def test_other_norms_are_trained_with_all_else_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = untrained(tmp_path)
    monkeypatch.setattr(what_if, "_models", lambda *_: [0, 1])  # the initial one, and the last
    monkeypatch.setattr(
        what_if,
        "clipped",
        lambda world, model, norms, noise, count: [Clipped(model + c, noise) for c in norms],
    )
    points = over_norms(experiment, SETTING._replace(max_norm=0.7))
    assert [point.max_norm for point in points] == [0.1, 0.5, 0.7, 2.0]
    assert [point.first.share for point in points] == [0.1, 0.5, 0.7, 2.0]
    assert [point.last.share for point in points] == [1.1, 1.5, 1.7, 3.0]
    assert points[0].first.noise_over_signal == pytest.approx(1.0 / 128)
    (trials,) = experiment.asked
    assert {norm: len(runs) for norm, runs in trials.items()} == dict.fromkeys(
        (0.1, 0.5, 0.7, 2.0), 1
    )
    assert trials[0.7][0].scenario.checkpoints == (0, 15)  # both are looked at
    assert trials[0.1][0].scenario.checkpoints == (0,)
