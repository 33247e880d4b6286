"""Test whether a defense keeps its differential-privacy claim."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from markupsafe import escape
from torch import nn

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import ADJACENCIES, Defense, Guarantee, Plan

from ..foundations.errors import UserError, given_by_user
from ..foundations.seeds import generator
from ..foundations.statistics import finite
from ..privacy.audit import AUDITS
from ..privacy.audit import audit as run_audits
from ..privacy.finding import Audit, most_damning
from ..privacy.promise import NoClaim, claim_under
from ..run.probe import check_defense
from ..users.methods import Method, defense_grid
from ..users.names import label
from ..users.objects import given_model, methods_of
from ..world.scenario import Scenario, World, load_world

AUDITED_EXAMPLES = 1_000
"""Largest number of real examples in an audited training run."""

CAVEATS = (
    "The true epsilon is at least the lower bound, if a test has one. The confidence is 99.999 % "
    "over all runs (step canaries 99.9 %, one run 95 %). A perfect implementation would show the "
    "ceiling. A claim that is not refuted is not thereby proven.",
    "Simulated noise is reproducible from the seed, by design. An audit does not test the random "
    "generator of a deployment, nor the gaps between floating-point numbers.",
)
"""Caveats of every audit."""


@dataclass(frozen=True)
class AuditedMethod:
    """The findings of all repetitions of one audit.

    Attributes:
        method: The audit's name.
        findings: One per repetition. `NotApplicable` says why there is none.
        seconds: Wall time of all repetitions.
    """

    method: str
    findings: Sequence[Audit | NotApplicable]
    seconds: float

    @property
    def worst(self) -> Audit | None:
        """Return the most damning finding. None if the audit was not applicable."""
        found = [one for one in self.findings if isinstance(one, Audit)]
        return most_damning(found) if len(found) == len(self.findings) else None

    @property
    def verdict(self) -> str:
        """Return the verdict of the audit, in words."""
        if self.worst is None:
            return f"not applicable: {self.findings[-1]}"
        return f"{'refuted' if self.worst.violated else 'not refuted'}: {self.worst.finding}"

    @property
    def refuted_runs(self) -> int:
        """Return how many repetitions refute the claim."""
        return sum(isinstance(one, Audit) and one.violated for one in self.findings)

    def document(self) -> Mapping[str, object]:
        """Return the audit as JSON values."""
        worst = self.worst
        numbers = ("claimed", "lower_bound", "ceiling", "p_value")
        return {
            "method": self.method,
            **{name: None if worst is None else finite(getattr(worst, name)) for name in numbers},
            "refuted": None if worst is None else worst.violated,
            "verdict": self.verdict,
            "runs": len(self.findings),
            "refuted_runs": self.refuted_runs,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, repr=False)
class AuditReport:
    """The findings of all audits of a defense.

    Attributes:
        audits: One per method.
        claim: The claim of the defense.
    """

    audits: tuple[AuditedMethod, ...]
    claim: Guarantee | None

    @property
    def refuted(self) -> bool:
        """Return whether the claim is refuted."""
        return any(one.worst is not None and one.worst.violated for one in self.audits)

    @property
    def notes(self) -> Iterator[str]:
        """Yield an explanation of the claim and the caveats of every audit."""
        if self.claim is not None:
            about = ADJACENCIES.get(self.claim.adjacency, self.claim.adjacency)
            yield f"The claim is for one {self.claim.unit} ({self.claim.adjacency}): {about}."
        yield from CAVEATS

    def table(self) -> pd.DataFrame:
        """Return one row per audit."""
        return pd.DataFrame([one.document() for one in self.audits])

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [f"{one.method}: {one.verdict}" for one in self.audits]
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks."""
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        with pd.option_context("display.max_colwidth", None):
            return str(self.table().to_html(index=False)) + notes


def audit(
    defense: object,
    *,
    steps: int = 100,
    sample_rate: float = 0.05,
    delta: float = 1e-5,
    methods: str | Sequence[str] = tuple(AUDITS),
    runs: int = 1,
    dataset: str | Path = "digits",
    model: object = None,
    data_folder: Path | None = None,
    seed: int = 0,
) -> AuditReport:
    """Test whether a defense keeps its differential-privacy claim.

    An audit can refute a claim. It never proves one.

    Args:
        defense: An object, a class, a name, or a mapping as in a configuration.
        steps: Number of steps of the claim.
        sample_rate: Probability that a step uses a given record.
        delta: Delta of the claim.
        methods: Names of the audits to run. By default all.
        runs: Repetitions, each with another seed.
        dataset: Dataset: a name or a path.
        model: Model, given as for `evaluate`. By default a small MLP.
        data_folder: Folder for downloads.
        seed: Seed of the first repetition.

    Raises:
        UserError: If the defense makes no claim, or no audit applies.
    """
    with given_by_user():
        model = {"name": "mlp", "width": 32} if model is None else model
        scenario = measured_scenario(dataset, model, data_folder)
        method = one_configuration(defense)
        plan = replace(Plan(steps, sample_rate, delta), passes=math.ceil(steps * sample_rate))
        methods = [methods] if isinstance(methods, str) else methods
        methods = [name.replace("-", " ") for name in methods]
        if not (methods and runs >= 1):
            raise UserError(f"give at least one audit and one run, got {methods} and {runs} runs")
        unknown = [name for name in methods if name not in AUDITS]
        if unknown:
            raise UserError(f"there is no audit {unknown[0]!r}: choose from {', '.join(AUDITS)}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # uploads are small, so several threads only wait for each other
    try:
        world, audited, _ = loaded(scenario, method, seed)
        seeds = range(seed, seed + runs)
        reports = tuple(_audits(world, audited, plan, methods, seeds))
    finally:
        torch.set_num_threads(threads)
    _refuse_if_none_applies(reports)
    return AuditReport(reports, claim_under(audited, plan))


def _audits(
    world: World, audited: Defense, plan: Plan, methods: Sequence[str], seeds: Sequence[int]
) -> Iterator[AuditedMethod]:
    models = cache(lambda run: world.model(audited, run))
    for name in methods:
        start, findings = time.perf_counter(), []
        for run in seeds:
            found = run_audits(
                defense=audited,
                model=models(run),
                loss=world.modality.loss,
                data=world.train.at(slice(AUDITED_EXAMPLES)),
                plan=plan,
                rng=generator("audit", name, run),
                methods=(name,),
                runs=len(seeds),
            )[name]
            findings.append(found)
            if isinstance(found, NotApplicable):
                break
        yield AuditedMethod(name, findings, time.perf_counter() - start)


def _refuse_if_none_applies(reports: Sequence[AuditedMethod]) -> None:
    """Raise if the defense makes no claim, or no audit applies to it."""
    if any(one.worst is not None for one in reports):
        return
    last = [one.findings[-1] for one in reports]
    reasons = "; ".join(dict.fromkeys(map(str, last)))
    if any(isinstance(reason, NoClaim) for reason in last):
        raise UserError(f"{reasons}: there is nothing to audit")
    raise UserError(f"none of the audits applies: {reasons}")


def measured_scenario(
    dataset: str | Path | None, model: object, data_folder: Path | None
) -> Scenario:
    """Return the scenario of a measurement.

    GroupNorm replaces BatchNorm, because BatchNorm has no separate gradient for each example.
    """
    given: dict[str, Any] = {
        "dataset": None if dataset is None else str(dataset),
        "data_folder": data_folder,
        "model": None if model is None else given_model(model),
    }
    known = {key: value for key, value in given.items() if value is not None}
    return Scenario(**known, replace_batch_norm=True)


@given_by_user()
def one_configuration(defense: object) -> Method:
    """Return the configuration of a defense. Raise if its lists give several."""
    (method,) = methods_of([defense])
    found = defense_grid([method])
    if len(found) != 1:
        raise UserError(
            f"the lists in {defense} give {len(found)} configurations, but one is needed: give "
            "single values"
        )
    return found[0]


def loaded(scenario: Scenario, method: Method, seed: int) -> tuple[World, Defense, nn.Module]:
    """Return world, defense and model. Report mistakes in them as the user's."""
    try:
        world = load_world(scenario)
        defense = world.defense(method)
        model = world.model(defense, seed)
        check_defense(scenario, method)
        return world, defense, model
    except UserError:
        raise
    except Exception as error:  # mistakes in the user's data, class or factory
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{label(method)} on {scenario.name}: {reason}") from error
