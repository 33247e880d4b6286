"""What is said of data and models before the first cell, and what is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from vision_transformer import VISION_TRANSFORMER

from leakfrontier.evaluate.run import soundness
from leakfrontier.evaluate.run.soundness import Work, notes
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, load_world

UserFile = Callable[..., Path]

MODELS = """
from torch import nn

class Odd(nn.Module):
    def forward(self, values):
        heads = values[:, None, :, None].expand(-1, 1, -1, 8).contiguous()
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(heads, heads, heads)[0].mean(dim=(1, 3))

class Noise(nn.Module):
    def forward(self, values):
        return values + torch.randn_like(values) if self.training else values

class Block(nn.Sequential):
    pass

LAST = {
    "softmax": [nn.Softmax(dim=1)],
    "log-softmax": [nn.LogSoftmax(dim=1)],
    "sigmoid": [nn.Sigmoid()],
    "dropout": [nn.Dropout(0.01)],
    "no dropout": [nn.Dropout(0.0)],
    "noise": [Noise()],
    "fused": [Block(nn.Tanh(), Odd())],
}

def build(space, kind="plain"):
    if kind == "seeded":
        torch.manual_seed(3)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, space.classes), *LAST.get(kind, [])
    )

INSTANCE = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def shared(space):
    return INSTANCE
"""


def found(model: Method, work: Work | None = None, **options: Any) -> list[str]:  # noqa: ANN401
    scenario = Scenario(**{"dataset": "digits", "model": model, "candidates": 5, **options})
    return [*notes(load_world(scenario), work)]


@pytest.fixture
def own(user_file: UserFile) -> Callable[..., Method]:
    """Return a function that names a model of the user's."""

    def name(kind: str = "plain", function: str = "build") -> Method:
        options = {"kind": kind} if function == "build" else {}
        return Method(name=f"{user_file(MODELS)}:{function}", options=options)

    return name


@pytest.mark.parametrize("kind", ["plain", "sigmoid", "no dropout"])
def test_nothing_is_said_of_usual_models(own: Callable[..., Method], kind: str) -> None:
    assert found(own(kind)) == []


@pytest.mark.parametrize("name", ["mlp", "lenet", "cnn"])
def test_nothing_is_said_of_ours(name: str) -> None:
    assert found(Method(name=name), Work(20, "InvertingGradients", 300, 600.0)) == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("softmax", "returns probabilities (a softmax), and the loss applies a second softmax"),
        ("log-softmax", "returns logarithms of probabilities (a log-softmax)"),
        ("seeded", "returns the same weights for every seed"),
        ("dropout", "dropout (Dropout) is switched off, because clients train in evaluation mode."),
        ("noise", "behaviour that only training mode has is switched off"),
    ],
)
def test_what_surprises_is_warned_of(own: Callable[..., Method], kind: str, message: str) -> None:
    (note,) = found(own(kind))
    assert message in note


def test_training_mode_is_stated(own: Callable[..., Method]) -> None:
    (note,) = found(own("dropout"), mode="train")
    assert "clients train in training mode, with dropout (Dropout)" in note


def test_a_factory_that_returns_one_object(own: Callable[..., Method]) -> None:
    with pytest.raises(ValueError, match=r"returns the same object at every call.*Create a new"):
        found(own(function="shared"))


def test_a_model_in_place_of_a_factory(own: Callable[..., Method]) -> None:
    with pytest.raises(ValueError, match=r"INSTANCE is a model, not a function.*\n.*def build"):
        found(own(function="INSTANCE"))


def test_who_cannot_be_differentiated_twice_is_named(own: Callable[..., Method]) -> None:
    words = "cannot be differentiated twice, but attacks need this: 4.1 (Odd): "
    with pytest.raises(ValueError, match=re.escape(words)):
        found(own("fused"))


@pytest.mark.parametrize("kind", ["layer", "attention", "function", "torchvision"])
def test_attention_can_be_differentiated_twice(user_file: UserFile, kind: str) -> None:
    method = Method(name=f"{user_file(VISION_TRANSFORMER)}:build", options={"kind": kind})
    assert found(method) == []
    dropping = method.model_copy(update={"options": {"kind": kind, "dropout": 0.1}})
    assert ["is switched off" in note for note in found(dropping)] == [True] * (kind != "function")


def pictures(folder: Path, classes: str, modes: tuple[str, ...] = ("L",)) -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(10):
            tones = bytes((7 * number + ord(name) + i) % 256 for i in range(64))
            image = Image.frombytes("L", (8, 8), tones)
            image.convert(modes[number % len(modes)]).save(folder / name / f"{number}.png")
    return folder


def test_one_class_is_refused(tmp_path: Path) -> None:
    mlp = Method(name="mlp", options={"width": 8})
    with pytest.raises(ValueError, match=r"has examples of one class only.*at least two classes"):
        found(mlp, dataset=str(pictures(tmp_path / "one", "a")))
    assert found(mlp, dataset=str(pictures(tmp_path / "two", "ab"))) == []


def test_grey_among_colours_is_warned_of(tmp_path: Path) -> None:
    mlp = Method(name="mlp", options={"width": 8})
    mixed = pictures(tmp_path / "mixed", "ab", ("L", "RGB"))
    (note,) = found(mlp, dataset=str(mixed))
    assert note.startswith("mixed: 10 of 20 images are grey, the others are coloured")
    colours = pictures(tmp_path / "colours", "ab", ("RGB", "RGB"))
    assert found(mlp, dataset=str(colours)) == []


def test_what_takes_too_long_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soundness, "_seconds", lambda *_: 0.1)
    training = {"rounds": 10, "clients": 4, "clients_per_round": 4}
    mlp = Method(name="mlp", options={"width": 8})
    work = Work(20, "InvertingGradients", 300, 600.0)
    assert found(mlp, work, training=training) == []
    twice = Work(21, "InvertingGradients", 300, 600.0)
    (note,) = found(mlp, twice, training=training)
    assert "InvertingGradients on 21 uploads will take about 10 minutes" in note
    assert "Resize the inputs (1 x 8 x 8)" in note
    (note,) = found(mlp, work, training=training | {"rounds": 1501})
    assert ": training will take about 10 minutes" in note
    local = Method(name="FedAvg", options={"epochs": 2, "batch_size": 1, "lr": 0.1})
    said = found(mlp, Work(11, "SME", 300, 600.0), protocol=local, training=training)
    assert [note.partition(" will")[0].rpartition(": ")[2] for note in said] == [
        "training",
        "SME on 11 uploads",
    ]


def test_the_global_generator_is_left_alone(own: Callable[..., Method]) -> None:
    found(own("dropout"))  # loading the file draws weights
    before = torch.get_rng_state()
    found(own("dropout"))
    assert torch.equal(torch.get_rng_state(), before)
