"""The leaderboard of several packs: one self-contained page, a table and a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from leakfrontier.adversaries.base import THREATS
from leakfrontier.evaluate.conclude.analysis import SERVERS
from leakfrontier.evaluate.conclude.coordinates import proof_text
from leakfrontier.evaluate.conclude.labels import epsilon_text, rounds_named
from leakfrontier.evaluate.share.leaderboard import Setting, make_settings
from leakfrontier.evaluate.share.pack import Pack
from leakfrontier.evaluate.share.statement import Statement

from .charts import Figure, styled
from .gallery import Strip, best_strips
from .html import render, write

_SHOWN = ("passive", "architecture")
_PANELS = {"passive": "a passive server", "architecture": "any server of the panel"}


@dataclass(frozen=True)
class Line:
    """A defense in the table of a setting.

    Attributes:
        row: Its row of `standings`.
        place: Its place, as text.
        proof: What the proof allows.
        verified: Who verified or refuted it, as text.
        beside: The DP-SGD of equal accuracy, with the verdict on the pair.
        gallery: The anchor of its pictures; "" if there are none.
        strip: Its pictures.
    """

    row: Any
    place: str
    proof: str
    verified: str
    beside: str
    gallery: str = ""
    strip: Strip | None = None


@dataclass(frozen=True)
class Board:
    """One setting on the page: a table per server, and `apart` the failed evaluations."""

    setting: Setting
    number: int
    truth: Strip | None
    tables: dict[str, list[Line]]
    apart: list[Line]

    def parts(self, server: str) -> dict[str, list[Line]]:
        """Return the table of a server in parts, verified defenses first, by their titles."""
        lines = self.tables[server]
        parts = {
            "Verified": [line for line in lines if is_verified(line.row)],
            "Not verified, ranked apart": [line for line in lines if not is_verified(line.row)],
        }
        return {title: own for title, own in parts.items() if own}


def table_of(settings: Sequence[Setting]) -> pd.DataFrame:
    """Return the standings of all settings."""
    tables = []
    for setting in settings:
        table = setting.table.copy()
        table.insert(0, "scenario", setting.name)
        table.insert(1, "checkpoint", setting.checkpoint)
        table.insert(2, "uploads", setting.uploads)
        table.insert(3, "seeds", setting.seeds)
        table.insert(4, "modality", setting.modality)
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def json_of(table: pd.DataFrame) -> str:
    """Return the standings as one JSON document. Unknown values are null."""
    text = table.to_json(orient="records", double_precision=6)
    return json.dumps(json.loads(str(text)), indent=1)


def write_leaderboard(
    packs: Sequence[Pack],
    path: Path,
    statements: Mapping[str, Sequence[Statement]] | None = None,
) -> pd.DataFrame:
    """Write the page, its table (CSV) and its figure (SVG, PNG), and return the table.

    Args:
        packs: Packs of one panel.
        path: The path of the page. The other files are written beside it.
        statements: The valid statements on each pack, by its name.
    """
    settings = make_settings(packs, statements)
    table = table_of(settings)
    figure = leakage_figure(table)
    boards = [_board(setting, number) for number, setting in enumerate(settings)]
    page = render(
        "leaderboard.html.j2",
        boards=boards,
        packs=[_described(pack, settings, (statements or {}).get(pack.name, ())) for pack in packs],
        panel=packs[0].panel if packs else "",
        servers={server: SERVERS[server] for server in THREATS},
        families=sorted(table.loc[~table["control"].astype(bool), "family"].unique()),
        modalities=sorted(table["modality"].unique()),
        epsilon=epsilon_text,
        figure=figure,
    )
    write(path, page.encode())
    write(path.with_suffix(".csv"), table.to_csv(index=False).encode())
    if figure is not None:
        write(path.with_suffix(".svg"), figure.svg.encode())
        write(path.with_suffix(".png"), figure.png)
    return table


def leakage_figure(table: pd.DataFrame) -> Figure | None:
    """Return success under every defense in every setting as a figure; None without results."""
    known = table[table["server"].isin(_SHOWN) & table["success"].notna()]
    known = known[known["evaluation"] != "fail"]
    if known.empty:
        return None
    data = pd.DataFrame(
        {
            "defense": [_named(row) for row in known.itertuples()],
            "setting": [_short(row) for row in known.itertuples()],
            "server": known["server"],
            "success": known["success"].astype(float),
            "text": [f"{100 * share:.0f}" for share in known["success"]],
            "cost": [
                f"{row.success_text}, accuracy {row.accuracy_text}" for row in known.itertuples()
            ],
        }
    ).drop_duplicates(["defense", "setting", "server"])
    mean = data[data["server"] == "passive"].groupby("defense")["success"].mean()
    order = mean.sort_values(kind="stable").index.tolist()
    panels = []
    for server in _SHOWN:
        own = data[data["server"] == server]
        if own.empty:
            continue
        x = alt.X("setting:N", title=None, sort=None, axis=alt.Axis(labelAngle=-40, labelLimit=260))
        y = alt.Y("defense:N", title=None, sort=order, axis=alt.Axis(labelLimit=260))
        scale = alt.Scale(domain=[0, 1], range=["#f3f6f9", "#D55E00"], interpolate="rgb")
        base = alt.Chart(own).encode(x=x, y=y)
        boxes = base.mark_rect(stroke="white").encode(
            color=alt.Color("success:Q", scale=scale, legend=None), tooltip=["cost:N"]
        )
        words = base.mark_text(fontSize=11).encode(text="text:N")
        title = f"identified from nothing by {_PANELS[server]}, %"
        panels.append(
            alt.layer(boxes, words).properties(title=title, width=alt.Step(38), height=alt.Step(20))
        )
    chart = styled(alt.hconcat(*panels).resolve_scale(y="shared"))
    right = " (left) and a server that may send crafted parameters or architectures (right)"
    caption = (
        "Success from nothing, in percent of victims, under each defense in each setting. "
        f"The attacker is a passive server{right if len(panels) > 1 else ''}. The tables show what "
        "each defense costs in accuracy."
    )
    return Figure(
        "leaderboard", "Who is identified from nothing under each defense", caption, chart
    )


def _named(row: Any) -> str:  # noqa: ANN401 - a row of a table
    """Return the name of a defense; one with a small epsilon is named by its epsilon."""
    if pd.isna(row.epsilon) or row.epsilon > 100:
        return str(row.defense)
    return f"{row.family}, epsilon {row.epsilon:.2g}"


def _short(row: Any) -> str:  # noqa: ANN401 - a row of a table
    return (
        f"{row.scenario}, {rounds_named(row.checkpoint)}" if row.checkpoint else str(row.scenario)
    )


def _board(setting: Setting, number: int) -> Board:
    strips = {
        (one.pack, label): strip
        for one in setting.evaluations
        for label, strip in best_strips(
            one.results, one.frontier.scenario, setting.checkpoint
        ).items()
    }
    places: dict[tuple[str, str], str] = {}
    tables: dict[str, list[Line]] = {server: [] for server in THREATS}
    apart: list[Line] = []
    for row in setting.table.itertuples():
        key = (str(row.pack), str(row.defense))
        gallery = places.setdefault(key, f"gallery-{number}-{len(places)}")
        strip = strips.get(key)
        texts = (place_text(row), proof_text(row), verified_text(row), _beside(row))
        line = Line(row, *texts, gallery if strip else "", strip)
        if row.evaluation != "fail":
            tables[str(row.server)].append(line)
        elif row.server == "passive":
            apart.append(line)
    truths = [strip for (_, label), strip in strips.items() if label == ""]
    return Board(setting, number, truths[0] if truths else None, tables, apart)


def place_text(row: Any) -> str:  # noqa: ANN401 - a row of a table
    """Return a place as text; "" if there is none."""
    if pd.isna(row.place):
        return ""
    return f"{row.place:.0f}" + ("=" if row.tied else "")


def verified_text(row: Any) -> str:  # noqa: ANN401 - a row of a table
    """Return the numbers of keys that verified and refuted a defense, as text."""
    parts = [f"verified by {row.verified}"] if row.verified else []
    parts += [f"refuted by {row.refuted_by}"] if row.refuted_by else []
    return ", ".join(parts) or "not verified"


def is_verified(row: Any) -> bool:  # noqa: ANN401 - a row of a table
    """Return whether a defense is ranked among the verified ones."""
    return bool(row.verified and not row.refuted_by)


def _beside(row: Any) -> str:  # noqa: ANN401 - a row of a table
    if pd.isna(row.partner):
        return ""
    epsilon = epsilon_text(row.partner_epsilon)
    return f"{row.beside} ({row.partner}, epsilon {epsilon}: {row.partner_success_text})"


def _described(
    pack: Pack, settings: Sequence[Setting], statements: Sequence[Statement]
) -> dict[str, Any]:
    """Return the origin of a pack, the checks of its settings and statements, for the page."""
    own = [
        (setting.title, one)
        for setting in settings
        for one in setting.evaluations
        if one.pack == pack.name
    ]
    return {"name": pack.name, "meta": pack.meta, "evaluations": own, "statements": statements}
