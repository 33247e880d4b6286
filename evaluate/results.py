"""The rows of a run, as tables, and what they amount to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, TypeVar

import pandas as pd
from markupsafe import escape

from . import analysis
from .checks import Check, conclusion, run_checks
from .frontier import Frontier, make_frontiers
from .labels import labelled

T = TypeVar("T")


def _once(method: Callable[[Results], T]) -> Callable[[Results], T]:
    """Keep what a method returns; whoever wants to change it copies it."""
    name = f"_{method.__name__}"

    @wraps(method)
    def kept(self: Results) -> T:
        if name not in self.__dict__:
            self.__dict__[name] = method(self)
        value: T = self.__dict__[name]
        return value

    return kept


@dataclass(frozen=True, eq=False)
class Results:
    """Everything that a run's reports are derived from; each conclusion is drawn once.

    Attributes:
        config: The configuration of the run.
        panel: Version of the adversary panel.
        cells: One row per planned cell: its labels, `kind`, `status` (`ok`, `error`, `timeout`,
            `crash`, `not needed` because nothing was left to find, or `missing`), `error`,
            `seconds` and `busy`.
        attacks: One row per cell, observation and victim: labels and the fields of `AttackRow`.
        scores: One row per cell, observation, victim and metric: labels and the fields of `Score`.
        utility: One row per cell and evaluated round: labels and the fields of `UtilityRow`.
        renderings: One row per victim shown: labels and the fields of `Rendering`.
        guarantees: One row per training cell whose defense claims differential privacy: labels
            and the fields of `GuaranteeRow`.
        replays: One row per scenario and defense: labels and the fields of `ReplayRow`.
        notes: What was warned of before the first cell.
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
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            if isinstance(value, pd.DataFrame):
                object.__setattr__(self, name, labelled(value))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: whether to trust the run, and every frontier."""
        trust = f"<p><strong>{escape(conclusion(self.checks()))}</strong></p>"
        return trust + "".join(frontier._repr_html_() for frontier in self.frontiers())

    @_once
    def rates(self) -> pd.DataFrame:
        """Return the success of every attack: see `analysis.attack_rates`."""
        return analysis.attack_rates(self)

    @_once
    def worst_victims(self) -> pd.DataFrame:
        """Return whom each server identified: see `analysis.worst_victims`."""
        return analysis.worst_victims(self)

    @_once
    def worst_case(self) -> pd.DataFrame:
        """Return the success of the panel as one adversary: see `analysis.worst_case`."""
        return analysis.worst_case(self)

    @_once
    def final_utility(self) -> pd.DataFrame:
        """Return the test accuracy of every defense: see `analysis.final_utility`."""
        return analysis.final_utility(self)

    @_once
    def utility_curve(self) -> pd.DataFrame:
        """Return the accuracy over rounds: see `analysis.utility_curve`."""
        return analysis.utility_curve(self)

    @_once
    def claims(self) -> pd.DataFrame:
        """Return what is claimed and what was audited: see `analysis.claims`."""
        return analysis.claims(self)

    def part(self, scenario: str, checkpoint: int) -> Results:
        """Return the rows of one scenario and attacked round, with those of its trainings."""
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

    @_once
    def frontiers(self) -> list[Frontier]:
        """Return the privacy-utility frontier of every scenario and attacked round."""
        return make_frontiers(self)

    @_once
    def checks(self) -> list[Check]:
        """Return whether the evaluation can be trusted, question by question."""
        return run_checks(self)

    def frontier(self, scenario: str | None = None, checkpoint: int | None = None) -> Frontier:
        """Return the frontier of one scenario and attacked round.

        Args:
            scenario: Which scenario; not needed if there is one only.
            checkpoint: Which attacked round; likewise.

        Raises:
            ValueError: If there is no such frontier, or more than one.
        """
        found = [
            frontier
            for frontier in self.frontiers()
            if scenario in (None, frontier.scenario) and checkpoint in (None, frontier.checkpoint)
        ]
        if len(found) == 1:
            return found[0]
        known = [f"{f.scenario!r} at checkpoint {f.checkpoint}" for f in self.frontiers()]
        raise ValueError(
            f"scenario {scenario!r} and checkpoint {checkpoint!r} must leave one frontier, got "
            f"{len(found)}; there are: {', '.join(known) or 'none, since nothing was attacked'}"
        )
