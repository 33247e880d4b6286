import math

import pytest

from leakfrontier.evaluate.advise.clipping import Clipped, ClippingPoint
from leakfrontier.evaluate.advise.question import AdviceRow
from leakfrontier.evaluate.advise.tables import CLIPPING_COLUMNS, COLUMNS, bounded, sigma
from leakfrontier.evaluate.conclude.labels import number
from leakfrontier.evaluate.foundations.statistics import Interval


@pytest.mark.parametrize(
    ("value", "text"), [(2.9901, "3"), (2.991, "3"), (0.12301, "0.124"), (math.inf, "inf")]
)
def test_an_epsilon_is_rounded_up(value: float, text: str) -> None:
    assert number(value) == text


def test_a_bound_is_rounded_up_and_noise_is_not_rounded_again() -> None:
    assert bounded(0.010001) == "1.01 %"
    assert bounded(1.0) == "100 %"
    assert sigma(1.2345) == "1.234"
    assert sigma(0.9680) == "0.968"


def test_what_was_not_measured_is_left_empty() -> None:
    row = AdviceRow(1.5, {"pld": 3.0, "prv": 3.1, "rdp": math.inf}, 0.1, 0.2, 0.25, rounds=7)
    cells = {name: column(row) for name, column in COLUMNS.items()}
    assert (cells["sigma"], cells["rounds"], cells["RDP"]) == ("1.5", "7", "inf")
    assert cells["bound, both"] == "25 %"
    for name in ("C", "lr", "best attack", "any attack", "accuracy", "s"):
        assert cells[name] == ""


def test_a_signal_that_cannot_be_seen_is_called_so() -> None:
    point = ClippingPoint(0.5, Clipped(0.25, 3.456), Clipped(1.0, None), Interval(0.5, 0, 1, 1))
    cells = {name: column(point) for name, column in CLIPPING_COLUMNS.items()}
    assert (cells["C"], cells["clipped, first"], cells["clipped, last"]) == ("0.5", "25%", "100%")
    assert cells["noise / signal, first"] == "3.5"
    assert cells["noise / signal, last"] == "no signal"
