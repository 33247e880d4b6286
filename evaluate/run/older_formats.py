"""What results files of older formats hold, in the present form.

Format 1 has neither bounds nor guarantees. In formats 1 and 2 PSNR and SSIM are columns of the
attacks, pictures are raw pixels, and an attack without a score was not applicable; labels have
no options, and threats are sentences. Up to format 3 the replays of defenses were not examined.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..foundations.foreign import parse_json
from ..modality.rendering import png

REARRANGED = (1, 2)
"""Formats that hold in another form what they have."""

_METRICS = ("psnr", "ssim", "psnr_transformed")
_THREATS = {
    "passive: reads what honest training reveals": "passive",
    "active: sends crafted parameters": "parameters",
    "active: sends a crafted architecture": "architecture",
}


def older_labels(database: sqlite3.Connection, labels: pd.DataFrame) -> pd.DataFrame:
    """Return labels of a file of format 1 or 2 as they are now; options come from the cells."""
    configs = dict(database.execute("SELECT cell, config FROM plan"))
    cells = [parse_json(configs[key]) for key in labels["cell"]]
    labels = labels.reindex(columns=labels.columns.union(["family", "adversary", "threat"]))
    defenses, adversaries = (
        pd.Series([cell.get(role, {}) for cell in cells], index=labels.index, dtype=object)
        for role in ("defense", "adversary")
    )
    chained = defenses.map(lambda defense: "links" in defense).astype(bool)
    return labels.assign(
        family=labels["family"].mask(chained, defenses[chained].map(_family)),
        defense_options=defenses.map(_options),
        adversary_name=labels["adversary"],
        adversary_options=adversaries.map(_options),
        threat=labels["threat"].replace(_THREATS),
    )


def older_frames(
    database: sqlite3.Connection, labels: pd.DataFrame, attacks: pd.DataFrame
) -> dict[str, pd.DataFrame]:
    """Return the tables that are not in a file of format 1 or 2 as they are now."""
    old = pd.read_sql_query("SELECT * FROM attacks ORDER BY cell, observation", database)
    key = ["cell", "observation", "victim"]
    scores = old.melt(key, list(_METRICS), "metric", "value").dropna(subset="value")
    scores["value"] = pd.to_numeric(scores["value"])
    transformed = old.assign(transformed=old["psnr_transformed"].notna())
    attacks = attacks.drop(columns="transformed").merge(transformed[[*key, "transformed"]], on=key)
    outcome = attacks["reason"].isna().map({True: "scored", False: "not applicable"})
    return {
        "attacks": attacks.assign(outcome=outcome),
        "scores": labels.merge(scores, on="cell"),
        "renderings": labels.merge(_renderings(database), on="cell"),
    }


def _family(method: Mapping[str, Any]) -> str:
    links = [_family(link) for link in method.get("links", [])]
    return " then ".join(links) or str(method["name"]).rpartition(":")[2]


def _options(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as `scenario.options` does; of a chain, by place and name of the link."""
    if "links" not in method:
        return dict(method.get("options", {}))
    return {
        f"{number} {_family(link)} {name}": value
        for number, link in enumerate(method["links"], 1)
        for name, value in _options(link).items()
    }


def _renderings(database: sqlite3.Connection) -> pd.DataFrame:
    pictures = pd.read_sql_query("SELECT * FROM pictures ORDER BY cell, observation", database)
    shapes = [parse_json(text) for text in pictures.pop("shape")]
    drawn = [len(shape) == 3 and shape[0] in (1, 3) for shape in shapes]
    for name in ("truth", "guess"):
        pictures[name] = [
            png(pixels, shape) if image else b""
            for pixels, shape, image in zip(pictures[name], shapes, drawn, strict=True)
        ]
    return pictures[drawn].assign(media="image/png")
