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
"""phi'(y) of a surrogate, if a typical entry of y is 1. The float is the share of steps done."""
Schedule = Callable[[float], float]
"""Maps the share of steps done to the learning rate."""
Optimizer = Callable[[Tensor, Tensor, Slope, Schedule, int], Tensor]
"""Maps L, starts, surrogate, learning rate and number of steps to directions."""

CHUNK = 256
"""Number of starts that move together. Their products with L stay in the cache."""


def l1(y: Tensor, progress: float) -> Tensor:
    """Return the slope of |y|, whose local minima are those of the l0 norm [1, Table II]."""
    return y.sign()


def log_cosh(mu: float) -> Slope:
    """Return the slope of log cosh(mu y) / mu, the smooth surrogate h of [3].

    The paper prints mu log cosh(y / mu) with mu = 300 or 500. Up to rounding, that is constant on
    the sphere: its slope is y / mu, and ||Lq|| = 1. Here mu is on the scale of the entries of an
    orthonormal L, like the paper's values.
    """

    def slope(y: Tensor, progress: float) -> Tensor:
        return torch.tanh(mu / y.shape[-1] ** 0.5 * y)

    return slope


def negative_l4(y: Tensor, progress: float) -> Tensor:
    """Return the slope of -y^4 / 4."""
    return -y.pow(3)


def log_sum(widths: Tensor, final: float = 0.03) -> Slope:
    """Return the slope of log(y^2 + w^2) / 2, with widths w that shrink to `final` [4].

    There is one width per start. While w is wide, the surrogate is smooth and has few minima. When
    w is narrow, it is closer to the l0 norm than l1 is. Some columns are minima of it but not of
    l1.
    """

    def slope(y: Tensor, progress: float) -> Tensor:
        width = widths * (final / widths) ** progress
        return y / (y.square() + width.square())

    return slope


def stepwise(lr: float) -> Schedule:
    """Return the schedule of [3]: divide by 100 after 40 % of the steps, and again after 80 %."""
    return lambda progress: lr * (1.0 if progress < 0.4 else 1e-2 if progress < 0.8 else 1e-4)


def geometric(lr: float, final: float) -> Schedule:
    """Return a learning rate that falls from `lr` to `final` by the same factor at each step."""
    return lambda progress: float(lr * (final / lr) ** progress)


def uniform(count: int, like: Tensor, rng: Generator) -> Tensor:
    """Return uniformly random unit vectors with one coordinate per column of `like`."""
    drawn = torch.randn(count, like.shape[1], generator=rng, device=rng.device)
    return normalize(drawn.to(like), dim=1)


def adam(L: Tensor, starts: Tensor, slope: Slope, lr: Schedule, steps: int) -> Tensor:
    """Run Riemannian Adam [2] with one second moment per coordinate.

    Geoopt's sphere has a single second moment for a whole vector. The longest coordinates of the
    gradient then set the pace of all coordinates. With one moment per coordinate, as in plain
    Adam, several times as many starts reach a true column.
    """
    return _adam(L, starts, slope, lr, steps, elementwise=True)


def scalar_adam(L: Tensor, starts: Tensor, slope: Slope, lr: Schedule, steps: int) -> Tensor:
    """Run Riemannian Adam [2] as in [3]. It gives the iterates of `geoopt_adam`, but faster."""
    return _adam(L, starts, slope, lr, steps, elementwise=False)


def geoopt_adam(L: Tensor, starts: Tensor, slope: Slope, lr: Schedule, steps: int) -> Tensor:
    """Run Riemannian Adam of the geoopt package, the reference for `scalar_adam`."""
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
    """Run projected gradient descent [3]: a step on phi(Lq), then back to the sphere."""
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
    """Return L scaled so that typical entries of Lq are 1, and its transpose, both contiguous."""
    scaled = L * L.shape[0] ** 0.5
    return scaled.contiguous(), scaled.T.contiguous()


def _tangent(directions: Tensor, vectors: Tensor) -> Tensor:
    return vectors - directions * (directions * vectors).sum(1, keepdim=True)


def round_by_sampling(L: Tensor, directions: Tensor, smallest: int, rng: Generator) -> Tensor:
    """Round minima of a smooth surrogate to exact sparse directions [3, Algorithm 1].

    Take the `smallest` entries of |Lq|, and draw as many of their rows as L has columns. If the
    common kernel of these rows has dimension one, it is the rounded direction. Otherwise the
    direction is returned unchanged.
    """
    size = L.shape[1]
    L = L[L.abs().amax(1) > 1e-9]  # a neuron that is off for all examples carries no information
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
    """Polish nearly sparse directions by reweighted least squares in double precision.

    Each iteration takes the smallest singular vector of the rows of L, weighted by
    1 / (y^2 + w^2). The width w is the largest of the smallest `zeros` entries of |y|. All these
    entries thus count alike, and w shrinks with them, down to the noise of y.

    Args:
        L: Orthonormal columns.
        directions: Nearly sparse directions, as rows.
        zeros: Smallest number of zeros of a true column.
        noise: Standard deviation of an entry of Lq, per coordinate of q (for y: ||noise * q||).
        iterations: Largest number of reweightings.
    """
    parts = [
        _reweighted(L, part, zeros, noise, iterations) for part in directions.split(in_cache(L))
    ]
    return torch.cat(parts) if parts else directions


def in_cache(L: Tensor) -> int:
    """Return how many weighted copies of L fit into the cache."""
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
        diagonal.add_(1e-15 * diagonal.sum(1, keepdim=True))  # exact zeros would make it singular
        refined = normalize(torch.linalg.solve(gram, directions.unsqueeze(2)).squeeze(2), dim=1)
        moved = 1 - (refined * directions).sum(1).abs()
        directions = refined
        if not (moved > 1e-12).any():
            break
    return directions
