import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from leakfrontier.adversaries import ContinuousSpace, ImageSpace, InputSpace, TokenSpace, WaveSpace
from leakfrontier.evaluate.models import models
from leakfrontier.evaluate.models.models import MODELS, build_model
from leakfrontier.evaluate.models.rconv_networks import NETWORKS

DIGITS = ImageSpace((1, 8, 8), 10)
FASHION = ImageSpace((1, 28, 28), 10)
CIFAR = ImageSpace((3, 32, 32), 100)
SOUND = WaveSpace((1, 1000), 10, rate=8000)
TEXT = TokenSpace((6,), 2, vocabulary=40, padding=0)
VECTORS = ContinuousSpace((20,), 2)
IMAGES = {"digits": DIGITS, "fashion": FASHION, "cifar": CIFAR}
ON_IMAGES = ("mlp", "linear", "cnn", "tanh_cnn", "lenet", "resnet18")
CASES = {
    **{f"{name}-{on}": (name, space) for name in ON_IMAGES for on, space in IMAGES.items()},
    **{f"{name}-cifar": (name, CIFAR) for name in NETWORKS},
    "mlp-sound": ("mlp", SOUND),
    "conv1d-sound": ("conv1d", SOUND),
    "conv1d-shortest": ("conv1d", WaveSpace((2, 1), 3)),
    "token_mlp-text": ("token_mlp", TEXT),
    "gpt2-text": ("gpt2", TEXT),
}
BUILT = {name: (name, space) for name, space in reversed(CASES.values())}  # the smallest of each
RANDOM = {"linear": {"zero_head": False}}  # options of models that otherwise draw nothing
PRETRAINED = {"hf", "smollm2"}  # in test_language_models.py


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layers(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.children()]


def examples(space: InputSpace, count: int) -> torch.Tensor:
    shape = (count, *space.shape)
    if isinstance(space, TokenSpace):
        return torch.randint(space.vocabulary, shape, generator=rng(1))
    return torch.rand(shape, generator=rng(1))


def test_every_model_is_tested() -> None:
    assert {*BUILT, *PRETRAINED} == set(MODELS)


@pytest.mark.parametrize(("name", "space"), CASES.values(), ids=CASES)
def test_scores_every_class_and_all_parameters_matter(name: str, space: InputSpace) -> None:
    model = build_model(name, space, rng())
    inputs = examples(space, 3)
    outputs = model(inputs)
    assert outputs.shape == (3, space.classes)
    outputs.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    alone = torch.cat([model(example[None]) for example in inputs])
    assert torch.allclose(outputs, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "space"), BUILT.values(), ids=BUILT)
def test_initialised_from_the_generator_alone(name: str, space: InputSpace) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    options = RANDOM.get(name, {})
    models = [build_model(name, space, rng(seed), **options) for seed in (3, 3, 4)]
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    models.append(build_model(name, space, rng(3), **options))
    first, same, other, again = (nn.utils.parameters_to_vector(m.parameters()) for m in models)
    assert torch.equal(first, same)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_generator_gives_one_model_after_the_other() -> None:
    generator = rng()
    first, second = (build_model("mlp", DIGITS, generator) for _ in range(2))
    assert not torch.equal(next(first.parameters()), next(second.parameters()))


def test_parameter_counts_are_those_of_the_papers() -> None:
    def count(name: str, space: InputSpace, **options: object) -> int:
        return sum(p.numel() for p in build_model(name, space, rng(), **options).parameters())

    mlp = 784 * 50 + 50 + 2 * (50 * 50 + 50) + 50 * 10 + 10
    assert count("mlp", FASHION, width=50) == mlp
    cnn = 27 * 12 + 12 + 108 * 24 + 24 + 24 * 1024 * 1024 + 1024 + 1024 * 100 + 100
    assert count("cnn", CIFAR) == cnn
    lenet = 3 * 25 * 12 + 12 + 2 * (12 * 25 * 12 + 12) + 768 * 100 + 100  # 768 features: DLG
    assert count("lenet", CIFAR) == lenet
    tanh_cnn = (
        64 * 16 + 16 + 256 * 32 + 32 + 512 * 32 + 32 + 32 * 10 + 10
    )  # 26,010: Papernot et al.
    assert count("tanh_cnn", FASHION) == tanh_cnn
    deep = count("tanh_cnn", ImageSpace((3, 32, 32), 10), deep=True)
    assert deep == 550_570  # Tramer, Boneh: 551k
    assert count("tanh_cnn", ImageSpace((81, 7, 7), 10)) == 33_066  # on scattering: 33k
    assert count("mlp", FASHION, width=64, hidden=1) == 784 * 64 + 64 + 64 * 10 + 10
    assert count("linear", FASHION) == 7850
    assert count("resnet18", ImageSpace((3, 32, 32), 1000)) == 11_689_512  # torchvision's


def test_lenet_initialisation_of_deep_leakage() -> None:
    sigmoid = nn.utils.parameters_to_vector(build_model("lenet", FASHION, rng()).parameters())
    assert sigmoid.abs().max() <= 0.5
    assert sigmoid.std().item() == pytest.approx(12**-0.5, rel=0.02)
    relu = build_model("lenet", FASHION, rng(), activation="relu")
    assert nn.utils.parameters_to_vector(relu.parameters()).abs().max() < 0.25
    assert layers(relu) == [*["Conv2d", "ReLU"] * 3, "Flatten", "Linear"]
    assert "Tanh" in layers(build_model("lenet", FASHION, rng(), activation="tanh"))


def test_options_of_perceptrons() -> None:
    small = build_model("mlp", FASHION, rng(), width=64, hidden=1, activation="tanh")
    assert layers(small) == ["Flatten", "Linear", "Tanh", "Linear"]
    assert layers(build_model("mlp", FASHION, rng())) == [
        "Flatten",
        *["Linear", "ReLU"] * 3,
        "Linear",
    ]


def test_the_weights_of_the_default_mlp_stay_the_same() -> None:
    drawn = nn.utils.parameters_to_vector(build_model("mlp", DIGITS, rng()).parameters())
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**63 - 1, (), generator=rng())))
        sizes = ((64, 200), (200, 200), (200, 200), (200, 10))
        plain = nn.ModuleList([nn.Linear(inputs, outputs) for inputs, outputs in sizes])
    assert torch.equal(drawn, nn.utils.parameters_to_vector(plain.parameters()))


@pytest.mark.parametrize("name", ["linear", "mlp", "tanh_cnn"])
def test_a_zero_head(name: str) -> None:
    model = build_model(name, FASHION, rng(), zero_head=True)
    assert not model(examples(FASHION, 2)).any()
    assert build_model(name, FASHION, rng(), zero_head=False)(examples(FASHION, 2)).all()


def test_linear_is_zero_by_default() -> None:
    assert not any(p.any() for p in build_model("linear", FASHION, rng()).parameters())


def test_resnet_has_group_norm() -> None:
    model = build_model("resnet18", CIFAR, rng(), groups=2)
    groups = [module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert groups == [2] * 20


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vgg", {}, "one of mlp, linear, cnn, tanh_cnn, lenet, resnet18, .*file.py:factory"),
        ("mlp", {"depth": 3}, "depth.*its options are width=200"),
        ("cnn", {"width": 3}, "its options are hidden=1024"),
        ("cnn", {"hidden": 0}, "hidden must be at least 1, got 0"),
        ("cnn", {"filters": 0}, "filters must be at least 1, got 0"),
        ("mlp", {"width": 0}, "width must be at least 1, got 0"),
        ("mlp", {"hidden": 0}, r"hidden must be in \[1, 100\], got 0"),
        ("mlp", {"hidden": 10**9}, r"hidden must be in \[1, 100\]"),
        ("mlp", {"activation": "gelu"}, "one of sigmoid, relu, tanh, got 'gelu'"),
        ("lenet", {"activation": "gelu"}, "one of sigmoid, relu, tanh, got 'gelu'"),
        ("resnet18", {"groups": 3}, "groups must divide 64"),
        ("resnet18", {"groups": 32, "width": 8}, "groups must divide 8"),
        ("resnet18", {"width": 0}, "width must be at least 1, got 0"),
    ],
)
def test_says_what_is_allowed(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, DIGITS, rng(), **options)


@pytest.mark.parametrize("name", ["cnn", "tanh_cnn", "lenet", "resnet18", *NETWORKS])
@pytest.mark.parametrize(
    ("space", "advice"),
    [
        (VECTORS, r"inputs of shape \(20,\); use mlp or"),
        (SOUND, r"sound of shape \(1, 1000\); use conv1d, mlp or"),
        (TEXT, "sequences of 6 tokens; use token_mlp, gpt2"),
    ],
)
def test_convolutions_need_images(name: str, space: InputSpace, advice: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} needs images of shape \(channels.*got {advice}"):
        build_model(name, space, rng())


@pytest.mark.parametrize(
    ("name", "space", "message"),
    [
        ("conv1d", DIGITS, "conv1d needs sound.*use mlp"),
        ("conv1d", TEXT, "conv1d needs sound.*use token_mlp"),
        ("linear", TEXT, "linear needs real-valued inputs.*use token_mlp"),
        ("mlp", TEXT, "mlp needs real-valued inputs.*use token_mlp"),
        ("token_mlp", SOUND, "token_mlp needs tokens.*use conv1d"),
    ],
)
def test_models_need_their_kind_of_data(name: str, space: InputSpace, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, space, rng())


@pytest.mark.parametrize("name", ["mlp", "linear"])
def test_perceptrons_take_vectors(name: str) -> None:
    assert build_model(name, VECTORS, rng())(torch.zeros(4, 20)).shape == (4, 2)


def test_a_deep_tanh_cnn_needs_some_pixels() -> None:
    with pytest.raises(ValueError, match=r"at least 8 x 8, got \(81, 7, 7\)"):
        build_model("tanh_cnn", ImageSpace((81, 7, 7), 10), rng(), deep=True)


def test_token_mlp_tells_places_apart() -> None:
    model = build_model("token_mlp", TEXT, rng())
    forwards = torch.tensor([[1, 2, 3, 4, 5, 6]])
    assert not torch.allclose(model(forwards), model(forwards.flip(1)))


@pytest.mark.parametrize("seed", range(3))
def test_token_mlp_survives_the_first_steps_of_adam(seed: int) -> None:
    space, draws = TokenSpace((120,), 2, vocabulary=50, padding=0), rng(seed)
    inputs, targets = torch.randint(50, (64, 120), generator=draws), torch.arange(64) % 2
    inputs[:, 40:] = 0
    model = build_model("token_mlp", space, draws)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    assert loss < 0.001


def test_conv1d_is_small() -> None:
    model = build_model("conv1d", WaveSpace((1, 8000), 10), rng())
    assert layers(model) == [*["Conv1d", "ReLU"] * 3, "Flatten", "Linear"]
    assert sum(p.numel() for p in model.parameters()) < 150_000


OWN = """
import torch
from torch import nn

def linear(space, bias=True):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(space.classes, bias=bias))

def normalised(space):
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 10))

def tokens(space):
    return nn.Sequential(nn.Embedding(space.vocabulary, 3), nn.Flatten(), nn.LazyLinear(2))

class Pair(nn.Module):
    def __init__(self, space):
        super().__init__()
    def forward(self, inputs):
        return inputs, inputs

def wrong_classes(space):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, space.classes + 1))

def wrong_inputs(space):
    return nn.Sequential(nn.Flatten(), nn.Linear(65, space.classes))

def nothing(space):
    pass

def no_space():
    return nn.Flatten()

constant = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def test_a_model_of_ones_own(own: Path) -> None:
    model, same = (build_model(f"{own}:linear", DIGITS, rng(), bias=False) for _ in range(2))
    assert [p.shape for p in model.parameters()] == [(10, 64)]
    assert torch.equal(next(model.parameters()), next(same.parameters()))


def test_a_model_of_ones_own_on_tokens(own: Path) -> None:
    space = TEXT
    model = build_model(f"{own}:tokens", space, rng())
    assert model(torch.zeros(3, 6, dtype=torch.int64)).shape == (3, 2)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("normalised", r"BatchNorm \(1\).*mix the examples.*GroupNorm"),
        ("wrong_classes", r"shape \(2, 10\), got \(2, 11\)"),
        ("wrong_inputs", r"fails on inputs of shape \(2, 1, 8, 8\)"),
        ("Pair", r"shape \(2, 10\), got tuple"),
        ("nothing", "must return a torch.nn.Module, got NoneType"),
        ("no_space", "cannot be called with the input space"),
        ("constant", "must be a function that returns a model, got 3"),
        ("absent", "has no 'absent'; it defines linear"),
    ],
)
def test_refuses_models_that_cannot_be_used(own: Path, factory: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(f"{own}:{factory}", DIGITS, rng())


def test_torchvision_is_imported_only_when_needed() -> None:
    code = (
        "import sys, torch\n"
        "from leakfrontier.evaluate.data import data\n"
        "from leakfrontier.evaluate.models import models\n"
        "data.load_dataset('fashion-mini')\n"
        "sys.exit('torchvision' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("width", [10**9, 10**30])
def test_a_model_larger_than_any_memory_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match="more than 1,073,741,824 parameters"):
        build_model("mlp", DIGITS, rng(), width=width)


def test_a_large_model_is_the_same_whether_or_not_its_size_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model("token_mlp", TEXT, rng(), hidden=models.LARGE)
    monkeypatch.setattr(models, "LARGE", models.LARGE + 1)
    other = build_model("token_mlp", TEXT, rng(), hidden=models.LARGE - 1)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_an_option_of_another_type_is_named() -> None:
    with pytest.raises(ValueError, match="mlp cannot be built with width=wide"):
        build_model("mlp", DIGITS, rng(), width="wide")
