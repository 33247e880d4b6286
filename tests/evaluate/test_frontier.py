"""The frontier, by hand and on made-up results."""

from pathlib import Path

import pandas as pd
import pytest
from synthetic import make_results, write_tiny

from leakfrontier.evaluate.frontier import make_frontiers


def test_frontier_by_hand(tmp_path: Path) -> None:
    results = write_tiny(
        tmp_path,
        [
            ("none", "none", None, 900, [True] * 4),
            ("Good()", "Good", None, 800, [False] * 4),
            ("Bad()", "Bad", None, 700, [True] * 4),
        ],
    )
    (frontier,) = make_frontiers(results)
    points = frontier.points.set_index("defense")
    assert points["accuracy"].to_dict() == {"none": 0.9, "Good()": 0.8, "Bad()": 0.7}
    assert points["success"].to_dict() == {"none": 1.0, "Good()": 0.0, "Bad()": 1.0}
    # Chance is 1 in 100: (0 - 0.01) / 0.99.
    assert points.loc["Good()", "advantage"] == pytest.approx(-0.01 / 0.99)
    assert points.loc["none", "advantage"] == pytest.approx(1.0)
    assert points["pareto"].to_dict() == {"none": True, "Good()": True, "Bad()": False}
    assert points["p_pareto"].to_dict() == {"none": 1.0, "Good()": 1.0, "Bad()": 0.0}
    assert points.loc["Bad()", "verdict"] == "dominated by none"
    assert points.loc["Good()", "success_text"] == "<= 60.2 %"  # 1 - 0.025^(1/4)
    areas = frontier.families.set_index("family")["hypervolume"]
    assert areas["Good"] == pytest.approx(8 / 9)
    assert areas["none"] == pytest.approx(0.0)


def test_comparisons_are_paired(tmp_path: Path) -> None:
    """Two defenses that lose the same victims tie in privacy in every resample."""
    lost = [True, False] * 5
    results = write_tiny(tmp_path, [("A()", "A", None, 900, lost), ("B()", "B", None, 700, lost)])
    points = make_frontiers(results)[0].points.set_index("defense")
    assert points.loc["B()", "p_dominated"] == 1.0
    assert points.loc["A()", "p_pareto"] == 1.0


def test_uncertain_order_is_not_called_dominated(tmp_path: Path) -> None:
    results = write_tiny(
        tmp_path,
        [
            ("A()", "A", None, 800, [True, False, False, False, False, False]),
            ("B()", "B", None, 799, [False, True, True, False, False, False]),
        ],
    )
    points = make_frontiers(results)[0].points.set_index("defense")
    assert not points.loc["B()", "pareto"]  # worse in both estimates
    assert 0.05 < points.loc["B()", "p_pareto"] < 0.95
    assert "dominated by" not in points.loc["B()", "verdict"]


def test_bootstrap_is_seeded_and_spans_batches(tmp_path: Path) -> None:
    results = make_results(tmp_path, batch_size=3, observations=6)
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


def test_small_runs_say_that_they_are_small(tmp_path: Path) -> None:
    frontier = make_frontiers(make_results(tmp_path), draws=50)[0]
    assert "the run is too small for this question" in frontier.answers[0]


@pytest.mark.parametrize(
    ("option", "server"),
    [
        ("candidates", "a passive server that is given candidates"),
        ("active", "a server that may send crafted parameters"),
    ],
)
def test_what_a_stronger_server_changes_is_said(tmp_path: Path, option: str, server: str) -> None:
    plain, stronger = (
        make_frontiers(make_results(tmp_path / str(given), **{option: given}), draws=20)[0]
        for given in (False, True)
    )
    (said,) = (text for text in stronger.answers if text.startswith("Significantly leakier to"))
    assert said.startswith(f"Significantly leakier to {server}: ")
    assert "DPSGD noise_multiplier=1.0, 100.0 % [83.2, 100.0] instead of <= 16.8 %" in said
    assert "none" not in said  # which loses its victims anyway
    assert set(stronger.answers) - {said} == set(plain.answers)


def test_a_refusal_is_in_the_points(tmp_path: Path) -> None:
    results = make_results(tmp_path, active=True, refuses="TopK(ratio=0.1)")
    points = make_frontiers(results, draws=20)[0].points.set_index("defense")
    assert points.loc["TopK(ratio=0.1)", "parameters_text"] == "refused by the client"
    assert points.loc["TopK(ratio=0.5)", "parameters_text"] == "100.0 % [83.2, 100.0]"
    assert points.loc["TopK(ratio=0.1)", "refused"] == 6


def test_a_cascade_does_not_move_the_frontier(tmp_path: Path) -> None:
    whole, cascade = (
        make_frontiers(make_results(tmp_path / str(on), cascade=on), draws=20)[0]
        for on in (False, True)
    )
    pd.testing.assert_frame_equal(cascade.points, whole.points)
    assert cascade.answers == whole.answers
