"""The command that lists defenses, adversaries, datasets and so on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ..foundations.terminal import terminal


class Listing(StrEnum):
    """Things that can be listed."""

    defenses = "defenses"
    adversaries = "adversaries"
    scenarios = "scenarios"
    datasets = "datasets"
    models = "models"
    tables = "tables"
    presets = "presets"


def list_(what: Annotated[Listing, typer.Argument(help="What to list.")]) -> None:
    """List defenses, attacks, datasets and so on, with their options."""
    from ..users.methods import PROTOCOLS
    from .listings import KEYS, LISTINGS, class_lines, key_lines

    columns = ("name", "size and time" if what is Listing.presets else "options", "what it is")
    _print(what.value, columns, LISTINGS[what.value]())
    if what is Listing.scenarios:
        _print("protocols", ("name", "options", "what it is"), class_lines(dict(PROTOCOLS)))
        for title, model in KEYS.items():
            _print(f"keys of {title}", ("key", "default", "what it is"), key_lines(model))


def _print(title: str, columns: Sequence[str], rows: Iterable[tuple[str, str, str]]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    terminal().print(table)
