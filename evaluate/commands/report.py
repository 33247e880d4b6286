"""The command that makes a page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..store import Store
from .options import conclude, print_path


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
) -> None:
    """Write DIR/report.html, tables and figures from the rows of a run."""
    from leakfrontier.reports import write_report

    console = Console()
    print_path(console, "Report:", write_report(folder))
    conclude(console, Store(folder).results())
