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
import yaml
from synthetic import make_results

from leakfrontier.adversaries import ADVERSARIES
from leakfrontier.defenses import DEFENSES
from leakfrontier.evaluate import run as run_module
from leakfrontier.evaluate.commands import main as cli
from leakfrontier.evaluate.data import DATASETS
from leakfrontier.evaluate.models import MODELS
from leakfrontier.evaluate.rows import Cell, Outcome
from leakfrontier.evaluate.scenario import SCENARIOS
from leakfrontier.evaluate.store import FILE_NAME, Store

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
    monkeypatch.setattr(run_module, "execute", None)

    def run(*arguments: object, out: Path | None = None, **change: Any) -> str:  # noqa: ANN401
        arguments = (config_file(**change), "--out", out or tmp_path / "out", *arguments)
        code, output, errors = command("run", *arguments)
        assert code == 2
        assert errors.startswith("Error: ")
        assert "Traceback" not in output + errors
        return errors.removeprefix("Error: ")

    return run


@pytest.mark.parametrize(
    ("what", "registry"),
    [
        ("defenses", DEFENSES),
        ("adversaries", ADVERSARIES),
        ("scenarios", SCENARIOS),
        ("datasets", DATASETS),
        ("models", MODELS),
    ],
)
def test_lists_every_name(command: Command, what: str, registry: dict[str, object]) -> None:
    code, output, _ = command("list", what)
    listed = {line.strip("│ ").partition(" ")[0] for line in output.splitlines()}
    assert code == 0
    assert set(registry) <= listed


def test_lists_options_and_their_defaults(command: Command) -> None:
    assert "error_feedback=True" in command("list", "defenses")[1]
    assert "width=200" in command("list", "models")[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "nothing"),
        ("run", "--preset", "nothing"),
        ("run", "--workers", "0"),
        ("run", "--nothing"),
        ("nothing",),
    ],
)
def test_wrong_usage(command: Command, arguments: tuple[str, ...]) -> None:
    code, output, errors = command(*arguments)
    assert code == 2
    assert "Error" in errors
    assert "Traceback" not in output + errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"defenses": ["Nope"]}, "unknown defense 'Nope': choose one of none, DPSGD"),
        ({"adversaries": ["Nope"]}, "unknown adversary 'Nope': choose one of PriorGuess, "),
        ({"scenarios": ["nope"]}, "unknown scenario 'nope': choose one of fashion-mini/mlp, "),
        ({"scenario": {"dataset": "nope"}}, "dataset must be one of fashion-mini, digits, mnist"),
        ({"scenario": {"model": "nope"}}, "model must be one of mlp, cnn, lenet, resnet18"),
        ({"scenario": {"dataset": "no/such/folder"}}, "there is no folder or file no/such/folder"),
        ({"scenario": {"dataset": "no/[/such] [b]"}}, "there is no folder or file no/[/such] [b]"),
        ({"scenario": {"datset": "digits"}}, "unknown key 'datset'; the keys are title, dataset"),
        ({"defences": []}, "unknown key 'defences'; the keys are scenarios, defenses"),
        (
            {"defenses": [{"name": "DPSGD", "noise_multiplier": -1}]},
            "noise_multiplier must be in [0, inf), got -1",
        ),
        ({"defenses": [{"name": "TopK", "ratio": 0}]}, "ratio must be in (0, 1], got 0"),
        ({"defenses": 5}, "defenses: Input should be a list, got 5"),
    ],
)
def test_a_configuration_that_cannot_be_run(
    refused: Callable[..., str], change: Config, message: str
) -> None:
    assert message in refused(**change)


def test_a_configuration_that_cannot_be_read(command: Command, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\nb: }")
    for file, message in [
        (broken, "is not valid YAML"),
        (tmp_path / "absent.yaml", "No such file"),
    ]:
        code, output, errors = command("run", file, "--out", tmp_path / "out")
        assert code == 2
        assert str(file) in errors
        assert message in errors
        assert "Traceback" not in output + errors


def test_a_file_and_a_preset(refused: Callable[..., str]) -> None:
    assert "a configuration file or --preset, not both" in refused("--preset", "quick")


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        (None, "Mine", "there is no file "),
        ("class Mine(Defense:\n", "Mine", "mine.py fails when it is loaded: SyntaxError: "),
        (DEFENSE, "Yours", "mine.py has no 'Yours'; it defines Mine"),
        ("class Mine: pass\n", "Mine", "mine.py:Mine must be a subclass of Defense, got "),
    ],
)
def test_a_defense_that_cannot_be_loaded(
    refused: Callable[..., str],
    user_file: UserFile,
    tmp_path: Path,
    code: str | None,
    name: str,
    message: str,
) -> None:
    file = tmp_path / "absent.py" if code is None else user_file(code)
    assert message in refused("--defense", f"{file}:{name}")


def test_options_of_a_defense_that_are_wrong(
    refused: Callable[..., str], user_file: UserFile
) -> None:
    file = user_file(DEFENSE)
    assert "not a valid YAML mapping" in refused("--defense", "{name: [}")
    assert "mapping with the key 'name'" in refused("--defense", "{scale: 1}")
    message = refused("--defense", f"{{name: '{file}:Mine', size: 1}}")
    assert "has no option 'size'; its options are scale" in message


def test_an_empty_class_folder(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "images" / "cat").mkdir(parents=True)
    message = refused(scenario={"dataset": str(tmp_path / "images")})
    assert f"{tmp_path / 'images' / 'cat'} holds no images" in message


def test_an_out_that_is_a_file(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refused(out=tmp_path / "file")
    assert f"cannot make the folder {tmp_path / 'file'}" in message


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is where root cannot write")
def test_an_out_that_is_not_writable(refused: Callable[..., str]) -> None:
    assert "check that its folder is writable" in refused(out=Path("/proc/self"))


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


def test_results_of_another_panel(refused: Callable[..., str], tmp_path: Path) -> None:
    Store(tmp_path / "out", create=True).begin("2020.1", {}, [])
    assert "was made with panel '2020.1', this is panel 'custom" in refused()


def test_a_report_without_results(command: Command, tmp_path: Path) -> None:
    code, _, errors = command("report", tmp_path)
    assert code == 2
    assert f"{tmp_path} has no results.sqlite" in errors


def test_ctrl_c_says_how_to_go_on(
    command: Command,
    config_file: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "execute", interrupted)
    code, output, errors = command("run", config_file(), "--out", tmp_path / "out")
    assert code == 130
    assert "The same command continues where it stopped" in output
    assert "Traceback" not in output + errors


def test_ctrl_c_has_the_same_exit_code_everywhere(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("leakfrontier.reports.write_report", interrupted)
    code, output, errors = command("report", tmp_path)
    assert (code, output, errors) == (130, "", "Interrupted.\n")


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
    make_results(tmp_path, **fault)
    monkeypatch.setattr("leakfrontier.reports.write_report", lambda folder: folder / "report.html")
    found, output, _ = command("report", tmp_path)
    assert (found, output.splitlines()[-1]) == (code, line)


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

    monkeypatch.setattr(run_module, "execute", execute)
    monkeypatch.setattr("leakfrontier.reports.write_report", lambda folder: folder / "report.html")
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
    assert before["status"].tolist() == ["ok"] * 9
    assert before["strength"].dropna().unique().tolist() == [1.0]

    monkeypatch.setattr("leakfrontier.reports.write_report", lambda folder: folder / "report.html")
    user_file(DEFENSE.replace("return 1.0", "return 2.0"))
    assert command(*arguments)[0] == 0
    after = Store(out).results().cells.set_index("cell")
    assert after["status"].tolist() == ["ok"] * 9
    assert after["strength"].dropna().unique().tolist() == [2.0]
    kept = before.index.intersection(after.index)
    assert before.loc[kept, "defense"].tolist() == ["none"] * 3
    assert after.loc[kept, "seconds"].tolist() == before.loc[kept, "seconds"].tolist()


def test_what_we_did_wrong_is_no_mistake_of_the_users(
    config_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def buggy(*_: object, **__: object) -> None:
        raise ValueError("a list of ours is empty")

    monkeypatch.setattr(run_module, "execute", buggy)
    monkeypatch.setattr(sys, "argv", ["leakfrontier", "run", str(config_file()), "--out", "out"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match="a list of ours is empty"
    ):  # with a traceback, exit code 1
        cli.main()


def test_every_attack_on_every_upload_on_request(
    command: Command,
    config_file: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "execute", lambda *_, **__: [])
    monkeypatch.setattr("leakfrontier.reports.write_report", lambda folder: folder / "report.html")
    for options, individual in (((), False), (("--individual",), True)):
        assert command("run", config_file(), "--out", tmp_path / "out", *options)[0] == 1
        assert Store(tmp_path / "out").results().config["individual"] is individual


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
