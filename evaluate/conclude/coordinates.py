"""The coordinates by which defenses are compared, and the sentence that states them.

- `accuracy`: the test accuracy of the trained model.
- Success from nothing, per server of `THREATS`: the share of victims that attacks without
  candidates identify.
- Success given candidates: the share that a passive server identifies if its attacks may be given
  candidates. Without an attack that uses them it is unknown.
  If an attack does not apply to a model because the defense changed the model, both assume that
  it identifies the victims that it identifies without a defense.
- Proven gamma, for one upload and for the whole run: the success that no attack exceeds. It is 1
  without a claim, if the claim is refuted, and if epsilon is above `LARGEST_EPSILON`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, isnan, nan
from typing import Any, Literal

import pandas as pd

from leakfrontier.adversaries.base import THREATS

from ..foundations.statistics import rounded_up
from ..privacy.bounds import reconstruction
from .analysis import SERVERS, column, possible_bounds
from .labels import epsilon_text, rows

LARGEST_EPSILON = 20.0
"""A claim with a larger epsilon proves nothing that matters."""

GIVEN = "candidates"
"""The server of the attacks that are given candidates."""

Evidence = Literal["proven", "empirical only"]
"""What the privacy of a defense rests on. Defenses with different evidence have separate places."""

_CLAIM = ["epsilon", "delta", "refuted", "noise_multiplier", "sample_rate", "steps", "unit"]


@dataclass(frozen=True)
class Coordinates:
    """The measurements and proofs of one defense.

    Attributes:
        accuracy: Test accuracy; NaN if it was not measured.
        success: Success by server of `SERVERS`; NaN if it is unknown. A server of `THREATS` without
            an attack of its own has the success of the next weaker one.
        gammas: Proven gamma for an upload and for the run.
    """

    accuracy: float
    success: Mapping[str, float]
    gammas: tuple[float, float] = (1.0, 1.0)

    @property
    def evidence(self) -> Evidence:
        """Return what the privacy rests on."""
        return "proven" if min(self.gammas) < 1 else "empirical only"

    def proves(self, other: Coordinates) -> bool:
        """Return whether its gammas are at most another's."""
        return all(a <= b for a, b in zip(self.gammas, other.gammas, strict=True))

    def is_known(self, other: Coordinates) -> bool:
        """Return whether its success is known wherever another's is."""
        return not any(
            isnan(self.success.get(server, nan)) and not isnan(rate)
            for server, rate in other.success.items()
        )

    def is_no_worse(self, other: Coordinates) -> bool:
        """Return whether its estimates and gammas are at least as good as another's."""
        leaks = (self.success.get(server, nan) > rate for server, rate in other.success.items())
        return (
            self.accuracy >= other.accuracy
            and self.proves(other)
            and self.is_known(other)
            and not any(leaks)
        )


def coordinates(point: pd.Series[Any]) -> Coordinates:
    """Return the coordinates of a point of `Frontier.points`."""
    success: dict[str, float] = {}
    known = nan
    for server in SERVERS:
        rate = float(point.get(success_column(server, "assumed"), point[success_column(server)]))
        if server in THREATS:
            known = rate = known if isnan(rate) else rate
        success[server] = rate
    gammas = (float(point["gamma_upload"]), float(point["gamma_run"]))
    return Coordinates(float(point["accuracy"]), success, gammas)


def success_column(server: str, name: str = "") -> str:
    """Return the name of a server's success, or of its `low`, `high`, `text` or `assumed`."""
    if server != "passive":
        return column(server, name or "rate")
    return f"success_{name}" if name else "success"


def with_proofs(points: pd.DataFrame, claims: pd.DataFrame, attacks: pd.DataFrame) -> pd.DataFrame:
    """Return points with their claims, gammas and evidence.

    Args:
        points: The defenses of one scenario and attacked round.
        claims: `Analysed.claims` of this scenario.
        attacks: The attack rows of this scenario and round.
    """
    bounds = attacks.assign(bound=possible_bounds(attacks)).groupby("defense")
    found = bounds.agg(upload=("bound", "max"), look_alikes=("candidates", "min"))
    points = points.merge(claims[["defense", *_CLAIM]], on="defense", how="left")
    points = points.merge(found, left_on="defense", right_index=True, how="left")
    points["epsilon"] = pd.to_numeric(points["epsilon"])
    points["refuted"] = points["refuted"].eq(True)
    proofs = [_gammas(row) for row in rows(points)]
    points["gamma_upload"], points["gamma_run"] = [list(one) for one in zip(*proofs, strict=True)]
    points["evidence"] = [Coordinates(nan, {}, one).evidence for one in proofs]
    return points.drop(columns=["upload", "noise_multiplier", "sample_rate", "steps"])


def _gammas(row: Any) -> tuple[float, float]:  # noqa: ANN401 - a row of a table
    """Return the proven gamma for an upload and for the run."""
    if row.refuted or not 0 <= row.epsilon <= LARGEST_EPSILON:
        return 1.0, 1.0
    upload = 1.0 if pd.isna(row.upload) else min(1.0, float(row.upload))
    return upload, _of_the_run(row)


def _of_the_run(row: Any) -> float:  # noqa: ANN401 - a row of a table
    """Return gamma for all uploads of a run and one guess among the look-alikes."""
    if not row.look_alikes >= 1:
        return 1.0
    prior = 1 / float(row.look_alikes)
    if pd.isna(row.noise_multiplier):
        return min(1.0, exp(row.epsilon) * prior + float(row.delta))
    try:
        found = reconstruction(prior, row.sample_rate, row.noise_multiplier, int(row.steps))
    except (ValueError, OverflowError):  # files from others may contain impossible claims
        return 1.0
    return max(found, prior)


def headline(point: pd.Series[Any]) -> str:
    """Return what attacks reach against a defense, and what is proven, in one sentence."""
    return f"{_from_nothing(point)}; {_given(point)}; {_proof(point)}."


def proof_text(point: Any) -> str:  # noqa: ANN401 - a row of a table
    """Return the proven gammas as text; "no proof" if they are 1."""
    if point.evidence != "proven":
        return "no proof"
    return f"{100 * point.gamma_upload:.1f} %; run {100 * point.gamma_run:.1f} %"


def _from_nothing(point: pd.Series[Any]) -> str:
    """Return the success from nothing, of the servers that are shown to beat a blind guess."""
    known = [server for server in THREATS if pd.notna(point[success_column(server)])]
    if not known:
        return "From nothing, no attack ran"
    beaten = [
        server
        for server in known
        if point[success_column(server, "low")] > point[column(server, "blind")]
    ]
    if not beaten:
        return "From nothing, no attack is shown to beat guessing"
    weakest, strongest = beaten[0], beaten[-1]
    text = f"From nothing, {SERVERS[weakest]} identifies {_short(point, weakest)}"
    if _short(point, weakest) == _short(point, strongest):
        return text
    return f"{text}, {SERVERS[strongest]} {_short(point, strongest)}"


def _given(point: pd.Series[Any]) -> str:
    if pd.isna(point[column(GIVEN, "rate")]):
        return "given candidates unknown"
    return f"given {point['look_alikes']:.0f} candidates {_short(point, GIVEN)}"


def _short(point: pd.Series[Any], server: str) -> str:
    names = ("", "low", "high")
    rate, low, high = (100 * float(point[success_column(server, name)]) for name in names)
    return f"{rate:.0f} % [{low:.0f}, {high:.0f}]"


def _proof(point: pd.Series[Any]) -> str:
    if point["refuted"]:
        return "no proof, because its privacy claim is refuted"
    if pd.isna(point["epsilon"]):
        return "no proof, because it claims no guarantee"
    if not point["epsilon"] <= LARGEST_EPSILON:
        return f"no proof, because epsilon is {epsilon_text(point['epsilon'])}"
    epsilon, delta = (f"{rounded_up(float(point[name]), 2):g}" for name in ("epsilon", "delta"))
    claim = f"epsilon {epsilon}, delta {delta.replace('e-0', 'e-')}, per {point['unit']}"
    return f"proof allows {100 * point['gamma_upload']:.0f} %; {claim}"
