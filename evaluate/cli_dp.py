"""The commands about differential privacy: choose its parameters, and test an implementation."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import Batch, Plan

from .advice import Advice, number
from .audit import Audit, most_damning
from .audit import audit as run_audits
from .methods import Method, build_defense
from .probe import NoClaim
from .question import finite
from .scenario import Scenario, generator, load_world, loss

BATCH, ROUNDS = 128, 100
"""What is asked about where only a dataset is given."""

AUDITED_EXAMPLES = 1_000
"""Most real examples in an audited training run."""


class ProtectedUnit(StrEnum):
    """What differential privacy protects."""

    record = "record"
    client = "client"


class AuditMethod(StrEnum):
    """Audits, by the names of the command line."""

    residual_noise = "residual-noise"
    step_canaries = "step-canaries"
    one_run = "one-run"


Data = Annotated[
    Path | None,
    typer.Option(help="Where downloads are kept.", envvar="LEAKFRONTIER_DATA"),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def sizes(
    examples: int | None,
    batch: int | None,
    rounds: int | None,
    epochs: float | None,
    clients: int,
    scenario: Scenario | None,
) -> tuple[int, int, int]:
    """Return examples, batch size and rounds; defaults only where there is data."""
    if rounds is not None and epochs is not None:
        raise ValueError("give --rounds or --epochs, not both")
    steps = rounds if epochs is None else epochs
    if scenario is None and None in (examples, batch, steps):
        raise ValueError(
            "give --examples, --batch and --rounds (or --epochs), or a --dataset to measure on"
        )
    total = 0 if examples is None else examples
    if not 1 <= clients <= total:
        raise ValueError(f"clients must be between 1 and the {total} examples, got {clients}")
    size = min(BATCH, total // clients) if batch is None else batch
    if epochs is not None:
        if not (0 < epochs < math.inf and size >= 1):
            raise ValueError(f"epochs and batch must be positive, got {epochs} and {size}")
        rounds = math.ceil(epochs * (total // clients) / size)
    return total, size, ROUNDS if rounds is None else rounds


def scenario_from(dataset: str | None, model: str | None, data: Path | None) -> Scenario | None:
    """Return what to measure with; None if neither a dataset nor a model is named.

    BatchNorm becomes GroupNorm, without which no example's gradient can be clipped by itself.
    """
    if dataset is None and model is None:
        return None
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
        raise ValueError(f"{option} {text!r} is not a valid YAML mapping: {error}") from error


def defense_from(text: str) -> Method:
    """Return the one configuration of a defense that a command is about."""
    configurations = Method.model_validate(method_from(text, "the defense")).grid()
    if len(configurations) != 1:
        raise ValueError(
            f"one configuration is asked about, and the lists in {text} make "
            f"{len(configurations)}: give single values"
        )
    return configurations[0]


def print_path(console: Console, what: str, path: Path) -> None:
    """Print a path that can be copied."""
    console.print(f"{what} [bold]{escape(str(path))}[/bold]", soft_wrap=True)


def print_advice(console: Console, advice: Advice) -> None:
    """Print the table, the recommendation, who sees what, and the warnings."""
    if advice.rows:
        _print_rows(console, advice)
    for title, texts in (
        ("Recommended" if advice.recommended else "Not reachable", advice.reasons),
        (
            "Who sees what",
            [
                f"{point.name}: the server sees {point.sees}: sigma {point.noise_multiplier:.3g}, "
                f"epsilon {number(point.epsilon)}, bound {100 * point.bound:.3g} %"
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
    """Print the table as wide as it is: a narrow terminal wraps it, and loses nothing."""
    table = Table(title=advice.setting or "proven", title_justify="left", box=None)
    table.add_column("")
    for name in advice.columns:
        table.add_column(name, justify="right", no_wrap=True)
    shown = [row for row in advice.rows if not row.searched]
    for row in shown:
        mark = "->" if row is advice.recommended else ""
        table.add_row(mark, *(escape(column(row)) for column in advice.columns.values()))
    width = console.measure(table, options=console.options.update(width=1000)).maximum
    Console(file=console.file, width=max(width, console.width)).print(table)
    if len(advice.rows) > len(shown):
        console.print(f"{len(advice.rows) - len(shown)} rows of the search are on the page.")


def audit(
    defense: Annotated[
        str,
        typer.Argument(
            help="The defense: FILE.py:Class, a name, or with options '{name: DPSGD, "
            "noise_multiplier: 1.0}'."
        ),
    ],
    steps: Annotated[int, typer.Option(help="Steps for which epsilon is claimed.")] = 100,
    sample_rate: Annotated[
        float, typer.Option(help="Probability that a record is in a step.")
    ] = 0.05,
    delta: Annotated[float, typer.Option(help="Delta at which epsilon is claimed.")] = 1e-5,
    method: Annotated[
        list[AuditMethod] | None, typer.Option(help="May be repeated; all by default.")
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
    built = build_defense(defense_from(defense))
    torch.set_num_threads(1)  # uploads are small: several threads wait for each other
    scenario = scenario_from(dataset, model, data)
    if scenario is None:
        raise ValueError("a dataset and a model must be given")
    world = load_world(scenario)
    audited = built.for_space(world.space.mean, world.space.std)
    examples = Batch(*(part[:AUDITED_EXAMPLES] for part in world.train))
    plan = Plan(steps, sample_rate, delta)
    names = [one.value.replace("-", " ") for one in method or AuditMethod]
    reports = []
    for name in names:
        start, findings = time.perf_counter(), []
        for run in range(seed, seed + runs):
            found = run_audits(
                audited,
                world.model(audited, run),
                loss,
                examples,
                plan,
                generator("audit", name, run),
                (name,),
                runs,
            )[name]
            findings.append(found)
            if isinstance(found, NotApplicable):
                break
        reports.append(_Report(name, findings, time.perf_counter() - start))
    _refuse_if_none_applies(reports)
    if as_json:
        typer.echo(json.dumps([one.document() for one in reports], indent=2, allow_nan=False))
    else:
        _print_audits(Console(), reports)
    if any(one.worst is not None and one.worst.violated for one in reports):
        raise typer.Exit(1)


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
        raise ValueError(f"{reasons}: there is nothing to audit")
    raise ValueError(f"none of the audits applies: {reasons}")


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
            else [number(value) for value in (worst.claimed, worst.lower_bound, worst.ceiling)]
        )
        share = f"{document['refuted_runs']} of {document['runs']}"
        table.add_row(one.method, *figures, share, f"{one.seconds:.1f}")
    console.print(table)
    for one in reports:
        console.print(f"{one.method}: {escape(one.verdict)}", highlight=False, soft_wrap=True)
    console.print(
        "The true epsilon is not below the lower bound (95 % confidence over all runs; the noise "
        "test 99.999 %); a perfect implementation would show the ceiling. What is not refuted is "
        "not thereby proven.",
        highlight=False,
        soft_wrap=True,
    )
