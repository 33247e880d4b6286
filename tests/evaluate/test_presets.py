"""Every defense of the presets trains and can be attacked, in each protocol."""

from pathlib import Path

import pytest

from leakfrontier.evaluate.cells import AttackTrial, TrainTrial
from leakfrontier.evaluate.config import load_config
from leakfrontier.evaluate.methods import Method
from leakfrontier.evaluate.scenario import Scenario, Training
from leakfrontier.evaluate.victims import other_cohort, other_examples

FIRST = {  # one setting of each kind: the rest differs in strength alone
    method.name: method for method in reversed(load_config("full").defenses)
}
PROTOCOLS = {
    "FedSGD": Method(name="FedSGD"),
    "FedAvg": Method(name="FedAvg", options={"epochs": 2, "batch_size": 2, "lr": 0.01}),
}


@pytest.mark.parametrize("preset", ["quick", "quick-text", "full"])
def test_the_attacked_upload_is_the_trained_one(preset: str) -> None:
    config = load_config(preset)
    for scenario in config.scenarios:
        assert other_examples(scenario) == ""
        assert {other_cohort(scenario, defense) for defense in config.defenses} == {""}


def test_an_upload_that_is_not_the_trained_one_is_told() -> None:
    scenario = Scenario(training=Training(clients_per_round=2, batch_size=16))
    eight = Method(name="SecureAggregation", options={"clients": 8})
    assert "attacks see sums of 8 clients, training has 2" in other_cohort(scenario, eight)
    assert other_examples(scenario) == "attacked uploads are of 1 examples, trained ones of 16"
    local = scenario.model_copy(update={"protocol": PROTOCOLS["FedAvg"], "batch_size": 8})
    assert "(8 and 200 local steps)" in other_examples(local)


SEARCH = Method(name="InvertingGradients", options={"iterations": 2})


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", FIRST)
def test_trains_and_is_attacked(name: str, protocol: str, tmp_path: Path) -> None:
    scenario = Scenario(
        dataset="digits",
        model=Method(name="lenet"),
        protocol=PROTOCOLS[protocol],
        batch_size=3,
        candidates=10,
        checkpoints=(0, 1),
        training=Training(rounds=1, clients=300, clients_per_round=4, batch_size=3),
    )
    trained = TrainTrial(scenario, FIRST[name], seed=0).run(tmp_path)
    assert trained.utility[-1].total > 0
    for knows_defense in (True, False):
        trial = AttackTrial(
            scenario, FIRST[name], SEARCH, knows_defense, seed=0, checkpoint=1, observations=(0, 1)
        )
        rows = trial.run(tmp_path).attacks
        assert len(rows) == 6
        assert all(row.identified is not None for row in rows)
