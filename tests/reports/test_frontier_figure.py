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


def test_a_refuted_claim_is_labelled_and_marked(tmp_path: Path) -> None:
    results = make_results(tmp_path, guaranteed=True, measured=0.8)
    frontier = make_frontiers(results, draws=20)[0]
    figure = frontier_figure(frontier.scenario, frontier.points)
    assert figure is not None
    (points,) = figure.spec["datasets"].values()
    claiming = [p for p in points if p["defense"].startswith("DPSGD")]
    assert all(p["refuted"] and not p["private"] for p in claiming)
    assert "1.0, \u03b5 4 refuted" in {p["label"] for p in claiming}
    assert not any(p["refuted"] or p["private"] for p in points if p not in claiming)
    assert "4 refuted" in figure.svg


def test_without_a_measurement_there_is_no_chart(tmp_path: Path) -> None:
    frontier = make_frontiers(make_results(tmp_path), draws=20)[0]
    assert frontier_figure("none", frontier.points.assign(accuracy=float("nan"))) is None
