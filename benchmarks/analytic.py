"""Analytic inversion: what breaks the exact chain, pictures, and how fast analyses are.

python benchmarks/analytic.py defenses [--data DIR]   PSNR against strength, to docs/
python benchmarks/analytic.py pictures [--data DIR]   images and what attacks make of them, to docs/
python benchmarks/analytic.py analyse                 ten classifiers of torchvision
python benchmarks/analytic.py photo SIZE [--data DIR] a photo by both attacks, with memory; to docs/

DIR holds cifar100 as images in train/ and test/ (and imagenet_sample224 for photos). Seconds are
processor time of one core.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import altair as alt
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from leakfrontier.adversaries import RCONV, RGAP, NotApplicable
from leakfrontier.defenses import (
    ATS,
    DPSGD,
    Defense,
    Noise,
    Quantization,
    SecureAggregation,
    TopK,
)
from leakfrontier.evaluate import metrics
from leakfrontier.evaluate.architecture import analyse as analyse_model
from leakfrontier.evaluate.architecture import build, space_of
from leakfrontier.evaluate.data import load_dataset
from leakfrontier.evaluate.dataset import Dataset
from leakfrontier.evaluate.papers.rconv import upload_of
from leakfrontier.evaluate.papers.table import Setting, find_data
from leakfrontier.evaluate.seeds import generator

DOCS = Path(__file__).parents[1] / "docs"
NOISE = "noise: sigma / size of an entry"
IMAGES = 3
CLASSIFIERS = (
    *("alexnet", "vgg11", "vgg16", "resnet18", "resnet50", "densenet121", "mobilenet_v2"),
    *("squeezenet1_0", "efficientnet_b0", "vit_b_16"),
)


def strengths() -> Iterator[tuple[str, float, Setting, Defense]]:
    """Yield families of defenses by strength, from weak to strong, with what is attacked."""
    lenet = {"network": "LeNet", "activation": "sigmoid"}
    for exponent in (-12, -10, -8, -6, -5, -4, -3, -2):
        yield NOISE, 10.0**exponent, lenet, Noise(scale=10.0**exponent)
    for exponent in range(-12, 1, 2):
        yield "DP-SGD: noise multiplier", 10.0**exponent, lenet, DPSGD(10.0**exponent, 1.0)
    for bits in (16, 12, 8, 4, 2):
        yield "quantization: bits", bits, lenet, Quantization(bits=bits)
    for ratio in (1.0, 0.999, 0.99, 0.9, 0.5, 0.1):
        yield "top-k: share kept", ratio, lenet, TopK(ratio=ratio)
    for length in (0, 1, 2, 3):
        policy = "-".join(("3", "1", "7")[:length])
        yield "ATS: transformations", length, lenet, ATS(policy=policy)
    for clients in (1, 2, 4, 8):
        several = {"network": "LeNet-ex", "batch": clients, "clients": clients}
        yield "secure aggregation: clients", clients, several, SecureAggregation(clients=clients)


def levels(problem: Setting, data: Dataset, seed: int, defense: Defense) -> tuple[float, float]:
    """Return the mean PSNR against private images, and against what was trained on."""
    rng = generator("analytic", problem, seed)
    if isinstance(defense, Noise):
        clean = upload_of(problem, data, generator("analytic", problem, seed)).observation.update
        size = torch.cat([value.flatten() for value in clean.values()]).square().mean().sqrt()
        defense = Noise(scale=defense.scale * float(size))
    upload = upload_of(problem, data, rng, defense)
    guess = RCONV().reconstruct(upload.observation, rng).inputs
    found = []
    for truth in (upload.truth.inputs, upload.trained_on.inputs):
        errors = torch.cdist(guess.flatten(1), truth.flatten(1)).square() / truth[0].numel()
        each = -10 * errors.clamp(min=metrics.LEAST_ERROR).log10()
        found.append(float(each.amax(0).mean()))
    return found[0], found[1]


def defenses(folder: Path) -> None:
    """Measure what is left of images under each family of defenses."""
    data = load_dataset(find_data("cifar100", folder)[0])
    rows = []
    for family, strength, problem, defense in strengths():
        found, refused = [], ""
        for seed in range(IMAGES):
            try:
                found.append(levels(problem, data, seed, defense))
            except NotApplicable as reason:
                refused = f", {IMAGES - len(found)} not applicable: {reason}"
        private, trained = (
            statistics.median(column) if found else None
            for column in (zip(*found, strict=True) if found else ((), ()))
        )
        rows.append(
            {"family": family, "strength": strength, "psnr": private, "trained_on": trained}
        )
        values = ", ".join(f"{level:.1f}" for level, _ in found)
        print(f"{family} {strength:g}: {values} dB (of what was trained on: {trained}){refused}")
    frame = pd.DataFrame(rows)
    frame.to_csv(DOCS / "analytic_defenses.csv", index=False)
    charts = []
    for family, part in frame.groupby("family", sort=False):
        scale = alt.Scale(type="log" if str(family).startswith(("noise", "DP")) else "linear")
        charts.append(
            alt.Chart(part)
            .mark_line(point=True)
            .encode(
                x=alt.X("strength:Q", scale=scale, title=str(family)),
                y=alt.Y("psnr:Q", title="PSNR (dB)", scale=alt.Scale(domain=[0, 200])),
            )
            .properties(width=190, height=130)
        )
    alt.concat(*charts, columns=3).save(str(DOCS / "analytic_defenses.svg"))


def _save(rows: Sequence[Sequence[Tensor]], name: str, scale: int = 2) -> None:
    """Save images as a grid."""
    grid = torch.cat([torch.cat([*row], dim=2) for row in rows], dim=1).clamp(0, 1)
    image = Image.fromarray((grid.permute(1, 2, 0) * 255).round().byte().numpy())
    size = (scale * image.width, scale * image.height)
    image.resize(size, Image.Resampling.NEAREST).save(DOCS / name, optimize=True)


def pictures(folder: Path) -> None:
    """Draw images above what R-CONV++ makes of them: under growing noise, and of a batch."""
    data = load_dataset(find_data("cifar100", folder)[0])
    problem: Setting = {"network": "LeNet", "activation": "sigmoid"}
    rows: list[list[Tensor]] = [[] for _ in range(6)]
    for seed in range(5):
        upload = upload_of(problem, data, generator("pictures", seed))
        values = [value.flatten() for value in upload.observation.update.values()]
        size = float(torch.cat(values).square().mean().sqrt())
        rows[0].append(upload.truth.inputs[0])
        for row, scale in zip(rows[1:], (0.0, 1e-8, 1e-6, 1e-5, 1e-4), strict=True):
            rng = generator("pictures", seed)
            noisy = upload_of(problem, data, rng, Noise(scale=scale * size)).observation
            row.append(RCONV().reconstruct(noisy, rng).inputs[0])
    _save(rows, "analytic_noise.png")
    print("rows: truth; without noise; sigma 1e-8, 1e-6, 1e-5 and 1e-4 of the gradient's size")
    rng = generator("pictures", "batch")
    upload = upload_of({"network": "LeNet-ex", "batch": 16}, data, rng)
    truth = upload.truth.inputs
    rows = [[*truth]]
    for separation in ("rows", "peeling", "bilinear"):
        guess = RCONV(separation=separation).reconstruct(upload.observation, rng).inputs
        distances = torch.cdist(truth.flatten(1), guess.flatten(1))
        nearest = guess[distances.argmin(1)]
        found = (distances.amin(1).square() / truth[0].numel()) < 0.01
        rows.append([*torch.where(found.view(-1, 1, 1, 1), nearest, 0.5)])
        print(f"batch of 16, {separation}: {int(found.sum())} above 20 dB")
    _save(rows, "analytic_batch.png")


def analyse() -> None:
    """Time the analysis of ten classifiers."""
    space = space_of((3, 224, 224), 1000)
    whole = time.process_time()
    for name in CLASSIFIERS:
        begun = time.process_time()
        found = analyse_model(build(name, space), space.shape, name)
        verdict = "resists" if found.resists else "does not resist"
        seconds = time.process_time() - begun
        print(
            f"{name}: {len(found.layers)} steps, {verdict} ({found.verdicts[0].reason}), "
            f"{seconds:.2f} s"
        )
    print(f"all: {time.process_time() - whole:.1f} s")


def photo(size: int, precision: str, folder: Path) -> None:
    """Attack one photo by both attacks, print time and memory, and draw what they found."""
    name = "tiny_imagenet20" if size <= 64 else "imagenet_sample224"
    data = load_dataset(find_data(name, folder)[0])
    shown = []
    for attack in (RCONV(), RGAP()):
        rng = generator("photo", size)
        problem = {"network": "LeNet-ex", "size": size, "precision": precision}
        upload = upload_of(problem, data, rng)
        begun = time.process_time()
        guess = attack.reconstruct(upload.observation, rng)
        seconds = time.process_time() - begun
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        level = float(metrics.psnr(guess.inputs, upload.truth.inputs)[0])
        residuals = {layer: f"{value:.0e}" for layer, value in (guess.residuals or {}).items()}
        shown += [guess.inputs[0]] if shown else [upload.truth.inputs[0], guess.inputs[0]]
        print(
            f"{type(attack).__name__} {size} x {size}, {precision}: {level:.1f} dB, "
            f"{seconds:.1f} s, {memory:.1f} GiB at most so far, residuals {residuals}",
            flush=True,
        )
    _save([shown], f"analytic_{size}_{precision}.png", scale=1)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("defenses", "pictures", "analyse", "photo"))
    parser.add_argument("size", nargs="?", type=int, default=64)
    parser.add_argument("--precision", choices=("double", "single"), default="double")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("LEAKFRONTIER_DATA", ".")))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "defenses":
        defenses(given.data)
    elif given.what == "pictures":
        pictures(given.data)
    elif given.what == "analyse":
        analyse()
    else:
        photo(given.size, given.precision, given.data)


if __name__ == "__main__":
    main()
