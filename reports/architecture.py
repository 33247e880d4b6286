"""A drawing of a model's layers: for each, its unknowns and the equations that an upload gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from leakfrontier.evaluate.foundations.errors import UserError

_COLOURS = {"unknowns": "#888888", "weight constraints": "#4c78a8", "gradient rank": "#e45756"}


def save_drawing(analysis: Mapping[str, Any], path: Path) -> None:
    """Save a drawing of an analysis (`evaluate.architecture`) as SVG or PNG."""
    if path.suffix not in (".svg", ".png"):
        raise UserError(f"a drawing must be .svg or .png, got {path}")
    rows, order = [], []
    for place, layer in enumerate(analysis["layers"], 1):
        label = f"{place} {layer['name']}"
        label += f": {layer['note']}" if layer["kind"] == "obstacle" else f" ({layer['kind']})"
        order.append(label)
        counts = (layer["unknowns"], layer["weight"], layer["gradient_rank"])
        if layer["kind"] == "linear":
            counts = (layer["unknowns"], 0, layer["unknowns"])
        rows += [
            {"layer": label, "what": what, "count": max(value, 0.5)}
            for what, value in zip(_COLOURS, counts, strict=True)
        ]
    chart = (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar()
        .encode(
            y=alt.Y("layer:N", sort=order, title=None, axis=alt.Axis(labelLimit=360)),
            yOffset=alt.YOffset("what:N", sort=list(_COLOURS)),
            x=alt.X("count:Q", scale=alt.Scale(type="log", domainMin=0.5), title="entries"),
            color=alt.Color(
                "what:N",
                scale=alt.Scale(domain=list(_COLOURS), range=list(_COLOURS.values())),
                title=None,
            ),
        )
        .properties(title=str(analysis["model"]), width=420)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.save(str(path))
