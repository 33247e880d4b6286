"""The server steps, evaluates and logs from bytes alone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from upload_logs import every

from leakfrontier.defenses import Defense, Update, trainable
from leakfrontier.evaluate.foundations.by_value import carried
from leakfrontier.evaluate.foundations.messages import packed, unpacked
from leakfrontier.evaluate.run.training_server import EARLIER, Order, TrainingServer
from leakfrontier.evaluate.run.upload_log import UploadLog
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training, load_world

TINY = Scenario(
    dataset="digits",
    model=Method(name="mlp", options={"width": 8}),
    training=Training(rounds=6, clients=3, clients_per_round=2, server="sgd"),
)


def order(folder: Path) -> Order:
    return Order(
        TINY,
        ("draws",),
        (1.0,) * 3,
        0.5,
        frozenset([0, 6]),
        {6: folder / "model"},
        frozenset([6]),
        3,
    )


def test_uploads_move_the_model_and_are_logged(tmp_path: Path) -> None:
    world = load_world(TINY)
    model = world.model(Defense(), 0)
    server = TrainingServer(order(tmp_path), carried((model, world.protocol)))
    sent: list[Update] = []
    uploads: dict[tuple[int, int], Update] = {}
    for number in range(1, 7):
        weights, about = unpacked(server.invite(b""))
        weights.pop("/rng")
        sent.append(weights)
        seen = []
        for client in about["clients"]:
            update = {n: torch.full_like(v, 10 * number + client) for n, v in weights.items()}
            uploads[number, client] = update
            seen.append([[client], 1])
        round_ = [uploads[number, client] for client in about["clients"]]
        tensors = {name: torch.stack([one[name] for one in round_]) for name in weights}
        server.step(packed(tensors, {"seen": seen, "refused": 1}))
    for before, after, number in zip(sent, sent[1:], range(1, 6), strict=False):
        steps = [u for (n, _), u in uploads.items() if n == number]
        for name, value in before.items():
            mean = torch.stack([one[name] for one in steps]).mean(dim=0)
            torch.testing.assert_close(after[name], value - 0.5 * mean)
    assert not any(one is value for one in trainable(model).values() for value in sent[0].values())

    utility = unpacked(server.utility(b""))[1]
    assert [(row[0], row[-1]) for row in utility] == [(0, 0), (6, 6)]
    assert load_file(tmp_path / "model").keys() == trainable(model).keys()

    chosen = [key for key in uploads if key[0] == 6]
    server.write(packed({}, [str(tmp_path / "log"), chosen]))
    log = UploadLog(tmp_path / "log")
    for index, (number, client) in enumerate(chosen):
        rounds = [n for n, other in uploads if other == client][::-1]
        assert [one.round for one in every(log, index)] == rounds[: 1 + EARLIER]
        for one in every(log, index):
            torch.testing.assert_close(one.update, uploads[one.round, client])
            torch.testing.assert_close(one.model, sent[one.round - 1])
        assert log.upload(index).round == number
