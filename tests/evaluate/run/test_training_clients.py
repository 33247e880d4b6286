"""Training, with its server in another process, is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model
from upload_logs import every

from leakfrontier.defenses import trainable
from leakfrontier.evaluate.client.federation import Federation
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.run.cells import TrainTrial
from leakfrontier.evaluate.run.upload_log import SecretLog, UploadLog
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.enrolment import enrol
from leakfrontier.evaluate.world.scenario import Scenario, Training, load_world

LOCAL = {"epochs": 1, "batch_size": 64, "lr": 0.1}
PROTOCOLS = {
    "FedSGD": Method(name="FedSGD"),
    "FedBuff": Method(name="FedBuff", options={**LOCAL, "buffer": 3, "oldest": 2}),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("defense", ["none", "TopK"])
def test_another_process_changes_nothing(protocol: str, defense: str, tmp_path: Path) -> None:
    scenario = Scenario(
        dataset="digits",
        model=Method(name="mlp", options={"width": 8}),
        protocol=PROTOCOLS[protocol],
        training=Training(rounds=5, clients=6, clients_per_round=4),
    )
    method = Method(name=defense, options={"ratio": 0.1} if defense == "TopK" else {})
    trial = TrainTrial(scenario, method, 0)
    trial.run(tmp_path)
    world = load_world(scenario)
    found = world.model(world.defense(method), 0)
    load_model(found, trial.checkpoint(tmp_path, 5))

    model = world.model(world.defense(method), 0)
    enrolment = enrol(world, 0, 0)
    federation = Federation(
        world.client(world.defense(method), model),
        [world.train.at(rows) for rows in enrolment.rows],
        clients_per_round=4,
        batch_size=1,
        lr=scenario.training.lr,
    )
    federation.train(5, generator("training", *trial.draws), on_checkpoint=lambda *_: None)
    for name, value in trainable(model).items():
        torch.testing.assert_close(value, found.get_parameter(name), rtol=0, atol=0)


def test_attacked_clients_have_a_history(tmp_path: Path) -> None:
    scenario = Scenario(
        dataset="digits",
        model=Method(name="mlp", options={"width": 8}),
        training=Training(rounds=8, clients=6, clients_per_round=4),
    )
    trial = TrainTrial(scenario, Method(name="none"), 0, logged=6)
    trial.run(tmp_path)
    log, hidden = UploadLog(trial.seen(tmp_path, 8)), SecretLog(trial.hidden(tmp_path, 8))
    assert len(log) == 6
    examples = set()
    for index in range(6):
        logged, *earlier = every(log, index)
        assert earlier
        assert all(one.round < logged.round for one in earlier)
        (row,) = hidden[logged.round, log.victim(index)].rows.tolist()
        examples.add(row)
    assert len(examples) == 6
