"""Who is shown to be better, by hand."""

from collections.abc import Mapping
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pandas as pd
import pytest

from leakfrontier.evaluate.conclude.coordinates import Coordinates
from leakfrontier.evaluate.conclude.dominance import (
    Arm,
    Dominance,
    Gap,
    Verdict,
    compare,
    dominates,
    judge,
)


def matrix(lost: Mapping[str, list[float]], batch: int = 1) -> pd.DataFrame:
    count = len(next(iter(lost.values())))
    places = [(0, i // batch, i % batch) for i in range(count)]
    index = pd.MultiIndex.from_tuples(places, names=["seed", "observation", "victim"])
    return pd.DataFrame(lost, index=index)


def counts(correct: Mapping[str, list[int]]) -> pd.DataFrame:
    return pd.DataFrame(
        [(name, seed, n, 1000) for name, seeds in correct.items() for seed, n in enumerate(seeds)],
        columns=["defense", "seed", "correct", "total"],
    )


def order(lost: dict[str, list[float]], correct: dict[str, list[int]], batch: int = 1) -> Dominance:
    """Compare defenses by the victims that they lose and the right answers of their seeds."""
    victims = {"passive": matrix(lost, batch)}
    return compare(victims, counts(correct), "none" if "none" in lost else None)


def gap(privacy: int, accuracy: int) -> Gap:
    return Gap(accuracy, accuracy, {"passive": privacy})


def test_one_comparison_is_the_others_opposite() -> None:
    found = order({"none": [1.0] * 8, "A": [0.0] * 8}, {"none": [900] * 2, "A": [800] * 2})
    assert found.gaps["A", "none"] == gap(privacy=1, accuracy=-1)
    assert found.gaps["none", "A"] == gap(privacy=-1, accuracy=1)
    assert found.gains == {"A"}
    assert found.over_control("A") == gap(1, -1)


def test_uploads_decide_and_not_their_victims() -> None:
    """Five uploads of ten victims are five, and five are too few."""
    lost = {"none": [1.0] * 50, "A": [0.0] * 50}
    accuracy = {"none": [900], "A": [900]}
    assert order(lost, accuracy, batch=10).gaps["A", "none"] == gap(0, 0)
    assert order(lost, accuracy).gaps["A", "none"].success == {"passive": 1}


def test_what_is_not_paired_shows_nothing() -> None:
    half = [np.nan] * 10
    lost = {"none": [1.0] * 10 + half, "A": half + [0.0] * 10}
    found = order(lost, {"none": [900, 900], "A": []})
    assert found.gaps["A", "none"] == Gap()
    assert found.gains == frozenset()


def test_without_a_control_nothing_gains() -> None:
    found = order({"A": [0.0] * 8, "B": [1.0] * 8}, {"A": [900] * 2, "B": [800] * 2})
    assert found.gaps["A", "B"] == gap(1, 1)
    assert found.gains == frozenset()
    assert found.over_control("A") is None


def test_one_seed_shows_no_gain_in_accuracy() -> None:
    one = order({"none": [1.0] * 8, "A": [0.0] * 8}, {"none": [500], "A": [900]})
    assert (one.gaps["A", "none"].accuracy, one.gaps["A", "none"].seems) == (0, 1)


def test_a_gain_for_one_server_is_a_gain_but_chosen_among_servers() -> None:
    """Six of twenty victims less are p = 0.03: of one server a gain, of two perhaps luck."""
    all_lost, fewer = [1.0] * 20, [1.0] * 14 + [0.0] * 6
    same = matrix({"none": all_lost, "A": all_lost})
    tests = counts({"none": [900], "A": [900]})
    weak = {"passive": same, "candidates": matrix({"none": all_lost, "A": fewer})}
    assert compare({"passive": weak["candidates"]}, tests, "none").gains == {"A"}
    assert compare(weak, tests, "none").gains == frozenset()
    strong = weak | {"candidates": matrix({"none": all_lost, "A": [0.0] * 20})}
    assert compare(strong, tests, "none").gains == {"A"}


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_useless_defenses_are_rarely_called_more_accurate(seeds: int) -> None:
    """Twenty of them, whose accuracies scatter by three points, in 120 runs."""
    rng = np.random.default_rng(seeds)
    names = ["none", *(f"A{i}" for i in range(20))]
    lost = {name: [1.0, 1.0] for name in names}
    claimed = 0
    runs = 120
    for _ in range(runs):
        shares = np.clip(0.7 + 0.03 * rng.standard_normal((len(names), seeds)), 0, 1)
        correct = dict(zip(names, rng.binomial(1000, shares).tolist(), strict=True))
        found = order(lost, correct)
        said = [found.over_control(name) for name in names[1:]]
        claimed += any(one is not None and one.accuracy > 0 for one in said)
    assert claimed <= 0.05 * runs
    assert seeds > 1 or claimed == 0


def test_a_real_gain_in_accuracy_is_shown() -> None:
    names = ["none", *(f"A{i}" for i in range(20))]
    correct = {name: [700, 705, 698, 702, 701] for name in names}
    correct["A3"] = [800, 806, 799, 801, 803]
    found = order({name: [1.0, 1.0] for name in names}, correct)
    better = [name for name in names[1:] if (one := found.over_control(name)) and one.accuracy > 0]
    assert better == ["A3"]


def at(leak: float, accuracy: float, gamma: float = 1.0, **given: float) -> Coordinates:
    return Coordinates(accuracy, {"passive": leak, **given}, (gamma, gamma))


def arm(leak: float, accuracy: float, gamma: float = 1.0, **change: Any) -> Arm:  # noqa: ANN401
    known = Arm(at(leak, accuracy, gamma), False, True, gap(1, 0), False)
    return replace(known, **change)


def verdicts(arms: dict[str, Arm], gaps: dict[tuple[str, str], Gap]) -> dict[str, Verdict]:
    known = gaps | {(b, a): found.opposite() for (a, b), found in gaps.items()}
    return judge(arms, lambda one, other: known.get((one, other), Gap()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"at": at(np.nan, 0.9)}, "not attacked"),
        ({"at": at(0.1, np.nan)}, "accuracy not measured"),
        ({"control": True, "failed": "power"}, "undefended control"),
        ({"refuted": True, "gains": False}, "its privacy claim is refuted"),
        ({"over_control": None, "failed": "x"}, "no undefended control to compare with"),
        ({"failed": "completeness"}, "its evaluation fails its checks (completeness)"),
        ({"gains": False, "over_control": Gap()}, "no privacy gain shown"),
        (
            {"gains": False, "over_control": gap(-1, -1)},
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
    found = verdicts({"A": arm(0.5, 0.5), "B": rival}, {("B", "A"): gap(1, 1)})
    assert found["A"].kind == "Pareto-optimal"


def test_who_is_dominated_is_nowhere_better_at_the_estimates() -> None:
    arms = {"A": arm(0.2, 0.9), "B": arm(0.0, 0.5), "C": arm(0.3, 0.5)}
    gaps = dict.fromkeys([("A", "B"), ("A", "C")], gap(0, 1))
    found = verdicts(arms, gaps | {("B", "C"): gap(1, 0)})
    texts = {name: verdict.text({one: one for one in arms}) for name, verdict in found.items()}
    assert texts["A"] == texts["B"] == "Pareto-optimal"
    assert texts["C"] == "dominated by A"
    assert found["C"].place == 2  # A leaks no less


BETTER = gap(1, 1)


@pytest.mark.parametrize(
    ("one", "other", "found", "does"),
    [
        (at(0.1, 0.9), at(0.5, 0.8), BETTER, True),
        (at(0.1, 0.9, 1.0), at(0.5, 0.8, 0.4), BETTER, False),  # proofs are not beaten by attacks
        (at(0.1, 0.9, 0.4), at(0.5, 0.8, 1.0), BETTER, True),
        (at(0.1, 0.9, 0.3), at(0.1, 0.9, 0.4), Gap(), True),  # a smaller gamma is better
        (at(0.1, 0.8, 0.3), at(0.1, 0.9, 0.4), Gap(), False),
        (at(0.1, 0.9), at(0.1, 0.9), Gap(), False),
        (at(0.1, 0.9), at(0.5, 0.8), Gap(), False),  # nothing is shown
        (at(0.1, 0.9), at(0.5, 0.8), Gap(1, 1, {"passive": 1, "parameters": -1}), False),
        (at(0.1, 0.9), at(0.5, 0.8), Gap(0, -1, {"passive": 1}), False),
        (at(0.1, 0.9, candidates=nan), at(0.5, 0.8, candidates=0.2), BETTER, False),  # unknown
        (at(0.1, 0.9, candidates=nan), at(0.5, 0.8, candidates=nan), BETTER, True),
        (at(0.1, 0.9, candidates=0.2), at(0.5, 0.8, candidates=nan), BETTER, True),
        (at(0.1, 0.9, candidates=1.0), at(0.5, 0.8, candidates=0.2), BETTER, False),
    ],
)
def test_who_dominates(one: Coordinates, other: Coordinates, found: Gap, *, does: bool) -> None:
    assert dominates(one, other, found) == does
    assert not (does and dominates(other, one, found.opposite()))


def test_an_upload_and_a_run_are_proven_apart() -> None:
    one, other = (replace(at(0.1, 0.9), gammas=gammas) for gammas in ((0.1, 0.5), (0.2, 0.4)))
    assert not dominates(one, other, BETTER)
    assert not dominates(other, one, BETTER)


def test_places_are_among_those_of_the_same_evidence_that_leak_less() -> None:
    arms = {
        "proven": arm(0.1, 0.9, 0.4),
        "weaker": arm(0.5, 0.9, 0.5),
        "heuristic": arm(0.5, 0.9),
        "leaky": arm(0.8, 0.9),
        "dear": arm(0.5, 0.7),
    }
    gaps = {
        ("proven", "weaker"): gap(1, 0),
        ("proven", "heuristic"): gap(1, 0),
        ("heuristic", "leaky"): gap(1, 0),
        ("heuristic", "dear"): gap(0, 1),
    }
    found = verdicts(arms, gaps)
    places = {name: verdict.place for name, verdict in found.items()}
    assert places == {"proven": 1, "weaker": 2, "heuristic": 1, "leaky": 2, "dear": 1}
    assert found["heuristic"].other == "proven"  # although it is the first of its kind
    assert found["dear"].kind == "dominated"
