"""The rows of a run, as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, Self, TypeVar

import pandas as pd

from .labels import labelled

T = TypeVar("T")
S = TypeVar("S", bound="Tables")


def once(method: Callable[[S], T]) -> Callable[[S], T]:
    """Cache the result of a method. Callers must copy it before they change it."""
    name = f"_{method.__name__}"

    @wraps(method)
    def kept(self: S) -> T:
        if name not in self.__dict__:
            self.__dict__[name] = method(self)
        value: T = self.__dict__[name]
        return value

    return kept


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables from which all reports of a run are derived.

    Attributes:
        config: The configuration of the run.
        panel: Version of the adversary panel.
        cells: One row per planned cell: its labels, `kind`, `status` (`ok`, `error`, `timeout`,
            `crash`, `not needed` if nothing was left to find, or `missing`), `error`, `seconds`
            and `busy`.
        attacks: One row per cell, observation and victim: labels and the fields of `AttackRow`.
        scores: One row per cell, observation, victim and metric: labels and the fields of `Score`.
        utility: One row per cell and evaluated round: labels and the fields of `UtilityRow`.
        renderings: One row per victim shown: labels and the fields of `Rendering`.
        guarantees: One row per training cell whose defense claims differential privacy: labels
            and the fields of `GuaranteeRow`.
        replays: One row per scenario and defense: labels and the fields of `ReplayRow`.
        probes: One row per scenario and defense: labels and the fields of `ProbeRow`. It is empty
            for runs of older versions.
        tunings: One row per training that tunes settings: labels and the fields of `TuningRow`. It
            is empty for runs of older versions.
        notes: The warnings that were given before the first cell.
    """

    config: Mapping[str, Any]
    panel: str
    cells: pd.DataFrame
    attacks: pd.DataFrame
    scores: pd.DataFrame
    utility: pd.DataFrame
    renderings: pd.DataFrame
    guarantees: pd.DataFrame
    replays: pd.DataFrame
    probes: pd.DataFrame
    tunings: pd.DataFrame
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            if isinstance(value, pd.DataFrame):
                object.__setattr__(self, name, labelled(value))

    def part(self, scenario: str, checkpoint: int) -> Self:
        """Return the rows of one scenario and attacked round, including those of its trainings."""
        frames = {one.name: getattr(self, one.name) for one in fields(self)}
        here: dict[str, Any] = {
            name: frame[
                (frame["scenario"] == scenario)
                & (frame["checkpoint"].isna() | (frame["checkpoint"] == checkpoint))
            ]
            for name, frame in frames.items()
            if isinstance(frame, pd.DataFrame)
        }
        return replace(self, **here)
