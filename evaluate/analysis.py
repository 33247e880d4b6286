"""Tables derived from the rows of a run: success per attack, worst case, utility."""

from __future__ import annotations

from collections.abc import Hashable
from math import nan
from typing import Any

import pandas as pd

from .metrics import TIERS
from .results import Results
from .statistics import Interval, accuracy_interval, advantage, rate

ARM = ["scenario", "checkpoint", "defense"]
"""What is attacked."""

ATTACK = [*ARM, "adversary", "knows_defense"]
"""What is attacked, by whom, and whether the defense is known to it."""

_FLAGS = ["baseline", "simulates", "candidates_granted"]
_DESCRIPTION = ["family", "strength", "threat", *_FLAGS]
_VICTIM = ["seed", "observation", "victim"]
_LIMITS = ["rate", "low", "high", "text"]
_TIER_COLUMNS = {f"tier_{name.replace('-', '_')}": least for name, least in TIERS.items()}

_INFORMED = {name: f"informed_{name}" for name in _LIMITS}
_WORST_COLUMNS = [
    *(*ARM, "family", "strength", "observations", *_LIMITS, "selectable"),
    *_INFORMED.values(),
]
_UTILITY_COLUMNS = [
    *("scenario", "defense", "family", "strength", "seeds"),
    *("accuracy", "low", "high", "text", "rounds"),
]


def labelled(frame: pd.DataFrame) -> pd.DataFrame:
    """Return rows with typed labels; those of an adversary are missing in training cells."""
    frame = frame.reindex(columns=frame.columns.union([*ATTACK, *_DESCRIPTION], sort=False))
    flags = {name: frame[name].astype("boolean") for name in _FLAGS}
    return frame.assign(
        checkpoint=pd.to_numeric(frame["checkpoint"], downcast="integer"),
        strength=pd.to_numeric(frame["strength"]),
        knows_defense=frame["knows_defense"].astype("boolean"),
        **{name: flag.fillna(False).astype(bool) for name, flag in flags.items()},
    )


def attack_rates(results: Results) -> pd.DataFrame:
    """Return one row per scenario, checkpoint, defense, adversary and knowledge.

    Columns: the labels; `observations` (independent units) and `victims` that the attack ran on;
    `rate`, `low`, `high`, `text` of identification; `prior`, the blind guess's rate in the same
    place, `chance`, and `advantage` over the larger of the two; `counterfactual`; medians `psnr`
    and `ssim`; the share of victims in each tier; `label_accuracy`, `labels_granted`;
    `not_applicable` observations and the first `reason`; `optimiser_failed`, the share of
    victims where the truth fits the upload better than the guess; the proven `bound`, NaN
    without a guarantee; median `seconds`. Where an attack never ran, scores are NaN and the text
    is "n/a".
    """
    attacks = _with_derived(labelled(results.attacks))
    groups = attacks.groupby(ATTACK, dropna=False, sort=False)
    table = groups.agg(
        **{name: (name, "first") for name in _DESCRIPTION},
        observations=("unit_ran", "nunique"),
        victims=("unit_ran", "count"),
        counterfactual=("counterfactual", "mean"),
        psnr=("psnr", "median"),
        ssim=("ssim", "median"),
        **{name: (name, "mean") for name in _TIER_COLUMNS},
        label_accuracy=("label_correct", "mean"),
        labels_granted=("labels_granted", "any"),
        not_applicable=("unit_not_applicable", "nunique"),
        reason=("reason", "first"),
        optimiser_failed=("optimiser_failed", "mean"),
        bound=("bound", "mean"),
        seconds=("seconds", "median"),
    )
    limits = [_limits(group["identified"], group["unit"]) for _, group in groups]
    table[_LIMITS] = pd.DataFrame(limits, index=table.index, columns=_LIMITS)
    table["reason"] = table["reason"].fillna("")
    table = table.reset_index().merge(_blind(attacks), on=ARM, how="left")
    table["advantage"] = _advantages(table["rate"], blind_success(table))
    return table


def blind_success(rates: pd.DataFrame) -> pd.Series[float]:
    """Return what success without the upload is worth: the larger of prior and chance."""
    return rates[["prior", "chance"]].astype(float).max(axis=1)


def worst_case(results: Results) -> pd.DataFrame:
    """Return one row per scenario, checkpoint and defense: the panel as one adversary.

    `rate` counts the victims that any attack identified, with or without knowledge of the
    defense, but without attacks that are handed candidates: to choose the victim among its
    look-alikes is another threat than to rebuild it from nothing. `informed_rate` counts these
    attacks as well; it is NaN if none ran. `selectable` follows, per observation, the attack
    with the lowest objective, which needs no ground truth (attacks without one only where there
    is no other). Advantages are over the larger of the blind guess's rate and chance.
    """
    attacks = labelled(results.attacks)
    rows = []
    for arm, group in attacks.groupby(ARM, dropna=False, sort=False):
        victims = _worst_victims(group)
        unit = victims.groupby(["seed", "observation"]).ngroup()
        counts = {"observations": unit.nunique(), "selectable": victims["selected"].mean()}
        labels = group[["family", "strength"]].iloc[0].to_dict()
        place = dict(zip(ARM, arm, strict=True))
        rows.append(
            place | labels | counts | _limits(victims["worst"], unit) | _informed_limits(group)
        )
    table = pd.DataFrame(rows, columns=_WORST_COLUMNS)
    table = table.merge(_blind(attacks), on=ARM, how="left")
    for limit, name in {"rate": "", "low": "_low", "high": "_high"}.items():
        table["advantage" + name] = _advantages(table[limit], blind_success(table))
    return table


def victim_matrix(
    results: Results, scenario: str, checkpoint: int, *, candidates: bool = False
) -> pd.DataFrame:
    """Return the worst case of each victim: 1 if identified, 0 if not, NaN if never attacked.

    Rows are victims (seed, observation, victim), columns are defenses: the same victims under
    every defense, for paired tests and bootstraps.

    Args:
        results: The run.
        scenario: Which scenario.
        checkpoint: Which attacked round.
        candidates: Whether attacks that are handed candidates count.
    """
    attacks = labelled(results.attacks)
    here = attacks[(attacks["scenario"] == scenario) & (attacks["checkpoint"] == checkpoint)]
    worst = {
        defense: _worst_victims(group, candidates=candidates)["worst"]
        for defense, group in here.groupby("defense", sort=False)
    }
    victims = pd.MultiIndex.from_frame(here[_VICTIM].drop_duplicates()).sort_values()
    return pd.DataFrame(worst, index=victims).rename_axis(columns="defense")


def utility(results: Results) -> pd.DataFrame:
    """Return the test accuracy per scenario and defense, at the last evaluated round.

    `relative` is the accuracy as a share of the undefended one; NaN without a control.
    """
    frame = labelled(results.utility)
    last = frame.groupby(["scenario", "defense"])["round"].transform("max")
    groups = frame[frame["round"] == last].groupby(["scenario", "defense"], sort=False)
    table = pd.DataFrame([_accuracy(group) for _, group in groups], columns=_UTILITY_COLUMNS)
    undefended = table[table["family"] == "none"].groupby("scenario")["accuracy"].first()
    table["relative"] = table["accuracy"] / table["scenario"].map(undefended).astype(float)
    return table


def utility_curve(results: Results) -> pd.DataFrame:
    """Return the accuracy per scenario, defense and evaluated round, averaged over seeds."""
    frame = labelled(results.utility)
    frame["accuracy"] = frame["correct"] / frame["total"]
    groups = frame.groupby(["scenario", "defense", "round"], sort=False)
    return groups.agg(
        family=("family", "first"), strength=("strength", "first"), accuracy=("accuracy", "mean")
    ).reset_index()


def guarantees(results: Results) -> pd.DataFrame:
    """Return what is claimed and what was audited, per scenario and defense that claims privacy.

    Of several seeds, it is the one with the largest epsilon, and with a violation if any has one.
    """
    frame = labelled(results.guarantees)
    ranked = frame.assign(bad=frame["violated"].fillna(False).astype(bool)).sort_values(
        ["bad", "epsilon"], ascending=False, kind="stable"
    )
    first = ranked.drop_duplicates(["scenario", "defense"]).drop(columns="bad")
    return first.sort_index(kind="stable").reset_index(drop=True)


def optimiser_failed(attacks: pd.DataFrame) -> pd.Series[float]:
    """Return 1 where an attack's objective is worse at its guess than at the truth, else 0.

    NaN where the attack has no objective or did not run.
    """
    truth = attacks["objective_at_truth"]
    failed = attacks["objective"] > truth + 1e-3 * truth.abs() + 1e-9
    return failed.astype(float).where(attacks["objective"].notna() & truth.notna())


def _with_derived(attacks: pd.DataFrame) -> pd.DataFrame:
    ran = attacks["reason"].isna()
    unit = attacks.groupby(["scenario", "seed", "observation"]).ngroup()
    tiers = {
        name: ((attacks["psnr"] >= psnr) & (attacks["ssim"] >= ssim))
        .astype(float)
        .where(attacks["psnr"].notna())
        for name, (psnr, ssim) in _TIER_COLUMNS.items()
    }
    return attacks.assign(
        unit=unit,
        unit_ran=unit.where(ran),
        unit_not_applicable=unit.where(~ran),
        counterfactual=_floats(attacks["counterfactual"]),
        label_correct=_floats(attacks["label_correct"]),
        labels_granted=attacks["labels_granted"].fillna(False).astype(bool) & ran,
        optimiser_failed=optimiser_failed(attacks),
        seconds=attacks["seconds"].where(ran),
        **tiers,
    )


def _floats(flags: pd.Series[Any]) -> pd.Series[float]:
    return pd.Series(flags.to_numpy(dtype=float, na_value=nan), index=flags.index)


def _limits(identified: pd.Series[Any], unit: pd.Series[int]) -> dict[str, Any]:
    scored = identified.notna()
    interval = rate(identified[scored].to_numpy(dtype=bool), unit[scored].to_numpy())
    if interval.n == 0:
        interval = Interval(nan, nan, nan, 0)
    values = (interval.value, interval.low, interval.high, str(interval))
    return dict(zip(_LIMITS, values, strict=True))


def _blind(attacks: pd.DataFrame) -> pd.DataFrame:
    """Return, per arm, the rate of the best blind guess and chance."""
    tries = 1 + attacks["psnr_transformed"].notna()  # the victim, and what was made of it
    scores = attacks.assign(
        chance=tries / attacks["candidates"], prior=_floats(attacks["identified"])
    )
    guesses = scores[scores["baseline"]].groupby([*ARM, "adversary"], dropna=False)
    prior = guesses.agg(prior=("prior", "mean")).groupby(level=ARM, dropna=False).max()
    chance = scores.groupby(ARM, dropna=False).agg(chance=("chance", "mean"))
    return chance.join(prior).reset_index()


def _advantages(success: pd.Series[float], blind: pd.Series[float]) -> list[float]:
    return [advantage(*pair) for pair in zip(success, blind, strict=True)]


def _informed_limits(attacks: pd.DataFrame) -> dict[str, Any]:
    """Return the worst case of one arm where candidates are known; NaN if no attack used them."""
    victims = _worst_victims(attacks, candidates=True)["worst"]
    if attacks.loc[attacks["candidates_granted"], "identified"].isna().all():
        victims = victims.head(0)
    unit = victims.groupby(level=["seed", "observation"]).ngroup()
    return {_INFORMED[name]: value for name, value in _limits(victims, unit).items()}


def _worst_victims(attacks: pd.DataFrame, *, candidates: bool = False) -> pd.DataFrame:
    """Return, per victim of one arm, the worst case and what a real attacker would select."""
    counted = ~attacks["baseline"] & attacks["identified"].notna()
    if not candidates:
        counted &= ~attacks["candidates_granted"]
    scored = attacks.loc[counted, [*_VICTIM, "identified", "objective"]]
    by_objective = scored.sort_values("objective", kind="stable", na_position="last")
    victims = by_objective.astype({"identified": float}).groupby(_VICTIM)
    return victims.agg(worst=("identified", "max"), selected=("identified", "first"))


def _accuracy(group: pd.DataFrame) -> dict[Hashable, Any]:
    interval = accuracy_interval(group["correct"].tolist(), group["total"].tolist())
    return group[["scenario", "defense", "family", "strength"]].iloc[0].to_dict() | {
        "seeds": group["seed"].nunique(),
        "accuracy": interval.value,
        "low": interval.low,
        "high": interval.high,
        "text": str(interval),
        "rounds": int(group["round"].iloc[0]),
    }
