"""A run in one picture, for a page or a paper: its verdict, frontier and gallery."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import vl_convert
from markupsafe import escape

from leakfrontier.evaluate.conclude.checks import conclusion
from leakfrontier.evaluate.conclude.coordinates import GIVEN
from leakfrontier.evaluate.conclude.frontier import Frontier
from leakfrontier.evaluate.conclude.labels import rows
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.errors import UserError

from .charts import COLOURS, GRID, INK, PAPER, SOFT
from .frontier_figure import frontier_figure, point_names
from .gallery import Gallery, Strip, Tile, make_gallery
from .html import write
from .page import answer

SUFFIXES = (".svg", ".png")
_FONT = "Helvetica, Arial, Liberation Sans, sans-serif"
_MARGIN, _TILE, _STEP, _NAMES = 22, 40, 47, 184  # pixels
_PLOT = 540  # width in pixels
_VICTIMS, _ROWS = 5, 16  # the most that fit
_LETTERS = 27  # characters of a name


def write_picture(results: Conclusions, path: Path, scenario: str | None = None) -> Path:
    """Write the picture of a run: the frontier and the reconstructions.

    Args:
        results: The run, from its folder or its pack.
        path: The path of the picture, an SVG or PNG file.
        scenario: The name of the scenario. Default: the first that was attacked.

    Raises:
        UserError: If there is nothing to draw, or if the path has another suffix.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"a picture must be {' or '.join(SUFFIXES)}, got {path}")
    svg = picture(results, scenario)
    path.parent.mkdir(parents=True, exist_ok=True)
    png = path.suffix == ".png"
    write(path, bytes(vl_convert.svg_to_png(svg, scale=2)) if png else svg.encode())
    return path


def picture(results: Conclusions, scenario: str | None = None) -> str:
    """Return the picture of a run as SVG, for its first attacked round."""
    frontier = _chosen(results.frontiers(), scenario)
    figure = frontier_figure(frontier.scenario, frontier.points, _PLOT)
    if figure is None:
        raise UserError(f"{frontier.scenario}: no defense was both trained and attacked")
    width, height = _size(figure.svg)
    strips = _strips(make_gallery(results, frontier.scenario, frontier.checkpoint), frontier)
    across = width + 2 * _MARGIN + (_NAMES + _VICTIMS * _STEP + _MARGIN if strips else 0)
    said = answer(frontier.scenario, frontier.points).replace(" %", "\u00a0%")
    lines = textwrap.wrap(said, int(across - _MARGIN) // 9)
    lines = [line.replace("\u00a0", " ") for line in lines]
    top = _MARGIN + 24 * len(lines) + 32
    trust = f"{conclusion(results.checks())}. Adversary panel {results.panel}. Intervals are 95 %."
    if frontier.points[f"{GIVEN}_rate"].notna().any():
        trust += " c: success given candidates."
    parts = [
        *(_text(line, _MARGIN, _MARGIN + 16 + 24 * i, 17) for i, line in enumerate(lines)),
        _text(trust, _MARGIN, top - 16, 12.5, SOFT),
        f'<g transform="translate({_MARGIN - 6},{top})">{figure.svg}</g>',
        *(_row(one, width + 2 * _MARGIN, top + 26 + _STEP * i) for i, one in enumerate(strips)),
    ]
    down = top + max(height, 26 + _STEP * len(strips)) + _MARGIN
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{across}" height="{down}" viewBox="0 0 {across} {down}" role="img" '
        f'font-family="{_FONT}"><title>{escape(" ".join(lines))}</title>'
        f'<rect width="{across}" height="{down}" fill="{PAPER}"/>{"".join(parts)}</svg>'
    )


def _chosen(frontiers: Sequence[Frontier], scenario: str | None) -> Frontier:
    names = ", ".join(dict.fromkeys(frontier.scenario for frontier in frontiers))
    for frontier in frontiers:
        if scenario in (None, frontier.scenario):
            return frontier
    if not frontiers:
        raise UserError("this run has no attacks, so there is nothing to draw")
    raise UserError(f"this run has no scenario {scenario!r}; it has {names}")


def _strips(gallery: Gallery | None, frontier: Frontier) -> list[Strip]:
    """Return the truth and the strips of defenses; Pareto-optimal ones come first."""
    if gallery is None or gallery.media != "image/png":
        return []
    truth, worst = gallery.references[0], gallery.worst
    ranked = frontier.points.sort_values(["control", "pareto"], ascending=False, kind="stable")
    names = point_names(frontier.points)
    shown = {row.name: names[row.defense] for row in rows(ranked.head(_ROWS - 1))}
    strips = (replace(strip, name=shown[strip.name]) for strip in worst if strip.name in shown)
    return [truth, *strips]


def _row(strip: Strip, left: float, top: float) -> str:
    name = strip.name if len(strip.name) <= _LETTERS else strip.name[: _LETTERS - 1] + "\u2026"
    middle = top + _TILE / 2
    words = [
        _text(name, left, middle - 2 if strip.note else middle + 4, 12.5),
        _text(strip.note, left, middle + 13, 11.5, SOFT) if strip.note else "",
    ]
    tiles = [
        _tile(tile, left + _NAMES + _STEP * i, top) for i, tile in enumerate(strip.tiles[:_VICTIMS])
    ]
    return "".join(words + tiles)


def _tile(tile: Tile, left: float, top: float) -> str:
    place = f'x="{left}" y="{top}" width="{_TILE}" height="{_TILE}"'
    if tile.absent:
        return _text(tile.absent, left, top + _TILE / 2 + 4, 10, SOFT)
    colour, line = (COLOURS[1], 3) if tile.identified else (GRID, 1)
    return (
        f'<image {place} image-rendering="optimizeSpeed" style="image-rendering:pixelated" '
        f'href="{tile.source}"/><rect {place} fill="none" stroke="{colour}" stroke-width="{line}"/>'
    )


def _text(words: str, x: float, y: float, size: float, colour: str = INK) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}">{escape(words)}</text>'


def _size(svg: str) -> tuple[int, int]:
    """Return the width and height of a chart."""
    found = re.match(r'<svg [^>]*?width="(\d+)" height="(\d+)"', svg)
    if found is None:
        raise ValueError(f"the chart has no size: {svg[:200]}")
    return int(found[1]), int(found[2])
