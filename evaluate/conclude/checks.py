"""Checks whether an evaluation can be trusted.

The questions follow Carlini et al., "On Evaluating Adversarial Robustness", 2019,
https://arxiv.org/abs/1902.06705; Tramer et al., "On Adaptive Attacks to Adversarial Example
Defenses", NeurIPS 2020, https://arxiv.org/abs/2002.08347; and Aerni, Zhang, Tramer,
"Evaluations of Machine Learning Privacy Defenses are Misleading", CCS 2024,
https://arxiv.org/abs/2404.17399.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import stats

from ..client.examination import failures, findings
from ..client.inversion import noise_cancels, still_holds_update
from ..foundations.statistics import (
    SIGNIFICANCE,
    Floats,
    clopper_pearson,
    holm,
    monotone_violation,
    paired_difference,
)
from .analysis import FINISHED, SERVERS, Analysed, blind_success, column, optimiser_failed, tried
from .labels import ARM, ATTACK, rounds_named, rows, sweeps
from .tables import once

Verdict = Literal["pass", "warn", "fail", "n/a"]

FAILED_SHARE = 0.2
"""Above this share of victims missed by a failed optimiser, an attack says little."""

DP_BASELINE = "DPSGD"
"""The baseline for every defense without a guarantee (Aerni et al.)."""

LAST_PART = 0.2
"""Share of the rounds, at the end, over which the accuracy of the control must have settled."""

SETTLED = 0.01
"""A rise of the control's accuracy over these rounds that does not matter."""

AS_GOOD = 0.1
"""Attacks do their work if their success is at most this far below that without a defense."""

LEAST_POWER = 0.2
"""An evaluation without a single success must exclude success rates above this one."""


@dataclass(frozen=True)
class Check:
    """The answer to one question about an evaluation.

    Attributes:
        name: The name of the check.
        verdict: `fail` if conclusions would be wrong, `warn` if they need a caveat, `n/a` if
            the run contains nothing to check.
        text: The answer, in one or two short sentences.
        details: The cases that raise the check.
        remedy: Code that repairs them.
        arms: The scenarios and defenses whose evaluation a failed check concerns. Default: all.
    """

    name: str
    verdict: Verdict
    text: str
    details: tuple[str, ...] = ()
    remedy: str = ""
    arms: frozenset[tuple[str, str]] = frozenset()

    def concerns(self, scenario: str, defense: str) -> bool:
        """Return whether it says something about the evaluation of a defense."""
        return not self.arms or self.verdict != "fail" or (scenario, defense) in self.arms


class Checks(list[Check]):
    """The answers to all questions about an evaluation."""

    def __repr__(self) -> str:
        return "\n".join(f"{one.verdict:4} {one.name}: {one.text}" for one in self)

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        rows = [(one.name, one.verdict, one.text) for one in self]
        table = pd.DataFrame(rows, columns=["check", "verdict", "answer"])
        with pd.option_context("display.max_colwidth", None):
            return table.to_html(index=False)


@dataclass(frozen=True)
class _Evidence:
    results: Analysed

    @cached_property
    def planned(self) -> pd.DataFrame:
        """Return the labels of all attack cells, finished or not."""
        return self.results.cells[self.results.cells["kind"] == "attack"]

    @cached_property
    def attacks(self) -> pd.DataFrame:
        """Return the rates of attacks that ran, without the blind guess.

        `uploads` counts those that the attack ran on and those that a cascade skipped.
        """
        rates = self.results.rates()
        rates = rates.assign(uploads=rates["observations"] + rates["not_needed"])
        return rates[~rates["baseline"] & rates["rate"].notna()]

    @cached_property
    def control(self) -> pd.DataFrame:
        """Return the attacks' rates without a defense."""
        return self.attacks[self.attacks["control"]]


def run_checks(results: Analysed) -> list[Check]:
    """Return the answers to all questions about a run, always in the same order.

    No check passes if no cell has finished.
    """
    evidence = _Evidence(results)
    checks = [check(evidence) for check in _CHECKS]
    if results.cells["status"].isin(FINISHED).any():
        return checks
    return [
        _not_asked(check.name, "No cell has finished.") if check.verdict == "pass" else check
        for check in checks
    ]


def overall(checks: Iterable[Check]) -> Verdict:
    """Return the worst verdict."""
    found = {check.verdict for check in checks}
    return next((verdict for verdict in _WORST_FIRST if verdict in found), "pass")


def conclusion(checks: Iterable[Check]) -> str:
    """Return whether an evaluation can be trusted, and the checks that warn or fail."""
    checks = list(checks)
    verdict = overall(checks)
    names = _named(checks, verdict)
    answers = {"fail": f"NO ({names})", "warn": f"YES, with caveats ({names})"}
    return f"Evaluation: {answers.get(verdict, 'YES')}"


def failed_checks(checks: Iterable[Check]) -> str:
    """Return the names of the checks that an evaluation fails; "" if it fails none."""
    return _named(checks, "fail")


def of_arm(checks: Iterable[Check], scenario: str, defense: str) -> list[Check]:
    """Return the checks without those that fail because of other defenses only."""
    return [check for check in checks if check.concerns(scenario, defense)]


def _named(checks: Iterable[Check], verdict: Verdict) -> str:
    return ", ".join(check.name for check in checks if check.verdict == verdict)


def _undefended_control(evidence: _Evidence) -> Check:
    control = evidence.control
    control = control.assign(broken=control["low"] > blind_success(control))
    place = ["scenario", "checkpoint"]
    places = evidence.planned.groupby(place, sort=False).size().index
    broken = _weakest(control, evidence.planned).groupby(place)["broken"].any()
    unbroken = places[~broken.reindex(places, fill_value=False).astype(bool)]
    useful = control.groupby("adversary", sort=False)["broken"].any()
    details = [
        *(
            f"{scenario}, {rounds_named(checkpoint)}: "
            + ("no attack" if (scenario, checkpoint) in broken else "none tried")
            for scenario, checkpoint in unbroken
        ),
        *(f"{adversary}: never" for adversary in useful.index[~useful]),
    ]
    name = "undefended control"
    if len(unbroken) or places.empty:
        text = (
            "No attack significantly beats a blind guess without a defense. Here, failure against "
            "a defense proves nothing."
        )
        return Check(name, "fail", text, tuple(details))
    return _answer(
        name,
        details,
        "Some attacks never beat a blind guess, even without a defense. Their failure against a "
        "defense proves nothing.",
        "Without a defense, every attack that ran beats a blind guess in some scenario.",
    )


def _weakest(rates: pd.DataFrame, planned: pd.DataFrame) -> pd.DataFrame:
    """Return the attacks of the weakest planned server that get no candidates.

    The success of an active attack, or of one with candidates, says nothing about the others.
    """
    rebuilding = planned[~planned["baseline"] & ~planned["candidates_granted"]]
    least = next((threat for threat in SERVERS if (rebuilding["threat"] == threat).any()), None)
    return rates[~rates["candidates_granted"] & (rates["threat"] == least)]


def _blind_guess(evidence: _Evidence) -> Check:
    name = "blind guess"
    rates = evidence.results.rates()
    blind = rates[rates["control"] & rates["baseline"] & rates["rate"].notna()]
    if blind.empty:
        return Check(
            name,
            "warn",
            "No blind guess was scored without a defense. Leakage cannot be distinguished from "
            "success that needs no upload.",
        )
    uneven = blind[(blind["chance"] < blind["low"]) | (blind["chance"] > blind["high"])]
    details = [
        f"look-alikes are not exchangeable: blind guess {row.text}, chance "
        f"{_percent(row.chance)}, {_place(row)}"
        for row in rows(uneven)
    ]
    return _answer(
        name,
        [*_no_better_than_blind(evidence.results.attacks), *details],
        "An undefended attack is not significantly better than a blind guess, or the blind guess "
        "differs from chance. Such success is not evidence of leakage.",
        "Without a defense, every attack beats the blind guess, and the blind guess is at chance.",
    )


def _no_better_than_blind(attacks: pd.DataFrame) -> Iterator[str]:
    """Yield the undefended attacks that are not significantly better than a blind guess.

    A blind guess ignores the upload. The attack's own guesses for another upload are blind too,
    and there are as many of them as of its guesses.
    """
    victim = ["scenario", "checkpoint", "seed", "observation", "victim"]
    known = [*ATTACK, "seed", "observation", "victim", "baseline", "control"]
    known += ["identified", "counterfactual"]
    control = attacks.loc[attacks["identified"].notna() & attacks["control"], known]
    control = control.astype({"identified": float, "counterfactual": float})
    blind = control[control["baseline"]].groupby(victim)["identified"].max().rename("blind")
    paired = control[~control["baseline"]].merge(blind.reset_index(), on=victim)
    for _, group in paired.groupby(ATTACK, dropna=False, sort=False):
        unit = group.groupby(["seed", "observation"]).ngroup()
        blinds = [group["blind"], group["counterfactual"]]
        gain = min(
            (
                paired_difference(group["identified"][there], one[there], unit[there])
                for one in blinds
                if (there := one.notna()).any()
            ),
            key=lambda gain: gain.low,
        )
        if not gain.low > 0:
            limits = f"{_percent(gain.low)} to {_percent(gain.high)}"
            yield f"{limits} above the blind guess: {_case(group.iloc[0])}"


def _optimiser(evidence: _Evidence) -> Check:
    attacks = evidence.results.attacks
    failed = optimiser_failed(attacks)
    # A guess that identifies the victim need not fit the upload as well as the truth.
    missed = failed * ~attacks["identified"].fillna(False).astype(bool)
    defended = attacks[ATTACK].assign(missed=missed)[~attacks["control"]]
    if defended["missed"].isna().all():
        return _not_asked("optimiser", "No optimising attack ran against a defense.")
    missed = defended.groupby(ATTACK, dropna=False, sort=False)["missed"].mean()
    table = evidence.attacks.merge(missed.reset_index(), on=ATTACK)
    return _answer(
        "optimiser",
        [
            f"{_percent(row.missed)} of victims{_scope(row)}: {_case(row)}"
            for row in rows(table[table["missed"] > FAILED_SHARE])
        ],
        "Some attacks missed victims although the truth fits the upload better than their guess. "
        "The search failed although the upload holds the information; a longer one may succeed.",
        "Where optimising attacks fail, their guess mostly fits the upload at least as well as "
        "the truth.",
    )


def _monotone(evidence: _Evidence) -> Check:
    # Single attacks are not comparable: in a cascade, each defense leaves them other uploads.
    worst = evidence.results.worst_case()
    places = worst[~worst["control"]].groupby(["scenario", "checkpoint"], sort=False)
    if not any(True for _, arms in places for _ in sweeps(arms)):
        return _not_asked("monotone", "No defense was attacked at more than one strength.")
    return _answer(
        "monotone",
        [rise for _, arms in places for server in SERVERS for rise in _rises(arms, server)],
        "A stronger setting of a defense leaks significantly more in the worst case. Look for a "
        "mistake in the defense or in the attacks.",
        "No stronger setting of a defense leaks significantly more in the worst case.",
    )


def _rises(arms: pd.DataFrame, server: str) -> Iterator[str]:
    """Yield the cases in which a server finds more at a higher strength, all else equal."""
    rate, low, high, text = (column(server, name) for name in ("rate", "low", "high", "text"))
    for sweep in sweeps(arms.dropna(subset=rate)):
        columns = [sweep[name].to_numpy() for name in ("strength", rate, low, high)]
        for weaker, stronger in monotone_violation(*columns):
            more, less = sweep.iloc[stronger], sweep.iloc[weaker]
            yield (
                f"{more[text]} instead of {less[text]} under {less.defense}: {SERVERS[server]} "
                f"against {more.defense}, {_place(more)}"
            )


def _oracle_inputs(evidence: _Evidence) -> Check:
    rates = evidence.results.rates()
    rates = rates[~rates["candidates_granted"]]  # reports show these separately
    if evidence.attacks.empty:
        return _not_asked("oracle inputs", "No attack ran.")
    granted = rates[rates["labels_granted"].astype(bool)]
    granted = granted.drop_duplicates(["adversary", "scenario"])
    return _answer(
        "oracle inputs",
        [f"{row.adversary}, {row.scenario}" for row in rows(granted)],
        "Some adversaries were told the private labels. A real one must infer them, so their "
        "success is an upper limit.",
        "No adversary was told the private labels.",
    )


def _randomness(evidence: _Evidence) -> Check:
    cells, replays = evidence.results.cells, evidence.results.replays
    declared = cells.loc[cells["stochastic"].astype("boolean").fillna(False), "defense"]
    found = replays.loc[replays["uploads_differ"].fillna(False).astype(bool), "defense"]
    stochastic = {*declared, *found}
    if not stochastic:
        return _not_asked("randomness", "No defense of this run is random.")
    accuracy = evidence.results.final_utility()
    trained = accuracy[accuracy["defense"].isin(stochastic) & (accuracy["seeds"] < 2)]
    attacks = evidence.attacks
    attacked = attacks[attacks["defense"].isin(stochastic) & (attacks["uploads"] < 2)]
    return _answer(
        "randomness",
        [
            *(f"accuracy from one seed: {row.defense}, {row.scenario}" for row in rows(trained)),
            *(f"one observation: {_case(row)}" for row in rows(attacked)),
        ],
        "Some randomised defenses were scored on a single random draw. The result may be luck.",
        "Every randomised defense was trained with several seeds and attacked several times.",
    )


def _convergence(evidence: _Evidence) -> Check:
    curves = _counts(evidence.results.utility)
    rising = []
    for (scenario,), curve in curves[curves["control"]].groupby(["scenario"], sort=False):
        last = curve["round"].max()
        before = curve[curve["round"] <= (1 - LAST_PART) * last]
        if before.empty or not last:
            continue
        early, final = before.iloc[-1], curve.iloc[-1]
        rise = final["correct"] / final["total"] - early["correct"] / early["total"]
        if rise > SETTLED and _rise(early, final) < SIGNIFICANCE:
            rising.append(
                f"{scenario}: {100 * rise:.1f} points between rounds {early['round']} and {last}"
            )
    if not curves["control"].any():
        return _not_asked("convergence", "The run trains no undefended control.")
    return _answer(
        "convergence",
        rising,
        "The accuracy of the undefended control still rises in the last fifth of training. Train "
        "longer: the cost of a defense is not final.",
        "The accuracy of the undefended control has settled.",
    )


def _learning(evidence: _Evidence) -> Check:
    curves = _counts(evidence.results.utility)
    idle = []
    for (scenario, defense), curve in curves.groupby(["scenario", "defense"], sort=False):
        start, final = curve.iloc[0], curve.iloc[-1]
        if start["round"] == 0 < final["round"] and _rise(start, final) >= SIGNIFICANCE:
            share = final["correct"] / final["total"]
            idle.append(f"{defense}, {scenario}: {100 * share:.1f} % after training")
    return _answer(
        "learning",
        idle,
        "Some models are not significantly better after training than before. Their accuracy says "
        "nothing about the defense: train longer, or tune its learning rate.",
        "Every model has learned something.",
    )


def _counts(utility: pd.DataFrame) -> pd.DataFrame:
    """Return right predictions and test examples over all seeds, by arm and round in order."""
    groups = utility.groupby(["scenario", "defense", "round"], sort=False)
    counts = groups.agg(
        control=("control", "first"), correct=("correct", "sum"), total=("total", "sum")
    )
    return counts.reset_index().sort_values("round", kind="stable")


def _rise(early: pd.Series[Any], late: pd.Series[Any]) -> float:
    """Return the p-value of the hypothesis that an accuracy has not risen (Fisher's exact test)."""
    counts = [[int(one["correct"]), int(one["total"] - one["correct"])] for one in (late, early)]
    return float(stats.fisher_exact(np.array(counts), alternative="greater").pvalue)


def _adaptive(evidence: _Evidence) -> Check:
    rates = evidence.results.rates()
    knows = rates["knows_defense"].fillna(False).astype(bool)
    simulating = rates.assign(knows=knows)[rates["simulates"] & tried(rates)]
    granted = simulating.groupby([*ARM, "adversary"])["knows"].any()
    adaptive = granted.groupby(level=ARM).all()
    planned = evidence.planned
    arms = planned[~planned["control"]].groupby(ARM, sort=False).size().index
    blind = arms[~adaptive.reindex(arms, fill_value=False).astype(bool)]
    return _answer(
        "adaptive",
        [
            *(
                f"{defense}, {scenario}, {rounds_named(checkpoint)}"
                for scenario, checkpoint, defense in blind
            ),
            *_crippled(evidence.results.attacks),
        ],
        "Some simulating adversaries did not know the defense, or this knowledge made them "
        "significantly worse. Such attacks are not adaptive and prove no privacy.",
        "Every simulating adversary also ran with knowledge of the defense, and this knowledge "
        "made none significantly worse.",
    )


def _crippled(attacks: pd.DataFrame) -> Iterator[str]:
    """Yield the attacks that succeed significantly less often if they know the defense.

    This is a sign test over uploads. An upload that a cascade skipped for the ignorant attack
    counts for the informed attack. Some attack has broken it, perhaps the informed one.
    """
    known = [*ATTACK, "control", "seed", "observation", "identified"]
    defended = attacks["simulates"] & ~attacks["control"]
    scored = attacks.loc[defended & attacks["identified"].notna(), known]
    scored = scored.astype({"identified": float, "knows_defense": bool})
    cases, p_values = [], []
    for _, group in scored.groupby([*ARM, "adversary"], sort=False):
        upload = ["seed", "observation", "knows_defense"]
        shares = group.groupby(upload)["identified"].mean().unstack()
        if {True, False} <= {*shares.columns}:
            informed, ignorant = shares[True], shares[False]
            worse = int((ignorant > informed).sum())
            better = int((informed > ignorant.fillna(0)).sum())
            cases.append(
                f"{worse} uploads broken only without knowledge of the defense, at most {better} "
                f"only with it: {_case(group[group['knows_defense']].iloc[0])}"
            )
            p_values.append(stats.binom.sf(worse - 1, worse + better, 0.5))
    significant = holm(np.array(p_values)) < SIGNIFICANCE
    yield from (case for case, found in zip(cases, significant, strict=True) if found)


def _changed_model(evidence: _Evidence) -> Check:
    lost = evidence.results.lost_attacks()[[*ARM, "adversary"]].drop_duplicates()
    return _answer(
        "changed model",
        [
            f"{', '.join(own['adversary'])}: {own['defense'].iloc[0]}, {_place(own.iloc[0])}"
            for _, own in lost.groupby(ARM, sort=False)
        ],
        "Some attacks that work without a defense do not apply to the model that a defense "
        "changed. Its rates are of fewer attacks, and verdicts assume that these succeed.",
        "Every attack that works without a defense also applies to the models of the defenses.",
    )


def _replay(evidence: _Evidence) -> Check:
    if evidence.results.replays.empty:
        return _not_asked("replay", "No defense was replayed on clients with known examples.")
    examined = [*rows(evidence.results.replays)]
    found = [(row, finding) for row in examined for finding in findings(row)]
    probes = {row.cell: row for row in rows(evidence.results.probes)}
    failed = [
        (row, finding)
        for row in examined
        if row.cell in probes
        for finding in failures(row, probes[row.cell])
    ]
    remedies = dict.fromkeys(finding.remedy for _, finding in failed + found)
    if failed:
        check = Check(
            "replay",
            "fail",
            "A defense misleads the adversaries that know it. Their failure proves no privacy. An "
            "undefended client replaced such a replay.",
            tuple(
                f"{row.defense}, {row.scenario}: {finding.problem}"
                for row, finding in failed + found
            ),
        )
        return replace(
            check,
            remedy="\n".join(remedies),
            arms=frozenset((row.scenario, row.defense) for row, _ in failed),
        )
    check = _answer(
        "replay",
        [f"{row.defense}, {row.scenario}: {finding.problem}" for row, finding in found],
        "The `replay` of a defense would weaken the attacks that use it. The harness repaired "
        "what it could, and the lines below repair the class.",
        "Every `replay` reproduces the uploads of its defense as well as the defense's own "
        "randomness allows, and its gradient does not vanish.",
    )
    return replace(check, remedy="\n".join(remedies))


def _invertibility(evidence: _Evidence) -> Check:
    """Ask whether uploads hold more of the update than attacks made of them.

    A decoder that works is no mistake if attacks find as many victims as without a defense: the
    defense is then shown to protect nobody. So the check fails only where success is lower. Noise
    that cancels over rounds refutes a claim unless its audit has confirmed what several uploads
    reveal together.
    """
    name, probes = "invertibility", evidence.results.probes
    if probes.empty:
        return _not_asked(name, "No defense was tested on clients with public examples.")
    claims = evidence.results.claims()
    doubted = {
        (row.scenario, row.defense) for row in rows(claims) if row.refuted or pd.isna(row.violated)
    }
    spared = _spared(evidence.results.worst_case())
    tested = _tested(evidence)
    holding = [row for row in tested if still_holds_update(row)]
    blunted = [row for row in holding if (row.scenario, row.defense) in spared]
    cancelling = [
        row for row in tested if (row.scenario, row.defense) in doubted and noise_cancels(row)
    ]
    if blunted or cancelling:
        return Check(
            name,
            "fail",
            "The upload still holds the update. Attacks were blunted, and data is not protected.",
            (
                *map(_recovered, blunted),
                *(
                    f"{row.defense}, {row.scenario}: the sum of several uploads has "
                    f"{_percent(row.remaining_noise)} of the energy of fresh noise"
                    for row in cancelling
                ),
            ),
            arms=frozenset((row.scenario, row.defense) for row in (*blunted, *cancelling)),
        )
    return _answer(
        name,
        map(_recovered, holding),
        "The upload still holds the update. Attacks on the decoded update succeed about as often "
        "as without a defense.",
        "Decoders recover little more of the update than the attacked uploads show.",
    )


def _tested(evidence: _Evidence) -> list[Any]:
    """Return the tests of uploads like the attacked ones.

    Tests of new clients do not count for a defense whose trained clients alone were attacked: its
    first upload may have more noise than later ones.
    """
    results = evidence.results
    found = [*rows(results.probes)]
    trained = {(row.scenario, row.defense) for row in found if row.kind == "train"}
    worst = results.worst_case()
    new = {(row.scenario, row.defense) for row in rows(worst) if row.checkpoint == 0}
    return [
        row
        for row in found
        if row.kind == "train" or (row.scenario, row.defense) not in trained - new
    ]


def _recovered(row: Any) -> str:  # noqa: ANN401 - a row of a table
    return (
        f"{row.defense}, {row.scenario}: {row.decoder} recovers {_percent(row.decoded)} of the "
        f"update's energy, the attacked upload shows {_percent(row.plain)}"
    )


def _spared(worst: pd.DataFrame) -> set[tuple[str, str]]:
    """Return scenarios and defenses with less success of a passive server than the control.

    A rate lower by `AS_GOOD` is enough, significant or not. If a decoder works, a defense does not
    get the benefit of the doubt. A defense that was not attacked is spared.
    """
    rate = column("passive", "rate")
    control = worst[worst["control"]].set_index(["scenario", "checkpoint"])[rate]
    rates = worst[~worst["control"]]
    place = pd.MultiIndex.from_frame(rates[["scenario", "checkpoint"]])
    found = rates[rate].to_numpy(dtype=float, na_value=0.0)
    full = control.reindex(place).to_numpy(dtype=float, na_value=1.0)
    low = rates[np.nan_to_num(found) < np.nan_to_num(full, nan=1.0) - AS_GOOD]
    return {(row.scenario, row.defense) for row in rows(low)}


def _completeness(evidence: _Evidence) -> Check:
    cells = evidence.results.cells
    unfinished = cells[~cells["status"].isin(FINISHED)]
    counts = unfinished["status"].value_counts()
    spared = (cells["status"] == "not needed").sum()
    errors = unfinished.loc[unfinished["error"] != "", "error"]
    failed = (unfinished["status"] != "missing").any()
    remedy = "Repeat failed cells with `--retry-failed`" if failed else "Run again"
    check = _answer(
        "completeness",
        [
            *(f"{status}: {number} cells" for status, number in counts.items()),
            *(f"first error: {_first_line(error)}" for error in errors.head(1)),
        ],
        f"{len(unfinished)} of {len(cells)} cells have no result, and their attacks could have "
        f"succeeded. {remedy}.",
        f"All {len(cells)} cells finished"
        + (f", {spared} of them with nothing left to find." if spared else "."),
        verdict="fail",
    )
    return _attributed(check, unfinished)


def _proven_bound(evidence: _Evidence) -> Check:
    name, bounded = "proven bound", evidence.attacks.dropna(subset="bound")
    if bounded.empty:
        return _not_asked(name, "This run contains no bound to compare with.")
    exceeded = bounded[holm(_excess(bounded)) < SIGNIFICANCE]
    check = _answer(
        name,
        [
            f"{row.text}{_scope(row)} against a bound of {_percent(row.bound)}: {_case(row)}"
            for row in rows(exceeded)
        ],
        "Some attacks succeed significantly more often than the proven bound allows. The defense, "
        "its accounting or the evaluation is wrong.",
        "No attack significantly exceeds the bound that a defense claims.",
        verdict="fail",
    )
    return _attributed(check, exceeded)


def _excess(bounded: pd.DataFrame) -> Floats:
    """Return p-values of the hypotheses that attacks respect their bounds.

    They are exact for one example per upload. The examples of a larger upload are not independent,
    so each upload counts by the share that was identified. Its tail is at most e times as probable
    (Bentkus, "On Hoeffding's Inequalities", 2004, https://doi.org/10.1214/009117904000000360).
    Uploads that a cascade skipped count as failures. The other uploads are not a random sample:
    earlier attacks failed on them, and this attack may succeed on more of them than on all.
    """
    uploads, bound = bounded["uploads"], bounded["bound"].astype(float).clip(upper=1.0)
    successes = np.floor(bounded["rate"] * bounded["observations"] + 1e-9)
    tail = stats.binom.sf(successes - 1, uploads, bound)
    single = bounded["victims"] == bounded["observations"]
    p_values: Floats = np.where(single, tail, np.minimum(1.0, math.e * tail))
    return p_values


def _claimed_noise(evidence: _Evidence) -> Check:
    name, claims = "claimed noise", evidence.results.claims()
    if claims.empty:
        return _not_asked(name, "No defense of this run claims differential privacy.")
    refuted = claims[claims["refuted"]]
    if len(refuted):
        return Check(
            name,
            "fail",
            "The noise of a defense is not what its guarantee needs. Its epsilon and its bounds "
            "are void.",
            tuple(f"{row.defense}, {row.scenario}: {row.finding}" for row in rows(refuted)),
            arms=_arms(refuted),
        )
    unknown = claims[claims["violated"].isna()]
    return _answer(
        name,
        [f"{row.defense}, {row.scenario}: {row.finding}" for row in rows(unknown)],
        "The noise of a defense that claims differential privacy could not be audited. Its "
        "guarantee is unchecked.",
        "Every defense that claims differential privacy adds the noise that its epsilon needs.",
    )


def _trained_upload(evidence: _Evidence) -> Check:
    """Compare the attacked uploads with those of the training that gives their accuracy."""
    name, cells = "trained upload", evidence.results.cells
    if "other_cohort" not in cells or not (trained := cells[cells["kind"] == "train"]).size:
        return _not_asked(name, "The run does not describe the uploads of its training.")
    cohorts = trained[trained["other_cohort"].fillna("") != ""]
    sizes = trained[trained["other_examples"].fillna("") != ""].drop_duplicates("scenario")
    details = [
        *(
            f"{row.defense}, {row.scenario}: {row.other_cohort}"
            for row in rows(cohorts.drop_duplicates(["scenario", "defense"]))
        ),
        *(f"{row.scenario}: {row.other_examples}" for row in rows(sizes)),
    ]
    check = _answer(
        name,
        details,
        "The attacked uploads differ from those of the training. Success and accuracy belong to "
        "different systems.",
        "The attacked uploads have the same number of clients, examples and local steps as "
        "those of the training.",
        verdict="fail",
    )
    other_sizes = trained[trained["scenario"].isin(sizes["scenario"])]
    return _attributed(check, pd.concat([cohorts, other_sizes]))


def _dp_baseline(evidence: _Evidence) -> Check:
    arms = evidence.results.cells.drop_duplicates(["scenario", "defense"])
    claims = evidence.results.claims()[["scenario", "defense", "refuted"]]
    arms = arms.merge(claims, on=["scenario", "defense"], how="left", indicator="claims")
    arms["refuted"] = arms["refuted"].eq(True)
    heuristic = arms[~arms["control"] & (arms["claims"] == "left_only")]
    if heuristic.empty:
        return _not_asked("private baseline", "This run contains no defense without a guarantee.")
    private = arms.loc[dp_baseline(arms), "scenario"]
    return _answer(
        "private baseline",
        heuristic.loc[~heuristic["scenario"].isin(private), "scenario"].unique(),
        f"Defenses without a guarantee are not compared with {DP_BASELINE}. Add it with several "
        "noise multipliers; one of them should be as accurate as the defense.",
        f"Every defense without a guarantee can be compared with {DP_BASELINE} in the same run.",
    )


def dp_baseline(arms: pd.DataFrame) -> pd.Series[bool]:
    """Return which defenses are our DP-SGD, with noise, and not refuted.

    A family with this name is always our class: a user's class of this name has another family.
    """
    found: pd.Series[bool] = (
        (arms["family"] == DP_BASELINE) & (arms["strength"] > 0) & ~arms["refuted"]
    )
    return found


def _power(evidence: _Evidence) -> Check:
    name, attacks = "power", evidence.attacks
    if attacks.empty:
        return Check(name, "warn", "No attack ran, so the run bounds no success rate.")
    needed = next(n for n in count(1) if _unseen(n) <= LEAST_POWER)
    # An attack does not succeed on uploads that it does not apply to, or that clients refuse.
    attacks = attacks.assign(
        uploads=attacks["uploads"] + attacks["not_applicable"] + attacks["refused"]
    )
    few = attacks.loc[attacks["uploads"] < needed, ["scenario", "uploads"]]
    return _answer(
        name,
        [
            f"{row.uploads} of {needed} observations cannot exclude a rate of "
            f"{_percent(_unseen(row.uploads))}: {row.scenario}"
            for row in rows(few.drop_duplicates())
        ],
        "There are too few observations to notice an attack that succeeds once in five. Take at "
        f"least {needed}.",
        "There are enough observations. An attack that never succeeds here succeeds on less than "
        f"{_percent(LEAST_POWER)} of uploads.",
    )


def _unseen(n: int) -> float:
    """Return the largest success rate that n observations without a success allow."""
    return clopper_pearson(0, n).high


def _answer(
    name: str, details: Iterable[str], problem: str, passed: str, verdict: Verdict = "warn"
) -> Check:
    cases = tuple(details)
    return Check(name, verdict, problem, cases) if cases else Check(name, "pass", passed)


def _attributed(check: Check, concerned: pd.DataFrame) -> Check:
    """Return a check about the arms of some rows. If a control is among them, it is about all."""
    controls = concerned.loc[concerned["control"].fillna(False).astype(bool), "scenario"]
    return check if len(controls) else replace(check, arms=_arms(concerned))


def _arms(frame: pd.DataFrame) -> frozenset[tuple[str, str]]:
    return frozenset((str(row.scenario), str(row.defense)) for row in rows(frame))


def _not_asked(name: str, reason: str) -> Check:
    return Check(name, "n/a", reason)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _case(row: Any) -> str:  # noqa: ANN401 - a row of a table
    informed = row.control or pd.isna(row.knows_defense) or row.knows_defense
    knowledge = "" if informed else " without knowledge of it"
    return f"{row.adversary} against {row.defense}{knowledge}, {_place(row)}"


def _scope(row: Any) -> str:  # noqa: ANN401 - a row of a table
    return f" ({row.scope})" if row.scope else ""


def _place(row: Any) -> str:  # noqa: ANN401 - a row of a table
    return f"{row.scenario}, {rounds_named(row.checkpoint)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_WORST_FIRST: tuple[Verdict, ...] = ("fail", "warn")

_CHECKS: tuple[Callable[[_Evidence], Check], ...] = (
    _undefended_control,
    _blind_guess,
    _optimiser,
    _monotone,
    _oracle_inputs,
    _randomness,
    _convergence,
    _learning,
    _adaptive,
    _changed_model,
    _replay,
    _invertibility,
    _completeness,
    _proven_bound,
    _claimed_noise,
    _trained_upload,
    _dp_baseline,
    _power,
)


@dataclass(frozen=True, eq=False)
class Judged(Analysed):
    """The rows of an evaluation, with the checks on it."""

    @once
    def checks(self) -> Checks:
        """Return whether the evaluation can be trusted, question by question."""
        return Checks(run_checks(self))
