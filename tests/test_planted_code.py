"""No file from others runs code: whatever text it holds, wherever it holds it.

The name of a planted file, and of a planted module, stands in every place of a capture, a pack and
a folder of results, one after the other, and the commands that read these are run.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from strangers import (
    CONFIG,
    Edit,
    database,
    in_capture,
    in_meta,
    in_pack,
    leaves,
    no_hang,
    with_value,
    without_workers,
    write_files,
)

from leakfrontier import reports
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.plugins import trusted
from leakfrontier.evaluate.share import pack, verification

Command = Callable[..., tuple[int, str, str]]
Try = Callable[..., None]

CODE = """
from pathlib import Path
from leakfrontier.adversaries import FedSGD
Path({marker!r}).touch()
class Planted(FedSGD):
    pass
"""
TABLES = ("cells.csv", "rows/attacks.csv", "rows/utility.csv", "rows/renderings.csv")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    write_files(root)
    return root


@pytest.fixture
def root(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with copies of the files, and the planted code wherever it may be found."""
    root = tmp_path / "root"
    shutil.copytree(originals, root)
    code = CODE.format(marker=str(tmp_path / "ran"))
    for place in (root, root / "capture", root / "run"):
        (place / "planted.py").write_text(code)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "planted_module.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def planted(command: Command, root: Path, originals: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """Return a function that edits a copy, runs commands on it and looks for the marker.

    What follows from rows takes most of the time, and never names code: it is left out.
    """
    monkeypatch.setattr(verification, "derived", lambda _: {})
    monkeypatch.setattr(pack, "derived", lambda _: {})
    monkeypatch.setattr(Conclusions, "checks", lambda _: [])
    monkeypatch.setattr(reports, "write_report", lambda folder, _: folder)

    def run(edit: Edit, *lines: str) -> None:
        for name in ("capture/capture.json", "run/results.sqlite", "run.zip"):
            shutil.copyfile(originals / name, root / name)
        shutil.rmtree(root / "out", ignore_errors=True)
        edit(root)
        for line in lines:
            with without_workers(), no_hang():
                code, output, errors = command(*line.split())
            assert not (root.parent / "ran").exists(), (line, output, errors)
            assert "Traceback" not in output + errors
            assert code in (0, 1, 2, 3)  # 3: nothing was confirmed or refuted
        assert not trusted()

    return run


def names(root: Path) -> tuple[str, str]:
    return f"{root}/planted.py:Planted", "planted_module:Planted"


def named_in_turn(root: Path) -> Iterator[str]:
    return cycle(names(root))


ATTACK = "attack capture --out out --adversary PriorGuess --workers 1"
VERIFY = "verify run.zip --seeds 0 --workers 1"
LEADERBOARD = "leaderboard run.zip --out board.html"
PICTURE = "report run.zip --picture picture.svg"
REPORT, PACK = "report run", "pack run --out other.zip"


def test_a_planted_file_does_run_if_it_is_trusted(command: Command, root: Path) -> None:
    """Otherwise the tests below would see nothing, whatever happened."""
    in_capture(lambda about: {**about, "protocol": "planted.py:Planted"})(root)
    with without_workers():
        command(*ATTACK.split(), "--trust-code")
    assert (root.parent / "ran").exists()


def test_captures(planted: Try, root: Path) -> None:
    about = json.loads((root / "capture/capture.json").read_text())
    for name in ("planted.py:Planted", *names(root)):
        for place in leaves(about):
            planted(in_capture(always(with_value(about, place, name))), ATTACK)
        for key in ("model", "protocol", "defense", "dataset", "space"):
            for value in (name, {"name": name}, [name], {"name": "Chain", "links": [name]}):
                planted(in_capture(always({**about, key: value})), ATTACK)


def test_the_configuration_of_a_pack(planted: Try, root: Path) -> None:
    meta = json.loads(entries_of(root)["pack.json"])
    for name in names(root):
        for place in leaves(meta["config"]):
            changed = with_value(meta, ("config", *place), name)
            planted(in_meta(always(changed)), VERIFY)


def test_what_a_pack_says_of_itself(planted: Try, root: Path) -> None:
    meta = json.loads(entries_of(root)["pack.json"])
    others = {key: value for key, value in meta.items() if key != "config"}
    for place, name in zip(leaves(others), named_in_turn(root), strict=False):
        planted(in_meta(always(with_value(meta, place, name))), VERIFY)
    for name in names(root):
        said = {"panel": name, "notes": [name], "conclusion": name}
        planted(in_meta(always({**meta, **said})), LEADERBOARD, PICTURE)


def test_rows_of_a_pack(planted: Try, root: Path) -> None:
    turn = named_in_turn(root)
    for change in tables_with_a_text(entries_of(root)):
        changed = change(next(turn))
        planted(in_pack(lambda entries, new=changed: entries.update(new)), VERIFY)  # type: ignore[misc]


def test_the_configuration_of_a_folder(planted: Try, root: Path) -> None:
    config = "UPDATE meta SET value = json_replace(value, ?, ?) WHERE name = 'config'"
    for name in names(root):
        for place in paths_of(root, "meta", "value"):
            planted(in_database(config, place, name), PACK)


def test_labels_of_a_folder(planted: Try, root: Path) -> None:
    labels = "UPDATE plan SET labels = json_replace(labels, ?, ?)"
    for place, name in zip(paths_of(root, "plan", "labels"), named_in_turn(root), strict=False):
        planted(in_database(labels, place, name), PACK, REPORT)


def test_columns_of_a_folder(planted: Try, root: Path) -> None:
    turn = named_in_turn(root)
    for table, column in columns_of(root):
        statement = f"UPDATE OR IGNORE {table} SET {column} = ?"
        planted(in_database(statement, next(turn)), PACK, REPORT)


def test_a_page_shows_what_was_planted(command: Command, root: Path, undrawn: None) -> None:
    """Texts that are only shown may stand in one page, which takes a while to write."""
    name = names(root)[1]
    for place in ("scenario", "dataset", "model", "protocol", "defense", "adversary"):
        path = f"$.{place}"
        in_database("UPDATE plan SET labels = json_replace(labels, ?, ?)", path, name)(root)
    in_database("UPDATE outcomes SET note = ?, error = ?", name, name)(root)
    in_database("UPDATE attacks SET reason = ?", name)(root)
    command(*REPORT.split())
    assert name in (root / "run/report.html").read_text()
    assert not (root.parent / "ran").exists()


def test_a_received_folder_that_a_run_goes_on_in(planted: Try, root: Path) -> None:
    """The configuration is the user's, so that what the folder says counts for nothing."""
    (root / "config.json").write_text(json.dumps(CONFIG))
    config = "UPDATE meta SET value = json_replace(value, ?, ?) WHERE name = 'config'"
    place = "$.scenarios[0].protocol.name"
    planted(in_database(config, place, names(root)[0]), "run config.json --out run --workers 1")


def always(value: Any) -> Callable[[object], Any]:  # noqa: ANN401 - any document
    return lambda _: value


def in_database(statement: str, *values: str) -> Edit:
    def edit(root: Path) -> None:
        with database(root) as found:
            found.execute(statement, values)

    return edit


def entries_of(root: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(root / "run.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def tables_with_a_text(entries: dict[str, bytes]) -> Iterator[Callable[[str], dict[str, bytes]]]:
    """Yield what puts a text into one column, or into one label, of all rows of a pack."""
    for table in TABLES:
        lines = [*csv.DictReader(io.StringIO(entries[table].decode()))]
        for column in lines[0]:
            if column != "labels":
                yield lambda text, where=(table, lines, column): {  # type: ignore[misc]
                    where[0]: written(where[1], where[2], lambda _: text)
                }
        for place in leaves(json.loads(lines[-1].get("labels", "[]"))):
            yield lambda text, where=(table, lines, place): {  # type: ignore[misc]
                where[0]: written(where[1], "labels", in_label(where[2], text))
            }


def in_label(place: tuple[str | int, ...], planted: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        labels = json.loads(text)
        known = place in [*leaves(labels)]
        return json.dumps(with_value(labels, place, planted)) if known else text

    return change


def written(lines: list[dict[str, str]], column: str, change: Callable[[str], str]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**line, column: change(line[column])} for line in lines)
    return text.getvalue().encode()


def columns_of(root: Path) -> list[tuple[str, str]]:
    """Return the columns of all tables that have rows, but for those of documents."""
    with database(root) as found:
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        tables = [name for (name,) in found.execute(query)]
        filled = [one for one in tables if found.execute(f"SELECT 1 FROM {one}").fetchone()]
        described = {one: found.execute(f"SELECT * FROM {one}").description for one in filled}
    return [
        (table, name)
        for table, columns in described.items()
        for name, *_ in columns
        if (table, name) not in (("meta", "value"), ("plan", "labels"))
    ]


def paths_of(root: Path, table: str, column: str) -> list[str]:
    """Return the places of all values in the documents of a column, as SQLite writes them."""
    with database(root) as found:
        documents = [json.loads(text) for (text,) in found.execute(f"SELECT {column} FROM {table}")]
    places = dict.fromkeys(place for one in documents for place in leaves(one) if place)
    return [
        "$" + "".join(f"[{key}]" if isinstance(key, int) else f'."{key}"' for key in place)
        for place in places
    ]
