"""What the commands share: options, and how they name a defense, data and a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from ..checks import conclusion, overall
from ..errors import UserError, given_by_user
from ..methods import Method
from ..results import Results
from ..scenario import Scenario

Data = Annotated[
    Path | None,
    typer.Option(help="Where downloads are kept.", envvar="LEAKFRONTIER_DATA"),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DefenseText = Annotated[
    str,
    typer.Argument(
        help="The defense: FILE.py:Class, a name, or with options '{name: DPSGD, "
        "noise_multiplier: 1.0}'."
    ),
]


@given_by_user()
def scenario_from(dataset: str | None, model: str | None, data: Path | None) -> Scenario:
    """Return what to measure with.

    BatchNorm becomes GroupNorm, without which no example's gradient can be clipped by itself.
    """
    given: dict[str, Any] = {"dataset": dataset, "data_folder": data}
    if model is not None:
        given["model"] = Method.model_validate(method_from(model, "--model"))
    known = {key: value for key, value in given.items() if value is not None}
    return Scenario(**known, replace_batch_norm=True)


def method_from(text: str, option: str) -> object:
    """Return a method as a configuration file would hold it."""
    try:
        return yaml.safe_load(text) if text.lstrip().startswith("{") else text
    except yaml.YAMLError as error:
        raise UserError(f"{option} {text!r} is not a valid YAML mapping: {error}") from error


@given_by_user()
def defense_from(text: str) -> Method:
    """Return the one configuration of a defense that a command is about."""
    configurations = Method.model_validate(method_from(text, "the defense")).grid()
    if len(configurations) != 1:
        raise UserError(
            f"one configuration is asked about, and the lists in {text} make "
            f"{len(configurations)}: give single values"
        )
    return configurations[0]


def conclude(console: Console, results: Results) -> None:
    """Print whether the evaluation can be trusted; one that cannot ends with exit code 1."""
    checks = results.checks()
    console.print(conclusion(checks), soft_wrap=True, highlight=False, markup=False)
    if overall(checks) == "fail":
        raise typer.Exit(1)


def print_path(console: Console, what: str, path: Path) -> None:
    """Print a path that can be copied."""
    console.print(f"{what} [bold]{escape(str(path))}[/bold]", soft_wrap=True)
