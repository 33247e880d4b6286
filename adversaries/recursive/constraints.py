"""Constraints that a convolution's weights and its weight gradient put on its input.

A convolution z = W * x + b with slope k = dL/dz has dL/dW = k * x. Both are linear in x. The first
gives a weight constraint per known output, the second a gradient constraint per weight [1, 2]:

    [ W ] x = [ z - b ]       [2, Eq. 26]
    [ K ]     [ dL/dW ]

K is the same small matrix for every input channel. Neither block is ever stored as a dense matrix
of all unknowns. K is factored for one channel, and W^T W is banded. Conjugate gradients solve both
together, with one of the factors as a preconditioner. Rows are divided by their standard
deviations, so accurate rows count more.

References:
    [1] Zhu, Blaschko. "R-GAP: Recursive Gradient Attack on Privacy." ICLR 2021.
        https://arxiv.org/abs/2010.07733
    [2] Eltaras, Malluhi, Savino, Di Carlo, Qayyum. "R-CONV++: Uncovering Privacy Vulnerabilities
        through Analytical Gradient Inversion Attacks." Computing 107:156, 2025.
        https://doi.org/10.1007/s00607-025-01508-w
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch
from scipy.linalg import LinAlgError, cho_solve_banded, cholesky_banded
from scipy.linalg.lapack import dtrcon
from torch import Tensor
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_input, conv2d_weight

from .layer_chain import Layer

Map = Callable[[Tensor], Tensor]

_AT_ONCE = 2**24
"""Largest number of floats in an intermediate result."""
_NEGLIGIBLE = 1e-4
"""A step is not worth taking if its square, in standard deviations of an unknown, is below this."""
_SHIFTS = (0.0, 1e-14, 1e-12)
"""Relative values added to the diagonal of W^T W until it has a Cholesky factor."""
_SINGULAR = 1e-13
"""Reciprocal condition number below which a matrix counts as singular."""
_POOR = 1e-8
"""Reciprocal condition number below which constraints of a batch determine too little."""


@dataclass(frozen=True)
class Counts:
    """Numbers of constraints and unknowns of a convolution [2, Eq. 26 to 28].

    Attributes:
        unknowns: |X|, entries of the input.
        weight: |W|, entries of the output. 0 if the activation behind is not invertible.
        gradient: Entries of dL/dW.
        gradient_rank: Largest number of independent gradient constraints. It is limited because
            all channels have the same matrix.
        covered: Entries of the input that any output depends on.
    """

    unknowns: int
    weight: int
    gradient: int
    gradient_rank: int
    covered: int

    @property
    def rank(self) -> int:
        """Return the largest possible rank of both kinds together."""
        return min(self.covered, self.weight + self.gradient_rank)

    @property
    def by_gradient(self) -> bool:
        """Return whether gradient constraints alone can suffice."""
        return self.gradient_rank >= self.unknowns

    @property
    def by_weight(self) -> bool:
        """Return whether weight constraints alone can suffice."""
        return min(self.covered, self.weight) >= self.unknowns

    @property
    def enough(self) -> bool:
        """Return whether both kinds together can suffice."""
        return self.rank >= self.unknowns


def count(layer: Layer) -> Counts:
    """Return the counts of a convolution. With a ReLU, no output is certain to be known."""
    channels, height, width = layer.input_shape
    filters, _, rows, columns = layer.weight.shape
    taps, places = rows * columns, math.prod(layer.output_shape[1:])
    activation = layer.activation
    known = 0 if activation is not None and activation.partial else filters * places
    covered = _covered(layer)
    independent = min(taps * min(filters // layer.groups, places), covered)
    return Counts(
        channels * height * width,
        known,
        layer.weight.numel(),
        channels * independent,
        channels * covered,
    )


def _covered(layer: Layer) -> int:
    """Return how many pixels of a channel affect any output."""
    covered = 1
    for axis in range(2):
        size, made = layer.input_shape[axis + 1], layer.output_shape[axis + 1]
        starts = np.arange(made) * layer.stride[axis] - layer.padding[axis]
        taps = np.arange(layer.weight.shape[axis + 2]) * layer.dilation[axis]
        places = np.unique(starts[:, None] + taps)
        covered *= int(((places >= 0) & (places < size)).sum())
    return covered


@dataclass(frozen=True)
class Convolution:
    """A convolution without its bias, and its adjoints, for stacks of examples."""

    layer: Layer

    @cached_property
    def weight(self) -> Tensor:
        """Return W in double precision."""
        return self.layer.weight.detach().double()

    @property
    def _options(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]:
        layer = self.layer
        return layer.stride, layer.padding, layer.dilation, layer.groups

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return W * x."""
        return conv2d(inputs, self.weight, None, *self._options)

    def back(self, slopes: Tensor) -> Tensor:
        """Return the adjoint of `outputs`: dL/dx for dL/dz."""
        size = (len(slopes), *self.layer.input_shape)
        return conv2d_input(size, self.weight, slopes, *self._options)  # type: ignore[no-any-return]

    def weight_gradient(self, inputs: Tensor, slopes: Tensor) -> Tensor:
        """Return dL/dW = k * x, summed over examples."""
        size = self.weight.shape
        return conv2d_weight(inputs, size, slopes, *self._options)  # type: ignore[no-any-return]

    def weight_gradient_back(self, gradient: Tensor, slopes: Tensor) -> Tensor:
        """Return the adjoint of `weight_gradient` in x, for each example."""
        size = (len(slopes), *self.layer.input_shape)
        return conv2d_input(size, gradient, slopes, *self._options)  # type: ignore[no-any-return]


def gradient_matrix(layer: Layer, slopes: Tensor) -> Tensor:
    """Return K for one input channel: rows are filters and taps, columns are pixels.

    Args:
        layer: A convolution of one group.
        slopes: k of one example.
    """
    filters, _, rows, columns = layer.weight.shape
    _, height, width = layer.input_shape
    (down, right), (above, left), (tall, wide) = layer.stride, layer.padding, layer.dilation
    made, across = slopes.shape[-2:]
    canvas = (
        max(height + 2 * above, down * (made - 1) + tall * (rows - 1) + 1),
        max(width + 2 * left, right * (across - 1) + wide * (columns - 1) + 1),
    )
    matrix = slopes.new_zeros(filters, rows, columns, *canvas)
    for row, column in product(range(rows), range(columns)):
        y, x = row * tall, column * wide
        place = matrix[:, row, column, y : y + down * made : down, x : x + right * across : right]
        place[:, :made, :across] = slopes.view(filters, made, across)
    inner = matrix[..., above : above + height, left : left + width]
    return inner.reshape(filters * rows * columns, height * width)


def weight_matrix(layer: Layer) -> Tensor:
    """Return W as a dense matrix: rows are outputs, columns are inputs.

    Args:
        layer: A convolution of one group.
    """
    weight = layer.weight.detach().double()
    matrix = weight.new_zeros(*layer.output_shape, *layer.input_shape)
    places = torch.tensor(np.indices(layer.output_shape[1:]).reshape(2, -1))
    for row, column in product(range(weight.shape[2]), range(weight.shape[3])):
        tap = (row, column)
        sources = [
            places[axis] * layer.stride[axis]
            - layer.padding[axis]
            + tap[axis] * layer.dilation[axis]
            for axis in range(2)
        ]
        inside = torch.ones(places.shape[1], dtype=torch.bool)
        for source, size in zip(sources, layer.input_shape[1:], strict=True):
            inside &= (source >= 0) & (source < size)
        (i, j), (y, x) = (pair[:, inside] for pair in (places, torch.stack(sources)))
        matrix[:, i, j, :, y, x] = weight[:, :, row, column]
    return matrix.view(math.prod(layer.output_shape), -1)


@dataclass(frozen=True)
class GradientFactor:
    """QR factors of K for one channel, with rows divided by their deviations.

    Attributes:
        orthogonal: Q.
        triangle: R.
        condition: Reciprocal condition number of R; 0 if K has fewer rows than columns.
    """

    orthogonal: Tensor
    triangle: Tensor
    condition: float

    @classmethod
    def of(cls, matrix: Tensor) -> GradientFactor | None:
        """Return the factor of a matrix, or None if it is singular."""
        if matrix.shape[0] < matrix.shape[1]:
            return None
        orthogonal, triangle = torch.linalg.qr(matrix)
        reciprocal, _ = dtrcon(triangle.numpy(), norm="1", uplo="U", diag="N")
        if not reciprocal > _SINGULAR:
            return None
        return cls(orthogonal, triangle, float(reciprocal))

    def solve(self, values: Tensor) -> Tensor:
        """Return the least-squares solutions for columns of values, as (columns, pixels)."""
        projected = self.orthogonal.T @ values
        solved: Tensor = torch.linalg.solve_triangular(self.triangle, projected, upper=True)
        return solved.T

    def precondition(self, values: Tensor) -> Tensor:
        """Return (K^T K)^-1 applied to each channel of an example."""
        columns = values.flatten(2)[0].T
        half = torch.linalg.solve_triangular(self.triangle.T, columns, upper=False)
        full: Tensor = torch.linalg.solve_triangular(self.triangle, half, upper=True)
        return full.T.reshape(values.shape)

    @cached_property
    def deviations(self) -> Tensor:
        """Return each pixel's standard deviation, if that of all rows is 1."""
        unit = torch.eye(len(self.triangle), dtype=self.triangle.dtype)
        inverse: Tensor = torch.linalg.solve_triangular(self.triangle, unit, upper=True)
        deviations: Tensor = inverse.norm(dim=1)
        return deviations

    @property
    def deviation(self) -> float:
        """Return the root mean square of the deviations."""
        return float(self.deviations.square().mean().sqrt())


def exactly(matrix: Tensor, values: Tensor) -> Tensor:
    """Return least squares by column, or NaN if some unknown is poorly determined."""
    factor = GradientFactor.of(matrix)
    if factor is None or factor.condition < _POOR:
        return values.new_full((matrix.shape[1], values.shape[1]), math.nan)
    return factor.solve(values).T


def inputs_of_batch(
    layer: Layer,
    gradient: Tensor,
    slopes: Tensor,
    solve: Callable[[Tensor, Tensor], Tensor] = exactly,
) -> tuple[Tensor, float]:
    """Return the inputs of a batch by gradient constraints, and the unexplained part of dL/dW.

    Args:
        layer: A convolution of one group.
        gradient: dL/dW, summed over the examples.
        slopes: k of each example.
        solve: Maps a matrix and columns of right-hand sides to solutions.
    """
    matrix = torch.cat([gradient_matrix(layer, own) for own in slopes], 1)
    values = gradient.permute(0, 2, 3, 1).flatten(0, 2)
    solved = solve(matrix, values)
    left = float((matrix @ solved - values).norm() / values.norm().clamp(min=1e-300))
    channels, *size = layer.input_shape
    return solved.T.reshape(channels, len(slopes), *size).transpose(0, 1), left


@dataclass(frozen=True)
class WeightFactor:
    """Banded Cholesky factor of W^T D^2 W, where D are the weights of the outputs.

    Attributes:
        band: The factor in LAPACK's band format.
        shape: Shape of an example.
    """

    band: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, convolution: Convolution, weights: Tensor) -> WeightFactor | None:
        """Return the factor, or None if the matrix is singular.

        Args:
            convolution: A convolution of one group.
            weights: D, in the shape of an output.
        """
        for shift in _SHIFTS:
            band = _normal_band(convolution, weights.square())
            if not (band[0] > 0).all():
                return None
            band[0] *= 1 + shift
            try:
                factor = cholesky_banded(band, overwrite_ab=True, lower=True, check_finite=False)
            except LinAlgError:  # the band was overwritten, so the next try builds it again
                continue
            return cls(factor, convolution.layer.input_shape)  # type: ignore[arg-type]
        return None

    def precondition(self, values: Tensor) -> Tensor:
        """Return (W^T D^2 W)^-1 applied to each example."""
        columns = values.permute(2, 3, 1, 0).reshape(-1, len(values)).numpy()
        solved = cho_solve_banded((self.band, True), columns, check_finite=False)
        channels, height, width = self.shape
        rows = torch.from_numpy(solved).view(height, width, channels, len(values))
        return rows.permute(3, 2, 0, 1).contiguous()

    @cached_property
    def deviation(self) -> float:
        """Return the rms standard deviation of the unknowns, if that of all rows is 1."""
        rng = torch.Generator().manual_seed(0)
        probes = torch.randint(2, (4, *self.shape), generator=rng).double() * 2 - 1
        return float((probes * self.precondition(probes)).mean().clamp(min=0).sqrt())


def band_size(layer: Layer) -> tuple[int, int]:
    """Return the number of rows of W^T W and the width of its band."""
    channels, height, width = layer.input_shape
    tall, wide = (
        min(dilation * (taps - 1), size - 1)
        for dilation, taps, size in zip(
            layer.dilation, layer.weight.shape[2:], (height, width), strict=True
        )
    )
    return channels * height * width, (tall * width + wide) * channels + channels - 1


def _normal_band(
    convolution: Convolution, weights: Tensor
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the lower band of W^T D W, with unknowns ordered by row, column and channel."""
    layer, kernel = convolution.layer, convolution.weight.permute(0, 2, 3, 1)
    filters, rows, columns, channels = kernel.shape
    _, height, width = layer.input_shape
    size, reach = band_size(layer)
    band = np.zeros((reach + 1, size))
    flat = kernel.reshape(filters, -1)
    taps = [*product(range(rows), range(columns))]
    places = np.indices(layer.output_shape[1:]).reshape(2, -1)  # positions of outputs
    ys, xs = (
        places[axis] * layer.stride[axis] - layer.padding[axis] for axis in range(2)
    )  # positions of their first tap
    channel = np.arange(channels)
    for part in np.array_split(np.arange(len(ys)), -(-len(ys) * flat.shape[1] ** 2 // _AT_ONCE)):
        if (weights == weights.flatten()[0]).all():
            products = (weights.flatten()[0] * flat.T @ flat).expand(len(part), -1, -1)
        else:
            scaled = weights.flatten(1).T[part].unsqueeze(2) * flat
            products = torch.matmul(scaled.mT, flat)
        added = products.view(len(part), len(taps), channels, len(taps), channels).numpy()
        for (first, (u, v)), (second, (r, s)) in product(enumerate(taps), enumerate(taps)):
            down, right = (r - u) * layer.dilation[0], (s - v) * layer.dilation[1]
            offset = (down * width + right) * channels
            if offset < 0:
                continue
            y, x = ys[part] + u * layer.dilation[0], xs[part] + v * layer.dilation[1]
            inside = (y >= 0) & (y + down < height) & (x >= 0) & (x < width)
            inside &= (x + right >= 0) & (x + right < width) & (y + down >= 0) & (y < height)
            below = offset + channel - channel[:, None]  # by channels of the column and the row
            kept = below >= 0
            place = (y[inside] * width + x[inside])[:, None, None] * channels + channel[:, None]
            place = np.broadcast_to(place, (len(place), channels, channels))[:, kept]
            band[below[kept], place] += added[inside, first, :, second, :][:, kept]
    return band


def conjugate_gradients(
    apply: Map,
    adjoint: Map,
    values: Tensor,
    precondition: Map,
    start: Tensor,
    iterations: int,
    accuracy: float = 1e-14,
) -> Tensor:
    """Solve a stack of least-squares systems with one matrix, from a first guess.

    Args:
        apply: A. It maps a stack of unknowns to a stack of flat rows.
        adjoint: A^T.
        values: Right-hand sides, flat.
        precondition: Approximates (A^T A)^-1.
        start: First guess.
        iterations: Largest number of iterations. The solver stops earlier if a step is far below
            the standard deviations of the unknowns, given that those of all rows are 1.
        accuracy: The solver also stops if steps are below this size, relative to the guess.
    """

    def dot(left: Tensor, right: Tensor) -> Tensor:
        return (left.flatten(1) * right.flatten(1)).sum(1)

    def each(factors: Tensor) -> Tensor:
        return factors.view(-1, *[1] * (start.ndim - 1))

    guess, rest = start, values - apply(start)
    slope = adjoint(rest)
    direction = ahead = precondition(slope)
    size, enough = dot(slope, ahead), _NEGLIGIBLE * start[0].numel()
    small = 0
    for _ in range(iterations):
        if small > 2 or not (size > enough).any():
            break
        moved = apply(direction)
        step = size / dot(moved, moved).clamp(min=torch.finfo(size.dtype).tiny)
        guess = guess + each(step) * direction
        reached = step.abs() * direction.flatten(1).norm(dim=1) < accuracy * guess.flatten(1).norm(
            dim=1
        )
        small = small + 1 if reached.all() else 0
        rest = rest - step.unsqueeze(1) * moved
        slope = adjoint(rest)
        ahead = precondition(slope)
        new = dot(slope, ahead)
        direction = ahead + each(new / size.clamp(min=torch.finfo(size.dtype).tiny)) * direction
        size = new
    return guess
