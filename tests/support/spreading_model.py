"""A model under which different examples of a class have nearly orthogonal gradients."""

import math

import torch
from torch import Tensor, nn

from leakfrontier.adversaries import InputSpace


class RandomFeatures(nn.Module):
    """Fixed random waves, which are nearly uncorrelated for inputs that are not the same."""

    waves: Tensor
    phases: Tensor

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__()
        self.register_buffer("waves", torch.randn(inputs, features))
        self.register_buffer("phases", 2 * math.pi * torch.rand(features))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cos(inputs.flatten(1) @ self.waves + self.phases)


def build(space: InputSpace, features: int = 512) -> nn.Module:
    """Return a linear classifier of random features."""
    return nn.Sequential(
        RandomFeatures(math.prod(space.shape), features), nn.Linear(features, space.classes)
    )
