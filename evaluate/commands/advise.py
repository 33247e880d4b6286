"""The command that chooses DP parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..foundations.terminal import terminal
from .options import (
    Address,
    AsJson,
    Data,
    DeviceOption,
    EngineName,
    EngineOption,
    Workers,
    engine_from,
    method_from,
    print_path,
)

if TYPE_CHECKING:
    from ..advise.advice import Advice


class ProtectedUnit(StrEnum):
    """What differential privacy protects."""

    record = "record"
    client = "client"


def advise(
    epsilon: Annotated[float | None, typer.Option(help="Target: epsilon at most this.")] = None,
    reconstruction_success: Annotated[
        float | None,
        typer.Option(
            help="Target: every reconstruction attack on the run succeeds with at most this "
            "probability, e.g. 0.05."
        ),
    ] = None,
    min_accuracy: Annotated[
        float | None,
        typer.Option(help="Target: test accuracy at least this, e.g. 0.8. Needs data."),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(help="Training examples of all clients together. Default: the dataset's."),
    ] = None,
    examples_per_client: Annotated[
        int | None, typer.Option(help="Training examples of one client. Replaces --examples.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Examples in one batch of a client.")] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds. A round is one step unless --local-epochs or --local-steps is given."
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(help="Passes over a client's examples in the whole run. Replaces --rounds."),
    ] = None,
    local_epochs: Annotated[
        int | None,
        typer.Option(help="Passes over a client's examples in one round, as in Flower."),
    ] = None,
    local_steps: Annotated[
        int | None, typer.Option(help="Steps of a client in one round. Replaces --local-epochs.")
    ] = None,
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 1,
    clients_per_round: Annotated[
        int | None, typer.Option(help="Clients that take part in a round. Default: all.")
    ] = None,
    max_participations: Annotated[
        int | None,
        typer.Option(help="Limit on the rounds of one client. You must enforce it."),
    ] = None,
    unit: Annotated[
        ProtectedUnit, typer.Option(help="What the guarantee protects.")
    ] = ProtectedUnit.record,
    delta: Annotated[
        float | None,
        typer.Option(help="Delta. Default: the smaller of 1e-5 and n^-1.1, for n units."),
    ] = None,
    candidates: Annotated[
        int,
        typer.Option(help="Number of candidates among which an attacker must find the right one."),
    ] = 100,
    shuffled: Annotated[
        bool, typer.Option("--shuffled", help="Batches are shuffled instead of Poisson-sampled.")
    ] = False,
    dropout: Annotated[
        float, typer.Option(help="Share of clients that may drop out (for distributed noise).")
    ] = 0.1,
    colluders: Annotated[
        float,
        typer.Option(help="Share of clients that may tell the server their noise (same use)."),
    ] = 0.1,
    dataset: Annotated[
        str | None, typer.Option(help="Dataset to measure on: a name or a folder of images.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to measure with: a name or FILE.py:factory.")
    ] = None,
    data: Data = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for advice.html and advice.json. Default with data: runs/advise."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the measurements.")] = 0,
    device: DeviceOption = None,
    workers: Workers = None,
    engine: EngineOption = EngineName.local,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Choose DP parameters: noise, clipping norm and their price, from sizes and one target.

    Without data, the answer comes from accountants and proofs, in seconds. With --dataset or
    --model, the command also trains and attacks settings, in minutes. You can stop it at any
    time; the same command continues.
    """
    from ..door.advising import advise as answer

    measured = dataset is not None or model is not None
    folder = out or (Path("runs") / "advise" if measured else None)
    progress = terminal(stderr=True)
    try:
        advice = answer(
            epsilon=epsilon,
            reconstruction_success=reconstruction_success,
            min_accuracy=min_accuracy,
            examples=examples,
            examples_per_client=examples_per_client,
            batch_size=batch,
            rounds=rounds,
            epochs=epochs,
            local_epochs=local_epochs,
            local_steps=local_steps,
            clients=clients,
            clients_per_round=clients_per_round,
            max_participations=max_participations,
            unit=unit.value,
            delta=delta,
            candidates=candidates,
            poisson_sampling=not shuffled,
            dropout=dropout,
            colluders=colluders,
            dataset=dataset,
            model=None if model is None else method_from(model, "--model"),
            data_folder=data,
            out=folder,
            seed=seed,
            workers=workers,
            engine=engine_from(engine, address),
            device="cpu" if device is None else device.device,
        )
    except KeyboardInterrupt:
        progress.print("Interrupted. The same command continues where it stopped.")
        raise typer.Exit(130) from None
    _show(advice, folder, as_json=as_json, progress=progress)
    if advice.recommended is None:
        raise typer.Exit(1)


def _show(advice: Advice, folder: Path | None, *, as_json: bool, progress: Console) -> None:
    """Print the advice. Write its page if a folder is given."""
    if as_json:
        typer.echo(json.dumps(advice.document(), indent=2, allow_nan=False))
    else:
        _print_advice(terminal(), advice)
    if folder is not None and advice.rows:
        from leakfrontier.reports.advice import write_advice

        print_path(progress, "Page:", write_advice(advice, folder))


def _print_advice(console: Console, advice: Advice) -> None:
    """Print the run, the table, the recommendation, who sees what, and the warnings."""
    from ..advise.tables import bounded, sigma
    from ..conclude.labels import number

    console.print(escape(advice.question.summary) + ".", highlight=False, soft_wrap=True)
    if advice.rows:
        _print_rows(console, advice)
    for title, (header, cells) in advice.tables.items():
        _print_table(console, title, header, cells)
    for title, texts in (
        ("Recommended" if advice.recommended else "Not reachable", advice.reasons),
        (
            "Who sees what",
            [
                f"{point.name}: the server sees {point.sees}. Sigma "
                f"{sigma(point.noise_multiplier)}, epsilon {number(point.epsilon)}, bound "
                f"{bounded(point.bound)}"
                for point in advice.observation_points
            ],
        ),
        ("Warnings", advice.warnings),
    ):
        if texts:
            console.print(f"\n[bold]{title}[/bold]")
        for text in texts:
            console.print(f"- {escape(text)}", highlight=False, soft_wrap=True)


def _print_rows(console: Console, advice: Advice) -> None:
    """Print the reported settings, without those of the search."""
    shown = [row for row in advice.rows if not row.searched]
    cells = [
        [
            "->" if row is advice.recommended else "",
            *(cell(row) for cell in advice.columns.values()),
        ]
        for row in shown
    ]
    _print_table(console, advice.setting or "proven", ["", *advice.columns], cells)
    if len(advice.rows) > len(shown):
        console.print(f"The page also shows {len(advice.rows) - len(shown)} rows of the search.")


def _print_table(
    console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a table at its full width. A narrow terminal wraps it without loss."""
    table = Table(title=title, title_justify="left", box=None)
    for place, name in enumerate(header):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    width = console.measure(table, options=console.options.update(width=1000)).maximum
    console.print()
    terminal(file=console.file, width=max(width, console.width)).print(table)
