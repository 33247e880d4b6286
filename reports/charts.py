"""What all charts share: defined once in Altair, for the page and for PNG and SVG files.

Colours are those of Okabe and Ito, which most colour-blind readers can tell apart; families
differ in shape as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import altair as alt
import pandas as pd
import vl_convert
from markupsafe import escape

Layers = alt.LayerChart | alt.FacetChart  # what altair.layer is declared to return
Chart = Layers | alt.ConcatChart

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
"""The version of Vega-Lite that the charts are written for."""

CONTROL = "#444444"
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31"]
SHAPES = ["square", "triangle-up", "diamond", "triangle-down", "cross"]
WIDTH = 760


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

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return f"<figure>{self.svg}<figcaption>{escape(self.caption)}</figcaption></figure>"

    @cached_property
    def png(self) -> bytes:
        """The chart as a PNG file."""
        return bytes(vl_convert.svg_to_png(self.svg, scale=2))


def share(field: str, title: str | None = None) -> alt.Y:
    """Return a vertical axis of shares."""
    scale = alt.Scale(domain=[0, 1])
    return alt.Y(field, scale=scale, axis=alt.Axis(format="%"), title=title)


def family_colours(arms: pd.DataFrame) -> Mapping[str, str]:
    """Return a colour per family, the undefended control's last, which is always dark.

    Args:
        arms: Has the columns family and control.
    """
    named = arms.loc[~arms["control"], "family"].unique()
    colours = {family: COLOURS[i % len(COLOURS)] for i, family in enumerate(named)}
    return colours | dict.fromkeys(arms.loc[arms["control"], "family"], CONTROL)


def grid(panels: list[Layers]) -> Chart:
    """Return panels side by side, wider where there are few."""
    columns = min(len(panels), 3)
    width = {1: 460, 2: 360, 3: 240}[columns]
    sized = [panel.properties(width=width, height=220) for panel in panels]
    return styled(alt.concat(*sized, columns=columns))


def styled(chart: Chart) -> Chart:
    """Return a chart in the style of all of them."""
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
