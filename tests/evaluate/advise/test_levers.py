import math
from dataclasses import replace

import pytest

from leakfrontier.evaluate.advise.levers import Lever, changes, pull
from leakfrontier.evaluate.advise.question import Question, proven

FULL = Question(2000, 500, 100, clients=4, epsilon=3.0)  # without sampling: closed forms


def pulled(question: Question) -> dict[str, Lever]:
    row = proven(question, question.least_noise())
    return {
        name.split()[0] + name[-3:]: pull(name, changed, question, row)
        for name, changed in changes(question)
    }


def test_what_may_be_changed() -> None:
    names = [name for name, _ in changes(replace(FULL, batch_size=100))]
    assert names == [
        "batch 100 -> 200",
        "rounds 100 -> 50",
        "rounds 100 -> 200",
        "clients 4 -> 8, each with as much data",
        "examples 2000 -> 4000",
    ]
    assert "batch 300 -> 500" in [name for name, _ in changes(replace(FULL, batch_size=300))]
    assert not [name for name, _ in changes(FULL) if name.startswith("batch")]
    assert next(name for name, _ in changes(replace(FULL, rounds=1))) == "rounds 1 -> 2"
    limited = [name for name, _ in changes(replace(FULL, max_participations=100))]
    assert "rounds 100 -> 50" in limited
    assert "rounds 100 -> 200" not in limited
    client = replace(FULL, unit="client")
    assert not [name for name, _ in changes(client) if name.startswith("examples")]
    assert {changed.used_delta for _, changed in changes(client)} == {client.used_delta}


def test_without_sampling_levers_are_square_roots() -> None:
    now, levers = FULL.least_noise(), pulled(FULL)
    half, twice = levers["rounds 50"], levers["rounds200"]
    assert half.noise_multiplier == pytest.approx(now / math.sqrt(2), rel=2e-3)
    assert twice.noise_multiplier == pytest.approx(now * math.sqrt(2), rel=2e-3)
    assert half.epsilon < 3 < twice.epsilon
    assert half.run_noise == pytest.approx(1, rel=2e-3)  # a round's falls, the run's does not
    assert half.round_noise == pytest.approx(math.sqrt(0.5), rel=2e-3)
    more = levers["clientsata"]
    assert more.noise_multiplier == now
    assert more.round_noise == more.run_noise == pytest.approx(math.sqrt(0.5))


@pytest.mark.parametrize("target", [{"epsilon": 3.0}, {"reconstruction_success": 0.1}])
def test_levers_keep_the_target_with_the_least_noise(target: dict[str, float]) -> None:
    question = Question(2000, 100, 50, **{"epsilon": None, **target})  # type: ignore[arg-type]
    for lever in pulled(question).values():
        risk = lever.question.epsilon_of if question.epsilon else lever.question.bound
        assert risk(lever.noise_multiplier) <= question.value
        assert risk(0.995 * lever.noise_multiplier) > question.value
        assert lever.epsilon == lever.question.epsilon_of(question.least_noise())
        assert lever.document()["accuracy"] is None


def test_more_data_lowers_the_noise_of_a_round() -> None:
    lever = pulled(Question(2000, 100, 50, epsilon=3.0))["examples000"]
    assert lever.round_noise < 1
    assert lever.epsilon < 3
