"""Random sparsification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from .base import Defense, Update
from .topk import Masked, keep, kept_count
from .vector import flatten, map_vectors, restore


@dataclass
class RandomK(Defense):
    """Upload randomly chosen entries of the update, drawn afresh for every upload.

    It keeps a share `ratio` of all entries, at least one, either over all parameters together or in
    each tensor. With rescaling by the inverse of that share, the upload is unbiased but has more
    variance. Error feedback instead adds the dropped entries to the next update.

    The choice hides nothing. The server sees which entries are there, and they are exact (up to
    the known rescaling). A linear layer needs few of them to reveal its inputs.

    Attributes:
        ratio: Fraction of entries to upload, in (0, 1]. 1 uploads everything.
        rescale: Whether to divide by the share of kept entries.
        per_layer: Whether to keep the fraction in each tensor or over the whole update.
        error_feedback: Whether to carry dropped entries to the next round. It cannot be combined
            with `rescale`: the carried error would grow from round to round.

    References:
        Stich, Cordonnier, Jaggi. "Sparsified SGD with Memory." NeurIPS 2018.
        https://arxiv.org/abs/1809.07599
    """

    ratio: float
    rescale: bool = False
    per_layer: bool = False
    error_feedback: bool = False
    _dropped: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], got {self.ratio}")
        if self.rescale and self.error_feedback:
            raise ValueError("rescale must be False with error_feedback: the error would grow")

    @property
    def stochastic(self) -> bool:
        """Return whether any entry may be dropped."""
        return self.ratio < 1

    @property
    def strength(self) -> float:
        """Return the fraction of entries that are dropped."""
        return 1 - self.ratio

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update with only randomly chosen entries; the others are zero."""

        def choose(vector: Tensor) -> Tensor:
            order = torch.randperm(vector.numel(), generator=rng, device=vector.device)
            return keep(vector, order[: kept_count(self.ratio, vector)])

        update = restore(update, self._dropped)
        sent = map_vectors(choose, update, self.per_layer)
        if self.error_feedback:
            self._dropped = flatten(update) - flatten(sent)
        return self._rescaled(sent)

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the mask that the observed upload shows, with the known rescaling."""
        return Masked(self._rescaled(Masked.as_in(observed).kept))

    def _rescaled(self, update: Mapping[str, Tensor]) -> Update:
        def rescaled(vector: Tensor) -> Tensor:
            return vector * (vector.numel() / kept_count(self.ratio, vector))

        return map_vectors(rescaled, update, self.per_layer) if self.rescale else dict(update)
