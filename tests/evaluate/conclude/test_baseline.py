"""DP-SGD beside every heuristic: by hand, where the winner is known."""

from pathlib import Path

import pandas as pd
import pytest
from synthetic import write_tiny

from leakfrontier.evaluate.conclude.frontier import make_frontiers
from leakfrontier.evaluate.users import names
from leakfrontier.evaluate.users.methods import Method

NONE = [False] * 20
ALL = [True] * 20
HALF = [True, False] * 10


def pairs(
    folder: Path, heuristic: tuple[int, list[bool]], *private: tuple[float, int, list[bool]]
) -> pd.Series:
    """Return the comparison of one heuristic, (correct of 1000, identified), with DP-SGDs."""
    arms = [("none", "none", None, 900, ALL), ("Mine()", "Mine", None, *heuristic)]
    arms += [
        (f"DPSGD(noise_multiplier={sigma})", "DPSGD", sigma, correct, identified)
        for sigma, correct, identified in private
    ]
    results = write_tiny(folder, arms)
    found = make_frontiers(results, draws=20)[0].baseline
    assert found["defense"].tolist() == ["Mine()"]
    return found.iloc[0]


@pytest.mark.parametrize(
    ("lost", "verdict"),
    [(ALL, "worse: leaks more"), (NONE, "better: leaks less"), (HALF, "no difference shown")],
    ids=["all", "none", "half"],
)
def test_equal_accuracy_decides_by_paired_success(
    tmp_path: Path, lost: list[bool], verdict: str
) -> None:
    row = pairs(tmp_path, (800, lost), (0.1, 805, HALF), (1.0, 700, NONE), (0.01, 880, ALL))
    assert (row["partner"], row["match"]) == ("DPSGD(noise_multiplier=0.1)", "equal")
    assert row["verdict"] == f"{verdict} at equal accuracy"
    assert row["difference"] == pytest.approx(sum(lost) / 20 - 0.5)
    assert row["low"] <= row["difference"] <= row["high"]


def test_the_comparison_is_paired(tmp_path: Path) -> None:
    """Overlapping intervals of two rates do not hide that one loses every victim of the other."""
    more = [True] * 13 + [False] * 7
    less = [True] * 5 + [False] * 15
    row = pairs(tmp_path, (800, more), (0.1, 800, less))
    assert row["verdict"].startswith("worse")


@pytest.mark.parametrize(
    ("correct", "lost", "verdict"),
    [
        (780, ALL, "worse: leaks more and is less accurate"),
        (780, NONE, "undecided: add DPSGD with a noise multiplier between 0.1 and 1"),
        (780, HALF, "undecided: add DPSGD with a noise multiplier between 0.1 and 1"),
        (900, NONE, "better: leaks less and is more accurate"),
        (900, ALL, "undecided: add DPSGD with a noise multiplier below 0.1"),
        (500, ALL, "worse: leaks more and is less accurate"),
        (500, NONE, "undecided: add DPSGD with a noise multiplier above 1"),
    ],
)
def test_without_an_equal_partner_only_dominance_decides(
    tmp_path: Path, correct: int, lost: list[bool], verdict: str
) -> None:
    row = pairs(tmp_path, (correct, lost), (0.1, 850, HALF), (1.0, 700, NONE))
    assert row["match"] == "nearest"
    assert row["verdict"] == verdict


def test_what_gains_nothing_over_no_defense_is_not_better_than_a_leaky_dp_sgd(
    tmp_path: Path,
) -> None:
    arms = [
        ("none", "none", None, 800, HALF),
        ("Mine()", "Mine", None, 800, HALF),
        ("DPSGD()", "DPSGD", 0.1, 800, ALL),
    ]
    (row,) = make_frontiers(write_tiny(tmp_path, arms), draws=20)[0].baseline.itertuples()
    assert row.high < 0
    assert row.verdict == "no gain shown over no defense"


@pytest.mark.parametrize(
    ("family", "noise"), [("DPSGD", 0.0), (names.family(Method(name="mine.py:DPSGD")), 1.0)]
)
def test_what_is_not_dp_sgd_is_no_baseline(tmp_path: Path, family: str, noise: float) -> None:
    """Neither our class without noise, nor a user's class that has its name."""
    arms = [("none", "none", None, 900, ALL), ("Mine()", "Mine", None, 800, ALL)]
    results = write_tiny(tmp_path, [*arms, (f"{family}()", family, noise, 800, NONE)])
    frontier = make_frontiers(results, draws=20)[0]
    assert frontier.baseline.empty
    (check,) = (one for one in results.checks() if one.name == "private baseline")
    assert check.verdict == "warn"


def test_a_users_class_called_none_is_no_control(tmp_path: Path) -> None:
    family = names.family(Method(name="mine.py:none"))
    results = write_tiny(tmp_path, [("none()", family, None, 900, ALL), ("A", "A", 1, 800, NONE)])
    points = make_frontiers(results, draws=20)[0].points
    assert not points["control"].any()
    assert {*points["verdict"]} == {"no undefended control to compare with"}
