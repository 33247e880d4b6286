from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import ImageSpace, TokenSpace, WaveSpace
from leakfrontier.defenses import Batch, batch_gradient
from leakfrontier.evaluate.foundations.plugins import trust
from leakfrontier.evaluate.outside.capture import CaptureError, Description, capture, write_capture
from leakfrontier.evaluate.outside.captured import load_capture
from leakfrontier.evaluate.users.methods import Method

SPACE = ImageSpace((1, 4, 4), 3, (0.2,), (0.5,))
FACTORY = """
from layers import last

def build(space, width=5):
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), last(width, space.classes))
"""


def described(**options: object) -> Description:
    given = {"model": {"name": "mlp", "width": 8}, "space": SPACE, "batch_size": 2, **options}
    return Description.model_validate(given)


@pytest.fixture
def batch() -> Batch:
    rng = torch.Generator().manual_seed(0)
    return Batch(torch.randn(2, 1, 4, 4, generator=rng), torch.tensor([0, 2]))


def test_a_sum_is_of_as_many_clients_as_the_protocol() -> None:
    summed = {"name": "SecureAggregation", "clients": 4}
    assert (
        described(defense=summed, protocol={"name": "FedSGD", "clients": 4}).training.clients == 4
    )
    for clients in (1, 3):
        protocol = {"name": "FedSGD", "clients": clients}
        with pytest.raises(ValueError, match=f"sum of 4 clients, but the protocol is of {clients}"):
            described(defense=summed, protocol=protocol)


def test_a_gradient_is_captured_in_three_lines(tmp_path: Path, batch: Batch) -> None:
    about = described()
    model = about.build()
    with capture(model, tmp_path / "one", about, truth=batch):
        cross_entropy(model(batch.inputs), batch.targets).backward()
    found = load_capture(tmp_path / "one")
    expected = batch_gradient(model, cross_entropy, batch)
    assert found.update.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found.update[name], value)
    assert found.truth is not None
    assert all(map(torch.equal, found.truth, batch))
    assert found.about.inputs == SPACE
    for name, value in model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value)


DROPPING = """
from torch import nn

def build(space):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, space.classes))
"""


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_captured_where_it_matters(
    tmp_path: Path, batch: Batch, user_file: Callable[..., Path], training: bool
) -> None:
    dropping, usual = described(model=f"{user_file(DROPPING)}:build"), described()
    expected = [(dropping, "train" if training else "eval"), (usual, "eval")]
    for number, (about, mode) in enumerate(expected):
        model = about.build().train(training)
        with capture(model, tmp_path / str(number), about):
            cross_entropy(model(batch.inputs), batch.targets).backward()
        found = load_capture(tmp_path / str(number), trust_code=True)
        assert found.about.mode == mode
        assert found.model.training is (mode == "train")


def test_a_mode_that_is_stated_is_kept(
    tmp_path: Path, batch: Batch, user_file: Callable[..., Path]
) -> None:
    about = described(model=f"{user_file(DROPPING)}:build", mode="eval")
    model = about.build().train()
    with capture(model, tmp_path / "one", about):
        cross_entropy(model(batch.inputs), batch.targets).backward()
    assert load_capture(tmp_path / "one", trust_code=True).about.mode == "eval"


def test_weights_that_change_are_captured_as_their_change(tmp_path: Path, batch: Batch) -> None:
    about = described(protocol={"name": "FedAvg", "epochs": 2, "batch_size": 2, "lr": 0.5})
    model = about.build()
    before = [value.clone() for value in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with capture(model, tmp_path / "one", about):
        for _ in range(2):
            optimizer.zero_grad()
            cross_entropy(model(batch.inputs), batch.targets).backward()
            optimizer.step()
    found = load_capture(tmp_path / "one")
    for update, old, new in zip(found.update.values(), before, model.parameters(), strict=True):
        assert torch.equal(update, new - old)
    for value, old in zip(found.model.parameters(), before, strict=True):
        assert torch.equal(value, old)
    assert found.truth is None


def test_no_file_is_a_pickle(tmp_path: Path, batch: Batch) -> None:
    about = described()
    weights = about.build().state_dict()
    folder = write_capture(tmp_path / "one", about, weights=weights, update=weights, truth=batch)
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "capture.json",
        "model.safetensors",
        "update.safetensors",
        "truth.safetensors",
    }
    assert json.loads((folder / "capture.json").read_text())["space"]["kind"] == "images"


@pytest.mark.usefixtures("gate")
def test_a_factory_of_ones_own_travels_and_runs_only_if_it_is_trusted(
    tmp_path: Path, batch: Batch
) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    (tmp_path / "layers.py").write_text(
        "from torch import nn\n\ndef last(width, classes):\n    return nn.Linear(width, classes)\n"
    )
    about = described(model={"name": f"{tmp_path / 'mine.py'}:build", "width": 6})
    trust(about.code)
    model = about.build()
    with capture(model, tmp_path / "one", about):
        cross_entropy(model(batch.inputs), batch.targets).backward()
    with pytest.raises(CaptureError, match="only with --trust-code"):
        load_capture(tmp_path / "one")
    (tmp_path / "mine.py").unlink()
    found = load_capture(tmp_path / "one", trust_code=True)
    assert Path(found.about.model.name.rpartition(":")[0]).parent == tmp_path / "one"
    assert found.model[1].out_features == 6  # type: ignore[index, union-attr]
    given = Method(name="mlp")
    with pytest.raises(CaptureError, match="does not have the described model's weights"):
        load_capture(tmp_path / "one", model=given)


def train(model: nn.Module, batch: Batch) -> Tensor:
    loss = cross_entropy(model(batch.inputs), batch.targets)
    loss.backward()
    return loss


def test_gradients_of_an_earlier_step_are_refused(tmp_path: Path, batch: Batch) -> None:
    model = described().build()
    train(model, batch)
    with (
        pytest.raises(CaptureError, match="gradients of an earlier step"),
        capture(model, tmp_path / "one", described()),
    ):
        train(model, batch)


def test_a_block_without_gradients_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(CaptureError, match=r"has no gradient: call backward\(\)"),
        capture(described().build(), tmp_path / "one", described()),
    ):
        pass
    assert not (tmp_path / "one").exists()


def test_a_model_that_is_not_the_described_one_is_refused_at_once(tmp_path: Path) -> None:
    model = described(model="mlp").build()
    with (
        pytest.raises(CaptureError, match=r"'1.bias' of shape \(200,\)"),
        capture(model, tmp_path / "one", described()),
    ):
        pytest.fail("the block must not run")


def test_a_second_capture_does_not_overwrite_the_first(tmp_path: Path) -> None:
    weights = described().build().state_dict()
    write_capture(tmp_path / "one", described(), weights=weights, update=weights)
    with pytest.raises(CaptureError, match="already contains a capture"):
        write_capture(tmp_path / "one", described(), weights=weights, update=weights)


def test_data_by_path_stays_at_home(tmp_path: Path) -> None:
    weights = described().build().state_dict()
    about = described(dataset=str(tmp_path))
    with pytest.raises(CaptureError, match="give the path with --dataset"):
        write_capture(tmp_path / "one", about, weights=weights, update=weights)


@pytest.mark.parametrize(
    "space",
    [
        ImageSpace((3, 8, 8), 10, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0)),
        WaveSpace((1, 100), 2, rate=8000),
        TokenSpace((7,), 2, vocabulary=50, padding=0),
    ],
)
def test_spaces_survive(space: ImageSpace | WaveSpace | TokenSpace) -> None:
    about = Description.model_validate({"model": "mlp", "space": space, "batch_size": 1})
    again = Description.model_validate_json(about.model_dump_json())
    assert again.inputs == space


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda space: space.update(kind="smells"), "kind must be one of images, sound, tokens"),
        (lambda space: space.update(colour=1), "images have no 'colour'"),
        (lambda space: space.pop("classes"), "classes"),
        (lambda space: space.update(shape=[1, 0, 4]), "whole numbers from 1"),
        (lambda space: space.update(shape=4), "whole numbers from 1|shape"),
    ],
)
def test_refuses_spaces(change: Callable[[dict[str, object]], None], message: str) -> None:
    space: dict[str, object] = {"kind": "images", "shape": [1, 4, 4], "classes": 3}
    change(space)
    with pytest.raises(ValueError, match=message):
        described(space=space)
