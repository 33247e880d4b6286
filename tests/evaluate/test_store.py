from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from leakfrontier.evaluate import store as store_module
from leakfrontier.evaluate.rows import (
    AttackRow,
    Cell,
    GuaranteeRow,
    Kind,
    Outcome,
    Picture,
    UtilityRow,
)
from leakfrontier.evaluate.store import FILE_NAME, Results, Store, StoreError

SCORED = AttackRow(
    observation=1,
    victim=2,
    psnr=31.25,
    ssim=0.5,
    identified=True,
    counterfactual=False,
    candidates=20,
    label_correct=None,
    labels_granted=True,
    objective=0.1 + 0.2,
    objective_at_truth=-1e-300,
    seconds=1.5,
)
NOT_APPLICABLE = AttackRow(observation=0, victim=0, reason="the model has no linear layer")
PICTURE = Picture(observation=1, victim=0, shape=(1, 2, 2), truth=b"\x00\xff'\n", guess=b"abcd")
FOUND = Outcome(attacks=(SCORED, NOT_APPLICABLE), pictures=(PICTURE,), busy=2.5)

# A process writes cells without end, one row in each table per index; its parent kills it.
KILLED_WRITERS = """
import os, random, signal, sys, time
from pathlib import Path
from leakfrontier.evaluate.rows import AttackRow, Outcome, Picture, UtilityRow
from leakfrontier.evaluate.store import Store

outcome = Outcome(
    attacks=tuple(AttackRow(i, 0) for i in range(50)),
    utility=tuple(UtilityRow(i, 1, 2, 0.5) for i in range(50)),
    pictures=tuple(Picture(i, 0, (1, 30, 30), bytes(900), bytes(900)) for i in range(50)),
)
draws = random.Random(0)
for number in range(5):
    pid = os.fork()
    if pid == 0:
        store = Store(Path(sys.argv[1]), create=True)
        for count in range(10**6):
            store.write(f"{number}-{count}", outcome, 1.0)
    time.sleep(draws.uniform(0.02, 0.4))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def cell(name: str, kind: Kind = "attack") -> Cell:
    return Cell(kind, config={"name": name}, labels={"defense": name, "seed": 0})


def written(folder: Path, **outcomes: Outcome) -> Store:
    """Return a store whose last run planned these cells and has written them."""
    store = Store(folder, create=True)
    store.begin("1", {"seeds": 1}, [cell(name) for name in outcomes])
    for name, outcome in outcomes.items():
        store.write(cell(name).key, outcome, seconds=3.0)
    return store


def rows(frame: pd.DataFrame, row_type: type) -> list[Any]:
    """Return a table's rows as they were before they were written."""
    names = [name for name in row_type.__dataclass_fields__ if name in frame]
    values = frame[names].astype(object)
    return [row_type(**row) for row in values.where(values.notna(), None).to_dict("records")]


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    results = written(tmp_path, TopK=FOUND).results()
    assert rows(results.attacks, AttackRow) == [NOT_APPLICABLE, SCORED]
    assert rows(results.pictures, Picture) == [PICTURE]
    assert asdict(rows(results.attacks, AttackRow)[1]) == asdict(SCORED)
    assert (results.panel, results.config) == ("1", {"seeds": 1})


def test_rows_have_the_labels_of_their_cell(tmp_path: Path) -> None:
    results = written(tmp_path, TopK=FOUND, none=FOUND).results()
    for frame in (results.attacks, results.pictures, results.cells):
        assert set(frame["defense"]) == {"TopK", "none"}
        assert set(frame["cell"]) == {cell("TopK").key, cell("none").key}
    assert (
        results.cells[["kind", "status", "error", "seconds", "busy"]].values.tolist()
        == [["attack", "ok", "", 3.0, 2.5]] * 2
    )


def test_columns_keep_their_types_where_nothing_was_scored(tmp_path: Path) -> None:
    attacks = written(tmp_path, TopK=Outcome(attacks=(NOT_APPLICABLE,))).results().attacks
    for name in ("psnr", "ssim", "objective", "objective_at_truth", "seconds"):
        assert attacks[name].dtype == float, name
    for name in ("identified", "counterfactual", "label_correct", "labels_granted"):
        assert attacks[name].dtype == "boolean", name
    assert attacks["observation"].dtype == int


def test_a_loss_that_is_not_a_number_stays_so(tmp_path: Path) -> None:
    diverged = tuple(UtilityRow(i, 0, 9, loss) for i, loss in enumerate((math.nan, math.inf)))
    losses = written(tmp_path, none=Outcome(utility=diverged)).results().utility["loss"]
    assert math.isnan(losses[0])
    assert losses[1] == math.inf


def test_cells_that_never_ran_are_missing(tmp_path: Path) -> None:
    store = Store(tmp_path, create=True)
    store.begin("1", {}, [cell("none"), cell("TopK")])
    store.write(cell("none").key, FOUND, 1.0)
    assert store.results().cells["status"].tolist() == ["ok", "missing"]


def test_cells_that_the_last_run_did_not_plan_are_left_out(tmp_path: Path) -> None:
    store = written(tmp_path, none=FOUND, TopK=FOUND)
    store.begin("1", {"seeds": 2}, [cell("TopK")])
    results = store.results()
    for frame in (results.cells, results.attacks, results.pictures):
        assert set(frame["defense"]) == {"TopK"}
    assert results.config == {"seeds": 2}
    assert cell("none").key in store.finished()  # but not forgotten


def test_labels_are_those_of_the_last_plan(tmp_path: Path) -> None:
    store = written(tmp_path, none=FOUND)
    renamed = Cell("attack", cell("none").config, {"defense": "another title", "seed": 0})
    store.begin("1", {}, [renamed])
    assert set(store.results().attacks["defense"]) == {"another title"}


def test_success_replaces_an_earlier_failure(tmp_path: Path) -> None:
    failure = Outcome(attacks=(NOT_APPLICABLE,), status="timeout", error="exceeded the time limit")
    store = written(tmp_path, none=failure, TopK=FOUND)
    assert store.finished() == {cell("none").key, cell("TopK").key}
    assert store.finished(failed=False) == {cell("TopK").key}
    assert store.results().cells["error"].tolist() == ["exceeded the time limit", ""]
    store.write(cell("none").key, FOUND, 1.0)
    assert store.finished(failed=False) == store.finished()
    results = store.results()
    assert len(results.attacks) == 2 * len(FOUND.attacks)
    assert results.cells["error"].tolist() == ["", ""]


def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = written(tmp_path, none=Outcome(status="crash", error="worker died"))
    insert = Store._insert

    def interrupted(database: sqlite3.Connection, table: str, *rest: Any) -> None:  # noqa: ANN401
        insert(database, table, *rest)
        assert database.execute("SELECT count(*) FROM attacks").fetchone()[0] == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "_insert", staticmethod(interrupted))
    with pytest.raises(KeyboardInterrupt):
        store.write(cell("none").key, FOUND, 1.0)
    results = Store(tmp_path).results()
    assert results.attacks.empty
    assert results.cells["status"].tolist() == ["crash"]


def test_an_interrupted_creation_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = store_module._columns

    def interrupted(row_type: type) -> list[str]:
        if row_type is Picture:
            raise KeyboardInterrupt
        return columns(row_type)

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_columns", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Store(tmp_path, create=True)
    assert rows(written(tmp_path, none=FOUND).results().pictures, Picture) == [PICTURE]


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_writers_killed_at_random_moments_leave_whole_cells(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED_WRITERS, tmp_path], check=True, timeout=60)
    store = Store(tmp_path)
    finished = store.finished()
    store.begin("1", {}, [])
    with sqlite3.connect(store.path) as database:
        for table in ("attacks", "utility", "pictures"):
            counts = dict(database.execute(f"SELECT cell, count(*) FROM {table} GROUP BY cell"))
            assert set(counts) == finished
            assert set(counts.values()) == {50}
    assert len({key.split("-")[0] for key in finished}) >= 3  # most writers came to write


def test_another_panel_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    store = written(tmp_path, none=FOUND)
    with pytest.raises(StoreError, match=r"panel '1', this is panel '2'.*another --out"):
        store.begin("2", {}, [cell("TopK")])
    results: Results = store.results()
    assert results.panel == "1"
    assert set(results.cells["defense"]) == {"none"}


def test_a_folder_without_results(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"has no results.sqlite: `leakfrontier run"):
        Store(tmp_path)
    with pytest.raises(StoreError, match="holds no run yet"):
        Store(tmp_path, create=True).results()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "folder"):
        with pytest.raises(StoreError, match=f"cannot make the folder {folder} .*another --out"):
            Store(folder, create=True)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is where root cannot write")
def test_a_folder_that_is_not_writable() -> None:
    with pytest.raises(StoreError, match="check that its folder is writable"):
        Store(Path("/proc/self"), create=True)


@pytest.mark.parametrize("create", [False, True])
def test_a_database_of_another_program(tmp_path: Path, create: bool) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute("CREATE TABLE meta (name, value)")
    with pytest.raises(StoreError, match="another program"):
        Store(tmp_path, create=create)


@pytest.mark.parametrize("create", [False, True])
def test_a_file_of_another_format(tmp_path: Path, create: bool) -> None:
    with sqlite3.connect(written(tmp_path, none=FOUND).path) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(
        StoreError, match="format 99, this version of leakfrontier reads formats 1 to 2"
    ):
        Store(tmp_path, create=create)


def test_results_of_the_first_format_are_read_and_not_continued(tmp_path: Path) -> None:
    with sqlite3.connect(written(tmp_path, none=FOUND).path) as database:
        database.execute("DROP TABLE guarantees")
        database.execute("ALTER TABLE attacks DROP COLUMN bound")
        database.execute("PRAGMA user_version = 1")
    results = Store(tmp_path).results()
    assert rows(results.attacks, AttackRow) == [NOT_APPLICABLE, SCORED]
    assert results.attacks["bound"].dtype == float
    assert results.guarantees.empty
    assert {"defense", "epsilon", "violated"} <= set(results.guarantees)
    with pytest.raises(StoreError, match=r"older format 1: reports can be made .* another --out"):
        Store(tmp_path, create=True)


def test_guarantees_come_back_as_they_were(tmp_path: Path) -> None:
    claim = GuaranteeRow(math.inf, 1e-5, "record", "add/remove", "PLD", 0.5, 0.08, 46)
    audited = claim.with_audit("fine", violated=False, measured_noise=0.49, audited_epsilon=3.0)
    laplace = replace(claim, noise_multiplier=None).with_audit("not audited: no Gaussian")
    store = written(
        tmp_path, a=Outcome(guarantees=(audited,)), b=Outcome(guarantees=(laplace,)), c=FOUND
    )
    frame = store.results().guarantees.sort_values("defense")
    assert rows(frame, GuaranteeRow) == [audited, laplace]
    assert frame["violated"].dtype == "boolean"


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("content", [b"not a database" * 100, bytes(4096)])
def test_a_file_that_is_no_database(tmp_path: Path, content: bytes, create: bool) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(StoreError, match="cannot be used as a results file"):
        Store(tmp_path, create=create)


def test_damage_anywhere_is_named_or_harmless(tmp_path: Path) -> None:
    path = written(tmp_path, none=FOUND).path
    whole = path.read_bytes()
    complaints = []
    for start in range(0, len(whole), 4096):
        path.write_bytes(whole[:start] + b"\xff\x5a" * 2048 + whole[start + 4096 :])
        try:
            unharmed = len(Store(tmp_path).results().attacks) == 2
        except StoreError as error:
            complaints.append(str(error))
        else:
            assert unharmed
    assert len(complaints) >= 5
    assert all("cannot be used as a results file" in text for text in complaints)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match="malformed"):
        Store(tmp_path)
