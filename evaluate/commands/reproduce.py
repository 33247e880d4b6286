"""The command that reproduces a table of a paper."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..foundations.errors import UserError, writable
from ..foundations.terminal import terminal
from .options import (
    Address,
    AsJson,
    DeviceOption,
    EngineName,
    EngineOption,
    Workers,
    device_from,
    engine_from,
    print_path,
)

if TYPE_CHECKING:
    from ..foundations.statistics import Interval
    from ..papers.reproduce import Result
    from ..papers.table import Metric, PaperSetting
    from ..papers.table import Table as PaperTable

QUICK_TRIALS = 2
"""Batches per row in a smoke test."""

_Column: TypeAlias = "tuple[str, Callable[[PaperSetting], str]]"
"""A column's header, and the function that makes its cell from a row's setting."""


def reproduce(
    table: Annotated[
        str, typer.Argument(help="Name of a table. `leakfrontier list tables` shows all.")
    ],
    rows: Annotated[
        str | None, typer.Option(help="Numbers of rows, e.g. 1,3-5. Default: all.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="Attacked batches per row. Default: as set for each row."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with images in train/ and test/, or a download of torchvision. "
            "Default: download the dataset.",
            envvar="LEAKFRONTIER_DATA",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"Only the first rows, {QUICK_TRIALS} batches each, with a reduced attack.",
        ),
    ] = False,
    procedure: Annotated[
        str | None,
        typer.Option(
            help="Attack procedure: `ours`, `paper` (as published) or another of the table."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of batches and weights.")] = 0,
    device: DeviceOption = None,
    workers: Workers = None,
    engine: EngineOption = EngineName.local,
    address: Address = None,
    as_json: AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for TABLE.json and TABLE.csv (one line per batch). "
            "Default: runs/tables/TABLE."
        ),
    ] = None,
) -> None:
    """Reproduce a paper's table: print our numbers beside the paper's. Continues if interrupted."""
    from pandas import DataFrame

    from ..papers.reproduce import default_folder, document, trial_rows
    from ..papers.reproduce import reproduce as reproduce_table
    from ..papers.tables import TABLES

    if table not in TABLES:
        raise UserError(f"unknown table {table!r}: choose one of {', '.join(TABLES)}")
    paper = TABLES[table]
    chosen = paper.select(rows or (f"1-{paper.quick}" if quick else f"1-{len(paper.rows)}"))
    folder = writable(out or default_folder(paper))
    progress = terminal(stderr=True)
    try:
        results = reproduce_table(
            paper,
            chosen,
            out=folder,
            trials=trials or (QUICK_TRIALS if quick else None),
            procedure=procedure,
            quick=quick,
            seed=seed,
            data=data,
            workers=workers,
            engine=engine_from(engine, address),
            device=device_from(device, engine),
            console=progress,
        )
    except KeyboardInterrupt:
        progress.print("Interrupted. The same command continues where it stopped.")
        raise typer.Exit(130) from None
    text = json.dumps(document(paper, results, quick=quick), indent=2, allow_nan=False)
    if as_json:
        typer.echo(text)
    else:
        _print_table(terminal(), paper, procedure, results)
    if quick and paper.reduced:
        limits = ", ".join(f"{value:,} {name}" for name, value in paper.reduced.items())
        progress.print(f"--quick limits each batch to {limits}.", highlight=False)
    (folder / f"{table}.json").write_text(text + "\n")
    DataFrame(trial_rows(paper, results)).to_csv(folder / f"{table}.csv", index=False)
    print_path(progress, "Results:", folder)
    if _print_failures(progress, results):
        raise typer.Exit(1)


def _print_table(
    console: Console, paper: PaperTable, procedure: str | None, results: Sequence[Result]
) -> None:
    """Print our numbers with intervals beside the paper's, and explain the columns."""
    title = paper.title + (f", ours by the procedure {procedure!r}" if procedure else "")
    names = list(dict.fromkeys(name for row in paper.rows for name in row.setting))
    table = _table(title, paper, results, [_column(name) for name in names])
    unlimited = console.options.update(width=10 * console.width)
    if console.measure(table, options=unlimited).maximum > console.width:
        common = _common(paper)
        table = _table(title, paper, results, _narrow([n for n in names if n not in common], paper))
        if common:
            same = ", ".join(f"{name} {value}" for name, value in common.items())
            table.caption, table.caption_justify = escape(f"all rows: {same}"), "left"
    console.print(table)
    for name, metric in paper.metrics.items():
        console.print(f"{name}: {metric.definition} (ours with a 95 % interval)", highlight=False)
    console.print("n: attacked batches; s: median seconds per attack on one core")
    console.print(escape(f"{paper.notes}\n{paper.reference}"), highlight=False)


def _common(paper: PaperTable) -> dict[str, object]:
    """Return the settings that are equal in all rows, if there are several rows."""
    first, *others = (row.setting for row in paper.rows)
    same = {name: first[name] for name in first if all(o.get(name) == first[name] for o in others)}
    return same if others else {}


def _column(*names: str) -> _Column:
    """Return one column that stacks several settings."""
    return "\n".join(names), lambda own: "\n".join(str(own.get(name, "")) for name in names)


def _narrow(names: Sequence[str], paper: PaperTable) -> list[_Column]:
    """Return columns of two stacked settings each, and one column for rare settings."""
    rare = [name for name in names if any(name not in row.setting for row in paper.rows)]
    rare = rare if len(rare) > 2 else []
    usual = [name for name in names if name not in rare]
    columns = [_column(*usual[start : start + 2]) for start in range(0, len(usual), 2)]
    if rare:
        columns.append(
            ("setting", lambda own: "\n".join(f"{n} {own[n]}" for n in rare if n in own))
        )
    return columns


def _table(
    title: str, paper: PaperTable, results: Sequence[Result], settings: Sequence[_Column]
) -> Table:
    """Return the printed table."""
    published = {name for row in paper.rows for name in row.paper}
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("#", justify="right")
    for header, _ in settings:
        table.add_column(header, justify="right", no_wrap=True)
    for name in paper.metrics:
        for source in ("paper", "ours") if name in published else ("ours",):
            table.add_column(f"{name}\n{source}", justify="right", no_wrap=True)
    for name in ("n", "s"):
        table.add_column(name, justify="right")
    for result in results:
        cells = [result.number, *(text(result.row.setting) for _, text in settings)]
        for name, metric in paper.metrics.items():
            if name in published:
                cells.append(metric.text(result.row.paper.get(name, nan)))
            cells.append(_estimate(metric, result.ours[name]))
        seconds = "" if result.seconds is None else f"{result.seconds:.1f}"
        table.add_row(*(escape(str(cell)) for cell in (*cells, len(result.trials), seconds)))
    return table


def _estimate(metric: Metric, interval: Interval) -> str:
    """Return an estimate and, below it, its interval if it has one."""
    limits = [metric.text(limit).removesuffix(" %") for limit in (interval.low, interval.high)]
    bounded = interval.n and isfinite(interval.low) and not metric.brief
    return metric.text(interval.value) + (f"\n[{','.join(limits)}]" if bounded else "")


def _print_failures(console: Console, results: Sequence[Result]) -> bool:
    """Print why batches failed. Return whether any did."""
    for result in results:
        for index, reason in result.failures.items():
            text = escape(f"row {result.number}, batch {index}: {reason}")
            console.print(f"[red]failed[/red] {text}", soft_wrap=True)
    return any(result.failures for result in results)
