from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pytest
import torch
from reproduce_jobs import draw, exact, mark
from rich.console import Console
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg
from leakfrontier.adversaries.exact.spearpp import SPEARPlusPlus
from leakfrontier.defenses.dpsgd import ClippedGradient
from leakfrontier.evaluate.data.data import DATASETS, Dataset, load_dataset
from leakfrontier.evaluate.engines import engine as engine_module
from leakfrontier.evaluate.engines.engine import Done, Failure
from leakfrontier.evaluate.foundations.statistics import mean_interval, rate
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.papers import reproduce as reproduce_module
from leakfrontier.evaluate.papers import table as table_module
from leakfrontier.evaluate.papers.reproduce import Result, document, reproduce
from leakfrontier.evaluate.papers.spearpp import spearpp_upload
from leakfrontier.evaluate.papers.table import FOLDERS, Metric, Row, Table, matched_psnr
from leakfrontier.evaluate.papers.tables import TABLES
from leakfrontier.evaluate.run.store import Store, StoreError

Command = Callable[..., tuple[int, str, str]]

SMALL = Table(
    name="small",
    title="draws",
    reference="Nobody. Nothing.",
    datasets={"digits": (1, 8, 8)},
    metrics={
        "value": Metric("mean of what was drawn", mean_interval),
        "success": Metric("share of first draws above a half", rate, percent=True),
    },
    rows=[
        Row({"size": 3}, {"value": 0.5}, {"shift": 0}, trials=4),
        Row({"size": 3}, {"value": 1.5, "success": 0.5}, {"shift": 1}, trials=4),
        Row({"size": 2}, {"value": 0.5}, trials=3),
    ],
    trial=draw,
    procedures={"ours": lambda method: {}, "paper": dict},
)


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a few images of CIFAR-10, which every worker reads anew."""
    source = Path(os.environ.get("LEAKFRONTIER_DATA", "")) / "cifar10"
    if not (source.is_absolute() and (source / "train").is_dir()):
        pytest.skip("LEAKFRONTIER_DATA does not name a folder with cifar10/train and cifar10/test")
    folder = tmp_path_factory.mktemp("data") / "cifar10"
    for split, count in (("train", 40), ("test", 1)):
        for category in (source / split).iterdir():
            (folder / split / category.name).mkdir(parents=True)
            for image in sorted(category.iterdir())[:count]:
                (folder / split / category.name / image.name).symlink_to(image)
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep results that are not given a folder away from the sources."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def command(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs `leakfrontier reproduce`, which knows a small table."""
    monkeypatch.delenv("LEAKFRONTIER_DATA", raising=False)
    monkeypatch.setitem(TABLES, "small", SMALL)  # type: ignore[arg-type]
    return partial(command, "reproduce", columns=80)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run trials in this process, which is quicker; return the number of tasks of each run."""
    counts = []

    def execute(function: Any, tasks: Any, **_: object) -> Any:  # noqa: ANN401
        counts.append(len(tasks))
        for task in tasks:
            try:
                result = function(task)
            except (TypeError, ValueError) as error:
                result = Failure("error", str(error))
            yield Done(task, result, 0.1)

    monkeypatch.setattr(engine_module, "execute", execute)
    return counts


def quiet() -> Console:
    return Console(file=io.StringIO())


def measured(
    table: Table = SMALL,
    rows: Sequence[int] | None = None,
    **options: Any,  # noqa: ANN401
) -> list[Result]:
    with TemporaryDirectory() as folder:
        return reproduce(
            table, rows, out=Path(folder), console=quiet(), **{"workers": 1, **options}
        )


def scores(results: Sequence[Result]) -> list[list[list[float]]]:
    return [[list(trial["value"]) for trial in result.trials.values()] for result in results]


def check_schema(parsed: Any, table: Table, rows: Sequence[int], trials: int) -> None:  # noqa: ANN401
    assert {"table", "rows"} <= set(parsed) <= {"table", "rows", "reduced"}
    assert parsed["table"] == table.name
    assert len(parsed["rows"]) == len(rows)
    for index, row in zip(rows, parsed["rows"], strict=True):
        assert set(row) == {"setting", "paper", "ours", "seconds"}
        assert row["setting"] == table.rows[index].setting
        assert row["paper"] == table.rows[index].paper
        assert set(row["ours"]) == set(table.metrics)
        assert row["seconds"] > 0
        for estimate in row["ours"].values():
            assert set(estimate) == {"value", "low", "high", "n"}
            assert estimate["n"] == trials
            assert estimate["low"] <= estimate["value"] <= estimate["high"]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_tables_are_well_formed(table: Table) -> None:
    assert set(table.datasets) <= {*DATASETS, *FOLDERS}
    assert {table.dataset(row) for row in table.rows} == set(table.datasets)
    assert 1 <= table.quick <= len(table.rows)
    settings = [json.dumps(row.setting, sort_keys=True) for row in table.rows]
    assert len(set(settings)) == len(settings)
    assert any(row.paper for row in table.rows) or "no table" in table.notes
    for row in table.rows:
        assert set(row.paper) <= set(table.metrics)
        assert row.trials >= 1


@pytest.mark.parametrize("number", range(1, 5))
def test_methods_of_spearpp_exist(number: int) -> None:
    table = TABLES[f"spearpp-table{number}"]
    for row in table.rows:
        for procedure in table.procedures.values():
            SPEARPlusPlus(**procedure(row.method))


def test_the_papers_numbers_at_a_few_places() -> None:
    first, second, third, fourth = (TABLES[f"spearpp-table{number}"].rows for number in range(1, 5))
    assert [len(rows) for rows in (first, second, third, fourth)] == [20, 18, 2, 2]
    assert first[4].setting == {"loss": "log-cosh", "b": 100, "m": 1000}
    assert first[4].paper == {"psnr": 18.76, "accuracy": 0.0}
    assert first[13].setting == {"loss": "l1", "b": 100, "m": 1000}
    assert first[13].paper == {"psnr": 69.31, "accuracy": 0.41}
    assert first[18].setting == {"loss": "-l4", "b": 15, "m": 200}
    assert second[8].setting == {"optimizer": "PGD", "b": 210, "m": 4000}
    assert second[8].paper == {"psnr": 88.36, "accuracy": 0.77}
    assert [row.paper for row in second[9:]] == [row.paper for row in first[9:18]]
    assert third[1].paper == {"psnr": 55.45, "accuracy": 0.88}
    assert fourth[0].paper == {"psnr": 67.81, "accuracy": 0.75}


@pytest.mark.usefixtures("here")
def test_scores_do_not_depend_on_rows_or_trials() -> None:
    alone = measured(procedure="paper")
    assert scores(measured(rows=[2], trials=2)) == [scores(alone)[2][:2]]
    assert scores(measured(seed=1)) != scores(alone)
    batches = [tuple(batch) for row in scores(alone)[1:] for batch in row]
    assert len(set(batches)) == 7


@pytest.mark.usefixtures("here")
def test_rows_of_one_problem_see_the_same_batches() -> None:
    plain, shifted, _ = scores(measured(procedure="paper"))
    assert torch.allclose(torch.tensor(plain) + 1, torch.tensor(shifted))


@pytest.mark.parametrize(("procedure", "expected"), [("ours", 7), ("paper", 11)])
def test_the_same_trial_is_run_once(procedure: str, expected: int, here: list[int]) -> None:
    first, second, _ = scores(measured(procedure=procedure))
    assert here == [expected]
    assert (first == second) == (procedure == "ours")


@pytest.mark.usefixtures("here")
def test_numbers_are_those_of_the_statistics() -> None:
    (result,) = measured(rows=[2])
    values = [value for batch in scores([result])[0] for value in batch]
    assert result.ours["value"] == mean_interval(values, [0, 0, 1, 1, 2, 2])
    hits = [float(batch[0] > 0.5) for batch in scores([result])[0]]
    assert result.ours["success"] == rate(hits, [0, 1, 2])
    assert result.seconds == 10


@pytest.mark.usefixtures("here")
def test_a_limit_that_does_not_exist_is_null() -> None:
    parsed = document(SMALL, measured(rows=[0], trials=1))
    estimate = parsed["rows"][0]["ours"]["value"]
    assert (estimate["low"], estimate["high"], estimate["n"]) == (None, None, 1)
    json.dumps(parsed, allow_nan=False)


@pytest.mark.usefixtures("here")
def test_a_trial_that_fails_is_no_zero(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = replace(SMALL, procedures={"ours": lambda method: {"fails": True}})
    monkeypatch.setitem(TABLES, "small", failing)  # type: ignore[arg-type]
    code, output, errors = command("small", "--rows", 1, "--trials", 12, "--workers", 1, "--json")
    (row,) = json.loads(output)["rows"]
    failed = errors.count("drew too little")
    assert code == 1
    assert 0 < failed < 12
    assert row["ours"]["success"]["n"] == 12 - failed
    assert row["ours"]["success"]["value"] == 1

    always = replace(SMALL, metrics=SMALL.metrics, trial=math.hypot)  # type: ignore[arg-type]
    (result,) = measured(always, rows=[0], trials=2)
    assert sorted(result.failures) == [0, 1]
    (row,) = document(always, [result])["rows"]
    assert row["ours"]["value"]["value"] is None
    assert (row["ours"]["success"]["n"], row["seconds"]) == (0, None)


@pytest.mark.usefixtures("here")
def test_json_is_all_there_is_on_standard_output(command: Command, tmp_path: Path) -> None:
    code, output, errors = command(
        "small", "--rows", "1,3", "--trials", 2, "--json", "--workers", 1, "--out", tmp_path / "new"
    )
    assert code == 0
    check_schema(json.loads(output), SMALL, [0, 2], trials=2)
    assert "4/4" in errors
    assert json.loads((tmp_path / "new" / "small.json").read_text()) == json.loads(output)
    trials = pd.read_csv(tmp_path / "new" / "small.csv")
    assert trials["row"].tolist() == [1, 1, 3, 3]
    assert trials["trial"].tolist() == [0, 1, 0, 1]
    kept = trials.groupby("row")["value"].mean()
    expected = [row["ours"]["value"]["value"] for row in json.loads(output)["rows"]]
    assert kept.tolist() == pytest.approx(expected)


@pytest.mark.usefixtures("here")
def test_a_table_for_people(command: Command) -> None:
    code, output, _ = command("small", "--workers", 1)
    assert code == 0
    for text in ("shift", "size", "value", "ours", "50 %", "1.5", "share of first draws", "Nobody"):
        assert text in output
    code, output, _ = command("small", "--rows", 2, "--workers", 1, "--procedure", "paper")
    assert "ours by the procedure 'paper'" in output


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", TABLES)
def test_every_column_fits_a_narrow_terminal(
    command: Command, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = dict.fromkeys(TABLES[name].datasets, (1, 8, 8))
    scored = replace(TABLES[name], trial=exact, datasets=shapes)
    monkeypatch.setitem(TABLES, name, scored)  # type: ignore[arg-type]
    for module in (reproduce_module, table_module):
        monkeypatch.setattr(module, "load_dataset", lambda *_: load_dataset("digits"))
    monkeypatch.setattr(table_module, "HUB_IDS", {})  # nothing is downloaded
    code, output, _ = command(name, "--trials", 2)
    assert code == 0
    assert "…" not in output
    assert all(len(line) <= 80 for line in output.splitlines())
    bounded = [metric for metric in scored.metrics.values() if not metric.brief]
    limits = r"\[[\d.]+,[\d.]+\]" + r" +\[[\d.]+,[\d.]+\]" * (len(bounded) - 1)
    assert len(re.findall(limits, output)) == len(scored.rows)
    assert len(re.findall(r"^ *\d+ .* 2 123\.4 *$", output, re.MULTILINE)) == len(scored.rows)


@pytest.mark.usefixtures("here")
def test_quick_takes_the_first_rows(command: Command) -> None:
    _, output, _ = command("small", "--quick", "--json", "--workers", 1)
    check_schema(json.loads(output), SMALL, [0], trials=2)
    _, output, _ = command("small", "--quick", "--rows", "3", "--json", "--workers", 1)
    check_schema(json.loads(output), SMALL, [2], trials=2)


@pytest.mark.usefixtures("here")
def test_quick_reduces_what_is_slow_and_says_so(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = replace(SMALL, reduced={"images": 1, "shift": 1000})
    monkeypatch.setitem(TABLES, "small", slow)  # type: ignore[arg-type]
    _, output, errors = command("small", "--quick", "--json")
    assert json.loads(output)["reduced"] == slow.reduced
    assert 1000 < json.loads(output)["rows"][0]["ours"]["value"]["value"] < 1001
    assert "--quick limits each batch to 1 images, 1,000 shift." in errors
    _, output, errors = command("small", "--json")
    assert "reduced" not in json.loads(output)
    assert json.loads(output)["rows"][0]["ours"]["value"]["value"] < 1
    assert "Quick" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown table 'nothing': choose one of spearpp-table1, "),
        (["small", "--rows", "7"], "rows must be numbers from 1 to 3 or ranges of them"),
        (["small", "--procedure", "mine"], "procedure of small must be one of ours, paper, got"),
        (["small", "--data", "no/such/folder"], "there is no folder no/such/folder: --data must"),
    ],
)
def test_mistakes_are_explained(command: Command, arguments: list[str], message: str) -> None:
    code, output, errors = command(*arguments)
    assert code == 2
    assert errors.startswith(f"Error: {message}")
    assert output == ""


def test_other_data_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "small", replace(SMALL, datasets={"digits": (3, 32, 32)}))  # type: ignore[arg-type]
    code, _, errors = command("small")
    assert code == 2
    assert "small needs digits, with images of shape (3, 32, 32)" in errors


def test_data_that_cannot_be_downloaded(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def offline(folder: Path) -> Dataset:
        raise ValueError(f"cannot download to {folder}")

    monkeypatch.setitem(DATASETS, "cifar10", offline)
    code, _, errors = command("spearpp-table1", "--data", tmp_path)
    assert code == 2
    assert f"cannot download to {tmp_path}" in errors
    assert "spearpp-table1 needs cifar10: give a folder with its images in train/ and" in errors


@contextmanager
def process(folder: Path, trial: str) -> Iterator[subprocess.Popen[str]]:
    """Start `reproduce` of the small table, with other trials, as a process of its own."""
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's `&` has it ignored
        "from leakfrontier.evaluate.commands import main as cli\n"
        "from leakfrontier.evaluate.papers import tables\n"
        "from test_reproduce import SMALL\n"
        f"from reproduce_jobs import {trial} as trial\n"
        "from dataclasses import replace\n"
        "tables.TABLES['small'] = replace(SMALL, trial=trial)\n"
        "sys.argv = ['leakfrontier', 'reproduce', 'small', '--workers', '1', '--json']\n"
        "sys.argv += ['--procedure', 'paper']\n"
        "cli.main()\n"
    )
    path = folder / "script.py"
    path.write_text(f"if __name__ == '__main__':\n    exec({script!r})\n")
    tests = f"{Path(__file__).parent}:{Path(__file__).parents[2] / 'support'}"
    with subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}",
            "STARTED": str(folder),
        },
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_c_ends_the_command_and_its_workers(tmp_path: Path) -> None:
    """Interrupted as a terminal would: the whole group at once."""
    with process(tmp_path, "wait") as started:
        wait_for(lambda: bool(list(tmp_path.glob("*.pid"))))
        (worker,) = (int(path.stem) for path in tmp_path.glob("*.pid"))
        os.killpg(started.pid, signal.SIGINT)
        _, errors = started.communicate(timeout=30)
    assert started.returncode == 130
    assert "Interrupted. The same command continues" in errors
    assert "Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def finished(folder: Path) -> int:
    try:
        return len(Store(folder / "runs" / "tables" / "small").finished())
    except StoreError:
        return -1


@pytest.mark.usefixtures("here")
def test_what_was_killed_goes_on_and_repeats_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "marks"
    with process(tmp_path, "mark") as started:
        wait_for(lambda: finished(tmp_path) >= 3)
        started.kill()
        started.communicate()
    kept = finished(tmp_path)
    assert 3 <= kept < 11
    marks.unlink()
    monkeypatch.setitem(TABLES, "small", replace(SMALL, trial=mark))  # type: ignore[arg-type]
    monkeypatch.setenv("STARTED", str(tmp_path))
    code, output, errors = command("small", "--workers", 1, "--json", "--procedure", "paper")
    assert code == 0, errors
    assert len(marks.read_text().splitlines()) == 11 - kept
    uninterrupted = document(SMALL, measured(procedure="paper"))
    assert json.loads(output) == json.loads(json.dumps(uninterrupted))


@pytest.mark.usefixtures("here")
def test_what_was_measured_is_not_measured_again(here: list[int], tmp_path: Path) -> None:
    first = reproduce(SMALL, [0], trials=2, out=tmp_path, console=quiet(), workers=1)
    again = reproduce(SMALL, [0, 1], trials=3, out=tmp_path, console=quiet(), workers=1)
    assert here == [2, 1]  # both rows are the same by our procedure
    assert scores(again)[0][:2] == scores(first)[0]
    reproduce(SMALL, [0], trials=2, seed=1, out=tmp_path, console=quiet(), workers=1)
    assert here == [2, 1, 2]


def test_a_folder_that_cannot_be_written_is_told_before_data_is_loaded(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce_module, "load_dataset", None)
    (tmp_path / "file").touch()
    code, _, errors = command("small", "--out", tmp_path / "file")
    assert code == 2
    assert f"cannot write to the folder {tmp_path / 'file'}" in " ".join(errors.split())


def test_noise_has_the_papers_scale_and_clipping_is_real(cifar10: Path) -> None:
    problem = {"C": 2, "sigma": 1e-3, "b": 20, "m": 50}
    upload = spearpp_upload(problem, load_dataset(str(cifar10)), torch.Generator().manual_seed(0))
    seen, model = upload.observation, upload.observation.model
    clipped = ClippedGradient(2).gradient(model, cross_entropy, upload.truth, torch.Generator())
    noise = torch.cat([(seen.update[name] - clipped[name]).flatten() for name in clipped])
    assert len(upload.truth.targets) == 20
    assert noise.std().item() == pytest.approx(1e-3, rel=0.01)
    assert noise.mean().abs().item() < 5 * 1e-3 / len(noise) ** 0.5


def test_fedavg_takes_the_papers_steps(cifar10: Path) -> None:
    problem = {"E": 3, "b_mini": 5, "b": 20, "m": 50}
    upload = spearpp_upload(problem, load_dataset(str(cifar10)), torch.Generator().manual_seed(0))
    assert upload.observation.protocol == FedAvg(epochs=3, batch_size=5, lr=0.01)


def test_psnr_of_batches_with_missing_guesses(cifar10: Path) -> None:
    data = load_dataset(str(cifar10))
    space, truth = data.space, data.space.to_inputs(data.train.inputs[:4])
    scored = matched_psnr(truth[[2, 0]], truth, space)
    mean = torch.tensor(data.space.mean).view(3, 1, 1).expand(4, 3, 32, 32)
    blind = metrics.psnr(mean, data.train.inputs[:4])
    assert (scored[[0, 2]] > 130).all()
    assert torch.allclose(scored[[1, 3]], blind[[1, 3]], atol=1e-4)
    assert torch.allclose(matched_psnr(truth[:0], truth, space), blind, atol=1e-4)


def test_the_smallest_row_is_recovered_by_any_number_of_workers(
    command: Command, cifar10: Path
) -> None:
    first, second = (
        json.loads(
            command(
                *("spearpp-table1", "--rows", "1,10", "--trials", 2, "--json"),
                *("--data", data, "--workers", workers, "--out", f"with-{workers}"),
            )[1]
        )
        for workers, data in ((1, cifar10), (2, cifar10.parent))
    )
    check_schema(first, TABLES["spearpp-table1"], [0, 9], trials=2)
    for row, again in zip(first["rows"], second["rows"], strict=True):
        assert row["ours"] == again["ours"]
        assert row["ours"]["accuracy"]["value"] == 1
        assert row["ours"]["recovered"]["value"] == 1
        assert row["ours"]["psnr"]["value"] > 100
