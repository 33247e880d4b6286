"""Client-level differential privacy for federated averaging."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Generator, Tensor

from .base import Defense, Guarantee, Plan, Update
from .noise import Noise


@dataclass
class ClientDP(Defense):
    """Clip the whole update and add Gaussian noise to it, on the client itself.

    The upload is clip(update, C) + N(0, (sigma C)^2). In [1], a trusted server adds the noise to
    the sum of many clients. Here the server is the adversary, so each client adds all of the noise
    that its guarantee needs. This is far more noise than [1] needs for the same epsilon, and it
    costs accuracy accordingly.

    Attributes:
        noise_multiplier: sigma, the noise's standard deviation in units of `max_update_norm`.
        max_update_norm: C, the L2 norm to which the update is clipped. It may be infinite if there
            is no noise.
        discrete: Whether to draw the noise exactly, from a discrete Gaussian; see `Noise`.

    References:
        [1] McMahan, Ramage, Talwar, Zhang. "Learning Differentially Private Recurrent Language
            Models." ICLR 2018. https://arxiv.org/abs/1710.06963
    """

    noise_multiplier: float
    max_update_norm: float = 1.0
    discrete: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be in [0, inf), got {self.noise_multiplier}")
        if not self.max_update_norm > 0:
            raise ValueError(f"max_update_norm must be in (0, inf], got {self.max_update_norm}")
        if self.max_update_norm == math.inf and self.noise_multiplier > 0:
            raise ValueError("max_update_norm must be finite with noise, got inf")

    @property
    def stochastic(self) -> bool:
        """Return whether noise is added."""
        return self.noise_multiplier > 0

    @property
    def strength(self) -> float:
        """Return the noise multiplier."""
        return self.noise_multiplier

    @property
    def mechanism(self) -> Noise:
        """Return the same defense in absolute terms."""
        if self.max_update_norm == math.inf:
            return Noise(0.0)
        scale = self.noise_multiplier * self.max_update_norm
        return Noise(scale, max_norm=self.max_update_norm, discrete=self.discrete)

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the clipped update with noise."""
        return self.mechanism.on_update(update, rng)

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the clipping without the noise."""
        return self.mechanism.replay(observed)

    def log_likelihood(
        self,
        observed: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> Tensor | None:
        """Return the Gaussian log-density of the noise; None without noise."""
        return self.mechanism.log_likelihood(observed, expected)

    def guarantee(self, plan: Plan) -> Guarantee:
        """Return epsilon of the Gaussian mechanism; infinite without noise."""
        return self.mechanism.guarantee(plan) or Guarantee(
            math.inf, plan.delta, "client", "zero-out", "PLD"
        )
