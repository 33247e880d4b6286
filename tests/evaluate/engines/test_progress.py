from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from leakfrontier.evaluate.engines import progress as progress_module
from leakfrontier.evaluate.engines.engine import cores
from leakfrontier.evaluate.engines.progress import Progress
from leakfrontier.evaluate.foundations.rows import Cell

CHEAP = [
    Cell("attack", {"n": n, "cheap": True}, {"scenario": "s", "adversary": "cheap"})
    for n in range(3)
]
COSTLY = [Cell("attack", {"n": n}, {"scenario": "s", "adversary": "costly"}) for n in range(3)]


class Clock:
    """Time that goes by when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def test_a_log_says_how_it_begins_and_how_it_ends(clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=20)
    with Progress([*CHEAP, *COSTLY], workers=2, console=console) as progress:
        for cell in CHEAP:
            progress.advance(cell, seconds=2)
        clock.now += 240
        progress.advance(COSTLY[0], seconds=100, status="timeout")
        progress.advance(COSTLY[1])
    assert console.file.getvalue().splitlines() == [
        "6 cells, 2 at a time",
        "5/6 cells after 4 min, 1 failed, about 1.7 min left",  # one cell has one worker
    ]


def test_a_log_gets_a_line_now_and_then_even_while_no_cell_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_module, "LOG_SECONDS", 0.01)
    console = Console(file=io.StringIO())
    with Progress(CHEAP, workers=1, console=console):
        deadline = time.monotonic() + 20
        while console.file.getvalue().count("0/3 cells after 0 s") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_time_left_is_that_of_like_cells(clock: Clock) -> None:
    console = Console(file=io.StringIO())
    with Progress([*CHEAP, *COSTLY], workers=1, console=console) as progress:
        progress.advance(CHEAP[0], seconds=1)
        progress.advance(COSTLY[0], seconds=100)
    assert "2/6 cells after 0 s, about 3.4 min left" in console.file.getvalue()  # 2 * 1 + 2 * 100 s


def test_cells_that_were_not_needed_let_others_be_expected_not_to_be(clock: Clock) -> None:
    console = Console(file=io.StringIO())
    with Progress(COSTLY, workers=1, console=console) as progress:
        progress.advance(COSTLY[0], seconds=60)
        progress.advance(COSTLY[1], seconds=0.0)
    assert "about 30 s left" in console.file.getvalue()


def test_a_cell_that_runs_is_counted_by_its_rest(clock: Clock) -> None:
    with Progress(COSTLY, workers=1, console=Console(file=io.StringIO())) as progress:
        progress.admit(COSTLY[0], COSTLY[0])
        progress.advance(COSTLY[0], seconds=100)
        progress.admit(COSTLY[1], COSTLY[1])
        assert progress.seconds_left() == pytest.approx(200)
        progress.start(COSTLY[1])
        clock.now += 60
        assert progress.seconds_left() == pytest.approx(140)
        clock.now += 340
        assert progress.seconds_left() == pytest.approx(200)  # it takes long, so it may go on


def test_a_cell_of_two_scenarios_may_start_again() -> None:
    with Progress(CHEAP[:1] * 2, workers=1, console=Console(file=io.StringIO())) as progress:
        for _ in range(2):
            progress.admit(CHEAP[0], CHEAP[0])
        for _ in range(2):
            progress.start(CHEAP[0])
            progress.advance(CHEAP[0], seconds=1)


def test_what_was_done_before_is_counted_and_takes_no_time() -> None:
    console = Console(file=io.StringIO())
    with Progress(CHEAP, workers=1, console=console) as progress:
        progress.advance(CHEAP[0])
        progress.advance(CHEAP[1], status="not needed")
    assert console.file.getvalue().splitlines()[-1] == "2/3 cells after 0 s"


def test_a_terminal_gets_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Progress(CHEAP, workers=1, console=console) as progress:
        progress.advance(CHEAP[0], seconds=3)
    text = console.file.getvalue()
    assert "1/3" in text
    assert "about 6 s left" in text
    assert "1/3 cells" not in text


def test_there_is_a_core() -> None:
    assert cores() >= 1
