from __future__ import annotations

import io
import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from leakfrontier.defenses import Batch, Defense
from leakfrontier.evaluate.conclude.results import Conclusions
from leakfrontier.evaluate.engines import engine
from leakfrontier.evaluate.foundations.rows import AttackRow, Outcome
from leakfrontier.evaluate.run.cells import AttackTrial, run_trial
from leakfrontier.evaluate.run.config import ConfigError, RunConfig, load_config
from leakfrontier.evaluate.run.run import _replaced, plan, run, run_trials
from leakfrontier.evaluate.run.store import Store, StoreError
from leakfrontier.evaluate.users.contract import Checked

Config = dict[str, Any]
UserFile = Callable[..., Path]

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")

TABLES = ("cells", "attacks", "scores", "utility", "renderings", "guarantees", "replays", "probes")


def records(results: Conclusions) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows, sorted, without the times: only in these may two runs differ."""
    tables = {}
    for name in TABLES:
        frame = getattr(results, name).drop(columns=["seconds", "busy"], errors="ignore")
        frame = frame.astype(object).where(frame.notna(), None)
        tables[name] = sorted(frame.itertuples(index=False, name=None), key=repr)
    return tables


def outcomes(config: Config, folder: Path) -> dict[str, Outcome]:
    """Return what the cells of a configuration leave behind, run in this process."""
    return {repr(trial): run_trial((trial, folder)) for trial in plan(load_config(config))}


def processes() -> dict[int, int]:
    """Return the parent of every process that is not dead."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue  # it has just ended
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    return parents


def descendants(pid: int) -> set[int]:
    parents, found = processes(), {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def finished(out: Path) -> int:
    """Return how many cells a run has finished; -1 if it has not begun."""
    try:
        return len(Store(out).finished())
    except StoreError:
        return -1


def kill_after(config: RunConfig, out: Path, *, cells: int, seconds: float) -> None:
    """Start a run and kill it, some seconds after it has finished a number of cells."""
    context = multiprocessing.get_context("forkserver")  # which has torch imported already
    context.set_forkserver_preload(["leakfrontier.evaluate.run.run"])
    process = context.Process(target=run, args=(config, out), kwargs={"workers": 2})
    process.start()
    assert process.pid is not None
    try:
        while finished(out) < cells and process.is_alive():
            time.sleep(0.02)
        time.sleep(seconds)
        started = descendants(process.pid)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL, "the run has ended before it was killed"
    deadline = time.monotonic() + 60
    while left := started & set(processes()):
        assert time.monotonic() < deadline, f"orphans {left} are still there"
        time.sleep(0.02)


@needs_proc
@pytest.mark.timeout(900)  # it starts about six processes that import torch
def test_a_run_killed_three_times_ends_with_the_rows_of_one_left_alone(
    tmp_path: Path, tiny: Config
) -> None:
    tiny["scenarios"][0]["checkpoints"] = [0, 4]
    tiny["scenarios"][0]["training"] |= {"batch_size": 1, "clients_per_round": 4}
    no_poisson = {"poisson_sampling": False}
    tiny["defenses"] = ["none", {"name": "DPSGD", "noise_multiplier": 0.1, **no_poisson}]
    tiny["defenses"] += [{"name": "TopK", "ratio": 0.2}]
    tiny["adversaries"] = ["PriorGuess", "LinearLeakage"]
    tiny["adversaries"] += [{"name": "InvertingGradients", "iterations": 10}]
    config = load_config(tiny)
    alone = run(config, tmp_path / "alone", workers=1)
    assert alone.cells["status"].value_counts().to_dict() == {"ok": 27 - 4, "not needed": 4}
    assert {name: len(getattr(alone, name)) for name in TABLES} == {
        "cells": 27,
        "attacks": 18 * 3,
        "scores": 2 * 18 * 3,
        "utility": 3 * 5,
        "renderings": 18 * 3,
        "guarantees": 1,
        "replays": 2,
        "probes": 2 + 2,  # of new clients and of trained ones
    }
    draws = random.Random(0)
    killed = tmp_path / "killed"
    kill_after(config, killed, cells=0, seconds=draws.uniform(0, 2))  # while workers start
    for cells in sorted(draws.sample(range(1, 20), 2)):
        kill_after(config, killed, cells=cells, seconds=draws.uniform(0, 0.3))
    assert 0 < finished(killed) < 25
    assert records(run(config, killed, workers=2)) == records(alone)


MISBEHAVIOUR = """
def mended():
    return Path(__file__).with_name("mended").exists()

class Raises(PriorGuess):
    def reconstruct(self, observation, rng):
        if not mended():
            raise RuntimeError("no luck")
        return super().reconstruct(observation, rng)

class ReturnsNaN(PriorGuess):
    def reconstruct(self, observation, rng):
        guess = super().reconstruct(observation, rng)
        return guess if mended() else Reconstruction(guess.inputs * torch.nan)

class Crashes(PriorGuess):
    def reconstruct(self, observation, rng):
        if not mended():
            os._exit(3)
        return super().reconstruct(observation, rng)

class Hangs(PriorGuess):
    def reconstruct(self, observation, rng):
        if not mended():
            time.sleep(600)
        return super().reconstruct(observation, rng)

class WrongNames(Defense):
    def on_update(self, update, rng):
        return update if mended() else {"weights": value for value in update.values()}

class WrongShapes(Defense):
    def gradient(self, model, loss, batch, rng):
        update = super().gradient(model, loss, batch, rng)
        return update if mended() else {name: value.flatten() for name, value in update.items()}

class Modifies(Defense):
    def on_update(self, update, rng):
        for value in update.values():
            if not mended():
                value.mul_(2)
        return update

class SpoilsBatch(Defense):
    def on_batch(self, batch, rng):
        return batch if mended() else Batch(batch.inputs * torch.nan, batch.targets)
"""


def unprobed(config: Config, out: Path, **options: Any) -> Conclusions:  # noqa: ANN401
    """Run methods whose faults a probe would have found."""
    loaded = load_config(config)
    return run_trials(plan(loaded), out, panel=loaded.panel, config=config, cascade=True, **options)


@pytest.mark.timeout(900)
def test_a_cell_that_fails_is_recorded_and_the_run_goes_on(
    tmp_path: Path, tiny: Config, user_file: UserFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = user_file(MISBEHAVIOUR), tmp_path / "out"
    reasons = {
        "WrongNames": "ValueError: WrongNames.on_update must return the parameters ['1.bias', ",
        "WrongShapes": "ValueError: WrongShapes.gradient must keep the shape (16, 64) of ",
        "Modifies": "ValueError: Modifies.on_update modified its argument: hooks must return new",
        "SpoilsBatch": "ValueError: the batch returned by SpoilsBatch.on_batch contains NaN",
        "Raises": "RuntimeError: no luck",
        "ReturnsNaN": "ValueError: ReturnsNaN returned NaN or infinite values",
        "Crashes": "worker died with exit code 3",
    }
    names = list(reasons)
    tiny["adversaries"] = [f"{file}:{name}" for name in names[4:]] + ["PriorGuess"]
    faulty = tiny | {"defenses": ["none"] + [f"{file}:{name}" for name in names[:4]]}
    cells = unprobed(faulty, out, workers=2).cells
    assert len(cells) == 5 * (1 + 4) + 4  # and the replays of defenses
    for cell in cells.to_dict("records"):
        culprit = cell["adversary"] if cell["defense"] == "none" else cell["defense"]
        if culprit not in reasons:  # undefended training, and the attack that works
            assert cell["status"] == "ok", cell["error"]
            continue
        kind = "crash" if culprit == "Crashes" else "error"
        assert (culprit, cell["status"]) == (culprit, kind)
        assert cell["error"].startswith(reasons[culprit])
        assert (kind == "error") == ("Traceback" in cell["error"])  # for who wrote the method

    # A limit that nothing else would keep to on a busy machine: only this cell is left to run.
    tiny["adversaries"] = [*tiny["adversaries"], f"{file}:Hangs"]
    hanging = unprobed(tiny, out, workers=1, time_limit=1).cells
    hanging = hanging[hanging["adversary"] == "Hangs"]
    assert hanging["status"].tolist() == ["timeout"]
    assert hanging["error"].tolist() == ["exceeded the time limit of 1 s"]

    (tmp_path / "mended").touch()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "execute", None)  # nothing is left to run
        again = unprobed(faulty, out).cells
    assert again["status"].tolist() == cells["status"].tolist()
    mended = load_config(faulty | {"adversaries": tiny["adversaries"]})
    retried = run(mended, out, workers=2, retry_failed=True).cells.set_index("cell")
    assert retried["status"].tolist() == ["ok"] * 34
    assert set(retried["error"]) == {""}
    kept = cells[cells["status"] == "ok"].set_index("cell")
    assert retried.loc[kept.index, "seconds"].tolist() == kept["seconds"].tolist()


def test_attacks_are_paired(tmp_path: Path, tiny: Config) -> None:
    tiny["defenses"] += [{"name": "TopK", "ratio": 0.2}]
    tiny["adversaries"] += ["LinearLeakage"]
    found = [o for o in outcomes(tiny, tmp_path).values() if o.attacks]
    assert len(found) == 4
    assert len({tuple(shown.truth for shown in o.renderings) for o in found}) == 1
    assert len({shown.truth for shown in found[0].renderings}) == 3


@pytest.mark.usefixtures("brief")
def test_a_title_changes_no_row(tmp_path: Path, tiny: Config) -> None:
    """Its cells have the same key, so they must have the same rows."""
    tiny["defenses"] = [{"name": "DPSGD", "noise_multiplier": 0.1}]
    tiny["adversaries"] = [{"name": "InvertingGradients", "iterations": 5}]

    def timeless(config: Config) -> list[Outcome]:
        return [
            replace(outcome, busy=0, attacks=[replace(row, seconds=0) for row in outcome.attacks])
            for outcome in outcomes(config, tmp_path).values()
        ]

    untitled = timeless(tiny)
    tiny["scenarios"][0]["title"] = "another name"
    assert timeless(tiny) == untitled


def test_an_attack_on_a_model_that_was_not_trained(tmp_path: Path, tiny: Config) -> None:
    tiny["scenarios"][0]["checkpoints"] = [2]
    (attack,) = (t for t in plan(load_config(tiny)) if isinstance(t, AttackTrial))
    with pytest.raises(ValueError, match="no log of the attacked uploads: training failed"):
        run_trial((attack, tmp_path))


def test_a_source_that_changes_during_a_run(
    tmp_path: Path, tiny: Config, user_file: UserFile
) -> None:
    code = "class Mine(Defense): pass\n"
    tiny["defenses"] = [f"{user_file(code)}:Mine"]
    trial = plan(load_config(tiny))[0]
    assert trial.cell.key  # the plan has been written
    assert run_trial((trial, tmp_path)).status == "ok"
    user_file(code + "# edited\n")
    with pytest.raises(ValueError, match="has changed since the run began"):
        run_trial((trial, tmp_path))


def attack_rows(tiny: Config, folder: Path, file: Path) -> tuple[AttackRow, ...]:
    tiny["adversaries"] = [f"{file}:Mine"]
    (attack,) = (t for t in plan(load_config(tiny)) if isinstance(t, AttackTrial))
    return run_trial((attack, folder)).attacks


def test_scores_are_plain_numbers_whatever_the_attack_gives(
    tmp_path: Path, tiny: Config, user_file: UserFile
) -> None:
    code = """
class Mine(PriorGuess):
    def reconstruct(self, observation, rng):
        guess = super().reconstruct(observation, rng).inputs.double().requires_grad_()
        return Reconstruction(guess, torch.tensor([3]), torch.tensor(0.5))

    def objective(self, observation, inputs, targets):
        return torch.tensor(torch.nan)
"""
    rows = attack_rows(tiny, tmp_path, user_file(code))
    assert [type(row.objective) for row in rows] == [float] * 3
    assert [row.objective_at_truth for row in rows] == [None] * 3
    store = Store(tmp_path, create=True)
    store.write("key", Outcome(attacks=rows), 1.0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "Mine must return a Reconstruction, got NoneType"),
        (
            "return Reconstruction(torch.zeros(1, 3, 3))",
            r"Mine must return inputs of shape \(1, 8, 8\), got \(3, 3\)",
        ),
        (
            "return Reconstruction(torch.full((1, 1, 8, 8), torch.inf))",
            "Mine returned NaN or infinite values",
        ),
    ],
)
def test_an_attack_that_returns_nonsense(
    tmp_path: Path, tiny: Config, user_file: UserFile, body: str, message: str
) -> None:
    code = (
        f"class Mine(PriorGuess):\n    def reconstruct(self, observation, rng):\n        {body}\n"
    )
    with pytest.raises(ValueError, match=message):
        attack_rows(tiny, tmp_path, user_file(code))


def test_an_attack_that_leaves_observations_out(
    tmp_path: Path, tiny: Config, user_file: UserFile
) -> None:
    code = "class Mine(PriorGuess):\n    def reconstruct_all(self, observations, rngs): return []\n"
    with pytest.raises(ValueError, match=r"Mine.reconstruct_all must return 3 results, got 0"):
        attack_rows(tiny, tmp_path, user_file(code))


def test_an_attack_that_is_not_applicable(
    tmp_path: Path, tiny: Config, user_file: UserFile
) -> None:
    code = """
class Mine(PriorGuess):
    def reconstruct(self, observation, rng):
        raise NotApplicable("the moon is not full")
"""
    rows = attack_rows(tiny, tmp_path, user_file(code))
    reason = {"outcome": "not applicable", "reason": "the moon is not full"}
    assert rows == tuple(AttackRow(i, 0, **reason) for i in range(3))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_private_batch_must_be_finite(value: float) -> None:
    batch = Batch(torch.full((2, 1, 8, 8), value), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="the private batch contains NaN or infinite values"):
        Checked(Defense()).on_batch(batch, torch.Generator())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "nope"}, "dataset must be one of fashion-mini, digits, mnist, .*'nope'"),
        ({"dataset": "no/such/folder"}, "there is no folder or file no/such/folder"),
        (
            {"model": "nope"},
            "model must be one of mlp, linear, cnn, tanh_cnn, lenet, resnet18, .*'nope'",
        ),
        ({"model": {"name": "mlp", "widht": 3}}, "'widht'; its options are width=200"),
        ({"model": {"name": "mlp", "width": "a"}}, "mlp cannot be built with width=a"),
        ({"model": "math:sqrt"}, "scenario digits/sqrt: "),
    ],
)
def test_what_makes_every_cell_fail_is_told_at_once(
    tmp_path: Path, tiny: Config, change: Config, message: str
) -> None:
    tiny["scenarios"][0] |= change
    with pytest.raises(ConfigError, match=message):
        run(load_config(tiny), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def image_folder(folder: Path, **counts: int) -> Path:
    draws = np.random.default_rng(0)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = draws.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


def test_an_empty_class(tmp_path: Path, tiny: Config) -> None:
    tiny["scenarios"][0]["dataset"] = str(image_folder(tmp_path / "images", cat=9, dog=0))
    with pytest.raises(ConfigError, match=r"images/dog holds no images"):
        run(load_config(tiny), tmp_path / "out")


def test_a_class_too_small_for_look_alikes(tmp_path: Path, tiny: Config) -> None:
    folder = str(image_folder(tmp_path / "images", cat=50, dog=10))
    tiny["scenarios"][0] |= {"dataset": folder, "batch_size": 8}
    with pytest.raises(ConfigError, match=r"class 1 of .* has 8 training examples: .* at least 9"):
        run(load_config(tiny), tmp_path / "out")


def test_a_small_class_limits_the_look_alikes(tmp_path: Path, tiny: Config) -> None:
    folder = str(image_folder(tmp_path / "images", cat=50, dog=10))
    tiny["scenarios"][0] |= {"dataset": folder, "batch_size": 2}
    _, attack = outcomes(tiny, tmp_path).values()
    assert {row.candidates for row in attack.attacks} == {7}  # 8 dogs, less the other victim


def test_more_observations_than_examples(tmp_path: Path, tiny: Config) -> None:
    tiny |= {"observations": 10_000}
    attack = plan(load_config(tiny))[-1]
    with pytest.raises(ValueError, match="10000 observations of 1 examples need 10000 training"):
        run_trial((attack, tmp_path))


@pytest.mark.parametrize(
    ("change", "training", "message"),
    [
        ({"observations": 10**9}, {}, "observations must be at most 1438, got 1000000000: digits"),
        ({}, {"clients": 100_000}, "training.clients must be at most 1438, got 100000: digits"),
        (
            {"defenses": ["none", {"name": "SecureAggregation", "clients": 2000}]},
            {},
            r"SecureAggregation\(clients=2000\): the server sees 2000 clients with 1 examples each",
        ),
    ],
)
def test_more_than_the_data_allow_is_refused_before_the_first_cell(
    tmp_path: Path, tiny: Config, change: Config, training: Config, message: str
) -> None:
    tiny["scenarios"][0]["training"] |= training
    with pytest.raises(ConfigError, match=message):
        run(load_config(tiny | change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_buffer_larger_than_the_clients(tmp_path: Path, tiny: Config) -> None:
    tiny["scenarios"][0]["protocol"] = {"name": "FedBuff", "buffer": 5}
    with pytest.raises(ConfigError, match=r"training.clients must be at least 5, .* got 4"):
        run(load_config(tiny), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"time_limit": 300}, ""),
        ({"observations": 2}, "observations differ"),
        ({"seeds": 2, "observations": 2}, "seeds, observations differ"),
    ],
)
def test_another_configuration_in_the_folder_is_said(
    tmp_path: Path, tiny: Config, change: Config, said: str
) -> None:
    before, now = load_config(tiny), load_config(tiny | change)
    Store(tmp_path, create=True).begin(before.panel, before.model_dump(mode="json"), [])
    assert [said in note for note in _replaced(tmp_path, now)] == [True] * bool(said)
    assert [*_replaced(tmp_path / "new", now)] == []


def test_what_becomes_of_an_older_report_is_said_first(tmp_path: Path, tiny: Config) -> None:
    before, console = load_config(tiny | {"seeds": 2}), Console(file=io.StringIO(), width=1000)
    Store(tmp_path, create=True).begin(before.panel, before.model_dump(mode="json"), [])
    run(load_config(tiny), tmp_path, workers=1, console=console)
    said, _, progress = console.file.getvalue().partition("\n")  # type: ignore[attr-defined]
    assert "report.html will show only this configuration" in said
    assert "To keep both pages, choose another --out folder" in said
    assert "cells" in progress


def test_results_of_another_panel_are_not_continued(tmp_path: Path, tiny: Config) -> None:
    Store(tmp_path, create=True).begin("2020.1", {}, [])
    with pytest.raises(StoreError, match=r"panel '2020.1', this is panel 'custom"):
        run(load_config(tiny), tmp_path)
