"""The command that ranks the defenses of several packs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..foundations.errors import UserError
from ..foundations.terminal import terminal
from ..share.pack import read_pack
from .options import AsJson, print_path


def leaderboard(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PACKS...", help="Files that `leakfrontier pack` wrote.")
    ],
    out: Annotated[
        Path, typer.Option(help="File of the page. Table and figure go to the same folder.")
    ] = Path("leaderboard.html"),
    as_json: AsJson = False,
) -> None:
    """Rank the defenses of several packs by leakage at equal utility, and write a page."""
    from leakfrontier.reports.leaderboard import json_of, write_leaderboard

    packs = [read_pack(path) for path in paths]
    if not out.parent.is_dir():
        raise UserError(f"there is no folder {out.parent}: choose another --out")
    table = write_leaderboard(packs, out)
    if as_json:
        print(json_of(table))
    else:
        print_path(terminal(), "Leaderboard:", out)
