"""Every defense of the presets trains and can be attacked, in each protocol."""

from pathlib import Path

import pytest

from leakfrontier.evaluate.cells import AttackTrial, TrainTrial
from leakfrontier.evaluate.methods import Method
from leakfrontier.evaluate.run import load_config
from leakfrontier.evaluate.scenario import Scenario, Training

FIRST = {  # one setting of each kind: the rest differs in strength alone
    method.name: method for method in reversed(load_config("full").defenses)
}
PROTOCOLS = {
    "FedSGD": Method(name="FedSGD"),
    "FedAvg": Method(name="FedAvg", options={"epochs": 2, "batch_size": 2, "lr": 0.01}),
}
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
        trial = AttackTrial(scenario, FIRST[name], SEARCH, knows_defense, 0, 1, observations=(0, 1))
        rows = trial.run(tmp_path).attacks
        assert len(rows) == 6
        assert all(row.identified is not None for row in rows)
