"""The common parts of all charts, in Altair, for the page and for PNG and SVG files.

Colours are those of Okabe and Ito, which most colour-blind readers can distinguish. Families also
differ in shape. Files use the light colours. On a page, every colour of `DARK` is a variable of the
style sheet, so a chart follows the reader's colour scheme without being drawn again.

Charts use dictionaries for axes, scales and legends, and explicit channel classes. This is faster:
Altair copies its own objects for every layer, and searches its schema to interpret plain strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import altair as alt
import pandas as pd
import vl_convert
from altair.utils import schemapi
from altair.utils.data import to_values
from markupsafe import escape

from .cache import cached

Layers = alt.LayerChart | alt.FacetChart  # the declared return type of altair.layer
Chart = Layers | alt.ConcatChart

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
"""The version of Vega-Lite for which charts are written."""

PAPER, INK, SOFT, OUTLINE = "#ffffff", "#1c2430", "#566171", "#111111"
GRID, AXIS, STAIRS = "#ececec", "#888888", "#d9d9d9"
CONTROL = "#444444"
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31"]

DARK = {
    **{PAPER: "#161c25", INK: "#e6eaf0", SOFT: "#a3afbf", OUTLINE: "#f5f7fa"},
    **{GRID: "#2a323e", AXIS: "#7d8896", STAIRS: "#3d4857", CONTROL: "#c9ced6"},
    **{COLOURS[0]: "#4aa8e0", COLOURS[1]: "#f08a4b", COLOURS[2]: "#2fc49a"},
    **{COLOURS[3]: "#e09bc3", COLOURS[4]: "#f0b83d", COLOURS[5]: "#8fd0f7"},
    **{COLOURS[6]: "#c2a467"},
}
"""The dark variants of colours."""

SHAPES = ["square", "triangle-up", "diamond", "triangle-down", "cross"]
WIDTH, NARROW = 900, 290
"""The width of a plot on a wide and on a narrow screen, in pixels."""


@dataclass(frozen=True)
class Figure:
    """A chart with its title and caption.

    Attributes:
        name: The name of its files, without a suffix.
        title: The title.
        caption: What the chart shows.
        chart: The chart for files and wide screens.
        narrow: The chart for narrow screens; None if it is the same.
        layout: On the page, the chart is scaled, drawn in the available width, or scrolled.
    """

    name: str
    title: str
    caption: str
    chart: Chart
    narrow: Chart | None = None
    layout: Literal["scaled", "fluid", "scroll"] = "scaled"

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification, with a fixed width."""
        return _spec(self.chart)

    def page_spec(self) -> str:
        """Return the specification for the page: JSON that is safe inside a script element."""
        if self.layout != "fluid":
            return _page_json(self.spec)
        fluid = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
        return _page_json(self.spec | fluid)

    def narrow_spec(self) -> str:
        """Return the specification for a narrow screen; "" if there is none of its own."""
        return "" if self.narrow is None else _page_json(_spec(self.narrow))

    @cached_property
    def svg(self) -> str:
        """The chart as an SVG document."""
        return cached(
            lambda: str(vl_convert.vegalite_to_svg(self.spec, vl_version=VEGA_LITE)).encode(),
            "svg",
            json.dumps(self.spec),
            VEGA_LITE,
        ).decode()

    def _repr_html_(self) -> str:
        """Return the figure that a notebook shows."""
        return f"<figure>{self.svg}<figcaption>{escape(self.caption)}</figcaption></figure>"

    @cached_property
    def png(self) -> bytes:
        """The chart as a PNG file."""
        return cached(lambda: bytes(vl_convert.svg_to_png(self.svg, scale=2)), "png 2", self.svg)


def unvalidated() -> AbstractContextManager[None]:
    """Return a context in which Altair does not validate charts.

    Outside of it, Altair checks every part of a chart against its schema. This takes seconds and
    is for tests.
    """
    return schemapi.debug_mode(False)


def _spec(chart: Chart) -> dict[str, Any]:
    """Return a specification that refers to its data by name, because Altair copies data often."""
    datasets: dict[str, Any] = {}

    def named(data: Any) -> dict[str, str]:  # noqa: ANN401 - as Altair declares it
        values = to_values(data)["values"]
        same = (name for name, known in datasets.items() if known == values)
        name = next(same, f"data-{len(datasets)}")
        datasets[name] = values
        return {"name": name}

    alt.data_transformers.register(named.__name__, named)
    with alt.data_transformers.enable(named.__name__):
        spec: dict[str, Any] = chart.to_dict(validate=False)
    return spec | {"datasets": datasets}


def _page_json(spec: Mapping[str, Any]) -> str:
    text = json.dumps(spec, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return re.sub('"(#[0-9a-fA-F]{6})"', lambda found: f'"{_variable(found[1])}"', text)


def _variable(colour: str) -> str:
    return f"var({variable_name(colour)},{colour})" if colour in DARK else colour


def variable_name(colour: str) -> str:
    """Return the name of a colour of `DARK` in the style sheet."""
    return f"--c-{colour[1:].lower()}"


def share(field: str, title: str | None = None) -> alt.Y:
    """Return a vertical axis of shares."""
    return alt.Y(field, scale={"domain": [0, 1]}, axis={"format": "%"}, title=title)


def family_colours(arms: pd.DataFrame) -> Mapping[str, str]:
    """Return a colour per family. The undefended control comes last and is always dark.

    Args:
        arms: Has the columns family and control.
    """
    named = arms.loc[~arms["control"], "family"].unique()
    colours = {family: COLOURS[i % len(COLOURS)] for i, family in enumerate(named)}
    return colours | dict.fromkeys(arms.loc[arms["control"], "family"], CONTROL)


def grid(panels: list[Layers]) -> tuple[Chart, Chart]:
    """Return two charts: panels side by side (wider if there are few), and one below the other."""
    columns = min(len(panels), 3)
    width = {1: 460, 2: 420, 3: 275}[columns]
    wide, narrow = (
        styled(
            alt.concat(
                *(panel.properties(width=size, height=220) for panel in panels), columns=count
            )
        )
        for size, count in ((width, columns), (NARROW - 20, 1))
    )
    return wide, narrow


def styled(chart: Chart) -> Chart:
    """Return a chart in the common style."""
    size = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    text = size | {"labelColor": INK, "titleColor": SOFT}
    lines = {"gridColor": GRID, "domainColor": AXIS, "tickColor": AXIS}
    styled: Chart = chart.configure(
        font="Helvetica, Arial, Liberation Sans, sans-serif",
        background=PAPER,
        view={"stroke": None},
        axis=text | lines | {"titlePadding": 8},
        legend=text,
        header={"labelColor": INK},
        title={"fontSize": 13, "anchor": "start", "fontWeight": 600, "color": INK},
    )
    return styled


def slug(text: str) -> str:
    """Return a name that is safe in file names."""
    return "".join(c if c.isalnum() else "-" for c in text).strip("-").lower()
