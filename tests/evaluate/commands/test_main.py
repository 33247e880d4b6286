from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from synthetic import ARMS, shared_results
from synthetic import SCENARIOS as SCENARIOS_MADE_UP

from leakfrontier.evaluate.commands import main as cli
from leakfrontier.evaluate.engines import engine as engine_module
from leakfrontier.evaluate.foundations.rows import Cell, Outcome
from leakfrontier.evaluate.run import run as run_module
from leakfrontier.evaluate.run.store import FILE_NAME, Store

Config = dict[str, Any]
UserFile = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]

DEFENSE = """
@dataclass
class Mine(Defense):
    scale: float = 1.0

    @property
    def strength(self) -> float:
        return 1.0
"""


@pytest.fixture
def command(command: Command) -> Command:
    """Return the command line, in a narrow terminal."""
    return partial(command, columns=80)


@pytest.fixture
def config_file(tmp_path: Path, tiny: Config) -> Callable[..., Path]:
    """Return a function that writes the tiny configuration with changes."""

    def write(scenario: Config | None = None, **change: object) -> Path:
        tiny["scenarios"][0]["training"].pop("batch_size", None)  # as many as are attacked
        tiny["scenarios"][0] |= scenario or {}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(tiny | change))
        return path

    return write


@pytest.fixture
def refused(
    command: Command,
    config_file: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., str]:
    """Return a function that runs what must be refused before any cell: the message."""
    monkeypatch.setattr(engine_module, "execute", None)

    def run(*arguments: object, out: Path | None = None, **change: Any) -> str:  # noqa: ANN401
        arguments = (config_file(**change), "--out", out or tmp_path / "out", *arguments)
        code, output, errors = command("run", *arguments)
        assert code == 2
        assert errors.startswith("Error: ")
        assert "Traceback" not in output + errors
        return errors.removeprefix("Error: ")

    return run


def test_help_says_what_is_run_by_default(command: Command) -> None:
    assert command("run", "--help")[1].count("quick") >= 3  # as a file, as a preset, as a choice


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_an_out_without_permission(refused: Callable[..., str], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in refused(out=tmp_path / "out")


def make_corrupt(folder: Path) -> None:
    (folder / FILE_NAME).write_bytes(b"no database" * 1000)


def make_foreign(folder: Path) -> None:
    with sqlite3.connect(folder / FILE_NAME) as database:
        database.execute("CREATE TABLE something (other)")


def make_newer(folder: Path) -> None:
    Store(folder, create=True)
    with sqlite3.connect(folder / FILE_NAME) as database:
        database.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_corrupt, "cannot be used as a results file"),
        (make_foreign, "a database of another program"),
        (make_newer, "has format 99"),
    ],
)
def test_a_results_file_that_cannot_be_used(
    refused: Callable[..., str],
    command: Command,
    tmp_path: Path,
    make: Callable[[Path], None],
    message: str,
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    make(folder)
    before = (folder / FILE_NAME).read_bytes()
    assert message in refused(out=folder)
    code, output, errors = command("report", folder)
    assert code == 2
    assert message in errors
    assert "Traceback" not in output + errors
    assert (folder / FILE_NAME).read_bytes() == before


def test_ctrl_c_says_how_to_go_on(
    command: Command,
    config_file: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_module, "execute", interrupted)
    code, output, errors = command("run", config_file(), "--out", tmp_path / "out")
    assert code == 130
    assert "The same command continues where it stopped" in output
    assert "Traceback" not in output + errors


@pytest.mark.parametrize("name", [(), ("run",), ("audit",)], ids=str)
def test_exit_codes_are_in_the_help(command: Command, name: tuple[str, ...]) -> None:
    text = " ".join(command(*name, "--help")[1].split())
    assert " ".join(cli.EXIT_CODES.split()) in text


def test_failed_cells_are_named_and_run_again_on_request(
    command: Command,
    config_file: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cells are marked as failed beforehand; what is handed to the workers is looked at."""
    out = tmp_path / "out"
    handed: list[Cell] = []

    def execute(_: object, tasks: list[Any], **__: object) -> list[Any]:
        handed.extend(trial.cell for trial, _ in tasks)
        return []

    monkeypatch.setattr(engine_module, "execute", execute)
    monkeypatch.setattr("leakfrontier.reports.write_report", lambda *_: Path("report.html"))
    config = config_file()
    code, output, _ = command("run", config, "--out", out)
    assert code == 1
    assert [cell.kind for cell in handed] == ["train", "attack"]
    assert "missing training on none" in output
    assert output.endswith("Evaluation: NO (undefended control, completeness)\n")

    store = Store(out)
    for cell in handed:
        store.write(cell.key, Outcome(status="error", error="ValueError: [/bad] luck\nmore"), 1.0)
    first, handed[:] = list(handed), []
    code, output, _ = command("run", config, "--out", out)
    assert (code, handed) == (1, [])
    assert "error PriorGuess on none: ValueError: [/bad] luck\n" in output
    command("run", config, "--out", out, "--retry-failed")
    assert handed == first


@pytest.mark.usefixtures("undrawn")
def test_a_defense_of_the_users_beside_the_configured_ones(
    command: Command,
    config_file: Callable[..., Path],
    user_file: UserFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "a folder [of mine]"
    config = config_file(adversaries=["PriorGuess", "LinearLeakage"], observations=6)
    defense = f"{{name: '{user_file(DEFENSE)}:Mine', scale: [1, 2]}}"
    arguments = ("run", config, "--defense", defense, "--out", out, "--workers", 1)
    code, output, errors = command(*arguments)
    assert code == 0, errors
    for text in ("none", "Mine(scale=1)", "Mine(scale=2)", f"Report: {out / 'report.html'}"):
        assert text in output
    assert " final " in output  # accuracy, whatever round is attacked
    assert output.splitlines()[-1].startswith("Evaluation: YES, with caveats (")
    assert output.splitlines()[-1].endswith(", power)")  # six uploads
    assert "Mine(scale=2)" in (out / "report.html").read_text()
    before = Store(out).results().cells.set_index("cell")
    assert before["status"].tolist() == ["ok"] * 11
    assert before["strength"].dropna().unique().tolist() == [1.0]

    monkeypatch.setattr("leakfrontier.reports.write_report", lambda *_: Path("report.html"))
    user_file(DEFENSE.replace("return 1.0", "return 2.0"))
    assert command(*arguments)[0] == 0
    after = Store(out).results().cells.set_index("cell")
    assert after["status"].tolist() == ["ok"] * 11
    assert after["strength"].dropna().unique().tolist() == [2.0]
    kept = before.index.intersection(after.index)
    assert before.loc[kept, "defense"].tolist() == ["none"] * 3
    assert after.loc[kept, "seconds"].tolist() == before.loc[kept, "seconds"].tolist()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a list of ours is empty"),
        OSError("a pipe of ours is closed"),
        FileNotFoundError(2, "No such file", str(Path(cli.__file__).with_name("absent.html"))),
    ],
    ids=repr,
)
def test_what_we_did_wrong_is_no_mistake_of_the_users(
    config_file: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def buggy(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(engine_module, "execute", buggy)
    monkeypatch.setattr(sys, "argv", ["leakfrontier", "run", str(config_file()), "--out", "out"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(type(error)) as caught:  # with a traceback, exit code 1
        cli.main()
    assert caught.value is error
    assert "Please report it" in caught.value.__notes__[0]


def test_an_error_about_a_file_of_the_users_has_no_traceback(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "out" / "page.html"))

    monkeypatch.setattr(engine_module, "execute", denied)
    assert "page.html" in refused()


@pytest.mark.parametrize("columns", [80, 100])
def test_names_are_not_broken_within_words(
    command: Command,
    config_file: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> None:
    results = shared_results(seeds=(0,), observations=4, batch_size=2)
    monkeypatch.setattr(run_module, "run", lambda *_, **__: results)
    monkeypatch.setattr("leakfrontier.reports.write_report", lambda *_: Path("report.html"))
    _, output, _ = command("run", config_file(), "--out", tmp_path / "out", columns=columns)
    for scenario in SCENARIOS_MADE_UP:
        assert f"{scenario}, round 0: worst case over the panel" in output
    assert all(len(line) <= columns for line in output.splitlines() if "│" in line)
    names = [line.split("│")[1].strip() for line in output.splitlines() if line.startswith("│")]
    words = {word for name in names for word in name.split()}
    assert words == {word for arm in ARMS for word in arm.label.split()}


def test_every_attack_on_every_upload_on_request(
    command: Command,
    config_file: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "execute", lambda *_, **__: [])
    monkeypatch.setattr("leakfrontier.reports.write_report", lambda *_: Path("report.html"))
    adversaries = [{"name": "InvertingGradients", "iterations": [3, 4]}]
    config = config_file(adversaries=adversaries)
    for options, individual in (((), False), (("--individual",), True)):
        assert command("run", config, "--out", tmp_path / "out", *options)[0] == 1
        kept = Store(tmp_path / "out").results().config
        assert kept["individual"] is individual
        assert [one["options"] for one in kept["adversaries"]] == [
            {"iterations": 3},
            {"iterations": 4},
        ]


def test_as_a_process_of_its_own(tmp_path: Path) -> None:
    absent = tmp_path / "absent.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "leakfrontier.evaluate.commands.main", "run", absent],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"Error: cannot read the configuration {absent}: ")
    assert "Traceback" not in done.stderr


def test_ctrl_c_has_the_same_exit_code_everywhere(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("leakfrontier.evaluate.run.store.received_results", interrupted)
    code, output, errors = command("report", tmp_path)
    assert (code, output, errors) == (130, "", "Interrupted.\n")


HEAVY = ("torch", "numpy", "pandas", "scipy", "altair", "transformers", "opacus", "pydantic")
COMMANDS = sorted(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


def start(*arguments: str, **environment: str) -> tuple[str, list[str], float]:
    """Return what a new process prints, its heavy imports, and the CPU-seconds it took."""
    script = (
        "import sys\n"
        f"sys.argv = ['leakfrontier', *{arguments!r}]\n"
        "from leakfrontier.evaluate.commands.main import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    import time\n"
        f"    heavy = [one for one in {HEAVY!r} if one in sys.modules]\n"
        "    print('heavy', time.process_time(), *heavy, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    _, seconds, *heavy = done.stderr.splitlines()[-1].split()
    return done.stdout, heavy, float(seconds)


@pytest.mark.parametrize("name", [(), *((name,) for name in COMMANDS)], ids=str)
def test_help_is_quick_as_it_imports_nothing_heavy(name: tuple[str, ...]) -> None:
    output, heavy, seconds = start(*name, "--help", COLUMNS="200")
    assert "Usage: leakfrontier" in output
    assert heavy == []
    assert seconds < 1
    if not name:
        assert all(f" {one} " in output for one in COMMANDS)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("leakfrontier ", COMMANDS), ("leakfrontier run --preset ", ["quick", "quick-text"])],
)
def test_completion_in_a_shell_is_quick(typed: str, offered: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()))}
    output, heavy, seconds = start(_LEAKFRONTIER_COMPLETE="complete_bash", **words)
    assert {*offered} <= {*output.split()}
    assert heavy == []
    assert seconds < 1
