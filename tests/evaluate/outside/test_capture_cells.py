from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leakfrontier.defenses import Batch
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.outside.capture import CaptureError, Description
from leakfrontier.evaluate.outside.capture_cells import NOT_STATED, CaptureTrial, world_of
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, load_world

DIGITS = load_world(Scenario(dataset="digits"))
TOPK = Method(name="TopK", options={"ratio": 0.3})


def about(**change: Any) -> Description:  # noqa: ANN401
    return Description.model_validate(
        {
            "model": Method(name="mlp", options={"width": 16}),
            "space": DIGITS.space,
            "batch_size": 2,
            "dataset": "digits",
            "defense": TOPK,
        }
        | change
    )


def trial(**change: Any) -> CaptureTrial:  # noqa: ANN401
    given = {
        "captures": (Path("uploads/1"),),
        "contents": ("hash",),
        "names": ("uploads/1",),
        "observations": (0,),
        "about": about(),
        "adversary": Method(name="LinearLeakage"),
        "knows_defense": True,
        "control": False,
        "scored": True,
    }
    return CaptureTrial(**given | change)


def of(truth: Batch | None) -> Any:  # noqa: ANN401
    return SimpleNamespace(truth=truth)


def test_victims_are_found_among_the_data_and_others_are_put_there() -> None:
    known = DIGITS.train.at(torch.tensor([5, 3]))
    new = Batch(torch.zeros_like(known.inputs[:1]), known.targets[:1])
    relabelled = Batch(known.inputs[:1], (known.targets[:1] + 1) % 10)
    pair = Batch(torch.stack([new.inputs[0] + 1, new.inputs[0] + 2]), known.targets)
    captures = [of(known), of(new), of(relabelled), of(None), of(new), of(pair)]
    world, victims = world_of(trial().scenario, about(), captures)
    size = len(DIGITS.train.targets)
    found = [rows.tolist() for rows in victims]
    assert found == [[5, 3], [size], [size + 1], [], [size], [size + 2, size + 3]]
    assert len(world.train.targets) == size + 4
    for capture, rows in zip(captures, victims, strict=True):
        if capture.truth is not None:
            assert torch.equal(world.train.inputs[rows], capture.truth.inputs)
            assert torch.equal(world.train.targets[rows], capture.truth.targets)


def test_without_data_there_is_an_empty_world() -> None:
    world, victims = world_of(trial().scenario, about(dataset=None), [of(None), of(None)])
    assert world.train.inputs.shape == (0, *DIGITS.space.shape)
    assert [len(rows) for rows in victims] == [0, 0]


def test_data_of_another_kind_is_refused() -> None:
    other = load_dataset("fashion-mini").space
    with pytest.raises(CaptureError, match=r"but those of the capture shape \(1, 28, 28\)"):
        world_of(trial().scenario, about(space=other), [])


def test_the_scenario_is_what_the_capture_says() -> None:
    scenario = trial(candidates=7).scenario
    assert (scenario.dataset, scenario.batch_size, scenario.candidates) == ("digits", 2, 7)
    assert (scenario.knows_targets, scenario.public_data) == (False, True)
    told = trial(about=about(dataset=None, labels=[1, 2])).scenario
    assert (told.dataset, told.knows_targets, told.public_data) == ("no data", True, False)


def test_a_defense_that_is_not_stated_is_called_so_but_for_the_control() -> None:
    assert trial().cell.labels["defense"] == "TopK(ratio=0.3)"
    silent = trial(about=about(defense=None))
    assert silent.defense == Method(name="none")
    assert (silent.cell.labels["defense"], silent.cell.labels["family"]) == (NOT_STATED,) * 2
    control = trial(about=about(defense=None), control=True)
    assert control.cell.labels["defense"] == "none"
    assert trial(control=True).defense == Method(name="none")


@pytest.mark.parametrize(
    "change",
    [
        {"contents": ("other",)},
        {"observations": (1,)},
        {"adversary": Method(name="PriorGuess")},
        {"knows_defense": False},
        {"control": True},
        {"scored": False},
        {"candidates": 5},
        {"seed": 1},
        {"about": about(defense=None)},
        {"about": about(dataset=None)},
    ],
    ids=str,
)
def test_the_key_depends_on_what_the_outcome_does(change: dict[str, Any]) -> None:
    assert replace(trial(), **change).cell.key != trial().cell.key


def test_the_key_does_not_depend_on_where_captures_are() -> None:
    moved = trial(captures=(Path("/elsewhere/uploads/1"),), device="auto")
    assert moved.cell.key == trial().cell.key
    assert moved.cell.labels["captures"] == ("uploads/1",)


def test_a_capture_that_changed_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = SimpleNamespace(content="other")
    monkeypatch.setattr(
        "leakfrontier.evaluate.outside.capture_cells.load_capture", lambda *_, **__: changed
    )
    with pytest.raises(ValueError, match="has changed since the attack began: start it again"):
        trial().run(tmp_path)
