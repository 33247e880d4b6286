"""Recover the inputs of a layer from its activations: solve z = ReLU(Wx + b) for x.

Where z > 0, the activation is an exact linear equation. Where z is 0, it is an inequality,
Wx + b <= 0. If there are more equations than unknowns, conjugate gradients solve them exactly.
Otherwise, two facts about natural signals complete them. Values lie in a box. The coefficients of
a discrete cosine transform are sparse, especially at high frequencies and in colour. All
activations of a batch are inverted together. W is applied as an operator and never stored.

References:
    [1] Gong et al. "ARES: Scalable and Practical Gradient Inversion Attack in Federated Learning
        through Activation Recovery." IEEE S&P 2026. (Eq. 4 to 12)
    [2] Plan, Vershynin. "The Generalized Lasso with Non-linear Observations." IEEE Transactions
        on Information Theory 62(3), 2016. https://arxiv.org/abs/1502.04071
    [3] Chambolle, Pock. "A First-Order Primal-Dual Algorithm for Convex Problems with
        Applications to Imaging." Journal of Mathematical Imaging and Vision 40, 2011.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.grad import conv1d_input, conv2d_input

DETERMINED = 1.3
"""Number of equations per unknown above which least squares is well conditioned."""
SOLVED = 1e-4
"""Least squares counts as exact up to this residual; signals with silence have few equations."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """The linear map of a layer, without its bias, on a batch of inputs.

    Attributes:
        layer: The layer, before its activation.
        shape: Shape of one input.
    """

    layer: nn.Linear | nn.Conv1d | nn.Conv2d
    shape: tuple[int, ...]

    def of(self, rows: Tensor) -> Measurement:
        """Return the measurement of only some rows or kernels."""
        if bool(rows.all()):
            return self
        part = copy.deepcopy(self.layer)
        part.weight = nn.Parameter(self.layer.weight.detach()[rows])
        if self.layer.bias is not None:
            part.bias = nn.Parameter(self.layer.bias.detach()[rows])
        return Measurement(part, self.shape)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return Wx."""
        if isinstance(self.layer, nn.Linear):
            return inputs.flatten(1) @ self._weight(inputs).T
        outputs: Tensor = self.layer._conv_forward(inputs, self._weight(inputs), None)
        return outputs

    def adjoint(self, outputs: Tensor) -> Tensor:
        """Return W^T u."""
        shape, weight = (len(outputs), *self.shape), self._weight(outputs)
        if isinstance(self.layer, nn.Linear):
            return (outputs @ weight).view(shape)
        transposed = conv1d_input if isinstance(self.layer, nn.Conv1d) else conv2d_input
        options = (self.layer.stride, self.layer.padding, self.layer.dilation, self.layer.groups)
        adjoint: Tensor = transposed(shape, weight, outputs, *options)  # type: ignore[no-untyped-call]
        return adjoint

    @property
    def bias(self) -> Tensor:
        """Return b in a shape that can be added to Wx."""
        weight = self.layer.weight.detach()
        bias = weight.new_zeros(len(weight)) if self.layer.bias is None else self.layer.bias
        return bias.detach().view(-1, *[1] * (weight.ndim - 2))

    @cached_property
    def norm(self) -> float:
        """Return the largest singular value of W, computed by power iterations."""
        rng = torch.Generator().manual_seed(0)
        vector = torch.randn((1, *self.shape), generator=rng).to(self.layer.weight.device)
        for _ in range(100):
            vector = self.adjoint(self.forward(vector / vector_norm(vector)))
        return math.sqrt(float(vector_norm(vector)))

    def _weight(self, like: Tensor) -> Tensor:
        return self.layer.weight.detach().to(like.dtype)


class Recovered(NamedTuple):
    """Inputs that explain activations.

    Attributes:
        inputs: The inputs.
        residual: Distance of their own activations from the given ones, relative to the latter.
            It is high if the given activations do not belong to a single input.
        equations: Number of active units of each input.
    """

    inputs: Tensor
    residual: Tensor
    equations: Tensor


def invert(
    measurement: Measurement,
    activations: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    iterations: int = 400,
) -> Recovered:
    """Return the inputs behind activations, by least squares if that is exact.

    Args:
        measurement: W and b.
        activations: z, of shape (batch, *outputs), with zeros for inactive units.
        low: Smallest value of each entry of an input; broadcast.
        high: Largest value.
        iterations: Largest number of iterations of either method.
    """
    activations = activations.clamp(min=0)
    low, high = low.to(activations), high.to(activations)
    equations = (activations > 0).flatten(1).sum(dim=1)
    inputs = least_squares(measurement, activations, iterations=iterations)
    residual = _residual(measurement, inputs, activations)
    vague = (residual > SOLVED) & (equations < DETERMINED * math.prod(measurement.shape))
    if vague.any():
        given = activations[vague]
        sparse = basis_pursuit(measurement, given, low, high, iterations=iterations)
        exact = least_squares(measurement, given, start=sparse, iterations=iterations)
        inputs[vague] = torch.minimum(torch.maximum(exact, low), high)
        residual[vague] = _residual(measurement, inputs[vague], given)
    return Recovered(inputs, residual, equations)


def _residual(measurement: Measurement, inputs: Tensor, activations: Tensor) -> Tensor:
    """Return the unexplained share of activations; it is 1 if all activations are zero."""
    again = (measurement.forward(inputs) + measurement.bias.to(inputs)).clamp(min=0)
    size = _norms(activations)
    return torch.where(size > 0, _norms(again - activations) / size, 1.0).flatten()


def least_squares(
    measurement: Measurement,
    activations: Tensor,
    *,
    start: Tensor | None = None,
    iterations: int = 400,
    tolerance: float = 1e-7,
) -> Tensor:
    """Return the inputs nearest to `start` that solve the equations of active units, by CGLS.

    Each example has its own active units and steps. Each one stops when it reaches the precision
    of its numbers, because a further step would be a quotient of rounding errors.

    Args:
        measurement: W and b.
        activations: z, of shape (batch, *outputs).
        start: First guess. Default: zero.
        iterations: Largest number of iterations.
        tolerance: An example is solved if its residual, relative to z, is below this. If equations
            contradict each other, the residual of the normal equations counts.
    """
    active = activations > 0
    residual = torch.where(active, activations - measurement.bias.to(activations), 0.0)
    enough = tolerance * _norms(residual)
    if start is not None:
        residual = residual - measurement.forward(start) * active
    slope = measurement.adjoint(residual)
    inputs = torch.zeros_like(slope) if start is None else start
    direction, gamma = slope, _norms(slope).square()
    flat = tolerance**2 * gamma
    for _ in range(iterations):
        running = (_norms(residual) > enough) & (gamma > flat)
        if not running.any():
            break
        ahead = measurement.forward(direction) * active
        step = torch.where(running, gamma / _norms(ahead).square().clamp(min=1e-38), 0.0)
        inputs = inputs + _like(step, inputs) * direction
        residual = residual - _like(step, residual) * ahead
        slope = measurement.adjoint(residual)
        previous, gamma = gamma, torch.where(running, _norms(slope).square(), gamma)
        direction = slope + _like(gamma / previous.clamp(min=1e-38), slope) * direction
    return inputs


def basis_pursuit(
    measurement: Measurement,
    activations: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    noise: float = 0.0,
    weights: Tensor | None = None,
    iterations: int = 400,
) -> Tensor:
    """Return the inputs with the sparsest coefficients that active and inactive units allow.

    This minimises sum_k weights_k |a_k| + |W_A x + b_A - z_A|^2 / (2 noise) over x in the box with
    W_I x + b_I <= 0. Here a is the cosine transform of x, A are the active units and I the
    inactive ones. It is the generalized Lasso [1, Eq. 11], or basis pursuit if `noise` is 0. The
    primal-dual method of [3, Algorithm 1] solves it and needs no mask in W.

    Args:
        measurement: W and b.
        activations: z, of shape (batch, *outputs).
        low: Smallest value of each entry of an input; broadcast.
        high: Largest value.
        noise: How much equations may be violated. 0 means not at all.
        weights: Price of each coefficient. Default: `natural_weights`.
        iterations: Number of iterations.
    """
    if weights is None:
        weights = natural_weights(measurement.shape)
    weights, low, high = (value.to(activations) for value in (weights, low, high))
    active = activations > 0
    count = active.flatten(1).sum(dim=1).clamp(min=1).to(activations.dtype)
    scale = (_norms(activations) / count.view(-1, 1).sqrt()).clamp(min=1e-30)  # to unit size
    goal = (activations - active * measurement.bias.to(activations)) / _like(scale, activations)
    most = -measurement.bias.to(activations) / _like(scale, activations)
    low, high = low / _like(scale, low[None]), high / _like(scale, high[None])
    inputs = activations.new_zeros(len(activations), *measurement.shape)
    ahead, fit, price = inputs, torch.zeros_like(activations), torch.zeros_like(inputs)
    step = 1 / (2 * measurement.norm**2)  # step of `fit`; it is 1/2 for `price`, 1 for `inputs`
    give = step * noise / _like(scale, activations)
    for _ in range(iterations):
        fit = fit + step * measurement.forward(ahead)
        equal = (give * fit / step + goal) / (1 + give)
        fit = fit - step * torch.where(active, equal, torch.minimum(fit / step, most))
        price = price + cosine_transform(ahead) / 2
        price = torch.minimum(torch.maximum(price, -weights), weights)
        slope = measurement.adjoint(fit) + inverse_cosine_transform(price)
        moved = torch.minimum(torch.maximum(inputs - slope, low), high)
        inputs, ahead = moved, 2 * moved - inputs
    return inputs * _like(scale, inputs)


def natural_weights(shape: tuple[int, ...]) -> Tensor:
    """Return the price of coefficients in `basis_pursuit`: about one over their usual size.

    In images, the size falls with the frequency, a little faster than 1/f, and colours vary less
    than brightness. Sound has no such order, so all its coefficients have the same price.

    Args:
        shape: (channels, height, width) of images, (channels, samples) of sound.
    """
    channels, *sizes = shape
    if len(sizes) != 2:
        return torch.full(shape, 0.1)
    height, width = (torch.arange(size) for size in sizes)
    frequency = torch.hypot(height[:, None].float(), width[None, :].float())
    falling = ((1 + frequency) / (sum(sizes) / 2)) ** 1.2
    dear = 1.0 + 4.0 * torch.arange(channels)
    return 0.2 * dear.view(-1, 1, 1) * falling


def cosine_transform(signals: Tensor) -> Tensor:
    """Return the orthonormal discrete cosine transform (DCT-II) along all axes except the first.

    Along three colour channels, it is a rotation into brightness and two differences.
    """
    for axis in range(1, signals.ndim):
        basis = _cosines(signals.shape[axis]).to(signals)
        signals = (signals.movedim(axis, -1) @ basis.T).movedim(-1, axis)
    return signals


def inverse_cosine_transform(coefficients: Tensor) -> Tensor:
    """Return the signals of orthonormal cosine coefficients."""
    for axis in range(1, coefficients.ndim):
        basis = _cosines(coefficients.shape[axis]).to(coefficients)
        coefficients = (coefficients.movedim(axis, -1) @ basis).movedim(-1, axis)
    return coefficients


@lru_cache(maxsize=32)
def _cosines(size: int) -> Tensor:
    index = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * index[:, None] * (index + 0.5)) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis


def _norms(batch: Tensor) -> Tensor:
    """Return the norm of each example, as a column."""
    norms: Tensor = vector_norm(batch.flatten(1), dim=1, keepdim=True)
    return norms


def _like(column: Tensor, batch: Tensor) -> Tensor:
    return column.view(-1, *[1] * (batch.ndim - 1))
