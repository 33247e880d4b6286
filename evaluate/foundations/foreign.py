"""Validation of files that others wrote, before they are used.

Packs, captures and result folders come from strangers. They may be broken or hostile. The functions
here bound their depth and check their types, so later code can rely on them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, get_args

import pandas as pd

from leakfrontier.adversaries.base import THREATS

from .rows import Column, GuaranteeRow, Kind, Status, columns

DEPTH = 64
"""Maximum nesting of lists and mappings. Our own files have fewer than ten levels."""

_LEAST = {"total": 1, "correct": 0, "observation": 0, "victim": 0, "round": 0, "candidates": 1}

_Test = Callable[[object], bool]


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401 - whatever the text holds
    """Return the value of a JSON document.

    Raises:
        ValueError: If it is not valid, is nested too deeply, or has numbers that are too large.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_bounds(value)
    return value


def check_bounds(value: object) -> None:
    """Raise a ValueError if nesting is deeper than `DEPTH` or a number does not fit a float."""
    waiting: list[tuple[object, int]] = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > DEPTH:
            raise ValueError(f"it is nested too deeply: at most {DEPTH} levels")
        if isinstance(part, int) and abs(part) > sys.float_info.max:
            raise ValueError(f"a number of {part.bit_length():,} bits is too large")
        inner: Iterable[object] = ()
        if isinstance(part, Mapping):
            inner = part.values()
        elif isinstance(part, list | tuple):
            inner = part
        waiting += [(one, depth + 1) for one in inner]


def check_meta(meta: object) -> Mapping[str, Any]:
    """Return the metadata of a pack or a folder, if its values have the right types."""
    if not isinstance(meta, Mapping):
        raise ValueError(f"it must be an object, got {_kind(meta)}")
    for name, (is_right, words) in _META.items():
        if name in meta and not is_right(meta[name]):
            raise ValueError(f"{name!r} must be {words}, got {_kind(meta[name])}")
    return meta


def check_labels(labels: object) -> dict[str, Any]:
    """Return the labels of a cell, if they have the right types."""
    if not isinstance(labels, dict):
        raise ValueError(f"labels must be an object, got {_kind(labels)}")
    for name, (is_right, words) in _LABELS.items():
        if name in labels and not is_right(labels[name]):
            raise ValueError(f"the label {name!r} must be {words}, got {_shown(labels[name])}")
    return labels


def check_cells(cells: pd.DataFrame) -> None:
    """Raise a ValueError if a cell occurs twice or has an impossible value."""
    if not cells["cell"].is_unique:
        raise ValueError("two cells have the same key")
    for name, (is_right, words) in _CELLS.items():
        for value in cells.get(name, ()):
            if not is_missing(value) and not is_right(value):
                raise ValueError(f"{name} of a cell must be {words}, got {_shown(value)}")


def check_labelled(cells: pd.DataFrame) -> None:
    """Raise a ValueError if a cell lacks the labels of its kind."""
    for kind, needed in _NEEDED.items():
        own = cells[cells["kind"] == kind]
        for name in needed if len(own) else ():
            if name not in own or own[name].isna().any():
                raise ValueError(f"a cell of kind {kind!r} has no label {name!r}")


def check_rows(frame: pd.DataFrame, row_type: type) -> None:
    """Raise a ValueError if a table has values that its rows cannot have.

    Args:
        frame: The rows, with the keys of their cells.
        row_type: The dataclass of the rows.
    """
    for name, column in columns(row_type).items():
        is_right, words = _test(name, column)
        for value in frame[name].unique():
            if not is_right(value):
                raise ValueError(f"{name} must be {words}, got {_shown(value)}")
    key = ["cell", *(name for name in _KEYS if name in frame)]
    if row_type is not GuaranteeRow and frame.duplicated(key).any():
        raise ValueError(f"two rows have the same {', '.join(key)}")
    if "correct" in frame and not (frame["correct"] <= frame["total"]).all():
        raise ValueError("correct must be at most total")
    if "media" in frame:
        _check_tokens(frame)


def _check_tokens(frame: pd.DataFrame) -> None:
    shown = frame[frame["media"] == "tokens"]
    for content in (*shown["truth"], *shown["guess"]):
        texts = parse_json(content) if content else []
        if not _is_texts(texts):
            raise ValueError(f"tokens must be a list of texts, got {_shown(texts)}")


def _test(name: str, column: Column) -> tuple[_Test, str]:
    """Return a test for the values of a column, and a description of it."""
    if column.allowed:
        return lambda value: value in column.allowed, f"one of {', '.join(column.allowed)}"
    is_right, words = _KINDS[column.kind]
    least = _LEAST.get(name)
    if least is not None:
        words += f" from {least}"

    def test(value: object) -> bool:
        if is_missing(value):
            return column.optional or column.kind is float
        return is_right(value) and (least is None or value >= least)  # type: ignore[operator]

    return test, words


def is_missing(value: object) -> bool:
    """Return whether a table has no value there."""
    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return abs(float(value)) < 2**53 and float(value).is_integer()


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or str(value) in ("True", "False")


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _or_nothing(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


_KINDS: dict[Any, tuple[_Test, str]] = {
    str: (_is_text, "a text"),
    int: (_is_whole, "a whole number"),
    float: (_is_number, "a number"),
    bool: (_is_flag, "true or false"),
    bytes: (lambda value: isinstance(value, bytes), "bytes"),
}
_OBJECT = (_is_object, "an object")
_TEXTS = (_is_texts, "a list of texts")
_META: dict[str, tuple[_Test, str]] = {
    "panel": _KINDS[str],
    "code": _KINDS[str],
    "conclusion": _KINDS[str],
    "config": _OBJECT,
    "versions": (
        lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
        "an object of texts",
    ),
    "machine": _OBJECT,
    "notes": _TEXTS,
}
_STATUS = (*get_args(Status), "missing")
_KEYS = ("observation", "victim", "metric", "round")
_CELLS: dict[str, tuple[_Test, str]] = {
    **dict.fromkeys(("cell", "error", "note"), _KINDS[str]),
    **dict.fromkeys(("seconds", "busy"), _KINDS[float]),
    "kind": (lambda value: value in get_args(Kind), f"one of {', '.join(get_args(Kind))}"),
    "status": (lambda value: value in _STATUS, f"one of {', '.join(_STATUS)}"),
}
_NAMES = ("scenario", "dataset", "model", "protocol", "defense", "family", "task")
_LABELS: dict[str, tuple[_Test, str]] = {
    **dict.fromkeys((*_NAMES, "adversary", "adversary_name", "table", "setting"), _KINDS[str]),
    **dict.fromkeys(("batch_size", "seed", "checkpoint", "trial"), _KINDS[int]),
    **dict.fromkeys(("defense_options", "adversary_options"), _OBJECT),
    **dict.fromkeys(
        ("baseline", "simulates", "candidates_granted", "knows_defense", "stochastic"),
        (_or_nothing(_is_flag), "true or false"),
    ),
    "strength": (_or_nothing(_is_number), "a number or null"),
    "threat": (lambda value: value in THREATS, f"one of {', '.join(THREATS)}"),
    "captures": _TEXTS,
}
_TRAINED = ("scenario", "defense", "family", "defense_options")
_NEEDED: dict[str, tuple[str, ...]] = {
    "replay": _TRAINED,
    "train": (*_TRAINED, "seed"),
    "tune": (*_TRAINED, "seed"),
    "attack": (
        *(*_TRAINED, "seed", "checkpoint", "adversary", "adversary_name"),
        *("adversary_options", "threat"),
    ),
}


def _kind(value: object) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a text", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _shown(value: object) -> str:
    text = repr(value.item() if hasattr(value, "item") else value)
    return text if len(text) <= 80 else f"{text[:80]}..."
