"""Top-k sparsification with error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from .base import Defense, Update


@dataclass
class TopK(Defense):
    """Upload only the largest entries of the update; carry the rest to the next round.

    The kept entries are the `ratio` largest in magnitude over all parameters together.
    Error feedback adds what was dropped to the next update, which restores the convergence
    rate of dense SGD [1]. Pruning was proposed against gradient inversion in [2].

    Note that error feedback *delays* leakage rather than preventing it: a dropped entry is
    uploaded once enough of it has accumulated.

    Attributes:
        ratio: Fraction of entries to upload, in (0, 1]. 1 uploads everything.
        error_feedback: Whether to carry dropped entries to the next round.

    References:
        [1] Stich, Cordonnier, Jaggi. "Sparsified SGD with Memory." NeurIPS 2018.
            https://arxiv.org/abs/1809.07599
        [2] Zhu, Liu, Han. "Deep Leakage from Gradients." NeurIPS 2019.
            https://arxiv.org/abs/1906.08935
    """

    ratio: float
    error_feedback: bool = True
    _dropped: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], got {self.ratio}")

    @property
    def strength(self) -> float:
        """Return the fraction of entries that are dropped."""
        return 1 - self.ratio

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update with all but its largest entries set to zero."""
        flat = torch.cat([value.flatten() for value in update.values()])
        if self._dropped is not None:
            if self._dropped.shape != flat.shape:
                raise ValueError(
                    f"update has {flat.numel()} entries, the last one had "
                    f"{self._dropped.numel()}: use one TopK per client"
                )
            flat = flat + self._dropped

        count = max(1, round(self.ratio * flat.numel()))
        largest = flat.abs().topk(count).indices
        sent = torch.zeros_like(flat).index_copy(0, largest, flat[largest])
        if self.error_feedback:
            self._dropped = flat - sent
        return _unflatten(sent, like=update)

    def replay(self, observed: Mapping[str, Tensor]) -> Defense:
        """Return the mask that the observed upload shows: its non-zero entries."""
        return Masked({name: value != 0 for name, value in observed.items()})


@dataclass
class Masked(Defense):
    """Upload only given entries: what can be replayed of a sparsified upload.

    Attributes:
        kept: Which entries are uploaded, by parameter name.
    """

    kept: Mapping[str, Tensor]

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Return the update with all other entries set to zero."""
        return {name: value * self.kept[name] for name, value in update.items()}


def _unflatten(flat: Tensor, like: Update) -> Update:
    """Cut a vector back into tensors named and shaped like those of `like`."""
    pieces = torch.split(flat, [value.numel() for value in like.values()])
    return {name: piece.view_as(like[name]) for name, piece in zip(like, pieces, strict=True)}
