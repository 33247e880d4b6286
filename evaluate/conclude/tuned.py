"""The settings that tuning chose, from the rows of its trainings."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

_ARM = ["scenario", "defense"]


def tried_settings(tunings: pd.DataFrame) -> pd.DataFrame:
    """Return one row per defense and tried setting, and which one is chosen.

    The chosen setting has the highest mean accuracy on the validation examples over its trainings.
    Of equal ones, it is the one with the smaller loss, then the earlier one.
    """
    names = [*_ARM, "attempt", "settings"]
    shares = tunings.assign(accuracy=tunings["correct"] / tunings["total"])
    found = shares.groupby(names, sort=False).agg(
        accuracy=("accuracy", "mean"), loss=("loss", "mean"), trainings=("accuracy", "size")
    )
    found = found.reset_index().sort_values("attempt", kind="stable")
    best = found.sort_values(
        ["accuracy", "loss", "attempt"], ascending=[False, True, True], kind="stable"
    ).drop_duplicates(_ARM)
    found = found.assign(chosen=found.index.isin(best.index))
    order = tunings.drop_duplicates(_ARM)[_ARM].reset_index(drop=True)
    return order.merge(found, on=_ARM)


def chosen_settings(tunings: pd.DataFrame, scenario: str) -> dict[str, dict[str, Any]]:
    """Return the chosen settings of every defense in a scenario, by its name."""
    tried = tried_settings(tunings[tunings["scenario"] == scenario])
    best = tried[tried["chosen"]]
    return {
        str(defense): json.loads(settings)
        for defense, settings in zip(best["defense"], best["settings"], strict=True)
    }
