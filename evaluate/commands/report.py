"""The command that makes a page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .options import print_path


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
) -> None:
    """Write DIR/report.html, tables and figures from the rows of a run."""
    from leakfrontier.reports import write_report

    print_path(Console(), "Report:", write_report(folder))
