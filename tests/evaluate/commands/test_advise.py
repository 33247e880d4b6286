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


HOSPITALS = ("--clients", 5, "--batch", 64, "--rounds", 30, "--epsilon", 3)


@pytest.mark.parametrize(
    "examples", [("--examples-per-client", 8000), ("--examples", 40_000)], ids=["each", "all"]
)
def test_a_round_that_may_be_an_epoch_is_warned_of_with_both_epsilons(
    command: Command, examples: tuple[str, int]
) -> None:
    code, output, _ = command("advise", *HOSPITALS, *examples)
    assert code == 0
    assert output.startswith(
        "5 clients x 8,000 examples = 40,000 examples in all; "
        "30 rounds x 1 local step = 30 steps of a client."
    )
    assert "it takes 3,750 steps, not 30, and epsilon with noise multiplier 0.587 is 11.7" in output
    assert "not 3. Give --local-epochs or --local-steps" in output


def test_one_client_is_warned_with_both_epsilons(command: Command) -> None:
    sizes = ("--examples", 6000, "--batch", 60, "--rounds", 30, "--epsilon", 3)
    output = command("advise", *sizes)[1]
    assert "3,000 steps, not 30, and epsilon with noise multiplier 0.605" in output
    assert "not 3. Give --local-epochs or --local-steps" in output


@pytest.mark.parametrize(
    ("options", "top", "below"),
    [
        (("--shuffled",), "a record is in 1 of them, which counts.", "counts 1 step;"),
        (("--unit", "client"), "10 rounds of a client count as a whole, ", "counts 10 rounds;"),
        ((), "10 steps of a client.", "counts 10 steps;"),
    ],
)
def test_what_counts_is_the_same_above_and_below(
    command: Command, options: tuple[str, ...], top: str, below: str
) -> None:
    sizes = ("--examples", 6000, "--clients", 5, "--batch", 60, "--rounds", 10, "--epsilon", 3)
    output = command("advise", *sizes, *options)[1]
    assert top in output.partition("\n")[0]
    assert below in " ".join(output.split())


@pytest.mark.parametrize(
    ("local", "steps", "noise"),
    [(("--local-steps", 1), 30, 0.587), (("--local-epochs", 1), 3750, 0.97)],
)
def test_what_was_said_is_not_warned_of(
    command: Command, local: tuple[str, int], steps: int, noise: float
) -> None:
    output = command("advise", *HOSPITALS, "--examples-per-client", 8000, *local, "--json")[1]
    document = json.loads(output)
    assert document["question"]["steps"] == steps
    assert document["recommended"]["noise_multiplier"] == pytest.approx(noise, abs=6e-4)
    assert not any("--local-epochs" in warning for warning in document["warnings"])


def test_who_may_take_part_in_how_many_rounds_is_said(command: Command, tmp_path: Path) -> None:
    sizes = ("--clients", 1000, "--examples-per-client", 10, "--batch", 10, "--rounds", 50)
    some = (*sizes, "--clients-per-round", 20, "--unit", "client", "--epsilon", 3)
    any_of_them = command("advise", *some, "--out", tmp_path)[1]
    said = "20 of the clients in each of 50 rounds: a client is in 1 on average and in at most "
    assert f"{said}50 (these count)" in any_of_them
    assert f"{said}50 (these count)" in (tmp_path / "advice.html").read_text()
    assert "Random choice of clients gives no protection against the server" in any_of_them
    limited = command("advise", *some, "--max-participations", 2)[1]
    assert f"{said}2 (these count)" in limited
    assert "Random choice of clients" not in limited


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
        (("--epsilon", 3), "give examples (or examples_per_client), batch_size and rounds"),
        (
            (*SIZES, "--epsilon", 3, "--examples-per-client", 9),
            "or examples_per_client, not both",
        ),
        ((*SIZES, "--epsilon", 3, "--local-epochs", 0), "local_epochs must be a positive whole"),
        (
            (*SIZES, "--epsilon", 3, "--local-epochs", 1, "--local-steps", 2),
            "give local_epochs or local_steps, not both",
        ),
        (
            (*SIZES, "--epsilon", 3, "--clients-per-round", 2),
            "clients_per_round must be at most the 1 clients, got 2",
        ),
        (
            ("--epsilon", 3, "--examples", 100, "--batch", 10, "--epochs", 2, "--local-epochs", 1),
            "give rounds with local_epochs or local_steps, not epochs",
        ),
        (
            ("--epsilon", 3, "--dataset", "digits", "--local-epochs", 1),
            "measurements need one local step per round",
        ),
        ((*SIZES, "--epsilon", 3, "--epochs", 2), "give rounds or epochs, not both"),
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
