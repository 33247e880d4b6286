from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leakfrontier.evaluate.share.archive import AlteredError
from leakfrontier.evaluate.share.verification import Rerun, Verification

Command = Callable[..., tuple[int, str, str]]
Found = Callable[..., list[Any]]
HERE = "leakfrontier.evaluate.commands.verify"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that says what a verification finds, and what it was asked for."""
    asked: list[dict[str, Any]] = []

    def finds(result: Verification) -> list[dict[str, Any]]:
        def verified(_: object, **options: Any) -> Verification:  # noqa: ANN401
            asked.append(options)
            return result

        monkeypatch.setattr(f"{HERE}.verify_pack", verified)
        monkeypatch.setattr(
            f"{HERE}.read_pack", lambda _: SimpleNamespace(entries=range(7), panel="2026.1")
        )
        return asked

    return finds


def finding(**change: Any) -> Verification:  # noqa: ANN401
    plain: dict[str, Any] = {
        "cells": 40,
        "chosen": 10,
        "reruns": (Rerun("a cell", "equal"),),
        "problems": (),
        "differences": (),
        "seed": 5,
    }
    return Verification(**plain | change)


def test_what_could_still_be_hidden_is_said(command: Command, found: Found) -> None:
    asked = found(finding())
    code, output, _ = command("verify", "pack.zip", "--cells", 10, "--seed", 5, "--workers", 1)
    assert code == 0
    assert "Checksums of 7 files are right. Panel: 2026.1" in output
    assert "10 of 40 cells were run again (--seed 5)" in output
    for altered, probability in ((1, 0.75), (2, 0.75 * 29 / 39)):  # drawn without replacement
        assert f"  {altered}: {100 * probability:.1f} %" in output
    assert output.splitlines()[-1] == "Not refuted"
    assert (asked[0]["cells"], asked[0]["seed"], asked[0]["trust_code"]) == (10, 5, False)


@pytest.mark.parametrize(
    "change",
    [
        {"problems": ("a sum is [wrong]",)},
        {"reruns": (Rerun("a cell", "different", "another row"),)},
        {"reruns": (Rerun("a cell", "failed", "an error"),)},
    ],
    ids=str,
)
def test_what_speaks_against_a_pack_refutes_it(
    command: Command,
    found: Found,
    change: dict[str, Any],
) -> None:
    found(finding(**change))
    code, output, _ = command("verify", "pack.zip")
    assert code == 1
    assert output.splitlines()[-1] == "Refuted"
    for problem in change.get("problems", ()):
        assert f"wrong {problem}" in output


def test_another_place_is_named_and_what_it_means(command: Command, found: Found) -> None:
    nearly = (Rerun("a cell", "within tolerance"),)
    found(finding(reruns=nearly, differences=("torch 2.6, not 2.7",), chosen=0))
    code, output, _ = command("verify", "pack.zip")
    assert code == 0
    assert "This environment differs from the pack's: torch 2.6, not 2.7." in output
    assert "rows may differ within a tolerance" in output
    assert "were run again" not in output


def test_cells_are_chosen_at_random_unless_said_otherwise(command: Command, found: Found) -> None:
    asked = found(finding())
    for _ in range(2):
        command("verify", "pack.zip")
    assert asked[0]["seed"] != asked[1]["seed"]


def test_an_altered_pack_is_refuted_before_anything_runs(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def altered(_: Path) -> None:
        raise AlteredError("rows/attacks.csv is not what [SHA256SUMS] says")

    monkeypatch.setattr(f"{HERE}.read_pack", altered)
    monkeypatch.setattr(f"{HERE}.verify_pack", None)
    code, output, _ = command("verify", tmp_path / "pack.zip")
    assert code == 1
    assert output == "Refuted: rows/attacks.csv is not what [SHA256SUMS] says\n"
