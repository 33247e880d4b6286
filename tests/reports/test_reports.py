"""Frontier, figures, gallery and tables, on made-up results."""

import base64
import io
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic
from PIL import Image
from synthetic import SHAPE, make_results, write_tiny

from leakfrontier.evaluate.analysis import attack_rates
from leakfrontier.evaluate.frontier import make_frontiers
from leakfrontier.evaluate.labels import describe_defenses, limit_text, parse, short_names
from leakfrontier.evaluate.rows import Picture
from leakfrontier.evaluate.store import Results
from leakfrontier.reports import write_report
from leakfrontier.reports.frontier_figure import frontier_figure
from leakfrontier.reports.gallery import make_gallery
from leakfrontier.reports.heatmap import heatmap_figure


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    folder = tmp_path_factory.mktemp("report")
    results = make_results(folder, failed=1, missing=1)
    write_report(folder)
    return folder, results


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


def test_what_candidates_change_is_said(tmp_path: Path) -> None:
    plain, informed = (
        make_frontiers(make_results(tmp_path / str(given), informed=given), draws=20)[0]
        for given in (False, True)
    )
    (said,) = (text for text in informed.answers if "knows candidates" in text)
    assert "DPSGD noise_multiplier=1.0, <= 16.8 % without and 100.0 % [83.2, 100.0] with" in said
    assert "none" not in said  # which loses its victims anyway
    assert set(informed.answers) - {said} == set(plain.answers)


def test_small_runs_say_that_they_are_small(tmp_path: Path) -> None:
    frontier = make_frontiers(make_results(tmp_path), draws=50)[0]
    assert "the run is too small for this question" in frontier.answers[0]


def test_tables_round_trip(report: tuple[Path, Results]) -> None:
    folder, results = report
    names = {path.stem for path in (folder / "tables").glob("*.csv")}
    assert names == {
        *("attacks", "rates", "worst_case", "utility", "utility_curve"),
        *("frontier", "hypervolume", "checks", "cells", "baseline", "guarantees"),
    }
    rates = attack_rates(results)
    stored = pd.read_csv(folder / "tables" / "rates.csv", keep_default_na=True)
    numbers = rates.select_dtypes("number").columns
    np.testing.assert_array_equal(stored[numbers].to_numpy(float), rates[numbers].to_numpy(float))
    attacks = pd.read_csv(folder / "tables" / "attacks.csv")
    assert len(attacks) == len(results.attacks)
    assert set(pd.read_csv(folder / "tables" / "cells.csv")["status"]) == {"ok", "error", "missing"}


def test_figures_are_drawn(report: tuple[Path, Results]) -> None:
    folder, _ = report
    stems = {path.stem for path in (folder / "figures").iterdir()}
    for kind in ("frontier", "heatmap", "strength", "psnr", "accuracy"):
        assert any(stem.startswith(kind) for stem in stems), kind
    for stem in stems:
        image = Image.open(folder / "figures" / f"{stem}.png").convert("RGB")
        assert min(image.size) > 300
        assert len(image.getcolors(maxcolors=10**6) or []) > 20
        assert (folder / "figures" / f"{stem}.svg").read_text().startswith("<svg")
    assert not list(folder.rglob("*.partial"))


def test_not_applicable_is_not_zero(report: tuple[Path, Results]) -> None:
    _, results = report
    rates = attack_rates(results)
    rates = rates[rates["scenario"] == "fashion-mini/lenet"]
    figure = heatmap_figure("fashion-mini/lenet", 0, rates)
    assert figure is not None
    (values,) = figure.spec["datasets"].values()
    cells = pd.DataFrame(values).set_index(["attack", "defense"])
    absent = cells.loc["LinearLeakage"]
    assert set(absent["shown"]) == {"n/a"}
    assert not absent["ran"].any()
    strongest = "DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)"
    zero = cells.loc[("InvertingGradients (knows defense)", strongest)]
    assert zero["shown"] == "<= 16 %"
    assert zero["ran"]
    assert ("InvertingGradients (ignorant)", "none") in cells.index


def test_zero_is_never_printed_as_zero(report: tuple[Path, Results]) -> None:
    page = (report[0] / "report.html").read_text()
    assert "&lt;= 16.8 %" in page
    assert not re.search(r">\s*-?0(\.0+)? ?%", page)


def test_page_names_gaps(report: tuple[Path, Results]) -> None:
    page = (report[0] / "report.html").read_text()
    assert "the first layer is a convolution" in page
    assert "ValueError: loss is not finite" in page


def test_page_without_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "SCENARIOS", synthetic.SCENARIOS[:1])
    make_results(tmp_path, control=False, baseline=False)
    page = write_report(tmp_path).read_text()
    assert "there is no undefended control" in page
    assert "<td>not run</td>" in page


def test_page_without_any_result(tmp_path: Path) -> None:
    make_results(tmp_path, missing=116)
    assert "nothing to report yet" in write_report(tmp_path).read_text()


def test_labels_are_escaped(tmp_path: Path) -> None:
    evil = "Evil(name='</script><img src=x>')"
    write_tiny(tmp_path, [("none", "none", None, 900, [True]), (evil, "Evil", 1.0, 800, [True])])
    page = write_report(tmp_path).read_text()
    assert "<img src=x>" not in page
    assert "&lt;img src=x&gt;" in page


def test_gallery_shows_the_same_victims(report: tuple[Path, Results]) -> None:
    _, results = report
    gallery = make_gallery(results, attack_rates(results), "fashion-mini/mlp", 0)
    assert gallery is not None
    truth, prior = gallery.references
    assert (truth.name, prior.name) == ("truth", "prior guess")
    assert next(iter(gallery.defenses)) == "none"
    undefended = gallery.defenses["none"][0]
    assert all(tile is not None and tile.identified for tile in undefended.tiles)
    assert [t and t.source for t in undefended.tiles] == [t and t.source for t in truth.tiles]
    protected = gallery.defenses["DPSGD noise_multiplier=1.0"][0]
    assert not any(tile is not None and tile.identified for tile in protected.tiles)
    first = results.pictures.sort_values(["victim", "seed", "observation"]).iloc[0]
    assert truth.tiles[0] is not None
    assert _pixels(truth.tiles[0].source) == first["truth"]


def _pixels(source: str) -> bytes:
    image = Image.open(io.BytesIO(base64.b64decode(source.split(",")[1])))
    assert image.size == SHAPE[1:]
    return image.tobytes()


def test_gallery_ignores_what_is_no_image(tmp_path: Path) -> None:
    tokens = Picture(0, 0, (7,), bytes(7), bytes(7))
    results = write_tiny(tmp_path, [("none", "none", None, 900, [True])], pictures=(tokens,))
    assert make_gallery(results, attack_rates(results), "tiny/model", 0) is None


def test_labels() -> None:
    assert parse("Chain(links=(TopK(ratio=0.1), Clip(norm=1.0)))")[0] == "Chain"
    assert parse("my defense (v2)") == ("my defense (v2)", {})
    long = [f"DPSGD(noise_multiplier={n}, max_grad_norm=1.0)" for n in (0.1, 1.0)]
    assert list(short_names([*long, "TopK(ratio=0.5)"]).values()) == [
        "DPSGD noise_multiplier=0.1",
        "DPSGD noise_multiplier=1.0",
        "TopK",
    ]
    assert limit_text(0.0, 0.0, 0.168) == "<= 16.8 %"
    assert limit_text(0.5, -0.1, 0.9) == "50.0 % [0.0, 90.0]"


def test_defenses_are_ordered_and_swept_by_their_knob() -> None:
    arms = pd.DataFrame(
        [
            ("DP(noise=1.0, clip=1)", "DP", 1.0),
            ("DP(noise=0.1, clip=1)", "DP", 0.1),
            ("DP(noise=0.1, clip=9)", "DP", 0.1),
            ("none", "none", None),
            ("Any", "Any", None),
        ],
        columns=["defense", "family", "strength"],
    )
    described = describe_defenses(arms).set_index("defense")
    assert described.index.tolist() == [
        *("none", "Any", "DP(noise=0.1, clip=1)", "DP(noise=0.1, clip=9)", "DP(noise=1.0, clip=1)")
    ]
    assert described.loc["DP(noise=1.0, clip=1)", "knob"] == "noise"
    assert described.loc["DP(noise=1.0, clip=1)", "sweep"] == "DP (clip=1)"
    assert described.loc["DP(noise=0.1, clip=9)", "sweep"] == "DP (clip=9)"


def test_frontier_names_points_where_there_is_room(report: tuple[Path, Results]) -> None:
    _, results = report
    frontier = make_frontiers(results, draws=20)[0]
    figure = frontier_figure(frontier.scenario, frontier.points)
    assert figure is not None
    (points,) = figure.spec["datasets"].values()
    assert {p["label"] for p in points} >= {"0.01", "0.1", "1.0", "0.5"}
