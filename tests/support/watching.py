"""Attacks that keep what they are shown, and a model whose weights are tied."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from leakfrontier.adversaries import (
    Adversary,
    InputSpace,
    NotApplicable,
    Observation,
    Reconstruction,
)

SEEN: list[Observation] = []


@dataclass(frozen=True)
class Watching(Adversary):
    """Keep the observation, and apply to some of them only.

    Attributes:
        every: Every which observation is attacked.
    """

    every: int = 1

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Guess grey."""
        SEEN.append(observation)
        if len(SEEN) % self.every:
            raise NotApplicable("not this one")
        return Reconstruction(torch.zeros(observation.batch_size, *observation.space.shape))


@dataclass(frozen=True)
class Choosing(Watching):
    """The same, granted candidates."""

    needs_candidates: ClassVar[bool] = True


class Tied(nn.Module):
    """Two layers that share their weights."""

    def __init__(self, inputs: int, classes: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.second, self.third = nn.Linear(width, width), nn.Linear(width, width)
        self.third.weight = self.second.weight
        self.last = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        hidden = self.second(self.first(inputs.flatten(1)).relu()).relu()
        outputs: Tensor = self.last(self.third(hidden).relu())
        return outputs


def tied(space: InputSpace, width: int = 8) -> nn.Module:
    """Return the model."""
    return Tied(math.prod(space.shape), space.classes, width)
