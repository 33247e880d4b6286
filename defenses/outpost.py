"""Outpost: pruning and noise that adapt to the layer and fade over local steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor, nn

from .base import Batch, Defense, Loss, Update, batch_gradient, trainable


@dataclass
class Outpost(Defense):
    """Prune every tensor of the gradient, and add noise where the Fisher information is large.

    The i-th local step (from 1) is perturbed with probability 1 / (1 + decay * i). A perturbed
    gradient loses the `pruning_rate` smallest entries of each tensor. It gains Gaussian noise at
    the `noised_share` of all entries that have the largest empirical Fisher information. The
    noise's standard deviation is `noise` times the layer's risk. The risk is the variance of the
    layer's weights, at most 1.

    The paper and its code leave some choices. We take these:

    - The Fisher information of an entry is its squared gradient, the diagonal of the paper's matrix
      for one batch. The authors' code averages squares over the first axis of each tensor, which is
      not the batch.
    - i counts the steps since the client received the model.
    - A tensor of one entry has no spread, hence no risk.

    A client's first step is not perturbed with probability decay / (1 + decay): one upload in nine
    at the defaults. With FedSGD it is the only step. The noise depends on the scale of the weights,
    not on that of the gradient, and there is no clipping. It can be negligible (weights of 1,000
    inputs at torch's initialisation give 0.0003) and it guarantees nothing. An adversary replays
    the pruning if the upload has as many zeros as a pruned one must have. A step that was not
    perturbed, and a sum of several steps, have fewer zeros.

    Attributes:
        noise: Standard deviation of the noise at a risk of 1, in [0, inf).
        noised_share: Share of entries that are noised, in [0, 1].
        pruning_rate: Share of entries of each tensor to drop, in [0, 1). One is always kept.
        decay: How fast perturbation becomes less likely from step to step, in [0, inf).

    References:
        Wang, Hugh, Li. "More than Enough is Too Much: Adaptive Defenses against Gradient Leakage
        in Production Federated Learning." INFOCOM 2023; IEEE/ACM Transactions on Networking,
        2024. https://doi.org/10.1109/TNET.2024.3377655
    """

    noise: float = 0.8
    noised_share: float = 0.4
    pruning_rate: float = 0.8
    decay: float = 0.125
    _step: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("noise", "decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be in [0, inf), got {getattr(self, name)}")
        if not 0 <= self.noised_share <= 1:
            raise ValueError(f"noised_share must be in [0, 1], got {self.noised_share}")
        if not 0 <= self.pruning_rate < 1:
            raise ValueError(f"pruning_rate must be in [0, 1), got {self.pruning_rate}")

    @property
    def stochastic(self) -> bool:
        """Return whether it adds noise or prunes only some steps."""
        noisy = self.noise > 0 and self.noised_share > 0
        return noisy or (self.pruning_rate > 0 and self.decay > 0)

    @property
    def strength(self) -> float:
        """Return the scale of the noise."""
        return self.noise

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the gradient, perturbed at random."""
        gradient = batch_gradient(model, loss, batch)
        self._step += 1
        chance = torch.rand((), generator=rng, device=rng.device)
        if chance >= 1 / (1 + self.decay * self._step):
            return gradient
        return self._perturbed(gradient, trainable(model), rng)

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update, and reset the count of steps."""
        self._step = 0
        return update

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the pruning without the noise, if the observed upload was pruned."""
        entries = sum(value.numel() for value in observed.values())
        zeros = torch.stack([(value == 0).sum() for value in observed.values()]).sum()
        # Noise hides at most the noised share of the zeros. Rounding hides one per tensor.
        fewest = (self.pruning_rate - self.noised_share) * entries - len(observed) - 1
        return Pruned(self.pruning_rate, zeros >= fewest)

    def _perturbed(self, gradient: Update, weights: Mapping[str, Tensor], rng: Generator) -> Update:
        fisher = torch.cat([value.square().flatten() for value in gradient.values()])
        noised = _largest(fisher, round(self.noised_share * len(fisher)))
        masks = noised.split([value.numel() for value in gradient.values()])
        perturbed = {}
        for (name, value), mask in zip(gradient.items(), masks, strict=True):
            std = self.noise * risk(weights[name])
            noise = torch.randn(value.shape, generator=rng, dtype=value.dtype, device=value.device)
            perturbed[name] = pruned(value, self.pruning_rate) + std * noise * mask.view_as(value)
        return perturbed


@dataclass
class Pruned(Defense):
    """The replay of Outpost: only the pruning of each tensor.

    Attributes:
        pruning_rate: Share of entries of each tensor to drop.
        active: Whether to prune at all, as a boolean tensor.
    """

    pruning_rate: float
    active: Tensor

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update with the smallest entries of each tensor set to zero."""
        return {
            name: torch.where(self.active, pruned(value, self.pruning_rate), value)
            for name, value in update.items()
        }


def pruned(value: Tensor, rate: float) -> Tensor:
    """Return a tensor with that share of its smallest entries set to zero; keep at least one."""
    kept = max(1, value.numel() - round(rate * value.numel()))
    return value * _largest(value.abs().flatten(), kept).view_as(value)


def risk(weight: Tensor) -> Tensor:
    """Return the risk of a layer: the variance of its weights, at most 1."""
    if weight.numel() < 2:
        return weight.new_zeros(())
    return weight.detach().var().clamp(max=1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return which entries of a vector are the `count` largest."""
    mask = torch.zeros_like(values, dtype=torch.bool)
    return mask.scatter(0, values.topk(count).indices, True)
