from __future__ import annotations

import heapq
import io
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from leakfrontier.evaluate.engines import progress as progress_module
from leakfrontier.evaluate.engines.durations import Durations
from leakfrontier.evaluate.engines.engine import Done
from leakfrontier.evaluate.engines.progress import Progress
from leakfrontier.evaluate.foundations.rows import Cell, Outcome
from leakfrontier.evaluate.run import run as run_module
from leakfrontier.evaluate.run.config import received_config
from leakfrontier.evaluate.share.pack import Pack, read_pack
from leakfrontier.evaluate.share.packed_rows import outcomes_of

PACKS = Path(__file__).parents[3] / "benchmarks" / "standard"
IDENTITY = ("scenario", "defense", "adversary", "knows_defense", "seed", "checkpoint")


def attack(adversary: str, defense: str, uploads: int = 4, scenario: str = "s") -> Cell:
    labels = {"scenario": scenario, "adversary": adversary, "defense": defense, "family": defense}
    config = {**labels, "observations": tuple(range(uploads))}
    return Cell("attack", config, {**labels, "seed": 0, "checkpoint": 1})


def learned(*costs: tuple[Cell, float]) -> Durations:
    durations = Durations([cell for cell, _ in costs])
    for cell, seconds in costs:
        durations.admit(cell, cell)
        durations.learn(cell, cell, seconds)
    return durations


def test_an_unseen_cell_costs_what_the_nearest_seen_one_did() -> None:
    assert Durations([]).of_waiting(attack("a", "none")) is None
    durations = learned((attack("a", "none"), 10), (attack("b", "none"), 90))
    for scenario in ("s", "other"):
        cheap, costly = (
            durations.of_waiting(attack(name, "TopK", scenario=scenario)) for name in "ab"
        )
        assert cheap == pytest.approx(10, rel=0.8)
        assert costly == pytest.approx(90, rel=0.2)
    assert durations.of_waiting(attack("c", "none")) == pytest.approx(50)


def test_a_shortened_cell_costs_less_and_teaches_what_a_whole_one_costs() -> None:
    whole, half = attack("a", "TopK"), attack("a", "TopK", uploads=2)
    durations = learned((whole, 10))
    assert 5 < (durations.of_admitted(half, whole) or 0) < 10
    assert durations.of_admitted(attack("a", "TopK", uploads=0), whole) == 0
    durations = Durations([whole])
    durations.admit(half, whole)
    durations.learn(half, whole, 6.5)
    assert durations.of_admitted(whole, whole) == pytest.approx(10)


def test_arms_show_what_a_cascade_spares() -> None:
    defenses = ("broken", "whole", "new")
    planned = {(name, one): attack(name, one) for name in "ab" for one in defenses}
    durations = Durations(planned.values())
    for one, uploads in {"broken": 0, "whole": 4}.items():
        durations.admit(planned["a", one], planned["a", one])
        durations.learn(planned["a", one], planned["a", one], 10)
        left = attack("b", one, uploads)
        durations.admit(left, planned["b", one])
        durations.learn(left, planned["b", one], 10 if uploads else None)
    assert durations.of_waiting(planned["a", "new"]) == pytest.approx(10, rel=0.01)
    assert durations.of_waiting(planned["b", "new"]) == pytest.approx(6.5, rel=0.01)  # one of two
    durations.admit(planned["a", "new"], planned["a", "new"])
    assert durations.of_waiting(planned["b", "new"]) == pytest.approx(6.5, rel=0.01)


class Recorded:
    """An engine whose cells take and return what those of a pack did, by a clock of its own."""

    def __init__(self, pack: Pack) -> None:
        outcomes = outcomes_of(pack.results)
        self._known = {
            _identity(row["kind"], row): (row["seconds"], outcomes.get(row["cell"], Outcome()))
            for row in pack.results.cells.to_dict("records")
        }
        self.now = 0.0
        self.progress: Progress | None = None
        self.estimates: list[tuple[float, float]] = []

    def monotonic(self) -> float:
        return self.now

    def slots(self) -> int:
        return 2

    def execute(
        self,
        _: object,
        tasks: deque[Any],
        *,
        workers: int,
        **__: object,
    ) -> Iterator[Any]:
        running: list[Any] = []
        number = 0
        while tasks or running:
            while tasks and len(running) < workers:
                task, number = tasks.popleft(), number + 1
                seconds, outcome = self._known[_identity(task[0].cell.kind, task[0].cell.labels)]
                heapq.heappush(running, (self.now + seconds, number, seconds, task, outcome))
            self.now, _, seconds, task, outcome = heapq.heappop(running)
            yield Done(task, outcome, seconds)
            assert self.progress is not None
            self.estimates.append((self.now, self.progress.seconds_left() or 0.0))


def _identity(kind: Any, labels: Any) -> tuple[object, ...]:  # noqa: ANN401
    values = [labels.get(name) for name in IDENTITY]
    return kind, *(None if pd.isna(one) else one for one in values)


def test_the_time_left_is_right_within_a_factor_of_one_and_a_half(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cells of a real run, with the seconds that they took, after its first minute."""
    pack = read_pack(PACKS / "mlp-trained.zip")
    engine = Recorded(pack)

    def watched(*args: Any, **options: Any) -> Progress:  # noqa: ANN401
        engine.progress = Progress(*args, **options)
        return engine.progress

    monkeypatch.setattr(progress_module, "time", engine)
    monkeypatch.setattr(run_module, "Progress", watched)
    run_module.run_trials(
        run_module.plan(received_config(pack.meta["config"], Path())),
        tmp_path / "run",
        panel=pack.panel,
        config=pack.meta["config"],
        cascade=True,
        engine=engine,  # type: ignore[arg-type]
        console=Console(file=io.StringIO()),
    )
    end = engine.now
    judged = [(now, left / (end - now)) for now, left in engine.estimates if 60 < now < 0.95 * end]
    for place in range(0, len(judged), len(judged) // 20):
        print(f"{judged[place][0]:.0f} of {end:.0f} s: {judged[place][1]:.2f} of the time left")
    right = [1 / 1.5 <= ratio <= 1.5 for _, ratio in judged]
    assert sum(right) >= 0.95 * len(right)
    assert all(1 / 2 <= ratio <= 2 for _, ratio in judged)
    assert end < 1.02 * pack.results.cells["seconds"].sum() / 2
