"""The derived tables against counts made by hand and against independent references."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from synthetic import CANDIDATES, SCENARIOS, make_results, shared_results

from leakfrontier.evaluate.conclude.analysis import optimiser_failed, victim_matrix, with_scores
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.foundations import statistics
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.run.store import Store

LENET, MLP = SCENARIOS
TOPK = "TopK(ratio=0.1)"
LIMITS = ["rate", "low", "high"]


@pytest.fixture(scope="module")
def results() -> Conclusions:
    return shared_results()


def one(table: pd.DataFrame, **labels: object) -> pd.Series:
    found = table[np.logical_and.reduce([table[name] == value for name, value in labels.items()])]
    assert len(found) == 1
    return found.iloc[0]


def test_a_stored_bound_below_chance_is_none() -> None:
    """Older results hold zero where an attack made no guess."""
    results = shared_results(scenarios=(MLP,), bound=0.5)
    bounded = results.attacks["bound"].notna()
    silent = bounded & (results.attacks["adversary"] == "LinearLeakage")
    older = results.attacks.assign(bound=results.attacks["bound"].mask(silent, 0.0))
    rates = replace(results, attacks=older).rates()
    private = rates[(rates["family"] == "DPSGD") & (rates["observations"] > 0)]
    none = private["adversary"] == "LinearLeakage"
    assert private.loc[none, "bound"].isna().all()
    assert (private.loc[~none, "bound"] == 0.5).all()
    assert none.any()


def test_one_row_per_attack_and_knowledge(results: Conclusions) -> None:
    rates = results.rates()
    keys = rates[["scenario", "checkpoint", "defense", "adversary", "knows_defense"]]
    assert not keys.duplicated().any()
    # Undefended: 3 adversaries; each of 5 defenses: 3 and the uninformed variant of one.
    assert len(rates) == 2 * (3 + 5 * 4)
    assert set(rates.loc[rates["baseline"], "adversary"]) == {"PriorGuess"}


def test_rates_are_exact_binomial_intervals_over_observations(results: Conclusions) -> None:
    rates = results.rates()
    for row in rates[rates["rate"].notna()].itertuples():
        same = results.attacks[
            (results.attacks["scenario"] == row.scenario)
            & (results.attacks["defense"] == row.defense)
            & (results.attacks["adversary"] == row.adversary)
            & (results.attacks["knows_defense"] == row.knows_defense)
        ]
        test = stats.binomtest(int(same["identified"].sum()), len(same))
        low, high = test.proportion_ci(method="exact")
        assert (row.observations, row.victims) == (20, 20)
        assert (row.rate, row.low, row.high) == pytest.approx((test.statistic, low, high))
        scores = with_scores(same, results.scores)
        assert (row.psnr, row.ssim) == pytest.approx((scores.psnr.median(), scores.ssim.median()))


def test_no_success_prints_the_upper_limit(results: Conclusions) -> None:
    strongest = "DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)"
    row = one(results.worst_case(), scenario=MLP, defense=strongest)
    assert row["text"] == "<= 16.8 %"


def test_not_applicable_is_not_zero(results: Conclusions) -> None:
    row = one(results.rates(), scenario=LENET, defense="none", adversary="LinearLeakage")
    assert row[[*LIMITS, "advantage", "psnr", "seconds"]].isna().all()
    assert row["text"] == "n/a"
    assert (row["observations"], row["not_applicable"]) == (0, 20)
    assert row["reason"] == "the first layer is a convolution"


def test_victims_of_an_observation_are_not_independent(tmp_path: Path) -> None:
    row = one(
        make_results(tmp_path, scenarios=(LENET,), batch_size=3).rates(),
        scenario=LENET,
        defense="none",
        adversary="InvertingGradients",
    )
    assert (row["observations"], row["victims"]) == (20, 60)
    over_victims = statistics.clopper_pearson(54, 60)
    assert row["rate"] == over_victims.value
    assert row["low"] < over_victims.low


def test_observations_of_two_seeds_are_distinct(tmp_path: Path) -> None:
    row = one(
        make_results(tmp_path, scenarios=(LENET,), seeds=(3, 4, 5), observations=4).rates(),
        scenario=LENET,
        defense="none",
        adversary="PriorGuess",
    )
    assert row["observations"] == 12


def test_advantage_is_over_the_blind_guess(tmp_path: Path) -> None:
    results = make_results(tmp_path, scenarios=(LENET,), blind_success=0.1)
    labels = {"scenario": LENET, "defense": "none"}
    row = one(results.rates(), adversary="InvertingGradients", **labels)
    assert (row["prior"], row["chance"]) == pytest.approx((0.1, 1 / CANDIDATES))
    assert row["advantage"] == pytest.approx((0.9 - 0.1) / (1 - 0.1))
    worst = one(results.worst_case(), **labels)
    assert worst["advantage"] == pytest.approx((0.9 - 0.1) / (1 - 0.1))
    assert worst["advantage_low"] == pytest.approx((worst["low"] - 0.1) / (1 - 0.1))
    assert worst["advantage_high"] == pytest.approx((worst["high"] - 0.1) / (1 - 0.1))


def test_advantage_is_over_the_guesses_for_another_upload(tmp_path: Path) -> None:
    results = make_results(tmp_path, scenarios=(LENET,), blind_success=0.1, counterfactual=0.5)
    labels = {"scenario": LENET, "defense": "none"}
    row = one(results.rates(), adversary="InvertingGradients", **labels)
    assert row["counterfactual_low"] < row["counterfactual"] == 0.5
    assert row["advantage"] == pytest.approx((0.9 - 0.5) / (1 - 0.5))
    worst = one(results.worst_case(), **labels)
    assert worst["blind"] == 0.5
    assert worst["advantage"] == pytest.approx((0.9 - 0.5) / (1 - 0.5))
    assert worst["advantage_low"] == pytest.approx((worst["low"] - 0.5) / (1 - 0.5))
    least = row["counterfactual_low"]  # no more privacy is claimed than is shown
    assert worst["advantage_high"] == pytest.approx((worst["high"] - least) / (1 - least))


def test_blind_of_the_worst_case_is_what_any_guess_for_another_upload_identifies(
    tmp_path: Path,
) -> None:
    results = make_results(tmp_path, scenarios=(MLP,), counterfactual=0.3, active=True)
    here = results.attacks[(results.attacks["defense"] == "none") & ~results.attacks["baseline"]]
    worst = one(results.worst_case(), scenario=MLP, defense="none")
    for server, threats in {
        "": {"passive"},
        "parameters_": {"passive", "parameters"},
    }.items():
        counted = here[here["threat"].isin(threats)]
        any_of = counted.groupby(["seed", "observation", "victim"])["counterfactual"].max()
        assert worst[f"{server}blind"] == pytest.approx(any_of.astype(float).mean())
    assert 0.3 < worst["blind"] < worst["parameters_blind"]


def test_without_a_blind_guess_advantage_is_over_chance(tmp_path: Path) -> None:
    rates = make_results(tmp_path, scenarios=(LENET,), baseline=False).rates()
    row = one(rates, scenario=LENET, defense="none", adversary="InvertingGradients")
    assert np.isnan(row["prior"])
    assert row["advantage"] == pytest.approx((0.9 - 1 / CANDIDATES) / (1 - 1 / CANDIDATES))


def test_tiers_are_those_of_the_metrics(results: Conclusions) -> None:
    labels = {"scenario": MLP, "defense": TOPK, "adversary": "LinearLeakage"}
    attacks = results.attacks
    same = attacks[np.logical_and.reduce([attacks[k] == v for k, v in labels.items()])]
    same = with_scores(same, results.scores)
    row = one(results.rates(), **labels)
    for name, (decibels, similarity) in metrics.TIERS.items():
        both = [
            p >= decibels and q >= similarity
            for p, q in zip(same["psnr"], same["ssim"], strict=True)
        ]
        assert row[f"tier_{name.replace('-', '_')}"] == pytest.approx(np.mean(both))
    assert row["tier_weak"] > 0


@pytest.mark.parametrize("metric", ["psnr", "ssim"])
def test_without_psnr_or_ssim_there_is_no_tier(results: Conclusions, metric: str) -> None:
    fewer = replace(results, scores=results.scores[results.scores["metric"] != metric])
    rates = fewer.rates()
    assert rates[metric].isna().all()
    assert rates.filter(like="tier_").isna().all(axis=None)
    assert rates["rate"].equals(results.rates()["rate"])


def test_every_metric_has_its_median(tmp_path: Path) -> None:
    rates = make_results(tmp_path, scenarios=(MLP,), media="tokens").rates()
    row = one(rates, scenario=MLP, defense=TOPK, adversary="LinearLeakage")
    assert row["token_accuracy"] == pytest.approx((1 + 0.25) / 2)  # half are identified
    assert rates["psnr"].isna().all()


@pytest.mark.parametrize("defense", ["none", TOPK])
def test_worst_case_is_the_union(results: Conclusions, defense: str) -> None:
    attacks = results.attacks
    panel = attacks[
        (attacks["scenario"] == MLP)
        & (attacks["defense"] == defense)
        & (attacks["adversary"] != "PriorGuess")
    ]
    wide = panel.pivot(
        index=["seed", "observation"], columns=["adversary", "knows_defense"], values="identified"
    )
    successes = wide.to_numpy(bool).T
    row = one(results.worst_case(), scenario=MLP, defense=defense)
    assert row["rate"] == successes.any(axis=0).mean()
    assert row["rate"] > successes.mean(axis=1).max() or defense == "none"


def test_candidates_are_another_threat_and_do_not_enter_the_worst_case(
    results: Conclusions,
) -> None:
    given = shared_results(candidates=True)
    plain, both = results.worst_case(), given.worst_case()
    pd.testing.assert_series_equal(both["rate"], plain["rate"])
    assert (both["candidates_rate"] == 1.0).all()
    assert plain["candidates_rate"].isna().all()
    assert (plain["candidates_text"] == "n/a").all()
    assert (victim_matrix(given, MLP, 0, "candidates") == 1).all(axis=None)
    pd.testing.assert_frame_equal(victim_matrix(given, MLP, 0), victim_matrix(results, MLP, 0))


def test_each_threat_includes_the_ones_before() -> None:
    plain = shared_results(scenarios=(MLP,)).worst_case()
    active = shared_results(scenarios=(MLP,), active=True)
    worst = active.worst_case()
    pd.testing.assert_series_equal(worst["rate"], plain["rate"])
    assert (worst["parameters_rate"] == 1.0).all()
    assert worst["architecture_rate"].isna().all()
    assert worst["candidates_rate"].isna().all()
    weak = active.attacks["identified"].mask(active.attacks["threat"] == "parameters", False)
    failing = replace(active, attacks=active.attacks.assign(identified=weak)).worst_case()
    np.testing.assert_array_equal(failing["parameters_rate"], plain["rate"])
    frames = {
        name: frame.assign(threat=frame["threat"].replace({"parameters": "architecture"}))
        for name, frame in {"attacks": active.attacks, "cells": active.cells}.items()
    }
    larger = replace(active, **frames).worst_case()
    assert larger["parameters_rate"].isna().all()
    assert (larger["architecture_rate"] == 1.0).all()


@pytest.mark.parametrize("cascade", [False, True])
def test_a_refusal_is_neither_a_zero_nor_inapplicable(tmp_path: Path, cascade: bool) -> None:
    results = make_results(tmp_path, scenarios=(MLP,), active=True, refuses=TOPK, cascade=cascade)
    row = one(results.rates(), scenario=MLP, defense=TOPK, adversary="Imprint")
    assert row["text"] == "refused by the client"
    assert row[[*LIMITS, "advantage"]].isna().all()
    assert (row["observations"], row["not_applicable"]) == (0, 0)
    assert row["refused"] == 20 - row["not_needed"] > 0
    assert (row["not_needed"] > 0) == cascade
    assert (row["refusal"], row["reason"]) == ("the first layer isolates examples", "")
    worst = one(results.worst_case(), scenario=MLP, defense=TOPK)
    assert np.isnan(worst["parameters_rate"])
    assert worst["parameters_text"] == "refused by the client"
    utility = results.final_utility()
    assert set(utility.loc[utility["refused"] > 0, "defense"]) == {TOPK}
    assert one(utility, scenario=MLP, defense=TOPK)["refused"] == 2 * 3


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_cascade_leaves_the_worst_case_and_says_what_it_spared(
    tmp_path: Path, batch_size: int
) -> None:
    scenarios = SCENARIOS if batch_size == 1 else (MLP,)
    options = {"batch_size": batch_size, "candidates": True, "active": True}
    whole = make_results(tmp_path / "individual", scenarios=scenarios, **options)
    cascade = make_results(tmp_path / "cascade", scenarios=scenarios, cascade=True, **options)
    pd.testing.assert_frame_equal(cascade.worst_case(), whole.worst_case())
    for server in ("passive", "parameters", "candidates"):
        pd.testing.assert_frame_equal(
            victim_matrix(cascade, MLP, 0, server), victim_matrix(whole, MLP, 0, server)
        )
    assert (whole.rates()["not_needed"] == 0).all()
    assert (whole.rates()["scope"] == "").all()
    rates = cascade.rates()
    pd.testing.assert_series_equal(
        rates["observations"] + rates["not_needed"] + rates["not_applicable"],
        pd.Series(20, index=rates.index),
        check_names=False,
    )
    assert (rates.loc[rates["control"] | rates["baseline"], "not_needed"] == 0).all()


def test_a_rate_of_a_cascade_is_over_what_was_left(tmp_path: Path) -> None:
    results = make_results(tmp_path, cascade=True, active=True)
    labels = {"scenario": MLP, "defense": TOPK, "adversary": "InvertingGradients"}
    first = one(results.rates(), scenario=MLP, defense=TOPK, adversary="LinearLeakage")
    assert (first["observations"], first["found"], first["scope"]) == (20, 10, "")
    later = one(results.rates(), knows_defense=True, **labels)
    assert (later["observations"], later["not_needed"]) == (10, 10)
    assert later["scope"] == "of 10 uploads still safe; 10 not needed"
    assert later["rate"] == later["found"] / 10
    last = one(results.rates(), scenario=LENET, defense="TopK(ratio=0.5)", adversary="Imprint")
    assert 0 < last["not_needed"] < 20


def test_an_attack_with_nothing_left_to_find_is_still_there(tmp_path: Path) -> None:
    results = make_results(
        tmp_path, scenarios=(MLP,), cascade=True, active=True, attack_success=1.2
    )
    spared = results.cells[results.cells["status"] == "not needed"]
    assert len(spared)
    labels = {"scenario": MLP, "defense": "TopK(ratio=0.5)", "adversary": "Imprint"}
    assert set(spared["adversary"]) >= {"Imprint"}
    row = one(results.rates(), **labels)
    assert (row["observations"], row["not_needed"], row["text"]) == (0, 20, "not needed")
    assert np.isnan(row["rate"])
    # Nothing of a passive attack was left: the stronger server has found as much.
    worst = one(results.worst_case(), scenario=MLP, defense="TopK(ratio=0.5)")
    assert worst["parameters_rate"] == worst["rate"] == 1.0


def test_what_failed_is_not_called_not_needed(tmp_path: Path) -> None:
    results = make_results(
        tmp_path, scenarios=(MLP,), missing=1
    )  # the ignorant attack on the last seed
    row = one(
        results.rates(),
        scenario=MLP,
        defense=TOPK,
        adversary="InvertingGradients",
        knows_defense=False,
    )
    assert (row["observations"], row["not_needed"]) == (10, 0)


def test_guarantees_are_those_of_the_worst_seed(tmp_path: Path) -> None:
    results = make_results(tmp_path, guaranteed=True)
    first = results.guarantees["seed"] == 0
    epsilon = results.guarantees["epsilon"].mask(first, 100.0)
    violated = results.guarantees["violated"].mask(~first, True)
    spoilt = replace(
        results, guarantees=results.guarantees.assign(epsilon=epsilon, violated=violated)
    )
    assert len(results.claims()) == 2 * 3
    assert set(spoilt.claims()["seed"]) == {1}  # violated comes before a large epsilon
    unspoilt = replace(results, guarantees=results.guarantees.assign(epsilon=epsilon))
    row = one(unspoilt.claims(), scenario=MLP, strength=1.0)
    assert (row["seed"], row["epsilon"]) == (0, 100.0)


def test_an_arm_that_no_attack_applies_to_has_no_worst_case(results: Conclusions) -> None:
    analytic = replace(
        results,
        attacks=results.attacks[results.attacks["adversary"] != "InvertingGradients"],
        cells=results.cells[results.cells["adversary"] != "InvertingGradients"],
    )
    nothing = one(analytic.worst_case(), scenario=LENET, defense=TOPK)
    assert nothing[[*LIMITS, "advantage_low"]].isna().all()
    assert (nothing["text"], nothing["observations"]) == ("n/a", 0)


def test_victim_matrix_pairs_the_victims_of_all_defenses(results: Conclusions) -> None:
    matrix = victim_matrix(results, MLP, 0)
    assert matrix.shape == (20, 6)
    assert matrix.index.names == ["seed", "observation", "victim"]
    worst = results.worst_case()
    expected = worst[worst["scenario"] == MLP].set_index("defense")["rate"]
    pd.testing.assert_series_equal(matrix.mean(), expected, check_names=False)


def test_checkpoints_are_kept_apart(tmp_path: Path) -> None:
    results = make_results(tmp_path, scenarios=(MLP,), checkpoints=(0, 20))
    assert set(results.worst_case()["checkpoint"]) == {0, 20}
    assert len(victim_matrix(results, MLP, 20)) == 20
    assert victim_matrix(results, MLP, 7).empty


def test_utility_is_that_of_the_last_round(results: Conclusions) -> None:
    table = results.final_utility()
    row = one(table, scenario=LENET, defense=TOPK)
    assert (row["seeds"], row["rounds"]) == (2, 40)
    assert row["accuracy"] == pytest.approx((0.800 + 0.805) / 2)
    assert row["low"] < 0.800 < 0.805 < row["high"]
    assert row["relative"] == pytest.approx((0.800 + 0.805) / (0.850 + 0.855))
    assert (table.loc[table["control"], "relative"] == 1).all()


def test_utility_without_a_control_has_no_relative_accuracy(tmp_path: Path) -> None:
    table = make_results(tmp_path, control=False).final_utility()
    assert table["relative"].isna().all()
    assert table["accuracy"].notna().all()


def test_utility_curve_averages_seeds(results: Conclusions) -> None:
    curve = results.utility_curve()
    assert len(curve) == 2 * 6 * 3
    assert one(curve, scenario=LENET, defense="none", round=0)["accuracy"] == pytest.approx(0.1025)


@pytest.mark.parametrize("reason", ["failed", "missing"])
def test_a_run_without_any_outcome_has_empty_tables(tmp_path: Path, reason: str) -> None:
    results = make_results(tmp_path, **{reason: 1000})
    for table in (results.rates, results.worst_case, results.final_utility, results.utility_curve):
        assert table().empty
    assert {"rate", "text", "advantage"} <= set(results.rates())
    assert victim_matrix(results, MLP, 0).empty


def test_a_run_of_training_only_has_utility(tmp_path: Path) -> None:
    results = make_results(tmp_path, checkpoints=())
    assert len(results.final_utility()) == 12
    assert results.rates().empty
    assert results.worst_case().empty


def test_types_of_labels_do_not_matter(results: Conclusions) -> None:
    plain = results.attacks.astype({"knows_defense": bool, "baseline": bool, "checkpoint": int})
    other = replace(results, attacks=plain)
    pd.testing.assert_frame_equal(other.rates(), results.rates())
    pd.testing.assert_frame_equal(other.worst_case(), results.worst_case())


def test_stored_results_give_the_same_tables(tmp_path: Path) -> None:
    results = make_results(tmp_path, scenarios=(MLP,))
    pd.testing.assert_frame_equal(Store(tmp_path).results().rates(), results.rates())


def test_optimiser_failed_on_either_side_of_zero() -> None:
    attacks = pd.DataFrame(
        {
            "objective": [0.1, 0.3, -2.0, -1.0, -2.0, 1e-12, np.nan],
            "objective_at_truth": [0.2, 0.2, -1.0, -2.0, -2.0, 0.0, 0.2],
        }
    )
    expected = [0, 1, 0, 1, 0, 0, np.nan]
    np.testing.assert_array_equal(optimiser_failed(attacks), expected)
