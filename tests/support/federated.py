"""Small models and batches that several tests share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import (
    FedSGD,
    ImageSpace,
    Observation,
    Protocol,
    Reconstruction,
    TokenSpace,
)
from leakfrontier.adversaries.exact.relu_layer import Factors, factorise, find_layer
from leakfrontier.defenses import Batch, Defense, Update
from leakfrontier.evaluate.client.client import Client, ThreatModel, observe
from leakfrontier.evaluate.modality import metrics

SPACE = ImageSpace(shape=(3, 8, 8), classes=10, mean=(0.5,), std=(0.25,))
TOKENS = TokenSpace(shape=(4,), classes=2, vocabulary=9)


@dataclass
class Sum(Defense):
    """Aggregation without the cryptography: the server sees the sum."""

    def on_round(self, updates: Sequence[Update], rng: Generator) -> list[Update]:
        return [{name: torch.stack([u[name] for u in updates]).sum(dim=0) for name in updates[0]}]


def rng(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def mlp(hidden: int = 32) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(192, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )
    )


def convolutional() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.GroupNorm(2, 6),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(384, 10),
        )
    )


def batch(size: int, seed: int = 0) -> Batch:
    draws = rng(seed)
    pixels = torch.rand(size, *SPACE.shape, generator=draws)
    return Batch(SPACE.to_inputs(pixels), torch.randint(10, (size,), generator=draws))


def observed(
    model: nn.Module,
    share: Batch,
    defense: Defense | None = None,
    protocol: Protocol | None = None,
    threat: ThreatModel | None = None,
) -> Observation:
    client = make_client(model, defense, protocol)
    (upload,) = observe(client, [share], threat or ThreatModel(), rng(1))
    return upload.observation


def make_client(
    model: nn.Module, defense: Defense | None = None, protocol: Protocol | None = None
) -> Client:
    return Client(model, cross_entropy, defense or Defense(), protocol or FedSGD(), SPACE)


def deep(activation: nn.Module, bias: bool = True) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(192, 100, bias=bias),
            activation,
            nn.Linear(100, 80),
            nn.ReLU(),
            nn.Linear(80, 10),
        )
    )


def factors(observation: Observation, layer: str | None = None) -> Factors:
    found = factorise(observation, find_layer(observation, layer))
    assert found is not None
    return found


def psnr(guess: Reconstruction, truth: torch.Tensor) -> torch.Tensor:
    """Return the PSNR of each example, without the cap of the report."""
    pixels, private = SPACE.to_unit(guess.inputs.double()), SPACE.to_unit(truth.double())
    matched = pixels[metrics.match(pixels, private)]
    return -10 * (matched - private).square().flatten(1).mean(1).log10()
