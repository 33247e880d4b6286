"""SPEAR: exact inversion of batches by sampling kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from ..base import Adversary, Observation, Reconstruction
from .disaggregation import Pool, is_exact, no_guess, reconstruction
from .relu_layer import Factors, factorise, find_layer

_CHUNK = 4096
"""Number of submatrices whose kernels are computed together."""


@dataclass(frozen=True)
class SPEAR(Adversary):
    """Recover a batch exactly from the gradient of a linear layer before a ReLU [1].

    Let dL/dW = LR. The kernel of B - 1 rows of L is the direction of an example if the neurons of
    all these rows are off for that example [1, Theorem 3.3]. The attack draws rows at random and
    keeps a kernel q if Lq is sparse. A draw hits such rows with a probability of about 2^-(B-1),
    so the time is exponential in the batch size: 14 examples take seconds, and 24 are out of
    reach. `SPEARPlusPlus` finds the same directions by descent.

    Attributes:
        layer: Name of a linear layer. Default: the layer that sees the inputs. The attack returns
            the inputs of a deeper layer as features.
        samples: Largest number of submatrices.

    References:
        [1] Dimitrov, Baader, Mueller, Vechev. "SPEAR: Exact Gradient Inversion of Batches in
            Federated Learning." NeurIPS 2024. https://arxiv.org/abs/2403.03945
    """

    cost: ClassVar[int] = 3

    layer: str | None = None
    samples: int = 1_000_000

    def __post_init__(self) -> None:
        if not self.samples >= 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")

    def reconstruct(self, observation: Observation, rng: Generator) -> Reconstruction:
        """Return the examples whose directions were found. They are exact if confidence is 1."""
        layer = find_layer(observation, self.layer)
        factors = factorise(observation, layer)
        if factors is None:
            return no_guess(observation, layer)
        pool = Pool(factors, exact=is_exact(observation, factors))
        drawn, most = 0, self.samples if factors.rank > 1 else 1  # rank 1 has only one direction
        while drawn < most and not pool.confirmed:
            count = min(_CHUNK, most - drawn)
            pool.add(_kernels(factors, count, rng))
            drawn += count
        return reconstruction(observation, layer, pool)


def _kernels(factors: Factors, count: int, rng: Generator) -> Tensor:
    """Return the kernels of random submatrices of L that have one row less than columns."""
    live = factors.left[factors.live]
    keys = torch.rand(count, len(live), generator=rng, device=rng.device).to(live.device)
    rows = keys.topk(min(factors.rank - 1, len(live)), dim=1).indices
    basis: Tensor = torch.linalg.qr(live[rows].transpose(1, 2), mode="complete").Q
    return basis[:, :, -1]
