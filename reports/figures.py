"""Charts, defined once in Altair for the page and for PNG and SVG files.

Colours are those of Okabe and Ito, which most colour-blind readers can tell apart; families
differ in shape as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import vl_convert

from leakfrontier.evaluate.store import Results
from leakfrontier.evaluate.summary import blind_success

from .labels import describe_attack, describe_defenses, percent, rows, short_names

Layers = alt.LayerChart | alt.FacetChart  # what altair.layer is declared to return
Chart = Layers | alt.ConcatChart
Panel = Callable[[pd.DataFrame, str], Layers]

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
"""The version of Vega-Lite that the charts are written for."""

CONTROL = "#444444"
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31"]
SHAPES = ["square", "triangle-up", "diamond", "triangle-down", "cross"]
_POINT = [
    *("defense", "series", "sweep", "strength", "checkpoint", "pareto"),
    *("label", "label_x", "label_y"),
    *("accuracy", "accuracy_low", "accuracy_high", "accuracy_text"),
    *("shown", "advantage_low", "advantage_high", "advantage_text", "success_text"),
    *("p_pareto", "verdict"),
]
_HEAT = ["#fff5eb", "#fdbe85", "#e6550d", "#8c2d04"]
_WIDTH = 760
_LINE = np.linspace(0, 1, 51)
_MOST_PSNR = 60.0  # beyond it, a guess is the victim up to rounding


@dataclass(frozen=True)
class Figure:
    """A chart, the name of its files and what it shows."""

    name: str
    title: str
    caption: str
    chart: Chart

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification, of fixed width."""
        with alt.data_transformers.enable("default", max_rows=None):
            spec: dict[str, Any] = self.chart.to_dict()
        return spec

    def page_spec(self) -> str:
        """Return the specification for the page: JSON that is safe inside a script element.

        A single panel is as wide as its container; several keep their width.
        """
        spec = dict(self.spec)
        if "layer" in spec:
            spec |= {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
        return json.dumps(spec, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")

    @cached_property
    def svg(self) -> str:
        """The chart as an SVG document."""
        return str(vl_convert.vegalite_to_svg(self.spec, vl_version=VEGA_LITE))

    @cached_property
    def png(self) -> bytes:
        """The chart as a PNG file."""
        return bytes(vl_convert.svg_to_png(self.svg, scale=2))


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
    several = points["checkpoint"].nunique() > 1
    chart = _frontier_layers(points, *((430, 320) if several else (_WIDTH, 420)))
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
        "value of its family's parameter, where there is room.",
        _styled(figure),
    )


def _series(points: pd.DataFrame) -> pd.Series:
    knobs = points["knob"].where(points["knob"] == "", " (" + points["knob"] + ")")
    return points["family"] + knobs


def _frontier_layers(points: pd.DataFrame, width: int, height: int) -> Layers:
    colour, shape = _family_scales(points["series"].unique().tolist()[::-1])
    margin = 0.03
    lowest, highest = points["accuracy_low"].min(), points["accuracy_high"].max()
    domain = (max(0.0, lowest - margin), min(1.0, highest + margin))
    labels = [
        _place_labels(group, domain, width, height) for _, group in points.groupby("checkpoint")
    ]
    points = points.join(pd.concat(labels))
    x = alt.X(
        "accuracy:Q",
        title="Test accuracy",
        axis=alt.Axis(format="%", tickCount=10),
        scale=alt.Scale(domain=list(domain), nice=False),
    )
    y = alt.Y(
        "shown:Q",
        title="Worst-case advantage over prior",
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
    dots = base.mark_point(filled=True, opacity=1).encode(
        color=colour,
        shape=shape,
        size=alt.condition(optimal, alt.value(130), alt.value(55)),
        stroke=alt.condition(optimal, alt.value("#111111"), alt.value("white")),
        strokeWidth=alt.condition(optimal, alt.value(1.6), alt.value(0.5)),
        tooltip=[
            alt.Tooltip("defense:N", title="defense"),
            alt.Tooltip("accuracy_text:N", title="accuracy"),
            alt.Tooltip("success_text:N", title="worst-case success"),
            alt.Tooltip("advantage_text:N", title="advantage over prior"),
            alt.Tooltip("p_pareto:Q", title="P(Pareto-optimal)", format=".2f"),
            alt.Tooltip("verdict:N", title="verdict"),
        ],
    )
    names = base.encode(x="label_x:Q", y="label_y:Q", text="label:N")
    halo = names.mark_text(fontSize=11, stroke="white", strokeWidth=3, strokeJoin="round")
    text = names.mark_text(fontSize=11).encode(color=colour)
    layers = alt.layer(stairs, sweeps, across, down, dots, halo, text, data=points[_POINT])
    return layers.properties(width=width, height=height)


def _place_labels(
    points: pd.DataFrame, domain: tuple[float, float], width: int, height: int
) -> pd.DataFrame:
    """Return where each point's setting is written; nowhere if every place beside it is taken."""
    right, up = (domain[1] - domain[0]) / width, 1 / height  # one pixel
    taken = [(p.accuracy, p.shown, 7 * right, 7 * up) for p in rows(points)]
    placed = {}
    for p in rows(points.sort_values("pareto", ascending=False)):
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


def _family_scales(series: list[str]) -> tuple[alt.Color, alt.Shape]:
    """Return colour and shape by family; the undefended control is always the dark circle."""
    families = [name for name in series if name != "none"]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(families)}
    shapes = {name: SHAPES[i % len(SHAPES)] for i, name in enumerate(families)}
    if "none" in series:
        colours = {"none": CONTROL} | colours
        shapes = {"none": "circle"} | shapes
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


def heatmap_figure(scenario: str, checkpoint: int, rates: pd.DataFrame) -> Figure | None:
    """Return attacks against defenses, coloured by advantage over the prior.

    Args:
        scenario: Its name.
        checkpoint: The attacked round.
        rates: `attack_rates` of this scenario and checkpoint.
    """
    attacks = rates[~rates["baseline"].astype(bool)]
    if attacks.empty:
        return None
    cells = _both_variants(attacks)
    names = short_names(rates["adversary"].unique())
    cells["attack"] = [
        describe_attack(
            names[row.adversary], baseline=False, simulates=row.simulates, knows=row.knows_defense
        )
        for row in rows(cells)
    ]
    arms = describe_defenses(cells)
    cells = cells.merge(arms[["defense", "name", "order"]], on="defense").sort_values("order")
    blind = blind_success(cells)
    cells["ceiling"] = (cells["high"] - blind) / (1 - blind)
    cells["shown"] = [_cell_text(row.advantage, row.ceiling) for row in rows(cells)]
    cells["ran"] = cells["advantage"].notna()
    cells["shade"] = cells["advantage"].clip(0, 1)
    base = alt.Chart().encode(
        x=alt.X(
            "name:N",
            sort=arms["name"].tolist(),
            title=None,
            axis=alt.Axis(labelAngle=-35, labelLimit=260, orient="bottom"),
        ),
        y=alt.Y(
            "attack:N",
            sort=sorted(cells["attack"].unique()),
            title=None,
            axis=alt.Axis(labelLimit=320),
        ),
        tooltip=[
            alt.Tooltip("defense:N"),
            alt.Tooltip("attack:N"),
            alt.Tooltip("text:N", title="success"),
            alt.Tooltip("shown:N", title="advantage over prior"),
            alt.Tooltip("prior:Q", title="prior guess", format=".1%"),
            alt.Tooltip("observations:Q"),
            alt.Tooltip("reason:N", title="not applicable because"),
        ],
    )
    ran = (
        base.transform_filter(alt.datum.ran)
        .mark_rect(stroke="white", strokeWidth=2)
        .encode(
            color=alt.Color(
                "shade:Q",
                title="Advantage over prior",
                scale=alt.Scale(range=_HEAT, domain=[0, 1]),
                legend=alt.Legend(
                    format="%",
                    orient="top",
                    gradientLength=240,
                    titleLimit=300,
                    values=[0, 0.25, 0.5, 0.75, 1],
                ),
            )
        )
    )
    absent = base.transform_filter(~alt.datum.ran).mark_rect(
        fill="#ececec", stroke="#9a9a9a", strokeDash=[4, 3], strokeWidth=1.2
    )
    words = base.mark_text(fontSize=11.5).encode(
        text="shown:N",
        color=alt.condition(
            alt.datum.shade > 0.55,
            alt.value("white"),
            alt.value("#222222"),
        ),
    )
    columns = ["defense", "name", "attack", "text", "shown", "prior", "observations", "reason"]
    data = cells[[*columns, "ran", "shade"]]
    chart = alt.layer(ran, absent, words, data=data).properties(
        width=_WIDTH, height=34 * cells["attack"].nunique()
    )
    return Figure(
        f"heatmap-{slug(scenario)}-{checkpoint}",
        f"Which attack gets through which defense: {scenario}, round {checkpoint}",
        "Identification beyond the prior guess, as a share of what was left to gain. Where the "
        "estimate is zero or below, the upper 95 % limit is printed. Grey and dashed: the attack "
        "is not applicable, which is no evidence of protection.",
        _styled(chart),
    )


def _both_variants(attacks: pd.DataFrame) -> pd.DataFrame:
    """Return rates where the undefended control is in both rows of a simulating attack."""
    attacks = attacks.copy()
    attacks["knows_defense"] = attacks["knows_defense"].fillna(False).astype(bool)
    control = attacks[(attacks["family"] == "none") & attacks["simulates"].astype(bool)]
    others = control.assign(knows_defense=~control["knows_defense"])
    variants = attacks[["adversary", "knows_defense"]].drop_duplicates()
    others = others.merge(variants, on=["adversary", "knows_defense"])
    both = pd.concat([attacks, others], ignore_index=True)
    return both.drop_duplicates(["defense", "adversary", "knows_defense"])


def _cell_text(advantage: float, ceiling: float) -> str:
    if pd.isna(advantage):
        return "n/a"
    if advantage > 0:
        return f"{100 * advantage:.0f} %" if advantage >= 0.005 else f"{100 * advantage:.1f} %"
    return f"<= {100 * max(ceiling, 0.0):.0f} %" if ceiling >= 0.005 else "none"


def strength_figure(scenario: str, checkpoint: int, worst: pd.DataFrame) -> Figure | None:
    """Return worst-case success against strength, one panel per family that was swept.

    Args:
        scenario: Its name.
        checkpoint: The attacked round.
        worst: `worst_case` of this scenario and checkpoint.
    """
    worst = worst.dropna(subset=["rate"])
    if worst.empty:
        return None
    arms = describe_defenses(worst)
    worst = worst.drop(columns=["family", "strength"]).merge(arms, on="defense")
    control = worst.loc[worst["family"] == "none", "rate"]
    swept = worst.dropna(subset=["strength"]).sort_values("order")
    swept = swept[swept.groupby("sweep")["defense"].transform("size") > 1]
    if swept.empty:
        return None
    colours = _colours(arms["family"])
    panels = [
        _strength_panel(
            str(sweep),
            group.sort_values("strength"),
            colours[group["family"].iloc[0]],
            float(control.iloc[0]) if len(control) else None,
        )
        for sweep, group in swept.groupby("sweep", sort=False)
    ]
    return Figure(
        f"strength-{slug(scenario)}-{checkpoint}",
        f"Success against strength: {scenario}, round {checkpoint}",
        "Worst case over all attacks with 95 % intervals; strength grows to the right. Dashed: "
        "the prior guess, made without looking at the upload. Dotted: no defense.",
        _grid(panels),
    )


def _strength_panel(sweep: str, group: pd.DataFrame, colour: str, control: float | None) -> Layers:
    columns = ["defense", "setting", "rate", "low", "high", "text", "prior", "observations"]
    base = alt.Chart(group[columns]).encode(
        x=alt.X(
            "setting:N",
            sort=group["setting"].tolist(),
            title=f"{group['knob'].iloc[0]} (stronger \u2192)",
            axis=alt.Axis(labelAngle=0),
        ),
        y=_share("rate:Q", "Worst-case success"),
        tooltip=["defense:N", alt.Tooltip("text:N", title="success"), "observations:Q"],
    )
    layers: list[alt.Chart] = [
        base.mark_rule(color=colour, strokeWidth=1.5).encode(y=_share("low:Q"), y2="high:Q"),
        base.mark_line(color=colour, strokeWidth=2),
        base.mark_point(color=colour, filled=True, size=60, opacity=1),
    ]
    if group["prior"].notna().any():
        layers.append(base.mark_line(color=CONTROL, strokeDash=[6, 4]).encode(y=_share("prior:Q")))
    if control is not None:
        layers.append(
            alt.Chart(pd.DataFrame({"control": [control]}))
            .mark_rule(color=CONTROL, strokeDash=[2, 3])
            .encode(y=_share("control:Q"))
        )
    return alt.layer(*layers).properties(title=sweep)


def psnr_figure(
    scenario: str, checkpoint: int, attacks: pd.DataFrame, rates: pd.DataFrame
) -> Figure | None:
    """Return the distribution of PSNR under each defense, of the attack that is strongest there.

    Args:
        scenario: Its name.
        checkpoint: The attacked round.
        attacks: `Results.attacks` of this scenario and checkpoint.
        rates: `attack_rates` of the same.
    """
    ran = rates[~rates["baseline"].astype(bool)].dropna(subset=["rate", "psnr"])
    best = ran.sort_values(["rate", "psnr"], ascending=False).drop_duplicates("defense")
    key = ["defense", "adversary", "knows_defense"]
    scores = attacks.dropna(subset=["psnr"]).merge(best[key], on=key)
    if scores.empty:
        return None
    lines = [
        pd.DataFrame(
            {
                "defense": defense,
                "attack": group["adversary"].iloc[0],
                "x": np.quantile(group["psnr"].clip(upper=_MOST_PSNR), _LINE),
                "y": _LINE,
            }
        )
        for defense, group in scores.groupby("defense")
    ]
    longest = float(scores["psnr"].clip(upper=_MOST_PSNR).max())

    def draw(data: pd.DataFrame, title: str) -> Layers:
        x = alt.X("x:Q", title="PSNR (dB)", scale=alt.Scale(domain=[0, max(longest, 20.0)]))
        y = _share("y:Q", "Victims at or below")
        return _lines(data, _along(data), title, x, y, align="center")

    return Figure(
        f"psnr-{slug(scenario)}-{checkpoint}",
        f"How close the reconstructions are: {scenario}, round {checkpoint}",
        "Cumulative share of victims by PSNR, for the attack that identifies most under each "
        f"defense; further right is closer to the private image ({_MOST_PSNR:.0f} dB and above "
        "are drawn at the edge). Grey: no defense; darker: stronger.",
        _per_family(pd.concat(lines), describe_defenses(scores), draw),
    )


def accuracy_figure(scenario: str, curve: pd.DataFrame, results: Results) -> Figure | None:
    """Return test accuracy over rounds, one panel per family.

    Args:
        scenario: Its name.
        curve: `utility_curve` of this scenario.
        results: The run, for the families of the defenses.
    """
    if curve["round"].nunique() < 2:
        return None
    utility = results.utility[results.utility["scenario"] == scenario]
    data = curve.rename(columns={"round": "x", "accuracy": "y"})[["defense", "x", "y"]]

    def draw(lines: pd.DataFrame, title: str) -> Layers:
        x, y = alt.X("x:Q", title="Round"), _share("y:Q", "Test accuracy")
        return _lines(lines, _at_ends(lines), title, x, y, align="left")

    return Figure(
        f"accuracy-{slug(scenario)}",
        f"Accuracy over rounds: {scenario}",
        "Mean over seeds. Grey: no defense; darker: stronger.",
        _per_family(data, describe_defenses(utility), draw),
    )


def _per_family(lines: pd.DataFrame, arms: pd.DataFrame, draw: Panel) -> Chart:
    """Return one panel per family, each with the undefended control behind it."""
    data = lines.merge(arms, on="defense")
    colours = _colours(arms["family"])
    data["colour"] = data["family"].map(colours)
    families = [family for family in colours if family != "none"] or ["none"]
    panels = []
    for family in families:
        panel = data[data["family"].isin([family, "none"])].copy()
        rank = panel["order"].rank(method="dense")
        panel["weight"] = np.where(panel["family"] == "none", 0.8, 0.4 + 0.6 * rank / rank.max())
        panels.append(draw(panel, family))
    return _grid(panels)


def _lines(
    data: pd.DataFrame, names: pd.DataFrame, title: str, x: alt.X, y: alt.Y, *, align: str
) -> Layers:
    """Return curves, with their settings written at the points of `names`."""
    data = data[["defense", "x", "y", "colour", "weight", *({"attack"} & {*data.columns})]]
    names = names[["setting", "x", "y", "colour"]]
    curves = (
        alt.Chart(data)
        .mark_line(strokeWidth=2)
        .encode(
            x=x,
            y=y,
            color=alt.Color("colour:N", scale=None),
            opacity=alt.Opacity("weight:Q", scale=None),
            detail="defense:N",
            tooltip=["defense:N", *({"attack"} & {*data.columns})],
        )
    )
    spots = alt.Chart(names).encode(x=x, y=y, text="setting:N")
    place: dict[str, Any] = {"align": align, "dx": 6 if align == "left" else 0, "fontSize": 11}
    halo = spots.mark_text(stroke="white", strokeWidth=4, strokeJoin="round", **place)
    words = spots.mark_text(**place).encode(color=alt.Color("colour:N", scale=None))
    layers = [curves, halo, words] if len(names) else [curves]
    return alt.layer(*layers).properties(title=title)


def _along(data: pd.DataFrame) -> pd.DataFrame:
    """Return one point of every named curve, each at another height."""
    groups = [group for _, group in data[data["setting"] != ""].groupby("order")]
    places = [(i + 1) / (len(groups) + 1) for i in range(len(groups))]
    points = [
        group.iloc[[round(at * (len(group) - 1))]] for at, group in zip(places, groups, strict=True)
    ]
    return pd.concat(points) if points else data.head(0)


def _at_ends(data: pd.DataFrame) -> pd.DataFrame:
    """Return the last point of every named curve, moved up where two would overlap."""
    named = data[data["setting"] != ""].sort_values("x").drop_duplicates("defense", keep="last")
    named = named.sort_values("y")
    heights: list[float] = []
    for height in named["y"]:
        heights.append(max(height, heights[-1] + 0.065) if heights else height)
    excess = max(0.0, heights[-1] - 1.0) if heights else 0.0
    return named.assign(y=[height - excess for height in heights])


def _share(field: str, title: str | None = None) -> alt.Y:
    scale = alt.Scale(domain=[0, 1])
    return alt.Y(field, scale=scale, axis=alt.Axis(format="%"), title=title)


def _colours(families: pd.Series) -> Mapping[str, str]:
    named = [family for family in dict.fromkeys(families) if family != "none"]
    colours = {family: COLOURS[i % len(COLOURS)] for i, family in enumerate(named)}
    return colours | {"none": CONTROL}


def _grid(panels: list[Layers]) -> Chart:
    """Return panels side by side, wider where there are few."""
    columns = min(len(panels), 3)
    width = {1: 460, 2: 360, 3: 240}[columns]
    sized = [panel.properties(width=width, height=220) for panel in panels]
    return _styled(alt.concat(*sized, columns=columns))


def _styled(chart: Chart) -> Chart:
    text = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    lines = {"gridColor": "#ececec", "domainColor": "#888888", "tickColor": "#888888"}
    styled: Chart = chart.configure(
        font="Helvetica, Arial, Liberation Sans, sans-serif",
        background="white",
        view={"stroke": None},
        axis=text | lines | {"titlePadding": 8},
        legend=text,
        title={"fontSize": 13, "anchor": "start", "fontWeight": 600},
    )
    return styled


def slug(text: str) -> str:
    """Return a name that is safe in file names."""
    return "".join(c if c.isalnum() else "-" for c in text).strip("-").lower()
