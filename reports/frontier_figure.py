"""The frontier as a chart: accuracy against success from nothing, with epsilon in the labels."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from leakfrontier.evaluate.conclude.coordinates import proof_text
from leakfrontier.evaluate.conclude.labels import describe_defenses, epsilon_text, percent, rows

from .charts import (
    COLOURS,
    CONTROL,
    INK,
    NARROW,
    OUTLINE,
    PAPER,
    SHAPES,
    STAIRS,
    WIDTH,
    Chart,
    Figure,
    Layers,
    slug,
    styled,
)
from .label_places import place_labels, text_sizes

_FONT = 11.5
_LETTER_C = "M0.45,-0.5A0.65,0.65,0,1,0,0.45,0.5"  # a symbol, so that it needs no room
_LONGEST = 30  # characters of a label
_ABOVE = 34  # pixels for labels above the plot, since many defenses leak everything
_POINT = [
    *("defense", "series", "sweep", "strength", "checkpoint", "pareto"),
    *("label", "label_x", "label_y", "end_x", "end_y", "joined"),
    *("accuracy", "accuracy_low", "accuracy_high", "accuracy_text"),
    *("success", "success_low", "success_high", "success_text", "blind_text"),
    *("candidates_rate", "candidates_text", "proof", "contains"),
    *("p_pareto", "verdict", "epsilon_text", "private", "refuted"),
]


def frontier_figure(scenario: str, points: pd.DataFrame, width: int = WIDTH) -> Figure | None:
    """Return accuracy against success from nothing, one panel per checkpoint.

    Args:
        scenario: The name of the scenario.
        points: `Frontier.points` of all its checkpoints.
        width: Width of the plot in files, in pixels.
    """
    points = points.dropna(subset=["accuracy", "advantage"]).copy()
    if points.empty:
        return None
    arms = describe_defenses(points)
    points = points.merge(arms[["defense", "setting", "knob", "sweep", "order"]], on="defense")
    # The control is drawn last, on top of weak defenses at the same point.
    points = points.sort_values("order", ascending=False, ignore_index=True)
    points["series"] = _series(points)
    points["blind_text"] = points["blind"].map(percent)
    points["proof"] = [proof_text(point) for point in rows(points)]
    points["accuracy_text"] = [
        f"{percent(p.accuracy)} [{100 * p.accuracy_low:.1f}, {100 * p.accuracy_high:.1f}]"
        for p in rows(points)
    ]
    points["private"] = points["evidence"] == "proven"
    points["epsilon_text"] = points["epsilon"].map(epsilon_text)
    points["epsilon_text"] += points["refuted"].map({True: " refuted", False: ""})
    points["words"] = points["defense"].map(point_names(points))
    wide, unlabelled = _panels(points, width, 440, 2)
    narrow, _ = _panels(points, NARROW, 420, 1)
    return Figure(
        f"frontier-{slug(scenario)}",
        f"Privacy against utility: {scenario}",
        "Each point is a defense, and bars are 95 % intervals. Better is down and to the right. "
        "Points with a dark outline are Pareto-optimal by their verdict, and the grey staircase "
        "joins them. Lines join the strengths of one family. Points may coincide. Thin lines lead "
        "from each point to its label, which shows the value of its family's parameter. A "
        "letter c marks the success given candidates; without it, this is unknown. Ticks mark "
        "proven defenses, with epsilon over the whole training run. Crosses on hollow points mark "
        "refuted claims. Accuracy is that of the final round."
        + (f" {unlabelled} points have no room for a label: see the table." if unlabelled else ""),
        styled(wide),
        styled(narrow),
    )


def point_names(points: pd.DataFrame) -> dict[str, str]:
    """Return the label of each point: family, setting and claimed epsilon."""
    claims = points.drop_duplicates("defense").set_index("defense")
    names = {}
    for arm in rows(describe_defenses(points)):
        epsilon, refuted = claims.loc[arm.defense, ["epsilon", "refuted"]]
        words = f"{arm.family} {arm.setting}".strip()
        words = words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "\u2026"
        if pd.notna(epsilon):
            words += f", \u03b5 {epsilon_text(epsilon)}" + (" refuted" if refuted else "")
        names[arm.defense] = "no defense" if arm.control else words
    return names


def _panels(points: pd.DataFrame, width: int, height: int, columns: int) -> tuple[Chart, int]:
    """Return one panel per checkpoint, and the number of points without room for a label."""
    several = points["checkpoint"].nunique() > 1
    if several:
        width, height = (width - 40 * (columns - 1)) // columns, height - 40
    margin = 0.03
    lowest, highest = points["accuracy_low"].min(), points["accuracy_high"].max()
    domain = (max(0.0, lowest - margin), min(1.0, highest + margin))
    labels = [
        _place_labels(group, domain, width, height) for _, group in points.groupby("checkpoint")
    ]
    points = points.join(pd.concat(labels))
    layers = _frontier_layers(points, domain, width, height)
    chart: Chart = layers
    if several:
        header = alt.Header(
            labelExpr="+datum.value ? 'rounds up to ' + datum.value : 'round 0'", labelFontSize=13
        )
        facet = alt.Facet("checkpoint:O", title=None, header=header)
        chart = layers.facet(facet=facet, columns=columns)
    return chart, int((points["label"] == "").sum())


def _series(points: pd.DataFrame) -> pd.Series:
    knobs = points["knob"].where(points["knob"] == "", " (" + points["knob"] + ")")
    return points["family"] + knobs


def _frontier_layers(
    points: pd.DataFrame, domain: tuple[float, float], width: int, height: int
) -> Layers:
    legend_columns = max(1, width // 220)
    colour, shape = _family_scales(points[::-1].drop_duplicates("series"), legend_columns)
    x = alt.X(
        "accuracy:Q",
        title="Test accuracy, final round",
        axis={"format": "%", "tickCount": max(3, width // 90)},
        scale={"domain": list(domain), "nice": False},
    )
    y = alt.Y(
        "success:Q",
        title="Success from nothing, passive server",
        axis={"format": "%"},
        scale={"domain": [0, 1]},
    )
    base = alt.Chart().encode(x=x, y=y)
    optimal = alt.datum.pareto
    stairs = (
        base.transform_filter(optimal)
        .mark_line(interpolate="step-before", strokeWidth=6, color=STAIRS)
        .encode(order=alt.Order("accuracy:Q"))
    )
    sweeps = base.mark_line(opacity=0.55, strokeWidth=1.5).encode(
        color=colour, detail=alt.Detail("sweep:N"), order=alt.Order("strength:Q")
    )
    across = base.mark_rule(opacity=0.7).encode(
        x=alt.X("accuracy_low:Q"), x2=alt.X2("accuracy_high:Q"), color=colour
    )
    down = base.mark_rule(opacity=0.7).encode(
        y=alt.Y("success_low:Q"), y2=alt.Y2("success_high:Q"), color=colour
    )
    ticks = (
        base.transform_filter(alt.datum.private)
        .mark_point(shape="stroke", size=500, angle=45, strokeWidth=2, opacity=1)
        .encode(color=colour)
    )
    tooltip = [
        alt.Tooltip("defense:N", title="defense"),
        alt.Tooltip("accuracy_text:N", title="accuracy, final round"),
        alt.Tooltip("contains:N", title="its interval contains"),
        alt.Tooltip("success_text:N", title="from nothing, passive server"),
        alt.Tooltip("blind_text:N", title="blind guess"),
        alt.Tooltip("candidates_text:N", title="given candidates"),
        alt.Tooltip("proof:N", title="proof allows"),
        alt.Tooltip("epsilon_text:N", title="epsilon"),
        alt.Tooltip("p_pareto:Q", title="P(Pareto-optimal)", format=".2f"),
        alt.Tooltip("verdict:N", title="verdict"),
    ]
    marks = base.encode(color=colour, shape=shape, tooltip=tooltip)
    dots = (
        marks.transform_filter("!datum.refuted")
        .mark_point(filled=True, opacity=1)
        .encode(
            size=alt.condition(optimal, alt.value(130), alt.value(55)),
            stroke=alt.condition(optimal, alt.value(OUTLINE), alt.value(PAPER)),
            strokeWidth=alt.condition(optimal, alt.value(1.6), alt.value(0.5)),
        )
    )
    given = (
        base.transform_filter("isValid(datum.candidates_rate)")
        .mark_point(shape=_LETTER_C, size=90, strokeWidth=2.2, opacity=1)
        .encode(y=alt.Y("candidates_rate:Q"), color=colour)
    )
    refuted = alt.datum.refuted
    hollow = marks.transform_filter(refuted).mark_point(filled=False, size=55, opacity=1)
    crosses = base.transform_filter(refuted).mark_text(text="\u2715", fontSize=22)
    crosses = crosses.encode(color=colour)
    leaders = (
        base.transform_filter(alt.datum.joined)
        .mark_rule(strokeWidth=1)
        .encode(x2=alt.X2("end_x:Q"), y2=alt.Y2("end_y:Q"), color=colour)
    )
    names = base.encode(x=alt.X("label_x:Q"), y=alt.Y("label_y:Q"), text=alt.Text("label:N"))
    halo = names.mark_text(
        fontSize=_FONT, color=PAPER, stroke=PAPER, strokeWidth=3, strokeJoin="round"
    )
    text = names.mark_text(fontSize=_FONT, color=INK)
    layers = alt.layer(
        *(stairs, sweeps, across, down, given, leaders, ticks, dots, hollow, crosses, halo, text),
        data=points[_POINT],
    )
    return layers.properties(width=width, height=height)


def _place_labels(
    points: pd.DataFrame, domain: tuple[float, float], width: int, height: int
) -> pd.DataFrame:
    """Return the position of each point's label, and the end of the line to it.

    If there is no room for all labels, the most important points get theirs.
    """
    ranked = points.sort_values(["control", "refuted", "pareto", "private"], ascending=False)
    start = np.array([domain[0], 0.0])
    scale = np.array([(domain[1] - domain[0]) / width, 1 / height])  # one pixel
    at = (ranked[["accuracy", "success"]].to_numpy(float) - start) / scale
    room = (0.0, 0.0, float(width), float(height + _ABOVE))
    limits = ["accuracy_low", "accuracy_high", "success_low", "success_high"]
    low, high, less, more = ranked[limits].to_numpy(float).T
    thin = np.ones(len(ranked))
    across = ((low + high) / 2 - start[0], at[:, 1] * scale[1], (high - low) / 2, thin * scale[1])
    down = (at[:, 0] * scale[0], (less + more) / 2, thin * scale[0], (more - less) / 2)
    bars = np.vstack([np.column_stack(across), np.column_stack(down)]) / np.tile(scale, 2)
    found = place_labels(at, text_sizes(ranked["words"].tolist(), _FONT), room, bars)
    lines = [
        (*np.multiply(place[:2], scale) + start, *np.multiply(place[2:4], scale) + start)
        if place
        else (*start, *start)
        for place in found
    ]
    places = pd.DataFrame(lines, ranked.index, ["label_x", "label_y", "end_x", "end_y"])
    return places.assign(
        label=[word if place else "" for word, place in zip(ranked["words"], found, strict=True)],
        joined=[place is not None and place.joined for place in found],
    )


def _family_scales(series: pd.DataFrame, columns: int) -> tuple[alt.Color, alt.Shape]:
    """Return colour and shape by family. The undefended control is always the dark circle."""
    control = series.loc[series["control"], "series"]
    families = series.loc[~series["control"], "series"].tolist()
    colours = dict.fromkeys(control, CONTROL)
    colours |= {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(families)}
    shapes = dict.fromkeys(control, "circle")
    shapes |= {name: SHAPES[i % len(SHAPES)] for i, name in enumerate(families)}
    domain = list(colours)
    legend = {
        **{"title": "Defense", "symbolSize": 90, "labelLimit": 260},
        **{"orient": "bottom", "columns": columns},
    }
    return (
        alt.Color(
            "series:N",
            scale={"domain": domain, "range": list(colours.values())},
            legend=legend,
        ),
        alt.Shape(
            "series:N",
            scale={"domain": domain, "range": list(shapes.values())},
            legend=legend,
        ),
    )
