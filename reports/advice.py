"""The page with advice on DP parameters: recommendation, curves, table and warnings."""

from __future__ import annotations

import json
from pathlib import Path

import altair as alt
import pandas as pd

from leakfrontier.evaluate.advise.advice import Advice
from leakfrontier.evaluate.advise.question import AdviceRow
from leakfrontier.evaluate.advise.tables import bounded, sigma
from leakfrontier.evaluate.conclude.labels import number

from .charts import AXIS, COLOURS, OUTLINE, SOFT, WIDTH, Figure, styled
from .html import render, write
from .tables import ShownTable

PAGE_NAME, DOCUMENT_NAME = "advice.html", "advice.json"

SERIES = {
    "test accuracy": COLOURS[0],
    "proven bound, one upload": COLOURS[1],
    "proven bound, whole run": COLOURS[4],
    "measured success": COLOURS[2],
}
"""The curves and their colours."""


def write_advice(advice: Advice, folder: Path) -> Path:
    """Write advice into a folder, as a page and as JSON, and return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    document = json.dumps(advice.document(), indent=2, allow_nan=False)
    write(folder / DOCUMENT_NAME, f"{document}\n".encode())
    page = folder / PAGE_NAME
    write(page, _render(advice).encode())
    return page


def _render(advice: Advice) -> str:
    tables = {
        "Over the noise": [row for row in advice.rows if not row.searched],
        "The search for C and the learning rate": [row for row in advice.rows if row.searched],
    }
    return render(
        "advice.html.j2",
        advice=advice,
        answer=answer(advice),
        figure=curves_figure(advice),
        tables=[(title, _table(advice, rows)) for title, rows in tables.items()],
        levers=_levers(advice),
        observation=_observation(advice),
    )


def answer(advice: Advice) -> str:
    """Return the advice in one sentence."""
    row = advice.recommended
    if row is None:
        return advice.reasons[0]
    parts = [f"noise multiplier {sigma(row.noise_multiplier)}"]
    if row.max_norm is not None and row.lr is not None:
        parts += [f"clipping norm {row.max_norm:g}", f"learning rate {row.lr:.2g}"]
    text = f"Take {', '.join(parts)}: epsilon {number(row.epsilon['pld'])}"
    text += f", reconstruction at most {bounded(row.bound)}"
    return text + (f", accuracy {row.accuracy}." if row.accuracy is not None else ".")


def _table(advice: Advice, rows: list[AdviceRow]) -> ShownTable:
    return ShownTable(
        tuple(advice.columns),
        tuple(tuple(column(row) for column in advice.columns.values()) for row in rows),
        tuple("recommended" if row is advice.recommended else "" for row in rows),
    )


def _levers(advice: Advice) -> list[tuple[str, ShownTable]]:
    """Return the tables of other changes. The first is about other runs, if there are any."""
    return [
        (
            "Other runs" if advice.levers and not place else title,
            ShownTable(tuple(header), tuple(map(tuple, rows))),
        )
        for place, (title, (header, rows)) in enumerate(advice.tables.items())
    ]


def _observation(advice: Advice) -> ShownTable:
    return ShownTable(
        ("Noise", "The server sees", "sigma", "Epsilon", "Bound, both"),
        tuple(
            (
                *(point.name, point.sees, sigma(point.noise_multiplier)),
                *(number(point.epsilon), bounded(point.bound)),
            )
            for point in advice.observation_points
        ),
    )


def curves_figure(advice: Advice) -> Figure:
    """Return accuracy, proven bounds and measured success over the noise multiplier."""
    rows = [row for row in advice.rows if row.noise_multiplier and not row.searched]
    points = pd.DataFrame([point for row in rows for point in _points(row)])
    drawn = [name for name in SERIES if name in set(points["series"])]
    scale = alt.Scale(domain=drawn, range=[SERIES[name] for name in drawn])
    base = alt.Chart(points).encode(
        x=alt.X(
            "sigma:Q", title="Noise multiplier", scale=alt.Scale(type="log", nice=False, padding=30)
        ),
        y=alt.Y(
            "value:Q",
            title=None,
            axis=alt.Axis(format="%"),
            scale=alt.Scale(domain=[0, 1.06], nice=False),
        ),
        color=alt.Color("series:N", title=None, scale=scale, legend=alt.Legend(orient="top")),
    )
    tooltip = [
        alt.Tooltip("series:N", title=" "),
        alt.Tooltip("sigma:Q", title="noise multiplier", format=".4g"),
        alt.Tooltip("epsilon:N", title="epsilon (PLD)"),
        alt.Tooltip("text:N", title="value"),
    ]
    layers = [
        base.mark_line(),
        base.mark_point(filled=True, size=70, opacity=1).encode(tooltip=tooltip),
        alt.Chart(pd.DataFrame({"blind": [advice.question.prior]}))
        .mark_rule(strokeDash=[4, 4], color=AXIS)
        .encode(y="blind:Q"),
        alt.Chart(points.drop_duplicates("sigma"))
        .mark_text(fontSize=11, color=SOFT)
        .encode(x="sigma:Q", y=alt.datum(1.03), text="label:N"),
    ]
    if points["low"].notna().any():
        limits = base.properties(data=points.dropna(subset=["low"]))
        layers.append(limits.mark_rule(strokeWidth=2).encode(y="low:Q", y2="high:Q"))
    if advice.recommended is not None:
        place = pd.DataFrame({"sigma": [advice.recommended.noise_multiplier]})
        layers.append(
            alt.Chart(place)
            .mark_rule(color=OUTLINE)
            .encode(x="sigma:Q", y=alt.datum(0), y2=alt.datum(1))
        )
    chart = alt.layer(*layers).properties(width=WIDTH, height=380)
    return Figure(
        "curves",
        "Accuracy, proven bounds and measured success",
        _caption(advice),
        styled(chart),
        layout="fluid",
    )


def _points(row: AdviceRow) -> list[dict[str, object]]:
    """Return a point of each curve. Only measured points have bars."""
    place = {
        "sigma": row.noise_multiplier,
        "epsilon": number(row.epsilon["pld"]),
        "label": f"eps {number(row.epsilon['pld'])}",
    }
    bounds = {
        "proven bound, one upload": row.upload_bound,
        "proven bound, whole run": row.run_bound,
    }
    points: list[dict[str, object]] = [
        {**place, "series": name, "value": value, "text": bounded(value)}
        for name, value in bounds.items()
    ]
    measured = {"test accuracy": row.accuracy, "measured success": row.success}
    for name, interval in measured.items():
        if interval is not None:
            limits = {"value": interval.value, "low": interval.low, "high": interval.high}
            points.append({**place, "series": name, **limits, "text": str(interval)})
    return [{"low": None, "high": None, **point} for point in points]


def _caption(advice: Advice) -> str:
    caption = (
        "The black line is the recommended noise, and the dashed line is a blind guess. Epsilon is "
        "printed above each noise multiplier. "
    )
    control = next((row for row in advice.rows if not row.noise_multiplier), None)
    if control is not None and control.accuracy is not None:
        caption += (
            f"Bars are 95 % intervals. Without clipping and noise, the accuracy is "
            f"{control.accuracy}, and the best attack identifies {control.success}. "
        )
    return caption + (
        "Compare measured success with the bound for one upload. The bound for the run is for an "
        "attacker who combines all uploads and does not know which of them contain the victim."
    )
