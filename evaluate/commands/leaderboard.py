"""The command that ranks the defenses of several packs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..foundations.errors import UserError
from ..foundations.terminal import terminal
from .options import AsJson, print_path

if TYPE_CHECKING:
    from ..share.statement import Statement


def leaderboard(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PACKS...", help="Files that `leakfrontier pack` wrote.")
    ],
    out: Annotated[
        Path, typer.Option(help="File of the page. Table and figure go to the same folder.")
    ] = Path("leaderboard.html"),
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Public key whose statements count, in hexadecimal. Can be repeated. Default: all."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank the defenses of several packs by leakage at equal utility, and write a page.

    Signed statements of `leakfrontier verify --sign` count if they lie beside the packs. Defenses
    that nobody verified are ranked apart.
    """
    from leakfrontier.reports.leaderboard import json_of, write_leaderboard

    from ..share.pack import read_pack
    from ..share.statement import is_hexadecimal, statements_beside

    for one in key or ():
        if not is_hexadecimal(one, 32):
            raise UserError(f"a public key has 64 hexadecimal digits, got {one!r}")
    packs = [read_pack(path) for path in paths]
    if not out.parent.is_dir():
        raise UserError(f"there is no folder {out.parent}: choose another --out")
    statements: dict[str, list[Statement]] = {}
    messages = terminal(stderr=True, highlight=False, soft_wrap=True)
    for path, pack in zip(paths, packs, strict=True):
        statements[pack.name], refused = statements_beside(path, pack.digest, key or ())
        for reason in refused:
            messages.print(f"[yellow]warning[/yellow] {escape(reason)}")
    table = write_leaderboard(packs, out, statements)
    if as_json:
        print(json_of(table))
    else:
        print_path(terminal(), "Leaderboard:", out)
