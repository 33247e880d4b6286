"""The report of a run: one self-contained page, its tables as CSV and its figures as files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pandas as pd
import yaml

from leakfrontier.evaluate.analysis import (
    attack_rates,
    guarantees,
    utility,
    utility_curve,
    worst_case,
)
from leakfrontier.evaluate.baseline import ADVICE, heuristics
from leakfrontier.evaluate.checks import Check, run_checks
from leakfrontier.evaluate.frontier import Frontier, make_frontiers
from leakfrontier.evaluate.labels import percent
from leakfrontier.evaluate.metrics import TIERS
from leakfrontier.evaluate.store import Results, Store

from .charts import Figure
from .figures import (
    accuracy_figure,
    psnr_figure,
    strength_figure,
)
from .frontier_figure import frontier_figure
from .gallery import Gallery, make_gallery
from .heatmap import heatmap_figure
from .html import render, write
from .tables import (
    Table,
    baseline_table,
    failure_table,
    family_table,
    guarantee_table,
    headline_table,
    not_applicable_table,
    rate_table,
)

PAGE_NAME = "report.html"
_PACKAGES = ("leakfrontier", "torch", "torchvision", "opacus", "numpy", "scipy", "pandas", "altair")
_TRUST = {
    "pass": "Yes: every check passed.",
    "warn": "With reservations: read the warnings before quoting a number.",
    "fail": "No: at least one check failed, so these numbers are not evidence.",
}


@dataclass(frozen=True)
class Setting:
    """What the page shows of one scenario and attacked round."""

    title: str
    frontier: Frontier
    headline: Table
    informed: bool
    baseline: Table
    baseline_missing: str
    guarantees: Table
    families: Table
    rates: Table
    heatmap: Figure | None
    strength: Figure | None
    psnr: Figure | None
    gallery: Gallery | None


@dataclass(frozen=True)
class Scenario:
    """What the page shows of one scenario."""

    name: str
    answer: str
    frontier: Figure | None
    accuracy: Figure | None
    settings: tuple[Setting, ...]


def write_report(folder: Path) -> Path:
    """Write the report of a run into its folder and return the page's path.

    Beside `report.html`, it writes every table to `tables/` and every figure to `figures/`.
    Files appear whole or not at all.

    Args:
        folder: Holds `results.sqlite`.
    """
    results = Store(folder).results()
    rates, worst = attack_rates(results), worst_case(results)
    checks, frontiers = run_checks(results), make_frontiers(results)
    for name, table in _tables(results, rates, worst, checks, frontiers).items():
        write(folder / "tables" / f"{name}.csv", table.to_csv(index=False).encode())
    scenarios = _scenarios(results, rates, worst, frontiers)
    for figure in _figures(scenarios):
        write(folder / "figures" / f"{figure.name}.png", figure.png)
        write(folder / "figures" / f"{figure.name}.svg", figure.svg.encode())
    page = folder / PAGE_NAME
    write(page, _render(results, rates, checks, scenarios).encode())
    return page


def _tables(
    results: Results,
    rates: pd.DataFrame,
    worst: pd.DataFrame,
    checks: list[Check],
    frontiers: list[Frontier],
) -> dict[str, pd.DataFrame]:
    points = [frontier.points for frontier in frontiers]
    families, pairs = (
        [
            getattr(frontier, name).assign(
                scenario=frontier.scenario, checkpoint=frontier.checkpoint
            )
            for frontier in frontiers
        ]
        for name in ("families", "baseline")
    )
    verdicts = [
        (check.name, check.verdict, check.text, "; ".join(check.details)) for check in checks
    ]
    return {
        "attacks": results.attacks,
        "rates": rates,
        "worst_case": worst,
        "utility": utility(results),
        "utility_curve": utility_curve(results),
        "frontier": pd.concat(points) if points else pd.DataFrame(),
        "baseline": pd.concat(pairs) if pairs else pd.DataFrame(),
        "guarantees": results.guarantees,
        "hypervolume": pd.concat(families) if families else pd.DataFrame(),
        "checks": pd.DataFrame(verdicts, columns=["name", "verdict", "text", "details"]),
        "cells": results.cells,
    }


def _scenarios(
    results: Results, rates: pd.DataFrame, worst: pd.DataFrame, frontiers: list[Frontier]
) -> list[Scenario]:
    curve = utility_curve(results)
    names = dict.fromkeys([*(f.scenario for f in frontiers), *curve["scenario"]])
    scenarios = []
    for name in names:
        here = [frontier for frontier in frontiers if frontier.scenario == name]
        here.sort(key=lambda frontier: frontier.checkpoint)
        points = pd.concat([f.points for f in here]) if here else pd.DataFrame()
        scenarios.append(
            Scenario(
                name=name,
                answer=_answer(name, points),
                frontier=frontier_figure(name, points) if here else None,
                accuracy=accuracy_figure(name, curve[curve["scenario"] == name], results),
                settings=tuple(_setting(results, rates, worst, frontier) for frontier in here),
            )
        )
    return scenarios


def _setting(
    results: Results, rates: pd.DataFrame, worst: pd.DataFrame, frontier: Frontier
) -> Setting:
    place = (frontier.scenario, frontier.checkpoint)
    own_rates, own_worst, own_attacks = (
        frame[(frame["scenario"] == place[0]) & (frame["checkpoint"] == place[1])]
        for frame in (rates, worst, results.attacks)
    )
    claims = guarantees(results)
    return Setting(
        title=f"{frontier.scenario}, model of round {frontier.checkpoint}",
        frontier=frontier,
        headline=headline_table(frontier.points),
        informed=bool(frontier.points["informed_rate"].notna().any()),
        baseline=baseline_table(frontier.baseline, frontier.points),
        baseline_missing=_baseline_missing(frontier),
        guarantees=guarantee_table(claims[claims["scenario"] == place[0]], own_rates),
        families=family_table(frontier.families),
        rates=rate_table(own_rates),
        heatmap=heatmap_figure(*place, own_rates),
        strength=strength_figure(*place, own_worst),
        psnr=psnr_figure(*place, own_attacks, own_rates),
        gallery=make_gallery(results, rates, *place),
    )


def _baseline_missing(frontier: Frontier) -> str:
    """Return why there is no DP-SGD to compare with; nothing if there is, or need not be."""
    if len(frontier.baseline) or heuristics(frontier.points).empty:
        return ""
    return f"This run has no DP-SGD to compare with, which was attacked and trained: {ADVICE}."


def _figures(scenarios: Iterable[Scenario]) -> list[Figure]:
    found: list[Figure | None] = []
    for scenario in scenarios:
        found += [scenario.frontier, scenario.accuracy]
        for setting in scenario.settings:
            found += [setting.heatmap, setting.strength, setting.psnr]
    return [figure for figure in found if figure is not None]


def _answer(scenario: str, points: pd.DataFrame) -> str:
    """Return what the best defense achieves, at the round where it does worst."""
    attacked = points.dropna(subset=["advantage"]) if len(points) else points
    if attacked.empty:
        return f"{scenario}: no attack ran, so nothing is known of any defense."
    order = attacked.sort_values(["advantage_high", "advantage"], ascending=False)
    worst = order.drop_duplicates("defense")
    control = worst[worst["family"] == "none"]
    defended = worst[worst["family"] != "none"]
    start = f"{scenario}: without a defense, the attacks identify "
    start += f"{control['success_text'].iloc[0]} of the victims" if len(control) else "(not run)"
    if defended.empty:
        return f"{start}; no defense was tested."
    best = defended.sort_values(["advantage_high", "accuracy"], ascending=[True, False]).iloc[0]
    cost = f"at {percent(best['accuracy'])} accuracy"
    if len(control):
        cost += f" (undefended {percent(control['accuracy'].iloc[0])})"
    return (
        f"{start}; the most private of {len(defended)} tested defenses, {best['name']}, "
        f"leaves {best['success_text']} {cost}."
    )


def _render(
    results: Results, rates: pd.DataFrame, checks: Sequence[Check], scenarios: list[Scenario]
) -> str:
    verdicts = {check.verdict for check in checks}
    verdict = next((kind for kind in ("fail", "warn") if kind in verdicts), "pass")
    status = results.cells["status"]
    candidates = results.attacks["candidates"].dropna().unique()
    return render(
        "page.html.j2",
        scenarios=scenarios,
        checks=checks,
        verdict=verdict,
        trust=_TRUST[verdict],
        panel=results.panel,
        cells=f"{(status == 'ok').sum()} of {len(status)}",
        candidates=", ".join(f"{number:.0f}" for number in sorted(candidates)),
        tiers=TIERS,
        failures=failure_table(results.cells),
        not_applicable=not_applicable_table(rates),
        config=yaml.safe_dump(dict(results.config), sort_keys=False, allow_unicode=True),
        packages=_versions(),
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
