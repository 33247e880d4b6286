"""The curves of membership attacks on logarithmic axes, with the proven bound.

References:
    Carlini, Chien, Nasr, Song, Terzis, Tramer. "Membership Inference Attacks From First
    Principles." S&P 2022. https://arxiv.org/abs/2112.03570
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.privacy.bounds import Bounds
from leakfrontier.evaluate.privacy.membership import ROC

from .charts import COLOURS, CONTROL, WIDTH, Figure, slug, styled
from .html import write


def membership_figure(
    found: Mapping[str, ROC | Exception],
    bounds: Bounds | None = None,
    title: str = "Membership from one upload",
) -> Figure:
    """Return true against false positive rates of every attack, with limits and the bound.

    Curves begin at the smallest rate that the scores can resolve.

    Args:
        found: The result of `membership`: scores by attack, or the reason why there are none.
        bounds: The bounds of the game, such as `replacement_bounds`; None without a guarantee.
        title: The title of the figure.

    Raises:
        UserError: If no attack was applicable.
    """
    curves = {name: roc for name, roc in found.items() if isinstance(roc, ROC)}
    if not curves:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.items())
        raise UserError(f"no attack was applicable: {reasons}")
    least = min(roc.least_rate for roc in curves.values())
    data = pd.concat([roc.table().assign(attack=name) for name, roc in curves.items()])
    for column in ("tpr", "tpr_low", "tpr_high"):
        data[column] = data[column].clip(lower=least)  # the end of the axes
    known = np.geomspace(least, 1, 100)
    lines = [pd.DataFrame({"fpr": known, "tpr": known, "line": "chance"})]
    if bounds is not None:
        power = bounds.power(known)
        lines.append(pd.DataFrame({"fpr": known, "tpr": power, "line": "proven bound"}))
    absent = [f"{name} ({one})" for name, one in found.items() if name not in curves]
    return Figure(
        f"membership-{slug(title)}",
        title,
        "True against false positive rate, with 95 % intervals. Dotted: guessing."
        + (" Dashed: the bound of the guarantee." if bounds is not None else "")
        + (f" Not applicable: {', '.join(absent)}." if absent else ""),
        styled(_layers(data, pd.concat(lines), least, list(curves))),
    )


def write_membership(
    found: Mapping[str, ROC | Exception], bounds: Bounds | None, title: str, folder: Path
) -> None:
    """Write the curves of every attack: membership.png, .svg and .csv."""
    figure = membership_figure(found, bounds, title)
    write(folder / "membership.png", figure.png)
    write(folder / "membership.svg", figure.svg.encode())
    tables = [
        roc.table(bounds).assign(attack=name) for name, roc in found.items() if isinstance(roc, ROC)
    ]
    write(folder / "membership.csv", pd.concat(tables).to_csv(index=False).encode())


def _layers(
    data: pd.DataFrame, lines: pd.DataFrame, least: float, attacks: list[str]
) -> alt.LayerChart | alt.FacetChart:
    scale = alt.Scale(type="log", domain=[least, 1])
    axis = alt.Axis(format="~%", tickCount=4)
    x = alt.X("fpr:Q", title="False positive rate", scale=scale, axis=axis)
    y = alt.Y("tpr:Q", title="True positive rate", scale=scale, axis=axis)
    colour = alt.Color(
        "attack:N",
        title="Attack",
        scale=alt.Scale(domain=attacks, range=COLOURS[: len(attacks)]),
        legend=alt.Legend(orient="bottom"),
    )
    base = alt.Chart(data).encode(x=x, color=colour)
    band = base.mark_area(opacity=0.2).encode(y=alt.Y("tpr_low:Q", scale=scale), y2="tpr_high:Q")
    curve = base.mark_line(strokeWidth=2).encode(
        y=y,
        tooltip=[
            "attack:N",
            alt.Tooltip("fpr:Q", format=".2%"),
            alt.Tooltip("tpr:Q", format=".1%"),
        ],
    )
    references = (
        alt.Chart(lines)
        .mark_line(color=CONTROL, strokeWidth=1.5)
        .encode(
            x=x,
            y=y,
            strokeDash=alt.StrokeDash(
                "line:N",
                title=None,
                scale=alt.Scale(domain=["chance", "proven bound"], range=[[2, 3], [7, 4]]),
                legend=alt.Legend(orient="bottom"),
            ),
        )
    )
    return alt.layer(band, curve, references).properties(width=WIDTH // 2, height=WIDTH // 2)
