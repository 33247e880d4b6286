"""Top-k sparsification with error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from .base import Defense, Update
from .vector import flatten, map_vectors, restore


@dataclass
class TopK(Defense):
    """Upload only the largest entries of the update; carry the rest to the next round.

    The kept entries are the `ratio` largest in magnitude, at least one, either over all parameters
    together or in each tensor. Error feedback adds the dropped entries to the next update, which
    restores the convergence rate of dense SGD [1]. Pruning was proposed against gradient
    inversion in [2].

    Error feedback *delays* leakage rather than preventing it: a dropped entry is uploaded once
    enough of it has accumulated.

    Attributes:
        ratio: Fraction of entries to upload, in (0, 1]. 1 uploads everything.
        error_feedback: Whether to carry dropped entries to the next round.
        per_layer: Whether each tensor keeps its own largest entries, so that each uploads some.

    References:
        [1] Stich, Cordonnier, Jaggi. "Sparsified SGD with Memory." NeurIPS 2018.
            https://arxiv.org/abs/1809.07599
        [2] Zhu, Liu, Han. "Deep Leakage from Gradients." NeurIPS 2019.
            https://arxiv.org/abs/1906.08935
    """

    ratio: float
    error_feedback: bool = True
    per_layer: bool = False
    _dropped: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], got {self.ratio}")

    @property
    def strength(self) -> float:
        """Return the fraction of entries that are dropped."""
        return 1 - self.ratio

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update with only its largest entries; the others are zero."""
        update = restore(update, self._dropped)
        sent = map_vectors(self._largest, update, self.per_layer)
        if self.error_feedback:
            self._dropped = flatten(update) - flatten(sent)
        return sent

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the mask that the observed upload shows: its non-zero entries."""
        return Masked.as_in(observed)

    def _largest(self, vector: Tensor) -> Tensor:
        return keep(vector, vector.abs().topk(kept_count(self.ratio, vector)).indices)


@dataclass
class Masked(Defense):
    """The replay of a sparsified upload: upload only given entries.

    Attributes:
        kept: Which entries are uploaded, by parameter name.
    """

    kept: Mapping[str, Tensor]

    @classmethod
    def as_in(cls, observed: Mapping[str, Tensor]) -> Masked:
        """Return the mask that an observed upload shows: its non-zero entries."""
        return cls({name: value != 0 for name, value in observed.items()})

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update with all other entries set to zero."""
        return {name: value * self.kept[name] for name, value in update.items()}


def keep(vector: Tensor, indices: Tensor) -> Tensor:
    """Return a vector with only the entries at `indices`; the others are zero."""
    return torch.zeros_like(vector).index_copy(0, indices, vector[indices])


def kept_count(ratio: float, vector: Tensor) -> int:
    """Return the number of entries in a fraction of a vector, at least one."""
    return max(1, round(ratio * vector.numel()))
