"""Compare buffered asynchronous training with averaging in rounds, on fashion-mini.

python benchmarks/asynchronous.py [SEEDS] [ROUNDS]

The server takes the same number of steps in both, with four uploads each. The script prints the
mean accuracy over the last rounds and over seeds, and its difference from FedAvg with the same
seeds, with the standard error.
"""

import statistics
import sys

import torch
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, FedBuff, Protocol
from leakfrontier.defenses import Defense
from leakfrontier.evaluate.client.client import Client
from leakfrontier.evaluate.client.federation import Federation
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.data.partition import partition
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.models.models import build_model

LAST = 20


def main(seeds: int = 5, rounds: int = 100) -> None:
    """Train with every staleness."""
    baseline = [accuracy(FedAvg(1, 32, 0.05), seed, rounds) for seed in range(seeds)]
    print(f"FedAvg: {100 * statistics.mean(baseline):.1f} %", flush=True)
    for delays in ("uniform", "half-normal"):
        for oldest in (1, 2, 4, 8):
            for exponent in (0.5, 0.0):
                protocol = FedBuff(
                    1,
                    32,
                    0.05,
                    buffer=4,
                    oldest=oldest,
                    delays=delays,
                    exponent=exponent,
                )
                found = [accuracy(protocol, seed, rounds) for seed in range(seeds)]
                gains = [100 * (a - b) for a, b in zip(found, baseline, strict=True)]
                error = statistics.stdev(gains) / seeds**0.5 if seeds > 1 else 0.0
                print(
                    f"FedBuff, {delays}, up to {oldest} versions old, exponent {exponent}: "
                    f"{100 * statistics.mean(found):.1f} % "
                    f"({statistics.mean(gains):+.1f} +- {error:.1f} points)",
                    flush=True,
                )


def accuracy(protocol: Protocol, seed: int, rounds: int) -> float:
    """Return the mean test accuracy over the last rounds."""
    data = load_dataset("fashion-mini")
    train, test = data.normalised
    model = build_model("mlp", data.space, generator("model", seed), width=32)
    client = Client(model, cross_entropy, Defense(), protocol, data.space)
    shares = partition(train, 8, "iid", generator("shares", seed))
    federation = Federation(client, shares, 4, server="sgd", lr=1.0)
    found: list[float] = []
    federation.train(
        rounds,
        generator("training", seed),
        at=range(rounds - LAST, rounds + 1, 4),
        on_checkpoint=lambda _, model: found.append(
            data.modality.evaluate(model, test).correct / len(test.targets)
        ),
    )
    return statistics.mean(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*(int(argument) for argument in sys.argv[1:]))
