"""Sparse directions on the sphere: minimise phi(Lq) over unit vectors q, from many starts at once.

Complete dictionary learning finds a sparse column of G = LQ as a local minimum of a surrogate of
||Lq||_0 on the sphere [1]. All functions take starts as the rows of a matrix and move them by
batched matrix products.

References:
    [1] Qu, Zhu, Li, Tsakiris, Wright, Vidal. "Finding the Sparsest Vectors in a Subspace: Theory,
        Algorithms, and Applications." 2020. https://arxiv.org/abs/2001.06970
    [2] Becigneul, Ganea. "Riemannian Adaptive Optimization Methods." ICLR 2019.
        https://arxiv.org/abs/1810.00760
    [3] Bakarsky, Dimitrov, Baader, Vechev. "SPEAR++: Scaling Gradient Inversion via
        Sparsely-Used Dictionary Learning." 2025. https://arxiv.org/abs/2510.24200
    [4] Candes, Wakin, Boyd. "Enhancing Sparsity by Reweighted l1 Minimization." 2008.
"""

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize

Slope = Callable[[Tensor, float], Tensor]
"""phi'(y) of a surrogate, where a typical entry of y is 1; the float is the share of steps done."""
Schedule = Callable[[float], float]
"""Learning rate, by the share of steps done."""
Optimizer = Callable[[Tensor, Tensor, Slope, Schedule, int], Tensor]
"""From L, starts, surrogate, learning rate and number of steps to directions."""

CHUNK = 256
"""Starts that move together: their products with L stay in the cache."""


def l1(y: Tensor, progress: float) -> Tensor:
    """Slope of |y|, whose local minima are those of the l0 norm [1, Table II]."""
    return y.sign()


def log_cosh(mu: float) -> Slope:
    """Slope of log cosh(mu y) / mu, the smooth surrogate h of [3].

    The paper prints mu log cosh(y / mu) with mu = 300 or 500, which is a constant on the sphere
    up to rounding: its slope is y / mu, and ||Lq|| = 1. mu is here on the scale of the entries
    of an orthonormal L, as the paper's values are.
    """

    def slope(y: Tensor, progress: float) -> Tensor:
        return torch.tanh(mu / y.shape[-1] ** 0.5 * y)

    return slope


def negative_l4(y: Tensor, progress: float) -> Tensor:
    """Slope of -y^4 / 4."""
    return -y.pow(3)


def log_sum(widths: Tensor, final: float = 0.03) -> Slope:
    """Slope of log(y^2 + w^2) / 2, with widths w (one per start) that shrink to `final` [4].

    While w is wide the surrogate is smooth and has few minima. Narrow, it is closer to the
    l0 norm than l1 is, and some columns are minima of it that are none of l1.
    """

    def slope(y: Tensor, progress: float) -> Tensor:
        width = widths * (final / widths) ** progress
        return y / (y.square() + width.square())

    return slope


def stepwise(lr: float) -> Schedule:
    """The schedule of [3]: divided by 100 after 40 % of the steps, and again after 80 %."""
    return lambda progress: lr * (1.0 if progress < 0.4 else 1e-2 if progress < 0.8 else 1e-4)


def geometric(lr: float, final: float) -> Schedule:
    """A learning rate that falls from `lr` to `final` by the same factor at each step."""
    return lambda progress: float(lr * (final / lr) ** progress)


def uniform(count: int, like: Tensor, rng: Generator) -> Tensor:
    """Return uniformly random unit vectors of as many coordinates as `like` has columns."""
    drawn = torch.randn(count, like.shape[1], generator=rng, device=rng.device)
    return normalize(drawn.to(like), dim=1)


def adam(L: Tensor, starts: Tensor, slope: Slope, lr: Schedule, steps: int) -> Tensor:
    """Riemannian Adam [2] with one second moment per coordinate.

    Geoopt's sphere has a single second moment for a whole vector, so the longest coordinates of
    the gradient set the pace of all. One moment per coordinate, as in plain Adam, reaches a true
    column from several times as many starts.
    """
    return _adam(L, starts, slope, lr, steps, elementwise=True)


def scalar_adam(L: Tensor, starts: Tensor, slope: Slope, lr: Schedule, steps: int) -> Tensor:
    """Riemannian Adam [2] as in [3]: the same iterates as `geoopt_adam`, computed faster."""
    return _adam(L, starts, slope, lr, steps, elementwise=False)


def geoopt_adam(L: Tensor, starts: Tensor, slope: Slope, lr: Schedule, steps: int) -> Tensor:
    """Riemannian Adam of the geoopt package, the reference for `scalar_adam`."""
    import geoopt  # slow to import

    scaled, back = _scaled(L)
    directions = geoopt.ManifoldParameter(starts.clone(), manifold=geoopt.Sphere())
    optimizer = geoopt.optim.RiemannianAdam([directions], lr=lr(0.0))
    for step in range(steps):
        progress = step / steps
        optimizer.param_groups[0]["lr"] = lr(progress)
        directions.grad = slope(directions.detach() @ back, progress) @ scaled
        optimizer.step()
    ends: Tensor = directions.detach()
    return ends


def gradient_descent(L: Tensor, starts: Tensor, slope: Slope, lr: Schedule, steps: int) -> Tensor:
    """Projected gradient descent [3]: a step on phi(Lq), then back to the sphere."""
    unit = L.shape[0] ** -0.5  # the learning rates of [3] are for an orthonormal L
    scaled, back = _scaled(L)
    directions = starts
    for step in range(steps):
        progress = step / steps
        gradient = slope(directions @ back, progress) @ scaled
        directions = normalize(directions - lr(progress) * unit * gradient, dim=1)
    return directions


def _adam(
    L: Tensor, starts: Tensor, slope: Slope, lr: Schedule, steps: int, *, elementwise: bool
) -> Tensor:
    scaled, back = _scaled(L)
    directions = starts
    mean = torch.zeros_like(starts)
    square = torch.zeros_like(starts if elementwise else starts[:, :1])
    for step in range(steps):
        progress = step / steps
        gradient = _tangent(directions, slope(directions @ back, progress) @ scaled)
        squared = gradient.square() if elementwise else gradient.square().sum(1, keepdim=True)
        mean.lerp_(gradient, 0.1)
        square.lerp_(squared, 0.001)
        scale = (square / (1 - 0.999 ** (step + 1))).sqrt_().add_(1e-8)
        move = mean / (1 - 0.9 ** (step + 1)) / scale
        directions = normalize(directions - lr(progress) * move, dim=1)
        mean = _tangent(directions, mean)
    return directions


def _scaled(L: Tensor) -> tuple[Tensor, Tensor]:
    """Return L with typical entries of Lq of size 1, and its transpose, both contiguous."""
    scaled = L * L.shape[0] ** 0.5
    return scaled.contiguous(), scaled.T.contiguous()


def _tangent(directions: Tensor, vectors: Tensor) -> Tensor:
    return vectors - directions * (directions * vectors).sum(1, keepdim=True)


def round_by_sampling(L: Tensor, directions: Tensor, smallest: int, rng: Generator) -> Tensor:
    """Round minima of a smooth surrogate to exact sparse directions [3, Algorithm 1].

    Of the `smallest` entries of |Lq|, as many rows as L has columns are drawn; if their common
    kernel has dimension one, it is the rounded direction. Others are returned as they are.
    """
    size = L.shape[1]
    L = L[L.abs().amax(1) > 1e-9]  # a neuron that is off for all says nothing
    nearest = (directions @ L.T).abs().topk(min(smallest, len(L)), largest=False).indices
    keys = torch.rand(nearest.shape, generator=rng, device=rng.device)
    rows = nearest.gather(1, keys.to(L.device).argsort(1)[:, :size])
    _, values, right = torch.linalg.svd(L[rows].double())
    exact = values[:, -1] < 1e-6 * values[:, 0]
    if size > 1:
        exact &= values[:, -2] > 1e-4 * values[:, 0]
    return torch.where(exact.unsqueeze(1), right[:, -1].to(directions), directions)


def refine(
    L: Tensor, directions: Tensor, zeros: int, noise: Tensor, iterations: int = 12
) -> Tensor:
    """Polish directions that are nearly sparse, by reweighted least squares in double precision.

    Each iteration takes the smallest singular vector of the rows of L, weighted by
    1 / (y^2 + w^2). The width w is the size that the smallest `zeros` entries of |y| still have:
    all of them decide together, and it shrinks as they do, down to the noise of y.

    Args:
        L: Orthonormal columns.
        directions: Nearly sparse directions, as rows.
        zeros: Number of zeros that a true column has at least.
        noise: Standard deviation of an entry of Lq by coordinate of q (that of y is ||noise * q||).
        iterations: Most reweightings.
    """
    parts = [
        _reweighted(L, part, zeros, noise, iterations) for part in directions.split(in_cache(L))
    ]
    return torch.cat(parts) if parts else directions


def in_cache(L: Tensor) -> int:
    """Return how many copies of L may be weighted at once, so that they stay in the cache."""
    return max(1, 2**20 // L.numel())


def _reweighted(
    L: Tensor, directions: Tensor, zeros: int, noise: Tensor, iterations: int
) -> Tensor:
    for _ in range(iterations):
        y = directions @ L.T
        size = y.abs().kthvalue(min(zeros, len(L)), dim=1, keepdim=True).values
        floor = torch.linalg.vector_norm(directions * noise, dim=1, keepdim=True)
        width = torch.maximum(size, floor)
        weights = width.square() / (y.square() + width.square())
        gram = (L.T * weights.unsqueeze(1)) @ L
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal.add_(1e-15 * diagonal.sum(1, keepdim=True))  # exact zeros leave it singular
        refined = normalize(torch.linalg.solve(gram, directions.unsqueeze(2)).squeeze(2), dim=1)
        moved = 1 - (refined * directions).sum(1).abs()
        directions = refined
        if not (moved > 1e-12).any():
            break
    return directions
