"""Measure the path of local training at the client. The SME attack relies on its shape.

References:
    Zhu, Yao, Blaschko. "Surrogate Model Extension (SME): A Fast and Accurate Weight Update Attack
    on Federated Learning." ICML 2023, section 5.1. https://arxiv.org/abs/2306.00127
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn

from leakfrontier.adversaries.matching.sme import cosine_between
from leakfrontier.defenses import Batch, Defense, Loss, Update

from ..client.client import Client, ThreatModel, observe


@dataclass(frozen=True)
class LocalSteps:
    """The path of one client's local training.

    Attributes:
        plane_shares: At each step, the share of the gradient's norm (over all examples) that lies
            in the best plane for all steps (Figure 3).
        alphas: Points between w_0 (0) and w_T (1).
        cosines: Cosine of w_0 - w_T with the gradient of all examples at these (Figure 4).
    """

    plane_shares: Tensor
    alphas: Tensor
    cosines: Tensor


def local_steps(client: Client, batch: Batch, rng: Generator, points: int = 21) -> LocalSteps:
    """Train a client and return its path.

    Args:
        client: The client, without a defense.
        batch: Its examples.
        rng: Source of the order of its examples.
        points: Number of points on the line.
    """
    gradients: list[Tensor] = []  # shared by all copies of the defense
    recording = replace(client, defense=_Recorder(batch, gradients))
    (upload,) = observe(recording, [batch], ThreatModel(), rng)
    alphas = torch.linspace(0, 1, points)
    cosines = cosine_between(upload.observation, *batch, alphas)
    return LocalSteps(plane_shares(torch.stack(gradients)), alphas, cosines)


def plane_shares(gradients: Tensor) -> Tensor:
    """Return the share of each row's norm that lies in the plane of two principal components."""
    products = (gradients @ gradients.mT).double()
    values, vectors = torch.linalg.eigh(products)  # ascending
    within = vectors[:, -2:].square() @ values[-2:].clamp(min=0)
    shares: Tensor = (within / products.diagonal()).clamp(0, 1).sqrt()
    return shares


@dataclass
class _Recorder(Defense):
    """An undefended client that records the gradient of all its examples at every step."""

    examples: Batch
    gradients: list[Tensor]

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        whole = super().gradient(model, loss, self.examples, rng)
        self.gradients.append(torch.cat([value.detach().flatten() for value in whole.values()]))
        return super().gradient(model, loss, batch, rng)
