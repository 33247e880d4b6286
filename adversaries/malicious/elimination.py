"""Recover examples that are alone in a row of a linear layer, and subtract them from other rows.

If the later layers treat all rows alike, an example has the same gradient d in every row that it
activates. A row with one active example then has dL/dW_k = d x and dL/db_k = d. A known example
can be subtracted from all rows that it activates [1, Eq. 15]. This leaves other examples alone.

References:
    [1] Gong et al. "ARES: Scalable and Practical Gradient Inversion Attack in Federated Learning
        through Activation Recovery." IEEE S&P 2026.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..base import Observation
from ..spaces import InputSpace

_LEAST = 1e-5  # a row is empty if its bias gradient is below this share of the largest one


class _Tolerance(NamedTuple):
    """How far a row may differ from the row of a single example.

    Attributes:
        box: Largest root mean square by which its values exceed the range of the data.
        bias: Largest relative difference of its bias gradient from the example's own.
        near: Rows give the same example if their distance, relative to the norm, is below this.
    """

    box: float
    bias: float
    near: float


_EXACT = _Tolerance(box=1e-5, bias=1e-2, near=1e-3)
_NOISY = _Tolerance(box=5e-2, bias=1e-1, near=2e-1)


@torch.no_grad()
def eliminated(
    observation: Observation, model: nn.Module, name: str, head: nn.Linear, own: Tensor
) -> Tensor:
    """Return the examples that rows of a layer reveal, one after the other.

    A row counts as single if its example lies in the range of the data and has the right bias
    gradient: the one that the model gives for this example. The first passes require this exactly.
    When they find no more, later passes allow noise. If a client has only one example, all its
    rows contain that example.

    Args:
        observation: The observed update.
        model: The model that the client received.
        name: The layer that sees the inputs.
        head: The layer whose columns are equal, and whose values differ by class.
        own: Which rows of the layer belong to the client.
    """
    layer, space = model.get_submodule(name), observation.space
    assert isinstance(layer, nn.Linear)
    clients = observation.protocol.clients
    weight, bias = (
        clients * observation.as_gradient(f"{name}.{part}")[own].double()
        for part in ("weight", "bias")
    )
    examples, found = observation.batch_size // clients, []
    if examples == 1 and bool(bias.any()):
        found = [(bias @ weight / bias.square().sum()).view(space.shape)]
    least = _LEAST * float(bias.abs().max())
    for tolerance in (_EXACT, _NOISY):
        progress = True
        while progress and len(found) < examples:
            progress = False
            rows, guesses = _single(observation, model, layer, head, weight, bias, tolerance, least)
            signals = bias[rows].clone()
            for row, guess, signal in zip(rows, guesses, signals, strict=True):
                if (bias[row] - signal).abs() > least or len(found) == examples:
                    continue  # another row's example was subtracted from it in this pass
                inputs = guess.flatten()[None].to(layer.weight)
                active = layer(inputs)[0, own] > 0
                weight -= signal * active[:, None] * guess.flatten()
                bias -= signal * active
                weight[row], bias[row] = 0, 0
                found.append(guess)
                progress = True
    some = observation.update[f"{name}.weight"]
    return torch.stack(found).to(some) if found else some.new_zeros(0, *space.shape)


def _single(
    observation: Observation,
    model: nn.Module,
    layer: nn.Linear,
    head: nn.Linear,
    weight: Tensor,
    bias: Tensor,
    tolerance: _Tolerance,
    least: float,
) -> tuple[Tensor, Tensor]:
    """Return the rows that hold one example, and the example, averaged over its rows."""
    space = observation.space
    rows = (bias.abs() > least).nonzero().flatten()
    guesses = (weight[rows] / bias[rows, None]).view(-1, *space.shape)
    inside = _excess(guesses, space) <= tolerance.box
    rows, guesses = rows[inside], guesses[inside]
    expected = bias_gradients(observation, model, layer, head, guesses)
    misses = (expected - bias[rows, None]).abs().amin(dim=1)
    single = misses <= tolerance.bias * bias[rows].abs()
    rows, flat = rows[single], guesses[single].flatten(1)
    near = torch.cdist(flat, flat) <= tolerance.near * flat.norm(dim=1, keepdim=True)
    near.fill_diagonal_(True)
    averages = near.to(flat) @ flat / near.sum(dim=1, keepdim=True)
    return rows, averages.view(-1, *space.shape)


def _excess(inputs: Tensor, space: InputSpace) -> Tensor:
    """Return by how much each input exceeds the range of the data (root mean square)."""
    values = space.to_unit(inputs).flatten(1)
    return (values - values.clamp(0, 1)).square().mean(dim=1).sqrt()


def bias_gradients(
    observation: Observation,
    model: nn.Module,
    layer: nn.Linear,
    head: nn.Linear,
    inputs: Tensor,
) -> Tensor:
    """Return each example's bias gradient in its active rows, for each value of the head."""
    outputs: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, __, output: outputs.append(output))
    values = head.weight[:, 0].tolist()
    examples = observation.batch_size // observation.protocol.clients
    try:
        with torch.enable_grad():
            predicted = model(inputs.to(layer.weight))
            gradients: list[Tensor] = []
            for label in {value: label for label, value in enumerate(values)}.values():
                targets = torch.full((len(inputs),), label, device=predicted.device)
                loss = observation.loss(predicted, targets) * len(inputs) / examples
                gradients += torch.autograd.grad(loss, outputs[0], retain_graph=True)
    finally:
        handle.remove()
    largest = [torch.where(g.amax(1) > -g.amin(1), g.amax(1), g.amin(1)) for g in gradients]
    return torch.stack(largest, dim=1).double()
