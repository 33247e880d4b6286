"""Results on disk: one SQLite file per run, one transaction per cell."""

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
from ..foundations.rows import TABLES, Cell, Outcome, columns

FILE_NAME = "results.sqlite"
READING = 300.0
"""Seconds that a file may take to be read."""

_TABLE = re.compile(r"CREATE TABLE \w+ \([\w, ]+\)")
_INDEX = re.compile(r"CREATE INDEX \w+ ON \w+ \(\w+\)")
"""What runs make: no brackets within brackets, hence no expressions."""

_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""What SQLite begins a journal with, and ends the name of a super-journal with."""

_APPLICATION_ID = 0x4C46524F  # marks the file as ours
_FORMAT = 1

_TYPED: dict[type, Callable[[Any], Any]] = {
    # a column of nothing but NULL is read as an object
    int: pd.to_numeric,
    float: pd.to_numeric,
    bool: lambda values: values.astype("boolean"),
    str: lambda values: values,
    bytes: lambda values: values,
}


class StoreError(UserError):
    """The results file cannot be used; the message says why and what to do."""


class Store:
    """The results of one run, in `results.sqlite` of its folder.

    Rows of a cell are written once, in one transaction, by one process: a run that is killed at
    any moment leaves whole cells only.
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

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Keep other runs out of the folder; whoever is killed, the system lets go of it."""
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
                        f"another run is at work in {self.folder}: wait for its end, or choose "
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
        """Record what is about to run; refuse a folder that another panel version made."""
        with self._connect(writing=True) as database:
            known = self._meta(database).get("panel")
            if known not in (None, panel):
                raise StoreError(
                    f"{self.path} was made with panel {known!r}, this is panel {panel!r}: "
                    "rates of different panels cannot be mixed; choose another --out folder"
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
        """Put cells in the places of planned ones, which come first in each pair."""
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
        """Return, for every cell, the uploads and victims attacked, and whether identified."""
        found: dict[str, list[tuple[int, int, bool]]] = defaultdict(list)
        query = "SELECT cell, observation, victim, identified FROM attacks"
        with self._connect() as database:
            for key, observation, victim, identified in database.execute(query):
                found[key].append((observation, victim, bool(identified)))
        return found

    def write(self, key: str, outcome: Outcome, seconds: float) -> None:
        """Write all rows of a cell, in place of those of an earlier failure."""
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
            StoreError: For values that no run writes, too.
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
            # an error must leave no query open, which would lock the file
            for key, kind, labels in database.execute(query).fetchall()
        ]
        return pd.DataFrame(found, columns=None if found else ["cell"])

    @staticmethod
    def _frame(database: sqlite3.Connection, table: str, row_type: type) -> pd.DataFrame:
        own = columns(row_type)
        names = ", ".join(["cell", *own])
        order = f"cell, {next(iter(own))}"
        frame = pd.read_sql_query(f"SELECT {names} FROM {table} ORDER BY {order}", database)
        for name, column in own.items():
            frame[name] = _TYPED[column.kind](frame[name])
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
        """Open the file for one transaction: all of it is kept, or nothing.

        It may come from others: nothing but plain tables is read, and only for so long.
        """
        try:
            with closing(self._open(writing=writing)) as database, database:
                database.execute("PRAGMA trusted_schema = OFF")
                if not writing:
                    database.execute("PRAGMA query_only = ON")
                    end = time.monotonic() + READING
                    database.set_progress_handler(lambda: time.monotonic() > end, 100_000)
                database.execute("BEGIN")  # the module's own transactions leave CREATE out
                self._check_schema(database)
                yield database
        except (sqlite3.DatabaseError, pd.errors.DatabaseError) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_ROLLBACK:
                raise StoreError(
                    f"a run was interrupted while writing to {self.path}: run the same command "
                    "again to finish it; if the folder comes from others, ask them for a pack"
                ) from error
            raise StoreError(
                f"{self.path} cannot be used as a results file ({error}): check that its folder "
                "is writable; if the file is damaged, move it away and run again"
            ) from error

    def _open(self, *, writing: bool) -> sqlite3.Connection:
        """Open the file, and no other one: what lies beside it may name any file of the user's.

        To roll an interrupted write back, SQLite follows the journal: it deletes the
        super-journal that is named there. Readers leave journals alone, writers take only those
        that a run of ours leaves. While another run writes, readers wait for its lock.
        """
        place = os.path.realpath(self.path)  # journals lie beside the file, not beside a link
        self._check_beside(place, writing=writing)
        address = f"{Path(place).as_uri()}?mode={'rwc' if writing else 'ro'}"
        return sqlite3.connect(address, uri=True, timeout=60, isolation_level=None)

    def _check_beside(self, place: str, *, writing: bool) -> None:
        """Refuse files that SQLite would follow or write, and that no run makes."""
        journal = f"{place}-journal"
        wrong = [f"{place}{end}" for end in ("-wal", "-shm") if os.path.lexists(f"{place}{end}")]
        if os.path.lexists(place):
            if not os.path.isfile(place):
                raise StoreError(f"{self.path} is no file: choose another --out folder")
            with suppress(OSError), open(place, "rb") as file:  # SQLite says what is wrong
                if 2 in file.read(20)[18:]:
                    raise StoreError(
                        f"{self.path} keeps its rows in a write-ahead log, which no run does: "
                        "it was not read"
                    )
        if os.path.lexists(journal) and not _is_plain(journal, ours=writing):
            wrong.append(journal)
        if wrong:
            raise StoreError(
                f"{self.path} was not opened: {wrong[0]} lies beside it, which no run makes. Do "
                "not trust the folder if it comes from others; if it is yours, move that file away"
            )

    def _check_schema(self, database: sqlite3.Connection) -> None:
        """Refuse views, triggers and computed columns, which run as soon as they are touched."""
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
        for table, row_type in TABLES.items():
            database.execute(f"CREATE TABLE {table} (cell TEXT, {', '.join(columns(row_type))})")
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
                f"{self.path} has format {version}, this version of leakfrontier reads format "
                f"{_FORMAT}: choose another --out folder, or use the version that made the file"
            )

    @staticmethod
    def _meta(database: sqlite3.Connection) -> dict[str, Any]:
        query = "SELECT name, value FROM meta"
        return {name: parse_json(value) for name, value in database.execute(query).fetchall()}


def other_configuration(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return which keys of a configuration differ from that of the results in a folder."""
    if not (folder / FILE_NAME).exists():
        return []
    store = Store(folder, create=True)
    with store._connect() as database:
        before: Mapping[str, Any] = store._meta(database).get("config", {})
    now = json.loads(json.dumps(config)) if before else {}
    return [name for name in {**now, **before} if now.get(name) != before.get(name)]


def received_results(folder: Path) -> Conclusions:
    """Return the results of a folder that may come from others, if reports can be made of it."""
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
    """Return whether a journal is a file of its own; if it must be ours, of one database alone.

    The journal of several ends with the name of their super-journal and these bytes.
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
