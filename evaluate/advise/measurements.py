"""Accuracy and strongest attack of a setting, from the rows of its cells."""

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
    """Accuracy of the models of a setting, and seconds per training run."""

    accuracy: Interval
    seconds: float


def trained(results: Conclusions, trials: Mapping[Key, Sequence[TrainTrial]]) -> dict[Key, Trained]:
    """Return accuracy after the last round and training time, for each group of trials."""
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
    """Return the success of attacks on each arm, as fields of a row.

    The interval of the strongest attack is corrected for the choice among all attacks.
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
    """Return the mean accuracy over seeds, with a prediction interval for one more run.

    A user who follows the advice trains once, with another seed. So this is a prediction interval
    (Student's t). It contains the interval of the mean. With one seed no prediction is possible,
    and the interval covers only the sampling of the test set.

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
