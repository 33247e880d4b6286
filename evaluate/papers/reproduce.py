"""Reproduce a table of a paper: our numbers beside the paper's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console

from ..conclude.results import Conclusions
from ..data.data import load_dataset
from ..engines.engine import LOCAL, Engine
from ..foundations.devices import Device
from ..foundations.errors import UserError, given_by_user
from ..foundations.statistics import Interval
from ..run.run import run_trials
from ..run.store import Store
from .table import Row, Scores, Table, TableTrial, find_data


@dataclass(frozen=True)
class Result:
    """A reproduced row of a paper's table.

    Attributes:
        number: The row's number in the paper's table, from 1.
        row: The row.
        ours: Our numbers by metric. NaN if no trial ended.
        seconds: Median duration of an attack. None if no trial ended.
        trials: Results of each trial, by its index.
        failures: Reasons why other trials failed, by their index.
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
    out: Path | None = None,
    trials: int | None = None,
    procedure: str | None = None,
    quick: bool = False,
    seed: int = 0,
    data: Path | None = None,
    workers: int | None = None,
    engine: Engine = LOCAL,
    device: Device = "cpu",
    console: Console | None = None,
) -> list[Result]:
    """Measure rows of a table.

    Args:
        table: The table.
        rows: Indices of its rows. By default all.
        out: Folder for the results, from which a later call continues. By default
            `default_folder`.
        trials: Attacked batches per row. By default as many as the row says.
        procedure: One of the table's procedures. By default the first.
        quick: Whether to reduce each trial as the table says.
        seed: Number of the repetition. A trial depends only on it, its index and its problem.
        data: Folder of the dataset (see `find_data`).
        workers: Number of processes. By default as many as the engine can run.
        engine: Where trials run.
        device: Device of the tensors.
        console: Where progress is shown. By default the terminal.
    """
    if trials is not None and not trials >= 1:
        raise UserError(f"trials must be at least 1, got {trials}")
    procedure = procedure or next(iter(table.procedures))
    if procedure not in table.procedures:
        raise UserError(
            f"procedure of {table.name} must be one of {', '.join(table.procedures)}, "
            f"got {procedure!r}"
        )
    method, reduced = table.procedures[procedure], table.reduced if quick else {}
    planned = {
        index: [
            TableTrial(
                table=table.name,
                function=table.trial,
                dataset=table.dataset(row),
                problem=row.problem,
                method={**method(row.method), **reduced},
                seed=seed,
                index=number,
                data=data,
                device=device,
            )
            for number in range(trials or row.trials)
        ]
        for index in (range(len(table.rows)) if rows is None else rows)
        for row in [table.rows[index]]
    }
    out = out or default_folder(table)
    Store(out, create=True)  # before the slow loading of data
    for dataset in {trial.dataset: None for row in planned.values() for trial in row}:
        _check_data(table, dataset, data)
    results = run_trials(
        _interleaved(planned.values()),
        out,
        panel="tables",  # several tables may share a folder
        config={"table": table.name, "procedure": procedure, "seed": seed},
        workers=workers,
        engine=engine,
        retry_failed=True,
        console=console,
    )
    found = _scores(results)
    return [
        _result(table, index, {trial.index: found[trial.cell.key] for trial in wanted})
        for index, wanted in planned.items()
    ]


def default_folder(table: Table) -> Path:
    """Return the default folder of a table's results."""
    return Path("runs") / "tables" / table.name


def document(table: Table, results: Sequence[Result], *, quick: bool = False) -> dict[str, Any]:
    """Return a reproduced table as JSON values. Infinite limits are null."""
    return {
        "table": table.name,
        **({"reduced": dict(table.reduced)} if quick else {}),
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
    """Return one record per finished trial: its setting and the mean of each score."""
    return [
        {"row": result.number, **result.row.setting, "trial": index}
        | {name: mean(trial[name]) for name in (*table.metrics, "seconds")}
        for result in results
        for index, trial in result.trials.items()
    ]


def _interleaved(planned: Collection[Sequence[TableTrial]]) -> list[TableTrial]:
    """Return the distinct trials, first trials of all rows first, for an early time estimate."""
    different = {trial.cell.key: trial for row in planned for trial in row}
    return sorted(different.values(), key=lambda trial: trial.index)


def _scores(results: Conclusions) -> dict[str, Scores | str]:
    """Return the results of each trial, or why it failed, by the key of its cell."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    rows = results.scores.sort_values(["cell", "metric", "victim"])
    for key, metric, value in zip(rows["cell"], rows["metric"], rows["value"], strict=True):
        values[key][metric].append(value)
    cells = results.cells
    return {
        key: values[key] if status == "ok" else error.partition("\n")[0]
        for key, status, error in zip(cells["cell"], cells["status"], cells["error"], strict=True)
    }


def _result(table: Table, index: int, found: Mapping[int, Scores | str]) -> Result:
    ended = {i: scores for i, scores in found.items() if not isinstance(scores, str)}
    failures = {i: reason for i, reason in found.items() if isinstance(reason, str)}
    ours = {}
    for name, metric in table.metrics.items():
        values = [value for scores in ended.values() for value in scores[name]]
        trials = [i for i, scores in ended.items() for _ in scores[name]]
        ours[name] = metric.interval(values, trials)
    seconds = median(scores["seconds"][0] for scores in ended.values()) if ended else None
    return Result(index + 1, table.rows[index], ours, seconds, ended, failures)


def _check_data(table: Table, dataset: str, folder: Path | None) -> None:
    """Load the data once, before the workers do. Raise if its shape is wrong."""
    shape = table.datasets[dataset]
    kind = "images" if shape is not None and len(shape) == 3 else "examples"
    try:
        with given_by_user():
            data = load_dataset(*find_data(dataset, folder))
    except UserError as error:
        raise UserError(
            f"{error}\n{table.name} needs {dataset}: give a folder with its {kind} in "
            "train/ and test/ as --data"
        ) from error
    found = tuple(data.train.inputs.shape[1:])
    if shape is not None and found != shape:
        raise UserError(
            f"{table.name} needs {dataset}, with {kind} of shape {shape}, but those of "
            f"{data.name} have shape {found}: give another --data"
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
