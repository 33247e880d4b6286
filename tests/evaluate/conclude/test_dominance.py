"""Who is shown to be better, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from leakfrontier.evaluate.conclude.dominance import Arm, Dominance, Gap, Verdict, compare, judge


def order(lost: dict[str, list[float]], correct: dict[str, list[int]], batch: int = 1) -> Dominance:
    """Compare defenses by the victims that they lose and the right answers of their seeds."""
    count = len(next(iter(lost.values())))
    places = [(0, i // batch, i % batch) for i in range(count)]
    index = pd.MultiIndex.from_tuples(places, names=["seed", "observation", "victim"])
    tests = pd.DataFrame(
        [(name, seed, n, 1000) for name, seeds in correct.items() for seed, n in enumerate(seeds)],
        columns=["defense", "seed", "correct", "total"],
    )
    return compare(pd.DataFrame(lost, index=index), tests, "none" if "none" in lost else None)


def test_one_comparison_is_the_others_opposite() -> None:
    found = order({"none": [1.0] * 8, "A": [0.0] * 8}, {"none": [900], "A": [800]})
    assert found.gaps["A", "none"] == Gap(privacy=1, accuracy=-1)
    assert found.gaps["none", "A"] == Gap(privacy=-1, accuracy=1)
    assert found.gains == {"A"}
    assert found.over_control("A") == Gap(1, -1)


def test_uploads_decide_and_not_their_victims() -> None:
    """Five uploads of ten victims are five, and five are too few."""
    lost = {"none": [1.0] * 50, "A": [0.0] * 50}
    accuracy = {"none": [900], "A": [900]}
    assert order(lost, accuracy, batch=10).gaps["A", "none"] == Gap(0, 0)
    assert order(lost, accuracy).gaps["A", "none"].privacy == 1


def test_what_is_not_paired_shows_nothing() -> None:
    half = [np.nan] * 10
    lost = {"none": [1.0] * 10 + half, "A": half + [0.0] * 10}
    found = order(lost, {"none": [900, 900], "A": []})
    assert found.gaps["A", "none"] == Gap(0, 0)
    assert found.gains == frozenset()


def test_without_a_control_nothing_gains() -> None:
    found = order({"A": [0.0] * 8, "B": [1.0] * 8}, {"A": [900], "B": [800]})
    assert found.gaps["A", "B"] == Gap(1, 1)
    assert found.gains == frozenset()
    assert found.over_control("A") is None


def arm(leak: float, accuracy: float, **change: Any) -> Arm:  # noqa: ANN401
    known = Arm(leak, accuracy, False, True, Gap(1, 0), False)
    return replace(known, **change)


def verdicts(arms: dict[str, Arm], gaps: dict[tuple[str, str], Gap]) -> dict[str, Verdict]:
    opposite = {(b, a): Gap(-gap.privacy, -gap.accuracy) for (a, b), gap in gaps.items()}
    known = gaps | opposite
    return judge(arms, lambda one, other: known.get((one, other), Gap(0, 0)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"leak": np.nan}, "not attacked"),
        ({"accuracy": np.nan}, "accuracy not measured"),
        ({"control": True, "failed": "power"}, "undefended control"),
        ({"refuted": True, "gains": False}, "its privacy claim is refuted"),
        ({"over_control": None, "failed": "x"}, "no undefended control to compare with"),
        ({"failed": "completeness"}, "its evaluation fails its checks (completeness)"),
        ({"gains": False, "over_control": Gap(0, 0)}, "no privacy gain shown"),
        (
            {"gains": False, "over_control": Gap(-1, -1)},
            "no privacy gain shown (less accurate, leaks more)",
        ),
        ({}, "Pareto-optimal"),
    ],
)
def test_who_is_not_judged_has_a_reason_and_no_place(change: dict[str, Any], text: str) -> None:
    found = verdicts({"A": replace(arm(0.1, 0.9), **change)}, {})["A"]
    assert found.text({}) == text
    assert found.place == (None if change else 1)


def test_the_unjudged_take_no_place_away() -> None:
    rival = arm(0.0, 0.9, gains=False)
    found = verdicts({"A": arm(0.5, 0.5), "B": rival}, {("B", "A"): Gap(1, 1)})
    assert found["A"].kind == "Pareto-optimal"


def test_who_is_dominated_is_nowhere_better_at_the_estimates() -> None:
    arms = {"A": arm(0.2, 0.9), "B": arm(0.0, 0.5), "C": arm(0.3, 0.5), "D": arm(-0.1, 0.5)}
    gaps = dict.fromkeys([("A", "B"), ("A", "C"), ("A", "D")], Gap(0, 1))
    found = verdicts(arms, gaps | {("B", "C"): Gap(1, 0)})
    texts = {name: verdict.text({one: one for one in arms}) for name, verdict in found.items()}
    assert texts["A"] == texts["B"] == texts["D"] == "Pareto-optimal"  # below a blind guess is none
    assert texts["C"] == "dominated by A"
    assert found["C"].place == 3
