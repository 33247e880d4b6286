"""The command that tests whether a defense keeps its differential-privacy claim."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated

import click
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import ADJACENCIES, Plan

from ..conclude.labels import number
from ..foundations.errors import UserError, given_by_user
from ..foundations.seeds import generator
from ..foundations.statistics import finite
from ..foundations.terminal import terminal
from ..privacy.audit import AUDITS
from ..privacy.audit import audit as run_audits
from ..privacy.finding import Audit, most_damning
from ..privacy.promise import NoClaim, claim_under
from .options import AsJson, Data, DefenseText, defense_from, loaded, scenario_from

AUDITED_EXAMPLES = 1_000
"""Most real examples in an audited training run."""


def audit(
    defense: DefenseText,
    steps: Annotated[int, typer.Option(help="Steps for which epsilon is claimed.")] = 100,
    sample_rate: Annotated[
        float, typer.Option(help="Probability that a record is in a step.")
    ] = 0.05,
    delta: Annotated[float, typer.Option(help="Delta at which epsilon is claimed.")] = 1e-5,
    method: Annotated[
        list[str] | None,
        typer.Option(
            click_type=click.Choice([name.replace(" ", "-") for name in AUDITS]),
            help="May be repeated; all by default.",
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Repetitions, with other seeds.")] = 1,
    dataset: Annotated[str, typer.Option(help="A dataset by name, or a folder.")] = "digits",
    model: Annotated[
        str, typer.Option(help="A model by name, or FILE.py:factory.")
    ] = "{name: mlp, width: 32}",
    data: Data = None,
    seed: Annotated[int, typer.Option(min=0, help="First repetition.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Test whether a defense keeps its differential-privacy claim; exit code 1 if refuted.

    An audit can refute a claim, or fail to; it never proves one.
    """
    scenario = scenario_from(dataset, model, data)
    torch.set_num_threads(1)  # uploads are small: several threads wait for each other
    world, audited, _ = loaded(scenario, defense_from(defense), seed)
    with given_by_user():
        plan = _plan(steps, sample_rate, delta)
    examples = world.train.at(slice(AUDITED_EXAMPLES))
    names = [one.replace("-", " ") for one in method or AUDITS]
    models = cache(lambda run: world.model(audited, run))
    reports = []
    for name in names:
        start, findings = time.perf_counter(), []
        for run in range(seed, seed + runs):
            found = run_audits(
                defense=audited,
                model=models(run),
                loss=world.modality.loss,
                data=examples,
                plan=plan,
                rng=generator("audit", name, run),
                methods=(name,),
                runs=runs,
            )[name]
            findings.append(found)
            if isinstance(found, NotApplicable):
                break
        reports.append(_Report(name, findings, time.perf_counter() - start))
    _refuse_if_none_applies(reports)
    if as_json:
        typer.echo(json.dumps([one.document() for one in reports], indent=2, allow_nan=False))
    else:
        _print_audits(terminal(), reports)
        claim = claim_under(audited, plan)
        if claim is not None:
            about = ADJACENCIES.get(claim.adjacency, claim.adjacency)
            typer.echo(f"The claim is for one {claim.unit} ({claim.adjacency}): {about}.")
        typer.echo(SIMULATED)
    if any(one.worst is not None and one.worst.violated for one in reports):
        raise typer.Exit(1)


SIMULATED = (
    "Simulated noise: reproducible by design, from the seed. An audit says nothing of the "
    "generator that a deployment draws from, nor of the gaps between floating-point numbers."
)
"""What holds for every audit, whatever it finds."""


def _plan(steps: int, sample_rate: float, delta: float) -> Plan:
    """Return the plan; where batches are those of shuffled epochs, a record is in one of each."""
    plan = Plan(steps, sample_rate, delta)
    return replace(plan, passes=math.ceil(steps * sample_rate))


@dataclass(frozen=True)
class _Report:
    """What repetitions of one audit found."""

    method: str
    findings: Sequence[Audit | NotApplicable]
    seconds: float

    @property
    def worst(self) -> Audit | None:
        """Return the most damning finding; None if the audit was not applicable."""
        found = [one for one in self.findings if isinstance(one, Audit)]
        return most_damning(found) if len(found) == len(self.findings) else None

    @property
    def verdict(self) -> str:
        if self.worst is None:
            return f"not applicable: {self.findings[-1]}"
        words = self.worst.verdict.partition(": ")[2]
        return f"refuted: {words}" if self.worst.violated else f"not refuted: {words}"

    def document(self) -> Mapping[str, object]:
        numbers = ("claimed", "lower_bound", "ceiling", "p_value")
        found = {
            name: None if self.worst is None else finite(getattr(self.worst, name))
            for name in numbers
        }
        return {
            "method": self.method,
            **found,
            "refuted": None if self.worst is None else self.worst.violated,
            "verdict": self.verdict,
            "runs": len(self.findings),
            "refuted_runs": sum(isinstance(one, Audit) and one.violated for one in self.findings),
            "seconds": self.seconds,
        }


def _refuse_if_none_applies(reports: Sequence[_Report]) -> None:
    """Raise if there is nothing to audit, or no audit for what there is."""
    if any(one.worst is not None for one in reports):
        return
    last = [one.findings[-1] for one in reports]
    reasons = "; ".join(dict.fromkeys(map(str, last)))
    if any(isinstance(reason, NoClaim) for reason in last):
        raise UserError(f"{reasons}: there is nothing to audit")
    raise UserError(f"none of the audits applies: {reasons}")


def _figure(value: float) -> str:
    return "n/a" if math.isnan(value) else number(value)


def _print_audits(console: Console, reports: Sequence[_Report]) -> None:
    table = Table(title="audit", title_justify="left", box=None)
    table.add_column("method")
    for name in ("claimed", "lower bound", "ceiling", "refuted in", "s"):
        table.add_column(name, justify="right")
    for one in reports:
        worst, document = one.worst, one.document()
        figures = (
            ["n/a"] * 3
            if worst is None
            else [_figure(value) for value in (worst.claimed, worst.lower_bound, worst.ceiling)]
        )
        share = f"{document['refuted_runs']} of {document['runs']}"
        table.add_row(one.method, *figures, share, f"{one.seconds:.1f}")
    console.print(table)
    for one in reports:
        console.print(f"{one.method}: {escape(one.verdict)}", highlight=False, soft_wrap=True)
    console.print(
        "The true epsilon is not below the lower bound, where a test has one (99.999 % confidence "
        "over all runs; step canaries 99.9 %, one run 95 %); a perfect implementation would show "
        "the ceiling. What is not refuted is not thereby proven.",
        highlight=False,
        soft_wrap=True,
    )
