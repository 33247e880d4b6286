"""The frontier as a chart: accuracy against worst-case advantage, with epsilon along the way."""

from __future__ import annotations

import altair as alt
import pandas as pd

from leakfrontier.evaluate.labels import describe_defenses, epsilon_text, percent, rows

from .charts import COLOURS, CONTROL, SHAPES, WIDTH, Chart, Figure, Layers, slug, styled

_POINT = [
    *("defense", "series", "sweep", "strength", "checkpoint", "pareto"),
    *("label", "label_x", "label_y"),
    *("accuracy", "accuracy_low", "accuracy_high", "accuracy_text"),
    *("shown", "advantage_low", "advantage_high", "advantage_text", "success_text"),
    *("contains", "p_pareto", "verdict", "epsilon_text", "private", "refuted"),
]


def frontier_figure(scenario: str, points: pd.DataFrame) -> Figure | None:
    """Return accuracy against worst-case advantage, one panel per checkpoint.

    Args:
        scenario: Its name.
        points: `Frontier.points` of all its checkpoints.
    """
    points = points.dropna(subset=["accuracy", "advantage"]).copy()
    if points.empty:
        return None
    arms = describe_defenses(points)
    points = points.merge(arms[["defense", "setting", "knob", "sweep", "order"]], on="defense")
    # The control is drawn last, on top of weak defenses that share its place.
    points = points.sort_values("order", ascending=False, ignore_index=True)
    points["series"] = _series(points)
    points["shown"] = points["advantage"].clip(lower=0)
    for limit in ("advantage_low", "advantage_high"):
        points[limit] = points[limit].clip(lower=0)
    points["accuracy_text"] = [
        f"{percent(p.accuracy)} [{100 * p.accuracy_low:.1f}, {100 * p.accuracy_high:.1f}]"
        for p in rows(points)
    ]
    claimed = points["epsilon"].notna()
    points["private"] = claimed & ~points["refuted"]
    points["epsilon_text"] = points["epsilon"].map(epsilon_text)
    points["epsilon_text"] += points["refuted"].map({True: " refuted", False: ""})
    noted = points["setting"].where(points["setting"] == "", points["setting"] + ", ")
    points["setting"] = points["setting"].where(
        ~claimed, noted + "\u03b5 " + points["epsilon_text"]
    )
    several = points["checkpoint"].nunique() > 1
    chart = _frontier_layers(points, *((430, 320) if several else (WIDTH, 420)))
    figure: Chart = chart
    if several:
        figure = chart.facet(
            facet=alt.Facet(
                "checkpoint:O",
                title=None,
                header=alt.Header(labelExpr="'model of round ' + datum.value", labelFontSize=13),
            ),
            columns=2,
        )
    return Figure(
        f"frontier-{slug(scenario)}",
        f"Privacy against utility: {scenario}",
        "Each point is a defense; bars are 95 % intervals. Better is down and to the right. Filled "
        "points with a dark outline are Pareto-optimal at their estimates, joined by the grey "
        "staircase; lines join the strengths of one family, and the text beside a point is the "
        "value of its family's parameter, where there is room. Ticks mark defenses with a formal "
        "guarantee, with epsilon over the whole training run; crosses, on hollow points, those "
        "whose claim is refuted. Accuracy is that of the final round.",
        styled(figure),
    )


def _series(points: pd.DataFrame) -> pd.Series:
    knobs = points["knob"].where(points["knob"] == "", " (" + points["knob"] + ")")
    return points["family"] + knobs


def _frontier_layers(points: pd.DataFrame, width: int, height: int) -> Layers:
    colour, shape = _family_scales(points[::-1].drop_duplicates("series"))
    margin = 0.03
    lowest, highest = points["accuracy_low"].min(), points["accuracy_high"].max()
    domain = (max(0.0, lowest - margin), min(1.0, highest + margin))
    labels = [
        _place_labels(group, domain, width, height) for _, group in points.groupby("checkpoint")
    ]
    points = points.join(pd.concat(labels))
    x = alt.X(
        "accuracy:Q",
        title="Test accuracy, final round",
        axis=alt.Axis(format="%", tickCount=10),
        scale=alt.Scale(domain=list(domain), nice=False),
    )
    y = alt.Y(
        "shown:Q",
        title="Worst-case advantage over prior, passive server",
        axis=alt.Axis(format="%"),
        scale=alt.Scale(domain=[0, 1]),
    )
    base = alt.Chart().encode(x=x, y=y)
    optimal = alt.datum.pareto
    stairs = (
        base.transform_filter(optimal)
        .mark_line(interpolate="step-before", strokeWidth=6, color="#d9d9d9")
        .encode(order="accuracy:Q")
    )
    sweeps = base.mark_line(opacity=0.55, strokeWidth=1.5).encode(
        color=colour, detail="sweep:N", order="strength:Q"
    )
    across = base.mark_rule(opacity=0.7).encode(
        x=alt.X("accuracy_low:Q"), x2="accuracy_high:Q", color=colour
    )
    down = base.mark_rule(opacity=0.7).encode(
        y=alt.Y("advantage_low:Q"), y2="advantage_high:Q", color=colour
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
        alt.Tooltip("success_text:N", title="worst-case success"),
        alt.Tooltip("advantage_text:N", title="advantage over prior"),
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
            stroke=alt.condition(optimal, alt.value("#111111"), alt.value("white")),
            strokeWidth=alt.condition(optimal, alt.value(1.6), alt.value(0.5)),
        )
    )
    refuted = alt.datum.refuted
    hollow = marks.transform_filter(refuted).mark_point(filled=False, size=55, opacity=1)
    crosses = base.transform_filter(refuted).mark_text(text="\u2715", fontSize=22)
    crosses = crosses.encode(color=colour)
    names = base.encode(x="label_x:Q", y="label_y:Q", text="label:N")
    halo = names.mark_text(fontSize=11, stroke="white", strokeWidth=3, strokeJoin="round")
    text = names.mark_text(fontSize=11).encode(color=colour)
    layers = alt.layer(
        *(stairs, sweeps, across, down, ticks, dots, hollow, crosses, halo, text),
        data=points[_POINT],
    )
    return layers.properties(width=width, height=height)


def _place_labels(
    points: pd.DataFrame, domain: tuple[float, float], width: int, height: int
) -> pd.DataFrame:
    """Return where each point's setting is written; nowhere if every place beside it is taken."""
    right, up = (domain[1] - domain[0]) / width, 1 / height  # one pixel
    taken = [(p.accuracy, p.shown, 7 * right, 7 * up) for p in rows(points)]
    placed = {}
    for p in rows(points.sort_values(["refuted", "private", "pareto"], ascending=False)):
        wide, high = (3.4 * len(p.setting) + 2) * right, 7 * up
        for side, level in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            x, y = p.accuracy + side * (wide + 8 * right), p.shown + level * 11 * up
            free = all(abs(x - a) >= wide + w or abs(y - b) >= high + h for a, b, w, h in taken)
            if p.setting and free and high <= y <= 1 - high:
                taken.append((x, y, wide, high))
                placed[p.Index] = (x, y, p.setting)
                break
    columns = ["label_x", "label_y", "label"]
    found = pd.DataFrame.from_dict(placed, orient="index", columns=columns)
    hidden = {"label_x": domain[0], "label_y": 0.0, "label": ""}
    return found.reindex(points.index).fillna(hidden)


def _family_scales(series: pd.DataFrame) -> tuple[alt.Color, alt.Shape]:
    """Return colour and shape by family; the undefended control is always the dark circle."""
    control = series.loc[series["control"], "series"]
    families = series.loc[~series["control"], "series"].tolist()
    colours = dict.fromkeys(control, CONTROL)
    colours |= {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(families)}
    shapes = dict.fromkeys(control, "circle")
    shapes |= {name: SHAPES[i % len(SHAPES)] for i, name in enumerate(families)}
    domain = list(colours)
    legend = alt.Legend(title="Defense", symbolSize=90, labelLimit=320, orient="bottom", columns=4)
    return (
        alt.Color(
            "series:N",
            scale=alt.Scale(domain=domain, range=list(colours.values())),
            legend=legend,
        ),
        alt.Shape(
            "series:N",
            scale=alt.Scale(domain=domain, range=list(shapes.values())),
            legend=legend,
        ),
    )
