"""Pages can be read by everyone: by keyboard, by ear, in the dark, on paper and on a telephone."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import synthetic
from browser import beyond, contrasts, unnamed, wait_for_charts
from playwright.sync_api import Browser, Page
from synthetic import Arm, make_results

from leakfrontier.reports import write_report
from leakfrontier.reports.charts import Figure

CROWD = tuple(
    Arm(f"Kind{i}", 1.0, leaves, 0.85, options={"level": 1.0})
    for i, leaves in enumerate((1.0, 1.0, 1.0, 1.0, 0.6, 0.3))
)
"""Defenses that leak all, without a cost: their points coincide with the undefended one's."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "SCENARIOS", synthetic.SCENARIOS[1:])
        patch.setattr(synthetic, "ARMS", synthetic.ARMS + CROWD)
        make_results(folder, candidates=True, guaranteed=True, bound=0.9, failed=1, cascade=True)
        patch.setattr(Figure, "svg", "")  # of files, which the page does not need
        patch.setattr(Figure, "png", b"")
        return write_report(folder).as_uri()


@pytest.fixture(scope="module")
def report(browser: Browser, address: str) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.goto(address)
    wait_for_charts(page)
    yield page
    page.close()


@pytest.fixture(autouse=True)
def as_it_was(report: Page) -> Iterator[None]:
    yield
    report.emulate_media(media="screen", color_scheme="light")
    report.set_viewport_size({"width": 1200, "height": 900})
    report.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = false))")


def open_all(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_sufficient(report: Page, scheme: str) -> None:
    report.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    open_all(report)
    found = contrasts(report)
    assert sum(one["drawn"] for one in found) > 100
    assert sum(not one["drawn"] for one in found) > 300
    assert [one for one in found if one["ratio"] < one["needed"]] == []
    paper = report.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")
    chart = report.evaluate(
        "getComputedStyle(document.querySelector('.chart svg')).backgroundColor"
    )
    assert paper == chart == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 28, 37)"}[scheme]


def test_points_that_coincide_have_labels_of_their_own(report: Page) -> None:
    boxes = report.evaluate(
        """() => [...document.querySelector(".chart").querySelectorAll(".mark-text.role-mark text")]
        .filter((t) => getComputedStyle(t).fill !== getComputedStyle(t).stroke)
        .map((t) => [t.textContent, t.getBoundingClientRect().toJSON()])"""
    )
    names = {name for name, _ in boxes}
    assert names >= {
        "no defense",
        "TopK 0.5",
        "DPSGD 1.0, \u03b5 4",
        *(f"Kind{i}" for i in range(6)),
    }
    assert len(boxes) == 12
    for place, (name, box) in enumerate(boxes):
        for other, beside in boxes[:place]:
            apart = (
                box["left"] >= beside["right"] - 1
                or beside["left"] >= box["right"] - 1
                or box["top"] >= beside["bottom"] - 3  # boxes have room for accents
                or beside["top"] >= box["bottom"] - 3
            )
            assert apart, (name, other)


def test_the_frontier_comes_first_and_checks_open_by_keyboard(report: Page) -> None:
    chart = report.locator(".chart").first.bounding_box()
    assert chart is not None
    assert chart["y"] < 600  # on the first screen
    summary, checks = report.locator("#trust > summary"), report.locator("#trust .checks")
    assert summary.locator(".badge").count() == checks.locator("> li").count() == 18
    assert not checks.is_visible()
    report.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    report.keyboard.press("Tab")
    assert report.evaluate("document.activeElement.className") == "skip"
    assert report.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    report.keyboard.press("Tab")
    assert summary.evaluate("summary => summary === document.activeElement")
    assert summary.evaluate("summary => getComputedStyle(summary).outlineStyle") == "solid"
    report.keyboard.press("Enter")
    assert checks.is_visible()
    report.keyboard.press("Tab")
    assert report.evaluate("document.activeElement.closest('nav') !== null")


def test_names_for_the_ear(report: Page) -> None:
    assert unnamed(report) == []
    assert report.locator("img").count() > 50
    assert report.locator("th").count() > 100
    assert report.locator("html").get_attribute("lang") == "en"
    for landmark in ("banner", "navigation", "main"):
        assert report.get_by_role(landmark).count() == 1  # type: ignore[arg-type]
    ids = report.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    first = report.locator("#gallery img").first.get_attribute("alt")
    assert first == "truth, victim 1"
    levels = report.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])"
    )
    assert levels[0] == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))


def test_tracebacks_keep_their_lines(report: Page) -> None:
    lines = report.locator("#gaps pre")
    open_all(report)
    assert lines.first.inner_text() == '  File "mine.py", line 1\n    raise ValueError'
    box = lines.first.bounding_box()
    assert box is not None
    assert box["height"] > 50


def test_paper_is_light_and_shows_all(report: Page) -> None:
    report.emulate_media(media="print", color_scheme="dark")
    assert (
        report.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    assert (
        report.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(28, 36, 48)"
    )
    closed = report.evaluate(
        """() => [...document.querySelectorAll("details > :not(summary)")]
        .filter((e) => !e.checkVisibility({ contentVisibilityAuto: true }) || !e.offsetHeight)
        .map((e) => e.outerHTML.slice(0, 120))"""
    )
    assert report.locator("details").count() > 3
    assert closed == []
    assert not report.locator("nav").is_visible()


def test_a_telephone_shows_all(report: Page) -> None:
    report.set_viewport_size({"width": 390, "height": 844})
    open_all(report)
    report.wait_for_function(
        "[...document.querySelectorAll('.chart[data-narrow]')]"
        ".every((c) => c.dataset.drawn === c.dataset.narrow && c.querySelector('svg'))"
    )
    report.wait_for_function("document.querySelector('.chart svg').clientWidth < 390")
    assert report.evaluate("document.documentElement.scrollWidth") <= 390
    assert beyond(report) == []
    fonts = report.evaluate(
        """() => [...document.querySelectorAll(".chart[data-narrow] svg")]
        .map((s) => s.getBoundingClientRect().width / s.viewBox.baseVal.width)"""
    )
    assert min(fonts) > 0.85  # words keep their size


def test_a_chart_can_be_saved(report: Page) -> None:
    with report.expect_download() as saved:
        report.locator("button.save").first.click()
    svg = saved.value.path().read_text()
    assert saved.value.suggested_filename == "frontier-fashion-mini-mlp.svg"
    assert "Kind3" in svg
    assert "var(" not in svg
