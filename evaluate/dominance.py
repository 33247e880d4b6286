"""Which defense is shown to be better than which, paired over victims and over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .statistics import SIGNIFICANCE, Floats, accuracy_difference, holm, sign_test

Counts = Mapping[Any, Sequence[int]]
"""Right answers and test examples, by seed."""


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
    unit = victims.groupby(level=["seed", "observation"]).ngroup().to_numpy()
    lost = {str(name): victims[name].to_numpy(dtype=float) for name in victims}
    own = tests.set_index("seed").groupby("defense")[["correct", "total"]]
    counts = {str(name): group.T.to_dict("list") for name, group in own}
    gaps: dict[tuple[str, str], Gap] = {}
    over_control: dict[str, float] = {}
    for a, b in combinations(lost, 2):
        sign, p_value = _leakage(lost[a], lost[b], unit)
        private = -sign if p_value < SIGNIFICANCE else 0
        accurate = _accuracy(counts.get(a, {}), counts.get(b, {}))
        gaps[a, b], gaps[b, a] = Gap(private, accurate), Gap(-private, -accurate)
        if control in (a, b):
            over_control[a if b == control else b] = p_value
    adjusted = zip(over_control, holm([*over_control.values()]), strict=True)
    significant = [name for name, p_value in adjusted if p_value < SIGNIFICANCE]
    gains = frozenset(name for name in significant if gaps[name, str(control)].privacy > 0)
    return Dominance(gaps, gains, control)


def _leakage(a: Floats, b: Floats, unit: NDArray[np.integer[Any]]) -> tuple[int, float]:
    """Return the sign of how much more `a` leaks than `b`, and the p-value of no difference."""
    both = ~np.isnan(a - b)
    uploads = np.bincount(unit[both], weights=(a - b)[both])
    return int(np.sign(np.sign(uploads).sum())), sign_test(a[both], b[both], unit[both])


def _accuracy(a: Counts, b: Counts) -> int:
    """Return 1 if `a` is significantly more accurate than `b`, -1 if less, else 0."""
    both = [(a[seed][0], b[seed][0], a[seed][1]) for seed in a if seed in b]
    if not both:
        return 0
    first, second, total = zip(*both, strict=True)
    gap = accuracy_difference(first, second, total)
    return int(gap.low > 0) - int(gap.high < 0)
