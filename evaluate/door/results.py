"""Results of a run for Python users: tables, a chart, a page."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import altair as alt

from leakfrontier.reports import write_report
from leakfrontier.reports.charts import unvalidated
from leakfrontier.reports.frontier_figure import frontier_figure

from ..conclude.frontier import Frontier
from ..conclude.labels import rounds_named
from ..conclude.results import Conclusions
from ..foundations.errors import UserError, writable


@dataclass(frozen=True, eq=False, repr=False)
class Results(Conclusions):
    """The results of a run. Notebooks display each table.

    Attributes:
        folder: Where the rows are stored.
    """

    folder: Path = Path()

    @classmethod
    def of(cls, conclusions: Conclusions, folder: Path) -> Self:
        """Return the results that are stored in a folder."""
        parts = {one.name: getattr(conclusions, one.name) for one in fields(Conclusions)}
        return cls(**parts, folder=folder)

    def __repr__(self) -> str:
        arms = [f"{one.scenario}, {rounds_named(one.checkpoint)}" for one in self.frontiers()]
        return f"<Results in {self.folder}: {'; '.join(arms) or 'nothing was attacked'}>"

    def frontier(self, scenario: str | None = None, checkpoint: int | None = None) -> Frontier:
        """Return a privacy-utility frontier: accuracy and success from nothing of every defense.

        Args:
            scenario: Name of the scenario. By default the first. `frontiers()` has all.
            checkpoint: The attacked round. By default the first.
        """
        if scenario is None and checkpoint is None and self.frontiers():
            return self.frontiers()[0]
        return super().frontier(scenario, checkpoint)

    def plot(
        self, scenario: str | None = None, checkpoint: int | None = None
    ) -> alt.LayerChart | alt.FacetChart | alt.ConcatChart:
        """Return the frontier as an Altair chart that you can change, show and save.

        Args:
            scenario: As for `frontier`.
            checkpoint: As for `frontier`.
        """
        frontier = self.frontier(scenario, checkpoint)
        with unvalidated():
            figure = frontier_figure(frontier.scenario, frontier.points)
        if figure is None:
            raise UserError("there is nothing to plot: no defense was both trained and attacked")
        return figure.chart

    def report(self, folder: Path | str | None = None) -> Path:
        """Write `report.html` with its tables and figures. Return the path of the page.

        Args:
            folder: Folder for the page. By default the folder of the results.
        """
        return write_report(writable(self.folder if folder is None else Path(folder)), self)
