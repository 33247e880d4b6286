"""Gradients of candidate sentences as atoms of a dictionary; find the few that form an upload.

The gradient of a linear layer for one sentence is D^T X, with its inputs X and the slopes D of its
outputs, one row for each token. Products of such gradients are sums over pairs of tokens,
<D^T X, E^T Y> = sum((X Y^T) * (D E^T)), so no atom is ever stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base import Observation, in_evaluation
from .transformer import LinearLayer, Transformer

_AT_ONCE = 8
"""Number of candidates that run through the model together."""


class Part(NamedTuple):
    """One layer's part of an atom: inputs and slopes of its outputs, each (tokens, size)."""

    inputs: Tensor
    slopes: Tensor


class Selection(NamedTuple):
    """The atoms whose combination is nearest to the upload.

    Attributes:
        chosen: Their indices, in the order in which they were chosen.
        amounts: The amount of each atom.
        residual: The unexplained part of the upload, as a share of its norm.
    """

    chosen: list[int]
    amounts: list[float]
    residual: float


def sentence_atoms(
    view: Transformer,
    observation: Observation,
    layers: Sequence[LinearLayer],
    inputs: Tensor,
    targets: Tensor,
) -> list[list[Part]]:
    """Return the atom of each candidate, layer by layer.

    The loss is the client's loss on each candidate alone.

    Args:
        view: The model.
        observation: The observed update.
        layers: The layers that atoms consist of.
        inputs: Candidates, of shape (n, length).
        targets: Their targets.
    """
    atoms: list[list[Part]] = []
    for start in range(0, len(inputs), _AT_ONCE):
        tokens, labels = inputs[start : start + _AT_ONCE], targets[start : start + _AT_ONCE]
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def note(
            module: nn.Module,
            given: tuple[Any, ...],
            output: Tensor,
            seen: dict[int, tuple[Tensor, Tensor]] = seen,
        ) -> None:
            seen[id(module)] = (given[0].detach(), output)

        hooks = [layer.module.register_forward_hook(note) for layer in layers]
        try:
            with torch.enable_grad(), in_evaluation(observation.model):
                loss = observation.loss(observation.model(tokens), labels)
                outputs = [seen[id(layer.module)][1] for layer in layers]
                slopes = torch.autograd.grad(len(tokens) * loss, outputs)
        finally:
            for hook in hooks:
                hook.remove()
        real = view.space.real(tokens)
        for row in range(len(tokens)):
            keep = real[row]
            atoms.append(
                [
                    Part(seen[id(layer.module)][0][row][keep], slope[row][keep])
                    for layer, slope in zip(layers, slopes, strict=True)
                ]
            )
    return atoms


def pursue(
    atoms: Sequence[Sequence[Part]],
    gradients: Sequence[Tensor],
    *,
    most: int,
    ridge: float,
    tolerance: float,
) -> Selection:
    """Choose atoms by orthogonal matching pursuit.

    Args:
        atoms: Candidates, layer by layer.
        gradients: The observed gradients of these layers, as (outputs, inputs).
        most: Largest number of atoms to choose.
        ridge: Penalty on the amounts of atoms of norm 1.
        tolerance: The search ends when the residual is below this share of the upload's norm.
    """
    inner = torch.stack([_inner(atom, gradients) for atom in atoms])
    norms = torch.stack([_product(atom, atom) for atom in atoms]).clamp(min=1e-60).sqrt()
    whole = sum(float(g.double().square().sum()) for g in gradients) ** 0.5 or 1.0
    inner = inner / norms / whole
    chosen: list[int] = []
    amounts, gram = inner[:0], inner.new_zeros(len(atoms), 0)  # products of all with chosen atoms
    residual = 1.0
    for _ in range(min(most, len(atoms))):
        correlation = (inner - gram @ amounts).abs()
        correlation[chosen] = -1
        newest = int(correlation.argmax())
        chosen.append(newest)
        column = torch.stack([_product(atom, atoms[newest]) for atom in atoms])
        gram = torch.cat([gram, (column / norms / norms[newest])[:, None]], dim=1)
        block = gram[chosen]
        penalised = block + ridge * torch.eye(len(chosen), dtype=block.dtype, device=block.device)
        amounts = torch.linalg.solve(penalised, inner[chosen])
        square = 1 - 2 * amounts @ inner[chosen] + amounts @ block @ amounts
        residual = float(square.clamp(min=0).sqrt())
        if residual < tolerance:
            break
    scaled = (amounts * whole / norms[chosen]).tolist()
    return Selection(chosen, scaled, residual)


def _inner(atom: Sequence[Part], gradients: Sequence[Tensor]) -> Tensor:
    """Return the inner product of an atom with the observed gradients."""
    parts = [
        ((part.slopes.double() @ gradient.double()) * part.inputs.double()).sum()
        for part, gradient in zip(atom, gradients, strict=True)
    ]
    return torch.stack(parts).sum()


def _product(one: Sequence[Part], other: Sequence[Part]) -> Tensor:
    parts = [
        (
            (a.inputs.double() @ b.inputs.double().T) * (a.slopes.double() @ b.slopes.double().T)
        ).sum()
        for a, b in zip(one, other, strict=True)
    ]
    return torch.stack(parts).sum()
