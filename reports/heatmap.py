"""Attacks against defenses, as a heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from leakfrontier.evaluate.conclude.analysis import blind_success
from leakfrontier.evaluate.conclude.labels import (
    describe_attack,
    describe_defenses,
    rounds_named,
    rows,
    short_names,
)

from .charts import AXIS, GRID, INK, PAPER, WIDTH, Figure, slug, styled

_HEAT = ["#fff5eb", "#fdbe85", "#e6550d", "#8c2d04"]
_INKS, _DARKER = ("#000000", "white"), 0.76
"""The colours of text in a square: black, or white above `_DARKER`, in any colour scheme."""

_LEAST = 56  # pixels, enough for the text
_COLUMNS = ["defense", "name", "attack", "text", "shown", "below", "blind", "observations", "note"]


def heatmap_figure(scenario: str, checkpoint: int, rates: pd.DataFrame) -> Figure | None:
    """Return attacks against defenses, coloured by advantage over the prior.

    Args:
        scenario: The name of the scenario.
        checkpoint: The attacked round.
        rates: `attack_rates` of this scenario and checkpoint.
    """
    attacks = rates[~rates["baseline"]]
    if attacks.empty:
        return None
    cells = _cells(attacks, short_names(rates, "adversary"))
    defenses = cells["name"].unique().tolist()
    chart = alt.layer(*_layers(defenses), data=cells).properties(
        width=alt.Step(min(110, max(_LEAST, WIDTH * 0.8 // len(defenses)))),
        height=34 * cells["attack"].nunique(),
    )
    return Figure(
        f"heatmap-{slug(scenario)}-{checkpoint}",
        f"Which attack gets through which defense: {scenario}, {rounds_named(checkpoint)}",
        "Colours show the advantage over success without the upload. If the estimate is zero or "
        "below, the upper 95 % limit is printed. Grey and dashed squares have one of three "
        "reasons. The attack is not applicable, which is no evidence of protection. The client "
        "refused the model that the server sent. Or the attack was not needed, because earlier "
        "attacks had identified every victim. \u201cOf n left\u201d means that the rate is over "
        "the n uploads that earlier attacks left. Do not compare it with other rates. An attack "
        "that is given candidates chooses the victim among its look-alikes, and does not count in "
        "the success from nothing. An attack that crafts parameters or the architecture "
        "needs an active server.",
        styled(chart),
        layout="scroll",
    )


def _cells(attacks: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per square of the map, with defenses in their order."""
    cells = _both_variants(attacks)
    cells["attack"] = [
        describe_attack(names[row.adversary], row, row.knows_defense) for row in rows(cells)
    ]
    arms = describe_defenses(cells)
    cells = cells.merge(arms[["defense", "name", "order"]], on="defense").sort_values("order")
    blind = blind_success(cells, least=True)
    cells["ceiling"] = (cells["high"] - blind) / (1 - blind)
    cells["blind"] = blind_success(cells)
    cells["shown"] = [_cell_text(row) for row in rows(cells)]
    cells["below"] = [_below(row) for row in rows(cells)]
    cells["note"] = [_note(row) for row in rows(cells)]
    cells["ran"] = cells["advantage"].notna()
    cells["shade"] = cells["advantage"].clip(0, 1)
    return cells[[*_COLUMNS, "ran", "shade"]]


def _layers(defenses: Sequence[str]) -> list[alt.Chart]:
    """Return the squares of attacks that ran and of those that did not, with their text."""
    base = alt.Chart().encode(
        x=alt.X(
            "name:N",
            sort=defenses,
            title=None,
            axis={"labelAngle": -35, "labelLimit": 260, "orient": "bottom"},
        ),
        y=alt.Y("attack:N", sort="ascending", title=None, axis={"labelLimit": 320}),
        tooltip=[
            alt.Tooltip("defense:N"),
            alt.Tooltip("attack:N"),
            alt.Tooltip("text:N", title="success"),
            alt.Tooltip("shown:N", title="advantage over prior"),
            alt.Tooltip("blind:Q", title="without the upload", format=".1%"),
            alt.Tooltip("observations:Q"),
            alt.Tooltip("note:N", title="note"),
        ],
    )
    legend = {
        "format": "%",
        "orient": "top",
        "gradientLength": 240,
        "titleLimit": 300,
        "values": [0, 0.25, 0.5, 0.75, 1],
    }
    shade = alt.Color(
        "shade:Q",
        title="Advantage over prior",
        scale={"range": _HEAT, "domain": [0, 1]},
        legend=legend,
    )
    ran = base.transform_filter(alt.datum.ran).mark_rect(stroke=PAPER, strokeWidth=2)
    absent = base.transform_filter(~alt.datum.ran).mark_rect(
        fill=GRID, stroke=AXIS, strokeDash=[4, 3], strokeWidth=1.2
    )
    ink = (
        alt.when(~alt.datum.ran)
        .then(alt.value(INK))
        .when(alt.datum.shade > _DARKER)
        .then(alt.value(_INKS[1]))
        .otherwise(alt.value(_INKS[0]))
    )
    one, two = alt.datum.below == "", alt.datum.below != ""
    words = [
        base.transform_filter(lines)
        .mark_text(fontSize=11.5, dy=dy)
        .encode(text=alt.Text(text), color=ink)
        for lines, text, dy in ((one, "shown:N", 0), (two, "shown:N", -6), (two, "below:N", 7))
    ]
    return [ran.encode(color=shade), absent, *words]


def _both_variants(attacks: pd.DataFrame) -> pd.DataFrame:
    """Return rates with the undefended control in both rows of a simulating attack."""
    attacks = attacks.copy()
    attacks["knows_defense"] = attacks["knows_defense"].fillna(False).astype(bool)
    control = attacks[attacks["control"] & attacks["simulates"]]
    others = control.assign(knows_defense=~control["knows_defense"])
    variants = attacks[["adversary", "knows_defense"]].drop_duplicates()
    others = others.merge(variants, on=["adversary", "knows_defense"])
    both = pd.concat([attacks, others], ignore_index=True)
    return both.drop_duplicates(["defense", "adversary", "knows_defense"])


def _cell_text(row: Any) -> str:  # noqa: ANN401 - a named tuple of pandas
    if row.observations:
        return _advantage_text(row.advantage, row.ceiling)
    return "refused" if row.refused else str(row.text)


def _below(row: Any) -> str:  # noqa: ANN401 - a named tuple of pandas
    """Return the second line of a square: how many uploads a cascade left for the attack."""
    return f"of {row.observations} left" if row.observations and row.not_needed else ""


def _advantage_text(advantage: float, ceiling: float) -> str:
    if advantage > 0:
        return f"{100 * advantage:.0f} %" if advantage >= 0.005 else f"{100 * advantage:.1f} %"
    return f"<= {100 * max(ceiling, 0.0):.0f} %" if ceiling >= 0.005 else "none"


def _note(row: Any) -> str:  # noqa: ANN401 - a named tuple of pandas
    """Return why an attack did not run on some uploads, or on none."""
    notes = [row.scope] if row.scope else []
    if row.not_needed and not row.observations:
        notes.append("not needed: nothing left to find")
    if row.refused:
        notes.append(f"refused by the client: {row.refusal}")
    if row.not_applicable:
        notes.append(f"not applicable: {row.reason}")
    return "; ".join(notes)
