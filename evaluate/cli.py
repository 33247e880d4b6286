"""The command line. In Python: `evaluate.run.run` and `reports.write_report`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from inspect import getdoc, signature
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leakfrontier.adversaries import ADVERSARIES
from leakfrontier.defenses import DEFENSES, Chain

from .data import DATASETS
from .models import MODELS
from .run import load_config
from .run import run as run_config
from .scenario import SCENARIOS
from .store import Results
from .summary import utility, worst_case

app = typer.Typer(
    name="leakfrontier",
    help="Measure what a federated-learning defense is worth.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Preset(StrEnum):
    """Configurations that come with the package."""

    quick = "quick"
    full = "full"


class Listing(StrEnum):
    """What can be listed."""

    defenses = "defenses"
    adversaries = "adversaries"
    scenarios = "scenarios"
    datasets = "datasets"
    models = "models"


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(help="Configuration file (YAML).")] = None,
    preset: Annotated[Preset | None, typer.Option(help="Configuration by name.")] = None,
    defense: Annotated[
        list[str] | None,
        typer.Option(
            help="Another defense to evaluate beside the configured ones: FILE.py:Class, or with "
            "options '{name: FILE.py:Class, strength: [0.1, 1]}'. May be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; runs/NAME by default.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; one per core by default.")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run cells again that ended in an error.")
    ] = False,
) -> None:
    """Evaluate defenses, and write DIR/report.html. An interrupted run is continued."""
    from leakfrontier.reports import write_report

    if config is not None and preset is not None:
        raise ValueError("give a configuration file or --preset, not both")
    source = config or (preset or Preset.quick).value
    loaded = load_config(source, extra_defenses=[_method(text) for text in defense or ()])
    folder = out or Path("runs") / Path(source).stem
    console = Console()
    _print_path(console, "Results go to", folder)
    try:
        results = run_config(
            loaded, folder, workers=workers, retry_failed=retry_failed, console=console
        )
    except KeyboardInterrupt:
        console.print("Interrupted. The same command continues where it stopped.")
        raise typer.Exit(130) from None
    _print_summary(console, results)
    _print_path(console, "Report:", write_report(folder))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
) -> None:
    """Write DIR/report.html, tables and figures from the rows of a run."""
    from leakfrontier.reports import write_report

    _print_path(Console(), "Report:", write_report(folder))


@app.command("list")
def list_(what: Annotated[Listing, typer.Argument(help="What to list.")]) -> None:
    """List what is there, with the options of each."""
    table = Table(title=what.value, title_justify="left")
    table.add_column("name", no_wrap=True)
    for column in ("options", "what it is"):
        table.add_column(column, overflow="fold")
    for row in _LISTINGS[what]():
        table.add_row(*map(escape, row))
    Console().print(table)


def main() -> None:
    """Run the command line; a mistake of the user's is explained without a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"[bold red]Error:[/bold red] {escape(str(error))}")
        sys.exit(2)


def _method(text: str) -> object:
    """Return a defense as a configuration file would hold it."""
    try:
        return yaml.safe_load(text) if text.lstrip().startswith("{") else text
    except yaml.YAMLError as error:
        raise ValueError(f"--defense {text!r} is not a valid YAML mapping: {error}") from error


def _print_path(console: Console, what: str, path: Path) -> None:
    console.print(f"{what} [bold]{escape(str(path))}[/bold]", soft_wrap=True)


def _print_summary(console: Console, results: Results) -> None:
    """Print accuracy and worst-case success of every arm, and what failed."""
    failed = results.cells[results.cells["status"] != "ok"]
    for _, cell in failed.iterrows():
        reason = cell["error"].partition("\n")[0]
        what = cell["adversary"] if cell["kind"] == "attack" else "training"
        text = escape(f"{what} on {cell['defense']}: {reason}")
        console.print(f"[red]{cell['status']}[/red] {text}", soft_wrap=True)
    accuracy = utility(results).set_index(["scenario", "defense"])["text"]
    table = Table(title="worst case over the panel: victims identified", title_justify="left")
    for column in ("scenario", "round", "defense", "accuracy", "success"):
        table.add_column(column, overflow="fold")
    for _, row in worst_case(results).iterrows():
        arm = (row["scenario"], row["defense"])
        texts = (
            row["scenario"],
            str(row["checkpoint"]),
            row["defense"],
            accuracy.get(arm, "not trained"),
            row["text"],
        )
        table.add_row(*map(escape, texts))
    console.print(table)


def _classes(registry: dict[str, type]) -> Iterable[tuple[str, str, str]]:
    for name, cls in registry.items():
        options = ", ".join(_option(field) for field in fields(cls) if field.init)
        yield name, options, _summary(cls)


def _functions(registry: dict[str, Callable[..., object]]) -> Iterable[tuple[str, str, str]]:
    for name, function in registry.items():
        known = list(signature(function).parameters.values())[1:]  # the first is the input space
        options = [str(option.replace(annotation=option.empty)) for option in known]
        yield name, ", ".join(options), _summary(function)


def _scenarios() -> Iterable[tuple[str, str, str]]:
    for name, scenario in SCENARIOS.items():
        yield name, "", f"{scenario.protocol.name}, batches of {scenario.batch_size}"


def _datasets() -> Iterable[tuple[str, str, str]]:
    for name in DATASETS:
        embedded = name in ("fashion-mini", "digits")
        yield name, "", "comes with the package" if embedded else "downloaded by torchvision"
    yield "a folder of images", "", "one subfolder per class, or train/ and test/ of such"


def _option(field: Field[object]) -> str:
    return field.name if field.default is MISSING else f"{field.name}={field.default!r}"


def _summary(thing: object) -> str:
    return (getdoc(thing) or "").partition("\n")[0]


_LISTINGS: dict[Listing, Callable[[], Iterable[tuple[str, str, str]]]] = {
    Listing.defenses: lambda: _classes({**DEFENSES, Chain.__name__: Chain}),
    Listing.adversaries: lambda: _classes(dict(ADVERSARIES)),
    Listing.scenarios: _scenarios,
    Listing.datasets: _datasets,
    Listing.models: lambda: _functions(dict(MODELS)),
}

if __name__ == "__main__":
    main()
