"""From the rows of cells to what is said of a setting: accuracy, and the strongest attack."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy.stats import t

from ..conclude.results import Conclusions
from ..foundations.errors import UserError
from ..foundations.statistics import Interval, accuracy_interval, clopper_pearson
from ..run.cells import TrainTrial

Key = TypeVar("Key", bound=Hashable)


class Trained(NamedTuple):
    """How good the models of a setting became, and how long each took."""

    accuracy: Interval
    seconds: float


def trained(results: Conclusions, trials: Mapping[Key, Sequence[TrainTrial]]) -> dict[Key, Trained]:
    """Return the accuracy after the last round, from the rows of cells that belong together."""
    cells, found = results.cells.set_index("cell"), {}
    for key, own in trials.items():
        keys = [trial.cell.key for trial in own]
        failed = cells.loc[keys].query("status != 'ok'")
        if len(failed):
            reason = failed["error"].iloc[0].partition("\n")[0]
            raise UserError(f"training under {key} failed: {reason}")
        rows = results.utility[results.utility["cell"].isin(keys)]
        last = rows[rows["round"] == rows["round"].max()]
        accuracy = predicted_accuracy(last["correct"].tolist(), last["total"].tolist())
        found[key] = Trained(accuracy, float(cells.loc[keys, "busy"].median()))
    return found


def attacked(results: Conclusions) -> dict[str, dict[str, Any]]:
    """Return what attacks on each arm achieved, as fields of a row.

    The strongest is chosen among several; its interval holds for all of them at once.
    """
    rates, worst = results.rates(), results.worst_case()
    failed = results.cells[(results.cells["kind"] == "attack") & (results.cells["status"] != "ok")]
    found = {}
    for arm, attacks in rates[~rates["baseline"]].groupby("defense"):
        ran = attacks[attacks["rate"].notna()]
        if ran.empty:
            raise UserError(f"no attack on {arm} ran")
        best = ran.sort_values("rate", kind="stable").iloc[-1]
        n = int(best["observations"])
        union = worst[worst["defense"] == arm].iloc[0]
        rate, low, high = (float(union[f"candidates_{name}"]) for name in ("rate", "low", "high"))
        found[str(arm)] = {
            "success": clopper_pearson(round(best["rate"] * n), n, 1 - 0.05 / len(ran)),
            "strongest": str(best["adversary"]) if best["rate"] > 0 else None,
            "any_attack": Interval(rate, low, high, int(union["observations"])),
            "failed": int((failed["defense"] == arm).sum()),
        }
    return found


def predicted_accuracy(
    correct: Sequence[int], total: Sequence[int], confidence: float = 0.95
) -> Interval:
    """Return the mean accuracy over seeds, and where one more run will be.

    Whoever follows the advice trains once, with yet another seed: the interval is that of a
    prediction, by Student's t, and contains the one of the mean. One seed predicts nothing, and
    its interval is that of the test set alone.

    Args:
        correct: Correctly classified test examples, per seed.
        total: Test examples, per seed.
        confidence: Confidence level.
    """
    mean = accuracy_interval(correct, total, confidence)
    if mean.n < 2:
        return mean
    spread = float(np.std(np.array(correct) / np.array(total), ddof=1))
    half = float(t.isf((1 - confidence) / 2, mean.n - 1)) * spread * math.sqrt(1 + 1 / mean.n)
    low, high = max(0.0, mean.value - half), min(1.0, mean.value + half)
    return Interval(mean.value, min(mean.low, low), max(mean.high, high), mean.n)
