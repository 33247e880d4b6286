"""Analytic inversion: what breaks the exact chain, pictures, and how fast analyses are.

python benchmarks/analytic.py defenses [--data DIR]   PSNR against strength, to docs/
python benchmarks/analytic.py pictures [--data DIR]   images and what attacks make of them, to docs/
python benchmarks/analytic.py analyse                 ten classifiers of torchvision
python benchmarks/analytic.py photo SIZE [--data DIR] one photo, R-CONV++ and R-GAP, with memory

DIR holds cifar100 as images in train/ and test/ (and imagenet_sample224 for photos). Seconds are
processor time of one core.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import altair as alt
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from leakfrontier.adversaries import RCONV, RGAP, Adversary, NotApplicable
from leakfrontier.defenses import (
    ATS,
    DPSGD,
    Defense,
    Noise,
    Quantization,
    TopK,
)
from leakfrontier.evaluate import metrics
from leakfrontier.evaluate.architecture import analyse as analyse_model
from leakfrontier.evaluate.architecture import build, space_of
from leakfrontier.evaluate.data import load_dataset
from leakfrontier.evaluate.papers.rconv import upload_of
from leakfrontier.evaluate.papers.table import find_data
from leakfrontier.evaluate.seeds import generator

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = 4
CLASSIFIERS = (
    *("alexnet", "vgg11", "vgg16", "resnet18", "resnet50", "densenet121", "mobilenet_v2"),
    *("squeezenet1_0", "efficientnet_b0", "vit_b_16"),
)


def strengths() -> Iterator[tuple[str, float, Defense]]:
    """Yield families of defenses, with their strengths from weak to strong."""
    yield "none", 0.0, Defense()
    for exponent in range(-12, 0):
        yield "noise (sigma)", 10.0**exponent, Noise(scale=10.0**exponent)
    for multiplier in (1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0):
        yield "DP-SGD (noise multiplier)", multiplier, DPSGD(noise_multiplier=multiplier)
    for bits in (16, 12, 8, 4, 2):
        yield "quantization (2^-bits)", 2.0**-bits, Quantization(bits=bits)
    for ratio in (0.999, 0.99, 0.9, 0.5, 0.1):
        yield "top-k (share dropped)", 1 - ratio, TopK(ratio=ratio)
    yield "ATS", 0.0, ATS(policy="3-1-7+43-18-18")


def psnr(attack: Adversary, problem: dict[str, object], data: str, seed: int, d: Defense) -> float:
    """Return the PSNR of one image's reconstruction; NaN if the attack does not apply."""
    rng = generator("analytic", problem, seed)
    upload = upload_of(problem, load_dataset(data), rng, d)
    try:
        guess = attack.reconstruct(upload.observation, rng)
    except NotApplicable:
        return float("nan")
    return float(metrics.psnr(guess.inputs, upload.truth.inputs)[0])


def defenses(folder: Path) -> None:
    """Measure what is left of an image under each family of defenses."""
    data = find_data("cifar100", folder)[0]
    problem: dict[str, object] = {"network": "LeNet", "activation": "relu", "precision": "single"}
    rows = []
    for family, strength, defense in strengths():
        values = [psnr(RCONV(), problem, data, seed, defense) for seed in range(IMAGES)]
        median = statistics.median(values)
        rows.append({"family": family, "strength": strength, "psnr": median})
        print(
            f"{family} {strength:g}: median {median:.1f} dB, {min(values):.1f} to {max(values):.1f}"
        )
    frame = pd.DataFrame(rows)
    frame.to_csv(DOCS / "analytic_defenses.csv", index=False)
    shown = frame[frame["strength"] > 0]
    alt.Chart(shown).mark_line(point=True).encode(
        x=alt.X("strength:Q", scale=alt.Scale(type="log"), title="strength"),
        y=alt.Y("psnr:Q", title="median PSNR (dB, peak 1)"),
        color=alt.Color("family:N", title=None),
    ).properties(width=460, height=280).save(str(DOCS / "analytic_defenses.svg"))


def pictures(folder: Path) -> None:
    """Draw images above what R-CONV++ makes of them: exact, and under growing noise."""
    data = load_dataset(find_data("cifar100", folder)[0])
    problem = {"network": "LeNet", "activation": "relu", "precision": "single"}
    rows: list[list[Tensor]] = []
    for scale in (None, 0.0, 1e-6, 1e-5, 1e-4, 1e-3):
        row = []
        for seed in range(6):
            rng = generator("pictures", seed)
            upload = upload_of(problem, data, rng, Noise(scale=scale or 0.0))
            guess = RCONV().reconstruct(upload.observation, rng).inputs
            row.append((upload.truth.inputs if scale is None else guess)[0])
        rows.append(row)
    grid = torch.cat([torch.cat(row, dim=2) for row in rows], dim=1).clamp(0, 1)
    pixels = (grid.permute(1, 2, 0) * 255).round().byte().numpy()
    image = Image.fromarray(pixels)
    size = (2 * image.width, 2 * image.height)
    image.resize(size, Image.Resampling.NEAREST).save(DOCS / "analytic_noise.png")
    print("rows: truth; R-CONV++ without noise, and with sigma 1e-6, 1e-5, 1e-4, 1e-3")


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


def photo(size: int, folder: Path) -> None:
    """Attack one photo by both attacks, and print time and memory."""
    name = "tiny_imagenet20" if size <= 64 else "imagenet_sample224"
    data = load_dataset(find_data(name, folder)[0])
    for attack in (RCONV(), RGAP()):
        rng = generator("photo", size)
        upload = upload_of({"network": "LeNet-ex", "size": size}, data, rng)
        begun = time.process_time()
        guess = attack.reconstruct(upload.observation, rng)
        seconds = time.process_time() - begun
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        level = float(metrics.psnr(guess.inputs, upload.truth.inputs)[0])
        residuals = {layer: f"{value:.0e}" for layer, value in (guess.residuals or {}).items()}
        print(
            f"{type(attack).__name__} {size} x {size}: {level:.1f} dB, {seconds:.1f} s, "
            f"{memory:.1f} GiB at most so far, residuals {residuals}",
            flush=True,
        )


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("defenses", "pictures", "analyse", "photo"))
    parser.add_argument("size", nargs="?", type=int, default=64)
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
        photo(given.size, given.data)


if __name__ == "__main__":
    main()
