"""The space that a linear layer's gradient spans, and how far vectors are from it.

A layer y = W x has dL/dW = sum_i (dL/dy_i) x_i^T. The rows of the gradient are combinations of the
inputs x_i. They span all inputs while there are fewer inputs than x has entries. Distances from the
space then tell which of many known vectors were among the inputs.

The singular values come from the Gram matrix in double precision, which is accurate to 1e-8 of the
largest. They are computed again after the large ones are removed. This is accurate to 1e-10, well
below the precision of gradients in single precision.

To separate the directions of inputs from those of rounding errors, the errors of all entries must
have about the same size. Rounding errors are proportional to entries, so rows and columns are first
divided by their sizes. This does not change the rank. It also prevents a few large rows or columns
from hiding weak inputs, as happens in trained models.

References:
    [1] Petrov, Dimitrov, Baader, Mueller, Vechev. "DAGER: Exact Gradient Inversion for Large
        Language Models." NeurIPS 2024. https://arxiv.org/abs/2405.15586
    [2] Gavish, Donoho. "The Optimal Hard Threshold for Singular Values is 4/sqrt(3)." IEEE
        Transactions on Information Theory 60, 2014. https://arxiv.org/abs/1305.5870
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

PRECISION = 1e-7
"""Singular values below this share of the largest may be rounding errors of single precision."""

_EXACT = 1e-10
"""Singular values below this share of the largest are rounding errors of this module."""

GAP = 4.0
"""Ratio of successive singular values that marks the end of the signal."""

NOISE_EDGE = 1.05
"""Singular values are signal if they exceed this multiple of the largest one of pure noise."""

_CANCELLED = 1e3
"""If the products in an entry cancel, its rounding errors are up to this many times larger."""

_CHUNK = 16_384
"""Number of vectors that are processed together."""


@dataclass(frozen=True)
class Subspace:
    """The space that the rows of a gradient span.

    Attributes:
        basis: Orthonormal rows, strongest direction first, (rank, width), in double precision.
        weights: Share of signal (as opposed to noise) in each direction, in (0, 1].
        values: All singular values, largest first.
        noise: Standard deviation of the noise of one entry. 0 if a gap shows the rank.
        scale: Divisors of the entries of vectors that make their noise equal. None means 1.
        noise_is_known: Whether the noise deviation of every entry was known.
    """

    basis: Tensor
    weights: Tensor
    values: Tensor
    noise: float
    scale: Tensor | None = None
    noise_is_known: bool = False

    @property
    def rank(self) -> int:
        """Return the dimension of the space."""
        return len(self.basis)

    @property
    def width(self) -> int:
        """Return the dimension of the vectors."""
        return self.basis.shape[1]

    @property
    def saturated(self) -> bool:
        """Return whether the space is (nearly) full, so it cannot tell vectors apart."""
        return _saturates(self.rank, self.width)

    def energy(self, vectors: Tensor, *, exact: bool = True) -> Tensor:
        """Return the share of each vector's squared norm that lies in the space, weighted.

        Args:
            vectors: Vectors of shape (..., width).
            exact: Whether to compute in double precision. Single precision is accurate to about
                1e-6, which is a distance of 1e-3.
        """
        dtype = torch.float64 if exact else torch.float32
        basis = (self.weights.sqrt()[:, None] * self.basis).to(dtype).T
        flat = vectors.reshape(-1, self.width)
        shares = [_share(self.scaled(part.to(dtype)), basis) for part in flat.split(_CHUNK)]
        return torch.cat(shares).view(vectors.shape[:-1])

    def scaled(self, vectors: Tensor) -> Tensor:
        """Return vectors in the units of the space."""
        return vectors if self.scale is None else vectors / self.scale.to(vectors.dtype)

    def distance(self, vectors: Tensor, *, exact: bool = True) -> Tensor:
        """Return the distance of vectors, scaled to length 1, from the space. See `energy`."""
        return (1 - self.energy(vectors, exact=exact)).clamp(min=0).sqrt()

    def without(self, directions: int) -> Subspace:
        """Return the space without its weakest directions; at least `directions` are left out."""
        keep = max(1, min(self.rank, self.width - directions))
        return replace(self, basis=self.basis[:keep], weights=self.weights[:keep])


def _saturates(rank: int, width: int) -> bool:
    return rank >= width - max(1, width // 64)  # norms remove some directions


def _share(vectors: Tensor, basis: Tensor) -> Tensor:
    size = vectors.square().sum(1).clamp(min=torch.finfo(vectors.dtype).tiny)
    return (vectors @ basis).square().sum(1) / size


def row_space(
    gradient: Tensor,
    *,
    tolerance: float = PRECISION,
    noise: Tensor | None = None,
    least: int = 0,
    most: int | None = None,
) -> Subspace:
    """Return the space that the rows of a gradient span.

    The rank is at the last gap of the singular values below which there are only rounding errors
    (`_above_rounding`). A larger gap before it is not the end, because one direction often
    dominates.

    If rounding errors do not show, the gradient is treated as signal plus noise that is equal in
    all entries. Directions count if they exceed what noise alone would reach [2]. Each is weighted
    by s^2 / (s^2 + m sigma^2), where m sigma^2 is the noise along it. If the smallest singular
    values do not look like noise either, the space is full.

    If the deviations of the noise are known, factors for rows and columns first make the noise as
    equal as possible in all entries. All directions above it are kept. If hardly any
    direction is then left out, there is more noise than the known noise, and it is ignored.

    Rows with entries that are not finite are left out: in half precision, large entries overflow.

    Args:
        gradient: Gradient of shape (rows, width), whose rows are combinations of inputs.
        tolerance: Singular values below this share of the largest may be zero.
        noise: Deviations of the entries' noise, if they are known and not 0.
        least: Smallest number of directions, if noise hides none.
        most: Largest number of inputs behind the gradient. None means any number. The rank exceeds
            it only if the space is full.
    """
    finite = gradient.isfinite().all(1)
    gradient, noise = gradient[finite], None if noise is None else noise[finite]
    if not bool(gradient.any()):
        nothing = gradient.new_zeros(gradient.shape[1], dtype=torch.float64)
        return Subspace(nothing.new_zeros(0, len(nothing)), nothing[:0], nothing, 0.0)
    if noise is not None and bool((noise > 0).any()):
        space = _above(gradient, noise, tolerance, most)
        if not space.saturated:
            return space
    exact = _above_rounding(gradient, tolerance, least, most)
    if exact is not None:
        return exact
    values, directions = _decompose(gradient)
    rows = len(gradient)
    level = noise_level(values, rows)
    if not _like_noise(values, rows, level):
        return Subspace(directions, torch.ones_like(values), values, 0.0)
    rank = int((values > _edge(rows, len(values), level)).sum())
    rank = rank if most is None else min(rank, most)
    if 0 < rank < len(values) and float(values[rank - 1]) >= GAP * float(values[rank]):
        return Subspace(directions[:rank], torch.ones_like(values[:rank]), values, 0.0)
    kept = values[:rank].square()
    return Subspace(directions[:rank], kept / (kept + rows * level**2), values, level)


def _above_rounding(
    gradient: Tensor, tolerance: float, least: int, most: int | None
) -> Subspace | None:
    """Return the space of the directions above rounding errors; None if no errors show.

    An entry is a sum of T products, where T is the number of inputs. Each addition rounds it by up
    to the precision u of its type: by u in total if errors cancel, by u sqrt(T) if they add up like
    a random walk. Errors alone then have singular values of at most u sqrt(T) (sqrt(m) + sqrt(d)).
    Entries below the normal numbers of the type have the errors of the smallest normal number.

    The rank is at the last gap below which all values are smaller than that. Values above the gap
    must exceed what the final rounding alone makes, because equal columns leave gaps among errors.
    If signal falls into the errors without a gap, it ends at one of two places: at the values that
    more inputs than possible would make, or at the geometric mean of both estimates of the errors.
    One direction too many costs little. One too few costs the inputs that it is part of.
    """
    rows, width = gradient.shape
    kind = torch.finfo(gradient.dtype)
    size = _sizes(gradient.double().square() + kind.tiny**2)
    values, directions = _decompose(gradient.double() / (size.across * size.along).sqrt())
    inputs = width if most is None else most
    stored = kind.eps / 2 / math.sqrt(3) * (math.sqrt(rows) + math.sqrt(width))
    errors = stored * max(1.0, torch.finfo(torch.float32).eps / kind.eps)
    floor = max(errors * math.sqrt(inputs), tolerance * float(values[0]))
    floored = values.clamp(min=_EXACT * float(values[0]))
    wide = GAP * (floored[1:] / floor).clamp(min=1)
    gaps = (floored[:-1] >= wide * floored[1:]) & (values[1:] <= _CANCELLED * floor)
    gaps[inputs:] = False
    shown = gaps & (values[:-1] > stored)
    ends = (shown if bool(shown.any()) else gaps).nonzero().flatten() + 1
    if len(ends):
        rank = int(ends[-1])
    elif inputs < width and float(values[inputs]) <= GAP * floor:
        rank = int((values > NOISE_EDGE * values[inputs]).sum())
    elif inputs >= width and float(values[-1]) <= errors * inputs**0.25:
        rank = int((values > errors * inputs**0.25).sum())
    else:
        return None
    rank = min(max(rank, least), inputs, width)
    return Subspace(
        directions[:rank],
        torch.ones_like(values[:rank]),
        values,
        0.0,
        size.along.sqrt().flatten(),
    )


class _Sizes(NamedTuple):
    """Factors for rows (m, 1) and columns (1, d) whose products approximate a matrix of squares."""

    across: Tensor
    along: Tensor


def _sizes(square: Tensor) -> _Sizes:
    square = square + 1e-12 * square.mean()  # avoids sizes of 0
    along = torch.ones_like(square[:1])
    for _ in range(2):
        across = (square / along).mean(1, keepdim=True)
        along = (square / across).mean(0, keepdim=True)
    return _Sizes(across, along)


def _above(gradient: Tensor, noise: Tensor, tolerance: float, most: int | None) -> Subspace:
    """Return the space of the directions above noise of known deviations."""
    square = noise.double().square()
    square = square + 1e-6 * square.mean()  # weights that are 0 change, too
    across = square.mean(1, keepdim=True)
    along = (square / across).mean(0)
    values, directions = _decompose(gradient.double() / (across * along).sqrt())
    rows, width = gradient.shape
    rank = int((values > max(_edge(rows, width, 1.0), tolerance * float(values[0]))).sum())
    if not _saturates(rank, width):  # otherwise there is more noise than the known noise
        rank = min(rank, most or rank)
    weights = torch.ones_like(values[:rank])
    return Subspace(directions[:rank], weights, values, 1.0, along.sqrt(), noise_is_known=True)


def _edge(rows: int, width: int, noise: float) -> float:
    """Return a bound on the singular values of pure noise."""
    return NOISE_EDGE * noise * (math.sqrt(rows) + math.sqrt(width))


def _decompose(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return singular values, largest first, and the right singular vectors, as rows."""
    wide = gradient.detach().double()
    size = wide.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
    wide = wide / size
    values, vectors = _gram(wide)
    large = int((values > 1e-5 * values[0]).sum())
    if large < len(values):
        values[large:], turns = _gram(wide @ vectors[:, large:])
        vectors[:, large:] = vectors[:, large:] @ turns
    return values * size, vectors.T


def _gram(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return singular values, largest first, and right singular vectors, as columns."""
    squares, vectors = torch.linalg.eigh(matrix.T @ matrix)
    return squares.flip(0).clamp(min=0).sqrt(), vectors.flip(1)


def noise_level(values: Tensor, rows: int) -> float:
    """Return the standard deviation of noise, from singular values that are mostly noise.

    This compares the lower half of them with that of a noise matrix of the same shape, whose
    squared singular values follow the Marchenko-Pastur law.

    Args:
        values: Singular values, largest first.
        rows: Number of rows of the matrix. It has as many columns as there are values.
    """
    quarter = float(values[(3 * len(values)) // 4])
    return quarter / math.sqrt(rows * _marchenko_pastur_quantile(len(values) / rows, 0.25))


def _like_noise(values: Tensor, rows: int, noise: float) -> bool:
    """Return whether the smallest singular values are as even as those of noise.

    If a gradient has more inputs than columns, its smallest singular values keep falling.
    """
    expected = noise * math.sqrt(rows * _marchenko_pastur_quantile(len(values) / rows, 0.05))
    return float(values[(19 * len(values)) // 20]) > 0.7 * expected


@lru_cache(maxsize=32)
def _marchenko_pastur_quantile(ratio: float, share: float) -> float:
    """Return a quantile of the eigenvalues of N^T N / rows for standard normal N."""
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    grid = torch.linspace(low, high, 20_001, dtype=torch.float64)
    density = ((high - grid) * (grid - low)).clamp(min=0).sqrt() / grid.clamp(min=1e-12)
    mass = torch.cumulative_trapezoid(density, grid)
    return float(grid[1:][int((mass >= share * mass[-1]).nonzero()[0])])


def threshold(distances: Tensor, *, most: int, floor: float = 1e-4) -> float:
    """Return a threshold that separates the distances of true vectors from all others.

    True vectors are few and near; the others are many and far. The threshold is in the middle of
    the widest gap, as a ratio, among the smallest distances. If every vector is near, as with a
    vocabulary of a dozen words, there is no gap, and all vectors are true.

    Args:
        distances: Distances of true and other vectors together.
        most: Largest number of true vectors.
        floor: Distances below this are equal, because rounding turns 0 into such values.

    Returns:
        The geometric mean of both sides of the gap, or 0 if no vector is near.
    """
    near = distances.flatten().sort().values[: most + 1].double().clamp(min=floor)
    if 0 < len(near) == distances.numel() and float(near[-1]) < math.sqrt(floor):
        return math.sqrt(floor)
    near = torch.cat([near.new_full((1,), floor), near])
    if len(near) < 2:
        return 0.0
    ratios = near[1:] / near[:-1]
    place = int(ratios.argmax())
    return 0.0 if place == 0 else float((near[place] * near[place + 1]).sqrt())
