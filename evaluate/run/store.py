"""Results on disk: one SQLite file per run, and one transaction per cell."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import pandas as pd

from ..conclude.results import Conclusions
from ..foundations.errors import UserError
from ..foundations.foreign import (
    check_cells,
    check_labelled,
    check_labels,
    check_meta,
    check_rows,
    is_missing,
    parse_json,
)
from ..foundations.rows import LATER, TABLES, Cell, Outcome, columns

FILE_NAME = "results.sqlite"
READING = 300.0
"""The time limit for reading a file, in seconds."""

_TABLE = re.compile(r"CREATE TABLE \w+ \([\w, ]+\)")
_INDEX = re.compile(r"CREATE INDEX \w+ ON \w+ \(\w+\)")
"""The tables and indices of runs. Nested brackets, hence expressions, do not match."""

_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""The bytes at the start of a journal of SQLite, and after the name of a super-journal."""

_APPLICATION_ID = 0x4C46524F  # marks files of leakfrontier
_FORMAT = 1

_TYPED: dict[type, Callable[[Any], Any]] = {
    # pandas reads a column of only NULL as objects
    int: pd.to_numeric,
    float: pd.to_numeric,
    bool: lambda values: values.astype("boolean"),
    str: lambda values: values,
    bytes: lambda values: values,
}


class StoreError(UserError):
    """The results file cannot be used. The message says why and what to do."""


class Store:
    """The results of one run, in `results.sqlite` of its folder.

    One process writes all rows of a cell in one transaction. A run that is killed at any moment
    leaves only complete cells.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.folder = folder.resolve()
        self.path = folder / FILE_NAME
        if create:
            _make(folder)
        elif not self.path.is_file():
            raise StoreError(f"{folder} has no {FILE_NAME}: `leakfrontier run --out` makes one")
        with self._connect(writing=create) as database:
            if create and self._is_empty(database):
                self._create(database)
            self._check(database)
            if create:
                self._create_tables(database)

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Lock the folder against other runs. If the process is killed, the system unlocks it."""
        if sys.platform == "win32":
            yield
            return
        import fcntl

        folder = os.open(self.folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise StoreError(
                        f"another run is using {self.folder}: wait until it ends, or choose "
                        "another --out folder"
                    ) from None
            yield
        finally:
            os.close(folder)

    def begin(
        self,
        panel: str,
        config: Mapping[str, Any],
        cells: Sequence[Cell],
        notes: Sequence[str] = (),
    ) -> None:
        """Store the plan of a run. Raise if the folder has results of another panel version."""
        with self._connect(writing=True) as database:
            known = self._meta(database).get("panel")
            if known not in (None, panel):
                raise StoreError(
                    f"{self.path} was made with panel {known!r}, this is panel {panel!r}. Rates of "
                    "different panels cannot be mixed: choose another --out folder"
                )
            meta = {"panel": panel, "config": config, "notes": [*notes]}
            database.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)",
                [(name, json.dumps(value)) for name, value in meta.items()],
            )
            database.execute("UPDATE plan SET place = NULL")
            database.executemany(
                "INSERT OR REPLACE INTO plan VALUES (?, ?, ?, ?, ?)",
                [_planned(cell, place) for place, cell in enumerate(cells)],
            )

    def replace(self, cells: Iterable[tuple[Cell, Cell]]) -> None:
        """Replace planned cells by others, given as pairs (planned, new)."""
        with self._connect(writing=True) as database:
            places = dict(database.execute("SELECT cell, place FROM plan"))
            for planned, cell in cells:
                place = places.pop(planned.key, None)
                if place is not None:
                    database.execute("UPDATE plan SET place = NULL WHERE cell = ?", (planned.key,))
                    database.execute(
                        "INSERT OR REPLACE INTO plan VALUES (?, ?, ?, ?, ?)", _planned(cell, place)
                    )

    def finished(self, *, failed: bool = True) -> set[str]:
        """Return the keys of the cells that need not run again.

        Args:
            failed: Whether cells that ended in an error, a crash or a time-out count.
        """
        with self._connect() as database:
            which = "" if failed else " WHERE status IN ('ok', 'not needed')"
            query = f"SELECT cell FROM outcomes{which}"
            return {key for (key,) in database.execute(query)}

    def victims(self) -> dict[str, list[tuple[int, int, bool]]]:
        """Return the attacked uploads and victims of every cell, and whether it identified them."""
        found: dict[str, list[tuple[int, int, bool]]] = defaultdict(list)
        query = "SELECT cell, observation, victim, identified FROM attacks"
        with self._connect() as database:
            for key, observation, victim, identified in database.execute(query):
                found[key].append((observation, victim, bool(identified)))
        return found

    def write(self, key: str, outcome: Outcome, seconds: float) -> None:
        """Write all rows of a cell. They replace those of an earlier failure."""
        with self._connect(writing=True) as database:
            for table in ("outcomes", *TABLES):
                database.execute(f"DELETE FROM {table} WHERE cell = ?", (key,))
            database.execute(
                "INSERT INTO outcomes VALUES (?, ?, ?, ?, ?, ?)",
                (key, outcome.status, outcome.error, outcome.note, seconds, outcome.busy),
            )
            for table, row_type in TABLES.items():
                self._insert(database, table, row_type, key, getattr(outcome, table))

    def results(self) -> Conclusions:
        """Return the rows of the cells that the last run planned, with their labels.

        Raises:
            StoreError: If the file cannot be read, or has values that no run writes.
        """
        try:
            return self._results()
        except StoreError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise StoreError(f"{self.path} has rows that cannot be read: {error}") from error

    def _results(self) -> Conclusions:
        with self._connect() as database:
            meta = check_meta(self._meta(database))
            if "panel" not in meta:
                raise StoreError(f"{self.path} holds no run yet: start one with `leakfrontier run`")
            labels = self._labels(database)
            for one in labels.to_dict("records"):
                check_labels({name: value for name, value in one.items() if not is_missing(value)})
            outcomes = pd.read_sql_query("SELECT * FROM outcomes", database)
            cells = labels.merge(outcomes, on="cell", how="left")
            cells["status"] = cells["status"].fillna("missing")
            cells["error"] = cells["error"].fillna("")
            check_cells(cells)
            frames = {
                table: labels.merge(self._frame(database, table, row_type), on="cell")
                for table, row_type in TABLES.items()
            }
            for table, row_type in TABLES.items():
                check_rows(frames[table], row_type)
        return Conclusions(meta["config"], meta["panel"], cells, **frames, notes=meta["notes"])

    @staticmethod
    def _labels(database: sqlite3.Connection) -> pd.DataFrame:
        """Return the labels of the planned cells."""
        query = "SELECT cell, kind, labels FROM plan WHERE place IS NOT NULL ORDER BY place"
        found = [
            {"cell": key, "kind": kind, **_object(parse_json(labels))}
            # fetch all: after an error, an open query would lock the file
            for key, kind, labels in database.execute(query).fetchall()
        ]
        return pd.DataFrame(found, columns=None if found else ["cell"])

    @staticmethod
    def _frame(database: sqlite3.Connection, table: str, row_type: type) -> pd.DataFrame:
        own = columns(row_type)
        if table in LATER and table not in _tables(database):
            return pd.DataFrame(columns=["cell", *own])
        names = ", ".join(["cell", *own])
        order = f"cell, {next(iter(own))}"
        frame = pd.read_sql_query(f"SELECT {names} FROM {table} ORDER BY {order}", database)
        for name, column in own.items():
            try:
                frame[name] = _TYPED[column.kind](frame[name])
            except (ValueError, TypeError) as error:
                raise ValueError(f"{table}.{name}: {error}") from error
        return frame

    @staticmethod
    def _insert(
        database: sqlite3.Connection, table: str, row_type: type, key: str, rows: Sequence[Any]
    ) -> None:
        names = columns(row_type)
        marks = ", ".join("?" * (len(names) + 1))
        values_of = attrgetter(*names)
        values = [(key, *values_of(row)) for row in rows]
        database.executemany(f"INSERT INTO {table} VALUES ({marks})", values)

    @contextmanager
    def _connect(self, *, writing: bool = False) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction, which is kept as a whole or not at all.

        The file may come from others, so only plain tables are read, and under a time limit.
        """
        try:
            with closing(self._open(writing=writing)) as database, database:
                database.execute("PRAGMA trusted_schema = OFF")
                if not writing:
                    database.execute("PRAGMA query_only = ON")
                    end = time.monotonic() + READING
                    database.set_progress_handler(lambda: time.monotonic() > end, 100_000)
                database.execute("BEGIN")  # implicit transactions of sqlite3 exclude CREATE
                self._check_schema(database)
                yield database
        except (sqlite3.DatabaseError, pd.errors.DatabaseError) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_ROLLBACK:
                raise StoreError(
                    f"a run was interrupted while writing to {self.path}. Run the same command "
                    "again to finish it. If the folder comes from others, ask them for a pack"
                ) from error
            raise StoreError(
                f"{self.path} cannot be used as a results file ({error}). Check that its folder is "
                "writable. If the file is damaged, move it away and run again"
            ) from error

    def _open(self, *, writing: bool) -> sqlite3.Connection:
        """Open the file, and no other file. A journal beside it could name any file of the user.

        To roll back an interrupted write, SQLite follows the journal and deletes the super-journal
        that it names. So readers ignore journals, and writers accept only those that our runs
        leave. While another run writes, readers wait for its lock.
        """
        place = os.path.realpath(self.path)  # journals are beside the file, not beside a link
        self._check_beside(place, writing=writing)
        address = f"{Path(place).as_uri()}?mode={'rwc' if writing else 'ro'}"
        return sqlite3.connect(address, uri=True, timeout=60, isolation_level=None)

    def _check_beside(self, place: str, *, writing: bool) -> None:
        """Raise if SQLite would follow or write files that no run creates."""
        journal = f"{place}-journal"
        wrong = [f"{place}{end}" for end in ("-wal", "-shm") if os.path.lexists(f"{place}{end}")]
        if os.path.lexists(place):
            if not os.path.isfile(place):
                raise StoreError(f"{self.path} is not a file: choose another --out folder")
            with suppress(OSError), open(place, "rb") as file:  # SQLite reports the error
                if 2 in file.read(20)[18:]:
                    raise StoreError(
                        f"{self.path} was not read: it has a write-ahead log, which no run makes"
                    )
        if os.path.lexists(journal) and not _is_plain(journal, ours=writing):
            wrong.append(journal)
        if wrong:
            raise StoreError(
                f"{self.path} was not opened: {wrong[0]} lies beside it, which no run makes. Do "
                "not trust the folder if it comes from others. If it is yours, move that file away"
            )

    def _check_schema(self, database: sqlite3.Connection) -> None:
        """Raise if the file has views, triggers or computed columns, which can execute code."""
        query = "SELECT type, name, coalesce(sql, '') FROM sqlite_master"
        for kind, name, made_by in database.execute(query).fetchall():
            plain = {"table": _TABLE, "index": _INDEX}.get(kind)
            if made_by and (plain is None or not plain.fullmatch(made_by)):
                raise StoreError(
                    f"{self.path} has the {kind} {name!r}, which no run makes: it was not read"
                )

    @staticmethod
    def _is_empty(database: sqlite3.Connection) -> bool:
        return not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]

    @staticmethod
    def _create(database: sqlite3.Connection) -> None:
        database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        database.execute(f"PRAGMA user_version = {_FORMAT}")
        database.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT)")
        database.execute(
            "CREATE TABLE plan"
            " (cell TEXT PRIMARY KEY, kind TEXT, config TEXT, labels TEXT, place INTEGER)"
        )
        database.execute(
            "CREATE TABLE outcomes"
            " (cell TEXT PRIMARY KEY, status TEXT, error TEXT, note TEXT, seconds REAL, busy REAL)"
        )
        Store._create_tables(database, TABLES)

    @staticmethod
    def _create_tables(database: sqlite3.Connection, names: Iterable[str] = LATER) -> None:
        """Create the tables of rows that a file lacks."""
        for table in [one for one in names if one not in _tables(database)]:
            own = ", ".join(columns(TABLES[table]))
            database.execute(f"CREATE TABLE {table} (cell TEXT, {own})")
            database.execute(f"CREATE INDEX {table}_cell ON {table} (cell)")

    def _check(self, database: sqlite3.Connection) -> None:
        application = database.execute("PRAGMA application_id").fetchone()[0]
        if application != _APPLICATION_ID:
            raise StoreError(
                f"{self.path} is a database of another program: choose another --out folder"
            )
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version != _FORMAT:
            raise StoreError(
                f"{self.path} has format {version}, but this version of leakfrontier reads format "
                f"{_FORMAT}: choose another --out folder, or use the version that made the file"
            )

    @staticmethod
    def _meta(database: sqlite3.Connection) -> dict[str, Any]:
        query = "SELECT name, value FROM meta"
        return {name: parse_json(value) for name, value in database.execute(query).fetchall()}


def _tables(database: sqlite3.Connection) -> set[str]:
    query = "SELECT name FROM sqlite_master WHERE type = 'table'"
    return {name for (name,) in database.execute(query).fetchall()}


def other_configuration(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the keys in which a configuration differs from the one stored in a folder."""
    if not (folder / FILE_NAME).exists():
        return []
    store = Store(folder, create=True)
    with store._connect() as database:
        before: Mapping[str, Any] = store._meta(database).get("config", {})
    now = json.loads(json.dumps(config)) if before else {}
    return [
        name
        for name in {**now, **before}
        if _not_chosen(now.get(name)) != _not_chosen(before.get(name))
    ]


def _not_chosen(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a part of a configuration without the settings that a run has chosen."""
    if isinstance(value, dict):
        return {key: _not_chosen(one) for key, one in value.items() if key != "chosen"}
    return [_not_chosen(one) for one in value] if isinstance(value, list) else value


def received_results(folder: Path) -> Conclusions:
    """Return the results of a folder that may come from others. Raise if a report would fail."""
    store = Store(folder)
    results = store.results()
    try:
        check_labelled(results.cells)
    except ValueError as error:
        raise StoreError(f"{store.path} has rows that cannot be read: {error}") from error
    return results


def _object(labels: object) -> dict[str, Any]:
    if not isinstance(labels, dict):
        raise ValueError(f"labels must be an object, got {labels!r}")
    return labels


def _planned(cell: Cell, place: int) -> tuple[str, str, str, str, int]:
    return cell.key, cell.kind, json.dumps(cell.config), json.dumps(cell.labels), place


def _is_plain(journal: str, *, ours: bool) -> bool:
    """Return whether a journal is a regular file without links; if ours, of a single database.

    The journal of several databases ends with the name of their super-journal and `_JOURNAL`.
    """
    try:
        about = os.lstat(journal)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
            return False
        if not ours or about.st_size < len(_JOURNAL):
            return True
        with open(journal, "rb") as file:
            file.seek(-len(_JOURNAL), os.SEEK_END)
            return file.read() != _JOURNAL
    except FileNotFoundError:  # another run has just finished its write
        return True
    except OSError:
        return False


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot make the folder {folder} ({error.strerror}): choose another --out folder"
        ) from error
