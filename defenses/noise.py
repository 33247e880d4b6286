"""Noise on the upload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor

from .base import Defense, Guarantee, Plan, Update
from .discrete_gaussian import discrete_gaussian
from .pld import concentrated_epsilon, gaussian_epsilon
from .vector import flatten, unflatten

Distribution = Literal["gaussian", "laplace"]

_STEPS = 2**20  # steps of the grid of discrete noise per standard deviation


@dataclass
class Noise(Defense):
    """Add independent noise to every entry of the update, by default without clipping.

    The scale is absolute, as in the papers that evaluate attacks [1, 2]. It is sigma of a Gaussian
    distribution or b of a Laplace distribution, whose standard deviation is sqrt(2) b. Do not
    compare one scale across models: the magnitudes of their updates differ by orders.

    Noise without clipping guarantees nothing, however large it is. If the update is clipped to an
    L2 norm C, there is a guarantee for the client as a whole. It limits how well the server can
    distinguish the client's update from noise alone. The server still sees who takes part. To
    distinguish any two updates is twice as easy: that guarantee equals the one at half the scale.
    The usual guarantee of the Laplace mechanism would need an L1 norm. After L2 clipping, the
    mechanism is rho-zCDP with rho = C^2 / (2 b^2), the same as a Gaussian with sigma = b. Proof:
    entry j is (s_j / b)-DP for a change of s_j, hence (s_j / b)^2 / 2-zCDP [3], and the entries
    compose.

    Attributes:
        scale: sigma or b; 0 adds nothing.
        distribution: `gaussian` or `laplace`.
        max_norm: C, the L2 norm to which the whole update is clipped first. None does not clip.
        discrete: Whether to draw the noise exactly, from a discrete Gaussian on a grid of step
            sigma / 2^20. The update is rounded to that grid. It is clipped slightly below C, so
            that rounding stays within C. Floating-point noise has gaps that can reveal updates
            [4]. The claims of this class do not account for these gaps.

    References:
        [1] Zhu, Liu, Han. "Deep Leakage from Gradients." NeurIPS 2019.
            https://arxiv.org/abs/1906.08935
        [2] Balunovic, Dimitrov, Staab, Vechev. "Bayesian Framework for Gradient Leakage."
            ICLR 2022. https://arxiv.org/abs/2111.04706
        [3] Bun, Steinke. "Concentrated Differential Privacy: Simplifications, Extensions, and
            Lower Bounds." TCC 2016. https://arxiv.org/abs/1605.02065 (Proposition 1.4)
        [4] Mironov. "On Significance of the Least Significant Bits for Differential Privacy."
            CCS 2012.
    """

    scale: float
    distribution: Distribution = "gaussian"
    max_norm: float | None = None
    discrete: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.scale < math.inf:
            raise ValueError(f"scale must be in [0, inf), got {self.scale}")
        if self.distribution not in ("gaussian", "laplace"):
            raise ValueError(
                f"distribution must be 'gaussian' or 'laplace', got {self.distribution!r}"
            )
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise ValueError(f"max_norm must be in (0, inf), or None, got {self.max_norm}")
        if self.discrete and self.distribution != "gaussian":
            raise ValueError(f"discrete noise must be 'gaussian', got {self.distribution!r}")

    @property
    def stochastic(self) -> bool:
        """Return whether noise is added."""
        return self.scale > 0

    @property
    def strength(self) -> float:
        """Return the scale of the noise."""
        return self.scale

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the clipped update with noise."""
        if self.discrete and self.scale:
            return self._on_grid(update, rng)
        if self.max_norm is not None:
            update = _clipped(update, self.max_norm)
        if not self.scale:
            return update
        return {name: value + self._draw(value, rng) for name, value in update.items()}

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the clipping without the noise."""
        return replace(self, scale=0.0)

    def log_likelihood(
        self,
        observed: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> Tensor | None:
        """Return the log-density of the noise; None without noise."""
        if not self.scale:
            return None
        noise = torch.cat([(observed[name] - expected[name]).flatten() for name in observed])
        if self.distribution == "laplace":
            return -noise.abs().sum() / self.scale
        return -noise.square().sum() / (2 * self.scale**2)

    def guarantee(self, plan: Plan) -> Guarantee | None:
        """Return the client's guarantee; None without clipping.

        The server sees who takes part, so sampling clients gains nothing. Every local step counts
        as an upload. This is an upper bound if an upload has several local steps.
        """
        if self.max_norm is None:
            return None
        if self.distribution == "laplace":
            rho = (self.max_norm / self.scale) ** 2 / 2 if self.scale else math.inf
            epsilon, accountant = concentrated_epsilon(rho, plan), "RDP"
        else:
            everybody = replace(plan, sample_rate=1.0)
            epsilon, accountant = gaussian_epsilon(self.scale / self.max_norm, everybody), "PLD"
        return Guarantee(epsilon, plan.delta, "client", "zero-out", accountant)

    def _on_grid(self, update: Update, rng: Generator) -> Update:
        """Return the update as multiples of a step, with integer noise."""
        step, vector = self.scale / _STEPS, flatten(update)
        dtype, vector = vector.dtype, vector.double()
        if self.max_norm is not None:
            left = self.max_norm - step * math.sqrt(vector.numel())
            if not left > 0:
                raise ValueError(
                    f"scale {self.scale} is too large for discrete noise on {vector.numel()} "
                    f"entries clipped to {self.max_norm}: rounding alone would exceed the norm"
                )
            vector = _clip(vector, left)
        noise = discrete_gaussian(vector.numel(), _STEPS, rng).to(vector.device)
        noisy = (vector / step).round().long() + noise
        return unflatten((noisy * step).to(dtype), like=update)

    def _draw(self, like: Tensor, rng: Generator) -> Tensor:
        if self.distribution == "gaussian":
            return torch.empty_like(like).normal_(0, self.scale, generator=rng)
        first, second = (torch.empty_like(like).exponential_(generator=rng) for _ in range(2))
        return self.scale * (first - second)  # a difference of exponentials is Laplace


def _clipped(update: Update, max_norm: float) -> Update:
    return unflatten(_clip(flatten(update), max_norm), like=update)


def _clip(vector: Tensor, max_norm: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(vector)
    factor = (max_norm / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)
    return vector * factor
