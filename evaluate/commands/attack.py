"""The command that attacks updates that were captured in another training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..foundations.errors import given_by_user
from ..foundations.terminal import terminal
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
        typer.Option(
            help="Attack to run instead of the panel, given as in a run. May be repeated."
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Dataset (name or path) for look-alikes. Default: the one named in the capture."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model: name or FILE.py:factory. Default: the one named in the capture."),
    ] = None,
    data: Data = None,
    candidates: Annotated[
        int,
        typer.Option(min=2, help="Number of look-alikes of the same class, including the victim."),
    ] = 100,
    trust_code: Annotated[
        bool,
        typer.Option("--trust-code", help="Allow Python files that a capture contains to run."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results. Default: runs/attack/NAME.")
    ] = None,
    device: DeviceOption = None,
    workers: Workers = None,
    engine: EngineOption = EngineName.local,
    address: Address = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run failed cells again.")
    ] = False,
) -> None:
    """Attack captured updates. Write scores if the truth is known, else a gallery of guesses."""
    from leakfrontier.reports import write_report
    from leakfrontier.reports.captured import write_gallery

    from ..outside.capture_run import attack_captures
    from ..users.methods import Method
    from ..users.objects import users_own

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
        "No success rate is reported: it needs truth.safetensors in every capture and a dataset.",
        highlight=False,
    )
    if not results.cells["status"].eq("ok").all():
        raise typer.Exit(1)
