import math

import pytest

from leakfrontier.evaluate.advise.observation_points import observation_points
from leakfrontier.evaluate.advise.question import Question, proven
from leakfrontier.evaluate.privacy.accounting import epsilon


def asked(clients: int, **change: float) -> Question:
    return Question(1000, 10, 20, clients=clients, unit="client", epsilon=3.0, **change)  # type: ignore[arg-type]


def test_noise_by_parts_is_as_private_as_local_noise_only_if_losses_were_planned_for() -> None:
    question = asked(16)  # of whom 12 stay and keep silent
    row = proven(question, 8.0)
    local, planned, unplanned, bypassed, central = observation_points(question, row)
    assert (local.noise_multiplier, local.epsilon) == (8.0, row.epsilon["pld"])
    assert (planned.noise_multiplier, planned.epsilon) == (8.0, row.epsilon["pld"])
    assert f"noise {8 / math.sqrt(12):.4g}," in planned.sees
    for point, left in ((unplanned, math.sqrt(12 / 16)), (bypassed, 1 / math.sqrt(12))):
        assert point.noise_multiplier == pytest.approx(8.0 * left)
        assert point.epsilon == epsilon(1.0, point.noise_multiplier, 20, question.used_delta)
        assert point.epsilon > local.epsilon
        assert point.bound > local.bound
    assert (central.noise_multiplier, central.epsilon, central.bound) == (0, math.inf, 1)


def test_where_everybody_may_be_lost_no_part_is_large_enough() -> None:
    question = asked(2, dropout=0.6, colluders=0.6)
    points = [*observation_points(question, proven(question, 8.0))]
    assert [point.name for point in points] == [
        "local",
        "distributed, planned for no loss",
        "distributed, sum bypassed",
        "central",
    ]
    assert (points[1].epsilon, points[1].bound) == (math.inf, 1)


@pytest.mark.parametrize(("clients", "noise"), [(1, 8.0), (16, 0.0)])
def test_there_is_nothing_to_share_for_one_client_or_without_noise(
    clients: int, noise: float
) -> None:
    question = asked(clients)
    points = observation_points(question, proven(question, noise))
    assert [point.name for point in points] == ["local", "central"]
