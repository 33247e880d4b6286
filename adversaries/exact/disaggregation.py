"""The disaggregation matrix of SPEAR: from sparse directions to a batch.

Let dL/dW = LR (`relu_layer.Factors`). The columns of the disaggregation matrix Q are the
directions q that make Lq sparse, and X^T = Q^-1 R [1]. A pool collects such directions and chooses
a basis of them. It scores the basis by the ReLU pattern of the batch that follows from it.

References:
    [1] Dimitrov, Baader, Mueller, Vechev. "SPEAR: Exact Gradient Inversion of Batches in
        Federated Learning." NeurIPS 2024. https://arxiv.org/abs/2403.03945
    [2] Bakarsky, Dimitrov, Baader, Vechev. "SPEAR++: Scaling Gradient Inversion via
        Sparsely-Used Dictionary Learning." 2025. https://arxiv.org/abs/2510.24200
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..base import Observation, Reconstruction
from .relu_layer import Factors, ReLULayer
from .sphere import in_cache, refine

SAME = 0.95
"""Two directions are the same if their cosine is above this; those of two examples are below 0.6.
"""
_AT_ONCE = 16
"""Number of directions that are tried in a basis at once."""


@dataclass(frozen=True)
class Solution:
    """A batch that follows from a basis of directions.

    Attributes:
        inverse: Q^-1. The batch is X^T = Q^-1 R.
        agreement: For each example, the share of neurons at which its gradient is zero if and
            only if its output is not positive. The mean is the sparsity matching coefficient.
    """

    inverse: Tensor
    agreement: Tensor

    @property
    def coefficient(self) -> float:
        """The sparsity matching coefficient lambda [1, Definition 3.4]. It is 1 if exact."""
        return float(self.agreement.mean())


def solve(factors: Factors, directions: Tensor) -> Solution:
    """Scale one or more bases by the bias gradient and score them [1, Theorem 4.1]."""
    inverse = torch.linalg.inv(directions.mT)
    inverse = inverse / _nonzero(inverse @ factors.bias_gradient).unsqueeze(-1)
    outputs = inverse @ factors.hidden.T + factors.bias
    active = ~factors.zeros(directions)
    return Solution(inverse, ((outputs > 0) == active).double().mean(-1))


def _nonzero(scales: Tensor) -> Tensor:
    tiny = torch.finfo(scales.dtype).tiny
    return torch.where(scales.abs() > tiny, scales, tiny)


def initial_filter(directions: Tensor) -> Tensor:
    """Return the indices of the first linearly independent directions (sparsest first)."""
    chosen: list[int] = []
    basis = directions.new_zeros(0, directions.shape[1])
    for index, direction in enumerate(directions):
        rest = direction - (direction @ basis.T) @ basis
        rest = rest - (rest @ basis.T) @ basis
        norm = torch.linalg.vector_norm(rest)
        if norm > 1e-3:
            chosen.append(index)
            basis = torch.cat([basis, (rest / norm).unsqueeze(0)])
        if len(chosen) == directions.shape[1]:
            break
    return torch.tensor(chosen, dtype=torch.long, device=directions.device)


def greedy_filter(
    factors: Factors, directions: Tensor, others: Tensor, enough: float
) -> tuple[Tensor, Solution]:
    """Swap directions of a basis for others if that raises the sparsity matching coefficient.

    Only directions that disagree with their outputs are swapped. A swapped direction must also
    have one of the largest coefficients in the expansion of the new one. Otherwise the new basis
    would be nearly singular.
    """
    best = solve(factors, directions)
    while len(others):
        swapped, taken = _swaps(directions, others[:_AT_ONCE], best.agreement < enough)
        trials = solve(factors, swapped)
        better = (trials.agreement.mean(1) > best.coefficient).nonzero().flatten()
        if not len(better):
            others = others[_AT_ONCE:]
            continue
        first = int(better[0])
        directions = swapped[first]
        best = Solution(trials.inverse[first], trials.agreement[first])
        others = others[int(taken[first]) + 1 :]
    return directions, best


def _swaps(directions: Tensor, others: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return bases with one direction swapped, and the index of the new direction in each."""
    parts = torch.linalg.solve(directions.T, others.T).T.abs() * allowed
    parts, columns = parts.topk(min(3, len(directions)), dim=1)
    taken, rank = (parts >= 1e-3).nonzero(as_tuple=True)
    swapped = directions.repeat(len(taken), 1, 1)
    swapped[torch.arange(len(taken)), columns[taken, rank]] = others[taken]
    return swapped, taken


@dataclass(frozen=True)
class Remainder:
    """The space that known directions leave for the missing ones.

    Attributes:
        rows: Estimated rows of Q^-1 for the known examples.
        basis: An orthonormal basis of the space of the missing directions, as rows.
    """

    rows: Tensor
    basis: Tensor


def deflate(factors: Factors, directions: Tensor) -> Remainder:
    """Return the space in which the missing directions must lie.

    Each row a_i of Q^-1 is orthogonal to all directions except its own. The missing directions
    therefore lie in the complement of the known rows a_i. The known directions determine a_i up to
    a part in their own complement N. The ReLU gives an estimate of that part: the outputs
    W R^T a_i + b are positive exactly where the gradient of the example is not zero. The estimate
    is a linear regression of that pattern on W R^T N. Without it, a_i would be the rows of the
    pseudo-inverse, and the result the orthogonal complement of the directions, as in SPEAR++.
    """
    count = len(directions)
    orthogonal = torch.linalg.svd(directions, full_matrices=True).Vh[count:]
    rows = torch.linalg.pinv(directions).T
    if count in (0, factors.rank):
        return Remainder(rows, orthogonal)
    active = ~factors.zeros(directions).T
    known: Tensor = factors.hidden @ rows.T
    basis, triangle = torch.linalg.qr(factors.hidden @ orthogonal.T)
    free: Tensor = known - basis @ (basis.T @ known)

    def fit(values: Tensor) -> Tensor:
        """Regress values over the neurons on each example's own row and the unknown part."""
        scale: Tensor = (free * values).sum(0) / _nonzero(free.square().sum(0))
        rest = basis.T @ (values - scale * known)
        open_part = torch.linalg.solve_triangular(triangle, rest, upper=True)
        fitted: Tensor = scale.unsqueeze(1) * rows + open_part.T @ orthogonal
        return fitted

    estimate = fit(active.to(rows) - 0.5)
    estimate = estimate / _nonzero(estimate @ factors.bias_gradient).unsqueeze(1)
    for _ in range(50):  # alternating projections: onto the orthant of the pattern, and back
        outputs = factors.hidden @ estimate.T + factors.bias.unsqueeze(1)
        estimate = estimate - 1.5 * fit(torch.where((outputs > 0) == active, 0.0, outputs))
    rows = estimate / _nonzero((estimate * directions).sum(1, keepdim=True))
    return Remainder(rows, torch.linalg.svd(normalize(rows, dim=1), full_matrices=True).Vh[count:])


def pattern_starts(factors: Factors, rows: Tensor, basis: Tensor) -> Tensor:
    """Return directions that vanish at the neurons where mixtures of examples are off.

    A row of L is a mixture of rows of Q^-1. Divided by its bias gradient, it is a weighted mean of
    examples. If one example dominates, the mean is off at nearly the same neurons as that example.
    The direction in the span of `basis` that is smallest at these neurons is then close to the
    example's own. It is exact for a neuron that only one example activates.
    """
    left = factors.left @ basis.T
    starts = []
    for part in rows.split(in_cache(left)):
        mean = part / _nonzero(part @ factors.bias_gradient).unsqueeze(1)
        off = (mean @ factors.hidden.T + factors.bias <= 0).to(left)
        gram = (left.T * off.unsqueeze(1)) @ left
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal.add_(1e-12 * (1 + diagonal.sum(1, keepdim=True)))
        factor = torch.linalg.cholesky(gram)
        smallest = normalize(part @ basis.T, dim=1).unsqueeze(2)
        for _ in range(3):  # inverse iteration
            smallest = normalize(torch.cholesky_solve(smallest, factor), dim=1)
        starts.append(smallest.squeeze(2) @ basis)
    return torch.cat(starts)


class Pool:
    """Candidate directions without repeats up to sign, sparsest first, and their best basis.

    Attributes:
        factors: The factorisation that the directions belong to.
        enough: An example is confirmed if its agreement reaches this share of the neurons.
        directions: Candidates, as rows.
        basis: The largest independent subset that was found.
        solution: The batch that follows from the basis. None if the basis is incomplete.
    """

    def __init__(self, factors: Factors, *, exact: bool) -> None:
        self.factors, self.enough = factors, 0.99 if exact else 0.9
        self.directions = factors.left.new_zeros(0, factors.rank)
        self.basis = self.directions
        self.solution: Solution | None = None
        lenience = 1.0 if exact else 0.9
        self._sparse = max(1, int(lenience * factors.fewest_zeros(1e-5)))
        self._typical = max(1, int(lenience * factors.fewest_zeros(1e-2)))

    @property
    def confirmed(self) -> bool:
        """Whether the basis explains the zero pattern of every example."""
        return self.solution is not None and bool((self.solution.agreement >= self.enough).all())

    @property
    def trusted(self) -> Tensor:
        """Directions of the basis that are treated as true while the search goes on.

        If all of them are confirmed, the weakest tenth is searched for again.
        """
        if self.solution is None:
            return self.basis[self.factors.zeros(self.basis).sum(1) >= self._typical]
        agreement = self.solution.agreement
        weakest = agreement.argsort()[: -(-len(agreement) // 10)]
        chosen = agreement >= self.enough
        if chosen.all():
            chosen[weakest] = False
        return self.basis[chosen]

    @property
    def progress(self) -> float:
        """The value that the search increases: the size of the basis, then its coefficient."""
        return len(self.basis) + (self.solution.coefficient if self.solution else 0.0)

    def add(self, candidates: Tensor) -> bool:
        """Polish candidates and add the new sparse ones. Return whether there was progress."""
        before = self.progress
        fresh = self.polish(self._nearly_sparse(candidates))
        fresh = fresh[self.factors.zeros(fresh).sum(1) >= self._sparse]
        if len(fresh):
            pool = torch.cat([self.directions, fresh])
            order = self.factors.sparsity(pool).argsort(descending=True)
            self.directions = _unique(pool[order])[: 2 * self.factors.rank + 50]
            self._choose_basis()
        return self.progress > before + 1e-3

    def polish(self, candidates: Tensor) -> Tensor:
        """Return the new candidates, polished by `sphere.refine`."""
        known = self.directions
        same = SAME if self.factors.noisy else 0.999  # a false direction may be close to a true one
        fresh = _unique(torch.cat([known, candidates]), same)[len(known) :]
        return refine(self.factors.left, fresh, self._sparse, self.factors.noise)

    def _nearly_sparse(self, candidates: Tensor) -> Tensor:
        """Return the candidates that polishing may make sparse, sparsest first."""
        outputs = self.factors.outputs(candidates).abs()
        near = torch.maximum(
            1e-2 * outputs.amax(1, keepdim=True), self.factors.tolerance(candidates, outputs)
        )
        counts = (outputs <= near).sum(1)
        order = counts.argsort(descending=True)
        return candidates[order[counts[order] >= self._sparse]]

    def _choose_basis(self) -> None:
        chosen = initial_filter(self.directions)
        self.basis, self.solution = self.directions[chosen], None
        if len(chosen) == self.factors.rank:
            others = torch.ones(len(self.directions), dtype=torch.bool)
            others[chosen] = False
            self.basis, self.solution = greedy_filter(
                self.factors, self.basis, self.directions[others], self.enough
            )


def _unique(directions: Tensor, same: float = SAME) -> Tensor:
    """Return directions without repeats of an earlier one, up to sign."""
    repeats = ((directions @ directions.T).abs() > same).tril(-1).cpu().numpy()
    kept = np.zeros(len(repeats), dtype=bool)
    for index, row in enumerate(repeats):
        kept[index] = not (row & kept).any()
    return directions[torch.from_numpy(kept).to(directions.device)]


def is_exact(observation: Observation, factors: Factors) -> bool:
    """Return whether zeros of the gradient are exact.

    Noise blurs them. Over several local steps, some neurons switch on or off.
    """
    return observation.protocol.uploads_gradient and not factors.noisy


def no_guess(observation: Observation, layer: ReLULayer) -> Reconstruction:
    """Return a reconstruction without examples, for an update without information."""
    shape = observation.space.shape if layer.sees_inputs else layer.weight.shape[1:]
    inputs = layer.weight.new_zeros(0, *shape)
    name = None if layer.sees_inputs else layer.name
    return Reconstruction(
        inputs.detach(), objective=1.0, confidence=inputs.new_zeros(0), layer=name
    )


def reconstruction(observation: Observation, layer: ReLULayer, pool: Pool) -> Reconstruction:
    """Return the examples of the pool's basis, with missing directions filled in.

    The ReLU pattern hardly depends on an example's scale, which the bias gradient fixes. The
    agreement is therefore multiplied by the share of the bias gradient that fits the weights'
    gradient.
    """
    factors, found = pool.factors, len(pool.basis)
    solution = pool.solution
    if solution is None:
        filled = torch.cat([pool.basis, deflate(factors, pool.basis).basis])
        solution = solve(factors, filled)
    inputs = (solution.inverse[:found] @ factors.right).to(layer.weight.dtype)
    if layer.prefix is not None:
        inputs = layer.prefix.inputs(inputs)
    if layer.sees_inputs:
        inputs = observation.space.clamp(inputs.view(-1, *observation.space.shape))
    return Reconstruction(
        inputs=inputs,
        objective=1 - factors.explained * solution.coefficient,
        confidence=factors.explained * solution.agreement[:found],
        layer=None if layer.sees_inputs else layer.name,
    )
