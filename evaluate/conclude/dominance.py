"""Pairwise comparisons of defenses, the verdict on each, and places.

Every table, figure, leaderboard and CSV file takes its verdict from `judge`. A defense is *judged*
if three conditions hold: it leaks significantly less than no defense in some respect, its claim is
not refuted, and its evaluation passes its checks. Judged defenses are compared by their
`Coordinates`. A dominates B if

- A is not worse, neither shown nor at the estimates, in accuracy, in success from nothing (per
  server) and in success given candidates;
- A's success is known wherever B's is;
- A's gammas are at most B's, for an upload and for the run;
- A is shown to be strictly better somewhere, or one of its gammas is smaller.

A judged defense is

- *dominated* if another judged one dominates it;
- otherwise *tied* if the estimates of another judged one are at least as good in all respects and
  better in one, but no difference is shown;
- otherwise *Pareto-optimal*.

Places are separate for proven defenses and for those whose privacy is empirical only. A place is
one more than the number of defenses of the same evidence that dominate and are shown to leak less.
A defense that is not judged has no place. Its verdict says why.

One seed never shows a difference in accuracy. Differences from the undefended control, in accuracy
and in leakage, are corrected for their number (Holm).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..foundations.statistics import (
    SIGNIFICANCE,
    Floats,
    accuracy_difference,
    accuracy_test,
    holm,
    sign_test,
)
from .coordinates import Coordinates

Counts = Mapping[Any, Sequence[int]]
"""Right answers and test examples, by seed."""


@dataclass(frozen=True)
class Gap:
    """How one defense compares with another: 1 if it is better, -1 if it is worse, else 0.

    Attributes:
        accuracy: Whether it is shown to be more accurate, with the spread of the seeds.
        seems: Whether it is more accurate on these seeds and test examples. This needs less, so it
            only serves to deny that two accuracies are equal.
        success: Whether it is shown to leak less, by server; absent if one of them is unknown.
    """

    accuracy: int = 0
    seems: int = 0
    success: Mapping[str, int] = field(default_factory=dict)

    @property
    def leaks_less(self) -> bool:
        """Return whether it is shown to leak less somewhere."""
        return any(sign > 0 for sign in self.success.values())

    @property
    def leaks_more(self) -> bool:
        """Return whether it is shown to leak more somewhere."""
        return any(sign < 0 for sign in self.success.values())

    @property
    def better(self) -> int:
        """Return in how many respects it is shown to be better."""
        return sum(sign > 0 for sign in (self.accuracy, *self.success.values()))

    def opposite(self) -> Gap:
        """Return how the other compares with this one."""
        success = {server: -sign for server, sign in self.success.items()}
        return Gap(-self.accuracy, -self.seems, success)


@dataclass(frozen=True)
class Dominance:
    """All pairs of defenses of one scenario and attacked round.

    Attributes:
        gaps: How the first of a pair compares with the second.
        gains: The defenses that are shown to leak less than the undefended control to some server.
        control: The undefended control; None if it was not measured.
    """

    gaps: Mapping[tuple[str, str], Gap]
    gains: frozenset[str]
    control: str | None

    def over_control(self, defense: str) -> Gap | None:
        """Return how a defense compares with the undefended control; None without one."""
        return None if self.control is None else self.gaps.get((defense, self.control), Gap())


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
    """The verdict on one defense in one setting.

    Attributes:
        kind: The verdict.
        other: The key of the defense that it is tied with or dominated by.
        detail: An addition to the verdict.
        place: Its place among the defenses of the same evidence; None if it is not judged.
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
        at: Its coordinates.
        control: Whether it is the undefended control.
        gains: Whether it is shown to leak less than the control.
        over_control: How it compares with the control; None if there is no control.
        refuted: Whether its privacy claim is refuted.
        failed: The names of the checks that its evaluation fails.
    """

    at: Coordinates
    control: bool
    gains: bool
    over_control: Gap | None
    refuted: bool
    failed: str = ""

    def not_judged(self) -> Verdict | None:
        """Return the verdict that says why it is not judged; None if it is judged."""
        if np.isnan(self.at.success["passive"]):
            return Verdict("not attacked")
        if np.isnan(self.at.accuracy):
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


def dominates(one: Coordinates, other: Coordinates, gap: Gap) -> bool:
    """Return whether one defense dominates another: see the module's docstring."""
    if gap.seems < 0 or gap.leaks_more or not one.is_no_worse(other):
        return False
    return gap.better > 0 or one.gammas != other.gammas


def judge(arms: Mapping[Key, Arm], gap: Callable[[Key, Key], Gap]) -> dict[Key, Verdict]:
    """Return the verdict on every defense of a setting: see the module's docstring.

    Args:
        arms: The defenses.
        gap: Compares the first of two defenses with the second.
    """
    found = {key: arm.not_judged() for key, arm in arms.items()}
    judged = {key: arms[key].at for key, verdict in found.items() if verdict is None}
    return {key: found[key] or _judged(key, judged, gap) for key in arms}


def _judged(key: Key, judged: Mapping[Key, Coordinates], gap: Callable[[Key, Key], Gap]) -> Verdict:
    """Return the verdict on a judged defense."""
    own = judged[key]
    gaps = {one: gap(one, key) for one in judged if one != key}
    dominating = {one: found for one, found in gaps.items() if dominates(judged[one], own, found)}
    ahead = [
        one
        for one, found in dominating.items()
        if found.leaks_less and judged[one].evidence == own.evidence
    ]
    place = 1 + len(ahead)
    if dominating:
        best = max(dominating, key=lambda one: dominating[one].better)
        return Verdict("dominated", best, place=place)
    for one in gaps:
        if judged[one].is_no_worse(own) and not own.is_no_worse(judged[one]):
            return Verdict("tied", one, place=place)
    return Verdict("Pareto-optimal", place=place)


def _beside(gap: Gap) -> str:
    """Return how a defense that shows no gain in privacy differs from the undefended control."""
    said = {1: "more accurate", -1: "less accurate", 0: ""}[gap.accuracy]
    return ", ".join(filter(None, [said, "leaks more" if gap.leaks_more else ""]))


class _Tested(NamedTuple):
    """A difference between two defenses: its sign and its p-value."""

    sign: int
    p_value: float

    def shown(self) -> int:
        return self.sign if self.p_value < SIGNIFICANCE else 0


def compare(
    victims: Mapping[str, pd.DataFrame], tests: pd.DataFrame, control: str | None
) -> Dominance:
    """Return which defenses are shown to leak less, and which to be more accurate.

    All comparisons are paired. Leakage is tested by uploads, on the victims that both defenses
    have. Accuracy is tested on the seeds that both were trained with. Without any pairs, no
    difference is significant.

    Args:
        victims: The `victim_matrix` of each server, with the same defenses.
        tests: Test counts of each defense and seed.
        control: The undefended control, if it was measured.
    """
    matrices = {server: _matrix(table) for server, table in victims.items()}
    own = tests.set_index("seed").groupby("defense")[["correct", "total"]]
    counts = {str(name): group.T.to_dict("list") for name, group in own}
    names = [str(name) for name in next(iter(victims.values()), ())]
    gaps: dict[tuple[str, str], Gap] = {}
    leaks: dict[str, _Tested] = {}
    accuracies: dict[str, _Tested] = {}
    for a, b in combinations(names, 2):
        one, other = (b, a) if a == control else (a, b)
        pairs = {
            server: _leakage(lost[one], lost[other], unit)
            for server, (lost, unit) in matrices.items()
        }
        known = {server: found for server, found in pairs.items() if found is not None}
        seems, accuracy = _accuracy(counts.get(one, {}), counts.get(other, {}))
        if other == control:
            leaks[one] = _anywhere([*known.values()])
            accuracies[one] = accuracy
        signs = {server: found.shown() for server, found in known.items()}
        gaps[one, other] = Gap(accuracy.shown(), seems, signs)
    for one, sign in _corrected(accuracies).items():
        found = gaps[one, str(control)]
        gaps[one, str(control)] = Gap(sign, found.seems, found.success)
    gains = frozenset(one for one, sign in _corrected(leaks).items() if sign > 0)
    gaps |= {(b, a): gap.opposite() for (a, b), gap in gaps.items()}
    return Dominance(gaps, gains, control)


def _matrix(victims: pd.DataFrame) -> tuple[dict[str, Floats], NDArray[np.integer[Any]]]:
    """Return the outcomes of each defense, and the upload of each outcome."""
    unit = victims.groupby(level=["seed", "observation"]).ngroup().to_numpy()
    return {str(name): victims[name].to_numpy(dtype=float) for name in victims}, unit


def _anywhere(tests: Sequence[_Tested]) -> _Tested:
    """Return whether some of several tests shows a gain, corrected for their number."""
    gains = [one.p_value for one in tests if one.sign > 0]
    return _Tested(1, min(1.0, len(tests) * min(gains)) if gains else 1.0)


def _corrected(tests: Mapping[Key, _Tested]) -> dict[Key, int]:
    """Return the signs of the differences that are significant among all of them (Holm)."""
    adjusted = holm([one.p_value for one in tests.values()])
    return {
        key: _Tested(one.sign, float(p_value)).shown()
        for (key, one), p_value in zip(tests.items(), adjusted, strict=True)
    }


def _leakage(a: Floats, b: Floats, unit: NDArray[np.integer[Any]]) -> _Tested | None:
    """Return whether `a` leaks less than `b` (1) or more (-1); None if they have no pair."""
    both = ~np.isnan(a - b)
    if not both.any():
        return None
    uploads = np.bincount(unit[both], weights=(a - b)[both])
    sign = -int(np.sign(np.sign(uploads).sum()))
    return _Tested(sign, sign_test(a[both], b[both], unit[both]))


def _accuracy(a: Counts, b: Counts) -> tuple[int, _Tested]:
    """Return whether `a` seems to be more accurate than `b`, and the test of the difference."""
    both = [(a[seed][0], b[seed][0], a[seed][1]) for seed in a if seed in b]
    if not both:
        return 0, _Tested(0, 1.0)
    first, second, total = zip(*both, strict=True)
    gap = accuracy_difference(first, second, total)
    seems = int(gap.low > 0) - int(gap.high < 0)
    return seems, _Tested(seems, accuracy_test(first, second, total))
