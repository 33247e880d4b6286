from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

Command = Callable[..., tuple[int, str, str]]
UserFile = Callable[..., Path]

PRIVATE = "{name: DPSGD, noise_multiplier: 1.0}"
CLIENT = "{name: ClientDP, noise_multiplier: 1.0}"  # which takes half as long
SMALL = ("--dataset", "digits", "--model", "{name: mlp, width: 8}", "--uploads", 100)
QUIET = """
from leakfrontier.defenses import ClientDP

@dataclass
class Quiet(ClientDP):
    def on_update(self, update, rng):
        return ClientDP(0.001, self.max_update_norm).on_update(update, rng)
"""
BROKEN = """
@dataclass
class Broken(Defense):
    scale: float = 1.0

    def on_update(self, update, rng):
        return {name: self.scale * value for name, value in update.items()}

    def replay(self, observed):
        return Broken(float("nan"))
"""


@pytest.fixture
def command(command: Command) -> Command:
    """Return a function that runs `leakfrontier membership`."""
    return partial(command, "membership")


def test_prints_and_draws_what_is_found_and_permitted(command: Command, tmp_path: Path) -> None:
    code, output, errors = command(PRIVATE, *SMALL, "--out", tmp_path / "new" / "folder")
    assert code == 0
    lines = output.splitlines()
    assert lines[0] == "membership: DPSGD(noise_multiplier=1.0) on digits/mlp(width=8)"
    assert lines[1].split("  ")[-1].strip() == "TPR at FPR 10 %"
    assert [line.split("  ")[0].strip() for line in lines[2:5]] == [
        "gradient cosine",
        "likelihood ratio",
        "permitted",
    ]
    assert lines[4].split() == ["permitted", "68.3", "%", "76.4", "%"]  # 2 / sigma apart
    assert "1 % needs 1000 uploads" in output
    assert "above the permitted value" not in output
    folder = tmp_path / "new" / "folder"
    assert str(folder / "membership.png") in errors
    assert (folder / "membership.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "membership.svg").read_text()
    curves = pd.read_csv(folder / "membership.csv")
    assert set(curves["attack"]) == {"gradient cosine", "likelihood ratio"}
    assert (curves["tpr_low"] <= curves["bound"]).all()


def test_as_json(command: Command, tmp_path: Path) -> None:
    code, output, _ = command(CLIENT, *SMALL, "--batch", 2, "--json", "--out", tmp_path)
    assert code == 0
    document = json.loads(output)
    assert document["setting"].endswith("/batch 2")
    assert document["uploads"] == 100
    assert document["permitted"]["advantage"] == pytest.approx(0.683, abs=1e-3)
    assert document["exceeding"] == []
    for attack in document["attacks"]:
        rate = attack["TPR at FPR 10 %"]
        assert rate["low"] <= rate["value"] <= rate["high"]


def test_a_broken_claim_is_said(command: Command, user_file: UserFile, tmp_path: Path) -> None:
    defense = f"{{name: '{user_file(QUIET)}:Quiet', noise_multiplier: 4.0}}"
    code, output, _ = command(defense, *SMALL, "--out", tmp_path)
    assert code == 1
    assert "gradient cosine is above the permitted value: the defense does not seem" in output


def test_without_a_guarantee_nothing_is_permitted_or_forbidden(
    command: Command, tmp_path: Path
) -> None:
    arguments = ("none", *SMALL, "--out", tmp_path)
    code, output, _ = command(*arguments)
    assert code == 0
    assert "likelihood ratio: not applicable: the likelihood of an upload is not known" in output
    assert "no bound on the attacks is proven" in output
    assert "bound" not in pd.read_csv(tmp_path / "membership.csv")
    assert command(*arguments)[1] == output


def test_another_seed_is_another_repetition(command: Command, tmp_path: Path) -> None:
    arguments = (CLIENT, *SMALL, "--out", tmp_path)
    first, again, other = (command(*arguments, "--seed", seed)[1] for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Nope",), "unknown defense 'Nope': choose one of"),
        (("DPSGD",), "missing 1 required positional argument: 'noise_multiplier'"),
        (("absent.py:Mine",), "there is no file"),
        (("{name: DPSGD, noise_multiplier: -1}",), "noise_multiplier must be"),
        (
            ("{name: DPSGD, noise_multiplier: [1, 2]}",),
            "give 2 configurations, but one is needed: give single values",
        ),
        ((PRIVATE, "--uploads", 99), "Invalid value for '--uploads'"),
        ((PRIVATE, "--batch", 0), "Invalid value for '--batch'"),
        ((PRIVATE, "--batch", 10_000), "more than the 10000 examples behind an upload"),
        ((PRIVATE, "--seed", -1), "Invalid value for '--seed'"),
        ((PRIVATE, "--dataset", "nope"), "dataset must be one of"),
        ((PRIVATE, "--model", "nope"), "model must be one of"),
        ((PRIVATE, "--out", Path(__file__)), "File exists"),
        ((PRIVATE, "--out", Path(__file__) / "folder"), "Not a directory"),
    ],
)
def test_refuses_bad_input(
    command: Command, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    code, output, errors = command(*SMALL, "--out", tmp_path, *arguments)
    assert code == 2
    assert message in " ".join(errors.split())
    assert "Traceback" not in output + errors


def test_refuses_what_cannot_be_scored(
    command: Command, user_file: UserFile, tmp_path: Path
) -> None:
    code, output, errors = command(f"{user_file(BROKEN)}:Broken", *SMALL, "--out", tmp_path)
    assert code == 2
    assert output == ""
    assert "no attack was applicable: gradient cosine: scores are NaN" in errors
