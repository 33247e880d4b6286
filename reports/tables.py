"""The tables of the page, as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import pandas as pd
from markupsafe import Markup, escape

from leakfrontier.evaluate.conclude.analysis import FINISHED
from leakfrontier.evaluate.conclude.coordinates import proof_text
from leakfrontier.evaluate.conclude.labels import (
    describe_attack,
    describe_defenses,
    epsilon_text,
    final_round,
    percent,
    rate_text,
    rows,
    short_names,
)

STRONGER = {
    "parameters": "From nothing, crafted parameters",
    "architecture": "From nothing, crafted architecture",
    "candidates": "Given candidates",
}
"""The columns of stronger servers."""

_METRICS = {
    "psnr": ("PSNR", "{:.1f} dB"),
    "ssim": ("SSIM", "{:.2f}"),
    "snr": ("SNR", "{:.1f} dB"),
    "token_accuracy": ("Token accuracy", "{:.0%}"),
    "exact": ("Exact match", "{:.0%}"),
    "rouge1": ("ROUGE-1", "{:.0%}"),
    "rouge2": ("ROUGE-2", "{:.0%}"),
    "rougeL": ("ROUGE-L", "{:.0%}"),
}
"""The names and formats of metrics. Other metrics keep their own name."""


@dataclass(frozen=True)
class ShownTable:
    """Text cells under a header, or `Markup`.

    Attributes:
        header: What the columns are.
        rows: Their cells; the first of each names its row.
        marks: CSS classes of the rows.
        common: Columns whose value is constant. They are shown once, above the table.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marks: tuple[str, ...] = ()
    common: tuple[tuple[str, str], ...] = ()

    def collapsed(self) -> ShownTable:
        """Return the table with its constant columns moved to `common`."""
        columns = list(zip(*self.rows, strict=True))
        same = [
            place > 0 and len(self.rows) > 1 and len(set(cells)) == 1
            for place, cells in enumerate(columns)
        ]

        def differing(cells: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(cell for cell, one in zip(cells, same, strict=True) if not one)

        if not any(same):
            return self
        said = [
            (name, cell)
            for name, cell, one in zip(self.header, self.rows[0], same, strict=True)
            if one
        ]
        return replace(
            self,
            header=differing(self.header),
            rows=tuple(differing(row) for row in self.rows),
            common=tuple(said),
        )

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.header)
        lines = (
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def stronger_servers(points: pd.DataFrame) -> list[str]:
    """Return the stronger servers that attacked any defense, and the one with candidates."""
    return [name for name in STRONGER if (points[f"{name}_text"] != "n/a").any()]


def headline_table(points: pd.DataFrame) -> ShownTable:
    """Return the frontier's points. Stronger servers have columns only if they attacked."""
    stronger = stronger_servers(points)
    of_tokens = predicts_tokens(points)
    header = (
        "Defense",
        *(("Perplexity",) if of_tokens else ()),
        f"{'Next-token accuracy' if of_tokens else 'Accuracy'}, {final_round(points['rounds'])}",
        "From nothing, passive server",
        *(STRONGER[name] for name in stronger),
        "Proof allows",
        "\u03b5",
        "P(Pareto-optimal)",
        "Verdict",
    )
    lines = tuple(
        (
            str(row.name),
            *((_number(row.perplexity),) if of_tokens else ()),
            _limits(row.accuracy, row.accuracy_low, row.accuracy_high),
            _blind_beside(row.success, row.success_text, row.blind),
            *(_of_server(row, name) for name in stronger),
            proof_text(row),
            claimed_epsilon(row.epsilon, refuted=row.refuted),
            "n/a" if pd.isna(row.p_pareto) else f"{row.p_pareto:.2f}",
            str(row.verdict),
        )
        for row in rows(points)
    )
    marks = tuple(
        "control" if row.control else "pareto" if row.pareto else "" for row in rows(points)
    )
    return ShownTable(header, lines, marks)


def _of_server(row: Any, server: str) -> str:  # noqa: ANN401 - a named tuple of pandas
    rate, text, blind = (getattr(row, f"{server}_{name}") for name in ("rate", "text", "blind"))
    return _blind_beside(rate, text, blind)


def _blind_beside(rate: float, text: object, blind: float) -> str:
    """Return a success, with the success that needs no upload."""
    return str(text) if pd.isna(rate) else f"{text}; blind {percent(blind)}"


def predicts_tokens(points: pd.DataFrame) -> bool:
    """Return whether models predict next tokens. Their utility is the perplexity."""
    return "perplexity" in points and bool(points["perplexity"].notna().any())


def claimed_epsilon(epsilon: float, *, refuted: bool) -> str:
    """Return a claim as text. A refuted one is struck out."""
    text = epsilon_text(epsilon)
    return Markup("<s>{}</s> refuted").format(text) if refuted else text


def accuracy_note(points: pd.DataFrame) -> str:
    """Return a sentence on what the intervals of accuracies cover."""
    found = "; ".join(sorted(points["contains"].dropna().unique()))
    return f"Intervals of accuracy contain: {found}." if found else ""


def guarantee_table(claims: pd.DataFrame, rates: pd.DataFrame) -> ShownTable:
    """Return the claims and their audits, with the strongest single attack and its bound.

    Without any success, no attack is the strongest. Limit and bound are then those of an attack
    that attacked the most uploads.

    Args:
        claims: `Conclusions.claims` of one scenario.
        rates: `Conclusions.rates` of this scenario and one checkpoint. Attacks that a cascade
            restricted to some uploads are left out, because a bound is for all uploads.
    """
    header = (
        *("Defense", "\u03b5 at \u03b4", "Protects a", "q", "Steps", "\u03c3 claimed"),
        *("\u03c3 measured", "Audited \u03b5", "Strongest attack", "Its bound \u03b3", "Noise"),
    )
    whole = ~rates["baseline"] & (rates["not_needed"] == 0)
    attacks = rates[whole].dropna(subset="rate").sort_values(["rate", "observations"])
    strongest = attacks.groupby("defense").tail(1).set_index("defense")
    names, defenses = short_names(rates, "adversary"), short_names(rates, "defense")
    order = describe_defenses(claims)["defense"]
    lines = []
    for row in rows(claims.set_index("defense").loc[order].reset_index()):
        success, bound = "n/a", nan
        if row.defense in strongest.index:
            best = strongest.loc[row.defense]
            bound = best["bound"]
            success = f"{best['text']} by {names[best['adversary']]}"
            if not best["found"]:
                success = f"none succeeded ({best['text']})"
        lines.append(
            (
                defenses.get(row.defense, str(row.defense)),
                Markup("{} at {:.0e} ({})").format(
                    claimed_epsilon(row.epsilon, refuted=row.refuted),
                    row.delta,
                    row.accountant,
                ),
                f"{row.unit} ({row.adjacency})",
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
    return ShownTable(header, tuple(lines))


def _at_least(epsilon: float) -> str:
    return f">= {epsilon:.3g}" if epsilon < 1000 else "> 1000"


def _number(value: float, digits: int = 3) -> str:
    return "n/a" if pd.isna(value) else f"{value:.{digits}g}"


def baseline_table(pairs: pd.DataFrame, points: pd.DataFrame) -> ShownTable:
    """Return every heuristic with its DP-SGD of equal utility.

    Args:
        pairs: `equal_utility` of one scenario and checkpoint.
        points: `Frontier.points` of the same setting.
    """
    given = (pairs["candidates_verdict"] != "").any()
    header = (
        *("Defense", "Accuracy", "Success", "DP-SGD", "\u03b5", "Accuracy", "Success"),
        *("Difference in success", "Verdict"),
        *(("Verdict, given candidates",) if given else ()),
    )
    known = points.set_index("defense")
    lines = []
    for pair in rows(pairs):
        own, other = known.loc[pair.defense], known.loc[pair.partner]
        lines.append(
            (
                str(own["name"]),
                percent(own["accuracy"]),
                str(own["success_text"]),
                f"{other['name']} ({pair.match} accuracy)",
                epsilon_text(other["epsilon"]),
                percent(other["accuracy"]),
                str(other["success_text"]),
                f"{100 * pair.difference:+.0f} [{100 * pair.low:+.0f}, {100 * pair.high:+.0f}] pts",
                str(pair.verdict),
                *((str(pair.candidates_verdict) or "n/a",) if given else ()),
            )
        )
    return ShownTable(header, tuple(lines))


def family_table(families: pd.DataFrame) -> ShownTable:
    """Return the hypervolumes of families."""
    lines = tuple(
        (
            str(row.family),
            str(row.defenses),
            f"{row.hypervolume:.2f} [{row.low:.2f}, {row.high:.2f}]",
        )
        for row in rows(families)
    )
    return ShownTable(("Family", "Configurations", "Hypervolume [95 %]"), lines)


def rate_table(rates: pd.DataFrame, metrics: Sequence[str]) -> ShownTable:
    """Return all rates of one scenario and checkpoint, with their controls.

    Args:
        rates: `Conclusions.rates` of one scenario and checkpoint.
        metrics: The metrics whose medians are shown.
    """
    tiers = rates["tier_recognisable"].notna().any()
    header = (
        *("Defense", "Attack", "Success", "Bound", "Undefended", "Prior guess", "Chance"),
        *("Counterfactual", "Advantage", *(_METRICS.get(name, (name,))[0] for name in metrics)),
        *(("Recognisable",) if tiers else ()),
        *("Obs.", "Seconds"),
    )
    names = short_names(rates, "adversary")
    arms = describe_defenses(rates).set_index("defense")
    rates = rates.assign(
        order=rates["defense"].map(arms["order"]),
        attack=rates["adversary"].map(names),
        called=rates["defense"].map(arms["name"]),
    )
    rates = rates.sort_values(["order", "baseline", "attack"], kind="stable")
    blind = rates[rates["baseline"]].sort_values("rate").groupby("defense")["text"].last()
    control = rates[rates["control"]].groupby("adversary")["text"].last()
    lines = tuple(
        (
            str(row.called),
            attack_name(row.attack, row),
            f"{row.text} ({row.scope})" if row.scope else str(row.text),
            "none" if pd.isna(row.bound) else percent(row.bound),
            str(control.get(row.adversary, "not run")),
            str(blind.get(row.defense, "not run")),
            percent(row.chance),
            rate_text(row.counterfactual, row.observations),
            percent(row.advantage) if pd.isna(row.advantage) or row.advantage > 0 else "none",
            *(_score(name, medians[name]) for name in metrics),
            *((rate_text(row.tier_recognisable, row.observations),) if tiers else ()),
            str(row.observations),
            "n/a" if pd.isna(row.seconds) else f"{row.seconds:.2f}",
        )
        for row, medians in zip(rows(rates), rates[[*metrics]].to_dict("records"), strict=True)
    )
    return ShownTable(
        header, lines, tuple("baseline" if flag else "" for flag in rates["baseline"])
    )


def _score(metric: str, value: float) -> str:
    return "n/a" if pd.isna(value) else _METRICS.get(metric, ("", "{:.3g}"))[1].format(value)


def attack_name(name: str, row: Any) -> str:  # noqa: ANN401 - a named tuple of pandas
    """Return the name of an attack on a defense, from a row of `Conclusions.rates`."""
    unknown = row.control or pd.isna(row.knows_defense)
    return describe_attack(name, row, None if unknown else bool(row.knows_defense))


def _limits(value: float, low: float, high: float) -> str:
    if pd.isna(value):
        return "not measured"
    return f"{percent(value)} [{100 * low:.1f}, {100 * high:.1f}]"


def _with_adversary(cells: pd.DataFrame) -> pd.DataFrame:
    """Return cells that all have a name: their adversary, or otherwise their kind."""
    kinds = cells["kind"].map({"train": "(training)", "replay": "(replay)", "tune": "(tuning)"})
    return cells.assign(adversary=cells["adversary"].fillna(kinds))


def tuning_table(tried: pd.DataFrame) -> ShownTable:
    """Return the chosen settings of each defense, and all that were tried.

    Args:
        tried: `tried_settings` of one scenario.
    """
    lines = []
    for defense, group in tried.groupby("defense", sort=False):
        best = group[group["chosen"]].iloc[0]
        others = "; ".join(
            f"{_settings(one.settings)}: {percent(one.accuracy)}" for one in rows(group)
        )
        accuracy = percent(best["accuracy"])
        trainings = str(group["trainings"].sum())
        lines.append((str(defense), _settings(best["settings"]), accuracy, others, trainings))
    header = ("Defense", "Chosen", "Validation accuracy", "Tried: validation accuracy", "Trainings")
    return ShownTable(header, tuple(lines))


def tuning_note(tried: pd.DataFrame, *, claimed: bool) -> str:
    """Return how settings were chosen; "" if they were not tuned.

    Args:
        tried: `tried_settings` of one scenario.
        claimed: Whether a defense of the scenario claims differential privacy.
    """
    if tried.empty:
        return ""
    names = dict.fromkeys(name for text in tried["settings"] for name in json.loads(text))
    words = ", ".join("learning rate" if name == "lr" else name for name in names)
    counts = sorted({*tried.groupby("defense")["trainings"].sum()})
    said = " or ".join(map(str, counts))
    note = (
        f"{words[0].upper()}{words[1:]} chosen on validation, {said} trainings each. The control "
        "and the defenses have the same budget. Clients do not hold the validation examples, and "
        "no evaluation uses the seeds of tuning."
    )
    return note + (" Epsilon does not count the trainings of tuning." if claimed else "")


def _settings(text: str) -> str:
    return ", ".join(f"{name}={value}" for name, value in json.loads(text).items())


def failure_table(cells: pd.DataFrame) -> ShownTable:
    """Return the cells without a result."""
    failed = cells[~cells["status"].isin(FINISHED)].pipe(_with_adversary)
    groups = failed.groupby(["status", "scenario", "defense", "adversary", "error"], sort=False)
    lines = tuple(
        (*map(str, place), collapsed_error(str(error)), str(len(group)))
        for (*place, error), group in groups
    )
    return ShownTable(("Status", "Scenario", "Defense", "Adversary", "Error", "Cells"), lines)


def collapsed_error(error: str) -> str:
    """Return the message of an error, with its traceback folded."""
    message, _, traceback = error.partition("\n")
    if not traceback:
        return message
    return Markup("<details><summary>{}</summary><pre>{}</pre></details>").format(
        message, traceback
    )


def note_table(cells: pd.DataFrame, before: Sequence[str] = ()) -> ShownTable:
    """Return the warnings from before the run and from its cells."""
    first = tuple((collapsed_error(note), "(before all)", "") for note in before)
    noted = cells[cells["note"].fillna("") != ""].pipe(_with_adversary)
    groups = noted.groupby(["note", "adversary"], sort=False)
    lines = tuple(
        (collapsed_error(str(note)), str(adversary), str(len(group)))
        for (note, adversary), group in groups
    )
    return ShownTable(("Note", "Adversary", "Cells"), first + lines)


def not_applicable_table(rates: pd.DataFrame) -> ShownTable:
    """Return the attacks that could not run, and why."""
    return _reasons(rates, "not_applicable", "reason")


def refused_table(rates: pd.DataFrame) -> ShownTable:
    """Return the attacks whose models the clients refused, and why."""
    return _reasons(rates, "refused", "refusal")


def _reasons(rates: pd.DataFrame, count: str, reason: str) -> ShownTable:
    """Return the attacks with a positive count, their defenses and the reason."""
    names, defenses = short_names(rates, "adversary"), short_names(rates, "defense")
    groups = rates[rates[count] > 0].groupby(
        ["scenario", "checkpoint", "adversary", reason], sort=False
    )
    lines = []
    for (scenario, checkpoint, adversary, text), group in groups:
        everywhere = (
            group["defense"].nunique()
            == rates.loc[rates["scenario"] == scenario, "defense"].nunique()
        )
        where = (
            "all" if everywhere else ", ".join(defenses[one] for one in group["defense"].unique())
        )
        lines.append((str(scenario), str(checkpoint), names[str(adversary)], where, str(text)))
    return ShownTable(("Scenario", "Round", "Attack", "Defenses", "Reason"), tuple(lines))


def not_needed_table(rates: pd.DataFrame) -> ShownTable:
    """Return the uploads that a cascade skipped because nothing was left to find."""
    names, defenses = short_names(rates, "adversary"), short_names(rates, "defense")
    lines = tuple(
        (
            *(str(row.scenario), str(row.checkpoint), defenses[row.defense]),
            attack_name(names[row.adversary], row),
            f"{row.found} of {row.victims} victims in {row.observations} uploads still safe"
            if row.observations
            else "",
            f"{row.not_needed} uploads",
        )
        for row in rows(rates[rates["not_needed"] > 0])
    )
    return ShownTable(("Scenario", "Round", "Defense", "Attack", "Found", "Not needed"), lines)
