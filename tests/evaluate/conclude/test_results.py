"""What a run amounts to is found once, and by name."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import SCENARIOS, make_results, write_tiny

from leakfrontier.evaluate.conclude import analysis
from leakfrontier.evaluate.conclude.results import Conclusions


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Conclusions:
    return make_results(tmp_path_factory.mktemp("run"), checkpoints=(0, 20))


def test_everything_is_computed_once(results: Conclusions, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["attack_rates", "claims", "final_utility", "utility_curve", "worst_case"]
    calls = Counter[str]()

    def count(name: str, original: Callable[[Conclusions], object]) -> None:
        def counted(run: Conclusions) -> object:
            calls[name] += 1
            return original(run)

        monkeypatch.setattr(analysis, name, counted)

    for name in names:
        count(name, getattr(analysis, name))
    fresh = replace(results)
    for _ in range(2):
        fresh.checks()
        fresh.frontiers()
        fresh.utility_curve()
    assert calls == dict.fromkeys(names, 1)
    assert fresh.frontiers() is fresh.frontiers()


def test_changed_rows_are_analysed_anew(results: Conclusions) -> None:
    before = results.rates()
    none = replace(results, attacks=results.attacks.assign(identified=False))
    assert none.rates()["rate"].max() == 0 < before["rate"].max()
    assert results.rates() is before


def test_a_frontier_is_chosen_by_name(results: Conclusions) -> None:
    frontier = results.frontier(SCENARIOS[1], 20)
    assert (frontier.scenario, frontier.checkpoint) == (SCENARIOS[1], 20)
    with pytest.raises(ValueError, match=r"must select one frontier, got 2; choose .*lenet' at"):
        results.frontier(checkpoint=0)
    with pytest.raises(ValueError, match=r"'nothing' and checkpoint None must select .* got 0"):
        results.frontier("nothing")


def test_the_only_frontier_needs_no_name(tmp_path: Path) -> None:
    results = write_tiny(tmp_path, [("none", "none", None, 900, [True] * 4)])
    assert results.frontier().scenario == "tiny/model"


def test_without_attacks_there_is_no_frontier(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none, because no attack ran"):
        make_results(tmp_path, scenarios=SCENARIOS[:1], checkpoints=()).frontier()
