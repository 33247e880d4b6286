from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from federated import rng

from leakfrontier.adversaries import DLG, NotApplicable
from leakfrontier.evaluate.data.data import Dataset, load_dataset
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.papers import dlg_ig
from leakfrontier.evaluate.papers.dlg_ig import image_trial, image_uploads
from leakfrontier.evaluate.papers.tables import TABLES


@pytest.fixture(scope="module")
def cifar100() -> Dataset:
    folder = Path(os.environ.get("LEAKFRONTIER_DATA", "")) / "cifar100"
    if not (folder.is_absolute() and (folder / "train").is_dir()):
        pytest.skip("LEAKFRONTIER_DATA does not name a folder with cifar100/train")
    return load_dataset(str(folder))


@pytest.mark.parametrize("problem", [row.problem for row in TABLES["ig"].rows[::2]])
def test_gradients_of_one_image(
    problem: dict[str, object], cifar100: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    untrained = build_model("lenet", cifar100.space, rng())
    monkeypatch.setattr(dlg_ig, "_trained_lenet", lambda data: untrained)
    upload, *others = dlg_ig.image_uploads(problem, cifar100, rng())
    assert len(others) == (0 if problem["network"] == "ResNet20-4" else 4)
    assert all(other.observation.replay is upload.observation.replay for other in others)
    assert upload.observation.batch_size == 1
    assert torch.equal(upload.observation.targets, upload.truth.targets)  # type: ignore[arg-type]


def test_dlg_sees_pixels_and_no_label(cifar100: Dataset) -> None:
    problem = {"network": "LeNet", "activation": "relu"}
    upload, *_ = dlg_ig.image_uploads(problem, cifar100, rng())
    assert upload.observation.targets is None
    assert 0 <= upload.truth.inputs.min() <= upload.truth.inputs.max() <= 1
    assert any(isinstance(module, torch.nn.ReLU) for module in upload.observation.model.modules())


def test_a_trial_scores_every_image(cifar100: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dlg_ig.ATTACKS, "DLG", DLG(iterations=3))
    problem = {"network": "LeNet", "activation": "sigmoid"}
    scores = dlg_ig.image_trial(problem, {"attack": "DLG"}, cifar100, rng())
    assert len(scores["psnr"]) == len(scores["broken"]) == 5


def test_fewer_images_are_the_first_ones_and_fewer_iterations_are_taken() -> None:
    data = load_dataset("fashion-mini")
    problem = {"network": "LeNet", "activation": "sigmoid"}
    both, one = (image_uploads(problem, data, rng(), images=images) for images in (2, 1))
    assert (len(both), len(one)) == (2, 1)
    torch.testing.assert_close(both[0].truth.inputs, one[0].truth.inputs)
    method = {"attack": "DLG", "images": 1, "iterations": 2}
    scores = image_trial(problem, method, data, rng())
    assert {name: len(values) for name, values in scores.items()} == dict.fromkeys(scores, 1)


def test_an_attack_that_does_not_apply_is_a_failed_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*given: object) -> list[NotApplicable]:
        return [NotApplicable("not here")]

    monkeypatch.setattr(DLG, "reconstruct_all", refusing)
    problem = {"network": "LeNet", "activation": "sigmoid"}
    with pytest.raises(NotApplicable, match="not here"):
        image_trial(problem, {"attack": "DLG", "images": 1}, load_dataset("digits"), rng())
