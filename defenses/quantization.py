"""Quantization of the upload to a few levels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from .base import Defense, Update
from .vector import map_vectors, straight_through

Scope = Literal["tensor", "global"]

_FULL_PRECISION = 32


@dataclass
class Quantization(Defense):
    """Round every entry of the update to one of 2^b evenly spaced magnitudes, keeping its sign.

    The magnitudes are 0, a/s, 2a/s, ..., a with a = max|g| and s = 2^b - 1. The sign takes an extra
    bit, so b = 1 gives {-a, 0, a}. Scaling by the largest entry, and this way of counting bits,
    follow the variant that [1] attacks. The original QSGD [2] scales by the L2 norm. Stochastic
    rounding draws one of the two neighbouring levels, with the probabilities that make it unbiased.
    Otherwise, the nearest level is taken. That is biased and drops every entry below half a step.

    Quantization was made to save bandwidth and promises no privacy. The largest entry is sent
    exactly, and the errors of stochastic rounding average out over entries and rounds.

    Attributes:
        bits: b, from 1 to 16; 32 uploads everything unchanged.
        stochastic: Whether to round at random rather than to the nearest level. It is always false
            at 32 bits, where nothing is rounded.
        scope: Whether a is the largest entry of each tensor or of the whole update.

    References:
        [1] Yue, Jin, Wong, Baron, Dai. "Gradient Obfuscation Gives a False Sense of Security in
            Federated Learning." USENIX Security 2023. https://arxiv.org/abs/2206.04055
        [2] Alistarh, Grubic, Li, Tomioka, Vojnovic. "QSGD: Communication-Efficient SGD via
            Gradient Quantization and Encoding." NeurIPS 2017. https://arxiv.org/abs/1610.02132
    """

    bits: int
    stochastic: bool = True
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        if self.bits not in {*range(1, 17), _FULL_PRECISION}:
            raise ValueError(f"bits must be a whole number in [1, 16], or 32, got {self.bits}")
        if self.scope not in ("tensor", "global"):
            raise ValueError(f"scope must be 'tensor' or 'global', got {self.scope!r}")
        self.stochastic = self.stochastic and self.bits != _FULL_PRECISION

    @property
    def steps(self) -> int:
        """Return s, the number of steps from zero to the largest magnitude."""
        return int(2**self.bits - 1)

    @property
    def strength(self) -> float:
        """Return the bits saved on every entry."""
        return _FULL_PRECISION - self.bits

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the rounded update."""
        if self.bits == _FULL_PRECISION:
            return update
        scales = self._scales(update)
        if not self.stochastic:
            return {
                name: _nearest(value, scales[name], self.steps) for name, value in update.items()
            }
        return {name: self._drawn(value, scales[name], rng) for name, value in update.items()}

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return straight-through rounding on the observed grid; none if rounding is random.

        The mean of random rounding is the update itself.
        """
        if self.stochastic or self.bits == _FULL_PRECISION:
            return Defense()
        return RoundedReplay(self._scales(observed), self.steps)

    def log_likelihood(
        self,
        observed: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        batch_size: int | None = None,
    ) -> Tensor | None:
        """Return a smooth stand-in for the probability of the observed levels.

        Let d be the error in steps of the observed grid. For the nearest level, all |d| <= 1/2 are
        equally likely and others impossible. This is softened to -max(0, |d| - 1/2)^2 /
        (2 (1/2)^2). For random rounding, it is a Gaussian with variance 1/6, the variance for a
        uniformly distributed entry.
        """
        if self.bits == _FULL_PRECISION:
            return None
        scales = self._scales(observed)
        errors = [(observed[name] - expected[name]) / scales[name] for name in observed]
        error = torch.cat([value.abs().flatten() for value in errors]) * self.steps
        if self.stochastic:
            return -3 * error.square().sum()
        return -2 * (error - 0.5).clamp(min=0).square().sum()

    def _scales(self, update: Mapping[str, Tensor]) -> Update:
        """Return a for each entry; 1 where all entries are zero."""

        def scale(vector: Tensor) -> Tensor:
            largest = vector.abs().max()
            return torch.where(largest > 0, largest, 1.0).expand_as(vector)

        return map_vectors(scale, update, per_layer=self.scope == "tensor")

    def _drawn(self, value: Tensor, scale: Tensor, rng: Generator) -> Tensor:
        level = value.abs() / scale * self.steps
        draws = torch.rand(value.shape, generator=rng, dtype=value.dtype, device=value.device)
        level = level.floor() + (draws < level - level.floor())
        return value.sign() * scale * (level / self.steps)


@dataclass
class RoundedReplay(Defense):
    """The replay of quantization: round to the nearest level, with a straight-through gradient.

    Attributes:
        scales: a for each entry, by parameter name.
        steps: s, the number of steps from zero to a.
    """

    scales: Mapping[str, Tensor]
    steps: int

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the rounded update."""
        return {
            name: straight_through(value, _nearest(value, self.scales[name], self.steps))
            for name, value in update.items()
        }


def _nearest(value: Tensor, scale: Tensor, steps: int) -> Tensor:
    return scale * ((value / scale * steps).round() / steps)
