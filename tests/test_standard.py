"""The committed packs of the standard benchmark are what the preset gives and the docs say."""

import re
import runpy
from pathlib import Path

import pytest

from leakfrontier.adversaries import PANEL
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.share.leaderboard import Setting, make_settings
from leakfrontier.evaluate.share.pack import Pack, portable, read_pack
from leakfrontier.evaluate.share.verification import verify
from leakfrontier.reports.leaderboard import table_of

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / "benchmarks" / "standard").glob("*.zip"))
STANDARD = load_config("standard")
DOCS = ROOT / "docs" / "lab" / "standard.md"


@pytest.fixture(scope="module")
def packs() -> list[Pack]:
    """Return the committed packs."""
    return [read_pack(path) for path in PATHS]


def test_every_scenario_is_there_or_said_to_be_missing(packs: list[Pack]) -> None:
    there = {pack.results.cells["scenario"].iloc[0] for pack in packs}
    said = re.search(r"Not run yet: ([^.]*)\.", DOCS.read_text())
    missing = {one.name for one in STANDARD.scenarios} - there
    assert missing == set(re.findall(r"`([^`]*)`", said[1] if said else ""))


def test_packs_are_of_the_preset_as_it_is_frozen(packs: list[Pack]) -> None:
    scenarios = {one.name: one for one in STANDARD.scenarios}
    for pack in packs:
        scenario = scenarios[pack.meta["config"]["scenarios"][0]["title"]]
        alone, _ = portable(STANDARD.model_copy(update={"scenarios": (scenario,)}))
        assert portable(load_config(pack.meta["config"]))[0] == alone  # later options by default
        assert pack.comparable == PANEL.version
        assert pack.meta["conclusion"].startswith("Evaluation: YES")
    assert sum(path.stat().st_size for path in PATHS) < 10e6


@pytest.fixture(scope="module")
def settings(packs: list[Pack]) -> list[Setting]:
    return make_settings(packs)


def test_the_documented_standings_are_those_of_the_packs(settings: list[Setting]) -> None:
    markdown = runpy.run_path(str(ROOT / "benchmarks" / "standard.py"))["markdown"]
    for setting in settings:
        assert markdown(setting) in DOCS.read_text(), setting.name


def test_a_cell_that_is_run_again_is_not_refuted(packs: list[Pack]) -> None:
    smallest = min(packs, key=lambda pack: len(pack.cells))
    found = verify(smallest, cells=2, seed=0)
    assert found.passed, (found.problems, found.reruns)
    assert found.chosen == 2


def test_the_readme_quotes_the_standings() -> None:
    readme, standings = (ROOT / "README.md").read_text(), DOCS.read_text()
    quoted = readme[: readme.index("## Two commands")]
    own = readme[readme.index("**mlp, batch 8**") :].partition("\n## ")[0].strip()
    assert own in standings  # which are those of the packs
    numbers = re.findall(r"\d+\.\d %", quoted)
    assert numbers
    for number in numbers:
        assert number in own, number


def test_the_documented_leaderboard_is_that_of_the_packs(settings: list[Setting]) -> None:
    documented = (ROOT / "docs" / "lab" / "leaderboard.csv").read_text()
    assert table_of(settings).to_csv(index=False) == documented
