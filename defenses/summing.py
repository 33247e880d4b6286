"""Defenses whose gradient is a sum over examples, so that many clients can be computed together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Generator, nn

from .base import Batch, Chain, Defense, Loss, Update, overrides
from .dpsgd import DPSGD
from .per_example import ClippedGradient


@dataclass(frozen=True)
class Summing:
    """How a defense's `gradient` follows from a sum of per-example gradients.

    Attributes:
        finished: Returns the gradient, given the sum, the model, the loss, the batch and `rng`.
        clipped: How each example's gradient is clipped first; None if it is not.
    """

    finished: Callable[[Update, nn.Module, Loss, Batch, Generator], Update]
    clipped: ClippedGradient | None = None


def summing_of(defense: Defense) -> Summing | None:
    """Return how the gradient of a defense follows from sums; None if only its own code knows."""
    if type(defense) is Chain:
        return summing_of(defense._computing)
    if type(defense) is DPSGD:
        return Summing(defense.from_sum, defense._clipped)
    return None if overrides(defense, "gradient") else Summing(_mean)


def _mean(total: Update, _: nn.Module, __: Loss, batch: Batch, ___: Generator) -> Update:
    return {name: value / max(1, len(batch.inputs)) for name, value in total.items()}
