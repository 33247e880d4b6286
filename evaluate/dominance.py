"""Which defense is shown to be better than which, paired over victims and over seeds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from .statistics import SIGNIFICANCE, accuracy_difference, holm, sign_test


@dataclass(frozen=True)
class Dominance:
    """The defenses of one scenario and attacked round, pair by pair.

    Attributes:
        privacy: Defenses x defenses: 1 where the row's leaks significantly less than the
            column's, -1 where it leaks more, 0 where neither is shown.
        accuracy: The same for being more accurate.
        gains: Of every defense, whether it is significantly more private than the undefended
            control, corrected for the number of defenses.
        control: The undefended control; None if it was not measured.
    """

    privacy: pd.DataFrame
    accuracy: pd.DataFrame
    gains: pd.Series[bool]
    control: str | None

    def is_worthwhile(self, defense: str) -> bool:
        """Return whether a defense gains privacy, or else accuracy, over the undefended control."""
        if self.control is None:
            return False
        return bool(self.gains[defense] or self.accuracy.loc[defense, self.control] > 0)

    def dominating(self, defense: str) -> list[str]:
        """Return those that are shown to be better in one respect, and worse in none."""
        better, worse = self._beside(defense)
        return [*self.privacy.index[better & ~worse]]

    def tied(self, defense: str) -> list[str]:
        """Return those that are shown to be neither better nor worse in any respect."""
        better, worse = self._beside(defense)
        return [*self.privacy.index[~better & ~worse & (self.privacy.index != defense)]]

    def _beside(self, defense: str) -> tuple[pd.Series[bool], pd.Series[bool]]:
        signs = pd.concat([self.privacy[defense], self.accuracy[defense]], axis=1)
        return (signs > 0).any(axis=1), (signs < 0).any(axis=1)


def compare(victims: pd.DataFrame, tests: pd.DataFrame, control: str | None) -> Dominance:
    """Return which defenses are significantly more private, and which more accurate.

    Privacy is tested on the victims that both have, by uploads; accuracy on the seeds that both
    were trained with. What cannot be paired shows nothing.

    Args:
        victims: `victim_matrix`: the worst case of each victim under the defenses.
        tests: Test counts of each defense and seed.
        control: The undefended one, if it is among them.
    """
    defenses = [*victims.columns]
    signs = {
        name: pd.DataFrame(0, index=defenses, columns=defenses) for name in ("privacy", "accuracy")
    }
    counts = tests.pivot(index="seed", columns="defense", values=["correct", "total"])
    for a, b in combinations(defenses, 2):
        leaks, p_value = _leakage(victims, a, b)
        private = -leaks if p_value < SIGNIFICANCE else 0
        for name, sign in (("privacy", private), ("accuracy", _accuracy(counts, a, b))):
            signs[name].loc[a, b], signs[name].loc[b, a] = sign, -sign
    return Dominance(**signs, gains=_gains(victims, control), control=control)


def _leakage(victims: pd.DataFrame, a: str, b: str) -> tuple[int, float]:
    """Return which leaks more, as a sign, and the p-value of neither."""
    both = victims[[a, b]].dropna()
    uploads = (both[a] - both[b]).groupby(level=["seed", "observation"])
    favoured = int(np.sign(np.sign(uploads.sum()).sum()))
    return favoured, sign_test(both[a], both[b], uploads.ngroup())


def _accuracy(counts: pd.DataFrame, a: str, b: str) -> int:
    """Return which is significantly more accurate, as a sign."""
    both = (
        counts.reindex(columns=[("correct", a), ("correct", b), ("total", a)]).dropna().astype(int)
    )
    if both.empty:
        return 0
    gap = accuracy_difference(*(both[name].tolist() for name in both))
    return int(gap.low > 0) - int(gap.high < 0)


def _gains(victims: pd.DataFrame, control: str | None) -> pd.Series[bool]:
    """Return which defenses leak less than the control; by chance alone, hardly ever any."""
    others = [name for name in victims if name != control and control is not None]
    found = [_leakage(victims, str(name), str(control)) for name in others]
    adjusted = holm([p_value for _, p_value in found])
    less = [sign < 0 and p < SIGNIFICANCE for (sign, _), p in zip(found, adjusted, strict=True)]
    return pd.Series(less, index=others, dtype=bool).reindex(victims.columns, fill_value=False)
