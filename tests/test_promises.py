"""What the toolkit promises of its panel on real images, at the size of the quick preset."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from leakfrontier.evaluate.foundations.rows import Outcome
from leakfrontier.evaluate.foundations.statistics import clopper_pearson
from leakfrontier.evaluate.run.cells import AttackTrial
from leakfrontier.evaluate.run.run import RunConfig
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import SCENARIOS

DPSGD = Method(name="DPSGD", options={"noise_multiplier": 1.0, "max_grad_norm": 1.0})
MEMBERS = {
    member.name: member
    for member in RunConfig(scenarios=("digits/mlp",), defenses=("none",)).members()  # type: ignore[arg-type]
}


@cache
def attack(model: str, adversary: str, defended: bool = False) -> Outcome:
    trial = AttackTrial(
        SCENARIOS[f"fashion-mini/{model}"],
        DPSGD if defended else Method(name="none"),
        MEMBERS[adversary],
        knows_defense=True,
        seed=0,
        checkpoint=0,
        observations=tuple(range(20)),
    )
    return trial.run(Path())


def identified(outcome: Outcome) -> int:
    return sum(bool(row.identified) for row in outcome.attacks)


def test_linear_leakage_is_exact_on_an_undefended_mlp() -> None:
    scores = attack("mlp", "LinearLeakage").scores
    assert np.median([score.value for score in scores if score.metric == "psnr"]) > 100


def test_inverting_gradients_identifies_undefended_victims_on_lenet() -> None:
    outcome = attack("lenet", "InvertingGradients")
    assert identified(outcome) >= 18
    assert all(row.label_correct for row in outcome.attacks)


@pytest.mark.parametrize(
    ("model", "adversary"), [("mlp", "LinearLeakage"), ("lenet", "InvertingGradients")]
)
def test_dpsgd_takes_both_down_to_the_prior_rate(model: str, adversary: str) -> None:
    prior = identified(attack(model, "PriorGuess", True)) / 20
    interval = clopper_pearson(identified(attack(model, adversary, True)), 20)
    assert interval.low <= max(prior, 1 / 100) <= interval.high
    assert interval.high < 0.5
