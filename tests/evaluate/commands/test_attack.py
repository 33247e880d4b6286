from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from leakfrontier.evaluate.users.methods import Method

Command = Callable[..., tuple[int, str, str]]
Attacked = Callable[..., list[Any]]
HERE = "leakfrontier.evaluate.commands.attack"


@pytest.fixture
def attacked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function that says how attacks end, and what was asked for."""

    def ends(status: str = "ok", *, scored: bool = False) -> list[Any]:
        asked: list[Any] = []
        results = SimpleNamespace(cells=pd.DataFrame({"status": ["ok", status]}))

        def attack(*folders: Path, **options: Any) -> tuple[Any, bool]:  # noqa: ANN401
            asked.append((*folders, options))
            return results, scored

        monkeypatch.setattr("leakfrontier.evaluate.outside.capture_run.attack_captures", attack)
        monkeypatch.setattr(f"{HERE}.conclude", lambda *_: None)
        monkeypatch.setattr(
            "leakfrontier.reports.captured.write_gallery", lambda out: out / "gallery.html"
        )
        monkeypatch.setattr("leakfrontier.reports.write_report", lambda out, _: out / "report.html")
        return asked

    return ends


def test_options_are_those_of_a_run(command: Command, attacked: Attacked, tmp_path: Path) -> None:
    asked = attacked()
    code, output, errors = command(
        *("attack", tmp_path, "--out", tmp_path / "out", "--candidates", 7, "--trust-code"),
        *("--adversary", "DLG", "--adversary", "{name: DLG, iterations: 3}", "--model", "lenet"),
    )
    assert code == 0, errors
    ((folder, out, options),) = asked
    assert (folder, out) == (tmp_path, tmp_path / "out")
    assert options["adversaries"] == [
        Method(name="DLG"),
        Method(name="DLG", options={"iterations": 3}),
    ]
    assert options["model"] == Method(name="lenet")
    assert (options["candidates"], options["trust_code"], options["device"]) == (7, True, "cpu")
    assert f"Gallery: {out / 'gallery.html'}" in output
    assert "No success rate is reported" in output


def test_scores_make_a_page_and_no_gallery(
    command: Command,
    attacked: Attacked,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = attacked(scored=True)
    monkeypatch.chdir(tmp_path)
    code, output, _ = command("attack", tmp_path)
    assert code == 0
    assert asked[0][1] == Path("runs/attack") / tmp_path.name
    assert "report.html" in output
    assert "Gallery" not in output


def test_an_attack_that_failed_is_an_error_though_nothing_is_claimed(
    command: Command,
    attacked: Attacked,
    tmp_path: Path,
) -> None:
    attacked("crash")
    assert command("attack", tmp_path, "--out", tmp_path)[0] == 1


def test_ctrl_c_says_how_to_go_on(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("leakfrontier.evaluate.outside.capture_run.attack_captures", interrupted)
    code, output, _ = command("attack", tmp_path, "--out", tmp_path)
    assert code == 130
    assert "The same command continues where it stopped." in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--adversary", "{name: [}"), "--adversary '{name: [}' is not a valid YAML mapping"),
        (("--model", "{width: 3}"), "a mapping with the key 'name'"),
        (
            ("--address", "auto"),
            "--address is the address of a Ray cluster: give --engine ray as well",
        ),
        (("--candidates", 1), "Invalid value"),
    ],
)
def test_refuses_bad_input(
    command: Command,
    attacked: Attacked,
    tmp_path: Path,
    arguments: tuple[object, ...],
    message: str,
) -> None:
    asked = attacked()
    code, output, errors = command("attack", tmp_path, "--out", tmp_path, *arguments)
    assert code == 2
    assert message in " ".join(errors.split())
    assert "Traceback" not in output + errors
    assert not asked
