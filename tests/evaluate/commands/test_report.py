from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic import SCENARIOS, make_results

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        ({}, 0, "Evaluation: YES"),
        ({"labels_granted": True}, 0, "Evaluation: YES, with caveats (oracle inputs)"),
        (
            {"guaranteed": True, "measured": 0.8, "bound": 0.3},
            1,
            "Evaluation: NO (proven bound, claimed noise)",
        ),
        ({"failed": 1}, 1, "Evaluation: NO (completeness)"),
    ],
    ids=str,
)
def test_a_report_concludes_as_its_page_does(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
    code: int,
    line: str,
) -> None:
    make_results(tmp_path, scenarios=SCENARIOS[:1], **fault)
    monkeypatch.setattr("leakfrontier.reports.write_report", lambda *_: Path("report.html"))
    found, output, _ = command("report", tmp_path)
    assert (found, output.splitlines()[-1]) == (code, line)


def test_a_picture_is_of_a_run_or_of_its_pack(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Path, str | None]] = []

    def drawn(results: str, path: Path, scenario: str | None) -> Path:
        asked.append((results, path, scenario))
        return path

    opened: dict[str, Path] = {}

    class Opened:
        def __init__(self, kind: str, path: Path) -> None:
            opened[kind] = path
            self.results = kind

    monkeypatch.setattr("leakfrontier.reports.write_picture", drawn)
    monkeypatch.setattr("leakfrontier.evaluate.commands.report.conclude", lambda *_: None)
    monkeypatch.setattr(
        "leakfrontier.evaluate.run.store.received_results", lambda path: Opened("run", path).results
    )
    monkeypatch.setattr(
        "leakfrontier.evaluate.share.pack.read_pack", lambda path: Opened("pack", path)
    )
    pack = tmp_path / "pack.zip"
    pack.touch()
    picture = tmp_path / "all.svg"
    for source in (tmp_path, pack):
        _, output, errors = command("report", source, "--picture", picture, "--scenario", "a")
        assert f"Picture: {picture}" in output, errors
    assert opened == {"run": tmp_path, "pack": pack}
    assert asked == [("run", picture, "a"), ("pack", picture, "a")]


def test_a_page_has_all_scenarios(command: Command, tmp_path: Path) -> None:
    code, _, errors = command("report", tmp_path, "--scenario", "a")
    assert code == 2
    assert "--scenario needs --picture: the page shows all scenarios" in errors
