from __future__ import annotations

from pathlib import Path

import pytest

from leakfrontier.evaluate.door.advising import advise
from leakfrontier.evaluate.foundations.errors import UserError

SILOS = {"clients": 5, "examples_per_client": 8000, "batch_size": 64, "rounds": 30}


def test_local_epochs_ask_for_more_noise() -> None:
    one_step, one_epoch = (advise(epsilon=3, **SILOS, local_epochs=n) for n in (None, 1))
    assert one_step.recommended is not None
    assert one_epoch.recommended is not None
    assert one_epoch.recommended.noise_multiplier > 1.4 * one_step.recommended.noise_multiplier


def test_examples_are_of_all_clients_or_of_each() -> None:
    silos = {key: value for key, value in SILOS.items() if key != "examples_per_client"}
    assert (
        advise(epsilon=3, **SILOS).question == advise(epsilon=3, examples=40_000, **silos).question
    )
    with pytest.raises(UserError, match="examples or examples_per_client, not both"):
        advise(epsilon=3, examples=40_000, **SILOS)


def test_what_cannot_be_reached_is_an_answer() -> None:
    advice = advise(reconstruction_success=0.001, **SILOS)
    assert advice.recommended is None
    assert advice.reasons
    assert advice.reasons[0] in advice._repr_html_()


def test_advice_shows_itself() -> None:
    advice = advise(epsilon=3, **SILOS)
    assert "<table" in advice._repr_html_()
    for reason in advice.reasons:
        assert reason in str(advice)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epsilon": 3}, "give examples"),
        ({"epsilon": 3, **SILOS, "epochs": 3}, "rounds or epochs, not both"),
        ({"epsilon": 3, **SILOS, "clients": 0}, "clients must be between 1"),
        ({"epsilon": 3, "dataset": "missing"}, "missing"),
    ],
)
def test_bad_input_is_refused(
    given: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        advise(**given)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]
