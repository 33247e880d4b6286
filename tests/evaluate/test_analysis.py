"""The derived tables against counts made by hand and against independent references."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from synthetic import CANDIDATES, SCENARIOS, make_results

from leakfrontier.evaluate import metrics, statistics
from leakfrontier.evaluate.analysis import (
    attack_rates,
    guarantees,
    optimiser_failed,
    utility,
    utility_curve,
    victim_matrix,
    worst_case,
)
from leakfrontier.evaluate.store import Results, Store

LENET, MLP = SCENARIOS
TOPK = "TopK(ratio=0.1)"
LIMITS = ["rate", "low", "high"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return make_results(tmp_path_factory.mktemp("run"))


def one(table: pd.DataFrame, **labels: object) -> pd.Series:
    found = table[np.logical_and.reduce([table[name] == value for name, value in labels.items()])]
    assert len(found) == 1
    return found.iloc[0]


def test_one_row_per_attack_and_knowledge(results: Results) -> None:
    rates = attack_rates(results)
    keys = rates[["scenario", "checkpoint", "defense", "adversary", "knows_defense"]]
    assert not keys.duplicated().any()
    # Undefended: 3 adversaries; each of 5 defenses: 3 and the uninformed variant of one.
    assert len(rates) == 2 * (3 + 5 * 4)
    assert set(rates.loc[rates["baseline"], "adversary"]) == {"PriorGuess"}


def test_rates_are_exact_binomial_intervals_over_observations(results: Results) -> None:
    rates = attack_rates(results)
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
        assert row.psnr == pytest.approx(np.median(same["psnr"]))


def test_no_success_prints_the_upper_limit(results: Results) -> None:
    strongest = "DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)"
    row = one(worst_case(results), scenario=MLP, defense=strongest)
    assert row["text"] == "<= 16.8 %"


def test_not_applicable_is_not_zero(results: Results) -> None:
    row = one(attack_rates(results), scenario=LENET, defense="none", adversary="LinearLeakage")
    assert row[[*LIMITS, "advantage", "psnr", "seconds"]].isna().all()
    assert row["text"] == "n/a"
    assert (row["observations"], row["not_applicable"]) == (0, 20)
    assert row["reason"] == "the first layer is a convolution"


def test_victims_of_an_observation_are_not_independent(tmp_path: Path) -> None:
    row = one(
        attack_rates(make_results(tmp_path, batch_size=3)),
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
        attack_rates(make_results(tmp_path, seeds=(3, 4, 5), observations=4)),
        scenario=LENET,
        defense="none",
        adversary="PriorGuess",
    )
    assert row["observations"] == 12


def test_advantage_is_over_the_blind_guess(tmp_path: Path) -> None:
    results = make_results(tmp_path, blind_success=0.1)
    labels = {"scenario": LENET, "defense": "none"}
    row = one(attack_rates(results), adversary="InvertingGradients", **labels)
    assert (row["prior"], row["chance"]) == pytest.approx((0.1, 1 / CANDIDATES))
    assert row["advantage"] == pytest.approx((0.9 - 0.1) / (1 - 0.1))
    worst = one(worst_case(results), **labels)
    assert worst["advantage"] == pytest.approx((0.9 - 0.1) / (1 - 0.1))
    assert worst["advantage_low"] == pytest.approx((worst["low"] - 0.1) / (1 - 0.1))
    assert worst["advantage_high"] == pytest.approx((worst["high"] - 0.1) / (1 - 0.1))


def test_without_a_blind_guess_advantage_is_over_chance(tmp_path: Path) -> None:
    rates = attack_rates(make_results(tmp_path, baseline=False))
    row = one(rates, scenario=LENET, defense="none", adversary="InvertingGradients")
    assert np.isnan(row["prior"])
    assert row["advantage"] == pytest.approx((0.9 - 1 / CANDIDATES) / (1 - 1 / CANDIDATES))


def test_tiers_are_those_of_the_metrics(results: Results) -> None:
    labels = {"scenario": MLP, "defense": TOPK, "adversary": "LinearLeakage"}
    attacks = results.attacks
    same = attacks[np.logical_and.reduce([attacks[k] == v for k, v in labels.items()])]
    row = one(attack_rates(results), **labels)
    for name, (decibels, similarity) in metrics.TIERS.items():
        both = [
            p >= decibels and q >= similarity
            for p, q in zip(same["psnr"], same["ssim"], strict=True)
        ]
        assert row[f"tier_{name.replace('-', '_')}"] == pytest.approx(np.mean(both))
    assert row["tier_weak"] > 0


@pytest.mark.parametrize("defense", ["none", TOPK])
def test_worst_case_is_the_union_and_selectable_the_lowest_objective(
    results: Results, defense: str
) -> None:
    attacks = results.attacks
    panel = attacks[
        (attacks["scenario"] == MLP)
        & (attacks["defense"] == defense)
        & (attacks["adversary"] != "PriorGuess")
    ]
    wide = panel.pivot(
        index=["seed", "observation"],
        columns=["adversary", "knows_defense"],
        values=["identified", "objective"],
    )
    successes = wide["identified"].to_numpy(bool).T
    row = one(worst_case(results), scenario=MLP, defense=defense)
    assert row["rate"] == statistics.union(successes).mean()
    assert row["rate"] > successes.mean(axis=1).max() or defense == "none"
    objectives = wide["objective"].to_numpy(float).T
    assert row["selectable"] == statistics.selectable(successes, objectives).mean()
    assert row["selectable"] < row["rate"]


def test_candidates_are_another_threat_and_do_not_enter_the_worst_case(
    tmp_path: Path, results: Results
) -> None:
    informed = make_results(tmp_path, informed=True)
    plain, both = worst_case(results), worst_case(informed)
    pd.testing.assert_series_equal(both["rate"], plain["rate"])
    pd.testing.assert_series_equal(both["selectable"], plain["selectable"])
    assert (both["informed_rate"] == 1.0).all()
    assert plain["informed_rate"].isna().all()
    assert (plain["informed_text"] == "n/a").all()
    assert (victim_matrix(informed, MLP, 0, candidates=True) == 1).all(axis=None)
    pd.testing.assert_frame_equal(victim_matrix(informed, MLP, 0), victim_matrix(results, MLP, 0))


def test_guarantees_are_those_of_the_worst_seed(tmp_path: Path) -> None:
    results = make_results(tmp_path, guaranteed=True)
    first = results.guarantees["seed"] == 0
    epsilon = results.guarantees["epsilon"].mask(first, 100.0)
    violated = results.guarantees["violated"].mask(~first, True)
    spoilt = replace(
        results, guarantees=results.guarantees.assign(epsilon=epsilon, violated=violated)
    )
    assert len(guarantees(results)) == 2 * 3
    assert set(guarantees(spoilt)["seed"]) == {1}  # violated comes before a large epsilon
    unspoilt = replace(results, guarantees=results.guarantees.assign(epsilon=epsilon))
    row = one(guarantees(unspoilt), scenario=MLP, strength=1.0)
    assert (row["seed"], row["epsilon"]) == (0, 100.0)


def test_selection_without_any_objective_takes_an_attack_that_ran(results: Results) -> None:
    analytic = replace(
        results, attacks=results.attacks[results.attacks["adversary"] != "InvertingGradients"]
    )
    table = worst_case(analytic)
    assert one(table, scenario=MLP, defense=TOPK)["selectable"] == pytest.approx(0.5)
    nothing = one(table, scenario=LENET, defense=TOPK)
    assert nothing[[*LIMITS, "selectable", "advantage_low"]].isna().all()
    assert (nothing["text"], nothing["observations"]) == ("n/a", 0)


def test_victim_matrix_pairs_the_victims_of_all_defenses(results: Results) -> None:
    matrix = victim_matrix(results, MLP, 0)
    assert matrix.shape == (20, 6)
    assert matrix.index.names == ["seed", "observation", "victim"]
    worst = worst_case(results)
    expected = worst[worst["scenario"] == MLP].set_index("defense")["rate"]
    pd.testing.assert_series_equal(matrix.mean(), expected, check_names=False)


def test_checkpoints_are_kept_apart(tmp_path: Path) -> None:
    results = make_results(tmp_path, checkpoints=(0, 20))
    assert set(worst_case(results)["checkpoint"]) == {0, 20}
    assert len(victim_matrix(results, MLP, 20)) == 20
    assert victim_matrix(results, MLP, 7).empty


def test_utility_is_that_of_the_last_round(results: Results) -> None:
    table = utility(results)
    row = one(table, scenario=LENET, defense=TOPK)
    assert (row["seeds"], row["rounds"]) == (2, 40)
    assert row["accuracy"] == pytest.approx((0.800 + 0.805) / 2)
    assert row["low"] < 0.800 < 0.805 < row["high"]
    assert row["relative"] == pytest.approx((0.800 + 0.805) / (0.850 + 0.855))
    assert (table.loc[table["family"] == "none", "relative"] == 1).all()


def test_utility_without_a_control_has_no_relative_accuracy(tmp_path: Path) -> None:
    table = utility(make_results(tmp_path, control=False))
    assert table["relative"].isna().all()
    assert table["accuracy"].notna().all()


def test_utility_curve_averages_seeds(results: Results) -> None:
    curve = utility_curve(results)
    assert len(curve) == 2 * 6 * 3
    assert one(curve, scenario=LENET, defense="none", round=0)["accuracy"] == pytest.approx(0.1025)


@pytest.mark.parametrize("reason", ["failed", "missing"])
def test_a_run_without_any_outcome_has_empty_tables(tmp_path: Path, reason: str) -> None:
    results = make_results(tmp_path, **{reason: 1000})
    for table in (attack_rates, worst_case, utility, utility_curve):
        assert table(results).empty
    assert {"rate", "text", "advantage"} <= set(attack_rates(results))
    assert victim_matrix(results, MLP, 0).empty


def test_a_run_of_training_only_has_utility(tmp_path: Path) -> None:
    results = make_results(tmp_path, checkpoints=())
    assert len(utility(results)) == 12
    assert attack_rates(results).empty
    assert worst_case(results).empty


def test_types_of_labels_do_not_matter(results: Results) -> None:
    plain = results.attacks.astype({"knows_defense": bool, "baseline": bool, "checkpoint": int})
    other = replace(results, attacks=plain)
    pd.testing.assert_frame_equal(attack_rates(other), attack_rates(results))
    pd.testing.assert_frame_equal(worst_case(other), worst_case(results))


def test_stored_results_give_the_same_tables(tmp_path: Path) -> None:
    results = make_results(tmp_path)
    pd.testing.assert_frame_equal(attack_rates(Store(tmp_path).results()), attack_rates(results))


def test_optimiser_failed_on_either_side_of_zero() -> None:
    attacks = pd.DataFrame(
        {
            "objective": [0.1, 0.3, -2.0, -1.0, -2.0, 1e-12, np.nan],
            "objective_at_truth": [0.2, 0.2, -1.0, -2.0, -2.0, 0.0, 0.2],
        }
    )
    expected = [0, 1, 0, 1, 0, 0, np.nan]
    np.testing.assert_array_equal(optimiser_failed(attacks), expected)
