"""Tables derived from the rows of a run: success per attack, worst case, utility.

In a cascade, an attack runs only on the uploads that still have a safe victim. Its own rate is over
these uploads, and `scope` says so. The worst case identifies the same victims as without the
cascade. The counterfactual uses only the guesses that were made, so it can be lower than without
the cascade.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import reduce
from math import nan
from operator import or_
from typing import Any

import numpy as np
import pandas as pd

from leakfrontier.adversaries.base import THREATS

from ..foundations.rows import CHANGED_MODEL
from ..foundations.statistics import (
    LEAST_SEEDS,
    Floats,
    Interval,
    accuracy_interval,
    advantage,
    rate,
)
from ..modality.metrics import TIERS
from .labels import ADVERSARY, ARM, ATTACK, DEFENSE, rows, scope_text
from .tables import Tables, once

SERVERS: dict[str, str] = {
    "passive": "a passive server",
    "parameters": "a server that may send crafted parameters",
    "architecture": "a server that may send a crafted architecture",
    "candidates": "a passive server that is given candidates",
}
"""The servers of the worst case: one for each of `THREATS`, and one with candidates."""

FINISHED = ("ok", "not needed")
"""The statuses of finished cells."""

_VICTIM = ["seed", "observation", "victim"]
_LIMITS = ["rate", "low", "high", "text"]
_OTHER_LIMITS = ["counterfactual", "counterfactual_low"]
_OTHERS = {server: f"{server} of another upload" for server in SERVERS}
_NO_LIMITS: dict[str, Any] = dict.fromkeys((*_LIMITS, *_OTHER_LIMITS), nan) | {"text": "n/a"}
_TIER_COLUMNS = {f"tier_{name.replace('-', '_')}": least for name, least in TIERS.items()}
_ROUNDING = 1e-3  # packs store rounded numbers
_LARGEST_LOSS = 700.0  # the exponential of more would overflow
_UTILITY_COLUMNS = ["scenario", "defense", *DEFENSE, "seeds", "rounds", "refused"]
_UTILITY_COLUMNS += ["accuracy", "low", "high", "text", "contains", "perplexity"]


@dataclass(frozen=True, eq=False)
class Analysed(Tables):
    """The rows of a run, with tables of success, utility and claims. Each is computed once."""

    @once
    def rates(self) -> pd.DataFrame:
        """Return the success of every attack: see `attack_rates`."""
        return attack_rates(self)

    @once
    def worst_victims(self) -> pd.DataFrame:
        """Return the victims that each server identified: see `worst_victims`."""
        return worst_victims(self)

    @once
    def worst_case(self) -> pd.DataFrame:
        """Return the success of the panel as one adversary: see `worst_case`."""
        return worst_case(self)

    @once
    def lost_attacks(self) -> pd.DataFrame:
        """Return the attacks that do not apply to changed models: see `lost_attacks`."""
        return lost_attacks(self)

    @once
    def final_utility(self) -> pd.DataFrame:
        """Return the test accuracy of every defense: see `final_utility`."""
        return final_utility(self)

    @once
    def utility_curve(self) -> pd.DataFrame:
        """Return the accuracy over rounds: see `utility_curve`."""
        return utility_curve(self)

    @once
    def claims(self) -> pd.DataFrame:
        """Return the privacy claims with their audits: see `claims`."""
        return claims(self)


def attack_rates(results: Analysed) -> pd.DataFrame:
    """Return one row per scenario, checkpoint, defense, adversary and knowledge.

    If an attack never ran, its scores are NaN and `text` says why. The columns are the labels and:

    - `observations` (independent units) and `victims` that the attack ran on, and the number that
      it `found`;
    - `rate`, `low`, `high` and `text` of identification;
    - `prior`, the rate of the blind guess in the same setting; `chance`; and `counterfactual` (with
      `counterfactual_low`), the rate of the attack's guesses for another upload;
    - `advantage` over the largest of these three (`blind_success`);
    - the median of every metric, and the share of victims in each tier (NaN without PSNR and SSIM);
    - `label_accuracy` and `labels_granted`;
    - `not_applicable` observations and the first `reason`;
    - `refused` observations and the first `refusal`;
    - `not_needed` observations, in which a cascade had nothing left to find, and `scope` if the
      rate is not over all observations;
    - `optimiser_failed`, the share of victims for which the truth fits the upload better than the
      guess;
    - the proven `bound`, NaN without a guarantee;
    - the median of `seconds`.
    """
    attacks, metrics = _with_derived(results)
    groups = attacks.groupby(ATTACK, dropna=False, sort=False)
    table = groups.agg(
        observations=("unit_scored", "nunique"),
        victims=("unit_scored", "count"),
        found=("identified", "sum"),
        **{name: (name, "median") for name in metrics},
        **{name: (name, "mean") for name in _TIER_COLUMNS},
        label_accuracy=("label_correct", "mean"),
        labels_granted=("labels_granted", "any"),
        not_applicable=("unit_not_applicable", "nunique"),
        reason=("reason", "first"),
        refused=("unit_refused", "nunique"),
        refusal=("refusal", "first"),
        optimiser_failed=("optimiser_failed", "mean"),
        bound=("bound", "mean"),
        seconds=("seconds", "median"),
    )
    found, others = (_floats(attacks[name]) for name in ("identified", "counterfactual"))
    outcomes = pd.DataFrame({"found": found, "others": others, "unit": attacks["unit"]}).to_numpy()
    number = groups.ngroup().to_numpy()
    in_order = outcomes[np.argsort(number, kind="stable")]
    parts = np.split(in_order, np.cumsum(np.bincount(number))[:-1])
    limits = [_rated(*part.T) for part in parts if len(part)]
    columns = [*_LIMITS, *_OTHER_LIMITS]
    table[columns] = pd.DataFrame(limits, index=table.index, columns=columns)
    table = _attacks_with_an_outcome(results).merge(table.reset_index(), on=ATTACK, how="left")
    counts = ["observations", "victims", "found", "not_applicable", "refused"]
    table[counts] = table[counts].fillna(0).astype(int)
    texts = {"reason": "", "refusal": "", "text": "n/a", "labels_granted": False}
    table = table.fillna(texts).astype({"labels_granted": bool})
    table["text"] = [_why_unscored(row) or row.text for row in rows(table)]
    table["scope"] = [
        scope_text(row.observations, row.not_needed, row.refused) if row.observations else ""
        for row in rows(table)
    ]
    table = table.merge(_blind(results.attacks), on=ARM, how="left")
    table["advantage"] = _advantages(table["rate"], blind_success(table))
    return table


def blind_success(
    table: pd.DataFrame, server: str = "passive", *, least: bool = False
) -> pd.Series[float]:
    """Return the success rate that needs no upload.

    It is the largest of three rates: the blind guess, chance and the counterfactual. With more
    guesses, more victims resemble some guess by luck. Under secure aggregation an attack guesses
    the examples of all clients, but the blind guess is a single guess. Only the counterfactual has
    as many guesses as the attack, matched in the same way.

    Args:
        table: Rates of attacks, or the worst case.
        server: The server whose worst case it is.
        least: Whether to use the lower limit of the counterfactual. Upper limits of advantages
            need it because the counterfactual is an estimate too.
    """
    counterfactual = column(server, "counterfactual_low" if least else "counterfactual")
    return table[["prior", "chance", counterfactual]].astype(float).max(axis=1)


def tried(rates: pd.DataFrame) -> pd.Series[bool]:
    """Return which attacks had a chance: they ran, or a cascade had nothing left for them."""
    barred = (rates["refused"] > 0) | (rates["not_applicable"] > 0)
    return (rates["observations"] > 0) | ((rates["not_needed"] > 0) & ~barred)


def worst_case(results: Analysed) -> pd.DataFrame:
    """Return one row per scenario, checkpoint and defense: the panel as one adversary.

    `rate` counts the victims that any attack of a passive server identified, with or without
    knowledge of the defense. Attacks with candidates are left out: to choose the victim among its
    look-alikes is a different threat than to rebuild it from nothing. The other rates count the
    passive attacks and more:

    - `parameters_rate` adds attacks that send crafted parameters;
    - `architecture_rate` also adds attacks that change the architecture;
    - `candidates_rate` adds only passive attacks that are given candidates.

    Each of these is NaN if no attack of its kind ran. Every rate has limits, a text and a
    `counterfactual` with its lower limit: the share of victims that any guess of these attacks for
    another upload identified. `blind` is `blind_success`; advantages are relative to it.
    """
    victims = results.worst_victims()
    victims = victims.assign(unit=victims.groupby(level=["seed", "observation"]).ngroup())
    others = _worst_victims(results, "counterfactual")
    victims = victims.join(others.rename(columns=_OTHERS))
    places = victims.groupby(level=ARM, sort=False).indices
    victims = victims.reset_index(drop=True)  # to choose rows of a long index is slow
    chances = {server: _chances(results.rates(), server) for server in SERVERS}
    lines = []
    for line in results.attacks[[*ARM, *DEFENSE]].drop_duplicates(ARM).to_dict("records"):
        arm = tuple(line[name] for name in ARM)
        victims_of_arm = victims.iloc[places[arm]]
        own = (_worst(victims_of_arm, server, chances[server].get(arm)) for server in SERVERS)
        lines.append(reduce(or_, own, line))
    columns = [*ARM, *DEFENSE, "observations"]
    columns += [column(server, name) for server in SERVERS for name in (*_LIMITS, *_OTHER_LIMITS)]
    table = pd.DataFrame(lines, columns=columns).astype({"checkpoint": "Int64", "control": bool})
    table = table.merge(_blind(results.attacks), on=ARM, how="left")
    for server in SERVERS:
        table[column(server, "blind")] = blind_success(table, server)
    for limit, name in {"rate": "", "low": "_low", "high": "_high"}.items():
        blind = blind_success(table, least=limit == "high")
        table["advantage" + name] = _advantages(table[limit], blind)
    return table


def column(server: str, name: str) -> str:
    """Return the name of a server's column; the passive server has no prefix."""
    return name if server == "passive" else f"{server}_{name}"


def victim_matrix(
    results: Analysed, scenario: str, checkpoint: int, server: str = "passive"
) -> pd.DataFrame:
    """Return the worst case of each victim: 1 if identified, 0 if not, NaN if never attacked.

    Rows are victims (seed, observation, victim), and columns are defenses. All defenses have the
    same victims, for paired tests and bootstraps.

    Args:
        results: The run.
        scenario: The name of the scenario.
        checkpoint: The attacked round.
        server: One of `SERVERS`.
    """
    found = results.worst_victims()[server]
    levels = [found.index.get_level_values(name) for name in ("scenario", "checkpoint")]
    here = found[(levels[0] == scenario) & (levels[1] == checkpoint)]
    defenses = at(results.attacks[ARM], scenario, checkpoint)["defense"].unique()
    matrix = here.droplevel(["scenario", "checkpoint"]).unstack("defense")
    return matrix.reindex(columns=defenses).rename_axis(columns="defense").sort_index()


def worst_victims(results: Analysed) -> pd.DataFrame:
    """Return, per arm and victim, whether any attack of each server identified it.

    1 if one did, 0 if none did, NaN if no attack of that server ran on it.
    """
    return _worst_victims(results, "identified")


def _worst_victims(results: Analysed, outcome: str) -> pd.DataFrame:
    """Return, per arm and victim, whether any attack of each server had an outcome."""
    deciding = [outcome, "baseline", "threat", "candidates_granted"]
    attacks = results.attacks[[*ARM, *_VICTIM, *deciding]]
    found = _floats(attacks[outcome])
    counted = {name: found.where(_counted(attacks, name)) for name in SERVERS}
    table = attacks[[*ARM, *_VICTIM]].assign(**counted)
    return table.groupby([*ARM, *_VICTIM], sort=False).max()


def lost_attacks(results: Analysed) -> pd.DataFrame:
    """Return the victims that an attack could not try because the defense changed the model.

    Only attacks count that beat a blind guess on the undefended control. `on_control` says whether
    the attack identified the same victim there; NaN if the control has no such victim.
    """
    attacks, rates = results.attacks, results.rates()
    place = ["scenario", "checkpoint", "adversary"]
    works = rates[rates["control"] & ~rates["baseline"] & (rates["low"] > blind_success(rates))]
    changed = attacks["reason"].fillna("").astype(str).str.endswith(CHANGED_MODEL)
    lost = attacks.loc[
        changed & ~attacks["control"], [*place, *_VICTIM, "defense", *ADVERSARY[2:]]
    ].merge(works[place].drop_duplicates(), on=place)
    control = attacks[attacks["control"]]
    found = _floats(control["identified"]).groupby([control[name] for name in (*place, *_VICTIM)])
    return lost.merge(found.max().rename("on_control").reset_index(), on=[*place, *_VICTIM])


def assumed_victims(matrix: pd.DataFrame, lost: pd.DataFrame, server: str) -> pd.DataFrame:
    """Return a `victim_matrix` in which lost attacks find what they find without a defense.

    Args:
        matrix: The matrix of a server.
        lost: The lost attacks of its scenario and checkpoint.
        server: The server.
    """
    own = lost[_counted(lost, server)].dropna(subset="on_control")
    if own.empty:
        return matrix
    assumed = own.groupby([*_VICTIM, "defense"])["on_control"].max().unstack("defense")
    assumed = assumed.reindex(index=matrix.index, columns=matrix.columns)
    return matrix.where(assumed.isna() | (matrix >= assumed), assumed)


def at(frame: pd.DataFrame, scenario: str, checkpoint: int) -> pd.DataFrame:
    """Return the rows of one scenario and attacked round."""
    return frame[(frame["scenario"] == scenario) & (frame["checkpoint"] == checkpoint)]


def final_utility(results: Analysed) -> pd.DataFrame:
    """Return the test accuracy per scenario and defense, at the last evaluated round.

    The interval covers the sampling of test examples. With two or more seeds it also covers the
    spread of the seeds. `contains` says which. `relative` is the accuracy as a share of the
    undefended one, NaN without a control. `refused` is how often clients refused an honest model,
    over all seeds. Models of next tokens also have a `perplexity`, the exponential of the mean loss
    per token; it is NaN for others.
    """
    frame = results.utility
    last = frame.groupby(["scenario", "defense"])["round"].transform("max")
    groups = frame[frame["round"] == last].groupby(["scenario", "defense"], sort=False)
    table = pd.DataFrame([_accuracy(group) for _, group in groups], columns=_UTILITY_COLUMNS)
    table = table.astype({"control": bool})
    undefended = table[table["control"]].groupby("scenario")["accuracy"].first()
    table["relative"] = table["accuracy"] / table["scenario"].map(undefended).astype(float)
    return table


def utility_curve(results: Analysed) -> pd.DataFrame:
    """Return the accuracy per scenario, defense and evaluated round, averaged over seeds."""
    frame = results.utility.assign(accuracy=results.utility["correct"] / results.utility["total"])
    groups = frame.groupby(["scenario", "defense", "round"], sort=False)
    described = {name: (name, "first") for name in DEFENSE}
    return groups.agg(**described, accuracy=("accuracy", "mean")).reset_index()


def claims(results: Analysed) -> pd.DataFrame:
    """Return the claim and its audit, per scenario and defense that claims privacy.

    A claim is `refuted` if the audit of any seed found a violation. The row is then of such a seed.
    Among several seeds, the one with the largest epsilon is taken.
    """
    frame = results.guarantees
    ranked = frame.assign(refuted=frame["violated"].fillna(False).astype(bool)).sort_values(
        ["refuted", "epsilon"], ascending=False, kind="stable"
    )
    first = ranked.drop_duplicates(["scenario", "defense"])
    return first.sort_index(kind="stable").reset_index(drop=True)


def optimiser_failed(attacks: pd.DataFrame) -> pd.Series[float]:
    """Return 1 if an attack's objective is worse at its guess than at the truth, else 0.

    NaN if the attack has no objective or did not run.
    """
    truth = attacks["objective_at_truth"]
    failed = attacks["objective"] > truth + 1e-3 * truth.abs() + 1e-9
    return failed.astype(float).where(attacks["objective"].notna() & truth.notna())


def with_scores(attacks: pd.DataFrame, scores: pd.DataFrame) -> pd.DataFrame:
    """Return attacks with a column for every metric, NaN if it could not be computed."""
    key = ["cell", "observation", "victim"]
    wide = scores.pivot(index=key, columns="metric", values="value").astype(float)
    wide = wide.reindex(columns=wide.columns.union(["psnr", "ssim"], sort=False))
    return attacks.join(wide, on=key)


def _with_derived(results: Analysed) -> tuple[pd.DataFrame, list[str]]:
    """Return the attacks with all columns to aggregate, and the names of the metrics."""
    attacks = with_scores(results.attacks, results.scores)
    metrics = [*attacks.columns.difference(results.attacks.columns, sort=False)]
    unit = attacks.groupby(["scenario", "seed", "observation"]).ngroup()
    scored, refused, absent = (
        attacks["outcome"] == outcome for outcome in ("scored", "refused", "not applicable")
    )
    known = attacks["psnr"].notna() & attacks["ssim"].notna()
    tiers = {
        name: ((attacks["psnr"] >= psnr) & (attacks["ssim"] >= ssim)).astype(float).where(known)
        for name, (psnr, ssim) in _TIER_COLUMNS.items()
    }
    attacks = attacks.assign(
        unit=unit,
        unit_scored=unit.where(scored),
        unit_refused=unit.where(refused),
        unit_not_applicable=unit.where(absent),
        reason=attacks["reason"].where(absent),
        refusal=attacks["reason"].where(refused),
        counterfactual=_floats(attacks["counterfactual"]),
        label_correct=_floats(attacks["label_correct"]),
        labels_granted=attacks["labels_granted"].fillna(False).astype(bool) & scored,
        optimiser_failed=optimiser_failed(attacks),
        seconds=attacks["seconds"].where(scored),
        bound=possible_bounds(attacks),
        **tiers,
    )
    return attacks, metrics


def possible_bounds(attacks: pd.DataFrame) -> pd.Series[float]:
    """Return proven bounds; NaN for impossible ones below chance, as in the standard packs."""
    bound = _floats(attacks["bound"])
    return bound.where(bound * _floats(attacks["candidates"]) > 1 - _ROUNDING)


def _attacks_with_an_outcome(results: Analysed) -> pd.DataFrame:
    """Return the labels of the attacks that ran or were not needed, with their `not_needed`.

    `not_needed` counts the uploads that other attacks under the same defense ran on, but this
    attack did not, although none of its cells failed.
    """
    repetition = [*ATTACK, "seed"]
    cells = results.cells[[*repetition, *DEFENSE, *ADVERSARY, "kind", "status"]]
    cells = cells[cells["kind"] == "attack"]
    finished = cells[cells["status"].isin(FINISHED)]
    table = finished[[*ATTACK, *DEFENSE, *ADVERSARY]].drop_duplicates(ATTACK)
    whole = cells.assign(whole=cells["status"].isin(FINISHED)).groupby(repetition, dropna=False)
    units = results.attacks[[*repetition, "observation"]].drop_duplicates()
    attacked = units.groupby(repetition, dropna=False).size().rename("attacked")
    uploads = units.drop_duplicates([*ARM, "seed", "observation"]).groupby([*ARM, "seed"]).size()
    counts = whole["whole"].all().reset_index()
    counts = counts.merge(attacked.reset_index(), on=repetition, how="left")
    counts = counts.merge(uploads.rename("uploads").reset_index(), on=[*ARM, "seed"], how="left")
    missed = counts["uploads"].fillna(0) - counts["attacked"].fillna(0)
    counts["not_needed"] = missed.where(counts["whole"], 0).astype(int)
    skipped = counts.groupby(ATTACK, dropna=False)["not_needed"].sum().reset_index()
    return table.merge(skipped, on=ATTACK, how="left")


def _why_unscored(row: Any) -> str:  # noqa: ANN401 - a row of a table
    """Return the text in place of a missing rate; "" if there is a rate."""
    if row.observations:
        return ""
    if row.refused:
        return "refused by the client"
    return "not needed" if row.not_needed and not row.not_applicable else "n/a"


def _floats(flags: pd.Series[Any]) -> pd.Series[float]:
    return pd.Series(flags.to_numpy(dtype=float, na_value=nan), index=flags.index)


def _limits(identified: Floats, unit: Floats) -> dict[str, Any]:
    scored = ~np.isnan(identified)
    interval = rate(identified[scored].astype(bool), unit[scored])
    if interval.n == 0:
        interval = Interval(nan, nan, nan, 0)
    values = (interval.value, interval.low, interval.high, str(interval))
    return dict(zip(_LIMITS, values, strict=True))


def _rated(identified: Floats, counterfactual: Floats, unit: Floats) -> dict[str, Any]:
    """Return the limits of a rate and of its counterfactual."""
    limits = _limits(counterfactual, unit)
    others = dict(zip(_OTHER_LIMITS, (limits["rate"], limits["low"]), strict=True))
    return _limits(identified, unit) | others


def _blind(attacks: pd.DataFrame) -> pd.DataFrame:
    """Return, per arm, the rate of the best blind guess and chance."""
    tries = 1 + attacks["transformed"].fillna(False).astype(int)  # the victim, its transformed self
    scores = attacks[[*ARM, "adversary", "baseline"]].assign(
        chance=tries / attacks["candidates"], prior=_floats(attacks["identified"])
    )
    guesses = scores[scores["baseline"]].groupby([*ARM, "adversary"], dropna=False)
    prior = guesses.agg(prior=("prior", "mean")).groupby(level=ARM, dropna=False).max()
    chance = scores.groupby(ARM, dropna=False).agg(chance=("chance", "mean"))
    return chance.join(prior).reset_index()


def _advantages(success: pd.Series[float], blind: pd.Series[float]) -> list[float]:
    return [advantage(*pair) for pair in zip(success, blind, strict=True)]


def _chances(rates: pd.DataFrame, server: str) -> dict[Hashable, tuple[bool, bool]]:
    """Return, per arm, whether a server tried an attack of its own, and whether one was refused."""
    own = rates[_counted(rates, server) & _own(rates, server)]
    chances = own[ARM].assign(tried=tried(own), refused=own["refused"] > 0)
    found = chances.groupby(ARM, sort=False).any()
    flags = found.itertuples(index=False, name=None)
    return {arm: (bool(one), bool(two)) for arm, (one, two) in zip(found.index, flags, strict=True)}


def _worst(victims: pd.DataFrame, server: str, chance: tuple[bool, bool] | None) -> dict[str, Any]:
    """Return the worst case of one arm for a server; NaN if it tried no attack of its own."""
    tried, refused = chance or (False, False)
    if tried:
        found, others, unit = victims[[server, _OTHERS[server], "unit"]].to_numpy(dtype=float).T
        limits = _rated(found, others, unit)
        observations = len(np.unique(unit[~np.isnan(found)]))
    else:
        limits, observations = _NO_LIMITS, 0
        if refused:
            limits = limits | {"text": "refused by the client"}
    named = {column(server, name): value for name, value in limits.items()}
    return named | ({"observations": observations} if server == "passive" else {})


def _counted(attacks: pd.DataFrame, server: str) -> pd.Series[bool]:
    """Return which attacks count in the worst case of a server."""
    if server == "candidates":
        return ~attacks["baseline"] & (attacks["threat"] == "passive")
    threats = THREATS[: THREATS.index(server) + 1]
    return ~attacks["baseline"] & ~attacks["candidates_granted"] & attacks["threat"].isin(threats)


def _own(attacks: pd.DataFrame, server: str) -> pd.Series[bool]:
    """Return which attacks only this server, and no weaker one, can run."""
    if server == "candidates":
        return attacks["candidates_granted"]
    return attacks["threat"] == server


def _accuracy(group: pd.DataFrame) -> dict[Hashable, Any]:
    interval = accuracy_interval(group["correct"].tolist(), group["total"].tolist())
    return group[["scenario", "defense", *DEFENSE]].iloc[0].to_dict() | {
        "seeds": group["seed"].nunique(),
        "rounds": int(group["round"].iloc[0]),
        "refused": int(group["refused"].fillna(0).sum()),
        "accuracy": interval.value,
        "low": interval.low,
        "high": interval.high,
        "text": str(interval),
        "contains": _interval_contains(interval.n),
        "perplexity": _perplexity(group),
    }


def _perplexity(group: pd.DataFrame) -> float:
    of_tokens = "task" in group and group["task"].iloc[0] == "next-token"
    return float(np.exp(min(group["loss"].mean(), _LARGEST_LOSS))) if of_tokens else np.nan


def _interval_contains(seeds: int) -> str:
    """Return what an accuracy's interval covers: see `accuracy_interval`."""
    if seeds == 1:
        return "test sampling only, of one seed"
    return f"test sampling and the {'range' if seeds < LEAST_SEEDS else 'mean'} of {seeds} seeds"
