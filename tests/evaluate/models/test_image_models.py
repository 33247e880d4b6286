"""Image classifiers of transformers, from a local folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from leakfrontier.adversaries import ImageSpace
from leakfrontier.defenses import torchvision_ops  # noqa: F401 (before transformers)
from leakfrontier.evaluate.engines.parcels import open_parcel, pack
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.run.cells import AttackTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario

SPACE = ImageSpace((1, 8, 8), 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small vision transformer, as save_pretrained writes it."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
    )
    folder = tmp_path_factory.mktemp("vit")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ViTForImageClassification(config).save_pretrained(folder)
    return folder


def built(folder: Path, space: ImageSpace = SPACE, **options: object) -> nn.Module:
    rng = torch.Generator().manual_seed(1)
    return build_model("hf", space, rng, id=str(folder), **options)


def test_has_the_weights_of_the_folder(folder: Path) -> None:
    from transformers import ViTForImageClassification

    saved = ViTForImageClassification.from_pretrained(folder)
    images = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(built(folder).eval()(images), saved(images).logits)


def test_other_classes_get_a_new_head_and_new_weights_other_images(folder: Path) -> None:
    few = built(folder, ImageSpace((1, 8, 8), 3))
    assert few(torch.rand(2, 1, 8, 8)).shape == (2, 3)
    new = built(folder, ImageSpace((3, 16, 16), 10), pretrained=False)
    assert new(torch.rand(2, 3, 16, 16)).shape == (2, 10)


def test_mistakes_are_explained(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        built(tmp_path)
    with pytest.raises(ValueError, match=r"hf fails on inputs of shape \(2, 3, 16, 16\)"):
        built(folder, ImageSpace((3, 16, 16), 10))


def test_is_attacked_in_a_scenario_and_travels(folder: Path, tmp_path: Path) -> None:
    scenario = Scenario(
        dataset="digits", model=Method(name="hf", options={"id": str(folder)}), candidates=20
    )
    trial = AttackTrial(
        scenario,
        Method(name="none"),
        Method(name="InvertingGradients", options={"iterations": 2}),
        knows_defense=True,
        seed=0,
        checkpoint=0,
        observations=(0,),
    )
    (row,) = trial.run(tmp_path).attacks
    assert row.outcome == "scored"
    parcel = pack((trial, tmp_path))
    ((bundle, name),) = (found for path, found in parcel.bundles.items() if path == str(folder))
    assert f"{name}/config.json" in bundle.files
    moved, _ = open_parcel(parcel.task, {str(folder): "/elsewhere"})
    assert moved.scenario.model.options == {"id": "/elsewhere"}
