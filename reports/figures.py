"""Success against strength, the distribution of PSNR, and accuracy over rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from leakfrontier.evaluate.conclude.analysis import with_scores
from leakfrontier.evaluate.conclude.labels import DEFENSE, describe_defenses, rounds_named

from .charts import CONTROL, INK, PAPER, Chart, Figure, Layers, family_colours, grid, share, slug

Panel = Callable[[pd.DataFrame, str], Layers]

_LINE = np.linspace(0, 1, 51)
_MOST_PSNR = 60.0  # above this, a guess equals the victim up to rounding


def strength_figure(scenario: str, checkpoint: int, worst: pd.DataFrame) -> Figure | None:
    """Return success from nothing against strength, one panel per family that was swept.

    Args:
        scenario: The name of the scenario.
        checkpoint: The attacked round.
        worst: `worst_case` of this scenario and checkpoint.
    """
    worst = worst.dropna(subset=["rate"])
    if worst.empty:
        return None
    arms = describe_defenses(worst)
    worst = worst.drop(columns=DEFENSE).merge(arms, on="defense")
    control = worst.loc[worst["control"], "rate"]
    swept = worst.dropna(subset=["strength"]).sort_values("order")
    swept = swept[swept.groupby("sweep")["defense"].transform("size") > 1]
    if swept.empty:
        return None
    colours = family_colours(arms)
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
        f"Success against strength: {scenario}, {rounds_named(checkpoint)}",
        "Success from nothing of a passive server, with 95 % intervals. Strength grows "
        "to the right. Dashed: success without the upload, the largest of the prior guess, chance "
        "and the guesses for another upload. Dotted: no defense.",
        *grid(panels),
    )


def _strength_panel(sweep: str, group: pd.DataFrame, colour: str, control: float | None) -> Layers:
    columns = ["defense", "setting", "rate", "low", "high", "text", "blind", "observations"]
    base = alt.Chart(group[columns]).encode(
        x=alt.X(
            "setting:N",
            sort=group["setting"].tolist(),
            title=f"{group['knob'].iloc[0]} (stronger \u2192)",
            axis={"labelAngle": 0},
        ),
        y=share("rate:Q", "Success from nothing"),
        tooltip=[
            alt.Tooltip("defense:N"),
            alt.Tooltip("text:N", title="success"),
            alt.Tooltip("observations:Q"),
        ],
    )
    layers: list[alt.Chart] = [
        base.mark_rule(color=colour, strokeWidth=1.5).encode(y=share("low:Q"), y2=alt.Y2("high:Q")),
        base.mark_line(color=colour, strokeWidth=2),
        base.mark_point(color=colour, filled=True, size=60, opacity=1),
    ]
    if group["blind"].notna().any():
        layers.append(base.mark_line(color=CONTROL, strokeDash=[6, 4]).encode(y=share("blind:Q")))
    if control is not None:
        layers.append(
            alt.Chart(pd.DataFrame({"control": [control]}))
            .mark_rule(color=CONTROL, strokeDash=[2, 3])
            .encode(y=share("control:Q"))
        )
    return alt.layer(*layers).properties(title=sweep)


def psnr_figure(
    scenario: str, checkpoint: int, attacks: pd.DataFrame, scores: pd.DataFrame
) -> Figure | None:
    """Return the distribution of each victim's best PSNR under each defense.

    Args:
        scenario: The name of the scenario.
        checkpoint: The attacked round.
        attacks: `Conclusions.attacks` of this scenario and checkpoint.
        scores: `Conclusions.scores` of the same setting.
    """
    rebuilding = ~attacks["baseline"] & ~attacks["candidates_granted"]
    passive = attacks[rebuilding & (attacks["threat"] == "passive")]
    scored = with_scores(passive, scores).dropna(subset="psnr")
    if scored.empty:
        return None
    best = scored.groupby(["defense", "seed", "observation", "victim"])["psnr"].max()
    best = best.clip(upper=_MOST_PSNR)
    lines = [
        pd.DataFrame({"defense": defense, "x": np.quantile(group, _LINE), "y": _LINE})
        for defense, group in best.groupby(level="defense")
    ]
    longest = float(best.max())

    def draw(data: pd.DataFrame, title: str) -> Layers:
        x = alt.X("x:Q", title="PSNR (dB)", scale={"domain": [0, max(longest, 20.0)]})
        y = share("y:Q", "Victims at or below")
        return _lines(data, _along(data), title, x, y, align="center")

    return Figure(
        f"psnr-{slug(scenario)}-{checkpoint}",
        f"How close the reconstructions are: {scenario}, {rounds_named(checkpoint)}",
        "The cumulative share of victims by the PSNR of their closest guess, over all attacks of a "
        "passive server. Further right is closer to the private example "
        f"({_MOST_PSNR:.0f} dB and above are drawn at the edge). Once an attack has identified a "
        "victim, later attacks may skip it. Grey: no defense. Darker: stronger.",
        *_per_family(pd.concat(lines), describe_defenses(scored), draw),
    )


def accuracy_figure(scenario: str, curve: pd.DataFrame) -> Figure | None:
    """Return test accuracy over rounds, one panel per family.

    Args:
        scenario: The name of the scenario.
        curve: `utility_curve` of this scenario.
    """
    if curve["round"].nunique() < 2:
        return None
    data = curve.rename(columns={"round": "x", "accuracy": "y"})[["defense", "x", "y"]]

    def draw(lines: pd.DataFrame, title: str) -> Layers:
        x, y = alt.X("x:Q", title="Round"), share("y:Q", "Test accuracy")
        return _lines(lines, _at_ends(lines), title, x, y, align="left")

    return Figure(
        f"accuracy-{slug(scenario)}",
        f"Accuracy over rounds: {scenario}",
        "Mean over seeds. Grey: no defense. Darker: stronger.",
        *_per_family(data, describe_defenses(curve), draw),
    )


def _per_family(lines: pd.DataFrame, arms: pd.DataFrame, draw: Panel) -> tuple[Chart, Chart]:
    """Return one panel per family, each with the undefended control behind it."""
    data = lines.merge(arms, on="defense")
    colours = family_colours(arms)
    data["colour"] = data["family"].map(colours)
    families = arms.loc[~arms["control"], "family"].unique()
    panels = []
    for family in families if len(families) else arms["family"].unique():
        panel = data[(data["family"] == family) | data["control"]].copy()
        rank = panel["order"].rank(method="dense")
        panel["weight"] = np.where(panel["control"], 0.8, 0.4 + 0.6 * rank / rank.max())
        panels.append(draw(panel, family))
    return grid(panels)


def _lines(
    data: pd.DataFrame, names: pd.DataFrame, title: str, x: alt.X, y: alt.Y, *, align: str
) -> Layers:
    """Return curves, labelled with their settings at the points of `names`."""
    data = data[["defense", "x", "y", "colour", "weight"]]
    names = names[["setting", "x", "y"]]
    curves = (
        alt.Chart(data)
        .mark_line(strokeWidth=2)
        .encode(
            x=x,
            y=y,
            color=alt.Color("colour:N", scale=None),
            opacity=alt.Opacity("weight:Q", scale=None),
            detail=alt.Detail("defense:N"),
            tooltip=[alt.Tooltip("defense:N")],
        )
    )
    spots = alt.Chart(names).encode(x=x, y=y, text=alt.Text("setting:N"))
    place: dict[str, Any] = {"align": align, "dx": 6 if align == "left" else 0, "fontSize": 11}
    halo = spots.mark_text(color=PAPER, stroke=PAPER, strokeWidth=4, strokeJoin="round", **place)
    words = spots.mark_text(color=INK, **place)
    layers = [curves, halo, words] if len(names) else [curves]
    return alt.layer(*layers).properties(title=title)


def _along(data: pd.DataFrame) -> pd.DataFrame:
    """Return one point of every named curve, each at a different height."""
    groups = [group for _, group in data[data["setting"] != ""].groupby("order")]
    places = [(i + 1) / (len(groups) + 1) for i in range(len(groups))]
    points = [
        group.iloc[[round(at * (len(group) - 1))]] for at, group in zip(places, groups, strict=True)
    ]
    return pd.concat(points) if points else data.head(0)


def _at_ends(data: pd.DataFrame) -> pd.DataFrame:
    """Return the last point of every named curve, moved up if two would overlap."""
    named = data[data["setting"] != ""].sort_values("x").drop_duplicates("defense", keep="last")
    named = named.sort_values("y")
    heights: list[float] = []
    for height in named["y"]:
        heights.append(max(height, heights[-1] + 0.065) if heights else height)
    excess = max(0.0, heights[-1] - 1.0) if heights else 0.0
    return named.assign(y=[height - excess for height in heights])
