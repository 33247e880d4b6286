import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import ARMS, SCENARIOS, make_results

from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.run.store import Store

benchmark = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "cascade.py"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    cascade, individual = (tmp_path_factory.mktemp(name) for name in ("cascade", "individual"))
    make_results(cascade, cascade=True)
    make_results(individual)
    return cascade, individual


def test_the_same_worst_cases_differ_nowhere(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark["main"](*folders) == 0
    output = capsys.readouterr().out
    assert len(output.splitlines()) == 1 + 4 * len(SCENARIOS) * len(ARMS) + 1
    assert "0 of " in output.splitlines()[-1]


def compared(cascade: Conclusions, individual: Conclusions) -> dict[str, int]:
    """Return how many victims of a passive server differ, by defense."""
    table = benchmark["compared"](cascade, individual)
    table = table[(table["server"] == "passive") & (table["scenario"] == SCENARIOS[1])]
    return {row.defense: row.differ for row in table.itertuples() if row.differ}


def test_a_victim_that_one_run_misses_differs(folders: tuple[Path, Path]) -> None:
    cascade, individual = (Store(folder).results() for folder in folders)
    attacks = individual.attacks
    victim = (attacks["scenario"] == SCENARIOS[1]) & (attacks["seed"] == 0)
    victim &= attacks["observation"].eq(0) & attacks["defense"].eq("none")
    safe = replace(individual, attacks=attacks.assign(identified=attacks["identified"] & ~victim))
    assert compared(cascade, safe) == compared(safe, cascade) == {"none": 1}
    unseen = replace(individual, attacks=attacks[~victim])
    assert compared(cascade, unseen) == compared(unseen, cascade) == {"none": 1}
    fewer = replace(individual, attacks=attacks[attacks["defense"] != "none"])
    assert compared(cascade, fewer) == {"none": 20}
