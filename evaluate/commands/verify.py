"""The command that runs cells of a pack again."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..foundations.terminal import terminal
from ..share.archive import AlteredError
from ..share.pack import read_pack
from ..share.verification import TOLERANCE, Verification, escapes
from ..share.verification import verify as verify_pack
from .options import Address, EngineName, EngineOption, Workers, engine_from


def verify(
    path: Annotated[Path, typer.Argument(metavar="PACK", help="What `leakfrontier pack` wrote.")],
    cells: Annotated[int, typer.Option(min=0, help="Cells to run again.")] = 10,
    seed: Annotated[
        int | None, typer.Option(min=0, help="By which cells are chosen; by default at random.")
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Execute Python files that the pack brings along.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder of data that the run had by path.")
    ] = None,
    workers: Workers = None,
    engine: EngineOption = EngineName.local,
    address: Address = None,
) -> None:
    """Check a pack: its checksums, what follows from its rows, and some of its cells, run again."""
    console = terminal(highlight=False, soft_wrap=True)
    try:
        pack = read_pack(path)
    except AlteredError as error:
        console.print(f"[bold red]Refuted:[/bold red] {escape(str(error))}")
        raise typer.Exit(1) from None
    console.print(f"Checksums: right, of {len(pack.entries)} files; panel {escape(pack.panel)}")
    found = verify_pack(
        pack,
        cells=cells,
        seed=secrets.randbelow(2**31) if seed is None else seed,
        trust_code=trust_code,
        data=data,
        workers=workers,
        engine=engine_from(engine, address),
        console=console,
    )
    _print(console, found)
    if not found.passed:
        raise typer.Exit(1)


def _print(console: Console, found: Verification) -> None:
    """Print what was found, and what could still be hidden."""
    for problem in found.problems:
        console.print(f"[red]wrong[/red] {escape(problem)}")
    if found.differences:
        console.print(f"Not the place that made it: {escape('; '.join(found.differences))}.")
    if any(one.verdict == "within tolerance" for one in found.reruns):
        console.print(
            "Rows of another place or by other code need not be bit-equal, but within tolerance: "
            f"{TOLERANCE}. What is below it is not noticed, whatever the probabilities say."
        )
    if found.chosen:
        console.print(
            f"{found.chosen} of {found.cells} cells were run again (--seed {found.seed}). Had so "
            "many cells been altered, none of them would be among these with probability:"
        )
        for altered, probability in escapes(found.cells, found.chosen):
            console.print(f"  {altered}: {100 * probability:.1f} %")
    console.print(f"[bold]{'Not refuted' if found.passed else 'Refuted'}[/bold]")
