"""Measure the CPU seconds of a round of federated training, with clients together and one by one.

python benchmarks/rounds.py [--clients 100] [--batch 80]
"""

from __future__ import annotations

import argparse
import time
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg, FedSGD, ImageSpace, Protocol
from leakfrontier.defenses import DPSGD, Batch, Defense, TopK
from leakfrontier.evaluate.client import client as client_module
from leakfrontier.evaluate.client.client import Client
from leakfrontier.evaluate.client.federation import Federation
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.models.models import build_model

SPACE = ImageSpace((1, 28, 28), 10)
MODELS = {"linear": {}, "mlp": {"width": 64, "hidden": 1}, "tanh_cnn": {}}
DEFENSES = (Defense(), DPSGD(noise_multiplier=1.0), TopK(ratio=0.1))
PROTOCOLS = (FedSGD(), FedAvg(epochs=1, batch_size=16, lr=0.1))
ROUNDS = 3


def main() -> None:
    """Print one line for each protocol, model and defense."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--batch", type=int, default=80)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("CPU seconds of a round, clients together and one by one, and the change of the model")
    for protocol in PROTOCOLS:
        for name in MODELS:
            for defense in DEFENSES:
                size = (arguments.clients, arguments.batch)
                together, one = _measured(name, defense, protocol, *size)
                with mock.patch.object(client_module, "summed", return_value=None):
                    alone, other = _measured(name, defense, protocol, *size)
                gap = float((one - other).norm() / other.norm())
                label = f"{type(protocol).__name__}, {name}, {type(defense).__name__}"
                print(f"{together:6.3f} {alone:6.3f}  difference {gap:.0e}  {label}", flush=True)


def _measured(
    name: str, defense: Defense, protocol: Protocol, clients: int, size: int
) -> tuple[float, torch.Tensor]:
    """Return the CPU seconds of a round after the first one, and the weights at the end."""
    model = build_model(name, SPACE, generator("model"), **MODELS[name])
    shares = [_batch(size, client) for client in range(clients)]
    client = Client(model, cross_entropy, defense, protocol, SPACE)
    federation = Federation(client, shares, clients, batch_size=size, server="sgd", lr=0.1)
    rng = generator("rounds")
    federation.round(rng)
    start = time.process_time()
    for _ in range(ROUNDS):
        federation.round(rng)
    seconds = (time.process_time() - start) / ROUNDS
    return seconds, nn.utils.parameters_to_vector(model.parameters()).detach()


def _batch(size: int, client: int) -> Batch:
    rng = generator("examples", client)
    inputs = torch.randn(size, *SPACE.shape, generator=rng)
    return Batch(inputs, torch.randint(SPACE.classes, (size,), generator=rng))


if __name__ == "__main__":
    main()
