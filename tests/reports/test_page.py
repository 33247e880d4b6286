"""The page in a browser: every chart is drawn, nothing is fetched, nothing fails."""

from pathlib import Path

import pytest
import synthetic
from browser import chart_marks
from playwright.sync_api import Page
from synthetic import make_results

from leakfrontier.reports import write_report


@pytest.mark.parametrize("checkpoints", [(0,), (0, 40)], ids=["one round", "two rounds"])
def test_page_works_offline(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: tuple[int, ...]
) -> None:
    monkeypatch.setattr(synthetic, "SCENARIOS", synthetic.SCENARIOS[:1])
    make_results(tmp_path, checkpoints=checkpoints, informed=True, guaranteed=True, bound=0.9)
    address = write_report(tmp_path).as_uri()
    problems: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    charts = page.locator(".chart")
    charts.last.locator("svg, canvas").first.wait_for(timeout=30_000)
    page.wait_for_function(
        "[...document.querySelectorAll('.chart')].every(c => c.querySelector('svg, canvas'))"
    )

    expected = len(list((tmp_path / "figures").glob("*.svg")))
    assert charts.count() == expected > 0
    for chart in charts.all():
        box = chart.locator("svg, canvas").first.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) > 100
        assert box["x"] + box["width"] <= 1200
    assert chart_marks(page) > 0
    assert page.locator("#guarantees tbody tr").count() == 3 * len(checkpoints)
    verdicts = page.get_by_text("at equal accuracy", exact=False).all_inner_texts()
    assert len(verdicts) > 0
    assert page.get_by_text("\u03b5 4", exact=False).first.is_visible()  # beside its point
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    assert problems == []
    assert [url for url in requests if not url.startswith(("data:", "blob:", address))] == []
