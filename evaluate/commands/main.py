"""The command line. In Python: `evaluate.run.run` and `reports.write_report`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from inspect import getdoc, signature
from math import isfinite, nan
from pathlib import Path
from typing import Annotated

import typer
from pandas import DataFrame
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leakfrontier.adversaries import ADVERSARIES
from leakfrontier.defenses import DEFENSES, Chain

from ..data import DATASETS
from ..models import MODELS
from ..papers.reproduce import QUICK_TRIALS, Metric, Result, document, trial_rows
from ..papers.reproduce import Table as PaperTable
from ..papers.reproduce import reproduce as reproduce_table
from ..papers.tables import TABLES
from ..results import Results
from ..run import load_config
from ..run import run as run_config
from ..scenario import SCENARIOS
from ..statistics import Interval
from .advise import advise
from .audit import audit
from .membership import membership
from .options import method_from, print_path

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
    tables = "tables"


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
    loaded = load_config(
        source, extra_defenses=[method_from(text, "--defense") for text in defense or ()]
    )
    folder = out or Path("runs") / Path(source).stem
    console = Console()
    print_path(console, "Results go to", folder)
    try:
        results = run_config(
            loaded, folder, workers=workers, retry_failed=retry_failed, console=console
        )
    except KeyboardInterrupt:
        console.print("Interrupted. The same command continues where it stopped.")
        raise typer.Exit(130) from None
    _print_summary(console, results)
    print_path(console, "Report:", write_report(folder))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
) -> None:
    """Write DIR/report.html, tables and figures from the rows of a run."""
    from leakfrontier.reports import write_report

    print_path(Console(), "Report:", write_report(folder))


@app.command()
def reproduce(
    table: Annotated[str, typer.Argument(help="Name of a table: see `leakfrontier list tables`.")],
    rows: Annotated[
        str | None, typer.Option(help="Rows by number, as in 1,3-5; all by default.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Batches attacked per row; set by row by default.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the dataset's images in train/ and test/, or of torchvision's "
            "download; downloaded by default.",
            envvar="LEAKFRONTIER_DATA",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"First rows alone, {QUICK_TRIALS} batches each.")
    ] = False,
    procedure: Annotated[
        str | None,
        typer.Option(
            help="`ours`, or `paper` for the paper's own way to attack, where it differs."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Repetition: other batches and weights.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; one per core by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for TABLE.json and TABLE.csv, one line per batch.")
    ] = None,
) -> None:
    """Measure a paper's table, and print ours beside it."""
    if table not in TABLES:
        raise ValueError(f"unknown table {table!r}: choose one of {', '.join(TABLES)}")
    paper = TABLES[table]
    chosen = paper.select(rows or (f"1-{paper.quick}" if quick else f"1-{len(paper.rows)}"))
    progress = Console(stderr=True)
    try:
        results = reproduce_table(
            paper,
            chosen,
            trials=trials or (QUICK_TRIALS if quick else None),
            procedure=procedure,
            seed=seed,
            data=data,
            workers=workers,
            console=progress,
        )
    except KeyboardInterrupt:
        progress.print("Interrupted.")
        raise typer.Exit(130) from None
    text = json.dumps(document(paper, results), indent=2, allow_nan=False)
    if as_json:
        typer.echo(text)
    else:
        _print_table(Console(), paper, procedure, results)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{table}.json").write_text(text + "\n")
        DataFrame(trial_rows(paper, results)).to_csv(out / f"{table}.csv", index=False)
        print_path(progress, "Results:", out)
    if _print_failures(progress, results):
        raise typer.Exit(1)


for command in (advise, audit, membership):
    app.command()(command)


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


def _print_summary(console: Console, results: Results) -> None:
    """Print accuracy and worst-case success of every arm, and what failed."""
    failed = results.cells[results.cells["status"] != "ok"]
    for _, cell in failed.iterrows():
        reason = cell["error"].partition("\n")[0]
        what = cell["adversary"] if cell["kind"] == "attack" else "training"
        text = escape(f"{what} on {cell['defense']}: {reason}")
        console.print(f"[red]{cell['status']}[/red] {text}", soft_wrap=True)
    accuracy = results.final_utility().set_index(["scenario", "defense"])["text"]
    table = Table(title="worst case over the panel: victims identified", title_justify="left")
    for column in ("scenario", "round", "defense", "accuracy", "success"):
        table.add_column(column, overflow="fold")
    for _, row in results.worst_case().iterrows():
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


def _print_table(
    console: Console, paper: PaperTable, procedure: str | None, results: Sequence[Result]
) -> None:
    """Print ours beside the paper's, with intervals, and what the columns mean."""
    settings = list(dict.fromkeys(name for row in paper.rows for name in row.setting))
    published = {name for row in paper.rows for name in row.paper}
    title = paper.title + (f", ours by the procedure {procedure!r}" if procedure else "")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("#", justify="right")
    for name in settings:
        table.add_column(name, justify="right", no_wrap=True)
    for name in paper.metrics:
        for source in ("paper", "ours") if name in published else ("ours",):
            table.add_column(f"{name}\n{source}", justify="right", no_wrap=True)
    for name in ("n", "s"):
        table.add_column(name, justify="right")
    for result in results:
        cells = [result.number, *(result.row.setting.get(name, "") for name in settings)]
        for name, metric in paper.metrics.items():
            if name in published:
                cells.append(metric.text(result.row.paper.get(name, nan)))
            cells.append(_estimate(metric, result.ours[name]))
        seconds = "" if result.seconds is None else f"{result.seconds:.1f}"
        table.add_row(*(escape(str(cell)) for cell in (*cells, len(result.trials), seconds)))
    console.print(table)
    for name, metric in paper.metrics.items():
        console.print(f"{name}: {metric.definition}, ours with a 95 % interval", highlight=False)
    console.print("n: batches attacked; s: median seconds of an attack, on one core")
    console.print(escape(f"{paper.notes}\n{paper.reference}"), highlight=False)


def _estimate(metric: Metric, interval: Interval) -> str:
    """Return an estimate, and below it the interval if there is one."""
    limits = [metric.text(limit).removesuffix(" %") for limit in (interval.low, interval.high)]
    bounded = interval.n and isfinite(interval.low)
    return metric.text(interval.value) + (f"\n[{','.join(limits)}]" if bounded else "")


def _print_failures(console: Console, results: Sequence[Result]) -> bool:
    """Print why batches could not be attacked; return whether there are any."""
    for result in results:
        for index, reason in result.failures.items():
            text = escape(f"row {result.number}, batch {index}: {reason}")
            console.print(f"[red]failed[/red] {text}", soft_wrap=True)
    return any(result.failures for result in results)


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


def _tables() -> Iterable[tuple[str, str, str]]:
    for name, table in TABLES.items():
        yield name, f"rows 1-{len(table.rows)}", table.title


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
    Listing.tables: _tables,
}

if __name__ == "__main__":
    main()
