"""Public affine maps between the inputs of a model and one of its layers.

A model may have frozen layers in front of the first layer that clients train: a permutation, a
rotation, a normalisation, a convolution. An update then shows z = Mx + o, the inputs of the trained
layer. The server knows M and o. If M has full column rank, x = M^+ (z - o).

The map is measured by running the model, so it does not matter which modules compute it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..base import in_evaluation
from ..spaces import InputSpace, NotApplicable

LARGEST = 4096
"""Above this number of inputs, M would be too large to invert."""

_AFFINE = 1e-3  # largest relative error of the affine map
_RANK = 1e-6  # singular values below this share of the largest count as zero
_AT_ONCE = 256


@dataclass(frozen=True)
class AffinePrefix:
    """The map z = Mx + o from the flattened inputs of a model to those of a layer.

    Attributes:
        matrix: M, in double precision.
        offset: o.
        inverse: The pseudo-inverse of M.
    """

    matrix: Tensor
    offset: Tensor
    inverse: Tensor

    def inputs(self, features: Tensor) -> Tensor:
        """Return the flattened inputs of the model whose features a layer sees, one row each."""
        return ((features.double() - self.offset) @ self.inverse.T).to(features.dtype)

    def on_inputs(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return the linear layer on the model's inputs that a layer on z amounts to."""
        wide = weight.double()
        return (wide @ self.matrix).to(weight), bias + (wide @ self.offset).to(bias)

    def on_features(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer on z that amounts to a linear layer on the model's inputs."""
        wide = weight.double() @ self.inverse
        return wide.to(weight), bias - (wide @ self.offset).to(bias)


@torch.no_grad()
def affine_prefix(model: nn.Module, layer: nn.Module, space: InputSpace) -> AffinePrefix | None:
    """Return the map from a model's inputs to those of a layer; None if they are the same.

    Raises:
        NotApplicable: If the map is not affine, or if it loses a part of the inputs.
    """
    size = math.prod(space.shape)
    some = next(value for value in model.parameters() if value.is_floating_point())
    rng = torch.Generator().manual_seed(0)
    tries = torch.cat([torch.rand(2, size, generator=rng), torch.randn(2, size, generator=rng)])
    tries = tries.to(some)
    found = _seen(model, layer, tries, space)
    if found.shape == tries.shape and torch.allclose(found, tries, atol=1e-6):
        return None
    if size > LARGEST:
        raise NotApplicable(f"{size} inputs are too many to invert what lies before the layer")
    offset = _seen(model, layer, torch.zeros_like(tries[:1]), space)[0].double()
    basis = torch.eye(size, dtype=some.dtype, device=some.device)
    rows = [_seen(model, layer, part, space) for part in basis.split(_AT_ONCE)]
    matrix = (torch.cat(rows).double() - offset).T
    error = tries.double() @ matrix.T + offset - found
    if not error.norm() <= _AFFINE * found.double().norm():
        raise NotApplicable("what lies between the inputs and the trained layer is not affine")
    values = torch.linalg.svdvals(matrix)
    if len(values) < size or not values[-1] > _RANK * values[0]:
        raise NotApplicable("what lies before the trained layer loses a part of the inputs")
    return AffinePrefix(matrix, offset, torch.linalg.pinv(matrix, rtol=_RANK))


def _seen(model: nn.Module, layer: nn.Module, rows: Tensor, space: InputSpace) -> Tensor:
    """Return the inputs of a layer for flattened inputs of the model, one row each."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        with in_evaluation(model):
            model(rows.view(-1, *space.shape))
    finally:
        handle.remove()
    if not seen or seen[0].shape[:-1] != rows.shape[:1]:
        raise NotApplicable("the trained layer does not run once per example")
    return seen[0]
