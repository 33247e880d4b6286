"""The command that verifies a pack."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..foundations.errors import UserError
from ..foundations.terminal import terminal
from .options import Address, EngineName, EngineOption, Workers, engine_from, print_path

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from ..share.judgement import Judgement
    from ..share.verification import Verification

_COLOURS = {"confirmed": "green", "undecided": "yellow", "refuted": "red"}
_EXIT_CODES = {"confirmed": 0, "refuted": 1, "undecided": 3}


def verify(
    path: Annotated[
        Path, typer.Argument(metavar="PACK", help="File that `leakfrontier pack` wrote.")
    ],
    defense: Annotated[
        list[str] | None,
        typer.Option(
            help="Defense to check, as the leaderboard names it, or its family. Can be repeated. "
            "Default: every defense that has a place."
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(min=0, help="Number of seeds of each defense that run again. 0 runs nothing."),
    ] = 3,
    cells: Annotated[
        int,
        typer.Option(
            min=0, help="Number of attacks per defense that run again in addition, at random."
        ),
    ] = 2,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed that chooses what runs again. Default: random.")
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY",
            help="Write a statement of the outcome beside the pack, signed with this private key. "
            "If the file does not exist, the command writes a new key to it.",
        ),
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Allow Python files that the pack contains to run.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the data that the run read from a path or downloaded."),
    ] = None,
    workers: Workers = None,
    engine: EngineOption = EngineName.local,
    address: Address = None,
) -> None:
    """Check a pack: its checksums, its conclusions, and its claims by running their cells again.

    For each defense, the trainings and the attacks that decide its worst case run again. The exit
    code is 0 if all claims are confirmed, 1 if the pack is refuted, and 3 if it is undecided.
    """
    from ..share.archive import AlteredError
    from ..share.pack import read_pack
    from ..share.verification import verify as verify_pack

    console = terminal(highlight=False, soft_wrap=True)
    try:
        pack = read_pack(path)
    except AlteredError as error:
        console.print(f"[bold red]Refuted:[/bold red] {escape(str(error))}")
        raise typer.Exit(1) from None
    console.print(f"Checksums of {len(pack.entries)} files are right. Panel: {escape(pack.panel)}")
    key = None if sign is None else _key(console, sign)
    found = verify_pack(
        pack,
        defenses=defense or (),
        seeds=seeds,
        more=cells,
        seed=secrets.randbelow(2**31) if seed is None else seed,
        trust_code=trust_code,
        data=data,
        workers=workers,
        engine=engine_from(engine, address),
        console=console,
    )
    _print(console, found)
    if key is not None:
        _sign(console, found, path, pack.digest, key)
    if _EXIT_CODES[found.decision]:
        raise typer.Exit(_EXIT_CODES[found.decision])


def _key(console: Console, path: Path) -> Ed25519PrivateKey:
    """Return the key in a file, and print where a new one is."""
    from ..share.statement import public_key, signing_key

    key, new = signing_key(path)
    if new:
        print_path(console, "New private key, which only you should have:", path)
    console.print(f"Public key: {public_key(key)}")
    return key


def _sign(
    console: Console, found: Verification, path: Path, digest: str, key: Ed25519PrivateKey
) -> None:
    """Write a signed statement beside the pack."""
    from ..run.environment import environment
    from ..share.statement import path_beside, public_key, signed

    if not found.judgements and not found.problems:
        raise UserError("nothing ran again, so there is nothing to sign: name a --defense")
    statement = signed(
        found.judgements,
        found.problems,
        pack=digest,
        environment=environment(),
        key=key,
        date=datetime.now(UTC),
    )
    target = path_beside(path, public_key(key))
    try:
        target.write_bytes(statement)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error
    print_path(console, "Statement:", target)


def _print(console: Console, found: Verification) -> None:
    """Print the findings, and the chance that alterations were missed."""
    from ..share.judgement import TOLERANCE

    for problem in found.problems:
        console.print(f"[red]wrong[/red] {escape(problem)}")
    if found.differences:
        console.print(
            f"This environment differs from the pack's: {escape('; '.join(found.differences))}."
        )
    if found.tolerated:
        console.print(
            "On another machine or with other code, rows may differ within a tolerance: "
            f"{TOLERANCE}. Smaller changes go undetected. With the pack's own versions, every bit "
            "counts."
        )
    for judgement in found.judgements:
        _print_claim(console, judgement)
    if not found.judgements and not found.problems:
        console.print("No defense of this pack has a place. Name one with --defense to check it.")
    console.print(f"{found.cells} cells were run again (--seed {found.seed}).")
    words = {"confirmed": "Confirmed", "undecided": "Undecided", "refuted": "Refuted"}
    console.print(f"[bold]{words[found.decision]}[/bold]")


def _print_claim(console: Console, judgement: Judgement) -> None:
    claim, colour = judgement.claim, _COLOURS[judgement.decision]
    training, attack = (f"{100 * share:.0f} %" for share in claim.escapes)
    console.print(
        f"[{colour}]{judgement.decision}[/{colour}] {escape(claim.title)}: accuracy by "
        f"{claim.trainings_chosen} of {len(claim.trainings)} trainings (one altered training "
        f"escapes with probability {training}), worst case by {claim.attacks_chosen} of "
        f"{len(claim.attacks)} attacks (one attack, altered at random: {attack}). "
        f"{judgement.equal} of {len(claim.chosen)} cells are equal in every bit."
    )
    for reason in judgement.reasons:
        console.print(f"  {escape(reason)}")
