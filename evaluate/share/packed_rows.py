"""Rows as a pack has them: CSV with the types of its columns, and digests of all digits."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, get_type_hints

import pandas as pd

from ..conclude.results import Results
from ..foundations.rows import Outcome, digest
from ..run.store import TABLES
from .archive import sha256

DIGITS = 6
"""Significant digits of the numbers in a pack; a cell's digest is of all of them."""


def to_csv(frame: pd.DataFrame) -> bytes:
    """Return a table as CSV, numbers with `DIGITS`."""
    text = frame.to_csv(index=False, float_format=f"%.{DIGITS}g", lineterminator="\n")
    return str(text).encode()


def from_csv(body: bytes, types: Mapping[str, Callable[[Any], Any]]) -> pd.DataFrame:
    """Return a table with the types of its columns; others are refused."""
    frame = pd.read_csv(io.BytesIO(body), dtype=str, keep_default_na=False)
    if [*frame.columns] != [*types]:
        raise ValueError(f"columns must be {', '.join(types)}, got {', '.join(frame.columns)}")
    for name, cast in types.items():
        frame[name] = _COLUMNS.get(cast, _COLUMNS[str])(frame[name])
    return frame


def _flags(texts: pd.Series[str]) -> pd.Series[Any]:
    if not texts.isin(["True", "False", ""]).all():
        raise ValueError(f"{texts.name} must be True, False or nothing")
    return texts.map({"True": True, "False": False, "": pd.NA}).astype("boolean")


def _bool(value: Any) -> bool | None:  # noqa: ANN401 - a cell of a table
    return None if pd.isna(value) else bool(value)


def _int(value: Any) -> int | None:  # noqa: ANN401 - a cell of a table
    return None if pd.isna(value) else int(value)


def _float(value: Any) -> float | None:  # noqa: ANN401 - a cell of a table
    return None if pd.isna(value) else float(value)


def _text(value: Any) -> str | None:  # noqa: ANN401 - a cell of a table
    return None if value is None or value is pd.NA or value != value else str(value)


def _bytes(value: Any) -> bytes:  # noqa: ANN401 - a cell of a table
    return bytes(value)


_COLUMNS: dict[Callable[[Any], Any], Callable[[Any], Any]] = {
    int: lambda texts: pd.to_numeric(texts).astype(int),
    str: lambda texts: texts,
    _int: pd.to_numeric,
    _float: lambda texts: pd.to_numeric(texts).astype(float),
    _bool: _flags,
    _text: lambda texts: texts.where(texts != "", None),
}


def types_of(table: str) -> dict[str, Callable[[Any], Any]]:
    """Return what the columns of a table hold, as functions that make it so."""
    casts: dict[object, Callable[[Any], Any]] = {
        bool: _bool,
        bool | None: _bool,
        int: _int,
        int | None: _int,
        float: _float,
        float | None: _float,
        bytes: _bytes,
        str | None: _text,
    }
    hints = get_type_hints(TABLES[table])
    return {one.name: casts.get(hints[one.name], str) for one in fields(TABLES[table])}


def outcomes_of(results: Results) -> dict[str, Outcome]:
    """Return what every cell has left behind, by its key."""
    found: dict[str, dict[str, Any]] = {}
    for table, row_type in TABLES.items():
        casts = types_of(table)
        for key, group in getattr(results, table).groupby("cell"):
            columns = [[cast(value) for value in group[name]] for name, cast in casts.items()]
            values = zip(*columns, strict=True)
            found.setdefault(str(key), {})[table] = tuple(row_type(*one) for one in values)
    return {key: Outcome(**tables) for key, tables in found.items()}


def exact(outcome: Outcome) -> str:
    """Return a digest of all rows of a cell, in all digits, without the seconds that it took."""
    tables = {}
    for table in TABLES:
        casts = types_of(table)
        made = [
            [_plain(casts[name](value)) for name, value in asdict(row).items() if name != "seconds"]
            for row in getattr(outcome, table)
        ]
        tables[table] = sorted(json.dumps(row) for row in made)
    return digest(tables)


def frame_of(outcome: Outcome, table: str) -> pd.DataFrame:
    """Return the rows of one cell as a pack has them."""
    own = pd.DataFrame([asdict(row) for row in getattr(outcome, table)], columns=[*types_of(table)])
    return from_csv(to_csv(own), types_of(table))


def _plain(value: Any) -> Any:  # noqa: ANN401 - a cell of a table
    return sha256(value) if isinstance(value, bytes) else value
