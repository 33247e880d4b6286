"""The command that tests whether a defense keeps its differential-privacy claim."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..foundations.terminal import terminal
from .options import AsJson, Data, DefenseText, method_from

if TYPE_CHECKING:
    from ..door.auditing import AuditReport


class AuditName(StrEnum):
    """Names of audits."""

    residual_noise = "residual-noise"
    sampling = "sampling"
    neighbours = "neighbours"
    clipping = "clipping"
    local_steps = "local-steps"
    rare_steps = "rare-steps"
    step_canaries = "step-canaries"
    one_run = "one-run"


def audit(
    defense: DefenseText,
    steps: Annotated[int, typer.Option(help="Number of steps of the claim.")] = 100,
    sample_rate: Annotated[
        float, typer.Option(help="Probability that a step uses a given record.")
    ] = 0.05,
    delta: Annotated[float, typer.Option(help="Delta of the claim.")] = 1e-5,
    method: Annotated[
        list[AuditName] | None,
        typer.Option(
            help="Audit to run. May be repeated. Default: all.",
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Repetitions, each with another seed.")] = 1,
    dataset: Annotated[str, typer.Option(help="Dataset: a name or a folder.")] = "digits",
    model: Annotated[
        str, typer.Option(help="Model: a name or FILE.py:factory.")
    ] = "{name: mlp, width: 32}",
    data: Data = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first repetition.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Test whether a defense keeps its differential-privacy claim. Exit code 1 if refuted.

    An audit can refute a claim. It never proves one.
    """
    from ..door.auditing import audit as run_audit

    report = run_audit(
        method_from(defense, "the defense"),
        steps=steps,
        sample_rate=sample_rate,
        delta=delta,
        methods=[one.replace("-", " ") for one in method or AuditName],
        runs=runs,
        dataset=dataset,
        model=method_from(model, "--model"),
        data_folder=data,
        seed=seed,
    )
    if as_json:
        documents = [one.document() for one in report.audits]
        typer.echo(json.dumps(documents, indent=2, allow_nan=False))
    else:
        _print_audits(terminal(), report)
    if report.refuted:
        raise typer.Exit(1)


def _figure(value: float) -> str:
    from ..conclude.labels import number

    return "n/a" if math.isnan(value) else number(value)


def _print_audits(console: Console, report: AuditReport) -> None:
    table = Table(title="audit", title_justify="left", box=None)
    table.add_column("method")
    for name in ("claimed", "lower bound", "ceiling", "refuted in", "s"):
        table.add_column(name, justify="right")
    for one in report.audits:
        worst = one.worst
        figures = (
            ["n/a"] * 3
            if worst is None
            else [_figure(value) for value in (worst.claimed, worst.lower_bound, worst.ceiling)]
        )
        share = f"{one.refuted_runs} of {len(one.findings)}"
        table.add_row(one.method, *figures, share, f"{one.seconds:.1f}")
    console.print(table)
    for line in str(report).splitlines():
        console.print(escape(line), highlight=False, soft_wrap=True)
