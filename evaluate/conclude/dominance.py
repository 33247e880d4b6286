"""Pairwise comparisons of defenses, and the verdict on each.

Every table, figure, leaderboard and CSV file takes its verdict from `judge`. A defense is *judged*
if three conditions hold: it leaks significantly less than no defense, its claim is not refuted, and
its evaluation passes its checks. Judged defenses are compared in two respects: accuracy, and
advantage over a blind guess. A judged defense is

- *dominated* if another judged one is significantly better in one respect, and its estimate is not
  worse in the other;
- otherwise *tied* if the estimates of another judged one are at least as good in both respects and
  better in one, but the difference is not significant;
- otherwise *Pareto-optimal*.

Its place is one more than the number of defenses that dominate it. A defense that is not judged has
no place. Its verdict says why.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..foundations.statistics import SIGNIFICANCE, Floats, accuracy_difference, holm, sign_test

Counts = Mapping[Any, Sequence[int]]
"""Right answers and test examples, by seed."""


class Gap(NamedTuple):
    """How one defense compares with another: 1 if significantly better, -1 if worse, else 0."""

    privacy: int
    accuracy: int


@dataclass(frozen=True)
class Dominance:
    """All pairs of defenses of one scenario and attacked round.

    Attributes:
        gaps: How the first of a pair compares with the second.
        gains: The defenses that are significantly more private than the undefended control,
            corrected for the number of defenses.
        control: The undefended control; None if it was not measured.
    """

    gaps: Mapping[tuple[str, str], Gap]
    gains: frozenset[str]
    control: str | None

    def over_control(self, defense: str) -> Gap | None:
        """Return how a defense compares with the undefended control; None without one."""
        return None if self.control is None else self.gaps.get((defense, self.control), Gap(0, 0))


Kind = Literal[
    "Pareto-optimal",
    "tied",
    "dominated",
    "no privacy gain shown",
    "its privacy claim is refuted",
    "its evaluation fails its checks",
    "undefended control",
    "no undefended control to compare with",
    "accuracy not measured",
    "not attacked",
]
"""All verdicts. The first three are for judged defenses."""

_JOINED = {"tied": "with", "dominated": "by"}

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one defense in one setting, against one server.

    Attributes:
        kind: The verdict.
        other: The key of the defense that it is tied with or dominated by.
        detail: An addition to the verdict.
        place: One more than the number of defenses that dominate it; None if it is not judged.
    """

    kind: Kind
    other: Any = None
    detail: str = ""
    place: int | None = None

    def text(self, names: Mapping[Any, str]) -> str:
        """Return the verdict in words.

        Args:
            names: The names of defenses, by key.
        """
        if self.kind in _JOINED:
            return f"{self.kind} {_JOINED[self.kind]} {names[self.other]}"
        return f"{self.kind} ({self.detail})" if self.detail else self.kind


@dataclass(frozen=True)
class Arm:
    """The measurements of one defense that a verdict needs.

    Attributes:
        leak: Worst-case advantage; NaN if no attack ran.
        accuracy: Test accuracy; NaN if it was not measured.
        control: Whether it is the undefended control.
        gains: Whether it is shown to leak less than the control.
        over_control: How it compares with the control; None if there is no control.
        refuted: Whether its privacy claim is refuted.
        failed: The names of the checks that its evaluation fails.
    """

    leak: float
    accuracy: float
    control: bool
    gains: bool
    over_control: Gap | None
    refuted: bool
    failed: str = ""

    def not_judged(self) -> Verdict | None:
        """Return the verdict that says why it is not judged; None if it is judged."""
        if np.isnan(self.leak):
            return Verdict("not attacked")
        if np.isnan(self.accuracy):
            return Verdict("accuracy not measured")
        if self.control:
            return Verdict("undefended control")
        if self.refuted:
            return Verdict("its privacy claim is refuted")
        if self.over_control is None:
            return Verdict("no undefended control to compare with")
        if self.failed:
            return Verdict("its evaluation fails its checks", detail=self.failed)
        if not self.gains:
            return Verdict("no privacy gain shown", detail=_beside(self.over_control))
        return None

    def is_no_worse(self, other: Arm) -> bool:
        """Return whether its estimates are at least as good as another's in both respects.

        Advantages below zero count as zero.
        """
        return max(self.leak, 0.0) <= max(other.leak, 0.0) and self.accuracy >= other.accuracy


def judge(arms: Mapping[Key, Arm], gap: Callable[[Key, Key], Gap]) -> dict[Key, Verdict]:
    """Return the verdict on every defense of a setting: see the module's docstring.

    Args:
        arms: The defenses.
        gap: Compares the first of two defenses with the second.
    """
    found = {key: arm.not_judged() for key, arm in arms.items()}
    judged = [key for key, verdict in found.items() if verdict is None]
    return {key: found[key] or _judged(key, judged, arms, gap) for key in arms}


def _judged(
    key: Key, judged: Sequence[Key], arms: Mapping[Key, Arm], gap: Callable[[Key, Key], Gap]
) -> Verdict:
    """Return the verdict on a judged defense."""
    own = arms[key]
    ahead = [one for one in judged if one != key and arms[one].is_no_worse(own)]
    shown = {one: sum(gap(one, key)) for one in ahead}
    dominating = [one for one in ahead if shown[one] > 0]
    if dominating:
        best = max(dominating, key=lambda one: shown[one])
        return Verdict("dominated", best, place=1 + len(dominating))
    for one in ahead:
        if not own.is_no_worse(arms[one]):
            return Verdict("tied", one, place=1)
    return Verdict("Pareto-optimal", place=1)


def _beside(gap: Gap) -> str:
    """Return how a defense that shows no gain in privacy differs from the undefended control."""
    said = {1: "more accurate", -1: "less accurate", 0: ""}[gap.accuracy]
    return ", ".join(filter(None, [said, "leaks more" if gap.privacy < 0 else ""]))


def compare(victims: pd.DataFrame, tests: pd.DataFrame, control: str | None) -> Dominance:
    """Return which defenses are significantly more private, and which more accurate.

    Both comparisons are paired. Privacy is tested by uploads, on the victims that both defenses
    have. Accuracy is tested on the seeds that both were trained with. Without any pairs, no
    difference is significant.

    Args:
        victims: The `victim_matrix`: the worst case of each victim under each defense.
        tests: Test counts of each defense and seed.
        control: The undefended control, if it was measured.
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
    """Return 1 if `a` leaks more than `b`, -1 if less, else 0, and the p-value of no difference."""
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
