"""Claims are audited on clients as they were in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import tricks

from leakfrontier.evaluate.foundations.plugins import trust
from leakfrontier.evaluate.foundations.rows import GuaranteeRow
from leakfrontier.evaluate.run.cells import TrainTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training

SCENARIO = Scenario(
    dataset="digits",
    model=Method(name="mlp", options={"width": 16}),
    candidates=20,
    training=Training(rounds=8, clients=6, clients_per_round=6, lr=0.01),
)


def claimed(name: str, folder: Path, *, logged: int, **options: object) -> GuaranteeRow:
    if hasattr(tricks, name):
        name = f"{tricks.__file__}:{name}"
        trust([name])
    method = Method(name=name, options={"noise_multiplier": 1.0, **options})
    (row,) = TrainTrial(SCENARIO, method, 0, logged=logged).run(folder).guarantees
    return row


@pytest.mark.parametrize("logged", [0, 4])
@pytest.mark.parametrize("name", ["LatePrivacyLost", "LateQuiet"])
def test_noise_that_is_missing_late_is_missed(name: str, logged: int, tmp_path: Path) -> None:
    row = claimed(name, tmp_path, logged=logged, warm=4)
    assert row.violated
    assert "in round" in row.finding


def test_noise_that_cancels_over_rounds_refutes_a_claim(tmp_path: Path) -> None:
    assert claimed("ClaimedCancelling", tmp_path, logged=0).violated


@pytest.mark.parametrize("name", ["DPSGD", "ClientDP", "CorrelatedNoise"])
def test_honest_claims_are_not_refuted(name: str, tmp_path: Path) -> None:
    row = claimed(name, tmp_path, logged=4)
    assert row.violated is False, row.finding


def test_the_link_that_makes_the_claim_is_audited(tmp_path: Path) -> None:
    links = tuple(
        Method(name=name, options=options)
        for name, options in (("DPSGD", {"noise_multiplier": 1.0}), ("TopK", {"ratio": 0.1}))
    )
    method = Method(name="Chain", links=links)
    (row,) = TrainTrial(SCENARIO, method, 0, logged=4).run(tmp_path).guarantees
    assert row.violated is False, row.finding
