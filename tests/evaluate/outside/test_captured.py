"""What is wrong with a capture is said, whatever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

from leakfrontier.adversaries import ImageSpace
from leakfrontier.evaluate.outside.capture import CaptureError, Description, write_capture
from leakfrontier.evaluate.outside.captured import find_captures, load_capture

Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    about = Description.model_validate(
        {
            "model": {"name": "mlp", "width": 8},
            "space": ImageSpace((1, 4, 4), 3),
            "batch_size": 2,
            "dataset": "digits",
        }
    )
    model = about.build()
    update = {name: value.detach() for name, value in model.named_parameters()}
    truth = torch.rand(2, 1, 4, 4), torch.tensor([0, 1])
    return write_capture(
        tmp_path / "one", about, weights=model.state_dict(), update=update, truth=truth
    )


def described(**changes: Any) -> Change:  # noqa: ANN401 - whatever a file may hold
    def change(folder: Path) -> None:
        content = json.loads((folder / "capture.json").read_text())
        content.update(changes)
        (folder / "capture.json").write_text(json.dumps(content))

    return change


def tensors(file: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        content = load((folder / f"{file}.safetensors").read_bytes())
        edit(content)
        save_file(content, folder / f"{file}.safetensors")

    return change


def pickled(folder: Path) -> None:
    torch.save({"1.bias": torch.zeros(8)}, folder / "update.safetensors")


def outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")


BROKEN: dict[str, tuple[Change, str]] = {
    "no model": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "no update": (lambda f: (f / "update.safetensors").unlink(), "has no update.safetensors"),
    "no JSON": (lambda f: (f / "capture.json").write_text("{"), "cannot be read as JSON"),
    "a list": (lambda f: (f / "capture.json").write_text("[]"), "must hold an object"),
    "an unknown key": (described(colour="red"), "unknown key 'colour'; the keys are model"),
    "an unknown model": (described(model="vit"), "model must be one of mlp, linear"),
    "an unknown option": (described(model={"name": "mlp", "depth": 2}), "its options are width"),
    "another model": (
        described(model="mlp"),
        r"'1.bias' of shape \(8,\), but the described model's weights have \(200,\)",
    ),
    "a model of other names": (described(model="lenet"), "does not have the described model's"),
    "an unknown defense": (described(defense="Shield"), "unknown defense 'Shield'"),
    "an unknown protocol": (described(protocol="FedX"), "unknown protocol 'FedX'"),
    "an unknown dataset": (described(dataset="/etc"), "give other data as a path with --dataset"),
    "no examples": (described(batch_size=0), "batch_size.*must be at least 1"),
    "too few labels": (described(labels=[1]), "labels must be 2, one per private example"),
    "a path that leaves": (described(model="../mine.py:build"), "leaves the folder"),
    "an absolute path": (described(model="/tmp/mine.py:build"), "leaves the folder"),
    "a file that is not there": (described(model="mine.py:build"), "has no mine.py"),
    "code": (described(model="os.path:join"), "only with --trust-code"),
    "code of a defense": (described(defense="os.path:join"), "only with --trust-code"),
    "code of a protocol": (described(protocol="os.path:join"), "only with --trust-code"),
    "a protocol's file outside": (described(protocol="../mine.py:P"), "leaves the folder"),
    "a link that leaves": (outside, "'model.safetensors' leaves the folder"),
    "a pickle": (pickled, "looks like a pickle"),
    "noise": (
        lambda f: (f / "update.safetensors").write_bytes(bytes(100)),
        "is not a safetensors file",
    ),
    "a name too many": (
        tensors("update", lambda t: t.update(more=torch.zeros(1))),
        "the model's parameters: more unknown",
    ),
    "a name too few": (tensors("update", lambda t: t.pop("1.bias")), "1.bias missing"),
    "a wrong shape": (
        tensors("update", lambda t: t.update({"1.bias": torch.zeros(9)})),
        r"'1.bias' of shape \(9,\), but the model's parameters have \(8,\)",
    ),
    "NaN": (
        tensors("update", lambda t: t["1.bias"].fill_(torch.nan)),
        "NaN or infinite values in '1.bias'",
    ),
    "infinite weights": (
        tensors("model", lambda t: t["1.bias"].fill_(torch.inf)),
        "NaN or infinite values in '1.bias'",
    ),
    "a truth of another shape": (
        tensors("truth", lambda t: t.update(inputs=torch.zeros(2, 1, 5, 5))),
        r"must hold inputs of shape \(2, 1, 4, 4\)",
    ),
    "a truth of another size": (
        tensors("truth", lambda t: t.update(targets=torch.zeros(3).long())),
        "and as many targets",
    ),
    "a truth without labels": (
        tensors("truth", lambda t: t.pop("targets")),
        "must hold inputs and targets, got inputs",
    ),
    "labels that there are not": (
        tensors("truth", lambda t: t.update(targets=torch.tensor([0, 3]))),
        "targets that are not from 0 to 2",
    ),
}


def test_the_capture_is_sound_before_it_is_broken(folder: Path) -> None:
    assert load_capture(folder).about.batch_size == 2


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_capture_is_explained(folder: Path, case: str) -> None:
    change, message = BROKEN[case]
    change(folder)
    with pytest.raises(CaptureError, match=message):
        load_capture(folder)


def test_captures_are_found_below_a_folder(folder: Path) -> None:
    assert find_captures(folder) == [folder]
    assert find_captures(folder.parent) == [folder]
    (folder / "capture.json").unlink()
    with pytest.raises(
        CaptureError, match=r"contains no capture. A capture is a folder with capture\.json"
    ):
        find_captures(folder.parent)
    with pytest.raises(CaptureError, match="there is no folder"):
        find_captures(folder / "nothing")
