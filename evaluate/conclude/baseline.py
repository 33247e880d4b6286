"""Compares every defense without a guarantee (a heuristic) with DP-SGD of equal utility.

References:
    Aerni, Zhang, Tramer. "Evaluations of Machine Learning Privacy Defenses are Misleading." CCS
    2024. https://arxiv.org/abs/2404.17399
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd

from ..foundations.statistics import Interval, paired_difference
from .checks import DP_BASELINE, dp_baseline
from .dominance import Dominance

ADVICE = f"add `{{name: {DP_BASELINE}, noise_multiplier: [0.01, 0.1, 1.0]}}` to its defenses"
"""The advice for a run without the baseline."""

_COLUMNS = [
    *("defense", "partner", "match", "difference", "low", "high", "verdict"),
    "candidates_verdict",
]


def heuristics(points: pd.DataFrame) -> pd.DataFrame:
    """Return the measured defenses whose privacy claim is absent or refuted."""
    claimed = points["epsilon"].notna() & ~points["refuted"]
    private = claimed | points["control"] | (points["family"] == DP_BASELINE)
    return points[~private].dropna(subset=["accuracy", "success"])


def equal_utility(
    points: pd.DataFrame, order: Dominance, victims: Mapping[str, pd.DataFrame]
) -> pd.DataFrame:
    """Return every heuristic with its DP-SGD partner, and the verdict on the pair.

    If some DP-SGD settings do not differ significantly in accuracy from the heuristic, the
    partner is the nearest of them. Both are then compared on the same victims. A heuristic that
    leaks no less than the undefended control is never better.

    Otherwise the partner is the DP-SGD nearest in accuracy, and only dominance decides. The
    heuristic is worse if it leaks more than the next more accurate DP-SGD. It is better if it
    leaks less than the next less accurate one.

    Nothing is interpolated. A DP-SGD whose claim is refuted does not take part.

    Args:
        points: `Frontier.points` of one scenario and checkpoint.
        order: The pairwise comparisons of these points.
        victims: Their `victim_matrix` by server.

    Returns:
        Columns defense, `partner`, `match` (`equal` or `nearest`), `difference` in success
        from nothing (heuristic minus partner) with `low` and `high`, `verdict`, and
        `candidates_verdict` (the verdict if attacks are given candidates). Empty without DP-SGD.
    """
    placed = points.dropna(subset=["accuracy", "success"])
    private = placed[dp_baseline(placed)]
    rivals = heuristics(points)
    if private.empty or rivals.empty:
        return pd.DataFrame(columns=_COLUMNS)
    rows = []
    for _, rival in rivals.iterrows():
        pairs = [(name, rival["defense"]) for name in private["defense"]]
        shown = np.array([order.gaps[pair].seems for pair in pairs])
        equal, above, below = (private[shown == sign] for sign in (0, 1, -1))
        partner = _nearest(equal if len(equal) else private, rival)
        if len(equal):
            verdict = partial(_at_equal_accuracy, rival=rival, partner=partner)
        else:
            verdict = partial(_by_dominance, rival=rival, above=above, below=below)
        gap = _difference(victims["passive"], rival, partner)
        given = pd.notna(rival["candidates_rate"]) and pd.notna(partner["candidates_rate"])
        rows.append(
            (
                rival["defense"],
                partner["defense"],
                "equal" if len(equal) else "nearest",
                *(gap.value, gap.low, gap.high),
                verdict(victims["passive"]),
                verdict(victims["candidates"]) if given else "",
            )
        )
    return pd.DataFrame(rows, columns=_COLUMNS)


def _nearest(arms: pd.DataFrame, rival: pd.Series) -> pd.Series:
    nearest: pd.Series = arms.loc[(arms["accuracy"] - rival["accuracy"]).abs().idxmin()]
    return nearest


def _difference(victims: pd.DataFrame, rival: pd.Series, partner: pd.Series) -> Interval:
    """Return how much more often victims are identified under the rival, as a paired difference."""
    both = victims[[rival["defense"], partner["defense"]]].dropna()
    unit = both.groupby(level=["seed", "observation"]).ngroup()
    return paired_difference(both.iloc[:, 0], both.iloc[:, 1], unit)


def _at_equal_accuracy(victims: pd.DataFrame, rival: pd.Series, partner: pd.Series) -> str:
    gap = _difference(victims, rival, partner)
    if gap.low > 0:
        return "worse: leaks more at equal accuracy"
    if gap.high < 0:
        better = "better: leaks less at equal accuracy"
        return better if rival["gains"] else "no gain shown over no defense"
    return "no difference shown at equal accuracy"


def _by_dominance(
    victims: pd.DataFrame, rival: pd.Series, above: pd.DataFrame, below: pd.DataFrame
) -> str:
    above, below = above.nsmallest(1, "accuracy"), below.nlargest(1, "accuracy")
    if any(_difference(victims, rival, arm).low > 0 for _, arm in above.iterrows()):
        return "worse: leaks more and is less accurate"
    if any(_difference(victims, rival, arm).high < 0 for _, arm in below.iterrows()):
        return "better: leaks less and is more accurate"
    return f"undecided: add {DP_BASELINE} with a noise multiplier {_between(above, below)}"


def _between(above: pd.DataFrame, below: pd.DataFrame) -> str:
    """Return the range of noise that would be as accurate; less noise is more accurate."""
    if above.empty:
        return f"below {below['strength'].iloc[0]:g}"
    if below.empty:
        return f"above {above['strength'].iloc[0]:g}"
    least, most = sorted([above["strength"].iloc[0], below["strength"].iloc[0]])
    return f"between {least:g} and {most:g}"
