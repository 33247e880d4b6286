"""A paper's table, measured again: ours beside the paper's.

What a table is, the runner that fills it in, and what trials have in common; the tables
themselves are in `tables.py`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Generator, Tensor

from leakfrontier.adversaries import InputSpace
from leakfrontier.defenses import Batch

from .. import metrics
from ..data import Dataset, load_dataset
from ..engine import Failure, execute
from ..seeds import generator
from ..statistics import Interval

Setting = Mapping[str, Any]
"""What distinguishes a row, in the paper's notation: plain JSON values."""

Scores = Mapping[str, Sequence[float]]
"""What one trial measured: by metric, a value per batch or one per victim; and `seconds`."""

TrialFunction = Callable[[Setting, Setting, Dataset, Generator], Scores]
"""From a problem, a method, data and a source of randomness to scores: one trial.

A function at the top level of a module, or a `partial` of one: workers import it.
"""

QUICK_TRIALS = 2
"""Batches per row of a smoke test."""


@dataclass(frozen=True)
class Metric:
    """A column of a table.

    Attributes:
        definition: What is measured, in a sentence.
        interval: From values and the trial that each belongs to, to an estimate:
            `statistics.rate` or `statistics.mean_interval`.
        percent: Whether it prints as a percentage; values are shares all the same.
        digits: Decimals in print, if it is no percentage.
    """

    definition: str
    interval: Callable[[Sequence[float], Sequence[int]], Interval]
    percent: bool = False
    digits: int = 1

    def text(self, value: float) -> str:
        """Return a value as it is printed."""
        if math.isnan(value):
            return "n/a"
        if self.percent:
            return f"{100 * value:.0f} %"
        text = f"{value:.{self.digits}f}"
        return text.removeprefix("0") if self.digits >= 3 else text  # .996, as in papers


@dataclass(frozen=True)
class Row:
    """A row of a paper's table.

    Attributes:
        problem: What is attacked. Trials of one problem draw the same batches and weights.
        paper: The paper's numbers, by metric.
        method: How the paper attacked it, where rows differ in that.
        trials: Batches attacked by default.
    """

    problem: Setting
    paper: Mapping[str, float]
    method: Setting = field(default_factory=dict)
    trials: int = 20

    @property
    def setting(self) -> Setting:
        """Return what distinguishes the row in the paper."""
        return {**self.method, **self.problem}


@dataclass(frozen=True)
class Table:
    """A table of a paper, and how to measure it.

    Attributes:
        name: What `leakfrontier reproduce` finds it by.
        title: What it is about.
        reference: The paper.
        datasets: Names of `DATASETS`, each with the shape of its images, to refuse other data. A
            row's problem names its own as `dataset`, unless there is only one.
        metrics: The columns, by name; the paper need not have all of them.
        rows: The rows, in the paper's order.
        trial: Does one trial of a problem, with what a procedure makes of the row's method.
        procedures: By name, from a row's method to the method that is run; the first is the
            default. Rows of one problem with the same method are run once.
        quick: Number of first rows that make a smoke test.
        notes: What else a reader must know.
    """

    name: str
    title: str
    reference: str
    datasets: Mapping[str, tuple[int, ...]]
    metrics: Mapping[str, Metric]
    rows: Sequence[Row]
    trial: TrialFunction
    procedures: Mapping[str, Callable[[Setting], Setting]]
    quick: int = 1
    notes: str = ""

    def dataset(self, row: Row) -> str:
        """Return the name of a row's dataset."""
        return str(row.problem.get("dataset", next(iter(self.datasets))))

    def select(self, text: str) -> list[int]:
        """Return the indices of rows picked by number, from 1, and by range, as in `1,3-5`."""
        chosen: set[int] = set()
        for part in text.split(","):
            found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
            first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
            if not 1 <= first <= last <= len(self.rows):
                raise ValueError(
                    f"rows must be numbers from 1 to {len(self.rows)} or ranges of them, as in "
                    f"1,3-5, got {text!r}"
                )
            chosen.update(range(first - 1, last))
        return sorted(chosen)


@dataclass(frozen=True)
class Trial:
    """One batch to attack; all that the result depends on, but for the data.

    Attributes:
        table: Name of the table.
        run: Does it.
        dataset: Name of the dataset.
        problem: What is attacked.
        method: How it is attacked.
        seed: Repetition of the whole table.
        index: Number of the batch, from 0.
    """

    table: str
    run: TrialFunction
    dataset: str
    problem: Setting
    method: Setting
    seed: int
    index: int

    @property
    def alike(self) -> str:
        """Return what trials have in common that differ only in the batch."""
        return json.dumps([self.problem, self.method], sort_keys=True)

    def scores(self, data: Dataset) -> Scores:
        """Attack the batch; other methods see the same one."""
        rng = generator("reproduce", self.table, self.problem, self.seed, self.index)
        return self.run(self.problem, self.method, data, rng)


@dataclass(frozen=True)
class Result:
    """A row of a paper's table, measured again.

    Attributes:
        number: The row's number in the paper's table, from 1.
        row: The row.
        ours: Our numbers, by metric; NaN where no trial ended.
        seconds: Median duration of an attack; None where no trial ended.
        trials: What each trial measured, by its index.
        failures: Why the others did not end, by their index.
    """

    number: int
    row: Row
    ours: Mapping[str, Interval]
    seconds: float | None
    trials: Mapping[int, Scores]
    failures: Mapping[int, str]


def reproduce(
    table: Table,
    rows: Sequence[int] | None = None,
    *,
    trials: int | None = None,
    procedure: str | None = None,
    seed: int = 0,
    data: Path | None = None,
    workers: int | None = None,
    console: Console | None = None,
) -> list[Result]:
    """Measure rows of a table.

    Args:
        table: The table.
        rows: Indices of its rows; all by default.
        trials: Batches attacked per row; by default as many as the row says.
        procedure: One of the table's procedures; the first by default.
        seed: Repetition. Trials depend on it, their number and their problem alone.
        data: Where the dataset is (`find_data`).
        workers: Processes; by default one per core.
        console: Where progress is shown; by default the terminal.
    """
    if trials is not None and not trials >= 1:
        raise ValueError(f"trials must be at least 1, got {trials}")
    procedure = procedure or next(iter(table.procedures))
    if procedure not in table.procedures:
        raise ValueError(
            f"procedure of {table.name} must be one of {', '.join(table.procedures)}, "
            f"got {procedure!r}"
        )
    planned = {
        index: _trials(table, table.rows[index], trials, procedure, seed)
        for index in (range(len(table.rows)) if rows is None else rows)
    }
    for dataset in {trial.dataset: None for row in planned.values() for trial in row}:
        _check_data(table, dataset, data)
    scored = _execute(_interleaved(planned.values()), data, workers or _cores(), console)
    return [
        _result(table, index, {trial.index: scored[trial.alike, trial.index] for trial in wanted})
        for index, wanted in planned.items()
    ]


def find_data(dataset: str, folder: Path | None) -> tuple[str, Path | None]:
    """Return a table's dataset as arguments of `load_dataset`.

    Args:
        dataset: Its name.
        folder: A folder of images in `train/` and `test/`, or one that holds such a folder under
            the dataset's name, or one of torchvision's downloads. None for the default download.
    """
    if folder is None:
        return dataset, None
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}: --data must name a folder with {dataset} as "
            "images in train/ and test/, or one for torchvision's download; without --data it is "
            "downloaded"
        )
    for images in (folder, folder / dataset, folder / dataset.replace("-", "_")):
        if (images / "train").is_dir():
            return str(images), None
    return dataset, folder


def matched_psnr(guess: Tensor, truth: Tensor, space: InputSpace) -> Tensor:
    """Return the PSNR of each example; one without a guess gets the dataset's mean colour."""
    mean = torch.zeros_like(truth[:1])  # inputs are centred
    pixels, private = (space.to_unit(part) for part in (torch.cat([guess, mean]), truth))
    return metrics.psnr(pixels[metrics.match(pixels[:-1], private)], private)


def draw_batch(data: Batch, size: int, rng: Generator) -> Batch:
    """Return some examples at random."""
    if not size <= len(data.targets):
        raise ValueError(f"a batch of {size} needs as many images, got {len(data.targets)}")
    chosen = torch.randperm(len(data.targets), generator=rng)[:size]
    return Batch(data.inputs[chosen], data.targets[chosen])


def document(table: Table, results: Sequence[Result]) -> dict[str, Any]:
    """Return a measured table as JSON values; limits that do not exist are null."""
    return {
        "table": table.name,
        "rows": [
            {
                "setting": dict(result.row.setting),
                "paper": dict(result.row.paper),
                "ours": {
                    name: {key: _finite(value) for key, value in asdict(interval).items()}
                    for name, interval in result.ours.items()
                },
                "seconds": result.seconds,
            }
            for result in results
        ],
    }


def trial_rows(table: Table, results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return one record per trial that ended: its setting and the mean of each of its scores."""
    return [
        {"row": result.number, **result.row.setting, "trial": index}
        | {name: mean(trial[name]) for name in (*table.metrics, "seconds")}
        for result in results
        for index, trial in result.trials.items()
    ]


def _trials(table: Table, row: Row, trials: int | None, procedure: str, seed: int) -> list[Trial]:
    method = table.procedures[procedure](row.method)
    return [
        Trial(table.name, table.trial, table.dataset(row), row.problem, method, seed, index)
        for index in range(trials or row.trials)
    ]


def _interleaved(planned: Collection[Sequence[Trial]]) -> list[Trial]:
    """Return different trials, all rows' first ones first, so that the time left is soon known."""
    different = {(trial.index, trial.alike): trial for row in planned for trial in row}
    return sorted(different.values(), key=lambda trial: trial.index)


def _execute(
    trials: Sequence[Trial],
    data: Path | None,
    workers: int,
    console: Console | None,
) -> dict[tuple[str, int], Scores | Failure]:
    """Return what came out of each trial."""
    scored: dict[tuple[str, int], Scores | Failure] = {}
    with _Progress(trials, workers, console) as progress:
        tasks = [(trial, data) for trial in trials]
        for done in execute(_run, tasks, workers=workers, time_limit=math.inf):
            trial = done.task[0]
            scored[trial.alike, trial.index] = done.result
            progress.advance(trial, done.seconds)
    return scored


def _run(task: tuple[Trial, Path | None]) -> Scores:
    trial, data = task
    return trial.scores(load_dataset(*find_data(trial.dataset, data)))


def _result(table: Table, index: int, found: Mapping[int, Scores | Failure]) -> Result:
    ended = {i: scores for i, scores in found.items() if not isinstance(scores, Failure)}
    failures = {i: each.message for i, each in found.items() if isinstance(each, Failure)}
    ours = {}
    for name, metric in table.metrics.items():
        values = [value for scores in ended.values() for value in scores[name]]
        trials = [i for i, scores in ended.items() for _ in scores[name]]
        ours[name] = metric.interval(values, trials)
    seconds = median(scores["seconds"][0] for scores in ended.values()) if ended else None
    return Result(index + 1, table.rows[index], ours, seconds, ended, failures)


def _check_data(table: Table, dataset: str, folder: Path | None) -> None:
    """Load the data once, before all workers would download it, and refuse what is not it."""
    try:
        data = load_dataset(*find_data(dataset, folder))
    except ValueError as error:
        raise ValueError(
            f"{error}\n{table.name} needs {dataset}: give a folder with its images in "
            "train/ and test/ by --data"
        ) from error
    found, shape = tuple(data.train.inputs.shape[1:]), table.datasets[dataset]
    if found != shape:
        raise ValueError(
            f"{table.name} is about {dataset}, with images of shape {shape}; those of "
            f"{data.name} have shape {found}"
        )


class _Progress:
    """A bar over trials, with the time left estimated from like trials that are done."""

    def __init__(self, trials: Sequence[Trial], workers: int, console: Console | None) -> None:
        self._left = [trial.alike for trial in trials]
        self._workers = workers
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._bar = Progress(
            TextColumn("batches"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        self._task = self._bar.add_task("", total=len(trials), left="")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, trial: Trial, seconds: float) -> None:
        """Count a trial as done."""
        self._left.remove(trial.alike)
        self._seconds[trial.alike].append(seconds)
        means = {alike: mean(values) for alike, values in self._seconds.items()}
        overall = mean(means.values())
        left = sum(means.get(alike, overall) for alike in self._left) / self._workers
        minutes, rest = divmod(round(left), 60)
        text = f"about {minutes}:{rest:02d} left" if self._left else ""
        self._bar.update(self._task, advance=1, left=text)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
