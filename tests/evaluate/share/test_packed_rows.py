"""Rows of a pack: typed as they were, with six digits, and a digest of all of them."""

from dataclasses import replace

import pandas as pd
import pytest
from synthetic import SCENARIOS, shared_results

from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.rows import (
    LATER,
    TABLES,
    Column,
    Outcome,
    ProbeRow,
    columns,
    digest,
)
from leakfrontier.evaluate.share.packed_rows import (
    frame_of,
    from_csv,
    outcomes_of,
    rows_digest,
    to_csv,
)

TYPES = {"count": Column(int), "note": Column(str)}


@pytest.fixture(scope="module")
def results() -> Conclusions:
    return shared_results(active=True, guaranteed=True, scenarios=SCENARIOS[:1])


@pytest.fixture(scope="module")
def outcome(results: Conclusions) -> Outcome:
    """Return what an attack has left behind."""
    return next(one for one in outcomes_of(results).values() if one.attacks and one.scores)


def test_every_row_of_every_cell_is_there(results: Conclusions) -> None:
    outcomes = outcomes_of(results).values()
    for table in TABLES:
        assert sum(len(getattr(one, table)) for one in outcomes) == len(getattr(results, table))


@pytest.mark.parametrize("table", ["attacks", "scores", "utility", "guarantees", "replays"])
def test_types_are_those_of_a_folder(results: Conclusions, table: str) -> None:
    types = columns(TABLES[table])
    given = getattr(results, table)[[*types]]
    own = from_csv(to_csv(given), types)
    assert own.dtypes.to_dict() == given.dtypes.to_dict()
    pd.testing.assert_frame_equal(own, given.reset_index(drop=True), rtol=1e-5)


def test_a_digest_is_of_all_digits_and_of_every_row(outcome: Outcome) -> None:
    first, *others = outcome.scores
    nearly = replace(first, value=float(first.value or 1) * (1 + 1e-15))
    assert nearly.value != first.value
    changed = replace(outcome, scores=(nearly, *others))
    assert frame_of(changed, "scores").equals(frame_of(outcome, "scores"))
    assert rows_digest(changed) != rows_digest(outcome)
    assert rows_digest(replace(outcome, scores=tuple(others))) != rows_digest(outcome)


def test_a_digest_is_not_of_the_order_or_the_time(outcome: Outcome) -> None:
    later = tuple(replace(row, seconds=row.seconds + 1) for row in reversed(outcome.attacks))
    assert rows_digest(replace(outcome, attacks=later)) == rows_digest(outcome)


@pytest.mark.parametrize("body", [b"count\n1\n", b"note,count\na,1\n", b"count,note\nmany,a\n"])
def test_other_columns_and_other_values_are_refused(body: bytes) -> None:
    assert from_csv(b"count,note\n1,a\n", TYPES).to_dict("records") == [{"count": 1, "note": "a"}]
    with pytest.raises(ValueError, match=r"columns must be count, note|Unable to parse"):
        from_csv(body, TYPES)


def test_a_flag_is_true_false_or_nothing() -> None:
    types = {"attacked": columns(TABLES["attacks"])["identified"]}
    found = from_csv(b'attacked\nTrue\nFalse\n""\n', types)["attacked"]
    assert found.tolist() == [True, False, pd.NA]
    with pytest.raises(ValueError, match="attacked must be True, False or nothing"):
        from_csv(b"attacked\nperhaps\n", types)


def test_tables_that_older_versions_lack_change_no_digest_while_they_are_empty() -> None:
    known: dict[str, list[str]] = {table: [] for table in TABLES if table not in LATER}
    assert rows_digest(Outcome()) == digest(known)
    probe = ProbeRow(0.9, 0.1, "a permutation", needs_history=False, remaining_noise=1.0)
    assert rows_digest(Outcome(probes=(probe,))) != digest(known)
