"""ARES: speed of the inversion of activations, and its quality with few equations.

python benchmarks/ares.py time      [--data DIR]   a batch of 32, and one activation by cvxpy
python benchmarks/ares.py inversion [--data DIR]   few equations: 3 kernels, and 512 Gaussian rows
python benchmarks/ares.py filters   [--data DIR]   12 filters: independent ones, and opposite pairs

The dataset is CIFAR-10. `leakfrontier reproduce` measures the tables of the paper.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import cvxpy as cp
import torch
from scipy.sparse import csr_matrix, eye, kron
from torch import Tensor, nn

from leakfrontier.adversaries import ARES
from leakfrontier.adversaries.malicious.sparse_recovery import (
    Measurement,
    cosine_transform,
    invert,
    least_squares,
)
from leakfrontier.evaluate.data.data import Dataset, load_dataset
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.papers.servers import Setup, crafted_upload, psnrs
from leakfrontier.evaluate.papers.table import find_data

T = TypeVar("T")


def by_cvxpy(measurement: Measurement, activations: Tensor) -> Tensor:
    """Return the input of one activation: the solution of its equations with the least |a|_1.

    a are the cosine coefficients of tiles of 8 by 8, as in the paper. This basis is sparse, as SCS
    needs it.
    """
    size = math.prod(measurement.shape)
    pixels = torch.eye(size).view(size, *measurement.shape)
    active = (activations > 0).flatten()
    matrix = csr_matrix(measurement.forward(pixels).flatten(1)[:, active].T.double().numpy())
    goal = activations.flatten()[active].double().numpy()
    channels, *sizes = measurement.shape
    tile = cosine_transform(torch.eye(8, dtype=torch.float64)).T.numpy()
    rows, columns = (kron(eye(length // 8), tile) for length in sizes)
    basis = kron(eye(channels), kron(rows, columns)).tocsr()
    inputs = cp.Variable(size)
    problem = cp.Problem(cp.Minimize(cp.norm1(basis @ inputs)), [matrix @ inputs == goal])
    problem.solve(solver=cp.SCS)
    return torch.tensor(inputs.value).float().view(1, *measurement.shape)


def timing(data: Dataset) -> None:
    """Time a whole batch of 32, its inversion, and one activation by cvxpy."""
    model = build_model("cnn", data.space, generator("model"))
    seen = crafted_upload(ARES(), Setup(model, 32), data, generator("round"))
    seconds, _ = timed(lambda: ARES().reconstruct(seen.observation, generator("attack")))
    print(f"batch of 32: {seconds:.2f} s")
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


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the processor time of a function in seconds, and its result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def inversion(data: Dataset) -> None:
    """Invert activations with fewer units than pixels."""
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
            levels = psnrs(found.inputs, inputs, data.space)
            medians.append(float(levels.median()))
        ratio = float(found.equations.double().mean()) / inputs[0].numel()
        print(
            f"{layer}: {ratio:.2f} equations per unknown, medians of three draws "
            f"{', '.join(f'{median:.1f}' for median in medians)} dB",
            flush=True,
        )


def filters(data: Dataset) -> None:
    """Invert activations of 16 images for several draws of filters. Print the worst PSNR."""
    inputs = data.normalised[0].inputs[:: len(data.train.inputs) // 16][:16]
    for paired in (False, True):
        worst = []
        for seed in range(5):
            layer = nn.Conv2d(3, 12, 3, padding=1, bias=False)
            nn.init.normal_(layer.weight, generator=generator("layer", seed))
            if paired:
                layer.weight.data[6:] = -layer.weight.data[:6]
            measurement = Measurement(layer, data.space.shape)
            found = least_squares(measurement, measurement.forward(inputs).clamp(min=0))
            errors = data.space.to_unit(found.double()) - data.space.to_unit(inputs.double())
            levels = -10 * errors.square().flatten(1).mean(dim=1).log10()
            worst.append(f"{float(levels.min()):.0f}")
        print(f"{'pairs' if paired else 'independent'}: {', '.join(worst)} dB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("time", "inversion", "filters"))
    parser.add_argument("--data", type=Path, default=os.environ.get("LEAKFRONTIER_DATA"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = None if arguments.data is None else Path(arguments.data)
    images = load_dataset(*find_data("cifar10", folder))
    {"time": timing, "inversion": inversion, "filters": filters}[arguments.what](images)
