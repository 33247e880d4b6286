"""Updates as vectors, for defenses that compress an upload."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .base import Update


def flatten(update: Mapping[str, Tensor]) -> Tensor:
    """Return all entries of an update as one vector."""
    return torch.cat([value.flatten() for value in update.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Update:
    """Cut a vector back into tensors named and shaped like those of `like`."""
    pieces = torch.split(vector, [value.numel() for value in like.values()])
    return {name: piece.view_as(like[name]) for name, piece in zip(like, pieces, strict=True)}


def map_vectors(
    function: Callable[[Tensor], Tensor], update: Mapping[str, Tensor], per_layer: bool
) -> Update:
    """Apply a vector function to each tensor of an update, or to the whole update as one vector."""
    if per_layer:
        return {name: function(value.flatten()).view_as(value) for name, value in update.items()}
    return unflatten(function(flatten(update)), like=update)


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, with the derivative of `value`."""
    return value + (rounded - value).detach()


def restore(update: Mapping[str, Tensor], dropped: Tensor | None) -> Update:
    """Add to an update what compression dropped from the client's last update.

    If the server has sent another architecture, there is nothing to add.
    """
    vector = flatten(update)
    if dropped is None or vector.shape != dropped.shape:
        return dict(update)
    return unflatten(vector + dropped, like=update)
