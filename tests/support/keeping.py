"""A malicious server that keeps a secret of each round, and clients that alter what they get."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, nn

from leakfrontier.adversaries import (
    Adversary,
    Crafted,
    Observation,
    Reconstruction,
    Round,
    Threat,
)
from leakfrontier.defenses import Defense

CRAFTED: list[tuple[object, Secret]] = []
"""What the server had kept of the round before, and what it kept."""

READ: list[tuple[object, bool]] = []
"""What it found when it read, and whether the client trained on what it was sent."""


@dataclass(frozen=True, eq=False)
class Secret:
    """What the server keeps: the row of layer 1 that is scaled, and the model."""

    row: int
    sent: nn.Module


@dataclass(frozen=True)
class Keeping(Adversary):
    """Scale a row of the first layer that it draws."""

    threat: ClassVar[Threat] = Threat.PARAMETERS

    def craft(self, model: nn.Module, round: Round, rng: Generator) -> Crafted:
        """Return the same model for all, and which row it is."""
        crafted = copy.deepcopy(model)
        layer = crafted.get_submodule("1")
        assert isinstance(layer, nn.Linear)
        secret = Secret(int(torch.randint(layer.out_features, (), generator=rng)), crafted)
        with torch.no_grad():
            layer.weight[secret.row].mul_(2)
        CRAFTED.append((round.kept, secret))
        return Crafted([crafted] * round.clients, secret)

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Guess nothing."""
        kept = observation.kept
        sent = kept.sent.state_dict() if isinstance(kept, Secret) else {}
        received = observation.model.state_dict()
        READ.append((kept, all(torch.equal(value, received[n]) for n, value in sent.items())))
        return Reconstruction(torch.zeros(1, *observation.space.shape))


@dataclass
class Blurring(Defense):
    """Add noise to the model that was sent.

    Attributes:
        size: Of the noise, relative to the root mean square of a tensor.
    """

    size: float = 1e-6

    @torch.no_grad()
    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        """Return another model."""
        blurred, rng = copy.deepcopy(model), torch.Generator().manual_seed(0)
        for value in blurred.parameters():
            noise = torch.randn(value.shape, generator=rng)
            value.add_(self.size * value.square().mean().sqrt() * noise)
        return blurred


@dataclass
class Reverting(Defense):
    """Train on the model that was agreed on, whatever was sent."""

    def on_receive(self, model: nn.Module, agreed: nn.Module) -> nn.Module:
        """Return the agreed model."""
        return agreed
