"""DP-SGD: speed of ghost clipping and hooks, and accuracy beside published numbers.

python benchmarks/dpsgd.py speed
python benchmarks/dpsgd.py accuracy --data FOLDER   # where torchvision keeps or downloads the data

Accuracy is that of central training at epsilon 3: the noise is on the sum of a batch's clipped
gradients, and PLD gives the least noise. Settings of `linear` are those of Tramer and Boneh.
`tanh_cnn` takes half of their epochs at twice their rate per example. Published numbers:

[1] Papernot, Thakurta, Song, Chien, Erlingsson. "Tempered Sigmoid Activations for Deep Learning
    with Differential Privacy." AAAI 2021 (epsilon 2.93 and 2.7). https://arxiv.org/abs/2007.14191
[2] Tramer, Boneh. "Differentially Private Learning Needs Better Features (or Much More Data)."
    ICLR 2021 (epsilon 3). https://arxiv.org/abs/2011.11660
"""

import argparse
import copy
import time
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

import torch
from opacus import GradSampleModule
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from leakfrontier.adversaries import ImageSpace
from leakfrontier.defenses import DPSGD, Batch, Plan
from leakfrontier.defenses.pld import gaussian_epsilon
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.models.features import build_features
from leakfrontier.evaluate.models.models import build_model

DELTA, EPSILON, NORM, MOMENTUM = 1e-5, 3.0, 0.1, 0.9


@dataclass(frozen=True)
class Setting:
    """A training whose accuracy is published."""

    dataset: str
    model: str
    scattering: bool
    epochs: int
    batch: int
    lr: float
    published: str

    @property
    def name(self) -> str:
        """Return its name on the command line."""
        return f"{self.dataset}/{'scattering+' * self.scattering}{self.model}"


SETTINGS = (
    Setting("mnist", "tanh_cnn", False, 20, 1024, 2, "98.1 [1], 98.1 [2]"),
    Setting("mnist", "linear", True, 40, 4096, 8, "98.7 [2]"),
    Setting("fashion-mnist", "tanh_cnn", False, 20, 2048, 8, "86.1 [1], 86.0 [2]"),
    Setting("fashion-mnist", "linear", True, 40, 8192, 16, "89.7 [2]"),
    Setting("fashion-mnist", "tanh_cnn", True, 20, 2048, 8, "89.0 [2]"),
)


def speed(batch_size: int = 64, repeats: int = 5) -> None:
    """Time one gradient of a CNN with more than a million parameters, both ways."""
    space = ImageSpace((1, 28, 28), 10)
    rng = torch.Generator().manual_seed(0)
    model = build_model("cnn", space, rng)
    batch = Batch(torch.randn(batch_size, 1, 28, 28), torch.randint(10, (batch_size,)))
    ways = {way: DPSGD(1.0, per_example=way) for way in ("ghost", "hooks")}  # type: ignore[arg-type]
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats + 1):
        for way, defense in ways.items():
            start = time.perf_counter()
            defense.gradient(model, cross_entropy, batch, rng)
            best[way] = min(best[way], time.perf_counter() - start)
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{size:,} parameters, batch {batch_size}: "
        + ", ".join(f"{way} {seconds:.3f} s" for way, seconds in best.items())
        + f"; ghost is {best['hooks'] / best['ghost']:.1f} times faster"
    )


def accuracy(setting: Setting, folder: Path, seed: int) -> float:
    """Return the accuracy of a model trained under DP-SGD, with the least noise for epsilon."""
    space, train, test = _seen(setting.dataset, setting.scattering, folder)
    rng = Generator().manual_seed(seed)
    model = build_model(setting.model, space, rng)
    rate = setting.batch / len(train.targets)
    steps = round(setting.epochs / rate)
    std = _calibrated(steps, rate) * NORM
    optimizer = torch.optim.SGD(model.parameters(), setting.lr, momentum=MOMENTUM)
    for _ in range(steps):
        rows = torch.rand(len(train.targets), generator=rng).lt(rate).nonzero().flatten()
        for parameter, total in zip(
            model.parameters(), clipped_sum(model, train.at(rows), NORM), strict=True
        ):
            noise = std * torch.randn(total.shape, generator=rng)
            parameter.grad = (total + noise) / setting.batch
        optimizer.step()
    with torch.no_grad():
        found = torch.cat([model(inputs).argmax(1) for inputs in test.inputs.split(1000)])
    return (found == test.targets).double().mean().item()


def clipped_sum(model: nn.Module, batch: Batch, norm: float) -> list[Tensor]:
    """Return the sum of clipped gradients, as DPSGD does, without its checks of the model."""
    layers = [*model.children()]
    if len(layers) == 2 and isinstance(layers[1], nn.Linear):  # a flattened input and one layer
        inputs = batch.inputs.flatten(1)
        slopes = layers[1](inputs).detach().softmax(1) - one_hot(batch.targets, len(layers[1].bias))
        norms = slopes.norm(dim=1) * (inputs.square().sum(1) + 1).sqrt()
        slopes *= (norm / norms).clamp(max=1).unsqueeze(1)
        return [slopes.T @ inputs, slopes.sum(0)]
    totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
    module = GradSampleModule(copy.deepcopy(model).train(), loss_reduction="sum")
    for rows in torch.arange(len(batch.targets)).split(128):
        cross_entropy(module(batch.inputs[rows]), batch.targets[rows], reduction="sum").backward()
        samples = [parameter.grad_sample.flatten(1) for parameter in module.parameters()]
        factors = norm / torch.stack([one.norm(dim=1) for one in samples]).norm(dim=0)
        for total, one in zip(totals, samples, strict=True):
            total += (factors.clamp(max=1) @ one).view_as(total)
        module.zero_grad()
    return totals


@cache
def _seen(dataset: str, scattering: bool, folder: Path) -> tuple[ImageSpace, Batch, Batch]:
    """Return what a model sees: images, or their features, which are computed once."""
    data = load_dataset(dataset, folder)
    space, (train, test) = data.space, data.normalised
    if not isinstance(space, ImageSpace):
        raise TypeError(f"{dataset} must hold images")
    if not scattering:
        return space, train, test
    features, seen = build_features(space, "scattering")

    def transformed(batch: Batch) -> Batch:
        with torch.no_grad():
            made: list[Tensor] = [features(some) for some in batch.inputs.split(1000)]
        return Batch(torch.cat(made), batch.targets)

    return ImageSpace(seen.shape, seen.classes), transformed(train), transformed(test)


@cache
def _calibrated(steps: int, rate: float) -> float:
    """Return the least noise multiplier that keeps epsilon, to three digits."""
    low, high = 0.3, 10.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        spent = gaussian_epsilon(middle, Plan(steps, rate, DELTA))
        low, high = (middle, high) if spent > EPSILON else (low, middle)
    return high


def compare(folder: Path, names: list[str], seeds: int) -> None:
    """Print our accuracy beside the published one."""
    for setting in SETTINGS:
        if names and setting.name not in names:
            continue
        start = time.perf_counter()
        found = [100 * accuracy(setting, folder, seed) for seed in range(seeds)]
        print(
            f"{setting.name}: {mean(found):.1f} % ({', '.join(f'{one:.1f}' for one in found)}), "
            f"published {setting.published}; {(time.perf_counter() - start) / seeds:.0f} s each",
            flush=True,
        )


def main() -> None:
    """Run the chosen part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["speed", "accuracy"])
    parser.add_argument("--data", type=Path, help="folder of MNIST and FashionMNIST of torchvision")
    parser.add_argument("--only", nargs="+", default=[], choices=[s.name for s in SETTINGS])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if given.part == "speed":
        speed()
    elif given.data is None:
        parser.error("accuracy needs --data FOLDER")
    else:
        compare(given.data, given.only, given.seeds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    main()
