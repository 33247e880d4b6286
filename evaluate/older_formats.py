"""What results files of older formats hold, in the present form.

Format 1 has neither bounds nor guarantees. In formats 1 and 2 PSNR and SSIM are columns of the
attacks, pictures are raw pixels, and an attack without a score was not applicable.
"""

from __future__ import annotations

import json
import sqlite3

import pandas as pd

from .rendering import png

_METRICS = ("psnr", "ssim", "psnr_transformed")


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


def _renderings(database: sqlite3.Connection) -> pd.DataFrame:
    pictures = pd.read_sql_query("SELECT * FROM pictures ORDER BY cell, observation", database)
    shapes = [json.loads(text) for text in pictures.pop("shape")]
    drawn = [len(shape) == 3 and shape[0] in (1, 3) for shape in shapes]
    for name in ("truth", "guess"):
        pictures[name] = [
            png(pixels, shape) if image else b""
            for pixels, shape, image in zip(pictures[name], shapes, drawn, strict=True)
        ]
    return pictures[drawn].assign(media="image/png")
