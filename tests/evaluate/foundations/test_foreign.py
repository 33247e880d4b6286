"""What others write is bounded and typed, or refused."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest

from leakfrontier.evaluate.foundations.foreign import (
    DEPTH,
    check_cells,
    check_labelled,
    check_labels,
    check_meta,
    check_rows,
    parse_json,
)
from leakfrontier.evaluate.foundations.rows import AttackRow, GuaranteeRow, Rendering, UtilityRow


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_documents_are_not_nested_without_end(brackets: str) -> None:
    start, end = ('{"a":', "}") if brackets == "{}" else ("[", "]")
    most = start * DEPTH + "1" + end * DEPTH
    assert parse_json(most) == json.loads(most)
    for depth in (DEPTH + 1, 200_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(start * depth + "1" + end * depth)


def test_what_a_file_says_of_itself_is_typed() -> None:
    sound = {"panel": "1", "config": {}, "notes": ["a"], "versions": {"torch": "2"}}
    assert check_meta(sound) == sound
    for key, value in {"panel": 1, "config": [], "notes": [1], "versions": {"torch": 2}}.items():
        with pytest.raises(ValueError, match=f"'{key}' must be"):
            check_meta({**sound, key: value})


LABELS: dict[str, Any] = {
    "scenario": "s",
    "defense": "none",
    "family": "none",
    "defense_options": {},
    "strength": None,
    "seed": 0,
    "checkpoint": 0,
    "adversary": "A",
    "adversary_name": "A",
    "adversary_options": {},
    "threat": "passive",
    "knows_defense": True,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("scenario", 3), ("defense", None), ("family", []), ("defense_options", "x")],
        *[("strength", "x"), ("strength", True), ("seed", 1.5), ("seed", "0"), ("seed", True)],
        *[("checkpoint", 2**60), ("threat", "none"), ("knows_defense", "yes"), ("captures", "x")],
    ],
)
def test_labels_are_typed(name: str, value: object) -> None:
    assert check_labels(LABELS) == LABELS
    with pytest.raises(ValueError, match=f"the label '{name}' must be"):
        check_labels({**LABELS, name: value})


def test_cells_have_the_labels_of_their_kind() -> None:
    attack = {"cell": "a", "kind": "attack", "status": "ok", "seconds": 1.0, **LABELS}
    table = {"cell": "t", "kind": "table", "status": "missing", "seconds": None}
    for check in (check_cells, check_labelled):
        check(pd.DataFrame([attack, table]))
    check_cells(pd.DataFrame(columns=["cell", "kind"]))
    for name in ("scenario", "family", "threat", "seed"):
        lacking = {key: value for key, value in attack.items() if key != name}
        with pytest.raises(ValueError, match=f"has no label '{name}'"):
            check_labelled(pd.DataFrame([lacking, table]))
    for name, value in {"status": "fine", "kind": "test", "seconds": "long"}.items():
        with pytest.raises(ValueError, match=f"{name} of a cell must be"):
            check_cells(pd.DataFrame([{**attack, name: value}]))
    with pytest.raises(ValueError, match="same key"):
        check_cells(pd.DataFrame([attack, attack]))


def frame(row: object, **changes: object) -> pd.DataFrame:
    return pd.DataFrame([{"cell": "a", **vars(row), **changes}], dtype=object)


ATTACK, UTILITY = AttackRow(0, 0), UtilityRow(1, 5, 10, 0.5)
PICTURE = Rendering(0, 0, "tokens", b'["a"]', b"[]")


@pytest.mark.parametrize(
    ("row", "changes", "said"),
    [
        (ATTACK, {"observation": -1}, "observation must be a whole number from 0, got -1"),
        (ATTACK, {"victim": "one"}, "victim must be a whole number"),
        (ATTACK, {"outcome": "won"}, "outcome must be one of scored"),
        (ATTACK, {"identified": "yes"}, "identified must be true or false"),
        (ATTACK, {"reason": b"x"}, "reason must be a text"),
        (ATTACK, {"bound": "x"}, "bound must be a number"),
        (UTILITY, {"correct": 11}, "correct must be at most total"),
        (UTILITY, {"correct": 0, "total": 0}, "total must be a whole number from 1, got 0"),
        (UTILITY, {"total": None}, "total must be a whole number"),
        (PICTURE, {"media": "text/html"}, "media must be one of image/png"),
        (PICTURE, {"guess": "[]"}, "guess must be bytes"),
        (PICTURE, {"guess": b"{}"}, "tokens must be a list of texts"),
        (PICTURE, {"guess": b"[" * 5000}, "nested too deeply"),
    ],
)
def test_rows_are_typed(row: object, changes: dict[str, object], said: str) -> None:
    check_rows(frame(row), type(row))
    with pytest.raises(ValueError, match=said):
        check_rows(frame(row, **changes), type(row))


def test_rows_come_once() -> None:
    with pytest.raises(ValueError, match="two rows have the same cell, observation, victim"):
        check_rows(pd.concat([frame(ATTACK), frame(ATTACK)]), AttackRow)
    check_rows(pd.concat([frame(ATTACK), frame(ATTACK, cell="b")]), AttackRow)
    check_rows(pd.DataFrame(columns=["cell", *GuaranteeRow.__dataclass_fields__]), GuaranteeRow)
