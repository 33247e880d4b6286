"""The rows of a pack: CSV with typed columns, and digests of the exact numbers."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pandas as pd

from ..conclude.results import Conclusions
from ..foundations.foreign import is_missing
from ..foundations.rows import LATER, TABLES, Column, Outcome, columns, digest
from .archive import sha256

DIGITS = 6
"""Significant digits of the numbers in a pack. Digests use all digits."""


def to_csv(frame: pd.DataFrame) -> bytes:
    """Return a table as CSV. Numbers have `DIGITS` significant digits."""
    text = frame.to_csv(index=False, float_format=f"%.{DIGITS}g", lineterminator="\n")
    return str(text).encode()


def from_csv(body: bytes, types: Mapping[str, Column]) -> pd.DataFrame:
    """Return a table with typed columns. Raise if its columns differ from `types`."""
    kinds = defaultdict(lambda: str, {name: _READ_AS[one.kind] for name, one in types.items()})
    frame = pd.read_csv(io.BytesIO(body), dtype=kinds, keep_default_na=False)
    if [*frame.columns] != [*types]:
        raise ValueError(f"columns must be {', '.join(types)}, got {', '.join(frame.columns)}")
    for name, column in types.items():
        texts = frame[name]
        missing = column.kind is str and column.optional
        frame[name] = texts.where(texts != "", None) if missing else _TYPED[column.kind](texts)
    return frame


def _flags(texts: pd.Series[str]) -> pd.Series[Any]:
    if not texts.isin(["True", "False", ""]).all():
        raise ValueError(f"{texts.name} must be True, False or nothing")
    return texts.map({"True": True, "False": False, "": pd.NA}).astype("boolean")


_READ_AS: dict[type, type] = {int: object, float: object, bool: object, str: str, bytes: str}
"""Objects are faster than columns of texts, where texts become something else anyway."""

_TYPED: dict[type, Callable[[Any], Any]] = {
    int: pd.to_numeric,
    float: lambda texts: pd.to_numeric(texts).astype(float),
    bool: _flags,
    str: lambda texts: texts,
    bytes: lambda texts: texts,  # the names of files
}


def _value(value: Any, column: Column) -> Any:  # noqa: ANN401 - a cell of a table
    """Return the value of a table's cell in the type of its column."""
    if is_missing(value) and (column.optional or column.kind in (bool, int, float)):
        return None
    return column.kind(value)


def outcomes_of(results: Conclusions) -> dict[str, Outcome]:
    """Return the outcome of every cell, by its key."""
    found: dict[str, dict[str, Any]] = {}
    for table, row_type in TABLES.items():
        own = columns(row_type)
        for key, group in getattr(results, table).groupby("cell"):
            cast = [[_value(one, column) for one in group[name]] for name, column in own.items()]
            values = zip(*cast, strict=True)
            found.setdefault(str(key), {})[table] = tuple(row_type(*one) for one in values)
    return {key: Outcome(**tables) for key, tables in found.items()}


def rows_digest(outcome: Outcome) -> str:
    """Return a digest of all rows of a cell, with all digits but without `seconds`.

    Empty tables that older versions lack do not change it.
    """
    tables = {}
    for table, row_type in TABLES.items():
        own = {name: one for name, one in columns(row_type).items() if name != "seconds"}
        made = [
            [_plain(_value(getattr(row, name), column)) for name, column in own.items()]
            for row in getattr(outcome, table)
        ]
        if made or table not in LATER:
            tables[table] = sorted(json.dumps(row) for row in made)
    return digest(tables)


def frame_of(outcome: Outcome, table: str) -> pd.DataFrame:
    """Return the rows of one cell in the precision of a pack."""
    types = columns(TABLES[table])
    own = pd.DataFrame([asdict(row) for row in getattr(outcome, table)], columns=[*types])
    return from_csv(to_csv(own), types)


def _plain(value: Any) -> Any:  # noqa: ANN401 - a cell of a table
    return sha256(value) if isinstance(value, bytes) else value
