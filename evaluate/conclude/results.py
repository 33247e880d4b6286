"""The rows of a run, with all conclusions from them."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import escape

from .checks import Judged, conclusion
from .frontier import Frontier, make_frontiers
from .tables import once


@dataclass(frozen=True, eq=False)
class Conclusions(Judged):
    """The rows of a run, with its checks and frontiers. Each conclusion is computed once."""

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the conclusion of the checks and every frontier."""
        trust = f"<p><strong>{escape(conclusion(self.checks()))}</strong></p>"
        return trust + "".join(frontier._repr_html_() for frontier in self.frontiers())

    @once
    def frontiers(self) -> list[Frontier]:
        """Return the privacy-utility frontier of every scenario and attacked round."""
        return make_frontiers(self)

    def frontier(self, scenario: str | None = None, checkpoint: int | None = None) -> Frontier:
        """Return the frontier of one scenario and attacked round.

        Args:
            scenario: The name of the scenario. Optional if there is only one.
            checkpoint: The attacked round. Optional if there is only one.

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
            f"scenario {scenario!r} and checkpoint {checkpoint!r} must select one frontier, got "
            f"{len(found)}; choose from: {', '.join(known) or 'none, because no attack ran'}"
        )
