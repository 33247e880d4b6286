"""A task that is opened elsewhere does the same there, with nothing left where it came from."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from leakfrontier.evaluate.data.data import ARCHIVES, forget_digests
from leakfrontier.evaluate.engines.parcels import Parcel, open_parcel, pack
from leakfrontier.evaluate.foundations import plugins
from leakfrontier.evaluate.foundations.rows import Outcome
from leakfrontier.evaluate.outside.capture import Description, write_capture
from leakfrontier.evaluate.outside.capture_cells import CaptureTrial
from leakfrontier.evaluate.outside.captured import load_capture
from leakfrontier.evaluate.papers.table import TableTrial
from leakfrontier.evaluate.run.cells import AttackTrial, TrainTrial, Trial, run_trial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, Training

DEFENSE = """
from scale import STEP

@dataclass
class Rounded(Defense):
    def on_update(self, update, rng):
        return {name: (v / STEP).round() * STEP for name, v in update.items()}
"""
MODEL = """
from torch import nn

def build(space):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, space.classes))
"""


@pytest.fixture
def home(tmp_path: Path, user_file: Callable[..., Path]) -> Path:
    """Return a folder with a user's files and data."""
    home = tmp_path / "home"
    for label in ("a", "b"):
        (home / "images" / label).mkdir(parents=True)
        for number in range(12):
            pixels = np.random.default_rng([number, ord(label)]).integers(0, 255, (8, 8))
            image = Image.fromarray(pixels.astype(np.uint8))
            image.save(home / f"images/{label}/{number}.png")
    user_file(DEFENSE).rename(home / "mine.py")
    user_file(MODEL, header="").rename(home / "model.py")
    (home / "scale.py").write_text("STEP = 0.001\n")
    return home


@pytest.fixture
def scenario(home: Path) -> Scenario:
    return Scenario(
        dataset=str(home / "images"),
        model=Method(name=f"{home / 'model.py'}:build"),
        candidates=3,
        checkpoints=(0, 1),
        training=Training(rounds=1, clients=2, batch_size=4),
    )


def delivered(parcel: Parcel, folder: Path) -> dict[str, str]:
    """Unpack a parcel as a host does: from the paths that the task knows to where they are."""
    places = {}
    for path, (bundle, name) in parcel.bundles.items():
        with zipfile.ZipFile(io.BytesIO(bundle.read())) as archive:
            archive.extractall(folder / bundle.name)
        places[path] = str(folder / bundle.name / name)
    for name, path in parcel.checkpoints.items():
        (folder / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / "run" / name)
    if parcel.folder is not None:
        places[parcel.folder] = str(folder / "run")
    return places


def elsewhere(trial: Trial, out: Path, home: Path, there: Path) -> Outcome:
    """Do a task away from home, which is gone."""
    parcel = pack((trial, out))
    places = delivered(parcel, there)
    hidden = home.rename(home.with_name("hidden"))
    forget_digests()
    try:
        task = open_parcel(parcel.task, places)
        assert str(home) not in repr(task)
        return run_trial(task)
    finally:
        hidden.rename(home)
        forget_digests()


def test_cells_find_their_files_and_checkpoints(
    home: Path, scenario: Scenario, tmp_path: Path
) -> None:
    out = home / "out"
    defense = Method(name=f"{home / 'mine.py'}:Rounded")
    training = TrainTrial(scenario, defense, 0, logged=2)
    here = run_trial((training, out))
    there = elsewhere(training, out, home, tmp_path / "there")
    assert there.utility == here.utility
    for folder in ("checkpoints", "uploads"):
        left = {path.name for path in (tmp_path / "there/run" / folder).iterdir()}
        assert left == {path.name for path in (out / folder).iterdir()}
    attack = AttackTrial(
        scenario,
        defense,
        Method(name="LinearLeakage"),
        knows_defense=True,
        seed=0,
        checkpoint=1,
        observations=(0, 1),
    )
    rows = [outcome(attack, out, home, tmp_path) for outcome in (_here, _there)]
    assert rows[0] == rows[1]
    assert {row.observation for row in rows[0].attacks} == {0, 1}


def _here(trial: Trial, out: Path, home: Path, folder: Path) -> Outcome:
    return untimed(run_trial((trial, out)))


def _there(trial: Trial, out: Path, home: Path, folder: Path) -> Outcome:
    return untimed(elsewhere(trial, out, home, folder / "elsewhere"))


def untimed(outcome: Outcome) -> Outcome:
    attacks = tuple(replace(row, seconds=0.0) for row in outcome.attacks)
    return replace(outcome, attacks=attacks, busy=0.0)


@pytest.mark.usefixtures("gate")
def test_a_parcel_takes_along_what_is_trusted_and_no_more(
    home: Path, scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = TrainTrial(scenario, Method(name=f"{home / 'mine.py'}:Rounded"), 0)
    for named in ([scenario.model.name], [scenario.model.name, trial.defense.name]):
        monkeypatch.setattr(plugins, "_TRUSTED", set())
        plugins.trust(named)
        parcel = pack((trial, home / "out"))
        monkeypatch.setattr(plugins, "_TRUSTED", set())  # as on another machine
        task = open_parcel(parcel.task, delivered(parcel, tmp_path / str(len(named))))
        assert len(plugins.trusted()) == len(named)
        names = [task[0].scenario.model.name, task[0].defense.name]
        assert [*map(plugins.is_trusted, names)] == [True, len(named) == 2]


def test_another_code_than_the_parcel_s_is_noticed(
    home: Path, scenario: Scenario, tmp_path: Path
) -> None:
    parcel = pack((TrainTrial(scenario, Method(name=f"{home / 'mine.py'}:Rounded"), 0), home))
    assert not parcel.checkpoints
    trial = TrainTrial(scenario, Method(name=f"{home / 'mine.py'}:Rounded"), 0)
    assert trial.cell
    parcel = pack((trial, home))
    places = delivered(parcel, tmp_path / "there")
    next((tmp_path / "there").glob("code-*/scale.py")).write_text("STEP = 0.1\n")
    with pytest.raises(ValueError, match="a source file has changed"):
        run_trial(open_parcel(parcel.task, places))


def test_captures_travel(home: Path, tmp_path: Path) -> None:
    scenario = Scenario(dataset="digits")
    about = Description.model_validate(
        {
            "model": {"name": "mlp", "width": 8},
            "space": {"kind": "images", "shape": [1, 8, 8], "classes": 10},
            "batch_size": 1,
            "defense": "none",
        }
    )
    model = about.build()
    update = {name: value.detach() for name, value in model.named_parameters()}
    folder = write_capture(home / "one", about, weights=model.state_dict(), update=update)
    trial = CaptureTrial(
        captures=(folder,),
        contents=(load_capture(folder).content,),
        names=("one",),
        observations=(0,),
        about=about,
        adversary=Method(name="LinearLeakage"),
        knows_defense=True,
        control=False,
        scored=False,
    )
    assert scenario
    rows = [outcome(trial, home / "out", home, tmp_path) for outcome in (_here, _there)]
    assert rows[0] == rows[1]
    assert rows[0].attacks


def test_downloads_travel_whatever_their_folder(tmp_path: Path) -> None:
    place = tmp_path / "downloads"
    archive = place / ARCHIVES["cifar10"].archive
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"as downloaded")
    scenario = Scenario(dataset="cifar10", data_folder=place)
    trial = TrainTrial(scenario, Method(name="none"), 0)
    table = TableTrial("t", run_trial, "cifar10", {}, {}, 0, 0, place)  # type: ignore[arg-type]
    for task in (trial, table):
        parcel = pack((task, tmp_path / "out"))
        places = delivered(parcel, tmp_path / type(task).__name__)
        moved, _ = open_parcel(parcel.task, places)
        found = moved.data if isinstance(moved, TableTrial) else moved.scenario.data_folder
        assert (found / ARCHIVES["cifar10"].archive).read_bytes() == b"as downloaded"
        assert found != place
        assert moved.cell.key == task.cell.key


def test_other_tasks_are_left_alone() -> None:
    parcel = pack(("a", "b"))
    assert parcel.bundles == {}
    assert open_parcel(parcel.task, {}) == ("a", "b")


def test_data_of_tables_travels(home: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        shutil.copytree(home / "images", home / "data/cifar10" / split)
    save_file({}, home / "data/cifar10/not_an_example.safetensors")
    table = TableTrial("t", run_trial, "cifar10", {}, {}, 0, 0, home / "data")  # type: ignore[arg-type]
    parcel = pack((table, home / "out"))
    moved, _ = open_parcel(parcel.task, delivered(parcel, tmp_path / "there"))
    assert moved.data.is_relative_to(tmp_path / "there")
    assert len(list(moved.data.rglob("*.png"))) == 48
    assert not list(moved.data.rglob("*.safetensors"))
    assert moved.cell.key == table.cell.key
