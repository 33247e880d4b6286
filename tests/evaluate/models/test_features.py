"""Heads on frozen public features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import ImageSpace, TokenSpace, WaveSpace
from leakfrontier.defenses import DPSGD, Batch, trainable
from leakfrontier.evaluate.engines.parcels import open_parcel, pack
from leakfrontier.evaluate.foundations.rows import AttackRow
from leakfrontier.evaluate.models.architecture import analyse, build
from leakfrontier.evaluate.models.features import Backbone, FeatureModel, build_features
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.models.scattering import Scattering
from leakfrontier.evaluate.run.cells import AttackTrial
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, load_world

SPACE = ImageSpace((1, 28, 28), 10, mean=(0.3,), std=(0.4,))
COLOURED = ImageSpace((3, 32, 32), 5)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def built(name: str = "linear", space: ImageSpace = SPACE, **options: object) -> FeatureModel:
    model = build_model(name, space, rng(), **{"features": "scattering", **options})
    assert isinstance(model, FeatureModel)
    return model


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return files with the weights of a small network of torchvision."""
    from torchvision.models import resnet18

    folder = tmp_path_factory.mktemp("weights")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = resnet18(num_classes=7)
        model(torch.rand(4, 3, 32, 32))  # moves the statistics of BatchNorm
    torch.save(model.state_dict(), folder / "resnet18.pth")
    save_file(model.state_dict(), folder / "resnet18.safetensors")
    return folder


@pytest.mark.parametrize("name", ["linear", "mlp", "cnn", "tanh_cnn", "lenet", "resnet18"])
@pytest.mark.parametrize("space", [SPACE, COLOURED], ids=["grey", "coloured"])
def test_every_image_model_takes_features(name: str, space: ImageSpace) -> None:
    model = built(name, space)
    images = torch.rand(3, *space.shape)
    outputs = model(images)
    assert outputs.shape == (3, space.classes)
    assert torch.equal(outputs, model.head(model.features(images)))
    assert {*trainable(model)} == {f"head.{path}" for path, _ in model.head.named_parameters()}


def test_the_channels_of_scattering_are_normalised_in_groups() -> None:
    images = torch.rand(2, 1, 28, 28)
    values = built().features(images).unflatten(1, (27, 3)).flatten(2)
    torch.testing.assert_close(values.mean(2), torch.zeros(2, 27), atol=1e-5, rtol=0)
    plain = built(features={"name": "scattering", "groups": None, "angles": 4})
    torch.testing.assert_close(plain.features(images), Scattering((1, 28, 28), 2, 4)(images))


def test_the_head_is_that_of_the_model_without_features() -> None:
    model, seen = built("mlp", width=8), ImageSpace((81, 7, 7), 10)
    plain = build_model("mlp", seen, rng(), width=8)
    assert all(map(torch.equal, model.head.parameters(), plain.parameters()))


def test_features_stay_in_evaluation_mode(weights: Path) -> None:
    file = str(weights / "resnet18.pth")
    model = built(features={"backbone": "resnet18", "weights": file}).train()
    assert model.head.training
    assert not any(module.training for module in model.features.modules())


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
@pytest.mark.parametrize("size", [None, 48])
def test_a_backbone_has_the_weights_of_the_file(
    weights: Path, ending: str, size: int | None
) -> None:
    from torchvision.models import resnet18
    from torchvision.transforms.functional import normalize, resize

    file = weights / f"resnet18.{ending}"
    options = {"backbone": "resnet18", "weights": str(file), "size": size}
    model = built(features=options).double()
    network = resnet18(num_classes=7).eval()
    network.load_state_dict(torch.load(weights / "resnet18.pth", weights_only=True))
    network.fc = nn.Identity()
    images = torch.rand(2, 1, 28, 28, dtype=torch.float64)
    units = images if size is None else resize(images, [size, size], antialias=True)
    seen = normalize(units.expand(-1, 3, -1, -1), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    with torch.no_grad():
        found = model.features(SPACE.to_inputs(images))
        torch.testing.assert_close(found, network.double()(seen), atol=1e-6, rtol=1e-6)
    assert {*trainable(model)} == {"head.1.weight", "head.1.bias"}


@pytest.mark.parametrize("features", [{"name": "scattering"}, "backbone"])
def test_dpsgd_takes_features(features: object, weights: Path) -> None:
    file = str(weights / "resnet18.pth")
    options = {"backbone": "resnet18", "weights": file} if features == "backbone" else features
    model = built(features=options)
    batch = Batch(torch.rand(4, 1, 28, 28), torch.arange(4))
    update = DPSGD(0.0, 1e9).gradient(model, cross_entropy, batch, rng())
    seen = model.features(batch.inputs)
    expected = torch.autograd.grad(
        cross_entropy(model.head(seen), batch.targets), [*model.head.parameters()]
    )
    assert {*update} == {"head.1.weight", "head.1.bias"}
    for value, true in zip(update.values(), expected, strict=True):
        torch.testing.assert_close(value, true, atol=1e-5, rtol=1e-4)


def test_a_backbone_of_transformers(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ViTConfig(**sizes, intermediate_size=16, image_size=32, patch_size=8)
    vit = ViTModel(config).eval()
    vit.save_pretrained(tmp_path / "vit")
    model = built(space=COLOURED, features={"backbone": str(tmp_path / "vit")})
    images = torch.rand(2, 3, 32, 32)
    assert isinstance(model.features, Backbone)
    with torch.no_grad():
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
        states = vit(pixel_values=(images - mean) / std).last_hidden_state
        torch.testing.assert_close(model.features(images), states.mean(1))
    assert {*trainable(model)} == {"head.1.weight", "head.1.bias"}


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ("sift", "must be scattering or a mapping with backbone, got 'sift'"),
        (3, "must be scattering, {name: scattering"),
        ({"angles": 8}, "must be scattering, {name: scattering"),
        ({"name": "backbone"}, "must be scattering or a mapping with backbone"),
        ({"name": "scattering", "backbone": "resnet18"}, "must be scattering or a mapping"),
        ({"name": "scattering", "depth": 2}, "has the options scales, angles, groups"),
        ({"name": "scattering", "groups": 5}, "groups must divide the 81 channels, got 5"),
        ({"name": "scattering", "groups": "many"}, "features cannot be built from"),
        ({"backbone": "resnet1", "weights": "DEFAULT"}, "a classifier of torchvision"),
        ({"backbone": "resnet18", "weights": "absent.pth"}, "cannot read weights from absent.pth"),
        ({"backbone": "squeezenet1_0", "weights": "absent.pth"}, "has no linear layer"),
        ({"backbone": "resnet18", "weights": "DEFAULT", "size": 0}, r"size must be in \[1, 1024\]"),
        ({"backbone": "models/absent"}, "no folder or file"),
    ],
)
def test_says_what_is_allowed(features: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(features=features)


def test_refuses_weights_of_another_network_and_pickled_code(weights: Path, tmp_path: Path) -> None:
    file = str(weights / "resnet18.pth")
    with pytest.raises(ValueError, match="does not hold the weights of resnet34"):
        built(features={"backbone": "resnet34", "weights": file})
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pth")
    with pytest.raises(ValueError, match=r"cannot read weights from .*whole.pth: give a safetens"):
        built(features={"backbone": "resnet18", "weights": str(tmp_path / "whole.pth")})


@pytest.mark.parametrize(
    "space", [WaveSpace((1, 100), 2), TokenSpace((6,), 2, vocabulary=40, padding=0)]
)
def test_features_need_images(space: WaveSpace | TokenSpace) -> None:
    with pytest.raises(ValueError, match="features needs images of shape"):
        build_model("mlp", space, rng(), features="scattering")


def test_models_of_files_take_no_features() -> None:
    with pytest.raises(ValueError, match="hf takes no features"):
        build_model("hf", SPACE, rng(), id="a/b", features="scattering")


def test_the_options_of_a_model_name_features() -> None:
    with pytest.raises(ValueError, match="its options are zero_head=True, features=None"):
        build_model("linear", SPACE, rng(), depth=3)


def test_no_features_is_the_plain_model() -> None:
    model = build_model("mlp", SPACE, rng(), features=None)
    plain = build_model("mlp", SPACE, rng())
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert not isinstance(model, FeatureModel)


def test_the_space_of_features() -> None:
    features, space = build_features(COLOURED, "scattering")
    assert space == ImageSpace((243, 8, 8), 5)
    assert not any(p.requires_grad for p in features.parameters())


def scenario(file: Path) -> Scenario:
    features = {"backbone": "resnet18", "weights": str(file)}
    return Scenario(model=Method(name="linear", options={"features": features}))


def test_the_content_of_weights_identifies_a_model(weights: Path, tmp_path: Path) -> None:
    first, moved = weights / "resnet18.pth", tmp_path / "resnet18.pth"
    moved.write_bytes(first.read_bytes())
    assert scenario(first).config() == scenario(moved).config()
    assert str(tmp_path) not in str(scenario(moved).config()) + scenario(moved).name
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "resnet18.pth"
    other.write_bytes((weights / "resnet18.safetensors").read_bytes())
    assert scenario(first).config() != scenario(other).config()


def test_weights_are_relative_to_the_file_of_the_run(weights: Path) -> None:
    features = {"backbone": "resnet18", "weights": "resnet18.pth"}
    model = {"name": "linear", "features": features}
    found = Scenario.model_validate({"model": model}, context={"folder": weights})
    assert found.model.options["features"] == {
        "backbone": "resnet18",
        "weights": str(weights / "resnet18.pth"),
    }


def test_weights_travel(weights: Path) -> None:
    file = weights / "resnet18.pth"
    parcel = pack((scenario(file), weights))
    ((bundle, name),) = (found for path, found in parcel.bundles.items() if path == str(file))
    assert bundle.files[name] == file
    moved, _ = open_parcel(parcel.task, {str(file): "/elsewhere.pth"})
    features = moved.model.options["features"]
    assert features == {"backbone": "resnet18", "weights": "/elsewhere.pth"}


def test_an_analysis_of_the_architecture() -> None:
    model = build("mlp", SPACE, {"features": "scattering", "width": 8})
    found = {one.attack: one for one in analyse(model, SPACE.shape).verdicts}
    assert not found["LinearLeakage"].possible
    assert not found["RGAP"].possible
    assert not found["imprint family"].possible


ATTACKS: dict[str, str] = {
    "LinearLeakage": "needs a bias and 64 inputs",
    "SPEARPlusPlus": "no linear layer sees the inputs",
    "RGAP": "the attack cannot invert this function",
    "RCONV": "the attack cannot invert this function",
    "ARES": "sees features, not the pixels",
    "TrapWeights": "does not see the inputs",
    "InvertingGradients": "",
    "RobbingTheFed": "",
    "PriorAware": "",
}


def attacked(model: Method, adversary: Method, folder: Path) -> AttackRow:
    trial = AttackTrial(
        Scenario(dataset="digits", model=model, candidates=20),
        Method(name="none"),
        adversary,
        knows_defense=True,
        seed=0,
        checkpoint=0,
        observations=(0,),
    )
    (row,) = trial.run(folder).attacks
    return row


@pytest.mark.parametrize(("adversary", "reason"), ATTACKS.items())
def test_attacks_on_features(adversary: str, reason: str, tmp_path: Path) -> None:
    """Searches go through features. Attacks that would take features for pixels do not apply."""
    model = Method(name="mlp", options={"features": "scattering", "width": 16})
    short = {"iterations": 20} if adversary == "InvertingGradients" else {}
    row = attacked(model, Method(name=adversary, options=short), tmp_path)
    assert row.outcome == ("not applicable" if reason else "scored")
    assert reason in (row.reason or "")


@pytest.mark.parametrize(
    ("name", "on_backbone", "reason"),
    [("cnn", False, "see features, not the pixels"), ("mlp", True, "see features, not the pixels")],
)
def test_an_autoencoder_needs_convolutions_of_the_image(
    name: str, on_backbone: bool, reason: str, weights: Path, tmp_path: Path
) -> None:
    file = str(weights / "resnet18.pth")
    features = {"backbone": "resnet18", "weights": file} if on_backbone else "scattering"
    model = Method(name=name, options={"features": features})
    row = attacked(model, Method(name="ScaleMIA"), tmp_path)
    assert row.outcome == "not applicable"
    assert reason in (row.reason or "")


def test_searches_differentiate_through_scattering() -> None:
    space = ImageSpace((1, 8, 8), 10)
    model = built(space=space, zero_head=False)
    inputs, target = torch.rand(1, 1, 8, 8, generator=rng(3)), torch.tensor([4])

    def gradient(images: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model(images), target)
        found, _ = torch.autograd.grad(loss, [*model.head.parameters()], create_graph=True)
        return found.flatten()

    truth = gradient(inputs).detach()
    guess = torch.rand(1, 1, 8, 8, generator=rng(4)).requires_grad_()
    optimizer = torch.optim.Adam([guess], lr=0.02)
    distances = []
    for step in range(200):
        optimizer.zero_grad()
        distance = 1 - torch.cosine_similarity(gradient(guess), truth, dim=0)
        distance.backward()
        assert step or (guess.grad is not None and guess.grad.abs().min() > 0)
        optimizer.step()
        distances.append(distance.item())
    assert distances[-1] < 0.2 * distances[0]


def test_a_world_trains_only_the_head() -> None:
    options = {"features": "scattering"}
    world = load_world(Scenario(model=Method(name="linear", options=options), mode="train"))
    model = world.model(world.defense(Method(name="none")), 0)
    assert isinstance(model, FeatureModel)
    assert not model.features.training
