"""Who is shown to be better, by hand."""

import numpy as np
import pandas as pd

from leakfrontier.evaluate.dominance import Dominance, Gap, compare


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
    assert found.is_worthwhile("A")
    assert found.dominating("A") == found.dominating("none") == {}


def test_uploads_decide_and_not_their_victims() -> None:
    """Five uploads of ten victims are five, and five are too few."""
    lost = {"none": [1.0] * 50, "A": [0.0] * 50}
    accuracy = {"none": [900], "A": [900]}
    assert order(lost, accuracy, batch=10).tied("A") == ["none"]
    assert order(lost, accuracy).gaps["A", "none"].privacy == 1


def test_what_is_not_paired_shows_nothing() -> None:
    half = [np.nan] * 10
    lost = {"none": [1.0] * 10 + half, "A": half + [0.0] * 10}
    found = order(lost, {"none": [900, 900], "A": []})
    assert found.gaps["A", "none"] == Gap(0, 0)
    assert not found.is_worthwhile("A")


def test_without_a_control_nothing_is_worthwhile() -> None:
    found = order({"A": [0.0] * 8, "B": [1.0] * 8}, {"A": [900], "B": [800]})
    assert found.dominating("B") == {"A": Gap(1, 1)}
    assert not found.is_worthwhile("A")
