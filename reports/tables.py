"""The tables of the page, as text."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Any

import pandas as pd

from leakfrontier.evaluate.labels import (
    describe_attack,
    describe_defenses,
    epsilon_text,
    percent,
    rate_text,
    rows,
    short_names,
)


@dataclass(frozen=True)
class Table:
    """Text cells under a header; `marks` are CSS classes of the rows."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marks: tuple[str, ...] = ()


def headline_table(points: pd.DataFrame) -> Table:
    """Return the frontier's points; the worst case with candidates only if an attack had some."""
    informed = points["informed_rate"].notna().any()
    header = (
        "Defense",
        "Accuracy",
        "Worst-case success",
        "Advantage over prior",
        *(("Success, candidates known",) if informed else ()),
        "\u03b5",
        "P(Pareto-optimal)",
        "Verdict",
    )
    lines = tuple(
        (
            str(row.defense),
            _limits(row.accuracy, row.accuracy_low, row.accuracy_high),
            str(row.success_text),
            str(row.advantage_text),
            *((str(row.informed_text),) if informed else ()),
            epsilon_text(row.epsilon),
            "n/a" if pd.isna(row.p_pareto) else f"{row.p_pareto:.2f}",
            "undefended control" if row.family == "none" else str(row.verdict),
        )
        for row in rows(points)
    )
    marks = tuple(
        "control" if row.family == "none" else "pareto" if row.pareto else ""
        for row in rows(points)
    )
    return Table(header, lines, marks)


def guarantee_table(claims: pd.DataFrame, rates: pd.DataFrame) -> Table:
    """Return what is claimed and audited, beside the strongest single attack and its bound.

    Args:
        claims: `guarantees` of one scenario.
        rates: `attack_rates` of this scenario and one checkpoint.
    """
    header = (
        *("Defense", "\u03b5 at \u03b4", "Protects a", "q", "Steps", "\u03c3 claimed"),
        *("\u03c3 measured", "Audited \u03b5", "Strongest attack", "Its bound \u03b3", "Noise"),
    )
    attacks = rates[~rates["baseline"]].dropna(subset="rate").sort_values("rate")
    strongest = attacks.groupby("defense").tail(1).set_index("defense")
    names = short_names(rates["adversary"].unique())
    order = describe_defenses(claims)["defense"]
    lines = []
    for row in rows(claims.set_index("defense").loc[order].reset_index()):
        success, bound = "n/a", nan
        if row.defense in strongest.index:
            best = strongest.loc[row.defense]
            success, bound = f"{best['text']} by {names[best['adversary']]}", best["bound"]
        lines.append(
            (
                str(row.defense),
                f"{epsilon_text(row.epsilon)} at {row.delta:.0e} ({row.accountant})",
                str(row.unit),
                f"{row.sample_rate:.3g}",
                str(row.steps),
                _number(row.noise_multiplier),
                _number(row.measured_noise, digits=4),
                "n/a" if pd.isna(row.audited_epsilon) else _at_least(row.audited_epsilon),
                success,
                percent(bound),
                str(row.finding),
            )
        )
    return Table(header, tuple(lines))


def _at_least(epsilon: float) -> str:
    return f">= {epsilon:.3g}" if epsilon < 1000 else "> 1000"


def _number(value: float, digits: int = 3) -> str:
    return "n/a" if pd.isna(value) else f"{value:.{digits}g}"


def baseline_table(pairs: pd.DataFrame, points: pd.DataFrame) -> Table:
    """Return every heuristic beside DP-SGD of equal utility.

    Args:
        pairs: `equal_utility` of one scenario and checkpoint.
        points: `Frontier.points` of the same.
    """
    informed = (pairs["informed_verdict"] != "").any()
    header = (
        *("Defense", "Accuracy", "Success", "DP-SGD", "\u03b5", "Accuracy", "Success"),
        *("Difference in success", "Verdict"),
        *(("Verdict, candidates known",) if informed else ()),
    )
    known = points.set_index("defense")
    lines = []
    for pair in rows(pairs):
        own, other = known.loc[pair.defense], known.loc[pair.partner]
        lines.append(
            (
                str(pair.defense),
                percent(own["accuracy"]),
                str(own["success_text"]),
                f"{other['name']} ({pair.match} accuracy)",
                epsilon_text(other["epsilon"]),
                percent(other["accuracy"]),
                str(other["success_text"]),
                f"{100 * pair.difference:+.0f} [{100 * pair.low:+.0f}, {100 * pair.high:+.0f}] pts",
                str(pair.verdict),
                *((str(pair.informed_verdict) or "n/a",) if informed else ()),
            )
        )
    return Table(header, tuple(lines))


def family_table(families: pd.DataFrame) -> Table:
    """Return the hypervolumes."""
    lines = tuple(
        (
            str(row.family),
            str(row.defenses),
            f"{row.hypervolume:.2f} [{row.low:.2f}, {row.high:.2f}]",
        )
        for row in rows(families)
    )
    return Table(("Family", "Configurations", "Hypervolume [95 %]"), lines)


def rate_table(rates: pd.DataFrame) -> Table:
    """Return all rates of one scenario and checkpoint, beside their controls."""
    header = (
        *("Defense", "Attack", "Success", "Bound", "Undefended", "Prior guess", "Chance"),
        *("Counterfactual", "Advantage", "PSNR", "SSIM", "Recognisable", "Obs.", "Seconds"),
    )
    names = short_names(rates["adversary"].unique())
    order = describe_defenses(rates).set_index("defense")["order"]
    rates = rates.assign(order=rates["defense"].map(order), attack=rates["adversary"].map(names))
    rates = rates.sort_values(["order", "baseline", "attack"], kind="stable")
    blind = rates[rates["baseline"]].sort_values("rate").groupby("defense")["text"].last()
    control = rates[rates["family"] == "none"].groupby("adversary")["text"].last()
    lines = tuple(
        (
            str(row.defense),
            _attack_name(row),
            str(row.text),
            "none" if pd.isna(row.bound) else percent(row.bound),
            str(control.get(row.adversary, "not run")),
            str(blind.get(row.defense, "not run")),
            percent(row.chance),
            rate_text(row.counterfactual, row.observations),
            percent(row.advantage) if pd.isna(row.advantage) or row.advantage > 0 else "none",
            "n/a" if pd.isna(row.psnr) else f"{row.psnr:.1f} dB",
            "n/a" if pd.isna(row.ssim) else f"{row.ssim:.2f}",
            rate_text(row.tier_recognisable, row.observations),
            str(row.observations),
            "n/a" if pd.isna(row.seconds) else f"{row.seconds:.2f}",
        )
        for row in rows(rates)
    )
    return Table(header, lines, tuple("baseline" if flag else "" for flag in rates["baseline"]))


def _attack_name(row: Any) -> str:  # noqa: ANN401 - a named tuple of pandas
    unknown = row.family == "none" or pd.isna(row.knows_defense)
    return describe_attack(
        row.attack,
        baseline=row.baseline,
        simulates=row.simulates,
        knows=None if unknown else bool(row.knows_defense),
        candidates=row.candidates_granted,
    )


def _limits(value: float, low: float, high: float) -> str:
    if pd.isna(value):
        return "not measured"
    return f"{percent(value)} [{100 * low:.1f}, {100 * high:.1f}]"


def failure_table(cells: pd.DataFrame) -> Table:
    """Return the cells without a result."""
    failed = cells[cells["status"] != "ok"].fillna({"adversary": "(training)"})
    groups = failed.groupby(["status", "scenario", "defense", "adversary", "error"], sort=False)
    lines = tuple((*map(str, key), str(len(group))) for key, group in groups)
    return Table(("Status", "Scenario", "Defense", "Adversary", "Error", "Cells"), lines)


def not_applicable_table(rates: pd.DataFrame) -> Table:
    """Return the attacks that could not run, and why."""
    absent = rates[rates["not_applicable"] > 0]
    groups = absent.groupby(["scenario", "checkpoint", "adversary", "reason"], sort=False)
    lines = []
    for (scenario, checkpoint, adversary, reason), group in groups:
        everywhere = (
            group["defense"].nunique()
            == rates.loc[rates["scenario"] == scenario, "defense"].nunique()
        )
        defenses = "all" if everywhere else ", ".join(group["defense"].unique())
        lines.append((str(scenario), str(checkpoint), str(adversary), defenses, str(reason)))
    return Table(("Scenario", "Round", "Attack", "Defenses", "Reason"), tuple(lines))
