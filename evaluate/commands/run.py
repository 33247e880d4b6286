"""The command that evaluates defenses."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..foundations.errors import UserError
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

if TYPE_CHECKING:
    from ..conclude.results import Conclusions

TEXT_COLUMNS = 50
"""Width of two columns of rates and all separators. Names of defenses get the rest."""


class PresetName(StrEnum):
    """Names of presets. The first is the default."""

    quick = "quick"
    quick_text = "quick-text"
    standard = "standard"
    full = "full"


def run(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file (YAML). Default: the preset quick.")
    ] = None,
    preset: Annotated[
        PresetName | None,
        typer.Option(help="Configuration by name. Default: quick."),
    ] = None,
    defense: Annotated[
        list[str] | None,
        typer.Option(
            help="Defense to evaluate in addition to the configured ones: a name, FILE.py:Class, "
            "or '{name: FILE.py:Class, strength: [0.1, 1]}'. May be repeated.",
        ),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(help="Run only the scenario of this name. May be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results. Default: runs/NAME.")
    ] = None,
    individual: Annotated[
        bool,
        typer.Option(
            "--individual",
            help="Run every attack on every upload, even if another attack succeeded.",
        ),
    ] = False,
    data: Data = None,
    device: DeviceOption = None,
    workers: Workers = None,
    engine: EngineOption = EngineName.local,
    address: Address = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run failed cells again.")
    ] = False,
) -> None:
    """Evaluate defenses and write DIR/report.html. The same command continues a stopped run."""
    from leakfrontier.reports import write_report

    from ..run.config import load_config
    from ..run.run import run as run_config

    if config is not None and preset is not None:
        raise UserError("give a configuration file or --preset, not both")
    source = config or preset or PresetName.quick
    loaded = load_config(
        source, extra_defenses=[method_from(text, "--defense") for text in defense or ()]
    )
    if scenario:
        loaded = loaded.of_scenarios(scenario)
    if individual:
        loaded = loaded.model_copy(update={"individual": True})
    if data is not None:
        loaded = loaded.with_data(data)
    if device is not None:
        loaded = loaded.on_device(device.device)
    folder = out or Path("runs") / Path(source).stem
    console = terminal()
    print_path(console, "Results go to", folder)
    try:
        results = run_config(
            loaded,
            folder,
            workers=workers,
            engine=engine_from(engine, address),
            retry_failed=retry_failed,
            console=console,
        )
    except KeyboardInterrupt:
        console.print("Interrupted. The same command continues where it stopped.")
        raise typer.Exit(130) from None
    _print_summary(console, results)
    print_path(console, "Report:", write_report(folder, results))
    conclude(console, results)


def _print_summary(console: Console, results: Conclusions) -> None:
    """Print the failed cells, then accuracy and success from nothing of every arm."""
    from pandas import isna

    from ..conclude.labels import final_round, rounds_named, rows

    failed = results.cells[~results.cells["status"].isin(["ok", "not needed"])]
    for _, cell in failed.iterrows():
        reason = cell["error"].partition("\n")[0]
        what = {"train": "training", "replay": "replay", "tune": "tuning"}.get(
            cell["kind"], cell["adversary"]
        )
        text = escape(f"{what} on {cell['defense']}: {reason}")
        console.print(f"[red]{cell['status']}[/red] {text}", soft_wrap=True)
    utility = results.final_utility()
    accuracy = {
        (row.scenario, row.defense): str(row.text)
        + ("" if isna(row.perplexity) else f", perplexity {row.perplexity:.3g}")
        for row in rows(utility)
    }
    last = final_round(utility["rounds"])
    for (scenario, checkpoint), arms in results.worst_case().groupby(
        ["scenario", "checkpoint"], sort=False
    ):
        title = f"{scenario}, {rounds_named(checkpoint)}: worst case over the panel"
        table = Table(title=escape(title), title_justify="left")
        table.add_column("defense", no_wrap=True)
        for column in ("victims identified", f"accuracy, {last}"):
            table.add_column(column)
        for _, arm in arms.iterrows():
            room = max(20, console.width - TEXT_COLUMNS)
            lines = wrap(arm["defense"], room, break_on_hyphens=False)
            final = accuracy.get((scenario, arm["defense"]), "not trained")
            table.add_row(*map(escape, ("\n".join(lines), arm["text"], final)))
        console.print(table)
