"""The command line. In Python: `evaluate.run.run` and `reports.write_report`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import NoReturn, ParamSpec

import typer
from rich.markup import escape

from ..foundations.errors import UserError, is_about_users_files, users_line
from ..foundations.terminal import terminal
from .advise import advise
from .analyse import analyse
from .attack import attack
from .audit import audit
from .leaderboard import leaderboard
from .list import list_
from .membership import membership
from .pack import pack
from .report import report
from .reproduce import reproduce
from .run import run
from .verify import verify

EXIT_CODES = (
    "Exit code 0: everything was done, and no check fails. 1: cells failed or are missing, a "
    "check failed, a claim is refuted, or a pack is refuted. 2: the input contains a mistake. "
    "130: the command was interrupted (Ctrl-C)."
)

ISSUES = "https://github.com/leakfrontier/leakfrontier/issues"

P = ParamSpec("P")


def _interruptible(command: Callable[P, None]) -> Callable[P, None]:
    """Return a command that exits with code 130 if it is interrupted, like other shell commands."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            terminal(stderr=True).print("Interrupted.")
            raise typer.Exit(130) from None

    return run


app = typer.Typer(
    name="leakfrontier",
    help="Measure what a federated-learning defense is worth.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    *(run, report, attack, reproduce, advise, audit, membership, analyse),
    *(pack, verify, leaderboard),
):
    app.command(epilog=EXIT_CODES)(_interruptible(command))
app.command("list")(list_)


def main() -> None:
    """Run the command line. Explain mistakes of the user without a traceback."""
    try:
        with _rare_collections():
            _command_line()()
    except UserError as error:
        _explain(str(error))
    except Exception as error:
        line = users_line(error)
        if line is not None:
            _explain(f"{line}: {type(error).__name__}: {error}")
        if isinstance(error, OSError) and is_about_users_files(error):
            _explain(str(error))
        error.add_note(f"This looks like a bug in leakfrontier. Please report it at {ISSUES}")
        raise


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect cycles less often: commands are short, and imports make many objects that stay."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@cache
def _command_line() -> Callable[[], object]:
    """Return the command line with all commands (built once)."""
    return typer.main.get_command(app)


def _explain(message: str) -> NoReturn:
    console = terminal(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]Error:[/bold red] {escape(message)}")
    sys.exit(2)


if __name__ == "__main__":
    main()
