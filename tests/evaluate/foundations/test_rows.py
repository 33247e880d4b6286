from dataclasses import replace
from typing import Any

import pytest

from leakfrontier.evaluate.foundations.rows import Cell, GuaranteeRow, digest


def test_a_digest_is_of_the_value_and_not_of_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    others = [{"a": 1, "b": [2, 1]}, {"a": 1}, {"a": "1", "b": [1, 2]}, [1, 2], None, ""]
    assert len({digest(one) for one in others}) == len(others)
    assert len(digest("anything")) == 20


def test_what_is_no_plain_value_is_refused() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        digest({"a": {1, 2}})


CELL = Cell("attack", {"seed": 0}, {"defense": "none"}, code_digest="code")


@pytest.mark.parametrize("change", [{"kind": "train"}, {"config": {"seed": 1}}])
def test_another_experiment_is_another_cell(change: dict[str, Any]) -> None:
    other = replace(CELL, **change)
    assert other.config_digest != CELL.config_digest
    assert other.key != CELL.key


def test_edited_code_is_the_same_experiment_with_another_key() -> None:
    edited = replace(CELL, code_digest="other code")
    assert edited.config_digest == CELL.config_digest
    assert edited.key != CELL.key


def test_what_reports_call_a_cell_does_not_matter() -> None:
    renamed = replace(CELL, labels={"defense": "another title"})
    assert (renamed.key, renamed) == (CELL.key, CELL)


def test_an_audit_is_added_to_a_claim_and_replaces_an_earlier_one() -> None:
    claim = GuaranteeRow(3.0, 1e-5, "record", "zero-out", "pld", 1.0, 0.1, 20)
    found = claim.with_audit("refuted", violated=True, measured_noise=0.5, audited_epsilon=8.0)
    assert (found.epsilon, found.steps) == (3.0, 20)
    assert (found.finding, found.violated, found.measured_noise) == ("refuted", True, 0.5)
    assert found.with_audit("cannot be audited") == claim.with_audit("cannot be audited")
