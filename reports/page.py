"""The report of a run: one self-contained page, with its tables as CSV and its figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from leakfrontier.evaluate.conclude.analysis import at
from leakfrontier.evaluate.conclude.baseline import ADVICE, heuristics
from leakfrontier.evaluate.conclude.checks import conclusion, overall
from leakfrontier.evaluate.conclude.frontier import Frontier
from leakfrontier.evaluate.conclude.labels import percent, rounds_named, rows, shared_options
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.conclude.tuned import tried_settings
from leakfrontier.evaluate.modality.metrics import TIERS
from leakfrontier.evaluate.run.environment import versions
from leakfrontier.evaluate.run.store import Store
from leakfrontier.evaluate.world.scenario import Scenario

from .charts import Figure, unvalidated
from .figures import accuracy_figure, psnr_figure, strength_figure
from .frontier_figure import frontier_figure
from .gallery import Gallery, make_gallery
from .heatmap import heatmap_figure
from .html import javascript, render, write
from .tables import (
    ShownTable,
    accuracy_note,
    baseline_table,
    failure_table,
    family_table,
    guarantee_table,
    headline_table,
    not_applicable_table,
    not_needed_table,
    note_table,
    rate_table,
    refused_table,
    stronger_servers,
    tuning_note,
    tuning_table,
)

PAGE_NAME = "report.html"
_ONLY_IN_FILES = ("psnr_transformed",)
_TRUST = {
    "pass": "No check found a problem.",
    "warn": "Read the warnings before quoting a number.",
    "fail": "These numbers are not evidence.",
}


@dataclass(frozen=True)
class SettingSection:
    """The part of the page about one scenario and attacked round."""

    title: str
    frontier: Frontier
    headline: ShownTable
    accuracy_note: str
    stronger: list[str]
    baseline: ShownTable
    baseline_missing: str
    guarantees: ShownTable
    families: ShownTable
    rates: ShownTable
    heatmap: Figure | None
    strength: Figure | None
    psnr: Figure | None
    gallery: Gallery | None


@dataclass(frozen=True)
class ScenarioSection:
    """The part of the page about one scenario."""

    name: str
    federation: str
    answer: str
    shared: str
    frontier: Figure | None
    accuracy: Figure | None
    tuning: ShownTable
    tuning_note: str
    settings: tuple[SettingSection, ...]


def write_report(folder: Path, results: Conclusions | None = None) -> Path:
    """Write the report of a run into its folder and return the page's path.

    Besides `report.html`, it writes every table to `tables/` and every figure to `figures/`.
    Files are written atomically.

    Args:
        folder: The folder of a run, with `results.sqlite`.
        results: The results of this folder, if they are already loaded.
    """
    results = Store(folder).results() if results is None else results
    for name, table in _tables(results).items():
        write(folder / "tables" / f"{name}.csv", table.to_csv(index=False).encode())
    with ThreadPoolExecutor(1) as meanwhile:
        meanwhile.submit(javascript)
        with unvalidated():
            scenarios = _scenarios(results)
        for figure in _figures(scenarios):
            write(folder / "figures" / f"{figure.name}.png", figure.png)
            write(folder / "figures" / f"{figure.name}.svg", figure.svg.encode())
    page = folder / PAGE_NAME
    write(page, _render(results, scenarios).encode())
    return page


def _tables(results: Conclusions) -> dict[str, pd.DataFrame]:
    frontiers = results.frontiers()
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
        (check.name, check.verdict, check.text, "; ".join(check.details))
        for check in results.checks()
    ]
    return {
        "attacks": results.attacks,
        "scores": results.scores,
        "rates": results.rates(),
        "worst_case": results.worst_case(),
        "utility": results.final_utility(),
        "utility_curve": results.utility_curve(),
        "frontier": _stacked([frontier.points for frontier in frontiers]),
        "baseline": _stacked(pairs),
        "guarantees": results.guarantees,
        "hypervolume": _stacked(families),
        "checks": pd.DataFrame(verdicts, columns=["name", "verdict", "text", "details"]),
        "tunings": tried_settings(results.tunings),
        "cells": results.cells,
    }


def _stacked(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(tables) if tables else pd.DataFrame()


def _scenarios(results: Conclusions) -> list[ScenarioSection]:
    frontiers, curve = results.frontiers(), results.utility_curve()
    tried = tried_settings(results.tunings)
    federations = _federations(results.config)
    names = dict.fromkeys([*(f.scenario for f in frontiers), *curve["scenario"]])
    scenarios = []
    for name in names:
        here = [frontier for frontier in frontiers if frontier.scenario == name]
        here.sort(key=lambda frontier: frontier.checkpoint)
        points = _stacked([frontier.points for frontier in here])
        scenarios.append(
            ScenarioSection(
                name=name,
                federation=federations.get(name, ""),
                answer=answer(name, points),
                shared=_shared(points),
                frontier=frontier_figure(name, points) if here else None,
                accuracy=accuracy_figure(name, curve[curve["scenario"] == name]),
                tuning=tuning_table(tried[tried["scenario"] == name]),
                tuning_note=tuning_note(
                    tried[tried["scenario"] == name],
                    claimed=name in {*results.guarantees["scenario"]},
                ),
                settings=tuple(_setting(results, frontier) for frontier in here),
            )
        )
    return scenarios


def _setting(results: Conclusions, frontier: Frontier) -> SettingSection:
    place = (frontier.scenario, frontier.checkpoint)
    tables = (results.rates(), results.worst_case(), results.attacks, results.scores)
    rates, worst, attacks, scores = (at(table, *place) for table in tables)
    claims = results.claims()
    metrics = [name for name in scores["metric"].unique() if name not in _ONLY_IN_FILES]
    return SettingSection(
        title=f"{frontier.scenario}, {rounds_named(frontier.checkpoint)}",
        frontier=frontier,
        headline=headline_table(frontier.points),
        accuracy_note=accuracy_note(frontier.points),
        stronger=stronger_servers(frontier.points),
        baseline=baseline_table(frontier.baseline, frontier.points),
        baseline_missing=_baseline_missing(frontier),
        guarantees=guarantee_table(claims[claims["scenario"] == frontier.scenario], rates),
        families=family_table(frontier.families),
        rates=rate_table(rates, metrics),
        heatmap=heatmap_figure(*place, rates),
        strength=strength_figure(*place, worst),
        psnr=psnr_figure(*place, attacks, scores),
        gallery=make_gallery(results, *place),
    )


def _baseline_missing(frontier: Frontier) -> str:
    """Return a note that DP-SGD is missing; "" if it is there or not needed."""
    if len(frontier.baseline) or heuristics(frontier.points).empty:
        return ""
    return f"This run has no DP-SGD to compare with that was trained and attacked: {ADVICE}."


def _figures(scenarios: Iterable[ScenarioSection]) -> list[Figure]:
    found: list[Figure | None] = []
    for scenario in scenarios:
        found += [scenario.frontier, scenario.accuracy]
        for setting in scenario.settings:
            found += [setting.heatmap, setting.strength, setting.psnr]
    return [figure for figure in found if figure is not None]


def answer(scenario: str, points: pd.DataFrame) -> str:
    """Return the headline of the most private defense, at its worst round.

    The most private one has the least proven gamma, then the least success given candidates and
    from nothing.
    """
    attacked = points.dropna(subset=["advantage"]) if len(points) else points
    if attacked.empty:
        return f"{scenario}: no attack ran, so nothing is known about any defense."
    privacy = ["gamma_upload", "gamma_run", "candidates_high", "advantage_high", "advantage"]
    order = attacked.fillna({"candidates_high": 1.0}).sort_values(privacy, ascending=False)
    worst = order.drop_duplicates("defense")
    control, defended = worst[worst["control"]], worst[~worst["control"]]
    start = f"{scenario}: without a defense, attacks from nothing identify "
    start += f"{control['success_text'].iloc[0]} of the victims" if len(control) else "(not run)"
    if defended.empty:
        return f"{start}. No defense was tested."
    ranked = defended.sort_values([*privacy[:-1], "accuracy"], ascending=[True] * 4 + [False])
    best = ranked.iloc[0]
    cost = f"Its accuracy is {percent(best['accuracy'])}"
    if len(control):
        cost += f" (undefended {percent(control['accuracy'].iloc[0])})"
    doubt = "" if best["gains"] else ". It is not shown to be more private than no defense"
    return (
        f"{start}. The most private of {len(defended)} tested defenses is {best['name']}. "
        f"{best['headline']} {cost}{doubt}."
    )


def _shared(points: pd.DataFrame) -> str:
    """Return the options that all defenses of a family share and their names leave out."""
    shared = shared_options(points, "defense") if len(points) else {}
    return "; ".join(f"{family} {options}" for family, options in shared.items())


def _headline(scenarios: Sequence[ScenarioSection]) -> str:
    """Return the answer; for several scenarios, how many defenses gain privacy in all of them."""
    if not scenarios:
        return "No cell of this run has finished. There is nothing to report yet."
    if len(scenarios) == 1:
        return scenarios[0].answer
    settings = [setting.frontier.points for one in scenarios for setting in one.settings]
    points = _stacked(settings)
    tested = points[~points["control"]].dropna(subset=["advantage"]) if len(points) else points
    if tested.empty:
        return f"No defense was tested in any of {len(scenarios)} scenarios."
    gains = tested.groupby("defense")["gains"]
    everywhere, nowhere = gains.all().sum(), (~gains.any()).sum()
    return (
        f"{gains.ngroups} defenses in {len(scenarios)} scenarios: {everywhere} leak significantly "
        f"less than no defense in all settings where they were attacked, and {nowhere} in none."
    )


def _render(results: Conclusions, scenarios: list[ScenarioSection]) -> str:
    checks, rates = results.checks(), results.rates()
    verdict = overall(checks)
    candidates = results.attacks["candidates"].dropna().unique()
    stronger = {name for scenario in scenarios for s in scenario.settings for name in s.stronger}
    return render(
        "page.html.j2",
        scenarios=scenarios,
        headline=_headline(scenarios),
        checks=checks,
        verdict=verdict,
        trust=f"{conclusion(checks)}. {_TRUST[verdict]}",
        panel=results.panel,
        cells=_progress(results.cells["status"]),
        candidates=", ".join(f"{number:.0f}" for number in sorted(candidates)),
        stronger=stronger,
        media=set(results.renderings["media"]) or {"image/png"},
        tiers=TIERS,
        false_alarms=_false_alarms(results.final_utility()),
        failures=failure_table(results.cells),
        notes=note_table(results.cells, results.notes),
        not_applicable=not_applicable_table(rates),
        refused=refused_table(rates),
        not_needed=not_needed_table(rates),
        config=yaml.safe_dump(dict(results.config), sort_keys=False, allow_unicode=True),
        packages=versions("altair"),
    )


def _federations(config: Mapping[str, Any]) -> dict[str, str]:
    """Return who takes part in the training of each scenario, and which uploads are attacked."""
    found = {}
    for given in config.get("scenarios", ()):
        try:
            one = Scenario.model_validate(given)
        except ValueError:  # e.g. files that are not on this machine
            continue
        examples = "example is" if one.batch_size == 1 else "examples are"
        found[one.name] = (
            f"{one.training.described()} Uploads of {one.batch_size} {examples} attacked."
        )
    return found


def _progress(status: pd.Series[str]) -> str:
    spared = (status == "not needed").sum()
    text = f"{(status == 'ok').sum()} of {len(status)} cells finished"
    return text + (f", {spared} had nothing left to find" if spared else "")


def _false_alarms(utility: pd.DataFrame) -> list[str]:
    """Return a sentence for each defense whose clients refuse honest models."""
    return [
        f"{row.scenario}: under {row.defense}, clients refused the honest model "
        f"{row.refused} times in {row.seeds * row.rounds} rounds of training."
        for row in rows(utility[utility["refused"] > 0])
    ]
