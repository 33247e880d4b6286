"""SPEAR++ beyond the paper's tables, on CIFAR-10.

python benchmarks/spear.py speed  [--data DIR]   our procedure and the paper's, in one run
python benchmarks/spear.py phase  [--data DIR]   recovered share over batch size / width
python benchmarks/spear.py raw    [--data DIR]   inputs that are not centred

`phase` writes docs/lab/spear_phase.csv and docs/lab/spear_phase.svg.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import altair as alt
import pandas as pd
import torch
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedSGD, SPEARPlusPlus
from leakfrontier.defenses import Batch, Defense
from leakfrontier.evaluate.client.client import Client, ThreatModel, Upload, observe
from leakfrontier.evaluate.data.data import Dataset, load_dataset
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

PAPER = SPEARPlusPlus(
    loss="l1",
    optimizer="geoopt",
    starts="uniform",
    steps=500,
    initialisations=1_000_000,
    patience=1_000_000,
)
EXACT = 90.0


def upload(data: Dataset, size: int, width: int, seed: int, *, centred: bool = True) -> Upload:
    """Return the gradient of an untrained perceptron for a random batch."""
    rng = generator("SPEAR++ benchmark", size, width, seed)
    space = data.space
    if not centred:
        space = replace(space, mean=(0.0,), std=(1.0,))
    model = build_model("mlp", space, rng, width=width)
    chosen = torch.randperm(len(data.train.targets), generator=rng)[:size]
    batch = Batch(space.to_inputs(data.train.inputs[chosen]), data.train.targets[chosen])
    client = Client(model, cross_entropy, Defense(), FedSGD(), space)
    return observe(client, [batch], ThreatModel(), rng)[0]


def attack(adversary: SPEARPlusPlus, seen: Upload, seed: int) -> tuple[float, float]:
    """Return the share of exact images, and the seconds."""
    start = time.perf_counter()
    guess = adversary.reconstruct(seen.observation, generator("attack", seed))
    seconds = time.perf_counter() - start
    space = seen.observation.space
    truth = space.to_unit(seen.truth.inputs)
    pixels = torch.cat([space.to_unit(guess.inputs), torch.zeros_like(truth[:1])])
    psnr = metrics.psnr(pixels[metrics.match(pixels[:-1], truth)], truth)
    return float((psnr > EXACT).double().mean()), seconds


def speed(data: Dataset) -> None:
    """Compare the time to full recovery at batch size 65 and width 1000."""
    for seed in range(3):
        seen = upload(data, 65, 1000, seed)
        ours = attack(SPEARPlusPlus(), seen, seed)
        print(f"seed {seed}: ours {ours[0]:.0%} in {ours[1]:.2f} s", flush=True)
        for name, adversary in (
            ("with geoopt", PAPER),
            ("with our batched update", replace(PAPER, optimizer="scalar-adam")),
        ):
            share, seconds = attack(adversary, seen, seed)
            print(
                f"  the paper's procedure {name}: {share:.0%} in {seconds:.1f} s, "
                f"{seconds / ours[1]:.0f} times",
                flush=True,
            )


def phase(data: Dataset) -> None:
    """Measure the recovered share over batch size / width, and draw it."""
    sizes = {
        200: (20, 30, 40, 50, 60, 80),
        500: (50, 75, 100, 125, 150),
        1000: (100, 150, 200),
    }
    columns = ["width", "batch size", "seed", "batch size / width", "recovered", "seconds"]
    rows = []
    for width, batches in sizes.items():
        for size in batches:
            for seed in range({200: 5, 500: 2, 1000: 1}[width]):
                exact, seconds = attack(
                    SPEARPlusPlus(patience=10), upload(data, size, width, seed), seed
                )
                rows.append((width, size, seed, size / width, exact, seconds))
                print(rows[-1], flush=True)
                table = pd.DataFrame(rows, columns=columns)
                table.to_csv("docs/lab/spear_phase.csv", index=False, float_format="%.4g")
    lines = (
        alt.Chart(table)
        .mark_line(point=True)
        .encode(
            x=alt.X("batch size / width:Q"),
            y=alt.Y("mean(recovered):Q", title="images recovered exactly", axis={"format": "%"}),
            color=alt.Color("width:N"),
        )
        .properties(width=420, height=260)
    )
    lines.save("docs/lab/spear_phase.svg")


def raw(data: Dataset) -> None:
    """Compare centred inputs with pixels in [0, 1]."""
    for size, width in ((5, 200), (10, 200), (20, 200), (20, 1000), (65, 1000), (65, 4000)):
        seeds = range(5 if width < 4000 else 2)
        for centred in (True, False):
            shares, seconds = zip(
                *(
                    attack(
                        SPEARPlusPlus(patience=10),
                        upload(data, size, width, seed, centred=centred),
                        seed,
                    )
                    for seed in seeds
                ),
                strict=True,
            )
            print(
                f"b={size}, m={width}, {'centred' if centred else 'raw'}: batches "
                f"{sum(share == 1 for share in shares)} of {len(shares)}, images "
                f"{sum(shares) / len(shares):.0%}, median {median(seconds):.1f} s",
                flush=True,
            )


def main() -> None:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("speed", "phase", "raw"))
    parser.add_argument("--data", type=Path, default=os.environ.get("LEAKFRONTIER_DATA"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_dataset("cifar10" if options.data is None else str(Path(options.data) / "cifar10"))
    {"speed": speed, "phase": phase, "raw": raw}[options.what](data)


if __name__ == "__main__":
    main()
