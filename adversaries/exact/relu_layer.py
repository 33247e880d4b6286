"""The gradient of a linear layer before a ReLU, and what its sparsity reveals about a batch.

A layer Z = WX + b with activation ReLU(Z) has dL/dW = G X^T and dL/db = G 1. G = dL/dZ is zero
wherever Z is negative. For any factorisation dL/dW = LR there is an invertible Q with G = LQ and
X^T = Q^-1 R [1, Theorem 3.2]. The directions q that make Lq sparse therefore determine the batch;
their scale need not be known.

References:
    [1] Dimitrov, Baader, Mueller, Vechev. "SPEAR: Exact Gradient Inversion of Batches in
        Federated Learning." NeurIPS 2024. https://arxiv.org/abs/2403.03945
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import binom
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import normalize
from torch.overrides import TorchFunctionMode

from ..base import Observation, in_evaluation
from ..spaces import InputSpace, NotApplicable
from .affine_prefix import AffinePrefix, affine_prefix

RELUS = (torch.relu, torch.relu_, functional.relu, Tensor.relu, Tensor.relu_)
"""The functions that compute a ReLU."""
_RANK_GAP = 100.0
"""Ratio of successive singular values that marks the rank. Noise makes the ratio smaller."""


@dataclass(frozen=True)
class ReLULayer:
    """A linear layer followed by a ReLU.

    Attributes:
        name: Name of the module in the model.
        weight: W, of shape (outputs, inputs).
        bias: b.
        sees_inputs: Whether its inputs are the flattened inputs of the model, or give them.
        prefix: The affine map from these to its inputs; None if they are the same.
    """

    name: str
    weight: Tensor
    bias: Tensor
    sees_inputs: bool
    prefix: AffinePrefix | None = None

    def parameter(self, name: str) -> str:
        """Return the name of one of its parameters in the model."""
        return f"{self.name}.{name}" if self.name else name


def find_layer(observation: Observation, name: str | None) -> ReLULayer:
    """Return the named linear layer, or else the layer that sees the inputs.

    Raises:
        NotApplicable: If there is no such layer with a bias and a following ReLU.
    """
    if not observation.space.continuous:
        raise NotApplicable("token inputs are embedded before any linear layer")
    calls = linear_calls(observation.model, observation.space)
    prefix = None
    if name is None:
        chosen = next((call for call in calls if call.sees_inputs), None)
        if chosen is None or not chosen.weight.requires_grad:
            chosen, prefix = _behind_frozen_layers(observation, calls) or (chosen, None)
        if chosen is None:
            raise NotApplicable(
                "no linear layer sees the inputs. Set `layer` to a deeper one to recover its "
                f"input features: {', '.join(call.name for call in calls) or 'there is none'}"
            )
    else:
        chosen = next((call for call in calls if call.name == name), None)
        if chosen is None:
            known = ", ".join(call.name for call in calls)
            raise NotApplicable(f"the model has no linear layer {name!r}, only: {known or 'none'}")
    if chosen.bias is None:
        raise NotApplicable(f"layer {chosen.name!r} has no bias to fix the scale")
    seen = chosen.sees_inputs or prefix is not None
    layer = ReLULayer(chosen.name, chosen.weight, chosen.bias, seen, prefix)
    if not {layer.parameter("weight"), layer.parameter("bias")} <= {*observation.update}:
        raise NotApplicable(f"layer {chosen.name!r} is frozen, so the update does not contain it")
    if chosen.followed_by not in RELUS:
        raise NotApplicable(
            f"layer {chosen.name!r} is followed by {_described(chosen.followed_by)}, not by a "
            "ReLU: its gradient has no exact zeros"
        )
    return layer


def _behind_frozen_layers(
    observation: Observation, calls: Sequence[_Call]
) -> tuple[_Call, AffinePrefix | None] | None:
    """Return the first trained layer, if its inputs give those of the model."""
    first = next((call for call in calls if call.weight.requires_grad), None)
    if first is None:
        return None
    module = observation.model.get_submodule(first.name)
    try:
        return first, affine_prefix(observation.model, module, observation.space)
    except NotApplicable:
        return None


@dataclass
class _Call:
    name: str
    weight: Tensor
    bias: Tensor | None
    sees_inputs: bool
    output: Tensor
    followed_by: Callable[..., object] | None = None


class _Tracer(TorchFunctionMode):
    """Records every linear layer that runs, and the first function that takes its output."""

    def __init__(self, names: Mapping[int, str], example: Tensor) -> None:
        super().__init__()
        self.names, self.example = names, example
        self.calls: list[_Call] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):  # for example, a request for the shape
            return result
        for call in self.calls:
            if call.followed_by is None and any(call.output is value for value in args):
                call.followed_by = func
        if func is functional.linear and result.ndim == 2:
            inputs, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
            if id(weight) in self.names:
                seen = torch.equal(inputs.flatten(), self.example.flatten())
                self.calls.append(_Call(self.names[id(weight)], weight, bias, seen, result))
        return result


def linear_calls(model: nn.Module, space: InputSpace) -> list[_Call]:
    """Return the linear layers in the order in which the model runs them."""
    names = {
        id(value): name.removesuffix("weight").removesuffix(".")
        for name, value in model.named_parameters()
    }
    some = next(value for value in model.parameters() if value.is_floating_point())
    example = torch.linspace(0, 1, math.prod(space.shape), dtype=some.dtype, device=some.device)
    example = example.view(1, *space.shape)
    tracer = _Tracer(names, example)
    with in_evaluation(model), torch.no_grad(), tracer:
        model(example)
    return tracer.calls


def _described(function: Callable[..., object] | None) -> str:
    return "nothing" if function is None else getattr(function, "__name__", repr(function))


@dataclass(frozen=True)
class Factors:
    """dL/dW = LR with orthonormal L, and the quantities that relate a direction q to the batch.

    Attributes:
        left: L, the left singular vectors.
        right: R, the right singular vectors times their singular values.
        noise: Standard deviation of an entry of Lq, per coordinate of q. It is estimated from the
            part of dL/dW beyond its rank.
        hidden: W R^T, the layer's outputs for inputs in the span of R.
        bias: b.
        bias_gradient: L^T dL/db, which is the sum of the columns of Q.
        explained: Share of dL/db in the span of L. It should be 1; dL/db fixes the scale.
    """

    left: Tensor
    right: Tensor
    noise: Tensor
    hidden: Tensor
    bias: Tensor
    bias_gradient: Tensor
    explained: float

    @property
    def rank(self) -> int:
        """Number of examples that the gradient shows."""
        return self.left.shape[1]

    def outputs(self, directions: Tensor) -> Tensor:
        """Return Lq, for directions given as rows."""
        return directions @ self.left.T

    def tolerance(self, directions: Tensor, outputs: Tensor) -> Tensor:
        """Return, for each direction, the size up to which an entry of Lq counts as zero."""
        noise = torch.linalg.vector_norm(directions * self.noise, dim=-1, keepdim=True)
        return torch.maximum(3 * noise, 1e-6 * outputs.abs().amax(-1, keepdim=True))

    def zeros(self, directions: Tensor) -> Tensor:
        """Return which entries of Lq are zero up to noise."""
        outputs = self.outputs(directions)
        return outputs.abs() <= self.tolerance(directions, outputs)

    def sparsity(self, directions: Tensor) -> Tensor:
        """Return a score that grows with the number of entries of Lq near zero."""
        outputs = self.outputs(directions)
        width = self.tolerance(directions, outputs)
        return -(outputs.square() + width.square()).log().mean(1)

    @property
    def live(self) -> Tensor:
        """Which neurons have a nonzero gradient."""
        return self.left.abs().amax(1) > 0

    def fewest_zeros(self, false_rejection: float) -> int:
        """Return a number of zeros that a true column has, except with `false_rejection`.

        At random weights, a neuron is off for half of all inputs, independently of other neurons.
        Any column can be given one zero less than the rank, in addition to the neurons that are
        off for the whole batch. A true column has more zeros. It also has more zeros than random
        directions, unless noise hides everything.
        """
        expected = binom.ppf(false_rejection, len(self.left), 0.5)
        made = int((~self.live).sum()) + 2 * (self.rank - 1)
        fewest = int(max(expected, min(made, binom.ppf(0.01, len(self.left), 0.5))))
        if self.rank == 1:
            return fewest
        random = torch.randn(256, self.rank, generator=torch.Generator().manual_seed(0))
        by_chance = self.zeros(normalize(random, dim=1).to(self.left)).sum(1).max()
        return max(fewest, int(by_chance) + 1)

    @property
    def noisy(self) -> bool:
        """Whether noise blurs the zeros far beyond the rounding of single precision."""
        return bool(self.noise.square().mean() * len(self.left) > 1e-6)


def factorise(observation: Observation, layer: ReLULayer) -> Factors | None:
    """Return the factors of the layer's gradient. Their rank estimates the batch size.

    A randomised range finder is exact for a matrix of low rank. It is much cheaper than a full
    decomposition of a wide layer. The scale of an update, such as a learning rate or a clipped
    norm, cancels between weight and bias. The result is None for a layer whose update is zero.

    Raises:
        NotApplicable: If the batch is larger than the layer.
    """
    gradient = observation.update[layer.parameter("weight")].double()
    bias_gradient = observation.update[layer.parameter("bias")].double()
    outputs, inputs = gradient.shape
    if not observation.batch_size < min(outputs, inputs):
        raise NotApplicable(
            f"{observation.batch_size} examples behind one update do not fit the rank of layer "
            f"{layer.name!r}, which is {min(outputs, inputs)}"
        )
    if not gradient.any() or not bias_gradient.any():
        return None
    left, values, right = _truncated_svd(gradient, observation.batch_size)
    rank = _numeric_rank(values, observation.batch_size)
    left, values, right = left[:, :rank], values[:rank], right[:rank]
    residual = gradient - (left * values) @ right
    left = left * (gradient.abs().amax(1, keepdim=True) > 0)  # exact zeros stay exact
    deviation = (residual.square().sum() / ((outputs - rank) * (inputs - rank))).sqrt()
    right = values.unsqueeze(1) * right
    return Factors(
        left=left,
        right=right,
        noise=deviation / values,
        hidden=layer.weight.detach().double() @ right.T,
        bias=layer.bias.detach().double(),
        bias_gradient=left.T @ bias_gradient,
        explained=float((left.T @ bias_gradient).square().sum() / bias_gradient.square().sum()),
    )


def _truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading singular vectors and values, a few more than `rank`.

    Noise, including rounding, flattens the spectrum. Subspace iterations therefore sharpen the
    range. Single precision suffices for all iterations except the last.
    """
    size = min(rank + 10, *matrix.shape)
    rng = torch.Generator().manual_seed(0)
    rough = matrix.float()
    basis = torch.randn(matrix.shape[1], size, generator=rng).to(rough)
    for _ in range(2):
        basis = torch.linalg.qr(rough.T @ torch.linalg.qr(rough @ basis).Q).Q
    basis = torch.linalg.qr(matrix @ basis.double()).Q
    left, values, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ left, values, right


def _numeric_rank(values: Tensor, batch_size: int) -> int:
    """Return the rank if the singular values have a gap, and the batch size otherwise."""
    ratios = values[:batch_size] / values[1 : batch_size + 1].clamp(min=torch.finfo().tiny)
    gap, position = ratios.max(0)
    return int(position) + 1 if gap > _RANK_GAP else batch_size
