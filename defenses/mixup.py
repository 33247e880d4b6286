"""Mixup: train on convex combinations of examples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor, nn

from .base import Batch, Defense, Loss, Update, batch_gradient


@dataclass
class Mixup(Defense):
    """Mix every example of a batch with another one, and mix the losses of their labels equally.

    Inputs become x' = lam x + (1 - lam) x[order] for a random order of the batch. The gradient is
    that of lam L(f(x'), y) + (1 - lam) L(f(x'), y[order]). For the cross-entropy, this is the loss
    of the mixed label. One lam ~ Beta(alpha, alpha) is drawn per batch, as in [1]. InstaHide [2]
    introduced the idea that mixing hides private images. It mixes more images and flips signs, and
    it was still broken [3].

    There is no formal guarantee. A batch of one is mixed with itself, which hides nothing. In a
    larger batch, on average one example is mixed with itself by chance, and lam is often near 0
    or 1. An attack recovers the mixtures, in which both images are often visible. Order and lam are
    secret, so a replay treats a guess as the mixtures.

    Attributes:
        alpha: Parameter of the Beta distribution, in [0, inf): 1 draws lam uniformly, larger
            values mix more evenly, 0 mixes nothing.

    References:
        [1] Zhang, Cisse, Dauphin, Lopez-Paz. "mixup: Beyond Empirical Risk Minimization."
            ICLR 2018. https://arxiv.org/abs/1710.09412
        [2] Huang, Song, Li, Arora. "InstaHide: Instance-hiding Schemes for Private Distributed
            Learning." ICML 2020. https://arxiv.org/abs/2010.02772
        [3] Carlini et al. "Is Private Learning Possible with Instance Encoding?" IEEE S&P 2021.
            https://arxiv.org/abs/2011.05315
    """

    alpha: float = 1.0
    _mixture: tuple[Tensor, Tensor] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be in [0, inf), got {self.alpha}")

    @property
    def stochastic(self) -> bool:
        """Return whether anything is mixed."""
        return self.alpha > 0

    @property
    def strength(self) -> float:
        """Return alpha."""
        return self.alpha

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        """Return mixed inputs, and keep the order and lam for the loss."""
        if not self.alpha or not len(batch.inputs):
            return batch
        if not batch.inputs.is_floating_point():
            raise ValueError(
                f"Mixup mixes real-valued inputs, not tokens: got {batch.inputs.dtype}"
            )
        share = _draw_beta(self.alpha, rng).to(batch.inputs)
        size = len(batch.inputs)
        order = torch.randperm(size, generator=rng, device=rng.device).to(batch.inputs.device)
        self._mixture = share, order
        return Batch(share * batch.inputs + (1 - share) * batch.inputs[order], batch.targets)

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the gradient of the mixed loss of the batch that was mixed last."""
        if self._mixture is None or len(self._mixture[1]) != len(batch.inputs):
            return batch_gradient(model, loss, batch)
        share, order = self._mixture

        def mixed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return share * loss(outputs, targets) + (1 - share) * loss(outputs, targets[order])

        return batch_gradient(model, mixed_loss, batch)

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the undefended client, because the mixing is secret."""
        return Defense()


def _draw_beta(alpha: float, rng: Generator) -> Tensor:
    """Return a draw of Beta(alpha, alpha). `torch.distributions` cannot draw from `rng`.

    The draw is X / (X + Y) of two gamma variables. It uses their logarithms, because both underflow
    at small alpha. Gamma(alpha) is Gamma(alpha + 1) U^(1/alpha) for a uniform U.
    """
    shape = torch.full((2,), alpha + 1.0, dtype=torch.float64, device=rng.device)
    uniform = torch.rand(2, generator=rng, dtype=torch.float64, device=rng.device)
    logarithms = torch._standard_gamma(shape, generator=rng).log() + uniform.log() / alpha
    return torch.sigmoid(logarithms[0] - logarithms[1])
