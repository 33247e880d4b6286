"""The page of an advice: complete, self-contained, and drawn in a browser."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from browser import chart_marks
from playwright.sync_api import Page

from leakfrontier.evaluate.advise.advice import Advice
from leakfrontier.evaluate.advise.question import AdviceRow, Question
from leakfrontier.evaluate.foundations.statistics import Interval
from leakfrontier.reports.advice import curves_figure, write_advice

ASKED = Question(2000, 128, 100, clients=4, epsilon=3.0)


def rows() -> list[AdviceRow]:
    """Return a table as it would be measured."""
    table = []
    for sigma in (0.0, 0.5, 1.0, 2.0):
        epsilon = float("inf") if not sigma else 3 / sigma
        row = AdviceRow(sigma, dict.fromkeys(("pld", "prv", "rdp"), epsilon), 0.04, 0.1, 0.12, 100)
        accuracy, success = Interval(0.7, 0.65, 0.75, 5), Interval(0.05, 0.01, 0.17, 40)
        table.append(
            replace(
                row,
                max_norm=1.5,
                lr=0.03,
                accuracy=accuracy,
                success=success,
                strongest="PriorAware",
                any_attack=success,
                seconds=8.0,
            )
        )
    searched = replace(table[2], searched=True, success=None, any_attack=None)
    return [*table, searched]


def measured() -> Advice:
    table = rows()
    return Advice(ASKED, "digits/<mlp>", tuple(table), table[2], ("Because.",), "2026.3", 500)


def bare(row: AdviceRow) -> AdviceRow:
    return AdviceRow(
        row.noise_multiplier, row.epsilon, row.run_bound, row.upload_bound, row.bound, 100
    )


def proofs() -> Advice:
    table = [bare(row) for row in rows()[:4]]
    return Advice(ASKED, None, tuple(table), table[2], ("Because.",))


def test_the_page_says_everything(tmp_path: Path) -> None:
    advice = measured()
    text = write_advice(advice, tmp_path / "new").read_text().replace("\u00a0", " ")
    for part in (
        "Take noise multiplier 1, clipping norm 1.5, learning rate 0.03: epsilon 3",
        "accuracy 70.0 % [65.0, 75.0]",
        "digits/&lt;mlp&gt;",
        "<li>Because.</li>",
        "distributed",
        "The search for C and the learning rate",
        "Accuracy was measured with 500 examples, but the question is about 2000",
    ):
        assert part in text
    assert text.count('<tr class="recommended">') == 1
    assert all(
        header in text for header in ('scope="col">best attack</th>', 'scope="col">PRV</th>')
    )
    document = json.loads((tmp_path / "new" / "advice.json").read_text())
    assert len(document["rows"]) == 5
    assert document["recommended"]["success"]["n"] == 40


def test_without_measurements_there_are_bounds_alone(tmp_path: Path) -> None:
    text = write_advice(proofs(), tmp_path).read_text()
    assert "From proofs only" in text
    assert ">accuracy</th>" not in text
    spec = curves_figure(proofs()).page_spec()
    assert "proven bound, one upload" in spec
    assert "test accuracy" not in spec


def test_an_unreachable_target_is_explained(tmp_path: Path) -> None:
    text = write_advice(replace(measured(), recommended=None), tmp_path).read_text()
    assert '<p class="answer">Because.</p>' in text
    assert "Why the target cannot be reached" in text


def test_curves_show_every_noise_but_none(tmp_path: Path) -> None:
    spec = curves_figure(measured()).spec
    (points,) = (data for data in spec["datasets"].values() if len(data) == 12)
    assert {point["sigma"] for point in points} == {0.5, 1.0, 2.0}
    assert {point["series"] for point in points} == {
        "test accuracy",
        "measured success",
        "proven bound, one upload",
        "proven bound, whole run",
    }


@pytest.mark.parametrize("make", [measured, proofs])
def test_the_page_works_offline(page: Page, tmp_path: Path, make) -> None:  # noqa: ANN001
    address = write_advice(make(), tmp_path).as_uri()
    problems: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    page.locator(".chart svg").first.wait_for(timeout=30_000)
    assert chart_marks(page) > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    assert problems == []
    assert [url for url in requests if not url.startswith(("data:", "blob:", address))] == []
