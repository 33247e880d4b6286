from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from leakfrontier.adversaries import ADVERSARIES
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.run.cascade import ReadyCell, Schedule
from leakfrontier.evaluate.run.cells import AttackTrial, TrainTrial
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.run.run import plan, run

Config = dict[str, Any]
TOPK = {"name": "TopK", "ratio": 0.1}

ACTIVE = """
from leakfrontier.adversaries import Threat

class Active(Adversary):
    threat = Threat.PARAMETERS
    cost = 0

    def reconstruct(self, observation, rng):
        raise NotApplicable("never")
"""


def attacks(steps: list[ReadyCell]) -> dict[str, tuple[int, ...]]:
    """Return the uploads that each attack among the steps is run on."""
    return {
        f"{step.trial.adversary.name.rpartition(':')[2]}"
        f"{'' if step.trial.knows_defense else ' (ignorant)'}": step.trial.observations
        for step in steps
        if isinstance(step.trial, AttackTrial)
    }


@pytest.fixture
def schedule(tiny: Config, user_file: Callable[..., Path]) -> Schedule:
    """Return the cascade of several attacks on one arm, with three uploads of two victims."""
    tiny["scenarios"][0] |= {"batch_size": 2}
    tiny |= {"defenses": [TOPK], "adversaries": [f"{user_file(ACTIVE)}:Active", "GradInversion"]}
    tiny["adversaries"] += ["InvertingGradients", "PriorAware", "LinearLeakage", "PriorGuess"]
    return Schedule(plan(load_config(tiny)), cascade=True)


def test_stages_go_from_cheap_to_costly_and_from_passive_to_active(schedule: Schedule) -> None:
    steps, order = schedule.start(), []
    while steps:
        order.append(set(attacks(steps)))
        steps = [more for step in steps for more in schedule.after(step.trial, ())]
    assert order == [
        {"PriorGuess", "PriorAware", "PriorAware (ignorant)", "LinearLeakage"},
        {"InvertingGradients"},
        {"InvertingGradients (ignorant)"},
        {"GradInversion"},
        {"GradInversion (ignorant)"},
        {"Active"},
    ]


def test_later_stages_attack_what_is_left(schedule: Schedule) -> None:
    everyone = [(upload, victim, True) for upload in range(3) for victim in range(2)]
    found = {
        "PriorGuess": everyone,  # blind
        "PriorAware": everyone,  # given candidates
        # One victim of the first upload, both of the second, none of the third.
        "LinearLeakage": [(u, v, (u, v) in ((0, 0), (1, 0), (1, 1))) for u, v, _ in everyone],
        "InvertingGradients": [(0, 1, True), (0, 0, False), (2, 0, True), (2, 1, False)],
        "InvertingGradients (ignorant)": [(2, 0, False), (2, 1, True)],
    }
    steps, seen = schedule.start(), {}
    while steps:
        step = steps.pop(0)
        (name,) = attacks([step]) or ("training",)
        seen |= attacks([step])
        steps += schedule.after(step.trial, found.get(name, ()))
    assert seen == {
        **dict.fromkeys(("PriorGuess", "PriorAware", "PriorAware (ignorant)"), (0, 1, 2)),
        "LinearLeakage": (0, 1, 2),
        "InvertingGradients": (0, 2),  # one victim of the first upload is still safe
        "InvertingGradients (ignorant)": (2,),
        **dict.fromkeys(("GradInversion", "GradInversion (ignorant)", "Active"), ()),
    }


def test_a_pooled_attack_takes_all_uploads_or_none(tiny: Config) -> None:
    tiny |= {"defenses": [TOPK], "adversaries": ["LinearLeakage", "LearningToInvert"]}
    for left, expected in ((1, (0, 1, 2)), (3, ())):
        schedule = Schedule(plan(load_config(tiny)), cascade=True)
        steps, seen = schedule.start(), {}
        while steps:
            step = steps.pop(0)
            seen |= attacks([step])
            found = [(upload, 0, upload < left) for upload in range(3)]
            steps += schedule.after(step.trial, found if "LinearLeakage" in attacks([step]) else ())
        assert seen["LearningToInvert"] == expected


def test_attacks_on_a_checkpoint_wait_for_its_training(tiny: Config) -> None:
    tiny["scenarios"][0]["checkpoints"] = [0, 2]
    trials = plan(load_config(tiny | {"seeds": 2, "individual": True}))
    schedule = Schedule(trials)
    at_once = [step.trial for step in schedule.start()]
    assert [(t.seed, t.checkpoint) for t in at_once if isinstance(t, AttackTrial)] == [
        (0, 0),
        (1, 0),
    ]
    training = at_once[1]
    assert isinstance(training, TrainTrial)
    (step,) = schedule.after(training, ())
    assert (step.trial.seed, step.trial.checkpoint) == (training.seed, 2)
    without = Schedule([trial for trial in trials if isinstance(trial, AttackTrial)])
    assert len(without.start()) == 4


def test_every_attack_says_what_it_costs() -> None:
    assert {name: cls.cost for name, cls in ADVERSARIES.items()} == {
        **dict.fromkeys(("PriorGuess", "LinearLeakage", "PriorAware", "SPEARPlusPlus"), 0),
        **dict.fromkeys(("RobbingTheFed", "RobbingTheFedDirectPass", "LOKI", "TrapWeights"), 0),
        **dict.fromkeys(("ARES", "InformedPriorAware", "MatchedFilter"), 0),
        **dict.fromkeys(("DLG", "IDLG", "LearningToInvert", "ScaleMIA"), 1),
        **dict.fromkeys(("InvertingGradients", "SME", "Fishing"), 2),
        **dict.fromkeys(("SPEAR", "GradInversion", "FedLeak", "DLFA", "RGAP", "RCONV"), 3),
        **{"LanguageGuess": 0, "LAMP": 3, "GRAB": 3, "DAGER": 0, "SOMP": 1},
    }


def counted(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of attacks that look at the upload and are given nothing else."""
    return rows[~rows["baseline"].astype(bool) & ~rows["candidates_granted"].astype(bool)]


def identified(results: Conclusions) -> pd.Series:
    """Return whether any attack has identified a victim, victim by victim."""
    rows = counted(results.attacks)
    keys = ["scenario", "defense", "observation", "victim"]
    return rows["identified"].fillna(False).groupby([rows[key] for key in keys]).any()


@pytest.mark.timeout(600)
def test_a_cascade_has_the_worst_case_of_all_against_all(tmp_path: Path, tiny: Config) -> None:
    one = tiny["scenarios"][0]  # a single victim is soon found, two are not
    tiny["scenarios"] = [one, {**one, "batch_size": 2}]
    tiny["defenses"] += [{"name": "DPSGD", "noise_multiplier": 0.01}, TOPK]
    tiny["adversaries"] = ["PriorGuess", "PriorAware", "LinearLeakage"]
    tiny["adversaries"] += [{"name": "InvertingGradients", "iterations": 40}]
    tiny["adversaries"] += [{"name": "DLG", "iterations": 10}]
    config = load_config(tiny | {"observations": 5})
    cascade = run(config, tmp_path, workers=2)
    individual = config.model_copy(update={"individual": True})
    all_against_all = run(individual, tmp_path, workers=2)  # of what is not there yet
    pd.testing.assert_series_equal(identified(cascade), identified(all_against_all))
    assert 0 < identified(cascade).mean() < 1
    assert len(cascade.cells) == len(all_against_all.cells)
    assert set(cascade.cells["status"]) == {"ok", "not needed"}
    assert set(all_against_all.cells["status"]) == {"ok"}

    attacked = cascade.attacks.groupby(["defense", "scenario", "adversary", "knows_defense"])
    uploads = attacked["observation"].nunique()
    assert set(uploads["none"]) == {5}
    assert uploads.min() < 5
    nothing_left = cascade.cells[cascade.cells["status"] == "not needed"]
    assert "none" not in set(nothing_left["defense"])
    for arm, rows in cascade.attacks.groupby(["defense", "scenario"]):
        if arm[0] != "none":
            check_arm(rows)


def check_arm(rows: pd.DataFrame) -> None:
    """Assert that no upload was attacked of which all victims were identified before."""
    rows = counted(rows)
    stages = rows["adversary_name"].map(lambda name: ADVERSARIES[name].cost)
    found: set[tuple[int, int]] = set()
    for _, stage in rows.groupby([stages, ~rows["knows_defense"].astype(bool)]):  # in order
        for upload, victims in stage.groupby("observation"):
            assert not {(upload, victim) for victim in victims["victim"]} <= found
        hits = stage[stage["identified"].fillna(False).astype(bool)]
        found |= set(zip(hits["observation"], hits["victim"], strict=True))


def test_narrowed_cells_have_keys_of_their_own(tiny: Config) -> None:
    (trial,) = (t for t in plan(load_config(tiny)) if isinstance(t, AttackTrial))
    assert replace(trial, observations=(0,)).cell.key != trial.cell.key
