"""The command that writes the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..foundations.errors import UserError
from ..foundations.terminal import terminal
from .options import conclude, print_path


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run. With --picture, a pack works too.")
    ],
    picture: Annotated[
        Path | None,
        typer.Option(help="Write frontier and gallery to this .svg or .png file instead."),
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(help="Scenario in the picture. Default: the first.")
    ] = None,
) -> None:
    """Write DIR/report.html, tables and figures from the stored rows of a run."""
    from leakfrontier.reports import write_picture, write_report

    from ..run.store import received_results

    console = terminal()
    if picture is None:
        if scenario is not None:
            raise UserError("--scenario needs --picture: the page shows all scenarios")
        results = received_results(folder)
        print_path(console, "Report:", write_report(folder, results))
    else:
        from ..share.pack import read_pack

        results = read_pack(folder).results if folder.is_file() else received_results(folder)
        print_path(console, "Picture:", write_picture(results, picture, scenario))
    conclude(console, results)
