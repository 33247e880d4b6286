"""Which defense is shown to be better than which, paired over victims and over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np
import pandas as pd

from .statistics import SIGNIFICANCE, accuracy_difference, holm, sign_test


class Gap(NamedTuple):
    """How one defense compares with another: 1 if significantly better, -1 if worse, else 0."""

    privacy: int
    accuracy: int


@dataclass(frozen=True)
class Dominance:
    """The defenses of one scenario and attacked round, pair by pair.

    Attributes:
        gaps: How the first of a pair compares with the second.
        gains: Those that are significantly more private than the undefended control, corrected
            for the number of defenses.
        control: The undefended control; None if it was not measured.
    """

    gaps: Mapping[tuple[str, str], Gap]
    gains: frozenset[str]
    control: str | None

    def is_worthwhile(self, defense: str) -> bool:
        """Return whether a defense gains privacy, or else accuracy, over the undefended control."""
        if self.control in (None, defense):
            return False
        return defense in self.gains or self.gaps[defense, str(self.control)].accuracy > 0

    def dominating(self, defense: str) -> dict[str, Gap]:
        """Return those that are shown to be better in one respect, and worse in none."""
        return {a: gap for (a, b), gap in self.gaps.items() if b == defense and sum(gap) > 0}

    def tied(self, defense: str) -> list[str]:
        """Return those that are shown to be neither better nor worse in any respect."""
        return [a for (a, b), gap in self.gaps.items() if b == defense and not any(gap)]


def compare(victims: pd.DataFrame, tests: pd.DataFrame, control: str | None) -> Dominance:
    """Return which defenses are significantly more private, and which more accurate.

    Privacy is tested on the victims that both have, by uploads; accuracy on the seeds that both
    were trained with. What cannot be paired shows nothing.

    Args:
        victims: `victim_matrix`: the worst case of each victim under the defenses.
        tests: Test counts of each defense and seed.
        control: The undefended one, if it is among them.
    """
    counts = tests.pivot(index="seed", columns="defense", values=["correct", "total"])
    leaks = {pair: _leakage(victims, *pair) for pair in permutations(map(str, victims), 2)}
    gaps = {
        pair: Gap(-sign if p_value < SIGNIFICANCE else 0, _accuracy(counts, *pair))
        for pair, (sign, p_value) in leaks.items()
    }
    over_control = {a: found for (a, b), found in leaks.items() if b == control}
    adjusted = holm([p_value for _, p_value in over_control.values()])
    gains = [
        name
        for (name, (sign, _)), p_value in zip(over_control.items(), adjusted, strict=True)
        if sign < 0 and p_value < SIGNIFICANCE
    ]
    return Dominance(gaps, frozenset(gains), control)


def _leakage(victims: pd.DataFrame, a: str, b: str) -> tuple[int, float]:
    """Return the sign of how much more `a` leaks than `b`, and the p-value of no difference."""
    both = victims[[a, b]].dropna()
    uploads = (both[a] - both[b]).groupby(level=["seed", "observation"])
    favoured = int(np.sign(np.sign(uploads.sum()).sum()))
    return favoured, sign_test(both[a], both[b], uploads.ngroup())


def _accuracy(counts: pd.DataFrame, a: str, b: str) -> int:
    """Return 1 if `a` is significantly more accurate than `b`, -1 if less, else 0."""
    columns = [("correct", a), ("correct", b), ("total", a)]
    both = counts.reindex(columns=columns).dropna().astype(int)
    if both.empty:
        return 0
    first, second, total = (both[name].tolist() for name in columns)
    gap = accuracy_difference(first, second, total)
    return int(gap.low > 0) - int(gap.high < 0)
