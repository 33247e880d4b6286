"""What cells cost: learned from cells that have ended, for cells that have not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..foundations.rows import Cell

_TRUST_IN_WIDER = 0.2
"""The weight of the mean over a wider kind of cells, in cells of the kind itself."""

_FIXED = 0.3
"""The share of an attack's cost that does not depend on the number of its uploads."""


class _Means:
    """Means by kind, each drawn a little towards that of a wider kind."""

    def __init__(self) -> None:
        self._totals: dict[object, float] = defaultdict(float)
        self._counts = Counter[object]()

    def add(self, kinds: Iterable[object], value: float) -> None:
        for kind in kinds:
            self._totals[kind] += value
            self._counts[kind] += 1

    def of(self, kinds: Iterable[object]) -> float | None:
        """Return the mean of the nearest kind; None if not even the widest is known."""
        found: float | None = None
        for kind in reversed([*kinds]):
            if count := self._counts[kind]:
                weight = 0.0 if found is None else _TRUST_IN_WIDER
                found = (self._totals[kind] + weight * (found or 0.0)) / (count + weight)
        return found


@dataclass
class _Arm:
    """A scenario, defense, seed and checkpoint: where a cascade narrows attacks, stage by stage."""

    waiting: int = 0
    running: int = 0
    admitted: list[tuple[Cell, float]] = field(default_factory=list)
    after_first_stage: float | None = None
    left: float = 1.0


class Durations:
    """The expected seconds of cells.

    The cost of an unseen kind is that of the nearest known one: the same attack in another
    scenario, then any attack. A cascade may shorten or skip cells. The expected share of their
    uploads is learned from arms all of whose cells could run.
    """

    def __init__(self, planned: Iterable[Cell]) -> None:
        self._seconds, self._shares, self._later_shares = _Means(), _Means(), _Means()
        self._arms: dict[object, _Arm] = defaultdict(_Arm)
        for cell in planned:
            self._arms[_place(cell)].waiting += 1

    def admit(self, cell: Cell, planned: Cell) -> None:
        """Learn how much is needed of a planned cell that can run now."""
        arm, share = self._arms[_place(planned)], _share(cell, planned)
        if arm.admitted and not arm.running and arm.after_first_stage is None:
            arm.after_first_stage = share
        arm.waiting, arm.running = arm.waiting - 1, arm.running + 1
        arm.left = min(arm.left, share)
        arm.admitted.append((planned, share))
        if not arm.waiting and _may_be_shortened(planned):
            for one, needed in arm.admitted:
                self._shares.add(_attacks_like(one), needed)
                if arm.after_first_stage:
                    self._later_shares.add(_attacks_like(one), needed / arm.after_first_stage)

    def learn(self, cell: Cell, planned: Cell, seconds: float | None) -> None:
        """Learn what a cell cost that has ended; None if it did not run now."""
        self._arms[_place(planned)].running -= 1
        if seconds is not None:
            self._seconds.add(_kinds(cell), seconds / _work(_share(cell, planned)))

    def of_admitted(self, cell: Cell, planned: Cell) -> float | None:
        """Return the expected seconds of a cell that can run; None if nothing is known."""
        seconds = self._seconds.of(_kinds(planned))
        return None if seconds is None else seconds * _work(_share(cell, planned))

    def of_waiting(self, planned: Cell) -> float | None:
        """Return the expected seconds of a cell that waits for others."""
        seconds = self._seconds.of(_kinds(planned))
        return None if seconds is None else seconds * _work(self._expected_share(planned))

    def _expected_share(self, planned: Cell) -> float:
        if not _may_be_shortened(planned):
            return 1.0
        arm = self._arms[_place(planned)]
        if arm.after_first_stage is None:
            share = self._shares.of(_attacks_like(planned))
            return 1.0 if share is None else share
        later = self._later_shares.of(_attacks_like(planned))
        return min(arm.left, arm.after_first_stage * (1.0 if later is None else later))


def _kinds(cell: Cell) -> Iterator[object]:
    """Yield what the duration of a cell mostly depends on, then less and less of it."""
    scenario, family = cell.labels.get("scenario"), cell.labels.get("family")
    method = (cell.kind, cell.labels.get("adversary"), cell.labels.get("setting"))
    yield method, scenario, family
    yield method, scenario
    yield method
    yield cell.kind
    yield None


def _attacks_like(cell: Cell) -> Iterator[object]:
    """Yield what the needed share of an attack mostly depends on, then less and less of it."""
    names = ("adversary", "knows_defense", "scenario", "family")
    labels = tuple(cell.labels.get(name) for name in names)
    for length in range(len(labels), 1, -1):
        yield labels[:length]
    yield None


def _place(cell: Cell) -> object:
    names = ("scenario", "defense", "seed", "checkpoint")
    return cell.kind, *(cell.labels.get(name) for name in names)


def _share(cell: Cell, planned: Cell) -> float:
    """Return the share of the planned uploads that are attacked."""
    uploads, all_uploads = (len(one.config.get("observations", ())) for one in (cell, planned))
    return uploads / all_uploads if all_uploads else 1.0


def _work(share: float) -> float:
    """Return the share of the cost that a share of the uploads takes."""
    return _FIXED + (1 - _FIXED) * share if share else 0.0


def _may_be_shortened(planned: Cell) -> bool:
    """Return whether a cascade decides on a cell: an attack on a defended client."""
    return planned.kind == "attack" and planned.labels.get("family") != "none"
