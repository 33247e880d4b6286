"""Tables of an advice. Promises (bounds, noise) are rounded up, to the safe side."""

from __future__ import annotations

from collections.abc import Callable

from ..conclude.labels import number
from ..foundations.statistics import rounded_up
from .clipping import ClippingPoint
from .levers import Lever
from .question import DIGITS, AdviceRow


def sigma(value: float) -> str:
    """Return a noise multiplier with all its digits."""
    return f"{value:.{DIGITS}g}"


def bounded(share: float) -> str:
    """Return an upper bound on a share in percent, rounded up."""
    return f"{rounded_up(100 * share, 3):g} %"


def _optional(value: object) -> str:
    return "" if value is None else str(value)


COLUMNS: dict[str, Callable[[AdviceRow], str]] = {
    "sigma": lambda row: sigma(row.noise_multiplier),
    "C": lambda row: "" if row.max_norm is None else f"{row.max_norm:g}",
    "lr": lambda row: "" if row.lr is None else f"{row.lr:.2g}",
    "rounds": lambda row: str(row.rounds),
    "eps PLD": lambda row: number(row.epsilon["pld"]),
    "PRV": lambda row: number(row.epsilon["prv"]),
    "RDP": lambda row: number(row.epsilon["rdp"]),
    "bound, run": lambda row: bounded(row.run_bound),
    "bound, upload": lambda row: bounded(row.upload_bound),
    "bound, both": lambda row: bounded(row.bound),
    "best attack": lambda row: _optional(row.success),
    "any attack": lambda row: _optional(row.any_attack),
    "accuracy": lambda row: _optional(row.accuracy),
    "s": lambda row: "" if row.seconds is None else f"{row.seconds:.0f}",
}
"""The columns of the table of an advice."""

LEVER_COLUMNS: dict[str, Callable[[Lever], str]] = {
    "change": lambda lever: lever.name,
    "eps, same sigma": lambda lever: number(lever.epsilon),
    "sigma, same target": lambda lever: sigma(lever.noise_multiplier),
    "noise of a round": lambda lever: f"x {lever.round_noise:.2f}",
    "noise of the run": lambda lever: f"x {lever.run_noise:.2f}",
    "accuracy": lambda lever: _optional(lever.accuracy),
}
"""The columns of the table of levers."""

CLIPPING_COLUMNS: dict[str, Callable[[ClippingPoint], str]] = {
    "C": lambda point: f"{point.max_norm:g}",
    "clipped, first": lambda point: f"{point.first.share:.0%}",
    "clipped, last": lambda point: f"{point.last.share:.0%}",
    "noise / signal, first": lambda point: _ratio(point.first.noise_over_signal),
    "noise / signal, last": lambda point: _ratio(point.last.noise_over_signal),
    "accuracy": lambda point: str(point.accuracy),
}
"""The columns of the table of clipping norms."""


def _ratio(value: float | None) -> str:
    return "no signal" if value is None else f"{value:.2g}"
