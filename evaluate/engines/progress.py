"""Progress of a run and its remaining time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ..foundations.rows import Cell, Status
from ..foundations.terminal import terminal
from .durations import Durations

LOG_SECONDS = 30.0
"""Seconds between two lines if there is no terminal for a bar."""


class Progress:
    """A bar over cells, or lines in a log. The time left is estimated from similar cells.

    A planned cell waits for others until it is admitted. Later it is started, and then it advances.
    """

    def __init__(self, cells: Iterable[Cell], *, workers: int, console: Console | None) -> None:
        self._waiting = {cell.key: cell for cell in cells}
        self._total = len(self._waiting)
        self._done = 0
        self._admitted: dict[str, _Admitted] = {}
        self._durations = Durations(self._waiting.values())
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._started = time.monotonic()
        self._workers = workers
        self._notes_due = self._started
        self._failures = 0
        self._console = terminal() if console is None else console
        self._live = self._console.is_terminal or self._console.is_jupyter
        self._bar = Bar(
            TextColumn("cells"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._bar.add_task("", total=self._total, left="")

    def __enter__(self) -> Progress:
        self._bar.start()
        if not self._live:
            self._say(f"{self._total} cells, {self._workers} at a time")
            threading.Thread(target=self._log, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._bar.stop()
        if not self._live:
            self._say(self._line())

    def admit(self, cell: Cell, planned: Cell) -> None:
        """Count a cell as able to run. A cascade may have shortened the planned cell."""
        with self._lock:
            self._waiting.pop(planned.key, None)
            self._durations.admit(cell, planned)
            self._admitted[cell.key] = _Admitted(cell, planned)

    def start(self, cell: Cell) -> None:
        """Note that a cell starts to run. Scenarios of different titles may share it."""
        with self._lock:
            if cell.key in self._admitted:
                self._admitted[cell.key].started = time.monotonic()

    def advance(self, cell: Cell, status: Status = "ok", seconds: float | None = None) -> None:
        """Count a cell as done.

        Args:
            cell: The cell.
            status: How it ended.
            seconds: How long it took; None if it did not run now.
        """
        with self._lock:
            ended = self._admitted.pop(cell.key, None) or _Admitted(cell, cell)
            self._waiting.pop(cell.key, None)
            self._done += 1
            self._failures += status not in ("ok", "not needed")
            self._durations.learn(cell, ended.planned, seconds)
            if self._live:
                self._show()

    def _show(self) -> None:
        """Advance the bar. The notes change at most once a second, as they take time to make."""
        now = time.monotonic()
        if now >= self._notes_due:
            self._notes_due = now + 1
            self._bar.update(self._task, left=", ".join(self._notes()))
        self._bar.update(self._task, advance=1)

    def seconds_left(self) -> float | None:
        """Return the expected seconds until all cells are done; None if no cell has ended."""
        admitted = [self._rest(one) for one in self._admitted.values()]
        waiting = [self._durations.of_waiting(cell) for cell in self._waiting.values()]
        known = [one for one in (*admitted, *waiting) if one is not None]
        if len(known) < len(admitted) + len(waiting):
            return None
        return max(sum(known) / self._workers, max(known, default=0.0))

    def _log(self) -> None:
        """Log the progress from time to time, even while no cell ends."""
        while not self._over.wait(LOG_SECONDS):
            self._say(self._line())

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        with self._lock:
            elapsed = _duration(time.monotonic() - self._started)
            return ", ".join([f"{self._done}/{self._total} cells after {elapsed}", *self._notes()])

    def _notes(self) -> list[str]:
        notes = [f"{self._failures} failed"] if self._failures else []
        seconds = self.seconds_left() if self._done < self._total else None
        if seconds is not None:
            notes.append(f"about {_duration(seconds)} left")
        return notes

    def _rest(self, one: _Admitted) -> float | None:
        """Return the expected rest of a cell. If it runs for long, it may go on for long."""
        expected = self._durations.of_admitted(one.cell, one.planned)
        if expected is None or one.started is None:
            return expected
        elapsed = time.monotonic() - one.started
        return max(expected - elapsed, elapsed / 4)


@dataclass
class _Admitted:
    """A cell that can run, the planned cell that it replaces, and when it started."""

    cell: Cell
    planned: Cell
    started: float | None = None


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{round(seconds / 60, 1 if seconds < 600 else 0):g} min"
