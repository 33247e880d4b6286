"""The frontier as a chart."""

from pathlib import Path
from typing import Any

from synthetic import SCENARIOS, TinyArm, shared_results, write_tiny

from leakfrontier.evaluate.conclude.frontier import make_frontiers
from leakfrontier.reports.charts import Figure
from leakfrontier.reports.frontier_figure import frontier_figure


def drawn(figure: Figure | None) -> list[dict[str, Any]]:
    assert figure is not None
    (points,) = figure.spec["datasets"].values()
    return list(points)


def test_points_are_named() -> None:
    frontier = make_frontiers(shared_results(scenarios=SCENARIOS[:1]), draws=20)[0]
    points = drawn(frontier_figure(frontier.scenario, frontier.points))
    named = {"no defense", "DPSGD 0.01", "DPSGD 0.1", "DPSGD 1.0", "TopK 0.5", "TopK 0.1"}
    assert {p["label"] for p in points} == named
    assert [p["defense"] for p in points][-1] == "none"  # drawn last, on top


def test_points_that_coincide_are_told_apart(tmp_path: Path) -> None:
    arms: list[TinyArm] = [("none", "none", None, 850, [True] * 4)]
    arms += [(f"Kind{i}(level=1)", f"Kind{i}", 1.0, 850, [True] * 4) for i in range(12)]
    frontier = make_frontiers(write_tiny(tmp_path, arms), draws=20)[0]
    figure = frontier_figure(frontier.scenario, frontier.points)
    points = drawn(figure)
    assert {(p["accuracy"], p["success"]) for p in points} == {(0.85, 1.0)}  # where it was measured
    assert len({p["label"] for p in points}) == 13
    assert len({(p["label_x"], p["label_y"]) for p in points}) == 13
    assert all(p["joined"] for p in points)
    assert figure is not None
    assert "no room" not in figure.caption


def test_labels_without_room_are_counted(tmp_path: Path) -> None:
    arms: list[TinyArm] = [("none", "none", None, 850, [True] * 4)]
    arms += [(f"K(level={i})", "K", float(i), 850, [True] * 4) for i in range(60)]
    frontier = make_frontiers(write_tiny(tmp_path, arms), draws=20)[0]
    figure = frontier_figure(frontier.scenario, frontier.points, width=60)
    missing = sum(p["label"] == "" for p in drawn(figure))
    assert missing > 0
    assert figure is not None
    assert f" {missing} points have no room for a label" in figure.caption


def test_a_refuted_claim_is_labelled_and_marked() -> None:
    results = shared_results(scenarios=SCENARIOS[:1], guaranteed=True, measured=0.8)
    frontier = make_frontiers(results, draws=20)[0]
    figure = frontier_figure(frontier.scenario, frontier.points)
    points = drawn(figure)
    claiming = [p for p in points if p["defense"].startswith("DPSGD")]
    assert all(p["refuted"] and not p["private"] for p in claiming)
    assert "DPSGD 1.0, \u03b5 4 refuted" in {p["label"] for p in claiming}
    assert not any(p["refuted"] or p["private"] for p in points if p not in claiming)
    assert figure is not None
    assert "4 refuted" in figure.svg


def test_without_a_measurement_there_is_no_chart() -> None:
    frontier = make_frontiers(shared_results(scenarios=SCENARIOS[:1]), draws=20)[0]
    assert frontier_figure("none", frontier.points.assign(accuracy=float("nan"))) is None
