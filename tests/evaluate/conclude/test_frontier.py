"""The frontier, by hand and on made-up results."""

from pathlib import Path

import pandas as pd
import pytest
from synthetic import SCENARIOS, make_results, shared_results, write_tiny

from leakfrontier.evaluate.conclude.frontier import Frontier, make_frontiers


def test_frontier_by_hand(tmp_path: Path) -> None:
    results = write_tiny(
        tmp_path,
        [
            ("none", "none", None, 900, [True] * 8),
            ("Good()", "Good", None, 800, [False] * 8),
            ("Bad()", "Bad", None, 700, [True] * 8),
        ],
        seeds=2,
    )
    (frontier,) = make_frontiers(results)
    points = frontier.points.set_index("defense")
    assert points["accuracy"].to_dict() == {"none": 0.9, "Good()": 0.8, "Bad()": 0.7}
    assert points["success"].to_dict() == {"none": 1.0, "Good()": 0.0, "Bad()": 1.0}
    # Chance is 1 in 100: (0 - 0.01) / 0.99.
    assert points.loc["Good()", "advantage"] == pytest.approx(-0.01 / 0.99)
    assert points.loc["none", "advantage"] == pytest.approx(1.0)
    assert points["pareto"].to_dict() == {"none": True, "Good()": True, "Bad()": False}
    assert points.loc[["none", "Good()"], "p_pareto"].tolist() == [1.0, 1.0]
    assert pd.isna(points.loc["Bad()", "p_pareto"])
    assert points["gains"].to_dict() == {"none": False, "Good()": True, "Bad()": False}
    assert points.loc["Good()", "verdict"] == "Pareto-optimal"
    assert points.loc["Bad()", "verdict"] == "no privacy gain shown (less accurate)"
    assert points.loc["Good()", "success_text"] == "<= 36.9 %"  # 1 - 0.025^(1/8)
    areas = frontier.families.set_index("family")["hypervolume"]
    assert areas["Good"] == pytest.approx(8 / 9)
    assert areas["none"] == pytest.approx(0.0)


def points_of(folder: Path, **arms: tuple[int, list[bool]]) -> pd.DataFrame:
    """Return the points of arms, (correct of 1000, identified), by name."""
    made = [(name, name, None, *arm) for name, arm in arms.items()]
    return make_frontiers(write_tiny(folder, made, seeds=2), draws=200)[0].points.set_index(
        "defense"
    )


def lost(victims: int, of: int = 20) -> list[bool]:
    return [True] * victims + [False] * (of - victims)


def test_a_lucky_accuracy_is_no_reason_to_call_a_useless_defense_optimal(tmp_path: Path) -> None:
    points = points_of(
        tmp_path, none=(842, lost(20)), Lucky=(850, lost(20)), Unlucky=(828, lost(18))
    )
    verdicts = points.loc[["Lucky", "Unlucky"], "verdict"]
    assert set(verdicts) == {"no privacy gain shown"}
    assert points["pareto"].to_dict() == {"none": True, "Lucky": False, "Unlucky": False}
    assert points.loc[["Lucky", "Unlucky"], "p_pareto"].isna().all()


def test_a_gain_in_privacy_must_be_significant_among_all_defenses(tmp_path: Path) -> None:
    """Six victims less are p = 0.03: of one defense a gain, of many perhaps luck."""
    few = points_of(tmp_path / "few", none=(850, lost(20)), Some=(850, lost(14)))
    assert few.loc["Some", "gains"]
    assert few.loc["Some", "verdict"] == "Pareto-optimal"
    others = {f"Other{i}": (850, lost(20)) for i in range(3)}
    many = points_of(tmp_path / "many", none=(850, lost(20)), Some=(850, lost(14)), **others)
    assert many.loc["Some", "verdict"] == "no privacy gain shown"


def test_accuracy_alone_is_no_defense(tmp_path: Path) -> None:
    points = points_of(tmp_path, none=(800, lost(20)), Better=(900, lost(20)))
    assert points.loc["Better", "verdict"] == "no privacy gain shown (more accurate)"
    assert not points.loc["Better", ["gains", "pareto"]].any()


def test_nothing_is_optimal_where_the_evaluation_fails() -> None:
    """A cell without a result fails its own setting, and no other."""
    sound, failed = (shared_results(failed=count) for count in (0, 1))
    (where,) = failed.cells.loc[failed.cells["status"] != "ok", "scenario"].unique()
    for before, frontier in zip(make_frontiers(sound), make_frontiers(failed), strict=True):
        points = frontier.points[~frontier.points["control"]]
        spoilt = points["verdict"] == "its evaluation fails its checks (completeness)"
        optimal = before.points.loc[points.index, "pareto"]
        assert optimal.any()
        if frontier.scenario == where:
            assert spoilt[optimal].all()
            assert not points["pareto"].any()
            assert points["p_pareto"].isna().all()
        else:
            assert not spoilt.any()


def test_nothing_is_optimal_without_a_control(tmp_path: Path) -> None:
    points = points_of(tmp_path, A=(900, lost(0)), B=(700, lost(20)))
    assert set(points["verdict"]) == {"no undefended control to compare with"}
    assert not points["pareto"].any()


@pytest.mark.parametrize(
    ("arm", "verdict"),
    [
        ((700, lost(12)), "dominated by Rival"),
        ((700, lost(2)), "dominated by Rival"),
        ((800, lost(12)), "dominated by Rival"),
        ((805, lost(3)), "Pareto-optimal"),
        ((795, lost(3)), "tied with Rival"),
        ((800, lost(2)), "Pareto-optimal"),
        ((700, lost(0)), "Pareto-optimal"),
        ((860, lost(9)), "Pareto-optimal"),
    ],
)
def test_only_significance_dominates_and_ties_are_ties(
    tmp_path: Path, arm: tuple[int, list[bool]], verdict: str
) -> None:
    points = points_of(tmp_path, none=(900, lost(20)), Rival=(800, lost(2)), Mine=arm)
    assert points.loc["Mine", "verdict"] == verdict
    assert points.loc["Mine", "pareto"] == (verdict == "Pareto-optimal")


def test_comparisons_are_paired(tmp_path: Path) -> None:
    """Intervals overlap, but one loses every victim of the other, and six more."""
    points = points_of(tmp_path, none=(900, lost(20)), Less=(800, lost(4)), More=(800, lost(10)))
    assert points.loc["More", "success_low"] < points.loc["Less", "success_high"]
    assert points.loc["More", "verdict"] == "dominated by Less"


def made_up(draws: int = 20, **options: object) -> Frontier:
    """Return the frontier of made-up results."""
    return make_frontiers(shared_results(scenarios=SCENARIOS[:1], **options), draws=draws)[0]


@pytest.mark.parametrize(("measured", "refuted"), [(0.8, True), (1.0, False), (None, False)])
def test_a_refuted_claim_is_never_optimal(measured: float | None, refuted: bool) -> None:
    frontier = made_up(draws=50, guaranteed=True, measured=measured)
    private = frontier.points[frontier.points["family"] == "DPSGD"]
    assert (private["refuted"] == refuted).all()
    assert (private["verdict"] == "its privacy claim is refuted").all() == refuted
    assert private["pareto"].any() != refuted
    assert frontier.baseline.empty == refuted  # and no heuristic has to beat it


def test_bootstrap_is_seeded_and_spans_batches(tmp_path: Path) -> None:
    results = make_results(tmp_path, scenarios=SCENARIOS[:1], batch_size=3, observations=6)
    first, again = (make_frontiers(results, draws=200, seed=3) for _ in range(2))
    other = make_frontiers(results, draws=200, seed=4)
    for one, two in zip(first, again, strict=True):
        pd.testing.assert_frame_equal(one.points, two.points)
    assert any(
        not one.points["p_pareto"].equals(two.points["p_pareto"])
        for one, two in zip(first, other, strict=True)
    )


def test_answers_name_the_defense_or_the_reason(tmp_path: Path) -> None:
    results = make_results(tmp_path, observations=100)
    for frontier in make_frontiers(results, draws=50):
        text = "\n".join(frontier.answers)
        assert (
            "at most 5 % or 10 % or 25 % with 95 % confidence: DPSGD noise_multiplier=1.0" in text
        )
        assert "within 2 points of the undefended accuracy" in text


def test_small_runs_say_that_they_are_small() -> None:
    assert "The run is too small for this question" in made_up(draws=50).answers[0]


@pytest.mark.parametrize(
    ("option", "server"),
    [
        ("candidates", "a passive server that is given candidates"),
        ("active", "a server that may send crafted parameters"),
    ],
)
def test_what_a_stronger_server_changes_is_said(option: str, server: str) -> None:
    plain, stronger = made_up(), made_up(**{option: True})
    (said,) = (text for text in stronger.answers if text.startswith("Significantly leakier to"))
    assert said.startswith(f"Significantly leakier to {server}: ")
    assert "DPSGD noise_multiplier=1.0, 100.0 % [83.2, 100.0] instead of <= 16.8 %" in said
    assert "none" not in said  # which loses its victims anyway
    unknown = [text.partition("; given candidates")[0] for text in plain.answers]
    others = [text.partition("; given candidates")[0] for text in stronger.answers if text != said]
    assert others == unknown


def test_a_refusal_is_in_the_points() -> None:
    points = made_up(active=True, refuses="TopK(ratio=0.1)").points.set_index("defense")
    assert points.loc["TopK(ratio=0.1)", "parameters_text"] == "refused by the client"
    assert points.loc["TopK(ratio=0.5)", "parameters_text"] == "100.0 % [83.2, 100.0]"
    assert points.loc["TopK(ratio=0.1)", "refused"] == 6


def test_a_cascade_does_not_move_the_frontier() -> None:
    whole, cascade = made_up(), made_up(cascade=True)
    pd.testing.assert_frame_equal(cascade.points, whole.points)
    assert cascade.answers == whole.answers
