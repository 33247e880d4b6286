"""The privacy-utility frontier: which defenses are worth the accuracy they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import escape
from numpy.typing import NDArray

from ..foundations.statistics import (
    DRAWS,
    advantage,
    clopper_pearson,
    hypervolume,
    hypervolumes,
    pareto_mask,
    pareto_probability,
)
from .analysis import SERVERS, assumed_victims, at, column, victim_matrix
from .baseline import equal_utility
from .checks import Checks, Judged, failed_checks, of_arm
from .coordinates import GIVEN, coordinates, headline, success_column, with_proofs
from .dominance import Arm, Dominance, Verdict, compare, judge
from .labels import DEFENSE, describe_defenses, limit_text, percent, rounds_named, rows

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

TARGETS = (0.05, 0.1, 0.25)
"""Upper limits on the worst-case advantage that users ask for."""

AFFORDABLE = 0.02
"""The loss of accuracy that counts as affordable."""

_STRONGER = [server for server in SERVERS if server != "passive"]


@dataclass(frozen=True, repr=False)
class Frontier:
    """All defenses of one scenario, compared on the model of one attacked round.

    Attributes:
        scenario: The name of the scenario.
        checkpoint: The attacked round.
        points: One row per defense. It has the labels of the defense and these columns:
            `accuracy`, the `success` of a passive server from nothing and its `advantage` over the
            blind guess, each with limits;
            `parameters_rate`, `architecture_rate` and `candidates_rate` as in `worst_case`, each
            with limits and its `blind` rate;
            `gamma_upload` and `gamma_run`, the proven limits of success, and `evidence`;
            the claimed `epsilon` at `delta`, its `unit`, and whether the claim is `refuted`;
            `gains`, whether the defense leaks significantly less than the undefended control;
            `verdict` and `place`, as `dominance.judge` gives them;
            `pareto`, whether the verdict is Pareto-optimal (the control is `pareto` if no judged
            defense is better at the estimates), and `p_pareto`, the share of bootstrap draws in
            which the defense is optimal;
            `headline`, the sentence of `coordinates.headline`.
        families: Hypervolume of each family's sweep, with limits. It is the dominated area of
            relative accuracy x (1 - advantage); 1 is perfect.
        answers: Answers to common questions, as sentences.
        baseline: The table of `equal_utility`, which compares every heuristic with DP-SGD.
        order: All pairwise comparisons of defenses.
    """

    scenario: str
    checkpoint: int
    points: pd.DataFrame
    families: pd.DataFrame
    answers: tuple[str, ...]
    baseline: pd.DataFrame
    order: Dominance

    def __repr__(self) -> str:
        return f"{self._title}\n{self._table.to_string(index=False)}"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: every defense, and what it is worth."""
        return f"<p>{escape(self._title)}</p>{self._table.to_html(index=False)}"

    @property
    def _title(self) -> str:
        return f"{self.scenario}, {rounds_named(self.checkpoint)}"

    @property
    def _table(self) -> pd.DataFrame:
        columns = {
            "name": "defense",
            "success_text": "from nothing",
            "candidates_text": "given candidates",
            "accuracy": "accuracy",
            "verdict": "verdict",
        }
        accuracy = [percent(value) for value in self.points["accuracy"]]
        return self.points.assign(accuracy=accuracy)[[*columns]].rename(columns=columns)


@dataclass(frozen=True)
class _Draws:
    """Resampled accuracies, advantages and success by server, draws x defenses."""

    accuracy: Floats
    advantage: Floats
    success: Mapping[str, Floats]


def make_frontiers(results: Judged, draws: int = DRAWS, seed: int = 0) -> list[Frontier]:
    """Return the frontier of every scenario and attacked round.

    Args:
        results: The run.
        draws: Bootstrap resamples.
        seed: Seed of the bootstrap.
    """
    claims, accuracies = results.claims(), results.final_utility()
    worst = results.worst_case()
    settings = worst[["scenario", "checkpoint"]].drop_duplicates()
    return [
        _frontier(
            results,
            setting.scenario,
            int(setting.checkpoint),
            with_proofs(
                _points(
                    at(worst, setting.scenario, setting.checkpoint),
                    accuracies[accuracies["scenario"] == setting.scenario],
                ),
                claims[claims["scenario"] == setting.scenario],
                at(results.attacks, setting.scenario, setting.checkpoint),
            ),
            draws=draws,
            seed=seed,
            checks=_own_checks(results, setting, alone=len(settings) == 1),
        )
        for setting in rows(settings)
    ]


def _own_checks(results: Judged, setting: Any, *, alone: bool) -> Checks:  # noqa: ANN401 - a row
    """Return the checks of a setting's own part of the run, if a check of the run fails."""
    checks = results.checks()
    if alone or not failed_checks(checks):
        return checks
    return results.part(setting.scenario, int(setting.checkpoint)).checks()


def _frontier(
    results: Judged,
    scenario: str,
    checkpoint: int,
    points: pd.DataFrame,
    *,
    draws: int,
    seed: int,
    checks: Checks,
) -> Frontier:
    victims = {
        server: victim_matrix(results, scenario, checkpoint, server)
        for server in SERVERS
        if points[success_column(server)].notna().any() or server == "passive"
    }
    if GIVEN in victims:  # a passive attack alone does not tell what candidates are worth
        victims[GIVEN][points.loc[points[column(GIVEN, "rate")].isna(), "defense"]] = nan
    points.insert(0, "scenario", scenario)
    points.insert(1, "checkpoint", checkpoint)
    placed = points.dropna(subset=["accuracy", "advantage"])
    tests = final_counts(results, scenario)
    measured = {server: table[placed["defense"]] for server, table in victims.items()}
    victims, points = _with_lost_attacks(
        victims, points, at(results.lost_attacks(), scenario, checkpoint)
    )
    placed = points.loc[placed.index]
    found = {server: table[placed["defense"]] for server, table in victims.items()}
    order = compare(found, tests, _control(placed))
    points["gains"] = points["defense"].isin(order.gains)
    verdicts = _verdicts(points, order, checks)
    families = pd.DataFrame(columns=["family", "defenses", "hypervolume", "low", "high"])
    if len(placed):
        assumed = _resample(found, tests, placed, draws, seed)
        points = points.join(_probabilities(placed, assumed, verdicts))
        same = all(found[server].equals(measured[server]) for server in measured)
        drawn = assumed if same else _resample(measured, tests, placed, draws, seed)
        families = _families(placed, drawn)
    else:
        points = points.assign(pareto=False, p_pareto=nan)
    points["pareto"] = points["pareto"].eq(True)
    names = points.set_index("defense")["name"]
    points["verdict"] = [
        _text(row, verdicts[row["defense"]], names) for _, row in points.iterrows()
    ]
    points["place"] = [verdicts[name].place for name in points["defense"]]
    points["place"] = pd.to_numeric(points["place"])
    points["headline"] = [headline(point) for _, point in points.iterrows()]
    baseline = equal_utility(points, order, victims)
    answers = tuple(_answers(points))
    return Frontier(scenario, checkpoint, points, families, answers, baseline, order)


def _with_lost_attacks(
    victims: Mapping[str, pd.DataFrame], points: pd.DataFrame, lost: pd.DataFrame
) -> tuple[dict[str, pd.DataFrame], pd.DataFrame]:
    """Return victims, and points with a column `assumed` per server with lost attacks."""
    found = {server: assumed_victims(own, lost, server) for server, own in victims.items()}
    for server, table in found.items():
        if table is not victims[server]:
            rates = points["defense"].map(table.mean())
            affected = points["defense"].isin(lost["defense"])
            assumed = rates.where(affected, points[success_column(server)])
            points = points.assign(**{success_column(server, "assumed"): assumed})
    return found, points


def _points(worst: pd.DataFrame, accuracies: pd.DataFrame) -> pd.DataFrame:
    attacked = worst.rename(
        columns={"rate": "success", "low": "success_low", "high": "success_high"}
    ).drop(columns=["text", "scenario", "checkpoint"])
    trained = accuracies.rename(columns={"low": "accuracy_low", "high": "accuracy_high"})
    arms = pd.concat([frame[["defense", *DEFENSE]] for frame in (attacked, trained)])
    points = describe_defenses(arms)[["defense", "name", *DEFENSE]]
    measured = ["accuracy", "accuracy_low", "accuracy_high", "relative", "seeds", "rounds"]
    measured += ["refused", "contains", "perplexity"]
    points = points.merge(trained[["defense", *measured]], on="defense", how="left")
    points = points.merge(attacked.drop(columns=DEFENSE), on="defense", how="left")
    for name in ("success", "advantage"):
        points[f"{name}_text"] = _texts(points, name, f"{name}_low", f"{name}_high")
    for server in _STRONGER:
        rate, low, high, text = (column(server, name) for name in ("rate", "low", "high", "text"))
        known = points[rate].notna()
        points[text] = _texts(points, rate, low, high).where(known, points[text].fillna("n/a"))
    given = column(GIVEN, "text")
    points[given] = points[given].replace("n/a", "unknown")
    return points


def _texts(points: pd.DataFrame, *names: str) -> pd.Series[str]:
    limits = points[[*names]].to_numpy(dtype=float).tolist()
    return pd.Series([limit_text(*values) for values in limits], index=points.index, dtype=object)


def _resample(
    victims: Mapping[str, pd.DataFrame],
    tests: pd.DataFrame,
    placed: pd.DataFrame,
    count: int,
    seed: int,
) -> _Draws:
    """Return a bootstrap over seeds, then observations, then victims.

    All defenses see the same resampled victims, because comparisons between them are paired. Test
    examples are resampled as binomial counts of each seed's model. An advantage below zero counts
    as zero: doing worse than a blind guess is not more private than a blind guess.
    """
    rng = np.random.default_rng(seed)
    index = victims["passive"].index
    seeds = sorted({*index.get_level_values("seed"), *tests["seed"]})
    drawn = rng.multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), size=count)
    weights = _victim_weights(index, seeds, drawn, rng)
    success = {
        server: _weighted_mean(weights, table.to_numpy(dtype=float))
        for server, table in victims.items()
    }
    blind = placed["blind"].to_numpy(dtype=float)
    gained = np.clip((success["passive"] - blind) / (1 - blind), 0, None)
    own = (tests[tests["defense"] == name] for name in placed["defense"])
    accuracy = np.column_stack([_accuracy_draws(one, seeds, drawn, rng) for one in own])
    return _Draws(accuracy, gained, success)


def final_counts(results: Judged, scenario: str) -> pd.DataFrame:
    """Return the test counts of every defense and seed at the defense's last round."""
    rows = results.utility[results.utility["scenario"] == scenario]
    last = rows.groupby("defense")["round"].transform("max")
    return rows[rows["round"] == last]


def _victim_weights(
    index: pd.Index, seeds: list[int], drawn: Counts, rng: np.random.Generator
) -> Counts:
    """Return how often each victim is in each draw: draws x victims."""
    weights = np.zeros((len(drawn), len(index)), dtype=np.int64)
    places = pd.Series(np.arange(len(index)), index=index)
    for position, seed in enumerate(seeds):
        members = places[index.get_level_values("seed") == seed]
        if members.empty:
            continue
        batches = [group.to_numpy() for _, group in members.groupby(level="observation")]
        uploads = len(batches)
        repeats = drawn[:, position] * uploads
        chosen = rng.multinomial(repeats, np.full(uploads, 1 / uploads))
        for batch, times in zip(batches, chosen.T, strict=True):
            size = len(batch)
            weights[:, batch] = rng.multinomial(times * size, np.full(size, 1 / size))
    return weights


def _weighted_mean(weights: Counts, values: Floats) -> Floats:
    """Return the mean of each column under each row of weights; NaN values carry no weight.

    If a draw contains none of a column's values, the result is the plain mean. A column without
    values has no mean.
    """
    known = ~np.isnan(values)
    sizes = weights @ known.astype(float)
    sums, counts = np.nansum(values, axis=0), known.sum(axis=0)
    mean = np.divide(sums, counts, out=np.full(len(sums), nan), where=counts > 0)
    plain = np.broadcast_to(mean, sizes.shape)
    means: Floats = np.divide(
        weights @ np.nan_to_num(values), sizes, out=plain.copy(), where=sizes > 0
    )
    return means


def _accuracy_draws(
    tests: pd.DataFrame, seeds: list[int], drawn: Counts, rng: np.random.Generator
) -> Floats:
    total = tests["total"].to_numpy()
    share = tests["correct"].to_numpy() / total
    accuracies = rng.binomial(total, share, size=(len(drawn), len(tests))) / total
    weights = drawn[:, [seeds.index(seed) for seed in tests["seed"]]].astype(float)
    weights[weights.sum(axis=1) == 0] = 1.0  # a draw without any of this defense's seeds
    return np.average(accuracies, axis=1, weights=weights)


def _probabilities(
    placed: pd.DataFrame, draws: _Draws, verdicts: Mapping[str, Verdict]
) -> pd.DataFrame:
    """Return which of the judged defenses are Pareto-optimal, and with what probability."""
    own = [verdicts[name] for name in placed["defense"]]
    chosen = placed["control"].to_numpy() | [one.place is not None for one in own]
    found = placed[chosen]
    gammas = [found[name].to_numpy(dtype=float) for name in ("gamma_upload", "gamma_run")]
    success = [coordinates(one).success for _, one in found.iterrows()]
    estimates = pd.DataFrame(success, columns=[*SERVERS])
    rates = [estimates[server].to_numpy(dtype=float) for server in draws.success]
    optimal = pareto_mask(-found["accuracy"].to_numpy(dtype=float), *rates, *gammas)
    drawn = draws.accuracy[:, chosen]
    costs = [-drawn, *(one[:, chosen] for one in draws.success.values())]
    costs += [np.broadcast_to(gamma, drawn.shape) for gamma in gammas]
    judged_so = placed["defense"].map(lambda name: verdicts[name].kind == "Pareto-optimal")[chosen]
    return pd.DataFrame(
        {
            "pareto": np.where(found["control"], optimal, judged_so),
            "p_pareto": pareto_probability(*costs),
        },
        index=found.index,
    )


def _control(placed: pd.DataFrame) -> str | None:
    """Return the undefended control; None if it was not trained or not attacked."""
    found = placed.loc[placed["control"], "defense"]
    return None if found.empty else str(found.iloc[0])


def _relative(accuracy: Floats, undefended: Floats) -> Floats:
    """Return accuracies as shares of the undefended one; 1 if that one is zero."""
    shape = np.broadcast_shapes(accuracy.shape, undefended.shape)
    return np.divide(accuracy, undefended, out=np.ones(shape), where=undefended > 0)


def _families(placed: pd.DataFrame, draws: _Draws) -> pd.DataFrame:
    """Return the hypervolumes of all families; an empty table without an undefended control."""
    columns = ["family", "defenses", "hypervolume", "low", "high"]
    families = placed["family"].to_numpy()
    control = np.flatnonzero(placed["control"])
    if not len(control):
        return pd.DataFrame(columns=columns)
    relative = _relative(draws.accuracy, draws.accuracy[:, control[:1]])
    accuracy = placed["accuracy"].to_numpy(dtype=float)
    estimate = _relative(accuracy, accuracy[control[:1]])
    rows = []
    for family in dict.fromkeys(families):
        members = families == family
        areas = hypervolumes(relative[:, members], 1 - draws.advantage[:, members])
        area = hypervolume(estimate[members], 1 - placed["advantage"].to_numpy()[members])
        low, high = np.quantile(areas, [0.025, 0.975])
        rows.append((family, int(members.sum()), area, float(low), float(high)))
    return pd.DataFrame(rows, columns=columns).sort_values("hypervolume", ascending=False)


def _verdicts(points: pd.DataFrame, order: Dominance, checks: Checks) -> dict[str, Verdict]:
    """Return the verdicts on all defenses."""
    arms = {
        str(point["defense"]): Arm(
            at=coordinates(point),
            control=bool(point["control"]),
            gains=bool(point["gains"]),
            over_control=order.over_control(str(point["defense"])),
            refuted=bool(point["refuted"]),
            failed=failed_checks(of_arm(checks, point["scenario"], str(point["defense"]))),
        )
        for _, point in points.iterrows()
    }
    return judge(arms, lambda one, other: order.gaps[one, other])


def _text(point: pd.Series, verdict: Verdict, names: pd.Series[str]) -> str:
    """Return a verdict in words; without a passive attack, it says who attacked."""
    if verdict.kind != "not attacked":
        return verdict.text(names.to_dict())
    others = [SERVERS[name] for name in _STRONGER if pd.notna(point[column(name, "rate")])]
    return f"attacked only by {others[0]}" if others else "not attacked: no attack ran"


def _answers(points: pd.DataFrame) -> list[str]:
    placed = points.dropna(subset=["accuracy", "advantage"])
    if placed.empty:
        return ["There is no frontier: no defense was both trained and attacked."]
    met = [target for target in TARGETS if (placed["advantage_high"] <= target).any()]
    missed = [target for target in TARGETS if target not in met]
    return [
        *([_out_of_reach(placed, missed)] if missed else []),
        *_most_accurate(placed, met),
        _least_success(placed),
        *_leakier(placed),
    ]


def _most_accurate(placed: pd.DataFrame, targets: list[float]) -> list[str]:
    """Return one sentence per defense that is the most accurate within a target."""
    best: dict[str, list[float]] = {}
    for target in targets:
        within = placed[placed["advantage_high"] <= target].sort_values("accuracy")
        best.setdefault(str(within["name"].iloc[-1]), []).append(target)
    accuracy = placed.set_index("name")["accuracy"]
    given = placed.set_index("name")["candidates_text"]
    return [
        f"Most accurate defense whose advantage from nothing is at most {_either(met)} with 95 % "
        f"confidence: {name}, accuracy {percent(accuracy[name])}; given candidates {given[name]}."
        for name, met in best.items()
    ]


def _either(shares: list[float]) -> str:
    return " or ".join(f"{100 * share:.0f} %" for share in shares)


def _out_of_reach(placed: pd.DataFrame, targets: list[float]) -> str:
    closest = placed.sort_values("advantage_high").iloc[0]
    text = (
        "No tested defense is shown to keep the advantage from nothing at or below "
        f"{_either(targets)} with 95 % confidence. The lowest upper limit is "
        f"{percent(closest['advantage_high'])} ({closest['name']})."
    )
    observations = int(placed["observations"].max())
    resolution = advantage(clopper_pearson(0, observations).high, closest["blind"])
    if resolution > max(targets):
        text += (
            f" The run is too small for this question: with {observations} observations, the limit "
            f"is at least {percent(resolution)} even without a single success."
        )
    return text


def _leakier(placed: pd.DataFrame) -> Iterator[str]:
    """Yield one sentence per stronger server that finds significantly more than a passive one."""
    for server in _STRONGER:
        low, text = column(server, "low"), column(server, "text")
        gained = placed[placed[low] > placed["success_high"]]
        cases = "; ".join(
            f"{point['name']}, {point[text]} instead of {point['success_text']}"
            for _, point in gained.iterrows()
        )
        if cases:
            yield f"Significantly leakier to {SERVERS[server]}: {cases}."


def _least_success(placed: pd.DataFrame) -> str:
    control = placed[placed["control"]]
    points = f"{100 * AFFORDABLE:.0f} points"
    if control.empty:
        return f"The gain for {points} of accuracy is unknown: there is no undefended control."
    undefended = control.iloc[0]
    within = placed[placed["accuracy"] >= undefended["accuracy"] - AFFORDABLE - 1e-12]
    within = within[within["gains"]].sort_values("success")
    if within.empty:
        return (
            f"No defense within {points} of the undefended accuracy is shown to lower the "
            f"success from nothing ({undefended['success_text']} undefended)."
        )
    best = within.iloc[0]
    return (
        f"Lowest success from nothing within {points} of the undefended accuracy: "
        f"{best['success_text']} by {best['name']} ({undefended['success_text']} undefended)."
    )
