from pathlib import Path

import pandas as pd
from synthetic import make_results

from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.conclude.tables import Tables, once


def test_a_part_has_the_rows_of_one_setting_and_of_its_trainings(tmp_path: Path) -> None:
    results = make_results(tmp_path)
    scenario = str(results.attacks["scenario"].iloc[0])
    part = results.part(scenario, 0)
    assert isinstance(part, Conclusions)
    assert set(part.attacks["checkpoint"]) == {0}
    assert set(part.utility["scenario"]) == {scenario}
    assert 0 < len(part.utility) < len(results.utility)
    assert results.part("another", 0).cells.empty


def test_a_conclusion_is_drawn_once() -> None:
    drawn = []

    class Counted(Tables):
        @once
        def count(self) -> int:
            drawn.append(1)
            return len(drawn)

    empty = pd.DataFrame({"scenario": [], "checkpoint": []})
    tables = Counted({}, "1", *[empty] * 9)
    assert [tables.count(), tables.count()] == [1, 1]
    assert Counted({}, "1", *[empty] * 9).count() == 2
