"""ARES on real images, beside the means of its paper.

python benchmarks/ares.py table     [--data DIR]   the CNN on CIFAR-10, MNIST and HAM10000
python benchmarks/ares.py mlp       [--data DIR]   the MLP, beside bins in its first layer
python benchmarks/ares.py summed    [--data DIR]   10 clients under secure aggregation
python benchmarks/ares.py time      [--data DIR]   a batch of 32, and one activation by cvxpy
python benchmarks/ares.py inversion [--data DIR]   few equations: 3 kernels, and 512 Gaussian rows
python benchmarks/ares.py sound     [--data DIR]   spoken digits

Rates are shares of examples above 20, 30 and 60 dB, at peak 1. The mean is the paper's: exact
examples count as they are, and the mean colour stands for missing ones.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import cvxpy as cp
import torch
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from leakfrontier.adversaries import (
    ARES,
    FedSGD,
    ImageSpace,
    Observation,
    PublicData,
    Reconstruction,
    Round,
)
from leakfrontier.adversaries.imprint import counted_recovery, expected_recovery
from leakfrontier.adversaries.sparse_recovery import (
    Measurement,
    cosine_transform,
    invert,
    least_squares,
)
from leakfrontier.defenses import Batch, Defense, SecureAggregation
from leakfrontier.evaluate import metrics
from leakfrontier.evaluate.client import Client, ThreatModel, Upload, observe
from leakfrontier.evaluate.data import Dataset, load_dataset
from leakfrontier.evaluate.models import build_model
from leakfrontier.evaluate.seeds import generator

PAPER = {
    "cifar10": {32: 92.3, 64: 90.5, 256: 37.1},
    "mnist": {32: 105.3, 64: 94.2, 256: 42.4},
    "ham10000_128": {32: 120.9, 64: 70.0},
}
HAM_SIZE = 64
"""Pixels that HAM10000's images are scaled to: at 128, the CNN has 400 million weights."""


def load(name: str, folder: Path) -> Dataset:
    """Return a dataset of a folder."""
    if name == "mnist":
        return load_dataset("mnist", folder / "mnist")
    data = load_dataset(str(folder / name))
    if name != "ham10000_128":
        return data
    train, test = (
        Batch(interpolate(part.inputs, (HAM_SIZE, HAM_SIZE), mode="area"), part.targets)
        for part in (data.train, data.test)
    )
    assert isinstance(data.space, ImageSpace)
    space = ImageSpace((3, HAM_SIZE, HAM_SIZE), 7, data.space.mean, data.space.std)
    return Dataset(name, train, test, data.classes, space)


def upload(
    attack: ARES,
    data: Dataset,
    model: nn.Module,
    examples: int,
    *,
    seed: int = 0,
    clients: int = 1,
    defense: Defense | None = None,
) -> Upload:
    """Return what the server sees of random training images; the test split is public."""
    private, public = data.normalised
    known = Round(data.space, FedSGD(), clients, examples, PublicData(*public))
    models = attack.craft(model, known, generator("craft", seed))
    rows = torch.randperm(len(private.targets), generator=generator("examples", seed))
    parts = rows[: clients * examples].split(examples)
    shares = [Batch(private.inputs[part], private.targets[part]) for part in parts]
    client = Client(model, cross_entropy, defense or Defense(), FedSGD(), data.space)
    return observe(client, shares, ThreatModel(), generator("client", seed), models=models)[0]


def psnrs(guess: Reconstruction, truth: Tensor, data: Dataset) -> Tensor:
    """Return the PSNR of each example, assigned so that its mean is the largest."""
    private = data.space.to_unit(truth.double())
    nothing = torch.zeros(len(truth), *data.space.shape).double()
    pixels = data.space.to_unit(torch.cat([guess.inputs.double(), nothing])).clamp(0, 1)
    errors = torch.cdist(pixels.flatten(1), private.flatten(1)).square() / private[0].numel()
    levels = -10 * errors.clamp(min=1e-15).log10()
    return levels[metrics.assign(-levels), torch.arange(len(private))]


def summary(levels: Tensor) -> str:
    """Return rates, median and mean."""
    rates = ", ".join(f"{100 * (levels > level).double().mean():.1f} %" for level in (20, 30, 60))
    return f"{rates} above 20, 30, 60 dB; median {levels.median():.1f}, mean {levels.mean():.1f}"


def alone(observation: Observation, truth: Tensor, layer: int) -> float:
    """Return the share of examples with a bin of their own in a layer of the model."""
    assert isinstance(observation.model, nn.Sequential)
    with torch.no_grad():
        bins = (observation.model[: layer + 1](truth) > 0).sum(dim=1)
    return float(((bins[:, None] == bins).sum(dim=1) == 1).double().mean())


def table(folder: Path) -> None:
    """Attack the paper's CNN."""
    for name, means in PAPER.items():
        data = load(name, folder)
        model = build_model("cnn", data.space, generator("model"))
        for examples, mean in means.items():
            seen = upload(ARES(), data, model, examples)
            start = time.perf_counter()
            guess = ARES().reconstruct(seen.observation, generator("attack"))
            seconds = time.perf_counter() - start
            levels = psnrs(guess, seen.truth.inputs, data)
            share = alone(seen.observation, seen.truth.inputs, 5)
            print(
                f"{name}, batch {examples}: {summary(levels)} (paper {mean}); alone "
                f"{100 * share:.1f} %, expected {100 * expected_recovery(examples, 1024):.1f} %, "
                f"by Eq. 16 {100 * counted_recovery(examples, 1024):.1f} %; {seconds:.1f} s",
                flush=True,
            )


def mlp(folder: Path) -> None:
    """Attack the paper's MLP; Robbing the Fed recovers what is alone in 512 bins."""
    data = load("cifar10", folder)
    model = build_model("mlp", data.space, generator("model"), width=512)
    for examples, gain in ((64, 10.8), (256, 28.3)):
        seen = upload(ARES(), data, model, examples)
        guess = ARES().reconstruct(seen.observation, generator("attack"))
        levels = psnrs(guess, seen.truth.inputs, data)
        robbed = expected_recovery(examples, 512)
        points = 100 * (float((levels > 60).double().mean()) - robbed)
        print(
            f"MLP, batch {examples}: {summary(levels)}; above 60 dB {points:+.1f} points over the "
            f"{100 * robbed:.1f} % of 512 bins (paper {gain:+})",
            flush=True,
        )


def summed(folder: Path) -> None:
    """Attack the sum of 10 clients, with 3 kernels or a tenth of the rows for each."""
    data, clients = load("cifar10", folder), 10
    filters = 3 * clients
    model = nn.Sequential(
        nn.Conv2d(3, filters, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(filters * 1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )
    defense = SecureAggregation(clients=clients)
    for examples, mean in ((32, 53.7), (64, 51.9)):
        for attack in (ARES(), ARES(lift=3.0), ARES(separation="rows")):
            seen = upload(attack, data, model, examples, clients=clients, defense=defense)
            guess = attack.reconstruct(seen.observation, generator("attack"))
            levels = psnrs(guess, seen.truth.inputs, data)
            print(
                f"10 x {examples}, own {attack.separation}, lift {attack.lift:g}: "
                f"{summary(levels)} (paper {mean})",
                flush=True,
            )


def by_cvxpy(measurement: Measurement, activations: Tensor) -> Tensor:
    """Return the input behind one activation: the least |a|_1 that solves its equations."""
    size = math.prod(measurement.shape)
    pixels = torch.eye(size).view(size, *measurement.shape)
    active = (activations > 0).flatten()
    matrix = csr_matrix(measurement.forward(pixels).flatten(1)[:, active].T.double().numpy())
    goal = activations.flatten()[active].double().numpy()
    basis = cosine_transform(pixels).flatten(1).T.double().numpy()
    inputs = cp.Variable(size)
    problem = cp.Problem(cp.Minimize(cp.norm1(basis @ inputs)), [matrix @ inputs == goal])
    problem.solve(solver=cp.SCS)
    return torch.tensor(inputs.value).float().view(1, *measurement.shape)


def timing(folder: Path) -> None:
    """Time a batch of 32, its inversion alone, and one activation by cvxpy."""
    data = load("cifar10", folder)
    model = build_model("cnn", data.space, generator("model"))
    seen = upload(ARES(), data, model, 32)
    seconds, _ = timed(lambda: ARES().reconstruct(seen.observation, generator("attack")))
    print(f"batch of 32: {seconds:.2f} s ({time.process_time():.0f} s of CPU so far)")
    assert isinstance(seen.observation.model, nn.Sequential)
    first = seen.observation.model[0]
    assert isinstance(first, nn.Conv2d)
    measurement = Measurement(first, data.space.shape)
    activations = measurement.forward(seen.truth.inputs).clamp(min=0)
    ours, found = timed(lambda: least_squares(measurement, activations))
    theirs, reference = timed(lambda: by_cvxpy(measurement, activations[:1]))
    print(
        f"one activation: ours {1000 * ours / 32:.0f} ms, cvxpy {theirs:.1f} s, "
        f"{32 * theirs / ours:.0f} times; they differ by {(found[:1] - reference).abs().max():.1e}"
    )


def timed(work: Callable[[], object]) -> tuple[float, object]:
    """Return the seconds that work takes, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def inversion(folder: Path) -> None:
    """Invert activations of fewer units than there are pixels."""
    data = load("cifar10", folder)
    inputs = data.normalised[0].inputs[:: len(data.train.inputs) // 32][:32]
    low, high = (data.space.to_inputs(torch.full(data.space.shape, v)) for v in (0.0, 1.0))
    layers = (nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 6, 3, padding=1), nn.Linear(3072, 512))
    for layer in layers:
        medians = []
        for seed in range(3):
            nn.init.normal_(layer.weight, generator=generator("layer", seed))
            nn.init.zeros_(layer.bias)
            measurement = Measurement(layer, data.space.shape)
            activations = measurement.forward(inputs).clamp(min=0)
            found = invert(measurement, activations, low, high)
            levels = psnrs(Reconstruction(found.inputs), inputs, data)
            medians.append(float(levels.median()))
        ratio = float(found.equations.double().mean()) / inputs[0].numel()
        print(
            f"{layer}: {ratio:.2f} equations per unknown, medians of three draws "
            f"{', '.join(f'{median:.1f}' for median in medians)} dB",
            flush=True,
        )


def sound(folder: Path) -> None:
    """Attack a CNN over time on spoken digits."""
    data = load("audio/fsdd", folder)
    samples = data.space.shape[1]
    model = nn.Sequential(
        nn.Conv1d(1, 12, 9, padding=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12 * samples, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )
    for examples, mean in ((32, 58.6), (64, 45.8)):
        seen = upload(ARES(), data, model, examples)
        guess = ARES().reconstruct(seen.observation, generator("attack"))
        levels = psnrs(guess, seen.truth.inputs, data)
        print(f"spoken digits, batch {examples}: {summary(levels)} (paper {mean})", flush=True)


if __name__ == "__main__":
    COMMANDS = {
        "table": table,
        "mlp": mlp,
        "summed": summed,
        "time": timing,
        "inversion": inversion,
        "sound": sound,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("LEAKFRONTIER_DATA", ".")))
    arguments = parser.parse_args()
    COMMANDS[arguments.what](arguments.data)
