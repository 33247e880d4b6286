"""The page: complete, escaped, and drawn in a browser, where nothing is fetched or fails."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic
import torch
from browser import chart_marks
from PIL import Image
from playwright.sync_api import Page
from synthetic import make_results, write_tiny

from leakfrontier.adversaries import TokenSpace
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.data.tokenizers import ByteTokenizer
from leakfrontier.evaluate.foundations.rows import Media, Rendering
from leakfrontier.evaluate.modality.modality import modality_of
from leakfrontier.reports import page as page_module
from leakfrontier.reports import write_report
from leakfrontier.reports.charts import Figure, unvalidated
from leakfrontier.reports.page import _figures, _scenarios

SENTENCES = [
    "\u00dcber gro\u00dfe F\u00fc\u00dfe.",
    "\u6211\u4eec\u53bb\u5317\u4eac \U0001f600\u3002",
    "\u0647\u0630\u0627 \u0646\u064e\u0635 \u0639\u0631\u0628\u064a.",
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Conclusions]:
    folder = tmp_path_factory.mktemp("report")
    results = make_results(folder, failed=1, missing=1, candidates=True, guaranteed=True, bound=0.9)
    write_report(folder)
    return folder, results


@pytest.fixture(scope="module")
def of_media(
    report: tuple[Path, Conclusions], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Media], Path]:
    """Return a function that returns a page of a kind of victims, which is made once."""
    pages = {"image/png": report[0] / "report.html"}

    def get(media: Media) -> Path:
        if media not in pages:
            folder = tmp_path_factory.mktemp("media")
            with pytest.MonkeyPatch.context() as patch:
                only_one_scenario(patch)
                leave_undrawn(patch)
                make_results(folder, media=media)
                pages[media] = write_report(folder)
        return pages[media]

    return get


def only_one_scenario(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(synthetic, "SCENARIOS", synthetic.SCENARIOS[:1])


def leave_undrawn(patch: pytest.MonkeyPatch) -> None:
    """Leave the files of figures empty: the page itself does not need them."""
    patch.setattr(Figure, "svg", "")
    patch.setattr(Figure, "png", b"")


@pytest.fixture
def one_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    only_one_scenario(monkeypatch)


@pytest.fixture
def uncharted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave all figures out: what is asked of the page is in its words and tables."""
    for name in ("frontier", "heatmap", "strength", "psnr", "accuracy"):
        monkeypatch.setattr(page_module, f"{name}_figure", lambda *_: None)


def text_of(page: Path) -> str:
    """Return a page with ordinary spaces where lines must not break."""
    return page.read_text().replace("\u00a0", " ")


def test_tables_round_trip(report: tuple[Path, Conclusions]) -> None:
    folder, results = report
    names = {path.stem for path in (folder / "tables").glob("*.csv")}
    assert names == {
        *("attacks", "scores", "rates", "worst_case", "utility", "utility_curve"),
        *("frontier", "hypervolume", "checks", "cells", "baseline", "guarantees", "tunings"),
    }
    rates = results.rates()
    stored = pd.read_csv(folder / "tables" / "rates.csv", keep_default_na=True)
    numbers = rates.select_dtypes("number").columns
    np.testing.assert_array_equal(stored[numbers].to_numpy(float), rates[numbers].to_numpy(float))
    attacks = pd.read_csv(folder / "tables" / "attacks.csv")
    assert len(attacks) == len(results.attacks)
    assert set(pd.read_csv(folder / "tables" / "cells.csv")["status"]) == {"ok", "error", "missing"}


def test_figures_are_drawn(report: tuple[Path, Conclusions]) -> None:
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


def test_charts_keep_to_the_schema(report: tuple[Path, Conclusions]) -> None:
    with unvalidated():  # as a report makes them: each is held against it whole, below
        figures = _figures(_scenarios(report[1]))
    assert len(figures) == len(list((report[0] / "figures").glob("*.svg")))
    for figure in figures:
        for chart in (figure.chart, figure.narrow):
            if chart is not None:
                chart.to_dict(validate=True)


def test_zero_is_never_printed_as_zero(report: tuple[Path, Conclusions]) -> None:
    page = text_of(report[0] / "report.html")
    assert "&lt;= 16.8 %" in page
    assert not re.search(r">\s*-?0(\.0+)? ?%", page)


def test_page_names_gaps(report: tuple[Path, Conclusions]) -> None:
    page = text_of(report[0] / "report.html")
    assert "the first layer is a convolution" in page
    assert "ValueError: loss is not finite" in page


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a report of a refuted claim, of refusals and of a cascade."""
    folder = tmp_path_factory.mktemp("faulty")
    with pytest.MonkeyPatch.context() as patch:
        only_one_scenario(patch)
        leave_undrawn(patch)
        faults = {"guaranteed": True, "measured": 0.8, "refuses": "TopK(ratio=0.1)"}
        make_results(folder, active=True, cascade=True, **faults)  # type: ignore[arg-type]
        write_report(folder)
    return folder


def test_page_shows_what_is_refuted_and_what_was_not_asked(faulty: Path) -> None:
    page = text_of(faulty / "report.html")
    assert "Evaluation: NO (claimed noise). These numbers are not evidence." in page
    assert "<td><s>4</s> refuted</td>" in page
    assert '<span class="badge na">n/a</span></div><div><strong>proven bound</strong>' in page
    assert '<th scope="col">Accuracy, final round 40</th>' in page
    assert "test sampling and the range of 2 seeds" in page
    points = pd.read_csv(faulty / "tables" / "frontier.csv").set_index("family")
    assert points.loc["DPSGD", "refuted"].all()
    assert not points.loc["DPSGD", "pareto"].any()
    assert not points.loc["TopK", "refuted"].any()


@pytest.mark.usefixtures("uncharted")
def test_the_headline_does_not_praise_what_gains_nothing(tmp_path: Path) -> None:
    write_tiny(
        tmp_path,
        [("none", "none", None, 800, [True] * 20), ("Mine()", "Mine", None, 850, [True] * 20)],
    )
    page = text_of(write_report(tmp_path))
    assert "identifies 100 % [83, 100]; given candidates unknown; no proof, because it" in page
    assert "Its accuracy is 85.0 % (undefended 80.0 %)." in page
    assert "It is not shown to be more private than no defense." in page


@pytest.mark.usefixtures("one_scenario", "uncharted")
def test_page_without_references(tmp_path: Path) -> None:
    make_results(tmp_path, control=False, baseline=False)
    page = text_of(write_report(tmp_path))
    assert "there is no undefended control" in page
    assert "Undefended <strong>not run</strong>" in page


def test_page_without_any_result(tmp_path: Path) -> None:
    make_results(tmp_path, missing=1000)
    assert "nothing to report yet" in text_of(write_report(tmp_path))


@pytest.mark.usefixtures("undrawn")
def test_labels_are_escaped(tmp_path: Path) -> None:
    evil = "Evil(name='</script><img src=x>')"
    write_tiny(tmp_path, [("none", "none", None, 900, [True]), (evil, "Evil", 1.0, 800, [True])])
    page = text_of(write_report(tmp_path))
    assert "<img src=x>" not in page
    assert "&lt;img src=x&gt;" in page


@pytest.mark.usefixtures("uncharted")
def test_a_missing_baseline_is_named(tmp_path: Path) -> None:
    write_tiny(
        tmp_path,
        [("none", "none", None, 900, [True] * 20), ("Mine()", "Mine", None, 800, [False] * 20)],
    )
    page = text_of(write_report(tmp_path))
    assert "This run has no DP-SGD to compare with" in page
    assert "{name: DPSGD, noise_multiplier: [0.01, 0.1, 1.0]}" in page
    assert (
        pd.read_csv(tmp_path / "tables" / "checks.csv")
        .set_index("name")
        .loc["private baseline", "verdict"]
        == "warn"
    )


def test_page_says_what_was_refused_and_what_was_not_needed(faulty: Path) -> None:
    page = text_of(faulty / "report.html")
    assert "Attacks refused by the client" in page
    assert "the first layer isolates examples" in page
    assert "<td>refused by the client</td>" in page
    assert "refused the honest model 6 times in 80 rounds of training" in page
    assert "nothing left to find" in page
    assert "uploads still safe; " in page
    assert "informed" not in page.partition("<script>")[0]


def test_nothing_is_said_of_refusals_and_cascades_without_any(
    report: tuple[Path, Conclusions],
) -> None:
    page = text_of(report[0] / "report.html")
    for words in (
        "False alarms",
        "refused by the client</h3>",
        "still safe; ",
        "crafted parameters",
    ):
        assert words not in page.partition('<section id="definitions"')[0]


DEFINITIONS = {
    "image/png": ["by pixel L2", "PSNR, SSIM of images"],
    "audio/wav": ["by L2 of the amplitudes", "&minus;1 to 1"],
    "tokens": ["the tokens in common (F1", "Token accuracy</dt>", "ROUGE</dt>"],
}


@pytest.mark.parametrize("media", DEFINITIONS)
def test_definitions_are_those_of_the_modality(
    of_media: Callable[[Media], Path], media: Media
) -> None:
    page = text_of(of_media(media))
    for other, words in DEFINITIONS.items():
        assert all((word in page) == (other == media) for word in words), other
    assert ("How close the reconstructions are" in page) == (media != "tokens")


def test_page_works_offline(page: Page, report: tuple[Path, Conclusions]) -> None:
    works_offline(page, report[0], settings=2)


@pytest.mark.usefixtures("one_scenario", "undrawn")
def test_page_of_two_rounds_works_offline(page: Page, tmp_path: Path) -> None:
    make_results(tmp_path, checkpoints=(0, 40), candidates=True, guaranteed=True, bound=0.9)
    write_report(tmp_path)
    works_offline(page, tmp_path, settings=2)


def works_offline(page: Page, folder: Path, settings: int) -> None:
    address = (folder / "report.html").as_uri()
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

    expected = len(list((folder / "figures").glob("*.svg")))
    assert charts.count() == expected > 0
    for chart in charts.all():
        box = chart.locator("svg, canvas").first.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) > 100
        assert box["x"] + box["width"] <= 1200
    assert chart_marks(page) > 0
    assert page.locator("#guarantees tbody tr").count() == 3 * settings
    verdicts = page.get_by_text("at equal accuracy", exact=False).all_inner_texts()
    assert len(verdicts) > 0
    assert page.get_by_text("\u03b5 4", exact=False).first.is_visible()  # beside its point
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    assert problems == []
    assert [url for url in requests if not url.startswith(("data:", "blob:", address))] == []


def test_sound_is_playable(page: Page, of_media: Callable[[Media], Path]) -> None:
    problems: list[str] = []
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.goto(of_media("audio/wav").as_uri())
    players = page.locator("#gallery audio")
    assert players.count() > 10
    ready = """player => new Promise(done => {
        player.oncanplay = () => done(true);
        player.onerror = () => done(false);
        player.load();
    })"""
    assert players.first.evaluate(ready)
    assert players.last.evaluate(ready)
    assert players.first.evaluate("player => player.duration") == pytest.approx(0.5)
    assert page.locator("#gallery .found").first.inner_text() == "identified"
    assert problems == []


def test_wrong_tokens_are_marked_and_not_by_colour_alone(
    page: Page, of_media: Callable[[Media], Path]
) -> None:
    page.goto(of_media("tokens").as_uri())
    wrong = page.locator("#gallery mark")
    assert wrong.first.text_content() == "wrong: &"
    line, bracket = (
        wrong.first.evaluate(f"mark => getComputedStyle(mark{style}")
        for style in (").textDecorationLine", ", '::before').content")
    )
    assert (line, bracket) == ("line-through", '"["')
    truths = page.locator("#gallery td:nth-last-child(2) .tokens")
    assert truths.first.inner_text() == "to be <or> not"
    assert page.locator("#gallery td:nth-last-child(2) mark").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200


@pytest.mark.usefixtures("undrawn")
def test_sentences_of_any_language_are_whole(tmp_path: Path) -> None:
    tokens = ByteTokenizer()
    space = TokenSpace((60,), 2, len(tokens.vocabulary), tokens.padding, special=tokens.special)
    text, renderings = modality_of(space, tokens.vocabulary), []
    for number, sentence in enumerate(SENTENCES):
        rows = torch.full((2, 60), tokens.padding)
        rows[:, : len(sentence.encode())] = torch.tensor(tokens.encode(sentence))
        rows[1, 0] += 1  # the first byte is wrong, and no other
        truth, guess = (text.render(row) for row in rows)
        renderings.append(Rendering(number, 0, "tokens", truth, guess))
    write_tiny(
        tmp_path,
        [("none", "none", None, 900, [True] * len(SENTENCES))],
        renderings=tuple(renderings),
    )
    page = write_report(tmp_path).read_text()
    for sentence in SENTENCES:
        assert f'<span class="tokens" dir="auto"><span>{sentence}</span></span>' in page
        rest = re.escape(sentence[1:])
        assert re.search(rf"<mark>[^\n]*</mark>[^\n]*<span>{rest}</span>", page)
