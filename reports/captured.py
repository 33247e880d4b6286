"""A gallery of guesses at captured updates without known private examples or data."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from leakfrontier.evaluate.conclude.labels import rows, short_names
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations.rows import MEDIA
from leakfrontier.evaluate.run.store import Store

from .gallery import Tile, Token
from .html import render, write
from .tables import attack_name, collapsed_error

GALLERY_NAME = "gallery.html"
FOLDER = "reconstructions"
_KEY = ["cell", "observation", "victim"]


@dataclass(frozen=True)
class ShownAttempt:
    """The result of one attack on one capture.

    Attributes:
        name: The attack.
        remark: What the attack says about its guess, or why it has none.
        tiles: Its guesses.
        truths: The private example that is matched to each guess, if it is known.
    """

    name: str
    remark: str
    tiles: tuple[Tile, ...]
    truths: tuple[Tile, ...]


@dataclass(frozen=True)
class ShownUpload:
    """The results of all attacks on one capture."""

    name: str
    setting: str
    attempts: tuple[ShownAttempt, ...]


def write_gallery(folder: Path) -> Path:
    """Write the gallery of a folder of attacks on captures, and return the page's path.

    Every guess on the page is also a file in `reconstructions/`.

    Args:
        folder: The folder of the results, with `results.sqlite`.
    """
    results = Store(folder).results()
    uploads = [
        _upload(results, name, number, group)
        for name, (number, group) in _by_capture(results).items()
    ]
    _write_files(folder, results)
    page = folder / GALLERY_NAME
    text = render(
        "captured.html.j2",
        uploads=uploads,
        panel=results.panel,
        failures=results.cells[results.cells["status"] != "ok"][["adversary", "error"]],
        collapsed_error=collapsed_error,
        config=yaml.safe_dump(dict(results.config), sort_keys=False, allow_unicode=True),
    )
    write(page, text.encode())
    return page


def _by_capture(results: Conclusions) -> dict[str, tuple[int, pd.DataFrame]]:
    """Return the number and the rows of every capture."""
    found: dict[str, tuple[int, pd.DataFrame]] = {}
    for cell in rows(results.cells):
        for number, name in zip(cell.numbers, cell.captures, strict=True):
            _, before = found.get(name, (number, results.attacks.head(0)))
            own = results.attacks[
                (results.attacks["cell"] == cell.cell) & (results.attacks["observation"] == number)
            ]
            found[name] = number, pd.concat([before, own]) if len(before) else own
    return found


def _upload(results: Conclusions, name: str, number: int, attacks: pd.DataFrame) -> ShownUpload:
    names = short_names(results.cells, "adversary")
    shown = attacks.merge(
        results.renderings[[*_KEY, "media", "truth", "guess"]], on=_KEY, how="left"
    )
    scores = results.scores[results.scores["observation"] == number]
    attempts = []
    for key, group in shown.groupby("cell", sort=False):
        first = next(rows(group))
        if first.baseline:
            continue
        measured = scores[scores["cell"] == key].groupby("metric")["value"].median()
        drawn = group.dropna(subset="guess")
        attempts.append(
            ShownAttempt(
                attack_name(names[first.adversary], first),
                _remark(first, measured),
                tuple(_tile(row.media, row.guess) for row in rows(drawn)),
                tuple(_tile(row.media, row.truth) for row in rows(drawn) if row.truth),
            )
        )
    first = next(rows(attacks))
    return ShownUpload(name, f"{first.scenario}, defense: {first.defense}", tuple(attempts))


def _remark(row: Any, measured: pd.Series[float]) -> str:  # noqa: ANN401 - a row of a table
    if row.outcome == "not applicable":
        return f"not applicable: {row.reason}"
    parts = [f"{name} {value:.3g}" for name, value in measured.items()]
    if pd.notna(row.objective):
        parts.append(f"objective {row.objective:.3g}")
    return ", ".join(parts) or "says nothing about its guess"


def _tile(media: str, content: bytes) -> Tile:
    if media == "tokens":
        return Tile(tokens=tuple(Token(text) for text in json.loads(content)))
    return Tile(f"data:{media};base64,{base64.b64encode(content).decode()}")


def _write_files(folder: Path, results: Conclusions) -> None:
    names = {
        cell.cell: dict(zip(cell.numbers, cell.captures, strict=True))
        for cell in rows(results.cells)
    }
    (folder / FOLDER).mkdir(exist_ok=True)
    for row in rows(results.renderings):
        capture = names[row.cell][row.observation].replace("/", "-") or "capture"
        knows = "" if row.knows_defense else "-ignorant"
        stem = f"{capture}-{row.adversary_name}{knows}-{row.cell[:6]}-{row.victim}"
        write(folder / FOLDER / f"{stem}.{MEDIA[row.media].extension}", row.guess)
