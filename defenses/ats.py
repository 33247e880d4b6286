"""Transformations of the training images, found by automatic search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from .base import Batch, Defense
from .transforms import POOL, apply_policies, parse_policy

TOLERANCE = 1e-3
"""Rounding may move pixels out of [0, 1] by this much."""


@dataclass
class ATS(Defense):
    """Train on transformed images T(x), so that gradients do not lead to natural images.

    A policy holds up to three transformations from a pool of 50 (see `transforms`). The authors
    search for policies whose gradients are hard to follow back to T(x). They keep only policies
    that should not cost accuracy [1]. If several policies are joined by `+`, one is drawn for each
    image. Every transformation of a policy is applied. If it has a sign, the sign is drawn for
    each image.

    There is no formal guarantee. The gradient is that of T(x). Attacks that recover the inputs of
    a gradient exactly recover T(x), and most policies leave its content readable.
    Optimisation-based attacks work against ATS early in training [2]. Scores against x itself
    flatter the defense, because even a shift makes a pixel-wise score collapse.

    An informed adversary knows the policy, but not the draws. If nothing is drawn, a replay
    transforms a guess of x. Otherwise, a replay treats the guess as T(x), because draws that
    differ from the client's would mislead it. The slope of posterize, equalize and autocontrast
    is taken to be 1.

    Attributes:
        policy: Entries of the pool, such as `3-1-7`. `+` joins several policies. The empty policy
            transforms nothing. Default: the policy published for CIFAR-100.
        mean: Per-channel mean that the inputs were centred by; see `for_space`.
        std: Per-channel standard deviation that they were divided by.

    References:
        [1] Gao, Guo, Zhang, Qiu, Wen, Liu. "Privacy-preserving Collaborative Learning with
            Automatic Transformation Search." CVPR 2021. https://arxiv.org/abs/2011.12505
        [2] Balunović, Dimitrov, Staab, Vechev. "Bayesian Framework for Gradient Leakage."
            ICLR 2022. https://arxiv.org/abs/2111.04706
    """

    policy: str = "3-1-7+43-18-18"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        parse_policy(self.policy)
        if not all(math.isfinite(value) for value in self.mean):
            raise ValueError(f"mean must be finite, got {self.mean}")
        if not all(0 < value < math.inf for value in self.std):
            raise ValueError(f"std must be positive and finite, got {self.std}")

    @property
    def stochastic(self) -> bool:
        """Return whether a policy or a sign is drawn."""
        policies = parse_policy(self.policy)
        return len(set(policies)) > 1 or any(POOL[i].stochastic for one in policies for i in one)

    def for_space(self, mean: tuple[float, ...], std: tuple[float, ...]) -> ATS:
        """Return the same policy for inputs that were normalised in this way."""
        return replace(self, mean=mean, std=std)

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        """Return the images transformed, after checking that they are images."""
        if self.policy and len(batch.inputs):
            self._check_images(batch.inputs)
        return self._transformed(batch, rng)

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the same transformations. Return none if they are drawn: the draws are secret."""
        return Defense() if self.stochastic else _Replayed(self.policy, self.mean, self.std)

    def _transformed(self, batch: Batch, rng: Generator) -> Batch:
        if not self.policy or not len(batch.inputs):
            return batch
        policies = parse_policy(self.policy)
        pixels = apply_policies(self._to_pixels(batch.inputs), policies, rng)
        inputs = (pixels - _per_channel(self.mean, pixels)) / _per_channel(self.std, pixels)
        return Batch(inputs, batch.targets)

    def _check_images(self, inputs: Tensor) -> None:
        if inputs.dim() != 4 or inputs.shape[1] not in (1, 3):
            raise ValueError(
                "ATS transforms batches of images with 1 or 3 channels, "
                f"got inputs of shape {tuple(inputs.shape)}"
            )
        low, high = (float(end) for end in torch.aminmax(self._to_pixels(inputs.detach())))
        if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
            raise ValueError(
                f"ATS needs images in [0, 1], got {low:.3g} to {high:.3g}: "
                "set mean and std to those of the input normalisation, or call for_space"
            )

    def _to_pixels(self, inputs: Tensor) -> Tensor:
        return inputs * _per_channel(self.std, inputs) + _per_channel(self.mean, inputs)


@dataclass
class _Replayed(ATS):
    """ATS on a guess. It does not check values, because `vmap` forbids that."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        return self._transformed(batch, rng)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values).to(like).view(-1, 1, 1)
