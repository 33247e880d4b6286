"""The command that attacks updates captured outside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..foundations.errors import given_by_user
from ..foundations.terminal import terminal
from ..outside.capture_run import attack_captures
from ..users.methods import Method
from ..users.objects import users_own
from .options import (
    Address,
    Data,
    DeviceOption,
    EngineName,
    EngineOption,
    Workers,
    conclude,
    engine_from,
    method_from,
    print_path,
)


def attack(
    folder: Annotated[Path, typer.Argument(help="A capture, or a folder with captures below it.")],
    adversary: Annotated[
        list[str] | None,
        typer.Option(help="An attack in place of the panel, as in a run. May be repeated."),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Data by name or path, for look-alikes; what the capture names else."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model by name or FILE.py:factory; what the capture names else."),
    ] = None,
    data: Data = None,
    candidates: Annotated[
        int, typer.Option(min=2, help="Look-alikes of the same class, the victim included.")
    ] = 100,
    trust_code: Annotated[
        bool,
        typer.Option("--trust-code", help="Execute Python files that a capture brings along."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; runs/attack/NAME by default.")
    ] = None,
    device: DeviceOption = None,
    workers: Workers = None,
    engine: EngineOption = EngineName.local,
    address: Address = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run cells again that ended in an error.")
    ] = False,
) -> None:
    """Attack captured updates; with the truth, a page of scores, else a gallery of guesses."""
    from leakfrontier.reports import write_report
    from leakfrontier.reports.captured import write_gallery

    folder_out = out or Path("runs") / "attack" / folder.resolve().name
    console = terminal()
    print_path(console, "Results go to", folder_out)
    with given_by_user():
        methods = [
            Method.model_validate(method_from(one, "--adversary")) for one in adversary or ()
        ]
        own = None if model is None else Method.model_validate(method_from(model, "--model"))
        users_own(*methods, *([] if own is None else [own]))
    try:
        results, scored = attack_captures(
            folder,
            folder_out,
            adversaries=methods,
            dataset=dataset,
            model=own,
            candidates=candidates,
            data_folder=data,
            trust_code=trust_code,
            device="cpu" if device is None else device.device,
            workers=workers,
            engine=engine_from(engine, address),
            retry_failed=retry_failed,
            console=console,
        )
    except KeyboardInterrupt:
        console.print("Interrupted. The same command continues where it stopped.")
        raise typer.Exit(130) from None
    if scored:
        print_path(console, "Report:", write_report(folder_out, results))
        conclude(console, results)
        return
    print_path(console, "Gallery:", write_gallery(folder_out))
    console.print(
        "No success is claimed: that takes truth.safetensors in every capture, and a dataset.",
        highlight=False,
    )
    if not results.cells["status"].eq("ok").all():
        raise typer.Exit(1)
