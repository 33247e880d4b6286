"""Analytic inversion: effect of defenses, pictures, and speed of the analysis.

python benchmarks/analytic.py defenses [--family F]   PSNR against strength, to docs/lab/
python benchmarks/analytic.py pictures                images and attacks, to docs/lab/
python benchmarks/analytic.py analyse                 ten classifiers of torchvision
python benchmarks/analytic.py photo SIZE              a photo by both attacks, to docs/lab/

`defenses` reads CIFAR-100 from the folder of --data or LEAKFRONTIER_DATA, with images in train/ and
test/. The others use images that may be published: Fashion-MNIST, and NASA's portrait of Eileen
Collins, which is in the public domain. Seconds are processor time of one core.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import altair as alt
import pandas as pd
import skimage.data
import torch
from PIL import Image
from torch import Tensor

from leakfrontier.adversaries import (
    RCONV,
    RGAP,
    Adversary,
    ImageSpace,
    NotApplicable,
    Reconstruction,
)
from leakfrontier.defenses import (
    ATS,
    DPSGD,
    Batch,
    Defense,
    Noise,
    Quantization,
    SecureAggregation,
    TopK,
)
from leakfrontier.defenses.secagg.secure_aggregation import Summed
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.data.dataset import Dataset
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.architecture import analyse as analyse_model
from leakfrontier.evaluate.models.architecture import build, space_of
from leakfrontier.evaluate.papers.rconv import upload_of
from leakfrontier.evaluate.papers.table import PaperSetting, find_data

DOCS = Path(__file__).parents[1] / "docs" / "lab"
IMAGES = 3
CLASSIFIERS = (
    *("alexnet", "vgg11", "vgg16", "resnet34", "resnet50", "densenet121", "mobilenet_v2"),
    *("squeezenet1_0", "efficientnet_b0", "vit_b_16"),
)

Fitted = Callable[[Tensor], Defense]
"""Returns a defense for the entries of an undefended update."""


@dataclass(frozen=True)
class Point:
    """A defense of some strength.

    Attributes:
        family: Family of the defense, and meaning of its strength.
        strength: Strength of the defense.
        problem: The attacked setting.
        fit: Returns the defense for an undefended update.
    """

    family: str
    strength: float
    problem: PaperSetting
    fit: Fitted


def strengths() -> Iterator[Point]:
    """Yield families of defenses from weak to strong, with the attacked setting."""
    lenet = {"network": "LeNet", "activation": "sigmoid"}
    for exponent in (-12, -10, -8, -6, -5, -4, -3, -2):
        scale = 10.0**exponent
        yield Point("noise: sigma / size of an entry", scale, lenet, _relative_noise(scale))
    for exponent in range(-12, 1, 2):
        defense = DPSGD(10.0**exponent, 1.0)
        yield Point("DP-SGD: noise multiplier", 10.0**exponent, lenet, _always(defense))
    for bits in (16, 14, 12, 10, 8, 4):
        yield Point("quantization: bits", bits, lenet, _always(Quantization(bits=bits)))
    for ratio in (1.0, 0.99, 0.9, 0.7, 0.5, 0.3, 0.1):
        yield Point("top-k: share kept", ratio, lenet, _always(TopK(ratio=ratio)))
    for length in (0, 1, 2, 3):
        policy = "-".join(("3", "1", "7")[:length])
        yield Point("ATS: transformations", length, lenet, _always(ATS(policy=policy)))
    for clients in (1, 2, 4, 8, 16, 32):
        several = {"network": "LeNet-ex", "batch": clients, "clients": clients}
        yield Point("exact sum: clients", clients, several, _always(Summed()))
    for bits in (32, 27, 22):
        several = {"network": "LeNet-ex", "batch": 4, "clients": 4}
        yield Point("secure aggregation of 4: bits", bits, several, _fitting_sum(4, bits))


def _always(defense: Defense) -> Fitted:
    return lambda _: defense


def _relative_noise(scale: float) -> Fitted:
    """Return noise relative to the root mean square of an update's entries."""
    return lambda entries: Noise(scale=scale * float(entries.square().mean().sqrt()))


def _fitting_sum(clients: int, bits: int) -> Fitted:
    """Return secure aggregation with a range of twice the largest entry of the sum."""
    return lambda entries: SecureAggregation(
        clients=clients, bits=bits, clipping_range=2 * float(entries.abs().max())
    )


def levels(point: Point, data: Dataset, seed: int) -> tuple[float, float]:
    """Return the median PSNR against the private images and against the trained images."""
    seeds = ("analytic", point.problem, seed)
    clean = upload_of(point.problem, data, generator(*seeds), Summed()).observation
    entries = torch.cat([value.flatten() for value in clean.update.values()])
    rng = generator(*seeds)
    upload = upload_of(point.problem, data, rng, point.fit(entries))
    guess = RCONV().reconstruct(upload.observation, rng).inputs
    found = []
    for truth in (upload.truth.inputs, upload.trained_on.inputs):
        errors = torch.cdist(guess.flatten(1), truth.flatten(1)).square() / truth[0].numel()
        each = -10 * errors.clamp(min=metrics.LEAST_ERROR).log10()
        found.append(float(each.amax(0).median()))
    return found[0], found[1]


def defenses(folder: Path, only: str) -> None:
    """Measure the PSNR family by family. Keep the stored rows of families not chosen."""
    data = load_dataset(find_data("cifar100", folder)[0])
    table = DOCS / "analytic_defenses.csv"
    families = groupby(strengths(), key=lambda point: point.family)
    for family, points in ((one, points) for one, points in families if only in one):
        frame = pd.DataFrame([_measured(point, data) for point in points])
        if table.exists():
            before = pd.read_csv(table)
            frame = pd.concat([before[before.family != family], frame])
        order = list(dict.fromkeys(point.family for point in strengths()))
        frame = frame.sort_values("family", key=lambda names: names.map(order.index), kind="stable")
        frame.to_csv(table, index=False, float_format="%.6g")
        _draw(frame).save(str(DOCS / "analytic_defenses.svg"))


def _measured(point: Point, data: Dataset) -> dict[str, object]:
    """Measure a defense, print its row and return it."""
    found, refused = [], ""
    for seed in range(IMAGES):
        try:
            found.append(levels(point, data, seed))
        except NotApplicable as reason:
            refused = str(reason)
    private, trained = (
        [statistics.median(column) for column in zip(*found, strict=True)]
        if found
        else (None, None)
    )
    values = ", ".join(f"{level:.1f}" for level, _ in found)
    trained_on = "" if trained is None else f", {trained:.1f} dB of what was trained on"
    print(f"{point.family} {point.strength:g}: {values} dB{trained_on} {refused}", flush=True)
    row = {"family": point.family, "strength": point.strength, "private": private}
    return {**row, "trained_on": trained, "uploads": len(found), "refused": refused}


def _draw(frame: pd.DataFrame) -> alt.ConcatChart:
    """Return curves for each family, for private and for trained images."""
    long = frame.melt(
        ["family", "strength"], ["private", "trained_on"], var_name="of", value_name="psnr"
    ).dropna()
    charts = []
    for family, part in long.groupby("family", sort=False):
        name = str(family)
        kind: Literal["log", "linear"] = (
            "log" if name.startswith(("noise", "DP", "exact")) else "linear"
        )
        if (part.groupby("strength").psnr.nunique() == 1).all():
            part = part[part.of == "private"]
        fewer = "bits" in name or "kept" in name  # a smaller value is stronger
        across = alt.X("strength:Q", title=name).scale(type=kind, reverse=fewer).axis(tickCount=5)
        up = alt.Y("psnr:Q", title="median PSNR (dB)").scale(domain=[0, 200])
        color = alt.Color("of:N", title=None).scale(domain=["private", "trained_on"])
        chart = alt.Chart(part).mark_line(point=True).encode(x=across, y=up, color=color)
        charts.append(chart.properties(width=190, height=130))
    return alt.concat(*charts, columns=3)


def _save(rows: Sequence[Sequence[Tensor]], name: str, scale: int = 2) -> None:
    """Save images as a grid."""
    grid = torch.cat([torch.cat([*row], dim=2) for row in rows], dim=1).clamp(0, 1)
    grid = grid.expand(3, -1, -1)
    image = Image.fromarray((grid.permute(1, 2, 0) * 255).round().byte().numpy())
    size = (scale * image.width, scale * image.height)
    image.resize(size, Image.Resampling.NEAREST).save(DOCS / name, optimize=True)


def pictures() -> None:
    """Draw images, and below them the guesses of R-CONV++ under growing noise."""
    data = load_dataset("fashion-mini")
    problem: PaperSetting = {"network": "LeNet", "activation": "sigmoid"}
    rows: list[list[Tensor]] = [[] for _ in range(6)]
    for seed in range(10):
        upload = upload_of(problem, data, generator("pictures", seed))
        values = [value.flatten() for value in upload.observation.update.values()]
        size = float(torch.cat(values).square().mean().sqrt())
        rows[0].append(upload.truth.inputs[0])
        for row, scale in zip(rows[1:], (0.0, 1e-4, 1e-3, 3e-3, 1e-2), strict=True):
            rng = generator("pictures", seed)
            noisy = upload_of(problem, data, rng, Noise(scale=scale * size)).observation
            row.append(RCONV().reconstruct(noisy, rng).inputs[0])
    _save(rows, "analytic_noise.png")
    print("rows: truth; without noise; sigma 1e-4, 1e-3, 3e-3 and 1e-2 of the gradient's size")


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


def _portrait() -> Dataset:
    """Return a dataset of one photo with ten classes."""
    image = torch.from_numpy(skimage.data.astronaut()).permute(2, 0, 1) / 255
    batch = Batch(image.unsqueeze(0), torch.zeros(1, dtype=torch.long))
    classes = tuple(map(str, range(10)))
    return Dataset("portrait", batch, batch, classes, ImageSpace((3, 512, 512), len(classes)))


def _attacked(
    attack: Adversary, problem: PaperSetting
) -> tuple[Tensor, Reconstruction, float, float]:
    """Return a photo, the guess of an attack, its seconds, and the peak GiB of the process."""
    torch.set_num_threads(1)
    data, rng = _portrait(), generator("photo", problem["size"])
    upload = upload_of(problem, data, rng)
    begun = time.process_time()
    guess = attack.reconstruct(upload.observation, rng)
    seconds = time.process_time() - begun
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return upload.truth.inputs, guess, seconds, memory


def photo(size: int, precision: str) -> None:
    """Run both attacks on one photo, print time and memory, and draw the guesses."""
    problem = {"network": "LeNet-ex", "size": size, "precision": precision}
    shown: list[Tensor] = []
    for attack in (RCONV(), RGAP()):
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:  # for its own peak
            task = alone.submit(_attacked, attack, problem)
            truth, guess, seconds, memory = task.result()
        shown = [*(shown or truth), *guess.inputs]
        residuals = {layer: f"{value:.0e}" for layer, value in (guess.residuals or {}).items()}
        print(
            f"{type(attack).__name__} {size} x {size}, {precision}: "
            f"{float(metrics.psnr(guess.inputs, truth)[0]):.1f} dB, {seconds:.1f} s, "
            f"{memory:.1f} GiB, residuals {residuals}",
            flush=True,
        )
    _save([shown], f"analytic_{size}_{precision}.png", scale=1)


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("defenses", "pictures", "analyse", "photo"))
    parser.add_argument("size", nargs="?", type=int, default=64)
    parser.add_argument("--family", default="", help="part of a family's name (default: all)")
    parser.add_argument("--precision", choices=("double", "single"), default="double")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("LEAKFRONTIER_DATA", ".")))
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "defenses":
        defenses(given.data, given.family)
    elif given.what == "pictures":
        pictures()
    elif given.what == "analyse":
        analyse()
    else:
        photo(given.size, given.precision)


if __name__ == "__main__":
    main()
