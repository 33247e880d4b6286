"""The command line. In Python: `evaluate.run.run` and `reports.write_report`."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import UserError, users_line
from .advise import advise
from .audit import audit
from .list import list_
from .membership import membership
from .report import report
from .reproduce import reproduce
from .run import run

app = typer.Typer(
    name="leakfrontier",
    help="Measure what a federated-learning defense is worth.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (run, report, reproduce, advise, audit, membership):
    app.command()(command)
app.command("list")(list_)


def main() -> None:
    """Run the command line; a mistake of the user's is explained without a traceback."""
    try:
        app()
    except (UserError, OSError) as error:
        _explain(str(error))
    except Exception as error:
        line = users_line(error)
        if line is None:
            raise
        _explain(f"{line}: {type(error).__name__}: {error}")


def _explain(message: str) -> NoReturn:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]Error:[/bold red] {escape(message)}")
    sys.exit(2)


if __name__ == "__main__":
    main()
