"""What the command `membership` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leakfrontier.adversaries import NotApplicable

from ..privacy.bounds import Bounds
from ..privacy.membership import LEAST_FALSE_POSITIVES, RATES, ROC

Found = Mapping[str, ROC | NotApplicable]


@dataclass(frozen=True)
class MembershipReport:
    """Results of the attacks, and the bounds on them."""

    title: str
    found: Found
    bounds: Bounds | None
    uploads: int

    @property
    def rates(self) -> list[float]:
        """Return the false positive rates that this number of uploads can resolve."""
        return [rate for rate in RATES if rate >= LEAST_FALSE_POSITIVES / self.uploads]

    @property
    def permitted(self) -> dict[str, float] | None:
        """Return the largest value that the guarantee permits, for each column."""
        if self.bounds is None:
            return None
        rates = {_column(rate): self.bounds.membership(rate) for rate in self.rates}
        return {"advantage": self.bounds.advantage(), **rates}

    @property
    def exceeding(self) -> list[str]:
        """Return the attacks that are significantly above the permitted values."""
        bounds = self.bounds
        if bounds is None:
            return []
        return [
            name
            for name, roc in self.found.items()
            if isinstance(roc, ROC)
            and (
                roc.advantage().low > bounds.advantage()
                or any(point.exceeds(bounds) for point in roc.reported().values())
            )
        ]

    def document(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        attacks = [
            {"attack": name, "not_applicable": str(roc)}
            if isinstance(roc, NotApplicable)
            else {
                "attack": name,
                "auc": roc.auc,
                **{column: asdict(value) for column, value in _columns(roc).items()},
            }
            for name, roc in self.found.items()
        ]
        return {
            "setting": self.title,
            "uploads": self.uploads,
            "attacks": attacks,
            "permitted": self.permitted,
            "exceeding": self.exceeding,
        }

    def print(self, console: Console) -> None:
        """Print the attacks, what is permitted, and notes."""
        console.print(f"membership: {self.title}", soft_wrap=True, markup=False)
        table = Table(box=None)
        table.add_column("")
        for name in ("advantage", *map(_column, self.rates)):
            table.add_column(name, justify="right")
        for name, roc in self.found.items():
            if isinstance(roc, ROC):
                table.add_row(name, *(escape(str(value)) for value in _columns(roc).values()))
        if self.permitted is not None:
            table.add_row("permitted", *(f"{100 * one:.1f} %" for one in self.permitted.values()))
        console.print(table)
        for text in self._notes():
            console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _notes(self) -> list[str]:
        absent = {name: one for name, one in self.found.items() if isinstance(one, NotApplicable)}
        return [
            *(f"{name}: not applicable: {reason}" for name, reason in absent.items()),
            "Permitted: if the guarantee holds, no attack exceeds this value."
            if self.bounds is not None
            else "The defense claims no differential privacy by a Gaussian mechanism, so no bound "
            "on the attacks is proven.",
            *(
                f"{name} is above the permitted value: the defense does not seem to keep its "
                "claim. Test the claim with `leakfrontier audit`."
                for name in self.exceeding
            ),
            *(
                f"A false positive rate of {100 * rate:g} % needs "
                f"{round(LEAST_FALSE_POSITIVES / rate)} uploads."
                for rate in RATES
                if rate not in self.rates
            ),
        ]


def _columns(roc: ROC) -> dict[str, Any]:
    rates = {_column(rate): point.true_positive_rate for rate, point in roc.reported().items()}
    return {"advantage": roc.advantage(), **rates}


def _column(rate: float) -> str:
    return f"TPR at FPR {100 * rate:g} %"
