from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leakfrontier.evaluate.share.archive import AlteredError
from leakfrontier.evaluate.share.claims import PackClaim
from leakfrontier.evaluate.share.judgement import Decision, Judgement
from leakfrontier.evaluate.share.verification import Verification

Command = Callable[..., tuple[int, str, str]]
Found = Callable[..., list[Any]]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that says what a verification finds, and what it was asked for."""
    asked: list[dict[str, Any]] = []

    def finds(result: Verification) -> list[dict[str, Any]]:
        def verified(_: object, **options: Any) -> Verification:  # noqa: ANN401
            asked.append(options)
            return result

        monkeypatch.setattr("leakfrontier.evaluate.share.verification.verify", verified)
        monkeypatch.setattr(
            "leakfrontier.evaluate.share.pack.read_pack",
            lambda _: SimpleNamespace(entries=range(7), panel="2026.1", digest="ab" * 32),
        )
        return asked

    return finds


def judged(decision: Decision, *reasons: str) -> Judgement:
    claim = PackClaim("mlp", 0, "[Mine]", False, (0, 1, 2), (3, 4, 5, 6), (0, 3, 4))
    return Judgement(claim, decision, 2, reasons)


def finding(**change: Any) -> Verification:  # noqa: ANN401
    plain: dict[str, Any] = {
        "judgements": (judged("confirmed"),),
        "cells": 3,
        "problems": (),
        "differences": (),
        "tolerated": False,
        "seed": 5,
    }
    return Verification(**plain | change)


def test_what_could_still_be_hidden_is_said_per_claim(command: Command, found: Found) -> None:
    asked = found(finding())
    options = ("--defense", "Mine", "--cells", 7, "--seeds", 1, "--seed", 5, "--workers", 1)
    code, output, _ = command("verify", "pack.zip", *options)
    assert code == 0
    assert "Checksums of 7 files are right. Panel: 2026.1" in output
    assert (
        "confirmed [Mine], mlp, round 0: accuracy by 1 of 3 trainings (one altered training "
        "escapes with probability 67 %), worst case by 2 of 4 attacks (one attack, altered at "
        "random: 50 %)"
    ) in output
    assert "3 cells were run again (--seed 5)" in output
    assert output.splitlines()[-1] == "Confirmed"
    names = ("defenses", "more", "seeds", "seed", "trust_code")
    assert [asked[0][name] for name in names] == [["Mine"], 7, 1, 5, False]


@pytest.mark.parametrize(
    ("change", "code", "last"),
    [
        ({"problems": ("a sum is [wrong]",)}, 1, "Refuted"),
        ({"judgements": (judged("refuted", "another [row]"),)}, 1, "Refuted"),
        ({"judgements": (judged("undecided", "too few"),)}, 3, "Undecided"),
        ({"judgements": ()}, 3, "Undecided"),
    ],
    ids=str,
)
def test_the_exit_code_tells_the_outcome(
    command: Command, found: Found, change: dict[str, Any], code: int, last: str
) -> None:
    found(finding(**change))
    given, output, _ = command("verify", "pack.zip")
    assert given == code
    assert output.splitlines()[-1] == last
    for problem in change.get("problems", ()):
        assert f"wrong {problem}" in output
    for judgement in change.get("judgements", ()):
        assert f"  {judgement.reasons[0]}" in output


def test_another_place_is_named_and_what_it_means(command: Command, found: Found) -> None:
    found(finding(tolerated=True, differences=("torch 2.6, not 2.7",)))
    code, output, _ = command("verify", "pack.zip")
    assert code == 0
    assert "This environment differs from the pack's: torch 2.6, not 2.7." in output
    assert "rows may differ within a tolerance" in output


def test_nothing_is_signed_if_nothing_ran(command: Command, found: Found, tmp_path: Path) -> None:
    found(finding(judgements=()))
    key = tmp_path / "my.key"
    code, output, errors = command("verify", tmp_path / "pack.zip", "--sign", key)
    assert code != 0
    assert "there is nothing to sign: name a --defense" in output + errors
    assert [path.name for path in tmp_path.iterdir()] == ["my.key"]


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

    monkeypatch.setattr("leakfrontier.evaluate.share.pack.read_pack", altered)
    monkeypatch.setattr("leakfrontier.evaluate.share.verification.verify", None)
    code, output, _ = command("verify", tmp_path / "pack.zip")
    assert code == 1
    assert output == "Refuted: rows/attacks.csv is not what [SHA256SUMS] says\n"
