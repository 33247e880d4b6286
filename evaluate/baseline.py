"""DP-SGD of equal utility beside every defense without a guarantee: what a heuristic has to beat.

References:
    Aerni, Zhang, Tramer. "Evaluations of Machine Learning Privacy Defenses are Misleading." CCS
    2024. https://arxiv.org/abs/2404.17399
"""

from __future__ import annotations

import pandas as pd

from .checks import DP_BASELINE
from .statistics import Interval, paired_difference

ADVICE = f"add `{{name: {DP_BASELINE}, noise_multiplier: [0.01, 0.1, 1.0]}}` to its defenses"
"""What a run without the baseline lacks."""

_COLUMNS = [
    *("defense", "partner", "match", "difference", "low", "high", "verdict"),
    "candidates_verdict",
]


def heuristics(points: pd.DataFrame) -> pd.DataFrame:
    """Return the defenses that were measured and claim no differential privacy."""
    private = points["epsilon"].notna() | points["control"] | (points["family"] == DP_BASELINE)
    return points[~private].dropna(subset=["accuracy", "success"])


def equal_utility(
    points: pd.DataFrame, victims: pd.DataFrame, given_candidates: pd.DataFrame
) -> pd.DataFrame:
    """Return, for every heuristic, the DP-SGD that it has to be compared with, and who wins.

    Where some DP-SGD's accuracy is within the heuristic's interval, the nearest of them is the
    partner, and worst-case success is compared on the same victims. Otherwise the partner is the
    nearest in accuracy, and only dominance decides: a heuristic is worse if it leaks more than
    the next DP-SGD that is more accurate, and better if it leaks less than the next that is less
    accurate. Nothing is interpolated.

    Args:
        points: `Frontier.points` of one scenario and checkpoint.
        victims: `victim_matrix` of the same, for a passive server.
        given_candidates: The same for one that is given candidates.

    Returns:
        Columns defense, `partner`, `match` (`equal` or `nearest`), `difference` in worst-case
        success (heuristic minus partner) with `low` and `high`, `verdict`, and
        `candidates_verdict`, the same where attacks are given candidates. Empty without DP-SGD.
    """
    placed = points.dropna(subset=["accuracy", "success"])
    private = placed[(placed["family"] == DP_BASELINE) & (placed["strength"] > 0)]
    rivals = heuristics(points)
    if private.empty or rivals.empty:
        return pd.DataFrame(columns=_COLUMNS)
    rows = []
    for _, rival in rivals.iterrows():
        equal = private[private["accuracy"].between(rival["accuracy_low"], rival["accuracy_high"])]
        partner = _nearest(equal if len(equal) else private, rival)
        gap = _difference(victims, rival, partner)
        given = pd.notna(rival["candidates_rate"]) and pd.notna(partner["candidates_rate"])
        rows.append(
            (
                rival["defense"],
                partner["defense"],
                "equal" if len(equal) else "nearest",
                *(gap.value, gap.low, gap.high),
                _verdict(rival, partner, private, victims, equal=bool(len(equal))),
                _verdict(rival, partner, private, given_candidates, equal=bool(len(equal)))
                if given
                else "",
            )
        )
    return pd.DataFrame(rows, columns=_COLUMNS)


def _nearest(arms: pd.DataFrame, rival: pd.Series) -> pd.Series:
    nearest: pd.Series = arms.loc[(arms["accuracy"] - rival["accuracy"]).abs().idxmin()]
    return nearest


def _difference(victims: pd.DataFrame, rival: pd.Series, partner: pd.Series) -> Interval:
    """Return how much more often the rival's victims are identified, paired."""
    both = victims[[rival["defense"], partner["defense"]]].dropna()
    unit = both.groupby(level=["seed", "observation"]).ngroup()
    return paired_difference(both.iloc[:, 0], both.iloc[:, 1], unit)


def _verdict(
    rival: pd.Series,
    partner: pd.Series,
    private: pd.DataFrame,
    victims: pd.DataFrame,
    *,
    equal: bool,
) -> str:
    if equal:
        gap = _difference(victims, rival, partner)
        if gap.low > 0:
            return "worse: leaks more at equal accuracy"
        if gap.high < 0:
            return "better: leaks less at equal accuracy"
        return "no difference shown at equal accuracy"
    above = private[private["accuracy"] > rival["accuracy"]].sort_values("accuracy").head(1)
    below = private[private["accuracy"] < rival["accuracy"]].sort_values("accuracy").tail(1)
    if any(_difference(victims, rival, arm).low > 0 for _, arm in above.iterrows()):
        return "worse: leaks more and is less accurate"
    if any(_difference(victims, rival, arm).high < 0 for _, arm in below.iterrows()):
        return "better: leaks less and is more accurate"
    return f"undecided: add {DP_BASELINE} with a noise multiplier {_between(above, below)}"


def _between(above: pd.DataFrame, below: pd.DataFrame) -> str:
    """Return which noise would be as accurate: less noise is more accurate."""
    if above.empty:
        return f"below {below['strength'].iloc[0]:g}"
    if below.empty:
        return f"above {above['strength'].iloc[0]:g}"
    least, most = sorted([above["strength"].iloc[0], below["strength"].iloc[0]])
    return f"between {least:g} and {most:g}"
