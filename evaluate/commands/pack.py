"""The command that packs a run into one small file that others can verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..foundations.errors import UserError
from ..foundations.terminal import terminal
from .options import print_path


def pack(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File of the pack. Default: DIR/NAME.zip, where NAME is the name of DIR."
        ),
    ] = None,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code", help="Allow Python files that the run names (your own) to run."
        ),
    ] = False,
) -> None:
    """Write a reproducibility pack: configuration, rows, sources, versions, checksums."""
    from ..share.pack import pack_run

    path = out or folder / f"{folder.resolve().name}.zip"
    content = pack_run(folder, trust_code=trust_code)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another --out") from error
    console = terminal()
    print_path(console, "Pack:", path)
    console.print(f"{len(content) / 1e6:.2f} MB", highlight=False)
