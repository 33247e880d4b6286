"""Malicious servers on CIFAR-10, beside what their papers and their authors' code gave.

python benchmarks/malicious.py rtf     [--data DIR]   Robbing the Fed, its module before a ResNet-18
python benchmarks/malicious.py direct  [--data DIR]   Robbing the Fed in the CNN of ARES
python benchmarks/malicious.py loki    [--data DIR]   LOKI, 10 clients under secure aggregation
python benchmarks/malicious.py dpsgd   [--data DIR]   all of them under DP-SGD
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import (
    LOKI,
    Adversary,
    FedAvg,
    FedSGD,
    Protocol,
    PublicData,
    Reconstruction,
    RobbingTheFed,
    RobbingTheFedDirectPass,
    Round,
)
from leakfrontier.adversaries.imprint import counted_recovery, expected_recovery
from leakfrontier.defenses import DPSGD, Batch, Defense, SecureAggregation
from leakfrontier.evaluate import metrics
from leakfrontier.evaluate.client import Client, ThreatModel, Upload, observe
from leakfrontier.evaluate.data import Dataset, load_dataset
from leakfrontier.evaluate.models import build_model
from leakfrontier.evaluate.seeds import generator


def upload(
    attack: Adversary,
    data: Dataset,
    model: nn.Module,
    examples: int,
    seed: int,
    *,
    clients: int = 1,
    defense: Defense | None = None,
    protocol: Protocol | None = None,
) -> Upload:
    """Return what the server sees of random images; the test split is public."""
    (private, public), protocol = data.normalised, protocol or FedSGD()
    known = Round(data.space, protocol, clients, examples, PublicData(*public))
    models = attack.craft(model, known, generator("craft", seed))
    rows = torch.randperm(len(private.targets), generator=generator("images", seed))
    shares = [private.at(part) for part in rows[: clients * examples].split(examples)]
    client = Client(model, cross_entropy, defense or Defense(), protocol, data.space)
    return observe(client, shares, ThreatModel(), generator("client", seed), models=models)[0]


def psnrs(guess: Reconstruction, truth: Batch, data: Dataset) -> Tensor:
    """Return the PSNR of each image; of the mean colour where there is no guess.

    Guesses are assigned so that the mean PSNR is the largest: by mean squared error, as in a
    report, exact guesses are given away for the sake of mixtures.
    """
    private = data.space.to_unit(truth.inputs.double()).flatten(1)
    nothing = data.space.to_unit(torch.zeros_like(truth.inputs[:1]).double()).flatten(1)
    guesses = torch.cat([data.space.to_unit(guess.inputs.double()).flatten(1), nothing])
    errors = torch.cdist(guesses, private).square() / private.shape[1]
    levels = -10 * errors.clamp(min=1e-16).log10()
    rows = metrics.assign(-levels[:-1])
    return levels[rows, torch.arange(len(private))]


def attacked(attack: Adversary, seen: Upload, data: Dataset) -> tuple[Tensor, float]:
    """Return the PSNR of each image, and the seconds."""
    start = time.perf_counter()
    guess = attack.reconstruct(seen.observation, generator("attack"))
    seconds = time.perf_counter() - start
    return psnrs(guess, seen.truth, data), seconds


def told(found: Tensor) -> str:
    """Return what there is to say of images."""
    counts = ", ".join(f"{int((found > level).sum())} > {level} dB" for level in (20, 30, 60))
    return (
        f"of {len(found)}: {counts}; median {float(found.median()):.1f}, "
        f"mean {float(found.mean()):.1f} dB"
    )


def rtf(data: Dataset) -> None:
    """Count the images that are exact in batches of 64, by query."""
    model = build_model("resnet18", data.space, generator("model"))
    print(
        f"expected of 64 in 1,024 bins: {64 * expected_recovery(64, 1024):.1f} (independent), "
        f"{64 * counted_recovery(64, 1024):.1f} (the paper's count)"
    )
    for name, attack, authors in (
        ("average, published thresholds", RobbingTheFed(calibrated=False), "57"),
        ("average", RobbingTheFed(), "57"),
        ("random, published thresholds", RobbingTheFed(query="random", calibrated=False), "63"),
        ("random", RobbingTheFed(query="random"), "63"),
        ("random, 4 queries", RobbingTheFed(query="random", queries=4), "-"),
    ):
        runs = [attacked(attack, upload(attack, data, model, 64, seed), data) for seed in range(5)]
        exact = [int((found > 60).sum()) for found, _ in runs]
        print(
            f"{name}: exact {exact}, {sum(exact) / 5:.1f} on average; authors' code, one batch: "
            f"{authors}; at most {max(seconds for _, seconds in runs):.2f} s",
            flush=True,
        )
    local = FedAvg(epochs=1, batch_size=8, lr=0.01)
    seen = upload(RobbingTheFed(), data, model, 64, 0, protocol=local)
    print("sparse, 8 local steps:", told(attacked(RobbingTheFed(), seen, data)[0]))


def direct(data: Dataset) -> None:
    """Compare with what ARES reports of Robbing the Fed in its CNN."""
    attack = RobbingTheFedDirectPass()
    model = build_model("cnn", data.space, generator("model"))
    for examples, paper in ((32, 17.4), (64, 17.2), (256, 15.1)):
        found, seconds = attacked(attack, upload(attack, data, model, examples, 0), data)
        print(f"{told(found)} (paper {paper} dB), {seconds:.2f} s", flush=True)


def loki(data: Dataset) -> None:
    """Repeat the authors' demonstration: 8 local steps of 8 images, learning rate 1e-4."""
    defense, demo = SecureAggregation(clients=10), FedAvg(epochs=1, batch_size=8, lr=1e-4)
    model = build_model("resnet18", data.space, generator("model"))
    for attack in (LOKI(), LOKI(readout="minmax"), LOKI(bins_per_example=8)):
        options = {"clients": 10, "defense": defense, "protocol": demo}
        seen = upload(attack, data, model, 64, 0, **options)  # type: ignore[arg-type]
        found, seconds = attacked(attack, seen, data)
        print(f"{attack}: {told(found)} (authors' code 575), {seconds:.1f} s", flush=True)


def dpsgd(data: Dataset) -> None:
    """Attack batches of 64 under DP-SGD."""
    for noise in (0.0, 0.01, 0.1, 1.0):
        for attack, name in (
            (RobbingTheFed(), "lenet"),
            (RobbingTheFedDirectPass(), "cnn"),
            (LOKI(), "lenet"),
        ):
            model = build_model(name, data.space, generator("model"))
            defense = DPSGD(noise_multiplier=noise)
            seen = upload(attack, data, model, 64, 0, defense=defense)
            found, _ = attacked(attack, seen, data)
            print(f"noise {noise}, {type(attack).__name__}: {told(found)}", flush=True)


def main() -> None:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("rtf", "direct", "loki", "dpsgd"))
    parser.add_argument("--data", type=Path, default=os.environ.get("LEAKFRONTIER_DATA"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_dataset("cifar10" if options.data is None else str(Path(options.data) / "cifar10"))
    {"rtf": rtf, "direct": direct, "loki": loki, "dpsgd": dpsgd}[options.what](data)


if __name__ == "__main__":
    main()
