import math
from pathlib import Path

import pytest
import torch
from federated import rng

from leakfrontier.adversaries import ImageSpace
from leakfrontier.defenses import Batch
from leakfrontier.evaluate.data.dataset import Dataset
from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.foundations.statistics import mean_interval
from leakfrontier.evaluate.papers.table import (
    FOLDERS,
    Metric,
    PaperSetting,
    Row,
    Scores,
    Table,
    TableTrial,
    draw_batch,
    find_data,
    matched_psnr,
)


def drawn(
    problem: PaperSetting, method: PaperSetting, data: Dataset, rng: torch.Generator
) -> Scores:
    """Return as many numbers as asked for."""
    values = torch.rand(problem["size"], generator=rng) + method.get("shift", 0)
    return {"value": values.tolist(), "seconds": [2.0]}


SMALL = Table(
    name="small",
    title="draws",
    reference="Nobody. Nothing.",
    datasets={"digits": (1, 8, 8), "mnist": None},
    metrics={"value": Metric("mean of what was drawn", mean_interval)},
    rows=[
        Row({"size": 3}, {"value": 0.5}, {"shift": 0}),
        Row({"size": 3, "dataset": "mnist"}, {"value": 1.5}, {"shift": 1}),
        Row({"size": 2}, {"value": 0.5}),
    ],
    trial=drawn,
    procedures={"ours": dict},
)


def trial(size: int = 3, shift: float = 0, seed: int = 0, index: int = 0) -> TableTrial:
    return TableTrial("small", drawn, "digits", {"size": size}, {"shift": shift}, seed, index)


@pytest.mark.parametrize(
    ("text", "expected"), [("2", [1]), ("1,3", [0, 2]), ("2-3,1, 2", [0, 1, 2]), (" 1 - 2", [0, 1])]
)
def test_rows_by_number_and_range(text: str, expected: list[int]) -> None:
    assert SMALL.select(text) == expected


@pytest.mark.parametrize("text", ["0", "4", "2-9", "3-1", "", "a", "1;2", "-1", "1.5"])
def test_rows_that_do_not_exist(text: str) -> None:
    with pytest.raises(ValueError, match="rows must be numbers from 1 to 3 or ranges"):
        SMALL.select(text)


def test_data_are_found_under_their_names(tmp_path: Path) -> None:
    (tmp_path / FOLDERS["ham"] / "train").mkdir(parents=True)
    (tmp_path / "mnist" / "MNIST").mkdir(parents=True)
    assert find_data("ham", tmp_path) == (str(tmp_path / FOLDERS["ham"]), None)
    assert find_data("mnist", tmp_path) == ("mnist", tmp_path / "mnist")
    assert find_data("cifar10", tmp_path) == ("cifar10", tmp_path)


def test_texts_are_found_in_a_folder_of_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "text" / "cola"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").touch()
    assert find_data("cola", tmp_path) == (str(folder), None)
    assert find_data("cola", None) == ("hub:nyu-mll/glue@cola", None)


def test_a_folder_of_examples_is_found_as_it_is_or_by_its_test_split(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    assert find_data("cifar10", tmp_path) == (str(tmp_path), None)
    (tmp_path / "sets" / "imdb" / "test").mkdir(parents=True)
    found = find_data("imdb", tmp_path / "sets")
    assert found == (str(tmp_path / "sets" / "imdb" / "test"), None)
    with pytest.raises(UserError, match=r"there is no folder .*: --data must name a folder"):
        find_data("imdb", tmp_path / "absent")


def test_a_row_names_its_dataset_unless_it_is_the_first() -> None:
    assert [SMALL.dataset(row) for row in SMALL.rows] == ["digits", "mnist", "digits"]
    assert SMALL.rows[1].setting == {"shift": 1, "size": 3, "dataset": "mnist"}


def test_numbers_are_printed_as_in_papers() -> None:
    share = Metric("a share", mean_interval, percent=True)
    assert share.text(0.256) == "26 %"
    assert Metric("dB", mean_interval).text(12.345) == "12.3"
    assert Metric("a similarity", mean_interval, digits=3).text(0.9961) == ".996"
    assert Metric("a similarity", mean_interval, digits=3).text(1.0) == "1.000"
    assert share.text(math.nan) == "n/a"


def test_every_method_sees_the_same_batch_and_every_trial_another(tmp_path: Path) -> None:
    def values(one: TableTrial) -> list[float]:
        outcome = one.run(tmp_path)
        assert outcome.busy == 2.0
        return [row.value for row in outcome.scores if row.metric == "value"]

    first = values(trial())
    assert len(first) == 3
    assert values(trial(shift=1)) == pytest.approx([value + 1 for value in first])
    assert values(trial(index=1)) != first
    assert values(trial(seed=1)) != first


def test_trials_are_kept_by_all_that_they_depend_on() -> None:
    keys = [
        one.cell.key for one in (trial(), trial(2), trial(shift=1), trial(seed=1), trial(index=1))
    ]
    assert len({*keys}) == 5
    assert trial().cell.key == keys[0]
    assert trial().setting == trial(index=1).setting != trial(shift=1).setting


def test_a_batch_has_no_example_twice() -> None:
    data = Batch(torch.arange(10.0)[:, None], torch.arange(10))
    chosen = draw_batch(data, 10, rng())
    assert sorted(chosen.targets.tolist()) == [*range(10)]
    assert torch.equal(chosen.inputs.flatten().long(), chosen.targets)
    with pytest.raises(ValueError, match="a batch of 11 needs as many examples, got 10"):
        draw_batch(data, 11, rng())


def test_guesses_are_matched_and_missing_ones_are_the_mean_colour() -> None:
    space = ImageSpace((1, 1, 2), 2, mean=(0.5,), std=(0.25,))
    pixels = torch.tensor([[0.0, 0.0], [0.5, 1.0], [0.6, 0.6]]).view(3, 1, 1, 2)
    truth = space.to_inputs(pixels)
    scored = matched_psnr(truth[[1, 0]], truth, space)
    assert (scored[:2] > 100).all()
    assert float(scored[2]) == pytest.approx(20, abs=1e-3)  # an error of 0.1
