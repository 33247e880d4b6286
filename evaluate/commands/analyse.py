"""The command that tests whether an architecture by itself resists analytic inversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..foundations.errors import UserError, given_by_user
from ..foundations.terminal import terminal
from .options import AsJson, method_from, print_path

if TYPE_CHECKING:
    from ..models.architecture import Analysis, LayerCounts


def analyse(
    model: Annotated[
        str,
        typer.Argument(
            help="Model: a name (see `leakfrontier list models`), '{name: lenet, activation: "
            "relu}', FILE.py:factory, or the name of a model of torchvision or Hugging Face."
        ),
    ],
    shape: Annotated[
        str, typer.Option(help="Shape of an example: channels,height,width or channels,samples.")
    ] = "3,32,32",
    classes: Annotated[int, typer.Option(min=1, help="Number of classes.")] = 10,
    drawing: Annotated[
        Path | None, typer.Option(help="Write a drawing of the layers to this .svg or .png file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count the constraints that each layer leaks, and name the analytic attacks they permit."""
    from leakfrontier.reports.architecture import save_drawing

    analysis = _analysis(model, shape, classes)
    if drawing is not None:
        save_drawing(analysis.document(), drawing)
    if as_json:
        typer.echo(json.dumps(analysis.document(), indent=2))
    else:
        print_analysis(terminal(), analysis)
    if drawing is not None:
        print_path(terminal(stderr=True), "Drawing:", drawing)


@given_by_user()
def _analysis(model: str, shape: str, classes: int) -> Analysis:
    from ..models.architecture import analyse as analyse_model
    from ..models.architecture import build, space_of
    from ..users.methods import Method
    from ..users.objects import users_own

    try:
        sizes = [int(part) for part in shape.split(",")]
    except ValueError as error:
        raise UserError(f"--shape must be whole numbers, as in 3,32,32, got {shape!r}") from error
    method = Method.model_validate(method_from(model, "the model"))
    users_own(method)
    space = space_of(sizes, classes)
    built = build(method.name, space, method.options)
    try:
        return analyse_model(built, space.shape, method.name)
    except (RuntimeError, TypeError, IndexError) as error:
        raise UserError(
            f"{method.name} fails on inputs of shape {space.shape}: {error}. Give another --shape"
        ) from error


def print_analysis(console: Console, analysis: Analysis) -> None:
    """Print the layers, the possible attacks and the verdict."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("layer", "", "input"):
        table.add_column(name, no_wrap=True)
    for name in ("unknowns", "weight", "gradient", "rank"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in analysis.layers:
        table.add_row(*(escape(text) for text in _cells(row)))
    console.print(table)
    console.print(
        "weight, gradient: number of constraints on a layer's input from its outputs and from the "
        "gradient of its weights; rank: rank of both together (`<=`: an upper bound)",
        highlight=False,
    )
    for verdict in analysis.verdicts:
        mark = "[red]yes[/red]" if verdict.possible else "[green]no[/green] "
        text = escape(f"{verdict.attack} ({verdict.threat}): {verdict.reason}")
        console.print(f"{mark} {text}", soft_wrap=True, highlight=False)
    word = "resists" if analysis.resists else "does not resist"
    console.print(
        escape(f"{analysis.model} {word} analytic inversion by a passive server."),
        style="bold",
        highlight=False,
    )


def _cells(row: LayerCounts) -> tuple[str, ...]:
    if row.kind == "obstacle":
        return (row.name, "obstacle", "", "", "", "", "", row.note)
    kind = f"{row.kind}, {row.activation}" if row.activation else row.kind
    shape = "x".join(map(str, row.input_shape))
    rank = f"{row.rank:,}" if row.computed or row.kind == "linear" else f"<= {row.rank:,}"
    numbers = (f"{value:,}" for value in (row.unknowns, row.weight, row.gradient))
    return (row.name, kind, shape, *numbers, rank, row.note)
