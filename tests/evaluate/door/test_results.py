from __future__ import annotations

import re
from pathlib import Path

import altair as alt
import pytest
from synthetic import make_results

from leakfrontier.evaluate.door.results import Results
from leakfrontier.evaluate.foundations.errors import UserError


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("results")
    return Results.of(make_results(folder), folder)


def test_the_first_frontier_is_shown_unless_one_is_named(results: Results) -> None:
    first = results.frontiers()[0]
    assert results.frontier() is first
    assert results.frontier(first.scenario, first.checkpoint) is first
    with pytest.raises(ValueError, match="must select one frontier, got 0"):
        results.frontier("missing")


def test_the_chart_can_be_changed_and_saved(results: Results, tmp_path: Path) -> None:
    chart = results.plot().properties(title="Ours")
    assert isinstance(chart, alt.LayerChart | alt.FacetChart | alt.ConcatChart)
    chart.save(tmp_path / "frontier.svg")
    assert "Ours" in (tmp_path / "frontier.svg").read_text()
    chart.save(tmp_path / "frontier.json")


def test_the_page_goes_to_the_folder_of_the_run_or_to_another(
    results: Results, tmp_path: Path
) -> None:
    assert results.report() == results.folder / "report.html"
    page = results.report(tmp_path / "a" / "b")
    assert page == tmp_path / "a" / "b" / "report.html"
    assert page.read_text().startswith("<!DOCTYPE html>")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to the folder"):
        results.report(tmp_path / "file")


def test_all_parts_show_themselves(results: Results) -> None:
    checks = results.checks()
    assert len(re.findall("<tr>", checks._repr_html_())) == len(checks)
    assert "<table" in results.frontier()._repr_html_()
    assert results.rates()._repr_html_()
    assert "<table" in results._repr_html_()
    assert [line[:4].strip() for line in repr(checks).splitlines()] == [c.verdict for c in checks]
    lines = repr(results.frontier()).splitlines()
    assert lines[0] == f"{results.frontier().scenario}, round 0"
    assert len(lines) == 2 + len(results.frontier().points)
    assert repr(results).startswith(f"<Results in {results.folder}: ")
