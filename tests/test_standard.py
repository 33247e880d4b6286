"""The committed packs of the standard benchmark are what the preset gives and the docs say."""

import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leakfrontier.adversaries import PANEL
from leakfrontier.evaluate.conclude.coordinates import coordinates
from leakfrontier.evaluate.conclude.dominance import dominates
from leakfrontier.evaluate.run.config import load_config
from leakfrontier.evaluate.share import verification
from leakfrontier.evaluate.share.claims import PackClaim, claims_of
from leakfrontier.evaluate.share.leaderboard import Setting, make_settings
from leakfrontier.evaluate.share.pack import Pack, portable, read_pack
from leakfrontier.reports.leaderboard import table_of

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / "benchmarks" / "standard").glob("*.zip"))
STANDARD = load_config("standard")
DOCS = ROOT / "docs" / "lab" / "standard.md"
README = (ROOT / "README.md").read_text()
NAMES = {
    "no defense": "no defense",
    "Quantization": "Quantization, 4 bits",
    "SecureAggregation": "SecureAggregation, 2 clients",
    "TopK": "TopK, 10 % of the entries",
    "DPSGD 0.764, ε 7.98": "DPSGD, ε 8",
}
"""How the README calls defenses of the standings."""


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


def test_a_claim_that_is_run_again_is_not_refuted(
    packs: list[Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packs are of older code, so their rows may differ within the tolerance."""
    (pack,) = (one for one in packs if one.name == "mlp-trained")

    def fewer(*args: Any, **options: Any) -> list[PackClaim]:  # noqa: ANN401
        """Leave out slow searches."""
        seconds = pack.cells["seconds"]
        return [
            replace(
                one, chosen=tuple(n for n in one.chosen if seconds[n] < 3 or n in one.trainings)
            )
            for one in claims_of(*args, **options)
        ]

    monkeypatch.setattr(verification, "claims_of", fewer)
    found = verification.verify(pack, defenses=["DPSGD"], seeds=1, more=0, seed=0)
    assert found.problems == ()
    assert [one.claim.control for one in found.judgements] == [True, False]
    for judgement in found.judgements:
        assert judgement.decision != "refuted", judgement.reasons
        assert judgement.claim.trainings_chosen == 1
        assert judgement.claim.attacks_chosen > 0


def test_the_readme_quotes_the_standings() -> None:
    quoted = README[: README.index("## Two commands")]
    standings = DOCS.read_text()  # which are those of the packs
    own = standings[standings.index("**mlp, batch 8**") :].partition("Evaluation:")[0]
    found = {
        NAMES[defense]: (accuracy, passive, architecture)
        for _, _, defense, accuracy, passive, _, architecture, blind, *_ in _rows(own)
        if defense in NAMES
    }
    shown = {defense: rates for defense, *rates in _rows(quoted)}
    assert set(shown) == set(NAMES.values())
    for defense, rates in shown.items():
        assert rates == [_estimate(cell) for cell in found[defense]], defense


def test_the_documented_attack_with_candidates_is_that_of_the_packs(packs: list[Pack]) -> None:
    text = DOCS.read_text()
    table = text[text.index("| scenario | epsilon 8 |") :].partition("\n\n")[0]
    documented = {scenario: [cell for cell in cells if cell] for scenario, *cells in _rows(table)}
    found = {}
    for pack in packs:
        claims, rates = pack.results.claims(), pack.results.rates()
        rates = rates[rates["candidates_granted"] & rates["knows_defense"]].set_index("defense")
        epsilon = claims.groupby("defense")["epsilon"].max()
        order = sorted(
            epsilon[epsilon < 1000].index, key=lambda one: (epsilon[one] > 8, -epsilon[one])
        )
        cells = [f"{100 * rates['rate'][one]:.1f} %" for one in order if rates["rate"][one] >= 0]
        if cells:
            found[pack.results.cells["scenario"].iloc[0]] = cells
    assert documented == found


def _rows(text: str) -> list[list[str]]:
    """Return the cells of a table, without its header."""
    lines = [line for line in text.splitlines() if line.startswith("| ") or line.startswith("|  ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def _estimate(cell: str) -> str:
    return cell.partition(" [")[0]


@pytest.mark.parametrize("scenario", ["mlp", "mlp, batch 8"])
def test_the_readme_quotes_the_headlines_of_dp_sgd(settings: list[Setting], scenario: str) -> None:
    (setting,) = (one for one in settings if one.name == scenario)
    points = setting.evaluations[0].frontier.points
    (headline,) = points.loc[points["epsilon"].between(7.9, 8), "headline"]
    quoted = " ".join(README.replace("\n> ", "\n").split())
    assert headline in quoted
    if scenario == "mlp":
        guide = (ROOT / "docs" / "guides" / "read_the_report.md").read_text()
        assert headline in " ".join(guide.replace("\n> ", "\n").split())


def test_no_defense_dominates_one_with_a_smaller_proven_limit(settings: list[Setting]) -> None:
    compared = 0
    for setting in settings:
        table = setting.table[setting.table["server"] == "passive"].set_index("defense")
        for name, row in table[table["dominated"] != ""].iterrows():
            rival = table.loc[row["dominated"]]
            assert rival["gamma_upload"] <= row["gamma_upload"], name
            assert rival["gamma_run"] <= row["gamma_run"], name
        order = setting.evaluations[0].frontier.order
        points = setting.evaluations[0].frontier.points.set_index("defense")
        places = {name: coordinates(point) for name, point in points.iterrows()}
        for pair, gap in order.gaps.items():
            one, other = (places[name] for name in pair)
            if any(a > b for a, b in zip(one.gammas, other.gammas, strict=True)):
                assert not dominates(one, other, gap), pair
                compared += 1
        private = points[points["family"] == "DPSGD"]
        assert (private["evidence"].eq("proven") == private["epsilon"].le(20)).all()
    assert compared > 100


def test_the_documented_leaderboard_is_that_of_the_packs(settings: list[Setting]) -> None:
    documented = (ROOT / "docs" / "lab" / "leaderboard.csv").read_text()
    assert table_of(settings).to_csv(index=False) == documented
