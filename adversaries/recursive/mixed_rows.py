"""Separate examples that the last layer only holds as a sum, by the convolution before it.

Examples with one label and one saturated prediction have the same slope g at the outputs of the
convolution's activation. The last layer's gradient then holds only the sum of these outputs. The
convolution's own gradient holds more. With slopes k = g A'(z) and inputs x, it is bilinear,

    dL/dW = sum_k k_k * x_k = K P,

where the columns of K and the rows of P (patches of inputs) are examples and places. An activation
with a kink has two slopes, so K is known up to signs. Given the signs, the inputs are a linear
system with many more equations than unknowns. Given the inputs, the slopes are such a system too.
Both kinds of evidence, z and slope, then decide the signs, weighted by their accuracy. From random
signs, this either ends within some steps at a residual of rounding size, or not at all. The
residual thus tells whether examples were found. No prediction is completely saturated, so slopes
differ in late digits. Once examples are known, each gets its own slope.

R-CONV++ leaves such examples mixed. Like SPEAR [1], this method separates examples by the sparsity
of what activations pass on. It needs neither a ReLU nor a linear layer.

References:
    [1] Dimitrov, Baader, Müller, Vechev. "SPEAR: Exact Gradient Inversion of Batches in Federated
        Learning." NeurIPS 2024. https://arxiv.org/abs/2403.03945
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot, unfold

from .constraints import Convolution, inputs_of_batch
from .layer_chain import Layer

STARTS = 6
"""Number of random starts."""
_SPARE = 2
"""Smallest number of equations per unknown. It also bounds the time of unsuccessful searches."""
_STEPS = 60
"""Largest number of steps from one start."""
_RIDGES = (1e-2, 3e-2)
"""Values added to the diagonals of normal equations, for inputs and slopes; they shrink later."""
_POLISHING = 3
"""Number of final steps in which each example has its own slope."""
_FOUND = 1e-6
"""Largest part of the gradient that may be unexplained."""
_TINY = 1e-12


@dataclass(frozen=True)
class Group:
    """Examples that share one slope.

    Attributes:
        count: Number of examples.
        total: Sum of their activation outputs, flat.
        slopes: Maps activation outputs of examples of this group to dL/doutputs.
    """

    count: int
    total: Tensor
    slopes: Callable[[Tensor], Tensor]


def tell_apart(
    layer: Layer,
    gradient: Tensor,
    groups: Sequence[Group],
    precision: float,
    rng: Generator,
    starts: int = STARTS,
) -> tuple[Tensor, Tensor] | None:
    """Return each example's activation outputs and inputs, or None if they are not found.

    The inputs come from gradients. They are more accurate than inputs computed by weights.

    Args:
        layer: A convolution with a kinked activation.
        gradient: Its dL/dW, summed over exactly the examples of the groups.
        groups: What is known about the examples.
        precision: Relative rounding error of the gradients.
        rng: Source of random starts.
        starts: Number of starts.
    """
    activation = layer.activation
    if not groups or activation is None or not activation.kinked or activation.partial:
        return None
    mixture = _Mixture(layer, gradient, groups)
    if _SPARE * mixture.unknowns > mixture.equations:
        return None
    for _ in range(starts):
        found = mixture.search(max(_FOUND, 1e4 * precision), rng)
        if found is not None:
            return found
    return None


class _Mixture:
    """The gradient of a convolution, summed over some examples."""

    def __init__(self, layer: Layer, gradient: Tensor, groups: Sequence[Group]) -> None:
        self.layer, self.convolution = layer, Convolution(layer)
        self.gradient = gradient
        self.member = torch.cat(
            [torch.full((group.count,), place) for place, group in enumerate(groups)]
        )
        self.sum = one_hot(self.member).T.double()  # maps examples to groups
        self.totals = torch.stack([group.total for group in groups])
        means = [group.total / group.count for group in groups]
        self.means = torch.stack(means)[self.member]
        self.groups = groups
        self.slope = self._slopes_at(self.means)
        assert layer.activation is not None
        unit = torch.ones((), dtype=torch.float64)
        self.low, self.high = (float(layer.activation.slope(sign * unit)) for sign in (-1, 1))
        filters, channels, *taps = layer.weight.shape
        self.examples, self.places = len(self.member), math.prod(layer.output_shape[1:])
        self.unknowns = self.examples * max(math.prod(layer.input_shape[1:]), self.places)
        self.equations = min(filters, channels) * math.prod(taps)

    def search(self, accuracy: float, rng: Generator) -> tuple[Tensor, Tensor] | None:
        """Return the examples found from one start; None if they do not explain the gradient."""
        noise = torch.randn(self.means.shape, generator=rng, dtype=self.means.dtype)
        signs = self.means + 0.7 * self.means.abs().median() * noise
        before, best, since = torch.inf, torch.inf, 0
        for _ in range(_STEPS):
            ridge = _RIDGES[0] * min(1.0, 10 * before**2) + 1e-14
            inputs, residual = self._inputs(self._slopes_of(signs), ridge)
            if not math.isfinite(residual):
                return None
            outputs, deviation = self._outputs(inputs)
            if residual < accuracy and before < accuracy:
                return self._polished(outputs)
            best, since = (residual, 0) if residual < 0.99 * best else (best, since + 1)
            if since > 15:
                return None
            signs = 1.6 * outputs / deviation + self._evidence(
                inputs, _RIDGES[1] * residual + 1e-14
            )
            before = residual
        return None

    def _polished(self, outputs: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return activation outputs and inputs, with a separate slope for each example."""
        for _ in range(_POLISHING):
            values = self._slopes_of(outputs) * outputs
            slopes = self._slopes_at(values) * self._slopes_of(outputs)
            kernels = slopes.view(-1, *self.layer.output_shape)
            inputs, left = inputs_of_batch(self.layer, self.gradient, kernels)
            if not math.isfinite(left):
                return None
            outputs = self._plain_outputs(inputs)
        return self._slopes_of(outputs) * outputs, inputs.flatten(1)

    def _slopes_at(self, values: Tensor) -> Tensor:
        """Return dL/dvalues of each example, as a member of its group."""
        parts = [
            group.slopes(values[self.member == place]) for place, group in enumerate(self.groups)
        ]
        return torch.cat(parts)

    def _slopes_of(self, signs: Tensor) -> Tensor:
        return torch.full_like(signs, self.low).where(signs <= 0, self.high)

    def _inputs(self, slopes: Tensor, ridge: float) -> tuple[Tensor, float]:
        """Return the least-squares x of dL/dW = k * x, and the unexplained part of dL/dW."""
        kernels = (self.slope * slopes).view(-1, *self.layer.output_shape)
        solve = partial(_ridge_least_squares, ridge=ridge)
        return inputs_of_batch(self.layer, self.gradient, kernels, solve)

    def _plain_outputs(self, inputs: Tensor) -> Tensor:
        outputs = self.convolution.outputs(inputs)
        if self.layer.bias is not None:
            outputs = outputs + self.layer.bias.detach().double().view(-1, 1, 1)
        return outputs.flatten(1)

    def _outputs(self, inputs: Tensor) -> tuple[Tensor, float]:
        """Return z, shifted to match the known sums, and the deviation before the shift."""
        outputs, deviation = self._plain_outputs(inputs), 0.0
        for step in range(3):
            slopes = self._slopes_of(outputs)
            powers = self.sum @ slopes.square()
            missing = self.totals - self.sum @ (slopes * outputs)
            if step == 0:
                deviation = float((missing.square() / powers).mean().sqrt())
            outputs = outputs + slopes * (missing / powers)[self.member]
        return outputs, deviation + _TINY * float(outputs.abs().mean())

    def _evidence(self, inputs: Tensor, ridge: float) -> Tensor:
        """Return, from slopes, the log-likelihood ratio of a positive to a negative sign."""
        layer = self.layer
        taps = (layer.weight.shape[2], layer.weight.shape[3])
        patches = unfold(inputs, taps, layer.dilation, layer.padding, layer.stride)
        patches = patches.transpose(1, 2).reshape(self.examples * self.places, -1)
        inverse = _ridge_solve(patches @ patches.T, ridge)
        slopes = self._by_output((inverse @ (patches @ self.gradient.flatten(1).T)).T)
        variances = self._by_output(inverse.diagonal().expand(len(self.gradient), -1))
        low, high = self.low * self.slope, self.high * self.slope
        errors = torch.minimum((slopes - low).abs(), (slopes - high).abs()) / variances.sqrt()
        noise = 1.5 * float(errors.median()) + _TINY * float(self.slope.abs().mean())
        return (high - low) * (slopes - (high + low) / 2) / (variances * noise**2)

    def _by_output(self, values: Tensor) -> Tensor:
        """Reorder values from (filter, example and place) to (example, output)."""
        return values.reshape(-1, self.examples, self.places).transpose(0, 1).flatten(1)


def _ridge_least_squares(matrix: Tensor, values: Tensor, ridge: float) -> Tensor:
    return _ridge_solve(matrix.T @ matrix, ridge) @ (matrix.T @ values)


def _ridge_solve(normal: Tensor, ridge: float) -> Tensor:
    """Return (A^T A + ridge)^-1. The ridge is relative to the mean of the diagonal."""
    normal = normal.clone()
    normal.diagonal().add_(ridge * normal.diagonal().mean() + 1e-300)
    inverse: Tensor = torch.linalg.inv(normal)
    return inverse
