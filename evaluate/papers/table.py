"""A table of a paper, and the common parts of its trials. The tables are in `tables.py`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from leakfrontier.adversaries import InputSpace
from leakfrontier.defenses import Batch

from ..data.data import DATASETS, bundle_of, data_digest, data_files, load_dataset
from ..data.dataset import Dataset
from ..engines.parcels import Files, Traveller
from ..foundations.devices import Device, current_device
from ..foundations.errors import UserError
from ..foundations.examples import Data
from ..foundations.rows import Cell, Outcome, Score
from ..foundations.seeds import generator
from ..foundations.statistics import Interval
from ..modality import metrics
from ..run.code_digests import source_digest

PaperSetting = Mapping[str, Any]
"""The setting of a row, in the paper's notation: plain JSON values."""

Scores = Mapping[str, Sequence[float]]
"""Results of one trial: for each metric a value per batch or per victim, and `seconds`."""

TrialFunction = Callable[[PaperSetting, PaperSetting, Dataset, Generator], Scores]
"""Runs one trial: from problem, method, data and source of randomness to scores.

It must be a function at the top level of a module or a `partial` of one. Workers import it.
"""

HUB_IDS = {
    "cola": "hub:nyu-mll/glue@cola",
    "sst2": "hub:stanfordnlp/sst2",
    "rotten_tomatoes": "hub:cornell-movie-review-data/rotten_tomatoes",
    "imdb": "hub:stanfordnlp/imdb",
}
"""Texts on the Hugging Face hub."""

FOLDERS = {
    "ham": "ham10000_128",
    "photos": "tiny_imagenet20",
    "speech": "audio/fsdd",
    **{name: name for name in ("tiny_imagenet20", "imagenet_sample224")},
    **{name: f"text/{name}" for name in HUB_IDS},
}
"""Subfolders of `--data` for datasets that torchvision does not download."""

PATH = "evaluate/papers/table.py"
"""The module that all trials use, in addition to their own function."""


@dataclass(frozen=True)
class Metric:
    """A column of a table.

    Attributes:
        definition: The measured quantity, in words.
        interval: Computes an estimate from values and the trial of each value:
            `statistics.rate` or `statistics.mean_interval`.
        percent: Whether it is printed as a percentage. The values are always shares.
        digits: Printed decimals, if it is not a percentage.
        brief: Whether to print it without its interval.
    """

    definition: str
    interval: Callable[[Sequence[float], Sequence[int]], Interval]
    percent: bool = False
    digits: int = 1
    brief: bool = False

    def text(self, value: float) -> str:
        """Return the printed form of a value."""
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
        problem: The attacked setting. Trials of one problem draw the same batches and weights.
        paper: The paper's numbers, by metric.
        method: The attack of the paper, if rows differ in it.
        trials: Default number of attacked batches.
    """

    problem: PaperSetting
    paper: Mapping[str, float]
    method: PaperSetting = field(default_factory=dict)
    trials: int = 20

    @property
    def setting(self) -> PaperSetting:
        """Return the setting of the row in the paper."""
        return {**self.method, **self.problem}


@dataclass(frozen=True)
class Table:
    """A table of a paper, and how to measure it.

    Attributes:
        name: Name of the table for `leakfrontier reproduce`.
        title: Title of the table.
        reference: The paper.
        datasets: Names of `DATASETS`, each with the shape of an example, to refuse other data. The
            shape is None if shapes do not identify the data. The problem of a row names its
            `dataset`, unless there is only one.
        metrics: The columns by name. The paper need not have all of them.
        rows: The rows, in the paper's order.
        trial: Runs one trial of a problem with the method that a procedure returns.
        procedures: By name, functions from a row's method to the method that is run. The first is
            the default. Rows of one problem with the same method are run once.
        quick: Number of first rows in a smoke test.
        reduced: Smaller options of the method in a smoke test, which the trial's function reads.
        notes: Further information for readers.
    """

    name: str
    title: str
    reference: str
    datasets: Mapping[str, tuple[int, ...] | None]
    metrics: Mapping[str, Metric]
    rows: Sequence[Row]
    trial: TrialFunction
    procedures: Mapping[str, Callable[[PaperSetting], PaperSetting]]
    quick: int = 1
    reduced: PaperSetting = field(default_factory=dict)
    notes: str = ""

    def dataset(self, row: Row) -> str:
        """Return the name of a row's dataset."""
        return str(row.problem.get("dataset", next(iter(self.datasets))))

    def select(self, text: str) -> list[int]:
        """Return the indices of rows from numbers (from 1) and ranges, e.g. `1,3-5`."""
        chosen: set[int] = set()
        for part in text.split(","):
            found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
            first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
            if not 1 <= first <= last <= len(self.rows):
                raise UserError(
                    f"rows must be numbers from 1 to {len(self.rows)} or ranges of them, such as "
                    f"1,3-5, got {text!r}"
                )
            chosen.update(range(first - 1, last))
        return sorted(chosen)


@dataclass(frozen=True)
class TableTrial(Traveller):
    """One batch to attack.

    Attributes:
        table: Name of the table.
        function: Runs the trial.
        dataset: Name of the dataset.
        problem: The attacked setting.
        method: The attack.
        seed: Number of the repetition of the whole table.
        index: Number of the batch, from 0.
        data: Folder of the dataset (see `find_data`).
        device: Device of the tensors.
    """

    download: ClassVar[tuple[str, str]] = ("data", "dataset")

    table: str
    function: TrialFunction
    dataset: str
    problem: PaperSetting
    method: PaperSetting
    seed: int
    index: int
    data: Path | None = None
    device: Device = "cpu"

    def files(self) -> Files:
        """Yield the files of the data, a download or a folder."""
        name, folder = find_data(self.dataset, self.data)
        if name in DATASETS:
            yield from data_files(name, folder)
        else:
            yield str(self.data), (bundle_of(name, self.dataset), "")

    @property
    def setting(self) -> str:
        """Return the setting that all trials of a row share."""
        return json.dumps([self.problem, self.method], sort_keys=True)

    @cached_property
    def cell(self) -> Cell:
        """Return the cell under which the outcome is stored."""
        names = ("table", "problem", "method", "seed", "index")
        config = {name: getattr(self, name) for name in names}
        data = find_data(self.dataset, self.data)[0]
        config["data"] = data if data in DATASETS else data_digest(data)
        labels = {"table": self.table, "setting": self.setting, "trial": self.index}
        function = self.function.func if isinstance(self.function, partial) else self.function
        return Cell("table", config, labels, source_digest([PATH], function))

    @property
    def draws(self) -> tuple[object, ...]:
        """Return the parts of the seed: without the method, so all methods see the same batch."""
        return (self.table, self.problem, self.seed, self.index)

    def run(self, folder: Path) -> Outcome:
        """Attack the batch."""
        data = load_dataset(*find_data(self.dataset, self.data)).to(current_device())
        rng = generator("reproduce", *self.draws)
        scores = self.function(self.problem, self.method, data, rng)
        rows = [
            Score(observation=0, victim=number, metric=name, value=value)
            for name, values in scores.items()
            for number, value in enumerate(values)
        ]
        return Outcome(scores=tuple(rows), busy=sum(scores["seconds"]))


def find_data(dataset: str, folder: Path | None) -> tuple[str, Path | None]:
    """Return a table's dataset as arguments of `load_dataset`.

    Args:
        dataset: Its name.
        folder: One of these folders, or a parent that holds it under the dataset's name: a folder
            of images in `train/` and `test/`, a folder of texts in `train.jsonl` and
            `test.jsonl`, or a download of torchvision. None for the default download.
    """
    if folder is None:
        return HUB_IDS.get(dataset, dataset), None
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}: --data must name a folder with {dataset} as "
            "images in train/ and test/, or a download of torchvision. Leave out --data to "
            "download it"
        )
    names = (FOLDERS.get(dataset, dataset), dataset.replace("-", "_"))
    for images in (folder, *(folder / name for name in names)):
        if (images / "train").is_dir() or (images / "train.jsonl").is_file():
            return str(images), None
    own = folder / dataset
    if (own / "test").is_dir():  # without train/, a fifth of test/ is held out
        return str(own / "test"), None
    return dataset, own if own.is_dir() else folder


def matched_psnr(guess: Tensor, truth: Tensor, space: InputSpace) -> Tensor:
    """Return the PSNR of each example. One without a guess gets the dataset's mean colour."""
    mean = torch.zeros_like(truth[:1])  # inputs are centred
    pixels, private = (space.to_unit(part) for part in (torch.cat([guess, mean]), truth))
    return metrics.psnr(pixels[metrics.match(pixels[:-1], private)], private)


def draw_batch(data: Data, size: int, rng: Generator) -> Batch:
    """Return random examples."""
    if not size <= len(data.targets):
        raise ValueError(f"a batch of {size} needs as many examples, got {len(data.targets)}")
    chosen = torch.randperm(len(data.targets), generator=rng)[:size]
    return data.at(chosen)
