"""Decoders are fitted and judged on clients as they were in attacked rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import tricks
import two_faced

from leakfrontier.evaluate.client.inversion import still_holds_update
from leakfrontier.evaluate.foundations.plugins import trust
from leakfrontier.evaluate.foundations.rows import ProbeRow
from leakfrontier.evaluate.run.cells import TrainTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training

SCENARIO = Scenario(
    dataset="digits",
    model=Method(name="mlp", options={"width": 16}),
    candidates=20,
    training=Training(rounds=8, clients=8, clients_per_round=8, lr=0.01),
)


def trial(name: str, **options: object) -> TrainTrial:
    if hasattr(tricks, name) or hasattr(two_faced, name):
        name = f"{(tricks if hasattr(tricks, name) else two_faced).__file__}:{name}"
        trust([name])
    return TrainTrial(SCENARIO, Method(name=name, options=options), 0, logged=6)


def probed(one: TrainTrial, folder: Path) -> ProbeRow:
    (row,) = one.run(folder).probes
    return row


@pytest.mark.parametrize("name", ["FirstPlain", "EveryRoundAnew", "HeavyBall", "LastRound"])
def test_what_hides_the_update_later_is_found(name: str, tmp_path: Path) -> None:
    row = probed(trial(name), tmp_path)
    assert row.decoded > 0.85
    assert still_holds_update(row)


def test_the_decoder_is_that_of_the_attacked_round(tmp_path: Path) -> None:
    one = trial("HeavyBall")
    one.run(tmp_path)
    decoder = one.inversion(tmp_path, 8).decoder(0)
    assert decoder is not None
    assert decoder.needs_history
    assert decoder.recovered > 0.9


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DecayingNoise", {}),
        ("Noise", {"scale": 0.1}),
        ("TopK", {"ratio": 0.1}),
        ("TopK", {"ratio": 0.01}),
        ("DPSGD", {"noise_multiplier": 0.1}),
        ("Mixup", {}),
    ],
)
def test_honest_defenses_are_not_accused(
    name: str, options: dict[str, object], tmp_path: Path
) -> None:
    assert not still_holds_update(probed(trial(name, **options), tmp_path))


def test_nothing_is_decoded_of_noise(tmp_path: Path) -> None:
    one = trial("Noise", scale=10.0)
    assert probed(one, tmp_path).decoded < 0.1
    assert one.findings(tmp_path, 8).read_text() == "[]"
    assert one.inversion(tmp_path, 8).decoder(0) is None


def test_the_undefended_control_is_not_tested(tmp_path: Path) -> None:
    assert trial("none").run(tmp_path).probes == ()
