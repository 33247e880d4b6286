"""SPEAR: exact inversion of batches by sampled kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from ..base import Adversary, Observation, Reconstruction
from .disaggregation import Pool, is_exact, no_guess, reconstruction
from .relu_layer import Factors, factorise, find_layer

_CHUNK = 4096
"""Submatrices whose kernels are computed together."""


@dataclass(frozen=True)
class SPEAR(Adversary):
    """Recover a batch exactly from the gradient of a linear layer before a ReLU [1].

    With dL/dW = LR, any B - 1 rows of L for neurons that are off for an example have its
    direction as their kernel [1, Theorem 3.3]. Rows are drawn at random; a kernel that makes
    Lq sparse is kept. Such rows are hit with a probability of about 2^-(B-1), so the time is
    exponential in the batch size: 14 examples take seconds, and 24 are out of reach;
    `SPEARPlusPlus` finds the same directions by descent.

    Attributes:
        layer: Name of a linear layer; by default the one that sees the inputs. The inputs of a
            deeper one are returned as features.
        samples: Most submatrices.

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
        """Return the examples whose directions were found, exact where confidence is 1."""
        layer = find_layer(observation, self.layer)
        factors = factorise(observation, layer)
        if factors is None:
            return no_guess(observation, layer)
        pool = Pool(factors, exact=is_exact(observation, factors))
        drawn, most = 0, self.samples if factors.rank > 1 else 1  # there is one direction
        while drawn < most and not pool.confirmed:
            count = min(_CHUNK, most - drawn)
            pool.add(_kernels(factors, count, rng))
            drawn += count
        return reconstruction(observation, layer, pool)


def _kernels(factors: Factors, count: int, rng: Generator) -> Tensor:
    """Return the kernels of random submatrices of L with one row less than columns."""
    live = factors.left[factors.live]
    keys = torch.rand(count, len(live), generator=rng, device=rng.device).to(live.device)
    rows = keys.topk(min(factors.rank - 1, len(live)), dim=1).indices
    basis: Tensor = torch.linalg.qr(live[rows].transpose(1, 2), mode="complete").Q
    return basis[:, :, -1]
