"""Dual gradient pruning: drop the largest entries and the smallest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Generator, Tensor

from .base import Defense, Update
from .topk import Masked, keep
from .vector import flatten, map_vectors, restore


@dataclass
class DualPruning(Defense):
    """Drop the largest and the smallest entries of the update; carry them to the next round.

    Ordinary pruning keeps the large entries, which also matter most to an inversion. Dual gradient
    pruning drops a few large entries for privacy and many small ones for bandwidth. Error feedback
    adds the dropped entries to the next update.

    The remaining entries are exact, and the server sees their positions. In a linear layer, all
    entries of one neuron are its input times one factor. So entries of medium size reveal the input
    as well as large ones do. Error feedback also makes a dropped large entry grow until other
    entries have overtaken it.

    Attributes:
        largest: Fraction of entries to drop because they are the largest in magnitude, in [0, 1).
        smallest: Fraction of entries to drop because they are the smallest, in [0, 1). The sum with
            `largest` must be less than 1.
        per_layer: Whether to drop the fractions from each tensor or from the whole update.
        error_feedback: Whether to carry dropped entries to the next round.

    References:
        Xue, Hu, Zhao, Zhang, Hu, Sun, Yao. "Revisiting Gradient Pruning: A Dual Realization for
        Defending against Gradient Attacks." AAAI 2024. https://arxiv.org/abs/2401.16687
    """

    largest: float
    smallest: float
    per_layer: bool = True
    error_feedback: bool = True
    _dropped: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("largest", "smallest"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not self.largest + self.smallest < 1:
            raise ValueError(
                "largest + smallest must be less than 1, otherwise nothing is uploaded, "
                f"got {self.largest} + {self.smallest}"
            )

    @property
    def strength(self) -> float:
        """Return the fraction of entries that are dropped."""
        return self.largest + self.smallest

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update with only its entries of medium size; the others are zero."""
        update = restore(update, self._dropped)
        sent = map_vectors(self._medium, update, self.per_layer)
        if self.error_feedback:
            self._dropped = flatten(update) - flatten(sent)
        return sent

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the mask that the observed upload shows: its non-zero entries."""
        return Masked.as_in(observed)

    def _medium(self, vector: Tensor) -> Tensor:
        size = vector.numel()
        ascending = vector.abs().argsort()
        return keep(
            vector, ascending[round(self.smallest * size) : size - round(self.largest * size)]
        )
