"""The rows of a run, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd


@dataclass(frozen=True)
class Results:
    """Everything that a run's reports are derived from.

    Attributes:
        config: The configuration of the run.
        panel: Version of the adversary panel.
        cells: One row per planned cell: its labels, `kind`, `status` (`ok`, `error`, `timeout`,
            `crash`, `not needed`
            because nothing was left to find, or `missing`), `error`, `seconds` and `busy`.
        attacks: One row per cell, observation and victim: labels and the fields of `AttackRow`.
        utility: One row per cell and evaluated round: labels and the fields of `UtilityRow`.
        scores: One row per cell, observation, victim and metric: labels and the fields of `Score`.
        renderings: One row per victim shown: labels and the fields of `Rendering`.
        guarantees: One row per training cell whose defense claims differential privacy: labels
            and the fields of `GuaranteeRow`.
    """

    config: Mapping[str, Any]
    panel: str
    cells: pd.DataFrame
    attacks: pd.DataFrame
    scores: pd.DataFrame
    utility: pd.DataFrame
    renderings: pd.DataFrame
    guarantees: pd.DataFrame
