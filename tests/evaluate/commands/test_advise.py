from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]

SIZES = ("--examples", 60_000, "--batch", 256, "--rounds", 500)


@pytest.fixture
def command(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return the command line, with a short table of proofs."""
    monkeypatch.setattr("leakfrontier.evaluate.advise.recommendation.PROVEN_LADDER", (1.0, 2.0))
    return command


@pytest.mark.parametrize("as_json", [True, False])
def test_what_cannot_be_reached_is_an_answer(command: Command, as_json: bool) -> None:
    options = ("--json",) if as_json else ()
    code, output, _ = command("advise", *SIZES, "--reconstruction-success", 0.01, *options)
    assert code == 1
    assert "cannot be reached: the closest" in output
    if as_json:
        assert json.loads(output)["recommended"] is None


@pytest.mark.parametrize("name", ["--rounds", "--batch", "--examples"])
def test_zero_is_not_the_same_as_nothing(command: Command, name: str) -> None:
    code, _, errors = command("advise", "--epsilon", 3, *SIZES, name, 0)
    assert code == 2
    assert "give --examples" not in errors
    assert "got 0" in errors or "the 0 examples" in errors


def test_advise_from_numbers_alone(command: Command, tmp_path: Path) -> None:
    code, output, _ = command("advise", "--epsilon", 3, *SIZES, "--out", tmp_path)
    assert code == 0
    for part in ("eps PLD", "bound, upload", "-> ", "Who sees what", "Warnings", "Tuning on priv"):
        assert part in output
    assert "accuracy" not in output.partition("Recommended")[0]
    page = (tmp_path / "advice.html").read_text()
    assert "Take noise multiplier" in page
    assert "http://" not in page.partition("<script>")[0]
    document = json.loads((tmp_path / "advice.json").read_text())
    assert document["recommended"]["epsilon"]["pld"] <= 3


def test_advise_in_epochs_as_json(command: Command) -> None:
    rounds = command("advise", "--epsilon", 3, *SIZES, "--json")[1]
    epochs = ("--examples", 60_000, "--batch", 240, "--epochs", 2)
    code, output, _ = command("advise", "--epsilon", 3, *epochs, "--json")
    assert code == 0
    assert json.loads(rounds)["question"]["rounds"] == 500
    assert json.loads(output)["question"]["rounds"] == 500
    assert json.loads(output)["setting"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (SIZES, "exactly one of epsilon, reconstruction_success, min_accuracy must be given"),
        ((*SIZES, "--epsilon", 3, "--min-accuracy", 0.5), "got epsilon, min_accuracy"),
        ((*SIZES, "--epsilon", -1), "epsilon must be in (0, inf), got -1"),
        (("--epsilon", 3), "give --examples, --batch and --rounds"),
        ((*SIZES, "--epsilon", 3, "--epochs", 2), "give --rounds or --epochs, not both"),
        ((*SIZES, "--epsilon", 3, "--batch", 60_001), "the sample rate would be above 1"),
        ((*SIZES, "--epsilon", 3, "--clients", 0), "clients must be between 1 and the 60000"),
        ((*SIZES, "--epsilon", 3, "--delta", 1), "delta must be in (0, 1), got 1"),
        ((*SIZES, "--min-accuracy", 0.9), "give a model"),
        (("--epsilon", 3, "--dataset", "nope"), "dataset must be one of fashion-mini"),
        (("--epsilon", 3, "--model", "{name: [}"), "--model '{name: [}' is not a valid YAML"),
        (("--epsilon", 3, "--dataset", "digits", "--model", "nope"), "model must be one of mlp"),
    ],
)
def test_advise_refuses_bad_input(
    command: Command, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    code, output, errors = command("advise", *arguments, "--out", tmp_path / "out")
    assert code == 2
    assert message in " ".join(errors.split())
    assert "Traceback" not in output + errors
