from __future__ import annotations

import math
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.rows import (
    TABLES,
    AttackRow,
    Cell,
    Column,
    GuaranteeRow,
    Kind,
    Outcome,
    ProbeRow,
    Rendering,
    Score,
    UtilityRow,
    columns,
)
from leakfrontier.evaluate.run import store as store_module
from leakfrontier.evaluate.run.store import FILE_NAME, Store, StoreError, other_configuration
from leakfrontier.evaluate.share.packed_rows import from_csv, to_csv

SCORED = AttackRow(
    observation=1,
    victim=2,
    identified=True,
    counterfactual=False,
    candidates=20,
    label_correct=None,
    labels_granted=True,
    objective=0.1 + 0.2,
    objective_at_truth=-1e-300,
    seconds=1.5,
)
NOT_APPLICABLE = AttackRow(
    observation=0, victim=0, outcome="not applicable", reason="the model has no linear layer"
)
PSNR = Score(observation=1, victim=2, metric="psnr", value=31.25)
SHOWN = Rendering(1, 0, "image/png", truth=b"\x00\xff'\n", guess=b"abcd")
FOUND = Outcome(attacks=(SCORED, NOT_APPLICABLE), scores=(PSNR,), renderings=(SHOWN,), busy=2.5)

# A process writes cells without end, one row in each table per index; its parent kills it.
KILLED_WRITERS = """
import os, random, signal, sys, time
from pathlib import Path
from leakfrontier.evaluate.foundations.rows import AttackRow, Outcome, Rendering, UtilityRow
from leakfrontier.evaluate.run.store import Store

outcome = Outcome(
    attacks=tuple(AttackRow(i, 0) for i in range(50)),
    utility=tuple(UtilityRow(i, 1, 2, 0.5) for i in range(50)),
    renderings=tuple(Rendering(i, 0, 'image/png', bytes(900), bytes(900)) for i in range(50)),
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
    assert rows(results.renderings, Rendering) == [SHOWN]
    assert rows(results.scores, Score) == [PSNR]
    assert asdict(rows(results.attacks, AttackRow)[1]) == asdict(SCORED)
    assert (results.panel, results.config) == ("1", {"seeds": 1})


def test_rows_have_the_labels_of_their_cell(tmp_path: Path) -> None:
    results = written(tmp_path, TopK=FOUND, none=FOUND).results()
    for frame in (results.attacks, results.renderings, results.cells):
        assert set(frame["defense"]) == {"TopK", "none"}
        assert set(frame["cell"]) == {cell("TopK").key, cell("none").key}
    assert (
        results.cells[["kind", "status", "error", "seconds", "busy"]].values.tolist()
        == [["attack", "ok", "", 3.0, 2.5]] * 2
    )


def test_columns_keep_their_types_where_nothing_was_scored(tmp_path: Path) -> None:
    attacks = written(tmp_path, TopK=Outcome(attacks=(NOT_APPLICABLE,))).results().attacks
    for name in ("objective", "objective_at_truth", "bound", "seconds"):
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
    for frame in (results.cells, results.attacks, results.renderings):
        assert set(frame["defense"]) == {"TopK"}
    assert results.config == {"seeds": 2}
    assert cell("none").key in store.finished()  # but not forgotten


def test_a_cell_takes_the_place_of_a_planned_one(tmp_path: Path) -> None:
    store = written(tmp_path, none=FOUND, TopK=FOUND, Noise=FOUND)
    store.replace([(cell("TopK"), cell("TopK on fewer uploads"))])
    assert store.results().cells["defense"].tolist() == ["none", "TopK on fewer uploads", "Noise"]
    assert store.results().cells["status"].tolist() == ["ok", "missing", "ok"]
    store.write(cell("TopK on fewer uploads").key, Outcome(status="not needed"), 0.0)
    assert store.results().cells["status"].tolist() == ["ok", "not needed", "ok"]
    assert cell("TopK on fewer uploads").key in store.finished(failed=False)


def test_victims_are_known_by_cell(tmp_path: Path) -> None:
    store = written(tmp_path, none=FOUND, TopK=Outcome(attacks=(NOT_APPLICABLE,)))
    assert store.victims() == {
        cell("none").key: [(1, 2, True), (0, 0, False)],
        cell("TopK").key: [(0, 0, False)],
    }


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
    def interrupted(row_type: type) -> Mapping[str, Column]:
        if row_type is Rendering:
            raise KeyboardInterrupt
        return columns(row_type)

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "columns", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Store(tmp_path, create=True)
    assert rows(written(tmp_path, none=FOUND).results().renderings, Rendering) == [SHOWN]


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_writers_killed_at_random_moments_leave_whole_cells(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED_WRITERS, tmp_path], check=True, timeout=60)
    store = Store(tmp_path, create=True)  # as the same command does
    finished = store.finished()
    store.begin("1", {}, [])
    with sqlite3.connect(store.path) as database:
        for table in ("attacks", "utility", "renderings"):
            counts = dict(database.execute(f"SELECT cell, count(*) FROM {table} GROUP BY cell"))
            assert set(counts) == finished
            assert set(counts.values()) == {50}
    assert len({key.split("-")[0] for key in finished}) >= 3  # most writers came to write


def test_another_panel_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    store = written(tmp_path, none=FOUND)
    with pytest.raises(StoreError, match=r"panel '1', this is panel '2'.*another --out"):
        store.begin("2", {}, [cell("TopK")])
    results: Conclusions = store.results()
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
    with pytest.raises(StoreError, match="Check that its folder is writable"):
        Store(Path("/proc/self"), create=True)


@pytest.mark.parametrize("create", [False, True])
def test_a_database_of_another_program(tmp_path: Path, create: bool) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute("CREATE TABLE meta (name, value)")
    with pytest.raises(StoreError, match="another program"):
        Store(tmp_path, create=create)


@pytest.mark.parametrize("version", [0, 2, 99])
@pytest.mark.parametrize("create", [False, True])
def test_a_file_of_another_format(tmp_path: Path, create: bool, version: int) -> None:
    with sqlite3.connect(written(tmp_path, none=FOUND).path) as database:
        database.execute(f"PRAGMA user_version = {version}")
    message = (
        f"format {version}, but this version of leakfrontier reads format 1: choose another --out"
    )
    with pytest.raises(StoreError, match=message):
        Store(tmp_path, create=create)


@dataclass(frozen=True)
class Extended:
    """Rows with columns that no module has heard of."""

    observation: int
    victim: int
    flag: bool | None = None
    number: float = math.nan
    count: int | None = None
    text: str | None = None


@pytest.mark.parametrize("values", [(None, math.nan, None, None), (True, 1.0, 2, "a")])
def test_columns_have_the_types_of_their_annotations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: tuple[Any, ...]
) -> None:
    monkeypatch.setitem(TABLES, "attacks", Extended)
    outcome = Outcome(attacks=(Extended(0, 0, *values),))  # type: ignore[arg-type]
    found = written(tmp_path, a=outcome).results().attacks
    assert found["flag"].dtype == "boolean"
    assert found["number"].dtype == float
    assert found["count"].dtype == (float if values[2] is None else int)
    packed = from_csv(to_csv(found[[*columns(Extended)]]), columns(Extended))
    for name in ("observation", "flag", "number", "count"):
        assert packed[name].dtype == found[name].dtype, name


def test_folders_of_older_versions_open_with_no_probes_and_can_be_continued(tmp_path: Path) -> None:
    probe = ProbeRow(0.9, 0.1, "a permutation", needs_history=False, remaining_noise=1.0)
    store = written(tmp_path, a=FOUND)
    with closing(sqlite3.connect(store.path)) as database, database:
        database.execute("DROP TABLE probes")
    assert Store(tmp_path).results().probes.empty
    assert len(Store(tmp_path).results().attacks) == len(FOUND.attacks)
    again = Store(tmp_path, create=True)
    again.write(cell("a").key, replace(FOUND, probes=(probe,)), 1.0)
    frame = Store(tmp_path).results().probes
    assert rows(frame, ProbeRow) == [probe]


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


KILLED_WHILE_WRITING = """
import os, signal, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA cache_spill = 1")
database.execute("PRAGMA cache_size = 1")
database.execute("BEGIN")
database.execute("UPDATE outcomes SET status = 'error'")
for number in range(2000):
    database.execute("INSERT INTO plan (cell, config) VALUES (?, ?)", (number, "x" * 1000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def super_journal(path: Path, victim: Path) -> bytes:
    """Return a journal that SQLite plays back, and whose super-journal it deletes then."""
    magic, content = bytes.fromhex("d9d505f920a163d7"), path.read_bytes()
    (size,) = struct.unpack(">H", content[16:18])
    header = magic + struct.pack(">IIIII", 0, 1, len(content) // size, 512, size)
    name = os.fsencode(victim)
    end = struct.pack(">I", 2**30 // size + 1) + name + struct.pack(">II", len(name), sum(name))
    return header.ljust(512, b"\0") + end + magic


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def read_all(folder: Path) -> None:
    Store(folder).results()


def go_on(folder: Path) -> None:
    Store(folder, create=True)


def compare(folder: Path) -> None:
    other_configuration(folder, {"seeds": 2})


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("use", [read_all, go_on, compare])
def test_a_journal_cannot_name_a_file_to_delete(
    tmp_path: Path, use: Callable[[Path], None], linked: bool
) -> None:
    victim = tmp_path / "precious.txt"
    victim.write_text("kept")
    path = written(tmp_path / "received", none=FOUND).path
    if linked:
        path = path.rename(tmp_path / "elsewhere.sqlite")
        (tmp_path / "received" / FILE_NAME).symlink_to(path)
    Path(f"{path}-journal").write_bytes(super_journal(path, victim))
    before = contents(path.parent)
    with pytest.raises(StoreError, match=r"interrupted while writing|which no run makes"):
        use(tmp_path / "received")
    assert victim.read_text() == "kept"
    assert contents(path.parent) == before


@pytest.mark.parametrize("use", [read_all, go_on, compare])
@pytest.mark.parametrize("end", ["-journal", "-wal", "-shm"])
def test_nothing_is_written_through_a_link_beside_the_file(
    tmp_path: Path, use: Callable[[Path], None], end: str
) -> None:
    victim = tmp_path / "precious.txt"
    victim.write_bytes(bytes(100))
    path = written(tmp_path / "received", none=FOUND).path
    Path(f"{path}{end}").symlink_to(victim)
    with pytest.raises(StoreError, match=f"{end} lies beside it, which no run makes.*move that"):
        use(path.parent)
    assert victim.read_bytes() == bytes(100)


@pytest.mark.parametrize("use", [read_all, go_on, compare])
def test_a_journal_of_two_names_or_a_pipe_is_not_opened(
    tmp_path: Path, use: Callable[[Path], None]
) -> None:
    path = written(tmp_path / "received", none=FOUND).path
    journal = Path(f"{path}-journal")
    (tmp_path / "precious.txt").write_bytes(bytes(100))
    journal.hardlink_to(tmp_path / "precious.txt")
    with pytest.raises(StoreError, match="which no run makes"):
        use(path.parent)
    journal.unlink()
    os.mkfifo(journal)
    with pytest.raises(StoreError, match="which no run makes"):
        use(path.parent)
    assert (tmp_path / "precious.txt").read_bytes() == bytes(100)


@pytest.mark.parametrize("use", [read_all, go_on, compare])
def test_a_write_ahead_log_is_refused(tmp_path: Path, use: Callable[[Path], None]) -> None:
    path = written(tmp_path, none=FOUND).path
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
    before = contents(tmp_path)
    with pytest.raises(StoreError, match="write-ahead log, which no run makes"):
        use(tmp_path)
    assert contents(tmp_path) == before


def test_reading_leaves_folders_as_they_are(tmp_path: Path) -> None:
    written(tmp_path / "a ?#%41", none=FOUND)
    before = contents(tmp_path / "a ?#%41")
    assert len(Store(tmp_path / "a ?#%41").results().attacks) == 2
    assert contents(tmp_path / "a ?#%41") == before
    assert [path.name for path in tmp_path.iterdir()] == ["a ?#%41"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_run_killed_while_writing_is_finished_by_the_same_command(tmp_path: Path) -> None:
    path = written(tmp_path, none=FOUND).path
    subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, path], check=False, timeout=60)
    before = contents(tmp_path)
    assert before[f"{FILE_NAME}-journal"]
    with pytest.raises(StoreError, match=r"interrupted while writing.*same command again"):
        read_all(tmp_path)
    assert contents(tmp_path) == before
    compare(tmp_path)  # comes first in a run, and rolls back
    assert received_status(tmp_path) == ["ok"]


def received_status(folder: Path) -> list[str]:
    return Store(folder).results().cells["status"].tolist()


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks")
def test_a_run_at_work_can_be_read(tmp_path: Path) -> None:
    store = written(tmp_path, none=FOUND)
    with store._connect(writing=True) as database:
        database.execute("UPDATE outcomes SET status = 'error'")
        assert Path(f"{store.path}-journal").exists()
        script = (
            "import sys; from pathlib import Path\n"
            "from leakfrontier.evaluate.run.store import Store\n"
            "print(Store(Path(sys.argv[1])).results().cells['status'].tolist())"
        )
        arguments = [sys.executable, "-c", script, tmp_path]
        found = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout == "['ok']\n", found.stderr
    assert received_status(tmp_path) == ["error"]


HOLDER = """
import sys, time
from pathlib import Path
from leakfrontier.evaluate.run.store import Store

with Store(Path(sys.argv[1]), create=True).occupied():
    print("here", flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be locked there")
def test_two_runs_cannot_share_a_folder_and_a_killed_one_leaves_it(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", HOLDER, tmp_path]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "here\n"
            store = Store(tmp_path)  # to read is allowed
            with pytest.raises(StoreError, match="another run is using"), store.occupied():
                pass
        finally:
            other.kill()
    with store.occupied():
        pass
    with store.occupied():
        pass
