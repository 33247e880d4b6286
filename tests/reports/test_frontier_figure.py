"""The frontier as a chart."""

from pathlib import Path

from synthetic import make_results

from leakfrontier.evaluate.frontier import make_frontiers
from leakfrontier.reports.frontier_figure import frontier_figure


def test_points_are_named_where_there_is_room(tmp_path: Path) -> None:
    frontier = make_frontiers(make_results(tmp_path), draws=20)[0]
    figure = frontier_figure(frontier.scenario, frontier.points)
    assert figure is not None
    (points,) = figure.spec["datasets"].values()
    assert {p["label"] for p in points} >= {"0.01", "0.1", "1.0", "0.5"}
    assert [p["defense"] for p in points][-1] == "none"  # drawn last, on top


def test_without_a_measurement_there_is_no_chart(tmp_path: Path) -> None:
    frontier = make_frontiers(make_results(tmp_path), draws=20)[0]
    assert frontier_figure("none", frontier.points.assign(accuracy=float("nan"))) is None
