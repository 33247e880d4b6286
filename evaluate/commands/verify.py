"""The command that verifies a pack."""

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
    path: Annotated[
        Path, typer.Argument(metavar="PACK", help="File that `leakfrontier pack` wrote.")
    ],
    cells: Annotated[int, typer.Option(min=0, help="Number of cells to run again.")] = 10,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed that chooses these cells. Default: random.")
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Allow Python files that the pack contains to run.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the data, if the run read its data from a path.")
    ] = None,
    workers: Workers = None,
    engine: EngineOption = EngineName.local,
    address: Address = None,
) -> None:
    """Check a pack: its checksums, the conclusions from its rows, and some cells, run again."""
    console = terminal(highlight=False, soft_wrap=True)
    try:
        pack = read_pack(path)
    except AlteredError as error:
        console.print(f"[bold red]Refuted:[/bold red] {escape(str(error))}")
        raise typer.Exit(1) from None
    console.print(f"Checksums of {len(pack.entries)} files are right. Panel: {escape(pack.panel)}")
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
    """Print the findings, and the chance that altered cells were missed."""
    for problem in found.problems:
        console.print(f"[red]wrong[/red] {escape(problem)}")
    if found.differences:
        console.print(
            f"This environment differs from the pack's: {escape('; '.join(found.differences))}."
        )
    if any(one.verdict == "within tolerance" for one in found.reruns):
        console.print(
            "On another machine or with other code, rows may differ within a tolerance: "
            f"{TOLERANCE}. Smaller changes go undetected."
        )
    if found.chosen:
        console.print(
            f"{found.chosen} of {found.cells} cells were run again (--seed {found.seed}). "
            "Number of altered cells, and the probability that none of them was among these:"
        )
        for altered, probability in escapes(found.cells, found.chosen):
            console.print(f"  {altered}: {100 * probability:.1f} %")
    console.print(f"[bold]{'Not refuted' if found.passed else 'Refuted'}[/bold]")
