"""Clients and attacked uploads do not depend on the defense."""

from __future__ import annotations

import pytest
import torch

from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.enrolment import Attackable, attacked, attacked_rounds, enrol
from leakfrontier.evaluate.world.scenario import Scenario, Training, World, load_world

LOCAL = Method(name="FedAvg", options={"epochs": 1, "batch_size": 4, "lr": 0.1})


def world(
    batch_size: int = 1, protocol: Method | None = None, rounds: int = 10, drawn: int | None = None
) -> World:
    settings = Training(rounds=rounds, clients=6, clients_per_round=3, batch_size=drawn)
    protocol = protocol or Method(name="FedSGD")
    return load_world(
        Scenario(dataset="digits", batch_size=batch_size, protocol=protocol, training=settings)
    )


@pytest.mark.parametrize("protocol", [None, LOCAL], ids=["FedSGD", "FedAvg"])
def test_every_example_has_one_client(protocol: Method | None) -> None:
    here = world(8, protocol)
    rows = torch.cat([*enrol(here, 0, 5).rows])
    assert sorted(rows.tolist()) == [*range(len(here.train.targets))]


def test_uploads_of_the_attacked_size_are_among_the_trained_ones() -> None:
    assert enrol(world(2), 0, 5).batch_sizes == (2,) * 6
    assert {*enrol(world(2, drawn=16), 0, 5).batch_sizes} == {2, 16}
    small = [rows for rows in enrol(world(8, LOCAL), 0, 5).rows if len(rows) == 8]
    assert len(small) == 5
    size = 1438 // 6
    assert len(enrol(world(size, LOCAL), 0, 5).rows) == 6  # they are of that size anyway


@pytest.mark.parametrize("partition", ["iid", "label-skew", "feature-skew"])
@pytest.mark.parametrize("weighting", ["equal", "examples"])
def test_unequal_clients(partition: str, weighting: str) -> None:
    training = Training.model_validate(
        {
            "clients": 4,
            "small_clients": {1: 3, 8: 2},
            "size_ratio": 10,
            "batch_size": "all",
            "partition": partition,
            "weighting": weighting,
        }
    )
    here = load_world(Scenario(dataset="digits", training=training))
    found = enrol(here, 0, 3)
    sizes = [len(rows) for rows in found.rows]
    assert tuple(sizes) == found.batch_sizes == here.share_sizes
    assert sorted(torch.cat([*found.rows]).tolist()) == [*range(len(here.train.targets))]
    assert found.weights == ((1.0,) * 9 if weighting == "equal" else tuple(map(float, sizes)))


def test_attacked_rounds_come_after_the_first_and_in_random_order() -> None:
    here = world(rounds=50)
    few = enrol(here, 0, 30)
    rounds = attacked_rounds(here, few, 0, 50, 30)
    assert len(rounds) == len({*rounds}) == 16  # all six clients are invited to each
    assert min(rounds) >= 2
    assert max(rounds) <= 50
    assert rounds != sorted(rounds)
    assert rounds != attacked_rounds(here, few, 1, 50, 30)
    assert attacked_rounds(here, few, 0, 1, 2) == [1]


def test_uploads_with_history_of_the_size_and_of_other_clients_come_first() -> None:
    large, new = Attackable(3, 1, 2, 9, True), Attackable(3, 2, 1, 9, False)
    good, same, late = (Attackable(n, c, 1, 9, True) for n, c in ((3, 4), (5, 4), (5, 5)))
    assert attacked([large, new, good, same, late], 1, 9) == [good, late, same, large, new]
    assert attacked([large, good, late], 1, 1) == [good]
    good, same = (one._replace(share=1) for one in (good, same))  # they use the same examples
    assert attacked([large, new, good, same, late], 1, 9) == [good, late, large, new, same]


def test_an_upload_without_examples_has_a_substitute() -> None:
    every = [Attackable(3, client, 1, 9, True, empty=client in (1, 4)) for client in range(6)]
    assert [one.client for one in attacked(every, 1, 3)] == [0, 3, 2]
    assert [one.client for one in attacked(every, 1, 4)] == [0, 5, 2, 3]
    assert [one.client for one in attacked(every, 1, 6)] == [0, 2, 3, 5]


def test_more_clients_are_invited_to_attacked_rounds() -> None:
    here = world()
    clients = enrol(here, 0, 1)
    assert clients.invited(here, 1, attacked=False) == 3
    assert clients.invited(here, 1, attacked=True) == 3
    assert clients.invited(here, 2, attacked=True) == 6
    buffered = {**LOCAL.options, "buffer": 2, "oldest": 1}
    late = world(8, Method(name="FedBuff", options=buffered))
    assert enrol(late, 0, 5).invited(late, 5, attacked=True) == 2
