"""Progress of a run and its remaining time."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import mean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ..foundations.rows import Cell, Status
from ..foundations.terminal import terminal

LOG_SECONDS = 30.0
"""Seconds between two lines if there is no terminal for a bar."""


class Progress:
    """A bar over cells, or lines in a log. The time left is estimated from similar cells."""

    def __init__(self, cells: Iterable[Cell], *, workers: int, console: Console | None) -> None:
        self._left = Counter(map(_alike, cells))
        self._total = self._left.total()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._started = time.monotonic()
        self._workers = workers
        self._seconds: dict[object, list[float]] = defaultdict(list)
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

    def advance(self, cell: Cell, status: Status = "ok", seconds: float | None = None) -> None:
        """Count a cell as done.

        Args:
            cell: The cell.
            status: How it ended.
            seconds: How long it took; 0 if it was not needed, None if it was done before.
        """
        with self._lock:
            self._left[_alike(cell)] -= 1
            self._failures += status not in ("ok", "not needed")
            if seconds is not None:
                self._seconds[_alike(cell)].append(seconds)
            self._bar.update(self._task, advance=1, left=", ".join(self._notes()))

    def _log(self) -> None:
        """Log the progress from time to time, even while no cell ends."""
        while not self._over.wait(LOG_SECONDS):
            self._say(self._line())

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        with self._lock:
            done = self._total - self._left.total()
            elapsed = _duration(time.monotonic() - self._started)
            return ", ".join([f"{done}/{self._total} cells after {elapsed}", *self._notes()])

    def _notes(self) -> list[str]:
        notes = [f"{self._failures} failed"] if self._failures else []
        if self._left.total() and any(map(sum, self._seconds.values())):
            notes.append(f"about {_duration(self._estimate())} left")
        return notes

    def _estimate(self) -> float:
        means = {alike: mean(seconds) for alike, seconds in self._seconds.items()}
        overall = mean(means.values())
        left = sum(count * means.get(alike, overall) for alike, count in self._left.items())
        return left / self._workers


def _alike(cell: Cell) -> object:
    """Return what the duration of a cell mostly depends on."""
    return cell.kind, *(cell.labels.get(name) for name in ("scenario", "adversary", "setting"))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{round(seconds / 60, 1 if seconds < 600 else 0):g} min"
